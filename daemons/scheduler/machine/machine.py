"""The scheduler's machine: membership, epochs, the transaction, and what comes between attempts.

Pure: events and the time come in, a list of effects goes out (:mod:`.events`). One activity runs at
a time (:mod:`.activities`): a barrier between epochs, an attempt, a wait for a save, an evaluation,
or the end. A save is written while attempts run. When no activity runs,
:meth:`SchedulerMachine._choose` starts the next one. :mod:`.states` has all transitions::

                    +-- a member is lost: the epoch breaks, the activity is dropped --+
                    v                                                                 |
    all members here, lost ones dead --> Barrier --> live epoch: Transaction, Saving, Evaluation
                                                          |
                                                          +--> Shutdown --> Exit
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from penstock.daemons.kit.events import EffectFailed, LogLine, StopAsked, Tick
from penstock.daemons.scheduler.machine.activities.activity import (
    Activity,
    HangDetector,
    with_cause,
)
from penstock.daemons.scheduler.machine.activities.barrier import Barrier
from penstock.daemons.scheduler.machine.activities.evaluate_shutdown import Evaluation, Shutdown
from penstock.daemons.scheduler.machine.activities.save import Answer, Saving
from penstock.daemons.scheduler.machine.activities.saves import Saves
from penstock.daemons.scheduler.machine.activities.transaction import Transaction
from penstock.daemons.scheduler.machine.events import (
    Beat,
    ControlAsked,
    ControlCall,
    Effect,
    Event,
    Joined,
    Received,
    Reply,
    SavedFound,
    SaveFinished,
    SavePrepared,
    StreamClosed,
)
from penstock.daemons.scheduler.machine.history import BreakCause, Counters, EventHistory, Kind
from penstock.daemons.scheduler.machine.membership import Membership
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.requests import (
    Next,
    Requests,
    SavePace,
    choose,
    due_set,
    early_end,
    is_finished,
    is_last,
    snapshot_answers,
)
from penstock.daemons.scheduler.machine.rules import Role, Rules, RunPhase
from penstock.daemons.scheduler.machine.states import EpochState
from penstock.daemons.scheduler.machine.status import status_reply
from penstock.host.errors import ExitCode, failure_code
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.run_result import RunEnd

ETA_WINDOW = 20
"""Attempts that the estimate of the remaining time is based on."""
_NOTED = MappingProxyType(
    {
        ControlCall.PAUSE: Kind.PAUSED,
        ControlCall.RESUME: Kind.RESUMED,
        ControlCall.STOP: Kind.STOPPING,
    }
)

_Handler = Callable[["SchedulerMachine", Any, float], list[Effect]]


class SchedulerMachine:
    """Decides for the run. :meth:`handle` takes events; its effects are carried out in order."""

    def __init__(
        self,
        rules: Rules,
        mirror: JournalMirror,
        members: Membership,
        now_s: float,
        ended: RunEnd | None = None,
    ) -> None:
        self.rules = rules
        """Constants of the run. Never written."""
        self.mirror = mirror
        """The journal's content. Activities change it and return the effect that journals it."""
        self.members = members
        """Streams and processes of members. Only handlers of this class change them."""
        self.activity: Activity | None = None
        """The running activity; None: wait. Set by ``_proceed`` and by each end of the run."""
        self.live = False
        """True from Begin until the epoch breaks: all members but nodes have streams."""
        self.message = ""
        """Reason of the last broken epoch, failed save or end. Cleared when an epoch begins."""
        self.cause = f"e{mirror.epoch}" if mirror.epoch else ""
        """Failure under recovery, named after the epoch that it broke; empty in a live epoch."""
        self.attempt_seconds: deque[float] = deque(maxlen=ETA_WINDOW)
        """Seconds of each of the last attempts. ``_transaction_done`` appends."""
        self.reports: Mapping[str, pb.AttemptDone] = {}
        """Reports of workers on the last decided attempt. Written by ``_transaction_done``."""
        self.history = EventHistory()
        """The last events, for a status. Decides nothing."""
        self.counters = Counters()
        """Counters for metrics. Decides nothing."""
        self.saves = Saves(rules, mirror, members)
        """The save under way, of which there is at most one."""
        self.hangs = HangDetector(rules.config.cluster.attempt_timeout_s)
        """Progress of members. Handlers of messages and of time write it."""
        self.requests = Requests(patience_s=rules.deadlines.stop_s)
        """Calls and signals that wait: pause, stop, snapshots. Written by their handlers."""
        self._pace = SavePace(rules.state_bytes, len(rules.memoryds))
        """Duration of saves. ``_look_at_save`` writes it after each save."""
        members.began(now_s)
        self._now_s = now_s
        """Time of the last event, to notice a stop of this process. Written by every event."""
        self._beat_s = now_s
        """Time of the next heartbeat. Written by ticks."""
        if ended is not None:  # a scheduler before this one had begun to shut everyone down
            self.activity = self._shut_down(
                keep_memory=ended.keep_memory,
                reason=ended.reason,
                code=ended.code,
                error=ended.reason if ended.failed else "",
            )

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Handles ``event`` at ``now_s`` (seconds of any monotonic clock)."""
        self._notice_jump(now_s)
        before = self.cause
        effects = self._HANDLERS[type(event)](self, event, now_s)
        effects += self._proceed(now_s)
        cause = self.cause or before  # of this event: a break, or the end of the recovery
        return effects if not cause else [with_cause(effect, cause) for effect in effects]

    def validate(self) -> None:
        """Checks the invariants of all parts.

        Raises:
            ValueError: an invariant does not hold; names the values.
        """
        self.mirror.validate()
        self.members.validate()
        if not self.live or self.members.complete:
            return
        missing = [m for m in self.members.missing if self.members.role_of(m) is not Role.NODE]
        if missing or self.members.fencing:
            raise ValueError(f"epoch {self.mirror.epoch} is live without {missing}")

    # ---- time ----

    def _notice_jump(self, now_s: float) -> None:
        """Restarts all deadlines after this process itself was stopped."""
        gap_s, self._now_s = now_s - self._now_s, now_s
        if self.live and self.activity is None:
            self.counters.paused_s += gap_s
        if gap_s <= self.rules.config.cluster.heartbeat_timeout_s / 2:
            return
        self.members.forgive(now_s)
        self.hangs.paused(gap_s, now_s)
        if self.activity is not None and self.activity.deadline_s is not None:
            self.activity.deadline_s += gap_s
        if self.requests.stop_by_s is not None:
            self.requests.stop_by_s += gap_s

    def _on_tick(self, event: Tick, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        if now_s >= self._beat_s:
            self._beat_s = now_s + self.rules.config.cluster.heartbeat_interval_s
            effects.append(Beat())
        if isinstance(self.activity, Shutdown):
            return effects
        effects += self.members.missed(now_s)
        lost = {
            name: (BreakCause.SILENT if name in self.members.present else BreakCause.LOST, reason)
            for name, reason in self.members.overdue(now_s).items()
        }
        activity = self.activity
        if activity and activity.deadline_s is not None and now_s > activity.deadline_s:
            reason = f"no answer while {activity.phase.value}"
            lost = dict.fromkeys(activity.waiting, (BreakCause.HUNG, reason)) | lost
        for name in sorted(lost):
            effects += self._lose(name, *lost[name])
        return effects + self._end_hang(now_s)

    def _end_hang(self, now_s: float) -> list[Effect]:
        """Drops an activity without progress and its culprits; ends the run at the third hang."""
        if self.activity is None or not self.hangs.suspected(now_s):
            return []
        hung = self.hangs.overdue(self._unfinished(), now_s)
        return self._give_up(hung, now_s) if hung else []

    def _unfinished(self) -> tuple[str, ...]:
        """Returns members that owe work to the activity, or to the save that sweeps wait for."""
        works = [work for work in (self.activity, self.saves.under_way) if work is not None]
        return tuple(dict.fromkeys(name for work in works for name in work.unfinished))

    def _give_up(self, hung: Mapping[str, str], now_s: float) -> list[Effect]:
        """Breaks the epoch because of hung members. ``hung``: their reasons, by name."""
        title = "the run" if self.activity is None else self.activity.title
        reasons = "; ".join(f"{name}: {reason}" for name, reason in hung.items())
        self._break_epoch(BreakCause.HUNG, f"{title} hung: {reasons}", now_s)
        effects = [e for name in hung for e in self._lose(name, BreakCause.HUNG, hung[name])]
        error = self.hangs.once_more(f"{title} after step {self.mirror.version}", reasons)
        return effects if error is None else effects + self._fail(error, ExitCode.LOST_MEMBERS)

    # ---- members ----

    def _on_joined(self, event: Joined, now_s: float) -> list[Effect]:
        name, effects = self.members.join(event.stream, event.hello, now_s)
        if name is None:
            return effects
        if isinstance(self.activity, Shutdown):
            return effects + self.activity.joined(name)
        if self.members.role_of(name) is not Role.NODE:
            # A live epoch has all members: this process is new, or has missed messages.
            self._break_epoch(BreakCause.LOST, f"{name} joined again", now_s)
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
        if self.activity is None or body.epoch != self.mirror.epoch:
            return []
        self.hangs.moved(now_s)
        return self.activity.receive(name, kind, body, now_s)

    def _on_heartbeat(self, name: str, body: pb.Heartbeat, now_s: float) -> list[Effect]:
        self.hangs.heard(name, body, now_s)
        return []

    def _on_save_answer(self, name: str, body: Answer, now_s: float) -> list[Effect]:
        self.hangs.moved(now_s)
        return self.saves.on_answer(name, body)

    def _on_fenced(self, name: str, body: pb.Fenced, now_s: float) -> list[Effect]:
        if body.death:
            self.history.died(body.member, body.death)
        return self.members.fenced(name, body.member, body.pid, body.death)

    def _on_failed(self, name: str, body: pb.Failed, now_s: float) -> list[Effect]:
        if isinstance(self.activity, Shutdown):
            return []
        if self.members.gave_up(name, body):
            stuck = self.hangs.stuck(self._unfinished(), now_s)
            held_back = self.hangs.held_back(self.saves.unfinished, stuck)
            if held_back or self._is_over(body.epoch):
                return self._lose(name, BreakCause.FAILED, body.error)
            return self._give_up(stuck | {name: body.error}, now_s)
        self._count_break(BreakCause.FAILED, now_s)
        return self._fail(f"{name}: {body.error}", failure_code(body.exit_code))

    def _on_cut_off(self, name: str, body: pb.CutOff, now_s: float) -> list[Effect]:
        """Breaks the epoch: messages of it were lost. The next one makes new connections."""
        if isinstance(self.activity, Shutdown) or self._is_over(body.epoch):
            return []
        reason = f"{name}: {body.loss}"
        self._break_epoch(BreakCause.LOST, reason, now_s)
        return [LogLine(text=reason, warning=True)]

    def _is_over(self, epoch: int) -> bool:
        """Returns whether an epoch is over, even if the next one has not begun."""
        return epoch != self.mirror.epoch or not (self.live or self.activity)

    def _on_hello(self, name: str, body: pb.Hello, now_s: float) -> list[Effect]:
        return self._lose(name, BreakCause.OTHER, "a second Hello on one stream")

    def _on_closed(self, event: StreamClosed, now_s: float) -> list[Effect]:
        if isinstance(self.activity, Shutdown):
            self.members.leave(event.stream)
            return []
        name, effects = self.members.closed(event.stream, now_s)
        if name is not None and self.members.role_of(name) is not Role.NODE:
            self._break_epoch(BreakCause.LOST, f"{name} was lost", now_s)
        return effects

    def _lose(self, name: str, cause: BreakCause, reason: str) -> list[Effect]:
        if self.members.role_of(name) is not Role.NODE:
            self._break_epoch(cause, f"{name} was lost: {reason}", self._now_s)
        return self.members.lose(name, reason, self._now_s)

    def _break_epoch(self, cause: BreakCause, reason: str, now_s: float) -> None:
        """Drops the activity. Only journaled results count."""
        if isinstance(self.activity, Shutdown) or (self.activity is None and not self.live):
            return
        self._count_break(cause, now_s)
        self.cause = self.cause or f"e{self.mirror.epoch}"
        if self.live:
            self.history.broke(self.mirror.version, reason, now_s, self.cause)
        self._count_blocked(now_s)
        self.saves.epoch_broke(self.requests)
        self.live = False
        self.activity = None
        self.message = reason
        self.requests.epoch_broke(now_s)

    def _count_break(self, cause: BreakCause, now_s: float) -> None:
        if self.live:
            attempting = isinstance(self.activity, Transaction)
            self.counters.epoch_broke(cause, now_s, attempting=attempting)

    # ---- the next activity ----

    def _proceed(self, now_s: float) -> list[Effect]:
        """Finishes the activity that is done and starts the next, until one has to wait."""
        effects: list[Effect] = []
        while True:
            self._cut_short(now_s)
            self._heed_deadline(now_s)
            effects += self._look_at_save(now_s)
            effects += self._answer_early_snapshots()
            if self.activity is None:
                self.activity = self._choose()
            if self.activity is None:
                return effects
            if not self.activity.started:
                self.activity.started, self.activity.started_s = True, now_s
                self.hangs.started(now_s)
                if isinstance(self.activity, Transaction):
                    self.counters.attempt_began(now_s)
                effects += self.activity.start(now_s)
            if isinstance(self.activity, Shutdown):
                return effects + self.activity.look(now_s)
            if isinstance(self.activity, Saving):
                self.activity.look(paused=self.requests.paused)
            if not self.activity.done:
                return effects
            finished, self.activity = self.activity, None
            effects += self._FINISH[type(finished)](self, finished)

    def _choose(self) -> Activity | None:
        """Returns the activity to start when none runs; None: wait for events."""
        if self.requests.stop_reason and not self.mirror.unsaved:
            return self._over(self.requests.stop_reason)
        if not self.live:
            if not self.members.complete:
                return None
            saving = self.saves.number
            return Barrier(self.rules, self.mirror, self.members, cause=self.cause, saving=saving)
        choice = choose(self.rules, self.mirror, self.requests, *self.saves.present)
        if choice is Next.END:
            place = f"step {self.mirror.version} of {self.rules.config.train.steps}"
            return self._over(early_end(self.rules, self.mirror) or f"{place} is done")
        if choice is Next.EVALUATE and (due := due_set(self.rules, self.mirror)):
            return Evaluation(self.rules, self.mirror, due)
        if choice is Next.ATTEMPT:
            return Transaction(self.rules, self.mirror)
        return self.saves.activity(choice, self.requests)

    def _cut_short(self, now_s: float) -> None:
        """Ends a stopped run in a barrier that has nothing to save, or takes too long."""
        requests = self.requests
        if not requests.stop_reason or self.live or isinstance(self.activity, Shutdown):
            return
        if isinstance(self.activity, Barrier):
            restoring = self.activity.phase is RunPhase.RESTORING
            if restoring or not self.mirror.unsaved:
                self.activity = self._over(requests.stop_reason)
                return
        if requests.stop_by_s is not None and now_s >= requests.stop_by_s:
            missing = (*self.members.fencing, *self.members.missing)
            self.activity = self._interrupt(requests.unsaved_reason(self.mirror.version, missing))

    def _heed_deadline(self, now_s: float) -> None:
        """Obeys the deadline of a stop, after which the run is killed from outside. Drops work that
        leaves no time to save; ends the run when no save can end in time.
        """
        deadline, activity = self.requests.deadline, self.activity
        if deadline is None or isinstance(activity, Shutdown):
            return
        late = now_s >= deadline.give_up_s
        saving = isinstance(activity, Saving) or self.saves.saved_version == self.mirror.version
        if late or (self.mirror.unsaved and not saving and self._pace.hopeless(now_s, deadline)):
            self.activity = self._out_of_time()
        elif isinstance(activity, (Transaction, Evaluation)):
            expected_s = activity.started_s + max(self.attempt_seconds, default=0.0)
            if self._pace.forgoes(max(now_s, expected_s), deadline):
                reason = f"{activity.title} was dropped: the time to stop is short"
                self._break_epoch(BreakCause.ASKED, reason, now_s)

    def _out_of_time(self) -> Shutdown:
        if not self.mirror.unsaved:
            return self._over(self.requests.stop_reason)
        return self._interrupt(self.requests.late_reason(self.mirror.version))

    def _interrupt(self, reason: str) -> Shutdown:
        """Ends the run and keeps its memory for the next start."""
        return self._shut_down(keep_memory=True, reason=reason, code=ExitCode.INTERRUPTED)

    def _over(self, reason: str) -> Shutdown:
        """Ends a run with nothing left to save, finished or stopped before."""
        code = ExitCode.DONE if is_finished(self.rules, self.mirror) else ExitCode.STOPPED
        return self._shut_down(keep_memory=False, reason=reason, code=code)

    def _shut_down(
        self, *, keep_memory: bool, reason: str, code: ExitCode, error: str = ""
    ) -> Shutdown:
        self.live, self.message = False, error or reason
        deadline = self.requests.deadline
        return Shutdown(
            self.rules,
            self.mirror,
            self.members,
            keep_memory=keep_memory,
            reason=reason,
            code=code,
            error=error,
            leave_by_s=None if deadline is None else deadline.leave_by_s,
        )

    def _fail(self, error: str, code: ExitCode, kept: str = "") -> list[Effect]:
        error += kept * (keep := not self.mirror.untrained)
        self.activity = self._shut_down(keep_memory=keep, reason=error, code=code, error=error)
        return []

    # ---- results of activities ----

    def _barrier_done(self, barrier: Barrier) -> list[Effect]:
        if barrier.failure:
            return self._fail(barrier.failure, ExitCode.BAD_CONFIG)
        if barrier.finished_before:
            place = f"step {self.mirror.saved_version} of {self.rules.config.train.steps}"
            done = f"the run is already at {place}: nothing to do"
            self.activity = self._over(early_end(self.rules, self.mirror) or done)
            return []
        self.live = True
        self.history.lives(self.mirror.version, self._now_s)
        self.requests.stop_by_s = None
        self.message = self.cause = ""
        return []

    def _transaction_done(self, transaction: Transaction) -> list[Effect]:
        self.attempt_seconds.append(transaction.seconds)
        self.reports = transaction.reports
        self.hangs.finished(transaction.seconds)
        if transaction.failure:
            return self._fail(transaction.failure, ExitCode.LOST_MEMBERS)
        return []

    def _saving_done(self, saving: Saving) -> list[Effect]:
        self.hangs.finished(0.0)
        self._count_blocked(self._now_s, saving)
        return []

    def _count_blocked(self, now_s: float, saving: Saving | None = None) -> None:
        """Counts the seconds that steps waited for a save, if there were steps to do."""
        waited = saving or self.activity
        if isinstance(waited, Saving) and not waited.idle and not self._ends_with_save:
            self.counters.save_blocked_s += now_s - waited.started_s

    @property
    def _ends_with_save(self) -> bool:
        return bool(self.requests.stop_reason) or is_last(self.rules, self.mirror)

    def _look_at_save(self, now_s: float) -> list[Effect]:
        """Reports a save that is over."""
        ends = isinstance(self.activity, Shutdown)
        (self.saves.leave if ends else self.saves.join)(self.requests)
        save = self.saves.look(self.activity, live=self.live)
        if save is None or ends:
            return []
        if save.copy_call is not None:
            return save.copied(save.copy_call)
        save.note(self.counters, self.history, self.mirror, now_s)
        if not save.error:
            self._pace.finished(save.write_s)
            return snapshot_answers(save.tickets, self.mirror, "")
        self.message = error = f"saving step {save.version} failed: {save.error}"
        warning = LogLine(text=f"{error}; training goes on", warning=True)
        if not self.live:  # the broken epoch ended the save, too: it is due again
            self.requests.tickets += save.tickets
            return [warning]
        effects = snapshot_answers(save.tickets, self.mirror, error)
        if self._ends_with_save and save.version == self.mirror.version:
            return effects + self._fail(error, ExitCode.NO_MEMORY, "; its memory is kept")
        self.requests.save_failed_at = save.version
        return [*effects, warning]

    def _evaluation_done(self, evaluation: Evaluation) -> list[Effect]:
        self.hangs.finished(evaluation.seconds)
        return []

    def _on_save_prepared(self, event: SavePrepared, now_s: float) -> list[Effect]:
        return self.saves.on_prepared(event)

    def _on_save_finished(self, event: SaveFinished, now_s: float) -> list[Effect]:
        saved = self.saves.on_finished(event)
        if saved is None:
            return []
        self.mirror.saved = saved
        return [LogLine(text=f"saved step {saved.version} in {saved.directory}")]

    def _on_saved_found(self, event: SavedFound, now_s: float) -> list[Effect]:
        return self.activity.found(event) if isinstance(self.activity, Barrier) else []

    def _answer_early_snapshots(self) -> list[Effect]:
        """Answers snapshot calls that need no save, or can have none any more."""
        saved = self.mirror.saved is not None and not self.mirror.unsaved
        if isinstance(self.activity, Shutdown):
            return self.requests.end_calls(self.mirror, f"the run ends: {self.message}", saved)
        if self.live and self.activity is None and saved:
            return self.requests.answer_snapshots(self.mirror)
        return []

    # ---- control ----

    def _on_asked(self, event: ControlAsked, now_s: float) -> list[Effect]:
        if event.call is ControlCall.STATUS:
            return [Reply(ticket=event.ticket, reply=status_reply(self, now_s))]
        attempting = isinstance(self.activity, Transaction)
        before = self.requests.paused, self.requests.stop_reason
        effects = self.requests.answer(event, attempting=attempting, now_s=now_s)
        if event.call in _NOTED and before != (self.requests.paused, self.requests.stop_reason):
            self.history.add(_NOTED[event.call], self.mirror.version, now_s)
        return effects

    def _on_stop_signal(self, event: StopAsked, now_s: float) -> list[Effect]:
        if not event.again:
            if not self.requests.stop_reason:
                self.history.add(Kind.STOPPING, self.mirror.version, now_s)
            self.requests.stop("stopped by a signal", event.within_s, now_s)
            return []
        if not isinstance(self.activity, Shutdown):
            self._count_break(BreakCause.ASKED, now_s)
            reason = "stopped by a second signal; the memory is kept for the next start"
            self.activity = self._interrupt(reason)
        self.activity.hurry()
        return []

    def _on_broken(self, event: EffectFailed, now_s: float) -> list[Effect]:
        return self._fail(event.error, event.code, "; the memory is kept")

    # ---- status ----

    @property
    def phase(self) -> RunPhase:
        """Phase of the run, as a status shows it."""
        if self.activity is not None:
            return self.activity.phase
        if self.live:
            return RunPhase.PAUSED
        if self.requests.stop_reason:
            return RunPhase.STOPPING
        return RunPhase(self.epoch_state)

    @property
    def epoch_state(self) -> EpochState:
        """State of the membership epoch."""
        if isinstance(self.activity, Shutdown):
            return EpochState.ENDING
        if isinstance(self.activity, Barrier):
            return EpochState(self.activity.phase.value)
        if self.live:
            return EpochState.LIVE
        return EpochState.FENCING if self.members.fencing else EpochState.GATHERING

    _HANDLERS: ClassVar[Mapping[type, _Handler]] = {
        Tick: _on_tick,
        Joined: _on_joined,
        Received: _on_received,
        StreamClosed: _on_closed,
        ControlAsked: _on_asked,
        StopAsked: _on_stop_signal,
        SavePrepared: _on_save_prepared,
        SaveFinished: _on_save_finished,
        SavedFound: _on_saved_found,
        EffectFailed: _on_broken,
    }
    _GENERAL: ClassVar[
        Mapping[str, Callable[[SchedulerMachine, str, Any, float], list[Effect]]]
    ] = {
        "hello": _on_hello,
        "heartbeat": _on_heartbeat,
        "fenced": _on_fenced,
        "failed": _on_failed,
        "cut_off": _on_cut_off,
        "pinned": _on_save_answer,
        "saved": _on_save_answer,
    }
    _FINISH: ClassVar[Mapping[type, Callable[[SchedulerMachine, Any], list[Effect]]]] = {
        Barrier: _barrier_done,
        Transaction: _transaction_done,
        Saving: _saving_done,
        Evaluation: _evaluation_done,
    }
