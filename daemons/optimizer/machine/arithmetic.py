"""``optimizer.rollback: arithmetic``: steps in place, taken back by arithmetic (the papers' way).

SPipe, DeepSpeed and zero-bubble step as soon as gradients are there, and invert the step if it is
not to count. Nothing waits for its gradients afterwards, so one copy of them is enough; but what a
step rounded away is lost with every step that is taken back. Here a block goes ahead of the commit
(state version c + 1) by a ``Hold``; COMMIT has nothing to do; AMEND takes all blocks back, then
steps with the clipped coefficient; SKIP and broken attempts take back what was stepped. Words, and
what a SIGKILL leaves: :mod:`penstock.daemons.optimizer.machine.words`.

No arithmetic brings back what Inf or NaN destroyed. So the gradients are looked at before the step
(a sweep that reads nothing else), and a block with such gradients is not stepped.

Attempts that hold are those of the exact way: they step after the commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

from penstock.daemons.optimizer.machine.epoch import Epoch, Finishers, Handlers
from penstock.daemons.optimizer.machine.events import (
    AmendAsked,
    AttemptAsked,
    CommitAsked,
    SkipAsked,
    SweepDone,
)
from penstock.daemons.optimizer.machine.recovery import ImpossibleError
from penstock.daemons.optimizer.machine.sweeps import (
    FinishHold,
    FinishInvert,
    GradientStatus,
    Hold,
    Invert,
    Sweep,
)
from penstock.daemons.optimizer.machine.words import WordsMirror
from penstock.daemons.optimizer.machine.work import (
    CHOOSERS,
    AttemptProgress,
    Chooser,
    QueuedWork,
    WorkKind,
)
from penstock.protocol.plan.step import OptimizerStep
from penstock.shm.control import CommitRecord, Decision


def _update(block: int, words: WordsMirror, attempt: AttemptProgress | None) -> Sweep:
    assert attempt is not None, "updates are dropped with their attempt"
    if attempt.hold or block not in attempt.looked_at:
        return GradientStatus(block=block, version=attempt.update.version)
    return Hold(block=block, update=attempt.update)


def _amend(block: int, words: WordsMirror, attempt: AttemptProgress | None) -> Sweep:
    assert attempt is not None and attempt.amended is not None, "amends go with their attempt"
    return Hold(block=block, update=attempt.amended)


def _revert(block: int, words: WordsMirror, attempt: AttemptProgress | None) -> Sweep | None:
    ahead = words.ahead(block)
    return None if ahead is None else Invert(block=block, update=ahead)


def _finish(block: int, words: WordsMirror, attempt: AttemptProgress | None) -> Sweep:
    return FinishHold(block=block, update=words.pending(block) or words.announced)


def _finish_revert(block: int, words: WordsMirror, attempt: AttemptProgress | None) -> Sweep:
    return FinishInvert(block=block, update=words.announced)


_IN_PLACE: Mapping[WorkKind, Chooser] = MappingProxyType(
    {
        **CHOOSERS,
        WorkKind.UPDATE: _update,
        WorkKind.AMEND: _amend,
        WorkKind.FINISH: _finish,
        WorkKind.REVERT: _revert,
        WorkKind.FINISH_REVERT: _finish_revert,
    }
)


class ArithmeticEpoch(Epoch):
    """An epoch in which all blocks step in place."""

    _amendment: CommitRecord | None = None  # blocks are being taken back, to be stepped as it says

    def abandon(self) -> None:
        """As ever; the next epoch's recovery takes back what is ahead."""
        super().abandon()
        self._amendment = None

    def _on_attempt(self, event: AttemptAsked) -> None:
        begins, ahead = self._attempt is None, self._ahead()
        if begins and ahead:
            raise ImpossibleError(
                f"attempt {event.attempt} begins before blocks {ahead} have taken back the step of"
                " the one before"
            )
        super()._on_attempt(event)
        if event.hold or not begins:
            return
        assert self.words.record is not None, "an epoch begins with a record"
        step = replace(
            self.words.record,
            version=event.base_version + 1,
            attempt=event.attempt,
            decision=Decision.COMMIT,
            coefficient=1.0,
            inverse_loss_scale=1.0 / event.loss_scale,
            learning_rate=event.learning_rate,
            bias_step=event.base_version + 1,
        )
        self.words.announce(step)

    def _finish_update(self, work: QueuedWork, sweep: Sweep | None, done: SweepDone | None) -> None:
        attempt = self._attempt
        assert attempt is not None and done is not None
        if isinstance(sweep, Hold):
            attempt.previewed[work.block] = sweep.update
            status, seconds = attempt.looked_at[work.block]
            self._report(attempt, work.block, status, seconds + done.seconds)
            return
        assert done.status is not None
        if attempt.hold or not done.status.finite:
            self._report(attempt, work.block, done.status, done.seconds)
            return
        attempt.looked_at[work.block] = (done.status, done.seconds)
        self._queue.appendleft(work)

    def _on_amend(self, event: AmendAsked) -> None:
        attempt = self._decided(event.attempt, event.record.version)
        attempt.amended = OptimizerStep.of(event.record)
        attempt.amending = set(self._blocks.active)
        self._amendment = event.record
        self._plan(WorkKind.REVERT, self._blocks.active)
        self._report_amended(attempt)

    def _on_commit(self, event: CommitAsked) -> None:
        ahead, news = self._ahead(), event.record.version != self.words.committed
        if ahead and news and OptimizerStep.of(event.record) != self.words.announced:
            raise ImpossibleError(
                f"version {event.record.version} is committed with another step than blocks"
                f" {ahead} have taken"
            )
        super()._on_commit(event)

    def _on_skip(self, event: SkipAsked) -> None:
        attempt = self._attempt
        if attempt is None or attempt.number != event.attempt:
            return
        missing = set(self._blocks.active) - attempt.reported
        if missing:
            raise ImpossibleError(
                f"attempt {event.attempt} is skipped before the sweep of blocks {sorted(missing)}"
            )
        super()._on_skip(event)
        self._plan(WorkKind.REVERT, self._ahead())

    def _queue_settles(self, blocks: Iterable[int]) -> set[int]:
        """To settle is to take back, too: those that are ahead wait for their REVERT."""
        ahead = set(self._ahead())
        return super()._queue_settles(blocks) | ahead

    def _finish_revert(self, work: QueuedWork, sweep: Sweep | None, done: SweepDone | None) -> None:
        self._finish_recovery(work, sweep, done)
        self._finish_settle(work, sweep, done)
        if self._amendment is not None and not self._ahead():
            self.words.announce(self._amendment)
            self._amendment = None
            self._plan(WorkKind.AMEND, self._blocks.active)

    def _ahead(self) -> list[int]:
        return [block for block in self._blocks.active if self.words.ahead(block) is not None]

    _HANDLERS: ClassVar[Handlers] = {
        **Epoch._HANDLERS,
        AttemptAsked: _on_attempt,
        AmendAsked: _on_amend,
        CommitAsked: _on_commit,
        SkipAsked: _on_skip,
    }
    _CHOOSERS = _IN_PLACE
    _FINISHERS: ClassVar[Finishers] = {
        **Epoch._FINISHERS,
        WorkKind.UPDATE: _finish_update,
        WorkKind.REVERT: _finish_revert,
        WorkKind.FINISH_REVERT: Epoch._finish_recovery,
    }
