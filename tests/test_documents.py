"""The documents for people: lines that wrap, paths and links that lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GENERATED = {"PAPERS.md", "STATES.md"}
"""Written by ``make papers`` and ``make docs``, with tables of many columns."""
FOLDERS = (
    "bench|chaos|client|config|daemons|docs|examples|grafana|host|models|native|planner|protocol|shm|src"
    "|tests|workers"
)
LONGEST, LONGEST_IN_TABLES = 110, 150


def document_name(path: Path) -> str:
    """Returns the path of a document in the repository."""
    return path.relative_to(ROOT).as_posix()


def lines_of_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines outside of examples, with their numbers."""
    inside = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            yield number, line


@pytest.mark.parametrize("path", DOCUMENTS, ids=document_name)
def test_lines_wrap(path: Path) -> None:
    if path.name in GENERATED:
        pytest.skip("its tables are generated")
    long = [
        f"{path.name}:{number}: {len(line)} letters"
        for number, line in lines_of_prose(path)
        if len(line) > (LONGEST_IN_TABLES if line.startswith("|") else LONGEST)
    ]
    assert not long, long


@pytest.mark.parametrize("path", DOCUMENTS, ids=document_name)
def test_paths_and_links_lead_somewhere(path: Path) -> None:
    lost = []
    for number, line in lines_of_prose(path):
        # A path alone on a line is a file that a recipe writes; tests/test_extending.py does it.
        named = re.findall(rf"(?!^)`((?:{FOLDERS})/[\w/.-]*)`", line)
        lost += [f"{path.name}:{number}: {name}" for name in named if not (ROOT / name).exists()]
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", line):
            if not (path.parent / target).exists():
                lost.append(f"{path.name}:{number}: {target}")
    assert not lost, lost


def test_the_site_lists_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r": ([\w/]+\.md)$", text, re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages == set(listed) - {"index.md", "CONTRIBUTING.md", "CHANGELOG.md"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=document_name)
def test_comments_stand_above_their_commands(path: Path) -> None:
    """A comment behind a command is the part that a narrow window hides."""
    if path.name == "EXTENDING.md":
        pytest.skip("its blocks are parts of files")
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```(?:sh|yaml|)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert [line for line in lines if re.search(r"\S\s+# \S", line)] == []
