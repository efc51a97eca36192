"""Hooks of mkdocs (``mkdocs.yml``): pages from outside ``docs/``, and links that leave the site.

The README becomes the first page; CONTRIBUTING and CHANGELOG become pages, too. A link to another
file of the repository, such as an example, becomes its text, since the site has no such file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Files at the top of the repository, and their places in the site."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)((?:#[^)\s]*)?)\)")


class GitHubLists(Extension):
    """Nested lists with an indent of two or three columns, as GitHub renders them."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Sets the indent of a nested block."""
        md.tab_length = 2


def on_config(config: Any) -> Any:
    """Adds the extension, which has no name that ``mkdocs.yml`` could give."""
    config.markdown_extensions.append(GitHubLists())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from the top of the repository."""
    for name, place in PAGES.items():
        text = relinked((ROOT / name).read_text(encoding="utf-8"), "", "")
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Returns a page of ``docs/`` with links that lead somewhere in the site."""
    place = page.file.src_uri
    if place in PAGES.values():
        return markdown
    folder = posixpath.dirname(place)
    return relinked(markdown, posixpath.join("docs", folder), folder)


def relinked(text: str, folder: str, place: str) -> str:
    """Returns a text with the links of a file in ``folder`` as links of a page in ``place``."""

    def link(found: re.Match[str]) -> str:
        image, label, target, anchor = found.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in PAGES:
            page = PAGES[path]
        elif path.startswith("docs/"):
            page = path.removeprefix("docs/")
        else:
            return found[0] if image else label
        return f"{image}[{label}]({posixpath.relpath(page, place or '.')}{anchor})"

    return LINK.sub(link, text)
