"""Automatic mutants: one small change of the source each, drawn evenly over files from a seed.

Operators (:data:`OPERATORS`): an effect or a call dropped, two neighbours swapped, a bound moved, a
condition negated, half of a condition dropped, ``+ 1`` dropped. Left out is what changes no
behaviour that is promised: docstrings, assertions and invariants (``validate``), checks that only
raise, what is said, logged, counted, traced or shown.
"""

from __future__ import annotations

import ast
import tomllib
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.simulation.mutants.mutant import ROOT, Edit, Mutant, OutdatedError

EQUIVALENT = Path(__file__).parent / "equivalent.toml"
FILES = (
    "daemons/kit/loop.py",
    "daemons/kit/messages.py",
    "daemons/memory/effects.py",
    "daemons/memory/machine/machine.py",
    "daemons/mirror/machine/machine.py",
    "daemons/mirror/machine/replica.py",
    "daemons/memory/restore.py",
    "daemons/memory/server.py",
    "daemons/memory/service.py",
    "daemons/memory/pinning.py",
    "daemons/memory/saving.py",
    "daemons/memory/snapshot.py",
    "daemons/node/machine/budget.py",
    "daemons/node/machine/machine.py",
    "daemons/optimizer/effects.py",
    "daemons/optimizer/kernels.py",
    "daemons/optimizer/machine/arithmetic.py",
    "daemons/optimizer/machine/contributions.py",
    "daemons/optimizer/machine/epoch.py",
    "daemons/optimizer/machine/exact.py",
    "daemons/optimizer/machine/machine.py",
    "daemons/optimizer/machine/recovery.py",
    "daemons/optimizer/machine/steps.py",
    "daemons/optimizer/machine/words.py",
    "daemons/optimizer/pulls.py",
    "daemons/optimizer/service.py",
    "daemons/scheduler/effects.py",
    "daemons/scheduler/journal.py",
    "daemons/scheduler/machine/activities/activity.py",
    "daemons/scheduler/machine/node_loss.py",
    "daemons/scheduler/machine/activities/saves.py",
    "daemons/scheduler/machine/activities/barrier.py",
    "daemons/scheduler/machine/machine.py",
    "daemons/scheduler/machine/membership.py",
    "daemons/scheduler/machine/mirror.py",
    "daemons/scheduler/machine/position.py",
    "daemons/scheduler/machine/requests.py",
    "daemons/scheduler/machine/activities/evaluate_shutdown.py",
    "daemons/scheduler/machine/activities/save.py",
    "daemons/scheduler/machine/activities/transaction.py",
    "daemons/scheduler/metrics_file.py",
    "daemons/scheduler/saved.py",
    "protocol/wire/blocks.py",
    "protocol/wire/member.py",
    "shm/control.py",
    "workers/channels/inbox.py",
    "workers/channels/transport.py",
    "workers/epoch_builder.py",
    "workers/session.py",
    "workers/state/gradients.py",
    "workers/state/updates.py",
    "workers/state/weights.py",
    "workers/waiting.py",
)
"""The machines, what acts for them, and the code of wire and session."""

COUNT = 320
SEED = 16

UNPROMISED_FUNCTIONS = frozenset(
    """
    validate validate_slots status describe doing waits_for moved_by phase _state _absence
    _complaint _complain _why_hopeless _note_save _explained _waits _lost _unsettled
    _unpublished _slot_text _objection beat_of still_s fencing missing present _measure
    lines_after newest_line queue_length committed leases check_beside _too_small _describe _gib
    _foreign _with_cause huge_bytes stage_bytes coming_elements compare _dealer _router _bind
    _bind_tcp _bind_local _socket bounds_of _drop _say describe_exit _count_blocked _count_break
    go_back bid_farewell
    """.split()
)
"""Invariants, what is shown or said, tools, and options of sockets."""

UNPROMISED_WORDS = frozenset(
    """
    _log metrics _metrics trace _trace tally counters history account progress _progress timeline
    _times LogLine _say _complain costs reports message _tally hello _loaded _copied meter cause why
    gone_s _uncomplained _last_complaint_s _limiter _authenticator _access access refusal
    _pre_auth_reply_bytes _measure _count_blocked
    """.split()
)
"""Names that stand for logs, metrics, traces, status and guards against strangers."""

_MOVED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_SIGNS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


@dataclass(frozen=True, slots=True)
class _Change:
    """A possible change; ``node`` is what it is about."""

    operator: str
    node: ast.AST
    old: str
    new: str
    start: int


