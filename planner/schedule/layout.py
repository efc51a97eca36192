"""Where stages are: the part of a plan that schemes and passes work from, before programs exist."""

from __future__ import annotations

from enum import StrEnum

from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Recompute,
    SwapIn,
    SwapOut,
    Update,
)
from penstock.protocol.plan.layout import StageLayout

__all__ = [
    "ComputeInstruction",
    "Order",
    "OrderedInstruction",
    "Residency",
    "StageLayout",
]

ComputeInstruction = Forward | Recompute | Backward | BackwardInput | BackwardWeight
"""What occupies the compute stream of a device."""

OrderedInstruction = ComputeInstruction | SwapOut | SwapIn | Update
"""What schemes and passes order; lowering inserts everything else around it."""

Order = tuple[OrderedInstruction, ...]
"""The ordered instructions of one device."""


class Residency(StrEnum):
    """Where the weights of a device's stages are during an attempt."""

    RESIDENT = "resident"
    """All on the device: one buffer for each of its stages, fetched once."""
    STREAMED = "streamed"
    """In host memory: two stage-sized buffers, one in use, one arriving."""
