"""The scheduler's machine: membership, epochs, the transaction, and what comes between attempts.

Pure: events and the time come in, a list of effects goes out (:mod:`.events`). One activity runs
at a time (:mod:`.activity`): a barrier between epochs, an attempt, a save, an evaluation, the end.
Whenever none runs, :meth:`Machine._choose` picks the next::

                    +-- a member is lost: the epoch is broken, whatever ran is dropped --+
                    v                                                                    |
    all members here, the lost ones dead --> Barrier --> live epoch: Transaction, Saving, Evaluation
                                                                    |
                                                                    +--> Ending --> Exit
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from penstock.daemons.scheduler.machine.barrier import Barrier
from penstock.daemons.scheduler.machine.between import Ending, Evaluation, Saving
from penstock.daemons.scheduler.machine.events import (
    Asked,
    Beat,
    Broken,
    Effect,
    Event,
    Joined,
    Received,
    Reply,
    Request,
    SaveFinished,
    SavePrepared,
    Say,
    StopSignalled,
    StreamClosed,
    Tick,
)
from penstock.daemons.scheduler.machine.grace import Deadline, SavePace
from penstock.daemons.scheduler.machine.ledger import Ledger, SavedState
from penstock.daemons.scheduler.machine.membership import MAX_IN_A_ROW, Hangs, Membership
from penstock.daemons.scheduler.machine.next_activity import (
    Activity,
    Next,
    Wishes,
    answer_snapshots,
    choose,
    is_last,
)
from penstock.daemons.scheduler.machine.rules import Phase, Role, Rules
from penstock.daemons.scheduler.machine.status import status_reply
from penstock.daemons.scheduler.machine.transaction import Transaction
from penstock.protocol.errors import ExitCode, failure_code
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.ended import RunEnd

ETA_WINDOW = 20

_Handler = Callable[["Machine", Any, float], list[Effect]]
_RequestHandler = Callable[["Machine", Asked, float], list[Effect]]


class Machine:
    """Feed :meth:`handle` with events and carry out the effects it returns, in order."""

    def __init__(
        self,
        rules: Rules,
        ledger: Ledger,
        members: Membership,
        now_s: float,
        ended: RunEnd | None = None,
    ) -> None:
        self.rules = rules
        self.ledger = ledger
        self.members = members
        self.activity: Activity | None = None
        self.live = False
        """Whether the epoch has begun and is not broken."""
        self.message = ""
        """Why the last epoch or save broke, or how the run ends."""
        self.attempt_seconds: deque[float] = deque(maxlen=ETA_WINDOW)
        """How long the last attempts took."""
        self._hangs = Hangs(rules.config.cluster.attempt_timeout_s)
        self._pace = SavePace(rules.state_bytes, len(rules.memoryds))
        self._now_s = now_s
        self._beat_s = now_s
        self._wishes = Wishes()
        if ended is not None:  # a scheduler before this one had begun to shut everyone down
            self.activity = self._ending(
                keep_memory=ended.keep_memory,
                reason=ended.reason,
                code=ended.code,
                error=ended.reason if ended.failed else "",
            )

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """React to ``event`` at ``now_s`` (any monotonic clock)."""
        self._notice_jump(now_s)
        effects = self._HANDLERS[type(event)](self, event, now_s)
        return effects + self._proceed(now_s)

    def validate(self) -> None:
        """Check the invariants of all parts.

        Raises:
            ValueError: naming what contradicts what.
        """
        self.ledger.validate()
        self.members.validate()
        missing = [m for m in self.members.missing if self.members.role_of(m) is not Role.NODE]
        if self.live and (missing or self.members.fencing):
            raise ValueError(f"epoch {self.ledger.epoch} is live without {missing}")

    # ---- time ----

    def _notice_jump(self, now_s: float) -> None:
        """After the scheduler itself was stopped, everyone gets a full deadline again."""
        gap_s, self._now_s = now_s - self._now_s, now_s
        if gap_s <= self.rules.config.cluster.heartbeat_timeout_s / 2:
            return
        self.members.forgive(now_s)
        self._hangs.moved(now_s)
        if self.activity is not None and self.activity.deadline_s is not None:
            self.activity.deadline_s += gap_s
        if self._wishes.stop_by_s is not None:
            self._wishes.stop_by_s += gap_s

    def _on_tick(self, event: Tick, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        if now_s >= self._beat_s:
            self._beat_s = now_s + self.rules.config.cluster.heartbeat_interval_s
            effects.append(Beat())
        if isinstance(self.activity, Ending):
            return effects
        lost = self.members.overdue(now_s)
        activity = self.activity
        if activity is not None and activity.deadline_s is not None:
            if now_s > activity.deadline_s:
                late = dict.fromkeys(activity.waiting, f"no answer while {activity.phase.value}")
                lost = late | lost
        for name in sorted(lost):
            effects += self._lose(name, lost[name])
        return effects + self._end_hang(now_s)

    def _end_hang(self, now_s: float) -> list[Effect]:
        """Give up whoever holds up what is going on; the run, when it happens again and again."""
        if self.activity is None:
            return []
        hung = self._hangs.overdue(self.activity.unfinished, now_s)
        if not hung:
            return []
        what = self.activity.title
        names = "; ".join(f"{name}: {reason}" for name, reason in hung.items())
        self._hangs.in_a_row += 1
        self._break_epoch(f"{what} hung: {names}", now_s)
        effects = [effect for name in hung for effect in self._lose(name, hung[name])]
        if self._hangs.in_a_row >= MAX_IN_A_ROW:
            error = (
                f"{what} after step {self.ledger.version} hung {self._hangs.in_a_row} times in a"
                f" row, the last time {names}; look at logs/ and at that machine, or, if a single"
                " instruction takes that long, raise cluster.attempt_timeout_s ="
                f" {self.rules.config.cluster.attempt_timeout_s:g}"
            )
            effects += self._fail(error, ExitCode.LOST_MEMBERS)
        return effects

    # ---- members ----

    def _on_joined(self, event: Joined, now_s: float) -> list[Effect]:
        name, effects = self.members.join(event.stream, event.hello, now_s)
        if name is None:
            return effects
        if isinstance(self.activity, Ending):
            return effects + self.activity.joined(name)
        if self.members.role_of(name) is not Role.NODE:
            # In a live epoch everyone was there: this process is new, or missed messages.
            self._break_epoch(f"{name} joined anew", now_s)
        return effects

    def _on_received(self, event: Received, now_s: float) -> list[Effect]:
        name = self.members.name_of(event.stream)
        kind = event.message.WhichOneof("body")
        if name is None or kind is None:
            return []
        self.members.heard(name, now_s)
        body = getattr(event.message, kind)
        general = self._GENERAL.get(kind)
        if general is not None:
            return general(self, name, body, now_s)
        if self.activity is None or body.epoch != self.ledger.epoch:
            return []
        self._hangs.moved(now_s)
        return self.activity.receive(name, kind, body, now_s)

    def _on_heartbeat(self, name: str, body: pb.Heartbeat, now_s: float) -> list[Effect]:
        self._hangs.heard(name, body, now_s)
        return []

    def _on_fenced(self, name: str, body: pb.Fenced, now_s: float) -> list[Effect]:
        return self.members.fenced(name, body.member, body.pid)

    def _on_failed(self, name: str, body: pb.Failed, now_s: float) -> list[Effect]:
        if isinstance(self.activity, Ending):
            return []
        return self._fail(f"{name}: {body.error}", failure_code(body.exit_code))

    def _on_hello(self, name: str, body: pb.Hello, now_s: float) -> list[Effect]:
        return self._lose(name, "a second Hello on one stream")

    def _on_closed(self, event: StreamClosed, now_s: float) -> list[Effect]:
        if isinstance(self.activity, Ending):
            self.members.leave(event.stream)
            return []
        name, effects = self.members.closed(event.stream, now_s)
        if name is not None and self.members.role_of(name) is not Role.NODE:
            self._break_epoch(f"{name} was lost", now_s)
        return effects

    def _lose(self, name: str, reason: str) -> list[Effect]:
        if self.members.role_of(name) is not Role.NODE:
            self._break_epoch(f"{name} was lost: {reason}", self._now_s)
        return self.members.lose(name, reason)

    def _break_epoch(self, reason: str, now_s: float) -> None:
        """Drop what was going on; only what is journaled counts."""
        if isinstance(self.activity, Ending) or (self.activity is None and not self.live):
            return
        self.live = False
        self.activity = None
        self.message = reason
        if self._wishes.stop_reason:
            self._wishes.stop_by_s = now_s + self.rules.deadlines.stop_s

    # ---- what next ----

    def _proceed(self, now_s: float) -> list[Effect]:
        """Finish the activity that is done, start the next, until one has to wait."""
        effects: list[Effect] = []
        while True:
            self._cut_short(now_s)
            self._heed_deadline(now_s)
            effects += self._answer_early_snapshots()
            if self.activity is None:
                self.activity = self._choose()
            if self.activity is None:
                return effects
            if not self.activity.started:
                self.activity.started, self.activity.started_s = True, now_s
                self._hangs.started(now_s)
                effects += self.activity.start(now_s)
            if isinstance(self.activity, Ending):
                return effects + self.activity.look(now_s)
            if not self.activity.done:
                return effects
            finished, self.activity = self.activity, None
            effects += self._FINISH[type(finished)](self, finished)

    def _choose(self) -> Activity | None:
        """What to do when nothing is going on; None: wait for events."""
        if self._wishes.stop_reason and not self.ledger.unsaved:
            return self._over(self._wishes.stop_reason)
        if not self.live:
            ready = self.members.complete
            return Barrier(self.rules, self.ledger, self.members) if ready else None
        choice = choose(self.rules, self.ledger, self._wishes)
        if choice is Next.END:
            done = f"step {self.ledger.version} of {self.rules.config.train.steps} is done"
            return self._over(done)
        activity = self._ACTIVITIES.get(choice)
        return None if activity is None else activity(self.rules, self.ledger)

    def _cut_short(self, now_s: float) -> None:
        """A stop does not wait for a barrier that has nothing to save, or takes too long."""
        wishes = self._wishes
        if not wishes.stop_reason or self.live or isinstance(self.activity, Ending):
            return
        if isinstance(self.activity, Barrier):
            restoring = self.activity.phase is Phase.RESTORING
            if restoring or not self.ledger.unsaved:
                self.activity = self._over(wishes.stop_reason)
                return
        if wishes.stop_by_s is not None and now_s >= wishes.stop_by_s:
            missing = ", ".join((*self.members.fencing, *self.members.missing)) or "an answer"
            reason = (
                f"{wishes.stop_reason}; the state of step {self.ledger.version} could not be saved"
                f" (waited for {missing}), it stays in memory for the next start"
            )
            self.activity = self._ending(keep_memory=True, reason=reason, code=ExitCode.INTERRUPTED)

    def _heed_deadline(self, now_s: float) -> None:
        """Before the run is killed from outside: drop work that leaves no time to save, and end
        when nothing can be saved any more.
        """
        deadline, activity = self._wishes.deadline, self.activity
        if deadline is None or isinstance(activity, Ending):
            return
        late = now_s >= deadline.give_up_s
        saving = isinstance(activity, Saving)
        if late or (self.ledger.unsaved and not saving and self._pace.hopeless(now_s, deadline)):
            self.activity = self._out_of_time()
        elif isinstance(activity, (Transaction, Evaluation)):
            expected_s = activity.started_s + max(self.attempt_seconds, default=0.0)
            if self._pace.forgoes(max(now_s, expected_s), deadline):
                self._break_epoch(f"{activity.title} was dropped: the time to stop is short", now_s)

    def _out_of_time(self) -> Ending:
        if not self.ledger.unsaved:
            return self._over(self._wishes.stop_reason)
        reason = (
            f"{self._wishes.stop_reason}; step {self.ledger.version} cannot be saved before the run"
            " is killed (cluster.grace_seconds, or the end of its job), it stays in memory for the"
            " next start"
        )
        return self._ending(keep_memory=True, reason=reason, code=ExitCode.INTERRUPTED)

    def _over(self, reason: str) -> Ending:
        """Nothing is left to save: the run is finished, or was stopped before its last step."""
        finished = self.ledger.saved_version >= self.rules.config.train.steps
        code = ExitCode.DONE if finished else ExitCode.STOPPED
        return self._ending(keep_memory=False, reason=reason, code=code)

    def _ending(self, *, keep_memory: bool, reason: str, code: ExitCode, error: str = "") -> Ending:
        self.live = False
        self.message = error or reason
        deadline = self._wishes.deadline
        return Ending(
            self.rules,
            self.ledger,
            self.members,
            keep_memory=keep_memory,
            reason=reason,
            code=code,
            error=error,
            leave_by_s=None if deadline is None else deadline.leave_by_s,
        )

    def _fail(self, error: str, code: ExitCode) -> list[Effect]:
        self.activity = self._ending(keep_memory=True, reason=error, code=code, error=error)
        return []

    # ---- what an activity led to ----

    def _barrier_done(self, barrier: Barrier) -> list[Effect]:
        if barrier.finished_before:
            saved, steps = self.ledger.saved_version, self.rules.config.train.steps
            reason = f"the run is already at step {saved} of {steps}: nothing to do"
            self.activity = self._over(reason)
            return []
        self.live = True
        self._wishes.stop_by_s = None
        self.message = ""
        return []

    def _transaction_done(self, transaction: Transaction) -> list[Effect]:
        self.attempt_seconds.append(transaction.seconds)
        self._hangs.finished(transaction.seconds)
        if transaction.failure:
            return self._fail(transaction.failure, ExitCode.LOST_MEMBERS)
        return []

    def _saving_done(self, saving: Saving) -> list[Effect]:
        self._hangs.finished(0.0)
        if not saving.error:
            self._pace.finished(self._now_s - saving.started_s)
            return []
        error = f"saving step {saving.version} failed: {saving.error}"
        effects = answer_snapshots(self.ledger, self._wishes, error)
        if self._wishes.stop_reason or is_last(self.rules, self.ledger):
            return effects + self._fail(f"{error}; its memory is kept", ExitCode.NO_MEMORY)
        self.message, self._wishes.save_failed_at = error, saving.version
        return [*effects, Say(text=f"{error}; training goes on", warning=True)]

    def _evaluation_done(self, evaluation: Evaluation) -> list[Effect]:
        self._hangs.finished(evaluation.seconds)
        return []

    def _on_save_prepared(self, event: SavePrepared, now_s: float) -> list[Effect]:
        if isinstance(self.activity, Saving):
            return self.activity.prepared(event.error)
        return []

    def _on_save_finished(self, event: SaveFinished, now_s: float) -> list[Effect]:
        if isinstance(self.activity, Saving):
            self.activity.finished(event.error)
        if event.error:
            return []
        assert self.ledger.position is not None
        self.ledger.saved = SavedState(
            version=event.version, directory=event.directory, position=self.ledger.position
        )
        return [Say(text=f"saved step {event.version} in {event.directory}")]

    def _answer_early_snapshots(self) -> list[Effect]:
        """Answer snapshot calls that need no save, or cannot have one any more."""
        saved = self.ledger.saved is not None and not self.ledger.unsaved
        if isinstance(self.activity, Ending):
            error = "" if saved else f"the run ends: {self.message}"
            return answer_snapshots(self.ledger, self._wishes, error)
        if self.live and self.activity is None and saved:
            return answer_snapshots(self.ledger, self._wishes)
        return []

    # ---- control ----

    def _on_asked(self, event: Asked, now_s: float) -> list[Effect]:
        return self._REQUESTS[event.request](self, event, now_s)

    def _on_status(self, event: Asked, now_s: float) -> list[Effect]:
        return [Reply(ticket=event.ticket, reply=status_reply(self, now_s))]

    def _on_pause(self, event: Asked, now_s: float) -> list[Effect]:
        self._wishes.paused = True
        attempt = isinstance(self.activity, Transaction)
        message = "pausing after the attempt under way" if attempt else "no attempt will start"
        return [_said(event.ticket, message)]

    def _on_resume(self, event: Asked, now_s: float) -> list[Effect]:
        message = "going on" if self._wishes.paused else "the run was not paused"
        self._wishes.paused = False
        return [_said(event.ticket, message)]

    def _on_snapshot(self, event: Asked, now_s: float) -> list[Effect]:
        self._wishes.tickets.append(event.ticket)
        return []

    def _on_stop(self, event: Asked, now_s: float) -> list[Effect]:
        self._stop("stopped on request", event.within_s, now_s)
        return [
            _said(event.ticket, "stopping: the attempt under way ends, then the state is saved")
        ]

    def _on_stop_signal(self, event: StopSignalled, now_s: float) -> list[Effect]:
        if not event.again:
            self._stop("stopped by a signal", event.within_s, now_s)
            return []
        if not isinstance(self.activity, Ending):
            reason = "stopped by a second signal; the memory is kept for the next start"
            self.activity = self._ending(keep_memory=True, reason=reason, code=ExitCode.INTERRUPTED)
        self.activity.hurry()
        return []

    def _stop(self, reason: str, within_s: float | None, now_s: float) -> None:
        """Of several deadlines the first counts."""
        wishes = self._wishes
        if not wishes.stop_reason:
            wishes.stop_reason = reason
            wishes.stop_by_s = now_s + self.rules.deadlines.stop_s
        if within_s is None:
            return
        deadline = Deadline.of(now_s, within_s)
        if wishes.deadline is None or deadline.give_up_s < wishes.deadline.give_up_s:
            wishes.deadline = deadline

    def _on_broken(self, event: Broken, now_s: float) -> list[Effect]:
        return self._fail(f"{event.error}; the memory is kept", event.code)

    # ---- status ----

    @property
    def phase(self) -> Phase:
        """What the run is doing."""
        if self.activity is not None:
            return self.activity.phase
        if self.live:
            return Phase.PAUSED
        if self._wishes.stop_reason:
            return Phase.STOPPING
        return Phase.FENCING if self.members.fencing else Phase.GATHERING

    _HANDLERS: ClassVar[Mapping[type, _Handler]] = {
        Tick: _on_tick,
        Joined: _on_joined,
        Received: _on_received,
        StreamClosed: _on_closed,
        Asked: _on_asked,
        StopSignalled: _on_stop_signal,
        SavePrepared: _on_save_prepared,
        SaveFinished: _on_save_finished,
        Broken: _on_broken,
    }
    _GENERAL: ClassVar[Mapping[str, Callable[[Machine, str, Any, float], list[Effect]]]] = {
        "hello": _on_hello,
        "heartbeat": _on_heartbeat,
        "fenced": _on_fenced,
        "failed": _on_failed,
    }
    _REQUESTS: ClassVar[Mapping[Request, _RequestHandler]] = {
        Request.STATUS: _on_status,
        Request.PAUSE: _on_pause,
        Request.RESUME: _on_resume,
        Request.SNAPSHOT: _on_snapshot,
        Request.STOP: _on_stop,
    }
    _ACTIVITIES: ClassVar[Mapping[Next, type[Activity]]] = {
        Next.SAVE: Saving,
        Next.EVALUATE: Evaluation,
        Next.ATTEMPT: Transaction,
    }
    _FINISH: ClassVar[Mapping[type, Callable[[Machine, Any], list[Effect]]]] = {
        Barrier: _barrier_done,
        Transaction: _transaction_done,
        Saving: _saving_done,
        Evaluation: _evaluation_done,
    }


def _said(ticket: int, message: str) -> Reply:
    return Reply(ticket=ticket, reply=pb.ControlReply(message=message))
