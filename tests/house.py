"""The house in numbers: prints today's figures beside the goals of the redesign.

``python -m tests.house`` prints a Markdown table. Not counted here: the planner's folders, floors
and arrows, the scheduler's rooms, and a configuration's way from ``run_training``; these figures
follow from a design, or need a traced run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.test_architecture import FLOORS, floor, imports_between_files
from tests.test_documents import DOCUMENTS, GENERATED
from tests.tidy import DOCSTRINGS, FRAGMENTS, PRODUCT, ROOT, Kind, Text, files, opening, texts

SHORT_FILE_LINES = 60
OPENINGS = frozenset("What Whether Who Where Whom Whose".split())
PRONOUNS = re.compile(r"\b(?:who|whoever|whose|nobody|somebody)\b", re.IGNORECASE)
LOCALS = frozenset("found said told asked".split())
ALL_GENERATED = GENERATED | {"COMMANDS.md", "CONFIGURATION.md", "METRICS.md", "STATES.md"}
"""Names of the pages that ``make docs`` and ``make papers`` write."""
EVIDENCE = ROOT / "docs" / "evidence"


def sources() -> Mapping[Path, str]:
    """Reads the Python files of the product, without generated ones."""
    return {path: path.read_text(encoding="utf-8") for path in files(PRODUCT)}


def upward_imports(package: str) -> list[str]:
    """Returns the pairs of a package's folders with an import that does not point down.

    A folder lies on the floor that ``FLOORS`` gives the folder as a whole, also where a part of the
    folder has a floor of its own. A file beside the folders counts as a folder.
    """
    pairs = set()
    for module, imports in imports_between_files().items():
        for other in imports:
            if module.split(".")[0] == other.split(".")[0] == package:
                (floor_of_this, this), (floor_of_other, that) = folder(module), folder(other)
                if this != that and floor_of_other >= floor_of_this:
                    pairs.add(f"{this} -> {that}")
    return sorted(pairs)


def folder(module: str) -> tuple[int, str]:
    """Returns the floor and the name of the folder that holds a module."""
    package, _, name = module.partition(".")
    top = name.partition(".")[0]
    whole = top in FLOORS[package].split()
    return (floor(f"{package}.{top}")[0] if whole else floor(module)[0]), top


def count(all_texts: list[Text], kinds: frozenset[Kind], words: frozenset[str]) -> int:
    """Counts docstrings of some kinds that open with one of the words."""
    return sum(text.kind in kinds and opening(text) in words for text in all_texts)


def words_of(paths: list[Path]) -> int:
    """Counts the words of documents."""
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def rows() -> Iterator[tuple[str, str, str]]:
    """Yields name, figure and goal of each row."""
    product = sources()
    lines = {path: len(text.splitlines()) for path, text in product.items()}
    short = sum(number < SHORT_FILE_LINES for number in lines.values())
    yield "product: lines of Python", f"{sum(lines.values()):,}", "<= 90,000"
    yield "product: files", str(len(lines)), "<= 480"
    yield f"product: files under {SHORT_FILE_LINES} lines", str(short), "<= 45"
    for package in ("planner", "workers", "protocol", "models"):
        yield f"{package}: pairs of folders that import up", str(len(upward_imports(package))), "0"
    pronouns = sum(len(PRONOUNS.findall(text)) for text in product.values())
    yield "words who, whoever, whose, nobody, somebody", str(pronouns), "<= 100"
    all_texts = [text for source in product.values() for text in texts(source)]
    of_nodes = DOCSTRINGS - {Kind.FIELD}
    for name, words, goal in (("What ... Whose", OPENINGS, 20), ("Of ... Beside", FRAGMENTS, 10)):
        yield (
            f"docstrings that open with {name}",
            str(count(all_texts, of_nodes, words)),
            f"<= {goal}",
        )
        yield "the same, with fields", str(count(all_texts, DOCSTRINGS, words)), ""
    nouns = sum(text.kind == Kind.LOCAL and text.words in LOCALS for text in all_texts)
    yield "locals found, said, told, asked", str(nouns), "<= 20"
    readme, internals = ROOT / "README.md", ROOT / "docs" / "INTERNALS.md"
    yield "README: lines", str(len(readme.read_text(encoding="utf-8").splitlines())), "<= 150"
    yield "INTERNALS: words", f"{words_of([internals]):,}", "<= 4,000"
    written = [path for path in DOCUMENTS if path.name not in ALL_GENERATED]
    pages = [path for path in written if path.parent not in (ROOT, EVIDENCE)]
    yield "docs: words outside evidence and generated pages", f"{words_of(pages):,}", "<= 45,000"


def main() -> None:
    """Prints the table."""
    sys.stdout.write("| what | today | goal |\n| --- | --- | --- |\n")
    sys.stdout.writelines(f"| {name} | {today} | {goal} |\n" for name, today, goal in rows())
    for package in ("planner", "workers", "protocol", "models"):
        sys.stdout.write(f"\n{package}: {', '.join(upward_imports(package)) or 'none'}\n")


if __name__ == "__main__":
    main()
