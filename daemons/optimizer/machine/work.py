"""Queued work, and the progress of the current attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from penstock.daemons.optimizer.machine.sweeps import Sweep
from penstock.protocol.plan.step import OptimizerStep


class WorkKind(Enum):
    """Why a block is to be worked on."""

    UPDATE = auto()
    """Its gradients are complete: check them and, if the attempt does not hold, preview them."""
    AMEND = auto()
    """Preview again with the clipped coefficient."""
    COMPLETE = auto()
    """Its committed weights are not there yet: a held commit, or one cut short."""
    SETTLE = auto()
    """Bring its state to the committed version."""
    FINISH = auto()
    """Finish the sweep over the state that a killed optimizerd left half done."""
    REVERT = auto()
    """Take back, by arithmetic, the step that its state is ahead of the committed version."""
    FINISH_REVERT = auto()
    """Finish such a sweep that a killed optimizerd left half done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedWork:
    """A block waiting for its turn."""

    kind: WorkKind
    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSweep:
    """The sweep that the threads are busy with; ``attempt`` is that of an UPDATE or AMEND."""

    work: QueuedWork
    sweep: Sweep
    attempt: int | None


@dataclass(slots=True, kw_only=True)
class AttemptProgress:
    """Progress of the current attempt. ``previewed``: the step of each slot's weights, by block.
    ``flushed``: the step that the other copy of a block's state contains.

    ``ready``: complete contributions, by block. ``reported``: blocks with a sent status.
    ``update``: the step that follows if nothing is clipped; ``amended``: the clipped step.
    ``amending``: blocks without the clipped step in their slot.
    """

    number: int
    update: OptimizerStep
    hold: bool
    ready: dict[int, set[int]] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)
    previewed: dict[int, OptimizerStep] = field(default_factory=dict)
    flushed: dict[int, OptimizerStep] = field(default_factory=dict)
    amended: OptimizerStep | None = None
    amending: set[int] = field(default_factory=set)
