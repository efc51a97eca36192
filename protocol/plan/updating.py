"""Needs of an UPDATE on a device that cannot read host memory, for planner and workers."""

from __future__ import annotations

from penstock.protocol.plan.instructions import Program, Update

PIECE_ELEMENTS = 1 << 22
"""Parameters of a block that are brought to the device at a time, a multiple of 16."""

PIECES = 2
"""Pieces on the device at once: one arrives while the other is computed and leaves."""

_BYTES_IN_PIECE = 28.0
"""Per parameter: fp32 master, two moments, a contribution and the sum of gradients, the weight."""
_BYTES_SHARED = 12.0
"""Per parameter of one piece: an fp32 and an fp64 for intermediate results."""


def staging_bytes(parameters: float) -> float:
    """Returns the bytes of device memory that UPDATE takes at most: of blocks with at most so many
    ``parameters``.
    """
    return min(parameters, PIECE_ELEMENTS) * (PIECES * _BYTES_IN_PIECE + _BYTES_SHARED)


RESIDENT_BYTES = 16.0
"""Device memory per parameter of a static resident: fp32 master, two moments, and the sum of the
gradients that are not committed yet.
"""


def residents_of(program: Program) -> frozenset[int]:
    """Returns the blocks with state that stays on the device that runs the program."""
    return frozenset(i.block for i in program if isinstance(i, Update) and i.resident)
