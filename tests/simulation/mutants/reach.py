"""Which shapes reach the statements that a mutant changes: only those can show it.

The modules of all mutants are loaded with a probe before each statement that one of them changes,
the shapes are run, undisturbed and under faults, and the probes say which shape came by.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.simulation.mutants import overlay
from tests.simulation.mutants.mutant import ROOT, Mutant

PROBE = "_reached_by_a_simulation"
Place = tuple[str, int]
"""File and line of a statement."""


class Probes:
    """Hears which places the shape under way reaches."""

    def __init__(self) -> None:
        self._shape = ""
        self._reached: dict[Place, set[str]] = {}

    def plant(self, mutants: Sequence[Mutant], root: Path = ROOT) -> None:
        """Have the modules of ``mutants`` loaded with probes, in this process."""
        setattr(builtins, PROBE, self._reach)
        for file in sorted({mutant.file for mutant in mutants}):
            own = [mutant for mutant in mutants if mutant.file == file]
            source = (root / file).read_text(encoding="utf-8")
            lines = {line for mutant in own for line in changed_lines(mutant, source)}
            overlay.plant(own[0].module, probed(source, file, lines))

    def enter(self, shape: str) -> None:
        """A shape is going to run."""
        self._shape = shape

    def shapes(self, mutant: Mutant, root: Path = ROOT) -> frozenset[str]:
        """Returns the shapes that reach the rarest of a mutant's statements that any reaches."""
        source = (root / mutant.file).read_text(encoding="utf-8")
        places = [(mutant.file, line) for line in changed_lines(mutant, source)]
        found = [self._reached[place] for place in places if place in self._reached]
        return frozenset(min(found, key=len, default=()))

    def _reach(self, file: str, line: int) -> None:
        self._reached.setdefault((file, line), set()).add(self._shape)


def changed_lines(mutant: Mutant, source: str) -> tuple[int, ...]:
    """Returns the numbers of the lines that a mutant changes, from 1."""
    found: set[int] = set()
    for edit in mutant.edits:
        start = source.index(edit.old) if edit.start is None else edit.start
        text = edit.old.rstrip()
        first = source.count("\n", 0, start) + 1
        found.update(range(first, first + text.count("\n") + 1))
    return tuple(sorted(found))


def probed(source: str, file: str, lines: Iterable[int]) -> str:
    """Returns source with a probe before each statement of a function that begins in ``lines``, or
    whose first part goes on there.
    """
    tree, wanted = ast.parse(source), frozenset(lines)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(node):
                for name in ("body", "orelse", "finalbody"):
                    block = getattr(inner, name, None)
                    if isinstance(block, list) and not isinstance(inner, ast.ClassDef):
                        block[:] = _with_probes(block, file, wanted)
    return ast.unparse(ast.fix_missing_locations(tree))


def _with_probes(
    block: Sequence[ast.stmt], file: str, wanted: frozenset[int]
) -> Iterator[ast.stmt]:
    for statement in block:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        own = [line for line in _own_lines(statement) if line in wanted]
        if own and not is_text and not _is_probe(statement):
            for line in own:
                yield ast.parse(f"{PROBE}({file!r}, {line})").body[0]
        yield statement


def _own_lines(statement: ast.stmt) -> range:
    """Returns the lines of a statement that are not those of the statements in it."""
    inner = getattr(statement, "body", None)
    end = statement.end_lineno or statement.lineno
    if isinstance(inner, list) and inner:
        end = max(statement.lineno, inner[0].lineno - 1)
    return range(statement.lineno, end + 1)


def _is_probe(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Name)
        and statement.value.func.id == PROBE
    )
