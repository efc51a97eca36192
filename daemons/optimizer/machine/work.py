"""What waits for its turn, and which sweep it needs when its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import TypeAlias

from penstock.daemons.optimizer.machine.sweeps import (
    Advance,
    CastWeights,
    FinishHold,
    FinishSettle,
    GradientStatus,
    Hold,
    Preview,
    Settle,
    Sweep,
)
from penstock.daemons.optimizer.machine.words import WordsMirror
from penstock.protocol.plan.step import OptimizerStep, SweepStatus


class WorkKind(Enum):
    """Why a block is to be worked on."""

    UPDATE = auto()
    """Its gradients are complete: look at them and, if not holding, preview them."""
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
    """The attempt under way. ``previewed``: the step whose weights each block's slot holds.

    ``ready``: contributions that are complete, by block; ``reported``: blocks whose status was
    sent; ``update``: the step it leads to if nothing is clipped, ``amended`` the clipped one;
    ``amending``: blocks whose slot does not hold the clipped one yet; ``looked_at``: status and
    seconds of those whose gradients were looked at, and that have yet to step in place.
    """

    number: int
    update: OptimizerStep
    hold: bool
    ready: dict[int, set[int]] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)
    previewed: dict[int, OptimizerStep] = field(default_factory=dict)
    amended: OptimizerStep | None = None
    amending: set[int] = field(default_factory=set)
    looked_at: dict[int, tuple[SweepStatus, float]] = field(default_factory=dict)


Chooser: TypeAlias = Callable[[int, WordsMirror, AttemptProgress | None], Sweep | None]
"""The sweep that brings work on a block forward, None if nothing is left to do."""


def _update(block: int, words: WordsMirror, attempt: AttemptProgress | None) -> Sweep:
    """One that holds may need two: a settle first, then the look at the new gradients."""
    assert attempt is not None, "updates are dropped with their attempt"
    pending = words.pending(block)
    if attempt.hold:
        if pending is not None:
            return Settle(block=block, update=pending)
        return GradientStatus(block=block, version=attempt.update.version)
    if pending is not None:
        return Advance(block=block, pending=pending, update=attempt.update)
    return Preview(block=block, update=attempt.update)


def _amend(block: int, words: WordsMirror, attempt: AttemptProgress | None) -> Sweep:
    assert attempt is not None and attempt.amended is not None, "amends go with their attempt"
    return Preview(block=block, update=attempt.amended)


def _complete(block: int, words: WordsMirror, attempt: AttemptProgress | None) -> Sweep | None:
    if words.holds(block, words.committed):
        return None
    pending = words.pending(block)
    if pending is not None:
        return Hold(block=block, update=pending)
    return CastWeights(block=block, version=words.committed)


def _settle(block: int, words: WordsMirror, attempt: AttemptProgress | None) -> Sweep | None:
    pending = words.pending(block)
    return None if pending is None else Settle(block=block, update=pending)


def _finish(block: int, words: WordsMirror, attempt: AttemptProgress | None) -> Sweep:
    pending = words.pending(block)
    assert pending is not None, "a sweep that was cut short has not set the state version"
    if words.holds(block, pending.version):
        return FinishSettle(block=block, update=pending)
    # A hold: a split master has nothing to make its weights from but this very sweep.
    return FinishHold(block=block, update=pending)


CHOOSERS: Mapping[WorkKind, Chooser] = MappingProxyType(
    {
        WorkKind.UPDATE: _update,
        WorkKind.AMEND: _amend,
        WorkKind.COMPLETE: _complete,
        WorkKind.SETTLE: _settle,
        WorkKind.FINISH: _finish,
    }
)
