"""``penstock docs``: the pages of the package, and references to pages in what users see."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock.client.commands.pages import text_of
from penstock.client.main import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PRODUCT = (
    "chaos",
    "client",
    "config",
    "daemons",
    "host",
    "models",
    "planner",
    "protocol",
    "workers",
)
FILES = ("grafana", "deploy", "examples")
"""Folders with files that ``deploy`` and ``init`` hand to users."""
REFERENCE = re.compile(r"penstock docs (?!PAGE)([A-Z][\w/]+)|\b(docs/[\w/]+\.md(?:#[\w-]+)?)")


def shown(*words: str) -> Result:
    """Returns the outcome of ``penstock docs``."""
    return CliRunner().invoke(app, ["docs", *words])


def test_the_list_has_every_page_with_its_title() -> None:
    lines = shown().stdout.splitlines()
    pages = sorted(DOCS.glob("*.md")) + sorted(DOCS.glob("evidence/*.md"))
    names = [page.relative_to(DOCS).with_suffix("").as_posix() for page in pages]
    assert [line.split()[0] for line in lines[: len(names)]] == names
    assert [line for line in lines[: len(names)] if len(line.split()) == 1] == []
    folder = re.fullmatch(r"penstock docs PAGE prints a page\. Files: (.*)", lines[-1])
    assert folder is not None and Path(folder[1]).resolve() == DOCS


@pytest.mark.parametrize("name", ["FINETUNE", "finetune", "FINETUNE.md", "docs/FINETUNE.md"])
def test_a_page_is_printed_by_name_or_path(name: str) -> None:
    done = shown(name)
    assert done.exit_code == 0
    assert done.stdout == (DOCS / "FINETUNE.md").read_text(encoding="utf-8")


def test_a_section_ends_before_the_next_one_and_skips_comments_of_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "# A\n\n## B `c`, d\n\n```\n# e\n## b-c-d\n```\n\n### f\n\n## G\n"
    (tmp_path / "A.md").write_text(page)
    monkeypatch.setattr("penstock.client.commands.pages.FOLDER", tmp_path)
    assert text_of("A#b-c-d") == "## B `c`, d\n\n```\n# e\n## b-c-d\n```\n\n### f"
    assert text_of("A#f") == "### f"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("FINETUNES", ("'FINETUNES'", "FINETUNE, FUZZING", "evidence/GPU")),
        ("../README", ("'../README'", "pages: ARCHITECTURE")),
        ("RUNBOOK#nothing", ("RUNBOOK has no section 'nothing'", "penstockstuck")),
    ],
)
def test_pages_that_do_not_exist(name: str, words: tuple[str, ...]) -> None:
    done = shown(name)
    assert done.exit_code == 2 and done.stderr.startswith("penstock: docs ")
    assert [word for word in words if word not in done.stderr] == []


def test_an_installation_without_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.client.commands.pages.FOLDER", tmp_path)
    assert shown().exit_code == 2 and f"{tmp_path} has no pages" in shown().stderr


def texts() -> Iterator[tuple[str, str]]:
    """Yields place and text of every string of the product, without docstrings, and of every file
    that users get.
    """
    for path in (path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))):
        source = path.read_text(encoding="utf-8")
        if REFERENCE.search(source) is None:
            continue
        tree = ast.parse(source)
        prose = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and id(node) not in prose:
                if isinstance(node.value, str):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
    for path in (path for folder in FILES for path in sorted((ROOT / folder).rglob("*"))):
        if path.is_file() and path.suffix not in (".py", ".pyc", ".parquet"):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_references_for_users_name_pages_of_the_package() -> None:
    """Only an alert's ``runbook_url`` is a path, since dashboards show it as a link."""
    wrong, seen = [], 0
    for place, text in texts():
        for page, path in REFERENCE.findall(text):
            seen += 1
            text_of(page or path)
            if path and f"runbook_url: {path}" not in text:
                wrong.append(f"{place}: {path}; write: penstock docs {Path(path).stem}")
    assert not wrong, wrong
    assert seen > 30
