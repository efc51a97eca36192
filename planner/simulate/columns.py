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
    """Returns the bytes of all arrays among the fields of a dataclass."""
    values = (getattr(arrays, field.name) for field in fields(arrays))
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Columns:
    """All instructions of all devices, one after the other; a **row** is a place in that list.

    ``codes``: see :data:`CODES`; ``devices``: the device of each row; ``starts[d]``: first row of
    device d. ``stages`` (of an Update: its block) and ``micro_batches`` (-1: none, or several).
    """

    instructions: NDArray[np.object_]
    codes: NDArray[np.int8]
    devices: Ints
    starts: Ints
    stages: Ints
    micro_batches: Ints

    @classmethod
    def of(cls, programs: tuple[Program, ...]) -> Columns:
        """Reads programs; visits each instruction once for its type and each of its numbers."""
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
        """The bytes of all arrays."""
        return bytes_of(self)

    def rows(self, *kinds: type[Instruction]) -> Ints:
        """Returns the rows of instructions of these classes, ascending."""
        by_kind = [self._rows_by_code[CODES[kind]] for kind in kinds]
        return by_kind[0] if len(by_kind) == 1 else np.sort(np.concatenate(by_kind), kind="stable")

    @cached_property
    def _rows_by_code(self) -> list[Ints]:
        order = np.argsort(self.codes, kind="stable")
        counts = np.bincount(self.codes, minlength=len(INSTRUCTIONS))
        return np.split(order, np.cumsum(counts)[:-1])

    def at(self, rows: Ints) -> Iterable[Any]:
        """Returns the instructions of rows."""
        listed: list[Any] = self.instructions[rows].tolist()
        return listed

    def numbers(self, rows: Ints, field: str) -> Ints:
        """Returns a field of the instruction of each row."""
        return self.map(rows, attrgetter(field))

    def map(self, rows: Ints, function: Callable[[Any], int]) -> Ints:
        """Returns what a function says of the instruction of each row."""
        return np.fromiter(map(function, self.at(rows)), np.int64, len(rows))

    @cached_property
    def computes(self) -> Ints:
        """The rows of what occupies the compute stream."""
        return self.rows(*COMPUTES)

    @cached_property
    def _computes_before(self) -> Ints:
        """The number of compute rows up to each row, itself included."""
        counted = np.zeros(len(self.codes), dtype=np.int64)
        counted[self.computes] = 1
        return np.cumsum(counted)

    def issued_after(self, rows: Ints) -> Ints:
        """Returns, for each row, the index into :attr:`computes` of the last compute instruction of
        its device up to the row; -1 where there is none.
        """
        before = self._computes_before
        firsts = self.starts[self.devices[rows]]
        earlier = np.where(firsts > 0, before[firsts - 1], 0)
        index = before[rows] - 1
        return np.where(index >= earlier, index, -1)

    def position(self, row: int) -> int:
        """Returns the place of an instruction in the program of its device."""
        return row - int(self.starts[self.devices[row]])
