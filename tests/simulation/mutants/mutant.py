"""A fault as a value: which text of which file becomes which.

Named mutants are in ``planted/*.toml``, and those of kinds that the simulation once overlooked in
``kinds/*.toml``, those held out for one trial in ``held_out/*.toml``, one table each::

    [announces-before-the-journal]
    file = "daemons/scheduler/machine/activities/transaction.py"
    origin = "protocol"         a promise broken, or the commit that mended the fault
    wrong = "What goes wrong."  one sentence
    old = '''…'''               exact text, found once in the file
    new = '''…'''
    also = [["old", "new"]]     more of the same, where one place is not enough

Texts are exact, so that a mutant survives lines that move, and says so when its line has changed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PLANTED = Path(__file__).parent / "planted"
KINDS = Path(__file__).parent / "kinds"
HELD_OUT = Path(__file__).parent / "held_out"
PACKAGE = "penstock"
OF_THE_PROTOCOL = "protocol"


class OutdatedError(Exception):
    """A mutant's text is not in its file exactly once: the code has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """``old`` becomes ``new``; ``start``: where ``old`` is, None where it is the only one."""

    old: str
    new: str
    start: int | None = None

    def apply(self, source: str, where: str) -> str:
        """Returns the edited source.

        Raises:
            OutdatedError: naming ``where``.
        """
        if self.start is not None:
            end = self.start + len(self.old)
            if source[self.start : end] != self.old:
                raise OutdatedError(f"{where}: {self.old!r} is not at {self.start}")
            return source[: self.start] + self.new + source[end:]
        count = source.count(self.old)
        if count != 1:
            raise OutdatedError(f"{where}: found {count} times, must be once: {self.old!r}")
        return source.replace(self.old, self.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault of one module. ``origin``: :data:`OF_THE_PROTOCOL`, a commit, or the operator that
    made an automatic one; ``wrong``: what goes wrong by it.
    """

    name: str
    file: str
    origin: str
    wrong: str
    edits: tuple[Edit, ...]

    @property
    def module(self) -> str:
        """The module's import name."""
        return f"{PACKAGE}.{self.file.removesuffix('.py').replace('/', '.')}"

    def source(self, root: Path = ROOT) -> str:
        """Returns the module's source with the fault in it.

        Raises:
            OutdatedError: its text is not there any more.
            SyntaxError: the result is no Python.
        """
        source = (root / self.file).read_text(encoding="utf-8")
        for edit in self.edits:
            source = edit.apply(source, f"{self.name} ({self.file})")
        compile(source, self.file, "exec")
        return source


def named_mutants(folder: Path = PLANTED) -> tuple[Mutant, ...]:
    """Returns the planted faults, by file and in its order.

    Raises:
        ValueError: two have one name.
    """
    found: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.toml")):
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        for name, fields in tables.items():
            if name in found:
                raise ValueError(f"{path}: {name} is there already")
            found[name] = _mutant(name, fields)
    return tuple(found.values())


def _mutant(name: str, fields: dict[str, Any]) -> Mutant:
    pairs: Sequence[Sequence[str]] = [[fields["old"], fields["new"]], *fields.get("also", ())]
    return Mutant(
        name=name,
        file=fields["file"],
        origin=fields["origin"],
        wrong=fields["wrong"],
        edits=tuple(Edit(old=old, new=new) for old, new in pairs),
    )
