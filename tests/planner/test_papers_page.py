"""The page of the papers: how tables become Markdown, and what happens when a paper is missing."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.papers import __main__ as command
from bench.papers.page import (
    PAPERS,
    PICTURES,
    Paper,
    PaperSection,
    PaperTable,
    page,
    schemes_table,
    section_text,
    table,
)
from penstock.planner.schemes import SCHEMES

TABLE = PaperTable(
    title="Bubbles",
    text="Section 3, figure 2.",
    columns=("N", "paper", "ours"),
    rows=(("2", "1/3", "0.333"), ("16", "a | b", "0.5")),
)

PAPER = Paper(name="2BP: two", title="Two steps")

MARKDOWN = """\
### Bubbles

Section 3, figure 2.

| N  | paper  | ours  |
| -- | ------ | ----- |
| 2  | 1/3    | 0.333 |
| 16 | a \\| b | 0.5   |
"""


DOCUMENT = Path(__file__).parents[2] / "docs" / "evidence" / "PAPERS.md"
SLOW = ("obscura", "spipe")
"""Papers whose page takes long to compute: its numbers are tested with them."""

STALE = "docs/evidence/PAPERS.md is stale: run `make papers`, and look at what changed"


def test_a_table_is_aligned_markdown() -> None:
    assert table(TABLE) == MARKDOWN


def test_the_page_has_contents_sections_and_pictures() -> None:
    text = page([PaperSection(paper=PAPER, tables=(TABLE,))], TABLE, PICTURES[:1])
    assert text.startswith("# The papers' numbers beside ours\n")
    assert "\n* [2BP: two](#2bp-two)\n* [Schemes](#schemes)\n" in text
    assert f"\n## 2BP: two\n\n*Two steps*\n\n{MARKDOWN}\n## Schemes\n\n{MARKDOWN}" in text
    assert text.endswith("## Pictures\n\n![1F1B](pictures/papers/1f1b.svg)\n")


def test_long_texts_are_wrapped() -> None:
    text = table(PaperTable(title="t", text="word " * 60, columns=("a",), rows=()))
    assert max(map(len, text.splitlines())) <= 100


def test_every_scheme_has_a_row_with_figures() -> None:
    rows = {row[0]: row[1:] for row in schemes_table().rows}
    assert list(rows) == list(SCHEMES)
    assert rows["1f1b"] == ("4", "none", "33", "33", "27.3%", "4")
    assert rows["gpipe"][-1] == "8" and rows["chimera"][2] == "30"
    assert [name for name, row in rows.items() if "" in row] == []


def test_pictures_are_what_their_captions_say() -> None:
    makespans = {picture.name: picture.simulate().makespan_s for picture in PICTURES}
    assert makespans == {
        "1f1b": 21.0,
        "mario": 22.0,
        "2bp": 15.0,
        "chimera": 16.0,
        "zb-v": 51.0,
        "mobius": 33.0,
        "spipe": 27.0,
    }


def test_missing_papers_are_named_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(name: str) -> SimpleNamespace:
        if name.endswith("mario"):
            return SimpleNamespace(tables=lambda: (TABLE,))
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(command, "import_module", find)
    monkeypatch.setattr(command, "PAPERS", {"mario": PAPER, "other": PAPER})
    out = tmp_path / "docs" / "PAPERS.md"
    out.parent.mkdir()
    assert command.main([str(out)]) == 1
    assert "not on the page: other: ModuleNotFoundError" in capsys.readouterr().err
    assert MARKDOWN in out.read_text()
    assert {path.stem for path in (out.parent / "pictures" / "papers").iterdir()} == {
        picture.name for picture in PICTURES
    }
    monkeypatch.setattr(command, "PAPERS", {"mario": PAPER})
    assert command.main([str(out)]) == 0
    assert command.main([]) == 2


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in PAPERS],
)
def test_the_documents_numbers_are_those_computed_now(name: str) -> None:
    """Every number of the paper's section: whoever changes one, changes the document."""
    tables = import_module(f"bench.papers.{name}").tables()
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    text = section_text(PaperSection(paper=PAPERS[name], tables=tables))
    assert f"\n{text}" in DOCUMENT.read_text(encoding="utf-8"), STALE


def test_the_rest_of_the_document_is_what_is_written_now() -> None:
    """All but the numbers of the papers: head, contents, schemes, pictures, and nothing else."""
    sections = [PaperSection(paper=paper, tables=()) for paper in PAPERS.values()]
    parts = DOCUMENT.read_text(encoding="utf-8").split("\n## ")
    for index, paper in enumerate(PAPERS.values(), start=1):
        assert parts[index].startswith(f"{paper.name}\n"), STALE
        parts[index], _, _ = parts[index].partition("### ")
    assert "\n## ".join(parts) == page(sections, schemes_table(), PICTURES), STALE
    folder = DOCUMENT.parent / "pictures" / "papers"
    drawn = {file.stem: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    assert drawn == {picture.name: picture.svg() for picture in PICTURES}, STALE
