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
from penstock.daemons.optimizer.machine.words import Ledger
from penstock.protocol.plan.step import OptimizerStep, SweepStatus


class Kind(Enum):
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
class Work:
    """A block waiting for its turn."""

    kind: Kind
    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The sweep that the threads are busy with; ``attempt`` is that of an UPDATE or AMEND."""

    work: Work
    sweep: Sweep
    attempt: int | None


@dataclass(slots=True, kw_only=True)
class Attempt:
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


Chooser: TypeAlias = Callable[[int, Ledger, Attempt | None], Sweep | None]
"""The sweep that brings work on a block forward, None if nothing is left to do."""


def _update(block: int, ledger: Ledger, attempt: Attempt | None) -> Sweep:
    """One that holds may need two: a settle first, then the look at the new gradients."""
    assert attempt is not None, "updates are dropped with their attempt"
    pending = ledger.pending(block)
    if attempt.hold:
        if pending is not None:
            return Settle(block=block, update=pending)
        return GradientStatus(block=block, version=attempt.update.version)
    if pending is not None:
        return Advance(block=block, pending=pending, update=attempt.update)
    return Preview(block=block, update=attempt.update)


def _amend(block: int, ledger: Ledger, attempt: Attempt | None) -> Sweep:
    assert attempt is not None and attempt.amended is not None, "amends go with their attempt"
    return Preview(block=block, update=attempt.amended)


def _complete(block: int, ledger: Ledger, attempt: Attempt | None) -> Sweep | None:
    if ledger.holds(block, ledger.committed):
        return None
    pending = ledger.pending(block)
    if pending is not None:
        return Hold(block=block, update=pending)
    return CastWeights(block=block, version=ledger.committed)


def _settle(block: int, ledger: Ledger, attempt: Attempt | None) -> Sweep | None:
    pending = ledger.pending(block)
    return None if pending is None else Settle(block=block, update=pending)


def _finish(block: int, ledger: Ledger, attempt: Attempt | None) -> Sweep:
    pending = ledger.pending(block)
    assert pending is not None, "a sweep that was cut short has not set the state version"
    if ledger.holds(block, pending.version):
        return FinishSettle(block=block, update=pending)
    # A hold: a split master has nothing to make its weights from but this very sweep.
    return FinishHold(block=block, update=pending)


CHOOSERS: Mapping[Kind, Chooser] = MappingProxyType(
    {
        Kind.UPDATE: _update,
        Kind.AMEND: _amend,
        Kind.COMPLETE: _complete,
        Kind.SETTLE: _settle,
        Kind.FINISH: _finish,
    }
)
