"""Hooks of mkdocs (``mkdocs.yml``): pages from outside ``docs/``, and links that leave the site.

The README becomes the first page; CONTRIBUTING and CHANGELOG become pages, too. A link to another
file of the repository, such as an example, becomes its text, since the site has no such file.
"""

from __future__ import annotations

import posixpath
import re
from html import unescape
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
PICTURE = re.compile(r'<div class="language-text highlight">(.*?)</div>', re.DOTALL)
CODE = re.compile(r"(?<=<code>).*?(?=</code>)", re.DOTALL)
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
CELL_PADDING = 2
"""Letters of space at both sides of a cell."""
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


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Returns a page with the widths of its text pictures and tables, in letters.

    ``site.css`` shrinks letters where the window is narrower.
    """
    html = PICTURE.sub(lambda found: _with_width(found[0], _columns(found[1])), html)
    return TABLE.sub(lambda found: _table(found[0]), html)


def _table(table: str) -> str:
    """Returns a table with its width. Names in code wrap behind dots and other marks."""
    table = CODE.sub(lambda found: re.sub(r"([./_=:,-])(?=[\w/])", r"\1<wbr>", found[0]), table)
    return _with_width(table, _letters(table))


def _with_width(element: str, letters: int) -> str:
    name = element[1:].split(maxsplit=1)[0].split(">")[0]
    return element.replace(f"<{name}", f'<{name} style="--letters: {letters}"', 1)


def _columns(picture: str) -> int:
    """Returns the length of the longest line of a text picture."""
    return max(map(len, _text(picture).splitlines()), default=1)


def _letters(table: str) -> int:
    """Returns the letters side by side if each column is as wide as its longest word."""
    longest: dict[int, int] = {}
    for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL):
        for column, cell in enumerate(re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)):
            words = re.findall(r"[^\s-]+-?", _text(cell.replace("<wbr>", " ")))
            longest[column] = max(longest.get(column, 1), max(map(len, words), default=1))
    return sum(longest.values()) + CELL_PADDING * len(longest)


def _text(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", html))


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
