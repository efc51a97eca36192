"""What optimizerd decides: which pass runs next, and which words and messages follow.

Pure: events come in, effects go out (:mod:`penstock.daemons.optimizer.events`), to be carried out
in order. No threads, sockets, clocks or memory; the control words are mirrored in a
:class:`~penstock.daemons.optimizer.ledger.Ledger`.

Life (``Phase``)::

    IDLE -- Begin --> RECOVERING -- all the commit promises is there --> LIVE
     ^                     |                                               |
     +------- Drain -------+-----------------------------------------------+
    any -- stop asked --> STOPPING -- the running pass has ended --> STOPPED
    any -- a contradiction --> STOPPED

One pass runs at a time, on all threads of the pool; work waits in order of arrival, and what is
due for every block is queued in forward order. Which pass a piece of work needs is decided when
its turn comes, from the block's state version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, TypeAlias

from penstock.daemons.optimizer.events import (
    AmendAsked,
    AttemptAsked,
    BeginAsked,
    Broken,
    CancelPulls,
    CommitAsked,
    DrainAsked,
    Effect,
    EndPass,
    Event,
    Exit,
    GradientsReady,
    MemoryFacts,
    OwnedBlock,
    PassDone,
    Pull,
    Pulled,
    RunPass,
    SendAmended,
    SendBlockStatus,
    SendDrained,
    SendFailed,
    SendReady,
    SendSettled,
    SetEpoch,
    SettleAsked,
    SkipAsked,
    StopAsked,
)
from penstock.daemons.optimizer.ledger import Ledger
from penstock.daemons.optimizer.passes import Advance, Pass, Preview, Update
from penstock.daemons.optimizer.recovery import (
    ImpossibleError,
    Interrupted,
    check_begin,
    interrupted_pass,
)
from penstock.daemons.optimizer.work import Attempt, Kind, Running, Work, choose_pass
from penstock.protocol.errors import ExitCode
from penstock.shm.control import CommitRecord

_Finisher: TypeAlias = "Callable[[OptimizerState, Work, Pass | None, PassDone | None], None]"


class Phase(Enum):
    """See the module."""

    IDLE = auto()
    RECOVERING = auto()
    LIVE = auto()
    STOPPING = auto()
    STOPPED = auto()


@dataclass(slots=True, kw_only=True)
class Recovery:
    """A Begin under way: what is still missing before Ready.

    ``finish``: the block whose settle was cut short; ``awaited``: contributions being pulled;
    ``left``: blocks without their committed weights, None as long as nothing may be written.
    """

    finish: int | None
    finishing: bool = False
    awaited: set[tuple[int, int]] = field(default_factory=set)
    left: set[int] | None = None


class OptimizerState:
    """optimizerd of one node, which owns ``blocks``."""

    def __init__(self, blocks: Sequence[OwnedBlock]) -> None:
        self._blocks = {block.index: block for block in sorted(blocks, key=lambda b: b.index)}
        self._active = tuple(b.index for b in self._blocks.values() if b.contributions)
        self._empty = tuple(b.index for b in self._blocks.values() if not b.contributions)
        self.phase = Phase.IDLE
        self.joined_epoch = 0
        """Epoch of the last Begin, 0 before the first."""
        self._epoch = 0  # of the last Drain or Begin: nothing older is obeyed
        self._out: list[Effect] = []
        self._ledger: Ledger | None = None
        self._recovery: Recovery | None = None
        self._attempt: Attempt | None = None
        self._early: dict[int, set[tuple[int, int]]] = {}
        self._held: dict[tuple[int, int, int], int] = {}  # (block, contribution, copy) -> attempt
        self._queue: deque[Work] = deque()
        self._running: Running | None = None
        self._farewell: Effect | None = None  # due when the running pass has ended
        self._amending: set[int] | None = None
        self._settling: set[int] | None = None

    # ---- looking from outside ----

    @property
    def committed(self) -> int:
        """The committed version, 0 before the first Begin."""
        return 0 if self._ledger is None else self._ledger.committed

    @property
    def attempt(self) -> int:
        """Number of the attempt under way, 0 if there is none."""
        return 0 if self._attempt is None else self._attempt.number

    @property
    def queue_length(self) -> int:
        """Blocks that wait for their turn."""
        return len(self._queue)

    def awaited(self) -> tuple[GradientsReady, ...]:
        """The contributions of this node that the attempt under way still waits for."""
        attempt = self._attempt
        if attempt is None or self.phase is not Phase.LIVE:
            return ()
        return tuple(
            GradientsReady(
                epoch=self.joined_epoch,
                attempt=attempt.number,
                block=block,
                contribution=contribution,
            )
            for block in self._active
            for contribution in range(self._blocks[block].contributions)
            if contribution not in self._blocks[block].remote
            and contribution not in attempt.ready.get(block, ())
        )

    def validate(self) -> None:
        """Check the invariants of memory and queue.

        Raises:
            ValueError: naming what contradicts what.
        """
        if self.phase is not Phase.LIVE:
            return
        assert self._ledger is not None
        self._ledger.validate(frozenset(self._active))
        if len(set(self._queue)) != len(self._queue):
            raise ValueError(f"work is queued twice: {list(self._queue)}")
        due = {work.block for work in self._queue if work.kind is Kind.COMPLETE}
        if self._running is not None and self._running.work.kind is Kind.COMPLETE:
            due.add(self._running.work.block)
        for block in self._active:
            if not self._ledger.holds(block, self.committed) and block not in due:
                raise ValueError(f"block {block}: no weights of the committed {self.committed}")
            newest = self._ledger.newest_slot(block)
            previewed = self._attempt is not None and block in self._attempt.previewed
            if newest > self.committed and not previewed:
                raise ValueError(f"block {block}: weights of {newest} from no attempt")

    # ---- the one entrance ----

    def handle(self, event: Event) -> list[Effect]:
        """React to an event; the effects are to be carried out in order, all of them."""
        if self.phase is Phase.STOPPED:
            return []
        try:
            self._HANDLERS[type(event)](self, event)
            self._start_next()
        except ImpossibleError as error:
            # A wrong memory is the user's to mend; either way nothing more is written.
            of_memory = isinstance(event, BeginAsked)
            self._fail(str(error), ExitCode.BAD_CONFIG if of_memory else ExitCode.LOST_MEMBERS)
        out = list(self._out)
        self._out.clear()  # in place: the ledger appends to the same list
        return out

    # ---- epochs ----

    def _too_old(self, epoch: int) -> bool:
        """Whether a new epoch is none; a stopping process enters none at all."""
        stopping = self.phase is Phase.STOPPING
        return stopping or epoch < self._epoch or epoch <= self.joined_epoch

    def _on_drain(self, event: DrainAsked) -> None:
        if self._too_old(event.epoch):
            return
        self._epoch = event.epoch
        self.phase = Phase.IDLE
        self._abandon()
        self._say_after_pass(SendDrained(epoch=event.epoch))

    def _on_stop(self, event: StopAsked) -> None:
        self.phase = Phase.STOPPING
        self._abandon()
        self._say_after_pass(Exit(code=ExitCode.DONE))

    def _abandon(self) -> None:
        """Forget all that is planned; the running pass goes on, and its words follow it."""
        self._queue.clear()
        self._early.clear()
        self._attempt = self._recovery = self._amending = self._settling = None
        if any(block.remote for block in self._blocks.values()):
            self._out.append(CancelPulls())

    def _say_after_pass(self, farewell: Effect) -> None:
        if self._running is not None:
            self._farewell = farewell
            return
        self._farewell = None
        self._out.append(farewell)
        if isinstance(farewell, Exit):
            self.phase = Phase.STOPPED

    def _on_begin(self, event: BeginAsked) -> None:
        if self._too_old(event.epoch):
            return
        if self._running is not None:
            raise ImpossibleError(f"epoch {event.epoch} begins before the old one has drained")
        check_begin(event, self._blocks.values())
        self._epoch = self.joined_epoch = event.epoch
        self.phase = Phase.RECOVERING
        self._abandon()
        self._ledger = Ledger(event.facts, self._out)
        self._recovery = Recovery(finish=self._resolve_intent(event.facts))
        # A pass that was cut short leads to the committed version, so then this changes nothing
        # that finishing it needs; it only makes sure of the record.
        self._ledger.commit(event.record)
        for block in self._active:
            self._ledger.forget(block, event.record.version + 1)
        self._follow_commit()
        self._pull_pending(event.record)
        self._recover()

    def _resolve_intent(self, facts: MemoryFacts) -> int | None:
        """Clear the intent of a pass that needs no repair; else the block to be repaired."""
        assert self._ledger is not None
        intent, found = facts.interrupted, interrupted_pass(facts)
        if intent is None:
            return None
        if found is Interrupted.CUT_SHORT:
            return intent.block
        if found is Interrupted.COMPLETE:
            self._ledger.set_state(intent.block, intent.state_version)
        self._out.append(EndPass())
        return None

    def _pull_pending(self, record: CommitRecord) -> None:
        """Have at hand what later settles need; a new optimizerd has lost what it had pulled."""
        assert self._ledger is not None and self._recovery is not None
        version, attempt = record.version, record.attempt
        for block in self._active:
            if self._ledger.pending(block) is None:
                continue
            for contribution in sorted(self._blocks[block].remote):
                if self._held.get((block, contribution, version % 2)) != attempt:
                    self._recovery.awaited.add((block, contribution))
                    self._pull(block, contribution, version, attempt, since_epoch=0)

    def _recover(self) -> None:
        """Take the next steps of a Begin that are possible: finish, complete, say Ready."""
        recovery, ledger = self._recovery, self._ledger
        assert recovery is not None and ledger is not None
        if recovery.awaited:
            return
        if recovery.finish is not None:
            if not recovery.finishing:
                recovery.finishing = True
                self._queue.append(Work(kind=Kind.FINISH, block=recovery.finish))
            return
        if recovery.left is None:
            incomplete = [b for b in self._active if not ledger.holds(b, ledger.committed)]
            recovery.left = set(incomplete)
            self._queue.extend(Work(kind=Kind.COMPLETE, block=block) for block in incomplete)
        if not recovery.left:
            self._recovery = None
            self.phase = Phase.LIVE
            self._out += [SetEpoch(epoch=self._epoch), SendReady(epoch=self._epoch)]

    # ---- attempts ----

    def _live(self, epoch: int) -> bool:
        return self.phase is Phase.LIVE and epoch == self.joined_epoch

    def _on_attempt(self, event: AttemptAsked) -> None:
        if not self._live(event.epoch):
            return
        if self._attempt is not None:
            if event.attempt <= self._attempt.number:
                return
            raise ImpossibleError(
                f"attempt {event.attempt} begins, but {self._attempt.number} is undecided"
            )
        if event.base_version != self.committed:
            raise ImpossibleError(
                f"attempt {event.attempt} is based on version {event.base_version}, but"
                f" {self.committed} is committed"
            )
        update = Update.speculative(
            version=event.base_version + 1,
            loss_scale=event.loss_scale,
            learning_rate=event.learning_rate,
        )
        self._attempt = Attempt(number=event.attempt, update=update, hold=event.hold)
        for block in self._active:
            for contribution in sorted(self._blocks[block].remote):
                self._pull(block, contribution, update.version, event.attempt, event.epoch)
        if event.hold:  # the state may catch up while the workers compute
            self._queue_settles()
        for block, contribution in sorted(self._early.pop(event.attempt, ())):
            self._mark_ready(block, contribution)
        self._early = {n: ready for n, ready in self._early.items() if n > event.attempt}

    def _pull(
        self, block: int, contribution: int, version: int, attempt: int, since_epoch: int
    ) -> None:
        self._held.pop((block, contribution, version % 2), None)
        self._out.append(
            Pull(
                epoch=self._epoch,
                since_epoch=since_epoch,
                attempt=attempt,
                version=version,
                block=block,
                contribution=contribution,
            )
        )

    def _on_pulled(self, event: Pulled) -> None:
        if event.epoch != self.joined_epoch or self.phase not in (Phase.RECOVERING, Phase.LIVE):
            return
        self._held[(event.block, event.contribution, event.version % 2)] = event.attempt
        if self._recovery is not None:
            self._recovery.awaited.discard((event.block, event.contribution))
            self._recover()
        elif self._attempt is not None and self._attempt.number == event.attempt:
            self._mark_ready(event.block, event.contribution)

    def _on_gradients(self, event: GradientsReady) -> None:
        block = self._blocks.get(event.block)
        if not self._live(event.epoch) or block is None or event.contribution in block.remote:
            return
        if event.contribution >= block.contributions:
            return
        if self._attempt is not None and event.attempt == self._attempt.number:
            self._mark_ready(event.block, event.contribution)
        elif event.attempt > self.attempt:
            # The worker heard of the attempt, or computed it, before our own message came.
            early = self._early.setdefault(event.attempt, set())
            early.add((event.block, event.contribution))

    def _mark_ready(self, block: int, contribution: int) -> None:
        assert self._attempt is not None
        ready = self._attempt.ready.setdefault(block, set())
        if contribution in ready:
            return
        ready.add(contribution)
        if len(ready) == self._blocks[block].contributions:
            self._queue.append(Work(kind=Kind.UPDATE, block=block))

    # ---- decisions ----

    def _decided(self, attempt: int, record_version: int) -> Attempt:
        """The attempt under way, when a decision about it is possible."""
        current = self._attempt
        if current is None or current.number != attempt:
            raise ImpossibleError(f"attempt {attempt} is decided, but {self.attempt} is under way")
        if record_version != current.update.version:
            raise ImpossibleError(
                f"attempt {attempt} leads to version {current.update.version}, the decision is"
                f" about {record_version}"
            )
        missing = set(self._active) - current.reported
        if missing or self._amending:
            raise ImpossibleError(
                f"attempt {attempt} is decided before the pass of blocks"
                f" {sorted(missing | (self._amending or set()))}"
            )
        return current

    def _on_amend(self, event: AmendAsked) -> None:
        if not self._live(event.epoch):
            return
        attempt = self._decided(event.attempt, event.record.version)
        attempt.amended = Update.of(event.record)
        self._amending = set(self._active)
        self._queue.extend(Work(kind=Kind.AMEND, block=block) for block in self._active)
        self._report_amended()

    def _report_amended(self) -> None:
        if self._amending is not None and not self._amending:
            self._amending = None
            self._out.append(SendAmended(epoch=self.joined_epoch, attempt=self.attempt))

    def _on_commit(self, event: CommitAsked) -> None:
        record = event.record
        if not self._live(event.epoch) or record.version == self.committed:
            return
        attempt, ledger = self._decided(record.attempt, record.version), self._ledger
        assert ledger is not None
        promised = Update.of(record)
        unlike = [b for b in self._active if attempt.previewed.get(b) != promised]
        for block in unlike:
            # Normally a hold, and nothing is there; weights of another step must not become
            # readable by the flip.
            ledger.forget(block, record.version)
        ledger.commit(record)
        self._follow_commit()
        self._attempt = None
        self._queue.extend(Work(kind=Kind.COMPLETE, block=block) for block in unlike)

    def _follow_commit(self) -> None:
        """Blocks without trainable elements are always complete."""
        assert self._ledger is not None
        for block in self._empty:
            self._ledger.set_state(block, self.committed)
            self._ledger.set_slot(block, self.committed)

    def _on_skip(self, event: SkipAsked) -> None:
        attempt = self._attempt
        if not self._live(event.epoch) or attempt is None or attempt.number != event.attempt:
            return
        assert self._ledger is not None
        self._queue = deque(
            work for work in self._queue if work.kind not in (Kind.UPDATE, Kind.AMEND)
        )
        self._attempt = self._amending = None
        for block in self._active:
            self._ledger.forget(block, attempt.update.version)
        if any(block.remote for block in self._blocks.values()):
            self._out.append(CancelPulls())

    # ---- settling ----

    def _on_settle(self, event: SettleAsked) -> None:
        if not self._live(event.epoch):
            return
        if event.version != self.committed:
            raise ImpossibleError(
                f"state is to be settled at version {event.version}, but {self.committed} is"
                " committed"
            )
        self._settling = self._queue_settles()
        self._report_settled()

    def _queue_settles(self) -> set[int]:
        """Queue every block whose state lags, once; returns them."""
        assert self._ledger is not None
        lagging = [b for b in self._active if self._ledger.pending(b) is not None]
        queued = {work.block for work in self._queue if work.kind is Kind.SETTLE}
        self._queue.extend(Work(kind=Kind.SETTLE, block=b) for b in lagging if b not in queued)
        return set(lagging)

    def _report_settled(self) -> None:
        if self._settling is not None and not self._settling:
            self._settling = None
            self._out.append(SendSettled(epoch=self.joined_epoch, version=self.committed))

    # ---- passes ----

    def _start_next(self) -> None:
        while self._running is None and self._queue:
            work = self._queue.popleft()
            assert self._ledger is not None
            pass_ = choose_pass(work, self._ledger, self._attempt)
            if pass_ is None:
                self._finish_work(work, None, None)
                continue
            belongs = work.kind in (Kind.UPDATE, Kind.AMEND) and self._attempt is not None
            self._running = Running(
                work=work, pass_=pass_, attempt=self.attempt if belongs else None
            )
            if self._attempt is not None and belongs:
                self._attempt.previewed.pop(work.block, None)
            self._ledger.open_pass(pass_)
            self._out.append(RunPass(work=pass_))

    def _on_pass_done(self, event: PassDone) -> None:
        running, self._running = self._running, None
        assert running is not None and self._ledger is not None, "no pass was running"
        # Weights of an attempt that was skipped or abandoned meanwhile stay invalid.
        current = running.attempt is None or running.attempt == self.attempt
        self._ledger.close_pass(running.pass_, keep_weights=current)
        if self._farewell is not None:
            self._say_after_pass(self._farewell)
        elif current and self.phase in (Phase.LIVE, Phase.RECOVERING):
            self._finish_work(running.work, running.pass_, event)

    def _finish_work(self, work: Work, pass_: Pass | None, done: PassDone | None) -> None:
        """``pass_`` and ``done`` are None if nothing was left to do."""
        self._FINISHERS[work.kind](self, work, pass_, done)

    def _finish_update(self, work: Work, pass_: Pass | None, done: PassDone | None) -> None:
        assert self._attempt is not None and done is not None
        if done.status is None:
            self._queue.appendleft(work)  # settled first; its new gradients are looked at now
            return
        if isinstance(pass_, Preview | Advance):
            self._attempt.previewed[work.block] = pass_.update
        self._attempt.reported.add(work.block)
        self._out.append(
            SendBlockStatus(
                epoch=self.joined_epoch,
                attempt=self.attempt,
                block=work.block,
                status=done.status,
                seconds=done.seconds,
            )
        )

    def _finish_amend(self, work: Work, pass_: Pass | None, done: PassDone | None) -> None:
        assert self._attempt is not None and self._amending is not None
        assert isinstance(pass_, Preview)
        self._attempt.previewed[work.block] = pass_.update
        self._amending.discard(work.block)
        self._report_amended()

    def _finish_complete(self, work: Work, pass_: Pass | None, done: PassDone | None) -> None:
        if self._recovery is not None and self._recovery.left is not None:
            self._recovery.left.discard(work.block)
            self._recover()

    def _finish_settle(self, work: Work, pass_: Pass | None, done: PassDone | None) -> None:
        if self._settling is not None:
            self._settling.discard(work.block)
            self._report_settled()

    def _finish_finish(self, work: Work, pass_: Pass | None, done: PassDone | None) -> None:
        assert self._recovery is not None
        self._recovery.finish = None
        self._recover()

    # ---- the end ----

    def _on_broken(self, event: Broken) -> None:
        self._fail(event.error, ExitCode.LOST_MEMBERS)

    def _fail(self, error: str, code: ExitCode) -> None:
        self.phase = Phase.STOPPED
        self._out += [SendFailed(error=error, exit_code=code), Exit(code=code)]

    _HANDLERS: ClassVar[Mapping[type[Any], Callable[[OptimizerState, Any], None]]] = {
        DrainAsked: _on_drain,
        BeginAsked: _on_begin,
        AttemptAsked: _on_attempt,
        GradientsReady: _on_gradients,
        Pulled: _on_pulled,
        PassDone: _on_pass_done,
        Broken: _on_broken,
        AmendAsked: _on_amend,
        CommitAsked: _on_commit,
        SkipAsked: _on_skip,
        SettleAsked: _on_settle,
        StopAsked: _on_stop,
    }
    _FINISHERS: ClassVar[Mapping[Kind, _Finisher]] = {
        Kind.UPDATE: _finish_update,
        Kind.AMEND: _finish_amend,
        Kind.COMPLETE: _finish_complete,
        Kind.SETTLE: _finish_settle,
        Kind.FINISH: _finish_finish,
    }
