"""The sweeps over one block: what the state machine orders, as values.

How they read and write memory is in ``native/sweeps.h``; :mod:`penstock.daemons.optimizer.kernels`
turns each value into one native call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.protocol.plan.step import OptimizerStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """Write the weights that ``update`` leads to; state stays."""

    name: ClassVar[str] = "preview"
    block: int
    update: OptimizerStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Write ``update`` into master and state."""

    name: ClassVar[str] = "settle"
    block: int
    update: OptimizerStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """Settle ``pending``, then preview ``update``, in one go."""

    name: ClassVar[str] = "advance"
    block: int
    pending: OptimizerStep
    update: OptimizerStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Writes ``update``, which is committed or steps in place, into master, state and weights, in
    one sweep.
    """

    name: ClassVar[str] = "hold"
    block: int
    update: OptimizerStep


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishSettle:
    """Repair what was cut short while it settled ``update``, then settle what it left. The weights
    of ``update.version`` are there.
    """

    name: ClassVar[str] = "finish"
    block: int
    update: OptimizerStep


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishHold:
    """Repair a hold of ``update`` that was cut short, then hold what it left."""

    name: ClassVar[str] = "finish"
    block: int
    update: OptimizerStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Invert:
    """Take ``update`` out of master and state again, by arithmetic."""

    name: ClassVar[str] = "invert"
    block: int
    update: OptimizerStep


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishInvert:
    """Repair an inverse of ``update`` that was cut short, then invert what it left."""

    name: ClassVar[str] = "finish"
    block: int
    update: OptimizerStep


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStatus:
    """Checks the gradients that lead to ``version``, and changes nothing."""

    name: ClassVar[str] = "gradient_status"
    block: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CastWeights:
    """Write the weights of ``version`` from a master that is at ``version``; where it is split,
    they are there.
    """

    name: ClassVar[str] = "cast"
    block: int
    version: int


Sweep = (
    Preview
    | Settle
    | Advance
    | Hold
    | FinishSettle
    | FinishHold
    | Invert
    | FinishInvert
    | GradientStatus
    | CastWeights
)


def sweep_tag(block: int, state_version: int) -> int:
    """Returns the name, in the undo area, of a sweep that leads a block's state to a version.

    The name is never 0, and differs from the previous sweep's; a restore clears the undo area.
    Steps in place and their inverses reach a version repeatedly. But between two sweeps to the same
    version another sweep led the block's state away from it.
    """
    return (block << 40) | state_version
