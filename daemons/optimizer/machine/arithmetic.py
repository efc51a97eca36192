"""Implements ``optimizer.rollback: arithmetic``: steps in place, undone by arithmetic, as in the
papers.

SPipe, DeepSpeed and zero-bubble step as soon as gradients arrive, and invert the step if it must
not count. Gradients are not needed afterwards, so one copy of them is enough. But every inverted
step loses the bits that it had rounded away.

Here a block advances ahead of the commit (state version c + 1) by a ``Hold``. COMMIT has nothing
left to do. AMEND inverts all blocks, then steps with the clipped coefficient. SKIP and aborted
attempts invert the steps that were taken. :mod:`penstock.daemons.optimizer.machine.words` describes
the words, and the state after a SIGKILL.

No arithmetic recovers values that Inf or NaN destroyed. So a separate sweep checks the gradients
before the step, and a block with such gradients is not stepped.

Attempts that hold work as in the exact way: they step after the commit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
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
    FinishHold,
    FinishInvert,
    GradientStatus,
    Hold,
    Invert,
    Sweep,
)
from penstock.daemons.optimizer.machine.work import (
    AttemptProgress,
    QueuedWork,
    WorkKind,
)
from penstock.protocol.plan.step import OptimizerStep, SweepStatus
from penstock.shm.control import CommitRecord, Decision


class ArithmeticSteps:
    """The rules of an epoch in which all blocks step in place."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self._amendment: CommitRecord | None = None
        """Blocks are being taken back, to be stepped as the record says."""
        self._looked_at: dict[int, tuple[SweepStatus, float]] = {}
        """Status and seconds of blocks with checked gradients, until they have stepped."""

    def handle(self, event: LiveEvent) -> None:
        """Handles an event of the scheduler or a worker; only after recovery."""
        self._HANDLERS[type(event)](self, event)

    def start(self, blocks: Iterable[int]) -> None:
        """Plans the update of blocks with complete gradients."""
        self.epoch.plan(WorkKind.UPDATE, blocks)

    def choose(self, work: QueuedWork) -> Sweep | None:
        """Returns the sweep that brings work forward; None if nothing is left to do."""
        return self._CHOOSERS[work.kind](self, work.block)

    def finish(self, work: QueuedWork, sweep: Sweep | None, done: SweepDone | None) -> None:
        """Handles a sweep's end; both are None if nothing was left to do."""
        self._FINISHERS[work.kind](self, work, sweep, done)

    def abandon(self) -> None:
        """Discards planned work; the next epoch's recovery inverts blocks that are ahead."""
        self.epoch.abandon()
        self._amendment = None
        self._looked_at.clear()

    def validate(self) -> None:
        """Checks that every block's state is at the committed version, with two exceptions. It is
        one version ahead while an attempt is undecided or its step is being inverted. It is one
        behind while a held commit is being completed.

        Raises:
            ValueError: naming what contradicts what.
        """
        words = self.epoch.words
        behind = self.epoch.due(WorkKind.COMPLETE)
        back = self.epoch.due(WorkKind.REVERT)
        for block in self.epoch.validate():
            state, committed = words.state_version(block), words.committed
            if state == committed or (state == committed - 1 and block in behind):
                continue
            announced = 0 if words.next_record is None else words.next_record.version
            undecided = self.epoch.attempt is not None or block in back
            if not (state == committed + 1 == announced and undecided):
                raise ValueError(
                    f"block {block}: state {state}, committed {committed}, announced {announced}"
                )

    # ---- events ----

    def _on_attempt(self, event: AttemptAsked) -> None:
        epoch, ahead = self.epoch, self._ahead()
        if epoch.attempt is None and ahead:
            raise ImpossibleError(
                f"attempt {event.attempt} begins before blocks {ahead} have taken back the step of"
                " the one before"
            )
        attempt = epoch.begin_attempt(event)
        if attempt is None:
            return
        self._looked_at.clear()
        if event.hold:  # the state may catch up while the workers compute
            epoch.queue_settles(epoch.blocks.active)
        for early in epoch.came_early():
            self.handle(early)
        if not event.hold:
            self._announce(event)

    def _announce(self, event: AttemptAsked) -> None:
        """Writes the record of the step that blocks are about to take, while no block is ahead."""
        words = self.epoch.words
        assert words.record is not None, "an epoch begins with a record"
        version = event.base_version + 1
        step = replace(
            words.record,
            version=version,
            attempt=event.attempt,
            decision=Decision.COMMIT,
            coefficient=1.0,
            inverse_loss_scale=1.0 / event.loss_scale,
            learning_rate=event.learning_rate,
            bias_step=version,
        )
        words.announce(step)

    def _on_gradients(self, event: GradientsReady) -> None:
        self.start(self.epoch.gradients_ready(event))

    def _on_device_updated(self, event: DeviceUpdated) -> None:
        """Rejects the event: a plan with an UPDATE is refused, so workers preview no block of such
        a run.
        """

    def _on_amend(self, event: AmendAsked) -> None:
        attempt = self.epoch.begin_amend(event)
        self._amendment = event.record
        self.epoch.plan(WorkKind.REVERT, self.epoch.blocks.active)
        self.epoch.report_amended(attempt)

    def _on_commit(self, event: CommitAsked) -> None:
        words, ahead = self.epoch.words, self._ahead()
        news = event.record.version != words.committed
        if ahead and news and OptimizerStep.of(event.record) != words.announced:
            raise ImpossibleError(
                f"version {event.record.version} is committed with another step than blocks"
                f" {ahead} have taken"
            )
        self.epoch.commit(event)

    def _on_skip(self, event: SkipAsked) -> None:
        attempt = self.epoch.attempt
        if attempt is None or attempt.number != event.attempt:
            return
        missing = set(self.epoch.blocks.active) - attempt.reported
        if missing:
            raise ImpossibleError(
                f"attempt {event.attempt} is skipped before the sweep of blocks {sorted(missing)}"
            )
        self.epoch.skip(event)
        self.epoch.plan(WorkKind.REVERT, self._ahead())

    def _on_settle(self, event: SettleAsked) -> None:
        self.epoch.settle(event, taking_back=self._ahead())

    def _ahead(self) -> list[int]:
        return [b for b in self.epoch.blocks.active if self.epoch.words.ahead(b) is not None]

    # ---- which sweep ----

    def _attempt(self) -> AttemptProgress:
        assert self.epoch.attempt is not None, "updates and amends are dropped with their attempt"
        return self.epoch.attempt

    def _update(self, block: int) -> Sweep:
        """Returns the check of the gradients first, and the step afterwards."""
        attempt = self._attempt()
        if attempt.hold or block not in self._looked_at:
            return GradientStatus(block=block, version=attempt.update.version)
        return Hold(block=block, update=attempt.update)

    def _amend(self, block: int) -> Sweep:
        amended = self._attempt().amended
        assert amended is not None, "an amend is planned with its step"
        return Hold(block=block, update=amended)

    def _revert(self, block: int) -> Sweep | None:
        ahead = self.epoch.words.ahead(block)
        return None if ahead is None else Invert(block=block, update=ahead)

    def _finish(self, block: int) -> Sweep:
        words = self.epoch.words
        return FinishHold(block=block, update=words.pending(block) or words.announced)

    def _finish_revert(self, block: int) -> Sweep:
        return FinishInvert(block=block, update=self.epoch.words.announced)

    # ---- what its end means ----

    def _update_done(self, work: QueuedWork, sweep: Sweep | None, done: SweepDone | None) -> None:
        attempt, block = self._attempt(), work.block
        assert done is not None, "an update always needs a sweep"
        if isinstance(sweep, Hold):
            attempt.previewed[block] = sweep.update
            status, seconds = self._looked_at.pop(block)
            self.epoch.report(attempt, block, status, seconds + done.seconds)
            return
        assert done.status is not None, "a check of gradients has a status"
        if attempt.hold or not done.status.finite:
            self.epoch.report(attempt, block, done.status, done.seconds)
            return
        self._looked_at[block] = (done.status, done.seconds)
        self.epoch.again(work)

    def _amend_done(self, work: QueuedWork, sweep: Sweep | None, done: SweepDone | None) -> None:
        assert isinstance(sweep, Hold)
        self.epoch.amended(work.block, sweep.update)

    def _revert_done(self, work: QueuedWork, sweep: Sweep | None, done: SweepDone | None) -> None:
        self.epoch.recovered_from(work)
        self.epoch.settled(work.block)
        if self._amendment is not None and not self._ahead():
            self.epoch.words.announce(self._amendment)
            self._amendment = None
            self.epoch.plan(WorkKind.AMEND, self.epoch.blocks.active)

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
        WorkKind.REVERT: _revert,
        WorkKind.FINISH_REVERT: _finish_revert,
    }
    _FINISHERS: ClassVar[Finishers] = {
        WorkKind.UPDATE: _update_done,
        WorkKind.AMEND: _amend_done,
        WorkKind.SETTLE: settle_done,
        WorkKind.COMPLETE: recovery_done,
        WorkKind.FINISH: recovery_done,
        WorkKind.REVERT: _revert_done,
        WorkKind.FINISH_REVERT: recovery_done,
    }
