"""``python -m bench.gpu page [DIR...] [-o docs/evidence/GPU.md] [--keep]``: the page from results.

Results that are kept, in ``bench/gpu/found``, are always on it, but for those of a trial, which
stand alone; ``--keep`` adds those of the folders to them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.gpu.page.goals import GOALS, Results
from bench.gpu.page.sections import SECTIONS
from bench.gpu.page.tables import wrapped
from bench.gpu.parts import PARTS
from bench.gpu.results import PartResults, merged, read_folders

KEPT = Path(__file__).parents[1] / "found"
HEAD = Path(__file__).with_name("head.md")


def page(results: Results) -> str:
    """Returns the page."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Results) -> Iterator[str]:
    yield from HEAD.read_text(encoding="utf-8").rstrip().splitlines()
    yield ""
    yield "## Goals"
    yield ""
    if any(is_trial(one) for one in results.values()):
        yield "**These are of a trial, at toy size or without a GPU: the figures mean nothing.**"
        yield ""
    gpus = sorted({one.gpu for one in results.values() if one.gpu})
    yield f"On {' and '.join(gpus)}." if gpus else "No GPU was at hand so far."
    yield ""
    yield "| goal | found | reached |"
    yield "| --- | --- | --- |"
    for goal in GOALS:
        found = goal.find(results)
        words = "not measured yet | " if found is None else f"{found.text} | {_yes(found.reached)}"
        yield f"| {goal.text} | {words} |"
    for name in PARTS:
        section = SECTIONS[name]
        yield ""
        yield f"## {section.title}"
        yield ""
        yield from wrapped(section.about)
        yield ""
        lines = list(section.show(results.get(name)))
        while lines and not lines[-1]:
            lines.pop()
        yield from (
            line for line, before in zip(lines, ["", *lines], strict=False) if line or before
        )


def is_trial(results: PartResults) -> bool:
    """Returns whether figures only show that the code runs."""
    return results.tiny or results.device != "cuda"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu page")
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR")
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/evidence/GPU.md"))
    parser.add_argument("--keep", action="store_true", help="add what they have to what is kept")
    options = parser.parse_args(arguments)
    try:
        given = read_folders(options.folders)
        kept = read_folders([KEPT])
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    trials = [one.part for one in given.values() if is_trial(one)]
    results = given if trials else merged([*kept.values(), *given.values()])
    if options.keep and trials:
        sys.stderr.write(f"{', '.join(trials)}: a trial (toy size, or no GPU) is not kept\n")
        return 2
    if options.keep:
        KEPT.mkdir(exist_ok=True)
        for one in results.values():
            one.without_logs().write(KEPT)
    options.out.write_text(page(results), encoding="utf-8")
    return 0
