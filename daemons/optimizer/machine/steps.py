"""The two ways from one version to the next have one shape, and some steps in common.

A way is a class with tables: :mod:`penstock.daemons.optimizer.machine.exact` or
:mod:`penstock.daemons.optimizer.machine.arithmetic`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias

from penstock.daemons.optimizer.machine.epoch import Epoch, LiveEvent
from penstock.daemons.optimizer.machine.events import SweepDone
from penstock.daemons.optimizer.machine.sweeps import CastWeights, Hold, Settle, Sweep
from penstock.daemons.optimizer.machine.work import QueuedWork, WorkKind

Handlers: TypeAlias = Mapping[type[Any], Callable[[Any, Any], None]]
Choosers: TypeAlias = Mapping[WorkKind, Callable[[Any, int], Sweep | None]]
Finishers: TypeAlias = Mapping[
    WorkKind, Callable[[Any, QueuedWork, Sweep | None, SweepDone | None], None]
]
"""A way's tables: what an event does, which sweep work needs, what the end of a sweep means."""


class Steps(Protocol):
    """The rules by which blocks get from one version to the next."""

    epoch: Epoch

    def handle(self, event: LiveEvent) -> None:
        """Handles an event of the scheduler or a worker; only after recovery."""

    def start(self, blocks: Iterable[int]) -> None:
        """Plans the update of blocks with complete gradients."""

    def choose(self, work: QueuedWork) -> Sweep | None:
        """Returns the sweep that brings work forward; None if nothing is left to do."""

    def finish(self, work: QueuedWork, sweep: Sweep | None, done: SweepDone | None) -> None:
        """Handles a sweep's end; both are None if nothing was left to do."""

    def abandon(self) -> None:
        """Discards planned work: the epoch is over."""

    def validate(self) -> None:
        """Checks the invariants.

        Raises:
            ValueError: naming what contradicts what.
        """


def start_next(steps: Steps) -> None:
    """Starts the next sweep, unless one is running. Work on blocks with state that must not be
    overwritten yet is skipped, and waits.
    """
    while (candidate := _next(steps)) is not None:
        work, sweep = candidate
        steps.epoch.take(work)
        if sweep is None:
            steps.finish(work, None, None)
        else:
            steps.epoch.run(work, sweep)


def _next(steps: Steps) -> tuple[QueuedWork, Sweep | None] | None:
    held = set()
    for work in steps.epoch.waiting():
        if work.block in held:
            continue  # what is done about one block is done in order
        sweep = steps.choose(work)
        repairs = work.kind in (WorkKind.FINISH, WorkKind.FINISH_REVERT)
        if sweep is None or repairs or not steps.epoch.words.is_pinned(sweep):
            return work, sweep
        held.add(work.block)
    return None


def sweep_done(steps: Steps, event: SweepDone) -> None:
    """Writes the words of the ended sweep, and handles its result."""
    running = steps.epoch.ended()
    if running is not None:
        steps.finish(running.work, running.sweep, event)


# ---- what both ways do alike ----


def complete(steps: Steps, block: int) -> Sweep | None:
    """Returns the sweep of a block without its committed weights; None if it has them."""
    words = steps.epoch.words
    if words.holds(block, words.committed):
        return None
    pending = words.pending(block)
    if pending is not None:
        return Hold(block=block, update=pending)
    return CastWeights(block=block, version=words.committed)


def settle(steps: Steps, block: int) -> Sweep | None:
    """Returns the sweep that brings a block's state to the committed version; None if it is."""
    pending = steps.epoch.words.pending(block)
    return None if pending is None else Settle(block=block, update=pending)


def settle_done(
    steps: Steps, work: QueuedWork, sweep: Sweep | None, done: SweepDone | None
) -> None:
    """Notes that the block's state is at the committed version."""
    steps.epoch.settled(work.block)


def recovery_done(
    steps: Steps, work: QueuedWork, sweep: Sweep | None, done: SweepDone | None
) -> None:
    """Notes that work is done which Ready may wait for."""
    steps.epoch.recovered_from(work)