class _Source:
    """A module's text with its tree."""

    def __init__(self, file: str, root: Path) -> None:
        self.file = file
        self.text = (root / file).read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self._lines = [0]
        for line in self.text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.parents = {
            child: parent
            for parent in ast.walk(self.tree)
            for child in ast.iter_child_nodes(parent)
        }

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Returns where a node's text begins and ends."""
        assert isinstance(node, ast.stmt | ast.expr)
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._at(node.lineno, node.col_offset),
            self._at(node.end_lineno, node.end_col_offset),
        )

    def of(self, node: ast.AST) -> str:
        """Returns a node's text."""
        start, end = self.span(node)
        return self.text[start:end]

    def change(self, operator: str, node: ast.AST, new: str) -> _Change:
        """Returns the change of a node's text into ``new``."""
        start, end = self.span(node)
        return _Change(operator, node, self.text[start:end], new, start)

    def _at(self, line: int, column: int) -> int:
        """``column`` counts bytes, as the parser does."""
        start, end = self._lines[line - 1], self._lines[line]
        return start + len(self.text[start:end].encode()[:column].decode())

    def function_of(self, node: ast.AST) -> str:
        """Returns the name of the function that a node is in, behind those of its classes."""
        names: list[str] = []
        place: ast.AST | None = node
        while place is not None:
            if isinstance(place, ast.FunctionDef | ast.ClassDef):
                names.insert(0, place.name)
            place = self.parents.get(place)
        return ".".join(names)

    def is_promised(self, node: ast.AST) -> bool:
        """Returns whether a change of this node could break a promise."""
        place: ast.AST | None = node
        while place is not None:
            if isinstance(place, ast.Assert | ast.JoinedStr | ast.ExceptHandler):
                return False
            if isinstance(place, ast.stmt) and _is_said(place):
                return False
            if isinstance(place, ast.If) and all(map(_is_said, place.body)):
                return False
            if isinstance(place, ast.Call) and _names(place.func) & UNPROMISED_WORDS:
                return False
            if isinstance(place, ast.FunctionDef):
                if place.name in UNPROMISED_FUNCTIONS or place.name.startswith("__"):
                    return False
                return not _names(node) & UNPROMISED_WORDS
            place = self.parents.get(place)
        return False  # outside of functions: tables and constants


def _is_said(statement: ast.stmt) -> bool:
    """Returns whether a statement only raises, says or checks something."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return bool(_names(statement.value.func) & (UNPROMISED_WORDS | {"validate"}))
    return isinstance(statement, ast.Raise)


def _names(node: ast.AST) -> set[str]:
    found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _drops(source: _Source) -> Iterator[_Change]:
    """Calls that are statements, and members of lists of effects."""
    for node in ast.walk(source.tree):
        if _is_call(node):
            yield source.change("effect-dropped", node, "pass")
        if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Call | ast.List):
            yield source.change("effect-dropped", node, "pass")
        if isinstance(node, ast.List) and _is_returned(node, source):
            for item in node.elts:
                rest = [source.of(other) for other in node.elts if other is not item]
                yield source.change("effect-dropped", node, f"[{', '.join(rest)}]")


def _swaps(source: _Source) -> Iterator[_Change]:
    """Neighbours in lists of effects, and calls that follow each other."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.List) and _is_returned(node, source):
            texts = [source.of(item) for item in node.elts]
            for place in range(len(texts) - 1):
                swapped = [*texts]
                swapped[place], swapped[place + 1] = swapped[place + 1], swapped[place]
                yield source.change("effects-swapped", node, f"[{', '.join(swapped)}]")
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list):
                yield from _swapped_calls(body, source)


def _swapped_calls(body: list[ast.stmt], source: _Source) -> Iterator[_Change]:
    for one, other in pairwise(body):
        if _is_call(one) and _is_call(other) and _names(one) & _names(other):
            (start, end), (begin, stop) = source.span(one), source.span(other)
            between = source.text[end:begin]
            if not UNPROMISED_WORDS & _names(other):
                new = source.text[begin:stop] + between + source.text[start:end]
                yield _Change("effects-swapped", one, source.text[start:stop], new, start)


def _is_returned(node: ast.List, source: _Source) -> bool:
    """Returns whether a list is what a function returns, whole or in part."""
    place: ast.AST | None = node
    while isinstance(place := source.parents.get(place), ast.BinOp | ast.BoolOp | ast.IfExp):
        pass
    return isinstance(place, ast.Return) and bool(node.elts)


