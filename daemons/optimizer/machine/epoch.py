"""What optimizerd does within one epoch: recovery, then attempts, decisions and settles.

A part of the pure machine in :mod:`penstock.daemons.optimizer.machine.machine`, which decides
whether an epoch may hear of an event. Here is what the event means: which blocks are queued, which
sweep runs next, what is reported when it has ended.

Blocks that are settled early are queued for it when an attempt begins, ahead of the new gradients
of all blocks. Those that a device updates get no other sweep of an attempt, unless it holds: what
the worker reports stands for their preview.

One sweep runs at a time, on all threads of the pool; work waits in order of arrival, and what is
due for every block is queued in forward order. Which sweep a piece of work needs is decided when
its turn comes, from the block's state version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

from penstock.daemons.optimizer.machine.contributions import OwnedBlocks, Pulls
from penstock.daemons.optimizer.machine.events import (
    AmendAsked,
    AttemptAsked,
    CommitAsked,
    DeviceUpdated,
    Effect,
    GradientsReady,
    Pulled,
    RecoveryAsked,
    RunSweep,
    SendAmended,
    SendBlockStatus,
    SendSettled,
    SettleAsked,
    SkipAsked,
    SweepDone,
)
from penstock.daemons.optimizer.machine.recovery import ImpossibleError, begin_recovery
from penstock.daemons.optimizer.machine.sweeps import Advance, Hold, Preview, Sweep
from penstock.daemons.optimizer.machine.words import WordsMirror
from penstock.daemons.optimizer.machine.work import (
    CHOOSERS,
    AttemptProgress,
    Chooser,
    QueuedWork,
    RunningSweep,
    WorkKind,
)
from penstock.protocol.plan.step import OptimizerStep, SweepStatus

LiveEvent: TypeAlias = (
    AttemptAsked
    | GradientsReady
    | DeviceUpdated
    | AmendAsked
    | CommitAsked
    | SkipAsked
    | SettleAsked
)
"""What an epoch may hear of once it has recovered."""

Handlers: TypeAlias = Mapping[type[Any], Callable[[Any, Any], None]]
Finishers: TypeAlias = Mapping[
    WorkKind, Callable[[Any, QueuedWork, Sweep | None, SweepDone | None], None]
]


class Epoch:
    """One epoch, entered as ``begin`` says; its effects are appended to ``effects``.

    Raises:
        ImpossibleError: from any method that takes an event, naming what contradicts what.
    """

    def __init__(
        self, begin: RecoveryAsked, blocks: OwnedBlocks, pulls: Pulls, effects: list[Effect]
    ) -> None:
        self.number = begin.epoch
        self.words = WordsMirror(begin.facts, effects)
        self._blocks = blocks
        self._pulls = pulls
        self._out = effects
        self._attempt: AttemptProgress | None = None
        self._early: dict[int, list[GradientsReady | DeviceUpdated]] = {}
        self._settling: set[int] = set()  # blocks that Settled waits for
        self._queue: deque[QueuedWork] = deque()
        self._running: RunningSweep | None = None
        self._validated = (-1, 0)  # committed version and attempt at the last check
        self._recovery = begin_recovery(begin, self.words, blocks, pulls)
        if not self._recovery.awaited:
            self._queue.extend(self._recovery.left)

    # ---- looking from outside ----

    @property
    def attempt(self) -> int:
        """Number of the attempt under way, 0 if there is none."""
        return 0 if self._attempt is None else self._attempt.number

    @property
    def busy(self) -> bool:
        """Whether a sweep is running."""
        return self._running is not None

    @property
    def recovered(self) -> bool:
        """Whether all that the commit promises is there."""
        return self._recovery.done

    @property
    def queue_length(self) -> int:
        """Blocks that wait for their turn."""
        return len(self._queue)

    def awaited(self) -> tuple[GradientsReady, ...]:
        """The contributions of this node that the attempt under way still waits for."""
        attempt = self._attempt
        if attempt is None:
            return ()
        return tuple(
            GradientsReady(
                epoch=self.number, attempt=attempt.number, block=block, contribution=contribution
            )
            for block, contribution in self._blocks.local
            if contribution not in attempt.ready.get(block, ())
        )

    def validate(self) -> None:
        """Check the invariants of memory and queue, once recovered: of all blocks after a decision
        or a new attempt, else of those whose words have changed since the last check (the loop asks
        after each event, and a model may have hundreds of blocks).

        Raises:
            ValueError: naming what contradicts what.
        """
        committed, now = self.words.committed, (self.words.committed, self.attempt)
        changed, self.words.changed = self.words.changed, set()
        if now == self._validated:
            blocks = [block for block in self._blocks.active if block in changed]
        else:
            blocks = list(self._blocks.active)
        self._validated = now
        self.words.validate(blocks)
        if len(set(self._queue)) != len(self._queue):
            raise ValueError(f"work is queued twice: {list(self._queue)}")
        due = {work.block for work in self._queue if work.kind is WorkKind.COMPLETE}
        if self._running is not None and self._running.work.kind is WorkKind.COMPLETE:
            due.add(self._running.work.block)
        for block in blocks:
            if not self.words.holds(block, committed) and block not in due:
                raise ValueError(f"block {block}: no weights of the committed {committed}")
            newest = self.words.newest_slot(block)
            previewed = self._attempt is not None and block in self._attempt.previewed
            if newest > committed and not previewed:
                raise ValueError(f"block {block}: weights of {newest} from no attempt")

    # ---- the entrances ----

    def handle(self, event: LiveEvent) -> None:
        """React to the scheduler or a worker; only after recovery."""
        self._HANDLERS[type(event)](self, event)

    def abandon(self) -> None:
        """Forget all that is planned; the running sweep goes on, and its words follow it."""
        self._queue.clear()
        self._settling.clear()
        self._attempt = None

    def pulled(self, event: Pulled) -> None:
        """A contribution of another node has arrived."""
        self._pulls.arrived(event)
        pair, recovery = (event.block, event.contribution), self._recovery
        if pair in recovery.awaited:
            recovery.awaited.discard(pair)
            if not recovery.awaited:
                self._queue.extend(recovery.left)
        elif self._attempt is not None and self._attempt.number == event.attempt:
            self._mark_ready(self._attempt, *pair)

    # ---- attempts ----

    def _on_attempt(self, event: AttemptAsked) -> None:
        if self._attempt is not None:
            if event.attempt <= self._attempt.number:
                return
            raise ImpossibleError(
                f"attempt {event.attempt} begins, but {self._attempt.number} is undecided"
            )
        if event.base_version != self.words.committed:
            raise ImpossibleError(
                f"attempt {event.attempt} is based on version {event.base_version}, but"
                f" {self.words.committed} is committed"
            )
        update = OptimizerStep.speculative(
            version=event.base_version + 1,
            loss_scale=event.loss_scale,
            learning_rate=event.learning_rate,
        )
        attempt = self._attempt = AttemptProgress(
            number=event.attempt, update=update, hold=event.hold
        )
        self._pulls.order(
            self._blocks.remote,
            epoch=self.number,
            since_epoch=self.number,
            attempt=attempt.number,
            version=update.version,
        )
        if event.hold:  # the state may catch up while the workers compute
            self._queue_settles(self._blocks.active)
        else:
            for block in self._blocks.on_devices:
                self.words.vacate(block, update.version)
            self._queue_settles(self._blocks.settled_early)
        for early in self._early.pop(event.attempt, ()):
            self.handle(early)
        self._early = {n: events for n, events in self._early.items() if n > event.attempt}

    def _of_attempt(self, event: GradientsReady | DeviceUpdated) -> AttemptProgress | None:
        """The attempt under way if a worker speaks of it; what is early is kept."""
        if self._attempt is not None and event.attempt == self._attempt.number:
            return self._attempt
        if event.attempt > self.attempt:
            # The worker heard of the attempt, or computed it, before our own message came.
            self._early.setdefault(event.attempt, []).append(event)
        return None

    def _on_gradients(self, event: GradientsReady) -> None:
        pair = (event.block, event.contribution)
        if pair in self._blocks.local and (attempt := self._of_attempt(event)) is not None:
            self._mark_ready(attempt, *pair)

    def _on_device_updated(self, event: DeviceUpdated) -> None:
        block, attempt = event.block, self._of_attempt(event)
        if attempt is None or block not in self._on_devices(attempt) or block in attempt.reported:
            return
        if self.words.pending(block) is not None:
            raise ImpossibleError(
                f"a worker updated block {block} in attempt {attempt.number}, whose state is not at"
                f" version {self.words.committed} yet"
            )
        self.words.set_slot(block, attempt.update.version)
        attempt.previewed[block] = attempt.update
        self._report(attempt, block, event.status, event.seconds)

    def _on_devices(self, attempt: AttemptProgress) -> tuple[int, ...]:
        """The blocks whose preview is a worker's."""
        return () if attempt.hold else self._blocks.on_devices

    def _mark_ready(self, attempt: AttemptProgress, block: int, contribution: int) -> None:
        ready = attempt.ready.setdefault(block, set())
        if contribution in ready:
            return
        ready.add(contribution)
        startable = self._blocks.startable(block, attempt.ready)
        elsewhere = self._on_devices(attempt)
        self._plan(WorkKind.UPDATE, [b for b in startable if b not in elsewhere])

    # ---- decisions ----

    def _decided(self, attempt: int, record_version: int) -> AttemptProgress:
        """The attempt under way, when a decision about it is possible."""
        current = self._attempt
        if current is None or current.number != attempt:
            raise ImpossibleError(f"attempt {attempt} is decided, but {self.attempt} is under way")
        if record_version != current.update.version:
            raise ImpossibleError(
                f"attempt {attempt} leads to version {current.update.version}, the decision is"
                f" about {record_version}"
            )
        missing = (set(self._blocks.active) - current.reported) | current.amending
        if missing:
            raise ImpossibleError(
                f"attempt {attempt} is decided before the sweep of blocks {sorted(missing)}"
            )
        return current

    def _on_amend(self, event: AmendAsked) -> None:
        attempt = self._decided(event.attempt, event.record.version)
        attempt.amended = OptimizerStep.of(event.record)
        attempt.amending = set(self._blocks.active)
        self._plan(WorkKind.AMEND, self._blocks.active)
        self._report_amended(attempt)

    def _report_amended(self, attempt: AttemptProgress) -> None:
        if not attempt.amending:
            self._out.append(SendAmended(epoch=self.number, attempt=attempt.number))

    def _on_commit(self, event: CommitAsked) -> None:
        record, words = event.record, self.words
        if record.version == words.committed:
            return
        attempt = self._decided(record.attempt, record.version)
        promised = OptimizerStep.of(record)
        unlike = [b for b in self._blocks.active if attempt.previewed.get(b) != promised]
        for block in unlike:
            # Normally a hold, and nothing is there; weights of another step must not become
            # readable by the flip.
            words.forget(block, record.version)
        words.commit(record)
        words.follow_commit(self._blocks.empty)
        self._attempt = None
        self._plan(WorkKind.COMPLETE, unlike)

    def _on_skip(self, event: SkipAsked) -> None:
        attempt = self._attempt
        if attempt is None or attempt.number != event.attempt:
            return
        self._queue = deque(
            work for work in self._queue if work.kind not in (WorkKind.UPDATE, WorkKind.AMEND)
        )
        self._attempt = None
        for block in self._blocks.active:
            self.words.forget(block, attempt.update.version)
        self._pulls.cancel()

    # ---- settling ----

    def _on_settle(self, event: SettleAsked) -> None:
        if event.version != self.words.committed:
            raise ImpossibleError(
                f"state is to be settled at version {event.version}, but {self.words.committed} is"
                " committed"
            )
        self._settling = self._queue_settles(self._blocks.active)
        self._report_settled()

    def _queue_settles(self, blocks: Iterable[int]) -> set[int]:
        """Queue those of ``blocks`` whose state lags, once; returns them."""
        lagging = [b for b in blocks if self.words.pending(b) is not None]
        queued = {work.block for work in self._queue if work.kind is WorkKind.SETTLE}
        self._plan(WorkKind.SETTLE, [b for b in lagging if b not in queued])
        return set(lagging)

    def _report_settled(self) -> None:
        if not self._settling:
            self._out.append(SendSettled(epoch=self.number, version=self.words.committed))

    # ---- sweeps ----

    def _plan(self, kind: WorkKind, blocks: Iterable[int]) -> None:
        self._queue.extend(QueuedWork(kind=kind, block=block) for block in blocks)

    def start_next(self) -> None:
        """Start the sweep whose turn it is, unless one is running."""
        while self._running is None and self._queue:
            work = self._queue.popleft()
            sweep = self._CHOOSERS[work.kind](work.block, self.words, self._attempt)
            if sweep is None:
                self._finish(work, None, None)
                continue
            attempt = self._attempt if work.kind in (WorkKind.UPDATE, WorkKind.AMEND) else None
            if attempt is not None:
                attempt.previewed.pop(work.block, None)
            number = None if attempt is None else attempt.number
            self._running = RunningSweep(work=work, sweep=sweep, attempt=number)
            self.words.open_sweep(sweep)
            self._out.append(RunSweep(work=sweep))

    def sweep_done(self, event: SweepDone) -> None:
        """The running sweep has ended; its words are written even if the epoch is abandoned."""
        running, self._running = self._running, None
        assert running is not None, "no sweep was running"
        # Weights of an attempt that was skipped or abandoned meanwhile stay invalid.
        current = running.attempt is None or running.attempt == self.attempt
        self.words.close_sweep(running.sweep, keep_weights=current)
        if current:
            self._finish(running.work, running.sweep, event)

    def _finish(self, work: QueuedWork, sweep: Sweep | None, done: SweepDone | None) -> None:
        """``sweep`` and ``done`` are None if nothing was left to do."""
        self._FINISHERS[work.kind](self, work, sweep, done)

    def _finish_update(self, work: QueuedWork, sweep: Sweep | None, done: SweepDone | None) -> None:
        assert self._attempt is not None and done is not None
        if done.status is None:
            self._queue.appendleft(work)  # settled first; its new gradients are looked at now
            return
        if isinstance(sweep, Preview | Advance):
            self._attempt.previewed[work.block] = sweep.update
        self._report(self._attempt, work.block, done.status, done.seconds)

    def _report(
        self, attempt: AttemptProgress, block: int, status: SweepStatus, seconds: float
    ) -> None:
        attempt.reported.add(block)
        self._out.append(
            SendBlockStatus(
                epoch=self.number,
                attempt=attempt.number,
                block=block,
                status=status,
                seconds=seconds,
            )
        )

    def _finish_amend(self, work: QueuedWork, sweep: Sweep | None, done: SweepDone | None) -> None:
        assert self._attempt is not None and isinstance(sweep, Preview | Hold)
        self._attempt.previewed[work.block] = sweep.update
        self._attempt.amending.discard(work.block)
        self._report_amended(self._attempt)

    def _finish_settle(self, work: QueuedWork, sweep: Sweep | None, done: SweepDone | None) -> None:
        if work.block in self._settling:
            self._settling.discard(work.block)
            self._report_settled()

    def _finish_recovery(
        self, work: QueuedWork, sweep: Sweep | None, done: SweepDone | None
    ) -> None:
        """Of what a commit during the epoch left to complete, nobody waits for the end."""
        self._recovery.left.pop(work, None)

    _HANDLERS: ClassVar[Handlers] = {
        AttemptAsked: _on_attempt,
        GradientsReady: _on_gradients,
        DeviceUpdated: _on_device_updated,
        AmendAsked: _on_amend,
        CommitAsked: _on_commit,
        SkipAsked: _on_skip,
        SettleAsked: _on_settle,
    }
    _CHOOSERS: ClassVar[Mapping[WorkKind, Chooser]] = CHOOSERS
    _FINISHERS: ClassVar[Finishers] = {
        WorkKind.UPDATE: _finish_update,
        WorkKind.AMEND: _finish_amend,
        WorkKind.SETTLE: _finish_settle,
        WorkKind.COMPLETE: _finish_recovery,
        WorkKind.FINISH: _finish_recovery,
    }
