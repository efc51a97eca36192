"""Programs as columns of numbers, so that the simulator works on arrays and not on objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.plan.instructions import INSTRUCTIONS, Instruction, Program, Update
from penstock.protocol.plan.semantics import COMPUTES

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

CODES = {cls: code for code, cls in enumerate(INSTRUCTIONS)}


def bytes_of(arrays: Any) -> int:
    """Memory of the arrays among the fields of a dataclass."""
    values = (getattr(arrays, field.name) for field in fields(arrays))
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Columns:
    """All instructions of all devices, one after the other; a **row** is a place in that list.

    ``codes``: see :data:`CODES`; ``devices``: who runs it; ``starts[d]``: first row of device d.
    ``stages`` (of an Update: its block) and ``micro_batches`` (-1: none, or several).
    """

    instructions: NDArray[np.object_]
    codes: NDArray[np.int8]
    devices: Ints
    starts: Ints
    stages: Ints
    micro_batches: Ints

    @classmethod
    def of(cls, programs: tuple[Program, ...]) -> Columns:
        """Every instruction is looked at once for its type, and once for each of its numbers."""
        lengths = np.array([len(program) for program in programs], dtype=np.int64)
        flat = list(chain.from_iterable(programs))
        codes = np.fromiter(map(CODES.__getitem__, map(type, flat)), np.int8, len(flat))
        columns = cls(
            instructions=np.fromiter(flat, np.object_, len(flat)),
            codes=codes,
            devices=np.repeat(np.arange(len(programs), dtype=np.int64), lengths),
            starts=np.concatenate(([0], np.cumsum(lengths)[:-1])),
            stages=np.empty(len(flat), dtype=np.int64),
            micro_batches=np.full(len(flat), -1, dtype=np.int64),
        )
        for kind in INSTRUCTIONS:
            rows = columns.rows(kind)
            if len(rows):
                columns.stages[rows] = columns.numbers(rows, "block" if kind is Update else "stage")
                if hasattr(kind, "micro_batch"):
                    columns.micro_batches[rows] = columns.numbers(rows, "micro_batch")
        return columns

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return bytes_of(self)

    def rows(self, *kinds: type[Instruction]) -> Ints:
        """Rows of these instructions, ascending."""
        found = [self._rows_by_code[CODES[kind]] for kind in kinds]
        return found[0] if len(found) == 1 else np.sort(np.concatenate(found), kind="stable")

    @cached_property
    def _rows_by_code(self) -> list[Ints]:
        order = np.argsort(self.codes, kind="stable")
        counts = np.bincount(self.codes, minlength=len(INSTRUCTIONS))
        return np.split(order, np.cumsum(counts)[:-1])

    def at(self, rows: Ints) -> Iterable[Any]:
        """The instructions of rows."""
        found: list[Any] = self.instructions[rows].tolist()
        return found

    def numbers(self, rows: Ints, field: str) -> Ints:
        """A field of the instructions of rows."""
        return self.map(rows, attrgetter(field))

    def map(self, rows: Ints, function: Callable[[Any], int]) -> Ints:
        """A number for the instruction of each row."""
        return np.fromiter(map(function, self.at(rows)), np.int64, len(rows))

    @cached_property
    def computes(self) -> Ints:
        """Rows of what occupies the compute stream."""
        return self.rows(*COMPUTES)

    @cached_property
    def _computes_before(self) -> Ints:
        """Of each row, compute instructions in all rows up to it, itself included."""
        counted = np.zeros(len(self.codes), dtype=np.int64)
        counted[self.computes] = 1
        return np.cumsum(counted)

    def issued_after(self, rows: Ints) -> Ints:
        """Index into :attr:`computes` of the last one before each row on its device; -1: none."""
        before = self._computes_before
        firsts = self.starts[self.devices[rows]]
        earlier = np.where(firsts > 0, before[firsts - 1], 0)
        index = before[rows] - 1
        return np.where(index >= earlier, index, -1)

    def position(self, row: int) -> int:
        """Where an instruction is in the program of its device."""
        return row - int(self.starts[self.devices[row]])