def _bounds(source: _Source) -> Iterator[_Change]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _MOVED:
            left, right = source.of(node.left), source.of(node.comparators[0])
            yield source.change("bound-moved", node, f"{left} {_MOVED[type(node.ops[0])]} {right}")


def _negations(source: _Source) -> Iterator[_Change]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.If | ast.IfExp):
            yield source.change("condition-negated", node.test, f"not ({source.of(node.test)})")


def _halves(source: _Source) -> Iterator[_Change]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.BoolOp) and not _has_walrus(node):
            for item in node.values:
                rest = [other for other in node.values if other is not item]
                joined = " and " if isinstance(node.op, ast.And) else " or "
                new = joined.join(source.of(other) for other in rest)
                yield source.change("guard-dropped", node, new if len(rest) == 1 else f"({new})")


def _has_walrus(node: ast.AST) -> bool:
    return any(isinstance(part, ast.NamedExpr) for part in ast.walk(node))


def _offsets(source: _Source) -> Iterator[_Change]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub):
            continue
        if isinstance(node.right, ast.Constant) and node.right.value == 1:
            yield source.change("offset-dropped", node, source.of(node.left))


OPERATORS = (_drops, _swaps, _bounds, _negations, _halves, _offsets)


def automatic_mutants(
    count: int = COUNT, seed: int = SEED, root: Path = ROOT, files: tuple[str, ...] = FILES
) -> tuple[Mutant, ...]:
    """Returns ``count`` mutants that follow from ``seed`` and the sources: by turns one of each
    file, until it has no more.
    """
    waiting = [_drawn(_Source(file, root), seed) for file in files]
    found: list[Mutant] = []
    while len(found) < count and any(waiting):
        for left in waiting:
            if left and len(found) < count:
                found.append(left.pop())
    return tuple(sorted(found, key=lambda mutant: (mutant.file, mutant.name)))


def equivalent_mutants(path: Path = EQUIVALENT) -> dict[str, str]:
    """Returns why a mutant changes nothing that is promised, by the mutant's name. A table each::

        ["daemons/kit/loop.py:Loop.feed bound-moved 03fa"]
        change = "old -> new"     what the mutant says of itself
        why = "One sentence."

    Raises:
        OutdatedError: no code can be changed so any more.
    """
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    files = tuple(sorted({name.partition(":")[0] for name in tables}))
    known = {mutant.name: mutant.wrong for mutant in automatic_mutants(1_000_000, files=files)}
    for name, fields in tables.items():
        if known.get(name) != fields["change"]:
            raise OutdatedError(f"{path.name}: {name} is not {fields['change']!r} any more")
    return {name: fields["why"] for name, fields in tables.items()}


def _drawn(source: _Source, seed: int) -> list[Mutant]:
    """All mutants of a file, operators by turns, as there are many more conditions than swaps. The
    order follows from ``seed`` and each mutant's name: when a function is edited, the mutants of
    others stay the same.
    """
    by_operator: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in _mutants(source):
        by_operator[mutant.origin].append(mutant)

    def place(text: str) -> int:
        return zlib.crc32(f"{seed} {text}".encode())

    mutants: list[Mutant] = []
    for changes in by_operator.values():
        changes.sort(key=lambda mutant: place(mutant.name))
    while left := [name for name, changes in by_operator.items() if changes]:
        left.sort(key=lambda name: place(f"{source.file} {len(mutants)} {name}"))
        mutants += [by_operator[name].pop() for name in left]
    return mutants[::-1]


def _mutants(source: _Source) -> Iterator[Mutant]:
    """Names tell apart what is changed alike in one function, and know no line numbers."""
    seen: Counter[str] = Counter()
    for operator in OPERATORS:
        for change in operator(source):
            if not source.is_promised(change.node) or change.old == change.new:
                continue
            text, becomes = (" ".join(side.split()) for side in (change.old, change.new))
            place = f"{source.file}:{source.function_of(change.node)} {change.operator}"
            what = f"{place} {text} -> {becomes}"
            mark = zlib.crc32(f"{what} {seen[what]}".encode()) & 0xFFFF
            seen[what] += 1
            yield Mutant(
                name=f"{place} {mark:04x}",
                file=source.file,
                origin=change.operator,
                wrong=f"{text} -> {becomes}",
                edits=(Edit(old=change.old, new=change.new, start=change.start),),
            )
