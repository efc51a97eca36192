"""The command ``docs``: the pages of ``docs/``, which the package has without pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import penstock
from penstock.client.cli import errors_explained
from penstock.host.errors import ConfigError

FOLDER = Path(penstock.__file__).parent / "docs"
"""Folder of the pages: in a checkout a link to the folder of the sources."""
_HEADING = re.compile(r"(#+) +(.*)")


def docs(
    page: Annotated[
        str | None,
        typer.Argument(
            metavar="[PAGE]",
            help="Page, such as FINETUNE, or a section, such as RUNBOOK#penstockstuck. Paths"
            " that alerts show, with docs/ and .md, are accepted, too. Default: the list of pages.",
        ),
    ] = None,
) -> None:
    """Prints a page of the documentation, or the list of pages."""
    with errors_explained():
        text = _contents() if page is None else text_of(page)
    typer.echo(text)


def text_of(reference: str) -> str:
    """Returns the text of a page or of a section, such as ``docs/RUNBOOK.md#penstockstuck``.

    Raises:
        ConfigError: the page or the section does not exist; names those that do.
    """
    name, _, anchor = reference.partition("#")
    name = name.removeprefix("docs/").removesuffix(".md")
    paths = {_name(path).lower(): path for path in _paths()}
    path = paths.get(name.lower())
    if path is None:
        names = ", ".join(map(_name, paths.values()))
        raise ConfigError(f"docs {reference}: there is no page {name!r}; pages: {names}")
    lines = path.read_text(encoding="utf-8").rstrip().splitlines()
    if not anchor:
        return "\n".join(lines)
    headings = list(_headings(lines))
    for index, level, title in headings:
        if _slug(title) == anchor.lower():
            later = (other for other, depth, _ in headings if other > index and depth <= level)
            return "\n".join(lines[index : next(later, len(lines))]).rstrip()
    sections = ", ".join(_slug(title) for _, _, title in headings)
    raise ConfigError(
        f"docs {reference}: {_name(path)} has no section {anchor!r}; sections: {sections}"
    )


def _contents() -> str:
    """Returns a line for each page, with its title, and the folder of the pages."""
    titles = {}
    for path in _paths():
        lines = path.read_text(encoding="utf-8").splitlines()
        titles[_name(path)] = next((title for _, _, title in _headings(lines)), "")
    width = max(map(len, titles), default=0)
    rows = [f"{name.ljust(width)}  {title}" for name, title in titles.items()]
    return "\n".join([*rows, "", f"penstock docs PAGE prints a page. Files: {FOLDER}"])


def _paths() -> list[Path]:
    """Returns the pages for users, then those of evidence.

    Raises:
        ConfigError: this installation has no pages.
    """
    paths = sorted(FOLDER.glob("*.md")) + sorted(FOLDER.glob("evidence/*.md"))
    if not paths:
        raise ConfigError(f"docs: {FOLDER} has no pages; install Penstock again")
    return paths


def _name(path: Path) -> str:
    return path.relative_to(FOLDER).with_suffix("").as_posix()


def _headings(lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """Yields index, level and title of the headings, without those in blocks of code."""
    code = False
    for index, line in enumerate(lines):
        code ^= line.lstrip().startswith("```")
        if not code and (match := _HEADING.fullmatch(line)):
            yield index, len(match[1]), match[2]


def _slug(title: str) -> str:
    """Returns the anchor of a heading, as links between the pages write it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def register(app: typer.Typer) -> None:
    """Adds the command to ``penstock``."""
    app.command(epilog="Examples: penstock docs FINETUNE; penstock docs PROMISES | less")(docs)
