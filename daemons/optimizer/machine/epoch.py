"""Holds the parts that every epoch of optimizerd has: words, queued work, the current attempt,
settles.

The rules that choose the sweep of a piece of work, and handle decisions, are separate:
:mod:`penstock.daemons.optimizer.machine.exact`, or for steps in place
:mod:`penstock.daemons.optimizer.machine.arithmetic`. Each has one :class:`Epoch`.
:mod:`penstock.daemons.optimizer.machine.machine` decides whether an event reaches the epoch.

One sweep runs at a time, on all threads of the pool. Work waits in order of arrival, and work for
every block is queued in forward order. The sweep of a piece of work is chosen at its turn, from the
block's state version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import TypeAlias

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
    SendHeard,
    SendSettled,
    SettleAsked,
    SkipAsked,
)
from penstock.daemons.optimizer.machine.recovery import ImpossibleError, begin_recovery
from penstock.daemons.optimizer.machine.sweeps import Sweep
from penstock.daemons.optimizer.machine.words import WordsMirror
from penstock.daemons.optimizer.machine.work import (
    AttemptProgress,
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
"""Events that a recovered epoch accepts."""


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
        self.blocks = blocks
        self.attempt: AttemptProgress | None = None
        self._pulls = pulls
        self._out = effects
        self._early: dict[int, list[GradientsReady | DeviceUpdated]] = {}
        # blocks with a copy of the state that is still being read
        self._unvacated: tuple[int, ...] = ()
        self._settling: set[int] = set()  # blocks that Settled waits for
        self._queue: deque[QueuedWork] = deque()
        self._running: RunningSweep | None = None
        self._validated = (-1, 0)  # committed version and attempt at the last check
        self._recovery = begin_recovery(begin, self.words, blocks, pulls)
        if not self._recovery.awaited:
            self._queue.extend(self._recovery.left)

    # ---- queries ----

    @property
    def attempt_number(self) -> int:
        """Number of the attempt under way, 0 if there is none."""
        return 0 if self.attempt is None else self.attempt.number

    @property
    def busy(self) -> bool:
        """True while a sweep runs."""
        return self._running is not None

    @property
    def recovered(self) -> bool:
        """True if the recovery has completed the commit."""
        return self._recovery.done

    @property
    def queue_length(self) -> int:
        """Number of blocks that wait for their turn."""
        return len(self._queue)

    def awaited(self) -> tuple[GradientsReady, ...]:
        """Returns the contributions of this node that the attempt under way still waits for."""
        attempt = self.attempt
        if attempt is None:
            return ()
        return tuple(
            GradientsReady(
                epoch=self.number, attempt=attempt.number, block=block, contribution=contribution
            )
            for block, contribution in self.blocks.local
            if contribution not in attempt.ready.get(block, ())
        )

    def waits_for(self) -> str | None:
        """Returns what the next sweep waits for, a cause of the metrics; None: one runs."""
        attempt = self.attempt
        if self._running is not None:
            return None
        if attempt is None or not self.recovered:
            return "idle"

        def lacks(pairs: Iterable[tuple[int, int]]) -> bool:
            return any(k not in attempt.ready.get(block, ()) for block, k in pairs)

        if lacks(self.blocks.local):
            return "gradients"
        return "fetches" if lacks(self.blocks.remote) else "decision"

    def due(self, *kinds: WorkKind) -> set[int]:
        """Returns the blocks for which work of these kinds waits or runs."""
        running = () if self._running is None else (self._running.work,)
        return {work.block for work in (*self._queue, *running) if work.kind in kinds}

    def validate(self) -> list[int]:
        """Checks the invariants of all rules; returns the blocks to be checked further.

        After a decision or a new attempt these are all blocks. Otherwise they are the blocks with
        newly changed words: the loop checks after every event, and a model may have hundreds of
        blocks.

        Raises:
            ValueError: naming what contradicts what.
        """
        if len(set(self._queue)) != len(self._queue):
            raise ValueError(f"work is queued twice: {list(self._queue)}")
        committed, now = self.words.committed, (self.words.committed, self.attempt_number)
        changed, self.words.changed = self.words.changed, set()
        blocks = [b for b in self.blocks.active if b in changed or now != self._validated]
        self._validated = now
        completing = self.due(WorkKind.COMPLETE)
        for block in blocks:
            self.words.validate_slots(block)
            if not self.words.holds(block, committed) and block not in completing:
                raise ValueError(f"block {block}: no weights of the committed {committed}")
            newest = self.words.newest_slot(block)
            previewed = self.attempt is not None and block in self.attempt.previewed
            if newest > committed and not previewed:
                raise ValueError(f"block {block}: weights of {newest} from no attempt")
        return blocks

    # ---- attempts ----

    def begin_attempt(self, event: AttemptAsked) -> AttemptProgress | None:
        """Begins an attempt and orders its pulls; returns it, or None if it is an old one."""
        if self.attempt is not None:
            if event.attempt <= self.attempt.number:
                return None
            raise ImpossibleError(
                f"attempt {event.attempt} begins, but {self.attempt.number} is undecided"
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
        self._unvacated = ()
        self.attempt = AttemptProgress(number=event.attempt, update=update, hold=event.hold)
        self._pulls.order(
            self.blocks.remote,
            epoch=self.number,
            since_epoch=self.number,
            attempt=event.attempt,
            version=update.version,
        )
        if not self.blocks.active:
            self._out.append(SendHeard(epoch=self.number, attempt=event.attempt))
        return self.attempt

    def vacate(self, blocks: Iterable[int]) -> None:
        """Invalidates slots, so that workers may write the attempt's weights, and the state of
        flushed blocks. A block waits until no save reads the bytes to be overwritten.
        """
        assert self.attempt is not None, "weights are of an attempt"
        target, waiting = self.attempt.update.version, []
        for block in blocks:
            if block in self.blocks.flushed and self.words.pins.get(block, target) < target - 1:
                waiting.append(block)
            else:
                self.words.vacate(block, target)
        self._unvacated = tuple(waiting)

    def pins_seen(self, pins: Mapping[int, int]) -> None:
        """Records the versions that memoryd has not read yet."""
        self.words.pins = dict(pins)
        if self.attempt is not None and self._unvacated:
            self.vacate(self._unvacated)

    def came_early(self) -> list[GradientsReady | DeviceUpdated]:
        """Returns what workers said of the attempt before it began; drops what is older."""
        number = self.attempt_number
        early = self._early.pop(number, [])
        self._early = {n: events for n, events in self._early.items() if n > number}
        return early

    def of_attempt(self, event: GradientsReady | DeviceUpdated) -> AttemptProgress | None:
        """Returns the attempt under way if a worker speaks of it; keeps what is early."""
        if self.attempt is not None and event.attempt == self.attempt.number:
            return self.attempt
        if event.attempt > self.attempt_number:
            # The worker received or computed the attempt before our own message arrived.
            self._early.setdefault(event.attempt, []).append(event)
        return None

    def gradients_ready(self, event: GradientsReady) -> tuple[int, ...]:
        """Returns the blocks that can begin their update after a local contribution."""
        pair = (event.block, event.contribution)
        if pair in self.blocks.local and (attempt := self.of_attempt(event)) is not None:
            return self._mark_ready(attempt, *pair)
        return ()

    def pulled(self, event: Pulled) -> tuple[int, ...]:
        """Returns the blocks that can begin their update after another node's contribution."""
        self._pulls.arrived(event)
        pair, recovery = (event.block, event.contribution), self._recovery
        if pair in recovery.awaited:
            recovery.awaited.discard(pair)
            if not recovery.awaited:
                self._queue.extend(recovery.left)
        elif self.attempt is not None and self.attempt.number == event.attempt:
            return self._mark_ready(self.attempt, *pair)
        return ()

    def _mark_ready(
        self, attempt: AttemptProgress, block: int, contribution: int
    ) -> tuple[int, ...]:
        ready = attempt.ready.setdefault(block, set())
        if contribution in ready:
            return ()
        ready.add(contribution)
        return self.blocks.startable(block, attempt.ready)

    def report(
        self, attempt: AttemptProgress, block: int, status: SweepStatus, seconds: float
    ) -> None:
        """Tells the scheduler about a block's gradients."""
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

    # ---- decisions ----

    def decided(self, attempt: int, record_version: int) -> AttemptProgress:
        """Returns the attempt under way, when a decision about it is possible."""
        current = self.attempt
        if current is None or current.number != attempt:
            raise ImpossibleError(
                f"attempt {attempt} is decided, but {self.attempt_number} is under way"
            )
        if record_version != current.update.version:
            raise ImpossibleError(
                f"attempt {attempt} leads to version {current.update.version}, the decision is"
                f" about {record_version}"
            )
        missing = (set(self.blocks.active) - current.reported) | current.amending
        if missing:
            raise ImpossibleError(
                f"attempt {attempt} is decided before the sweep of blocks {sorted(missing)}"
            )
        return current

    def begin_amend(self, event: AmendAsked) -> AttemptProgress:
        """Asks all blocks for the step of the event's record; Amended follows when they have it."""
        attempt = self.decided(event.attempt, event.record.version)
        attempt.amended = OptimizerStep.of(event.record)
        attempt.amending = set(self.blocks.active)
        return attempt

    def amended(self, block: int, update: OptimizerStep) -> None:
        """Notes that the block's slot holds the weights of the clipped step."""
        assert self.attempt is not None, "amends go with their attempt"
        self.attempt.previewed[block] = update
        self.attempt.amending.discard(block)
        self.report_amended(self.attempt)

    def report_amended(self, attempt: AttemptProgress) -> None:
        """Reports to the scheduler once no block is missing."""
        if not attempt.amending:
            self._out.append(SendAmended(epoch=self.number, attempt=attempt.number))

    def commit(self, event: CommitAsked) -> None:
        """Flips the committed version, and plans work for blocks without the committed step in
        their slot.
        """
        record, words = event.record, self.words
        if record.version == words.committed:
            return
        attempt = self.decided(record.attempt, record.version)
        promised = OptimizerStep.of(record)
        unlike = [b for b in self.blocks.active if attempt.previewed.get(b) != promised]
        for block in unlike:
            # Normally a hold, and nothing is there; weights of another step must not become
            # readable by the flip.
            words.forget(block, record.version)
        words.commit(record)
        words.follow_commit(self.blocks.empty)
        for block, step in attempt.flushed.items():
            if step == promised:  # after the commit: until then the other copy is the state
                words.set_state(block, record.version)
        self.attempt = None
        self.plan(WorkKind.COMPLETE, unlike)

    def skip(self, event: SkipAsked) -> bool:
        """Drops the current attempt; returns False if the event is about another attempt."""
        attempt = self.attempt
        if attempt is None or attempt.number != event.attempt:
            return False
        self._queue = deque(
            work for work in self._queue if work.kind not in (WorkKind.UPDATE, WorkKind.AMEND)
        )
        self.attempt = None
        for block in self.blocks.active:
            self.words.forget(block, attempt.update.version)
        self._pulls.cancel()
        return True

    def abandon(self) -> None:
        """Discards all planned work; the running sweep continues, and its words are written at its
        end.
        """
        self._queue.clear()
        self._settling.clear()
        self.attempt = None

    # ---- settling ----

    def settle(self, event: SettleAsked, taking_back: Iterable[int] = ()) -> None:
        """Brings the state of all blocks to the committed version: lagging blocks, and blocks that
        are being inverted to it. Settled follows.
        """
        if event.version != self.words.committed:
            raise ImpossibleError(
                f"state is to be settled at version {event.version}, but {self.words.committed} is"
                " committed"
            )
        self._settling = self.queue_settles(self.blocks.active) | set(taking_back)
        self._report_settled()

    def queue_settles(self, blocks: Iterable[int]) -> set[int]:
        """Queues each of ``blocks`` with lagging state once; returns them."""
        lagging = [b for b in blocks if self.words.pending(b) is not None]
        queued = {work.block for work in self._queue if work.kind is WorkKind.SETTLE}
        self.plan(WorkKind.SETTLE, [b for b in lagging if b not in queued])
        return set(lagging)

    def settled(self, block: int) -> None:
        """Notes that the block's state is at the committed version."""
        if block in self._settling:
            self._settling.discard(block)
            self._report_settled()

    def _report_settled(self) -> None:
        if not self._settling:
            self._out.append(SendSettled(epoch=self.number, version=self.words.committed))

    # ---- work ----

    def plan(self, kind: WorkKind, blocks: Iterable[int]) -> None:
        """Queues work for blocks."""
        self._queue.extend(QueuedWork(kind=kind, block=block) for block in blocks)

    def again(self, work: QueuedWork) -> None:
        """Puts work back before all other work: it needs another sweep."""
        self._queue.appendleft(work)

    def waiting(self) -> tuple[QueuedWork, ...]:
        """Returns the work that waits for its turn, in order; none while a sweep is running."""
        return () if self._running is not None else tuple(self._queue)

    def take(self, work: QueuedWork) -> None:
        """Takes ``work`` off the queue: its turn has come."""
        self._queue.remove(work)

    def run(self, work: QueuedWork, sweep: Sweep) -> None:
        """Starts a sweep: its words are written first, so that recovery finds its intent."""
        attempt = self.attempt if work.kind in (WorkKind.UPDATE, WorkKind.AMEND) else None
        if attempt is not None:
            attempt.previewed.pop(work.block, None)
        number = None if attempt is None else attempt.number
        self._running = RunningSweep(work=work, sweep=sweep, attempt=number)
        self.words.open_sweep(sweep)
        self._out.append(RunSweep(work=sweep))

    def ended(self) -> RunningSweep | None:
        """Writes the words of the ended sweep, even if the epoch is abandoned.

        Returns the sweep, or None if its attempt was skipped or abandoned meanwhile; its weights
        then stay invalid.
        """
        running, self._running = self._running, None
        assert running is not None, "no sweep was running"
        current = running.attempt is None or running.attempt == self.attempt_number
        self.words.close_sweep(running.sweep, keep_weights=current)
        return running if current else None

    def recovered_from(self, work: QueuedWork) -> None:
        """Notes that work is done. Ready waits only for the work of this epoch's beginning, not for
        work that later commits leave.
        """
        self._recovery.left.pop(work, None)
