"""The exact way: weights are previewed ahead of the decision, state follows after the commit.

Nothing has to be undone, so no bit is lost. Blocks that are settled early are queued for it when an
attempt begins, ahead of the new gradients of all blocks. Those that a device updates get no other
sweep of an attempt, unless it holds: what the worker reports stands for their preview.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from penstock.daemons.optimizer.machine.epoch import Epoch, LiveEvent
from penstock.daemons.optimizer.machine.events import (
    AmendAsked,
    AttemptAsked,
    CommitAsked,
    DeviceUpdated,
    GradientsReady,
    SettleAsked,
    SkipAsked,
    SweepDone,
)
from penstock.daemons.optimizer.machine.recovery import ImpossibleError
from penstock.daemons.optimizer.machine.steps import (
    Choosers,
    Finishers,
    Handlers,
    complete,
    recovery_done,
    settle,
    settle_done,
)
from penstock.daemons.optimizer.machine.sweeps import (
    Advance,
    FinishHold,
    FinishSettle,
    GradientStatus,
    Preview,
    Settle,
    Sweep,
)
from penstock.daemons.optimizer.machine.work import (
    AttemptProgress,
    QueuedWork,
    WorkKind,
)


class ExactSteps:
    """The rules of an epoch in which blocks are previewed and settled."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch

    def handle(self, event: LiveEvent) -> None:
        """Handles an event of the scheduler or a worker; only after recovery."""
        self._HANDLERS[type(event)](self, event)

    def start(self, blocks: Iterable[int]) -> None:
        """Plans the update of blocks with complete gradients."""
        elsewhere = self._on_devices()
        self.epoch.plan(WorkKind.UPDATE, [b for b in blocks if b not in elsewhere])

    def choose(self, work: QueuedWork) -> Sweep | None:
        """Returns the sweep that brings work forward; None if nothing is left to do."""
        return self._CHOOSERS[work.kind](self, work.block)

    def finish(self, work: QueuedWork, sweep: Sweep | None, done: SweepDone | None) -> None:
        """Handles a sweep's end; both are None if nothing was left to do."""
        self._FINISHERS[work.kind](self, work, sweep, done)

    def abandon(self) -> None:
        """Discards planned work: the epoch is over."""
        self.epoch.abandon()

    def validate(self) -> None:
        """Checks that the state of every block is at the committed version, or one step behind.

        Raises:
            ValueError: naming what contradicts what.
        """
        committed, words = self.epoch.words.committed, self.epoch.words
        for block in self.epoch.validate():
            state = words.state_version(block)
            if state not in (committed, committed - 1):
                raise ValueError(f"block {block}: state {state}, committed {committed}")

    # ---- events ----

    def _on_attempt(self, event: AttemptAsked) -> None:
        epoch, attempt = self.epoch, self.epoch.begin_attempt(event)
        if attempt is None:
            return
        if event.hold:  # the state may catch up while the workers compute
            epoch.queue_settles(epoch.blocks.active)
        else:
            epoch.vacate(epoch.blocks.on_devices)
            epoch.queue_settles(epoch.blocks.settled_early)
        for early in epoch.came_early():
            self.handle(early)

    def _on_gradients(self, event: GradientsReady) -> None:
        self.start(self.epoch.gradients_ready(event))

    def _on_device_updated(self, event: DeviceUpdated) -> None:
        block, attempt = event.block, self.epoch.of_attempt(event)
        if attempt is None or block not in self._on_devices() or block in attempt.reported:
            return
        if self.epoch.words.pending(block) is not None:
            raise ImpossibleError(
                f"a worker updated block {block} in attempt {attempt.number}, but its state is not"
                f" at version {self.epoch.words.committed} yet"
            )
        self.epoch.words.set_slot(block, attempt.update.version)
        attempt.previewed[block] = attempt.update
        if block in self.epoch.blocks.flushed:
            attempt.flushed[block] = attempt.update
        self.epoch.report(attempt, block, event.status, event.seconds)

    def _on_devices(self) -> tuple[int, ...]:
        """Returns the blocks that a worker previews."""
        attempt = self.epoch.attempt
        return () if attempt is None or attempt.hold else self.epoch.blocks.on_devices

    def _on_amend(self, event: AmendAsked) -> None:
        attempt = self.epoch.begin_amend(event)
        self.epoch.plan(WorkKind.AMEND, self.epoch.blocks.active)
        self.epoch.report_amended(attempt)

    def _on_commit(self, event: CommitAsked) -> None:
        self.epoch.commit(event)

    def _on_skip(self, event: SkipAsked) -> None:
        self.epoch.skip(event)

    def _on_settle(self, event: SettleAsked) -> None:
        self.epoch.settle(event)

    # ---- which sweep ----

    def _attempt(self) -> AttemptProgress:
        assert self.epoch.attempt is not None, "updates and amends are dropped with their attempt"
        return self.epoch.attempt

    def _update(self, block: int) -> Sweep:
        """Returns one of two sweeps if the attempt holds: a settle first, then the check of the
        gradients.
        """
        attempt, pending = self._attempt(), self.epoch.words.pending(block)
        if attempt.hold:
            if pending is not None:
                return Settle(block=block, update=pending)
            return GradientStatus(block=block, version=attempt.update.version)
        if pending is not None:
            return Advance(block=block, pending=pending, update=attempt.update)
        return Preview(block=block, update=attempt.update)

    def _amend(self, block: int) -> Sweep:
        amended = self._attempt().amended
        assert amended is not None, "an amend is planned with its step"
        return Preview(block=block, update=amended)

    def _finish(self, block: int) -> Sweep:
        words = self.epoch.words
        pending = words.pending(block)
        assert pending is not None, "a sweep that was cut short has not set the state version"
        if words.holds(block, pending.version):
            return FinishSettle(block=block, update=pending)
        # A hold: a split master has nothing to make its weights from but this very sweep.
        return FinishHold(block=block, update=pending)

    # ---- what its end means ----

    def _update_done(self, work: QueuedWork, sweep: Sweep | None, done: SweepDone | None) -> None:
        assert done is not None, "an update always needs a sweep"
        attempt = self._attempt()
        if done.status is None:
            self.epoch.again(work)  # settled first; then its new gradients are checked
            return
        if isinstance(sweep, Preview | Advance):
            attempt.previewed[work.block] = sweep.update
        self.epoch.report(attempt, work.block, done.status, done.seconds)

    def _amend_done(self, work: QueuedWork, sweep: Sweep | None, done: SweepDone | None) -> None:
        assert isinstance(sweep, Preview)
        self.epoch.amended(work.block, sweep.update)

    _HANDLERS: ClassVar[Handlers] = {
        AttemptAsked: _on_attempt,
        GradientsReady: _on_gradients,
        DeviceUpdated: _on_device_updated,
        AmendAsked: _on_amend,
        CommitAsked: _on_commit,
        SkipAsked: _on_skip,
        SettleAsked: _on_settle,
    }
    _CHOOSERS: ClassVar[Choosers] = {
        WorkKind.UPDATE: _update,
        WorkKind.AMEND: _amend,
        WorkKind.COMPLETE: complete,
        WorkKind.SETTLE: settle,
        WorkKind.FINISH: _finish,
    }
    _FINISHERS: ClassVar[Finishers] = {
        WorkKind.UPDATE: _update_done,
        WorkKind.AMEND: _amend_done,
        WorkKind.SETTLE: settle_done,
        WorkKind.COMPLETE: recovery_done,
        WorkKind.FINISH: recovery_done,
    }
