"""Requests to a run, the time that a stop leaves, and the choice of the next activity: pure code.

A stopped run may be killed from outside some time later. A save that is dropped loses nothing:
memory keeps the state, and the written files have a temporary name. So a save is left out only if
it cannot end in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from penstock.config.evaluation import EvaluationSet
from penstock.daemons.scheduler.machine.events import (
    ControlAsked,
    ControlCall,
    Effect,
    Reply,
    ReplyError,
)
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.rules import Rules
from penstock.host.stopping import StopDeadline, reserve_s
from penstock.protocol.generated import scheduler_pb2 as pb

FASTEST_BYTES_PER_S = 10e9
"""Bytes a second that no node exceeds when it writes state with checksums."""
USUAL_BYTES_PER_S = 200e6
"""Bytes a second that a node is expected to write before the first save."""
BARRIER_S = 2.0
"""Seconds for a dropped attempt and the barrier after it, before a save can start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Deadline of a stop."""

    give_up_s: float
    """Time at which all work is dropped, and members receive Shutdown."""
    leave_by_s: float
    """Time at which the scheduler exits, even if members are left."""

    @classmethod
    def of(cls, asked_s: float, within_s: float) -> Deadline:
        """Returns the deadline of a stop asked for at ``asked_s`` that may take ``within_s``."""
        give_up_s = StopDeadline.SCHEDULER.give_up_s(asked_s, within_s)
        return cls(give_up_s=give_up_s, leave_by_s=give_up_s + reserve_s(within_s) / 4)


class SavePace:
    """Expected duration of saves of ``num_bytes`` on ``num_nodes`` that write in parallel."""

    def __init__(self, num_bytes: int, num_nodes: int) -> None:
        self._share_bytes = num_bytes / num_nodes
        self._shortest_s: float | None = None
        self._last_s: float | None = None

    def finished(self, seconds: float) -> None:
        """Notes the seconds of a finished save."""
        self._last_s = seconds
        self._shortest_s = min(seconds, self._shortest_s or seconds)

    @property
    def least_s(self) -> float:
        """Seconds that each save takes at least."""
        if self._shortest_s is not None:
            return self._shortest_s / 2
        return self._share_bytes / FASTEST_BYTES_PER_S

    @property
    def expected_s(self) -> float:
        """Seconds that the next save is expected to take."""
        if self._last_s is not None:
            return self._last_s
        return self._share_bytes / USUAL_BYTES_PER_S

    def hopeless(self, now_s: float, deadline: Deadline) -> bool:
        """Returns whether no save that begins now can end in time."""
        return now_s + self.least_s > deadline.give_up_s

    def forgoes(self, end_s: float, deadline: Deadline) -> bool:
        """Returns whether work that ends at ``end_s`` leaves no time to save after it."""
        return end_s + self.expected_s + BARRIER_S > deadline.give_up_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsCall:
    """A call for a copy of the committed weights in ``directory``, which the caller has made."""

    ticket: int
    directory: str


NOT_STARTING = "no attempt will start"
"""Reply to a pause between attempts."""


@dataclass(slots=True, kw_only=True)
class Requests:
    """Requests of control clients and signals."""

    patience_s: float
    """Seconds that a stop waits for a live epoch, in which the state can be saved."""
    paused: bool = False
    """True between a pause and a resume: no attempt starts."""
    stop_reason: str = ""
    """Reason of the stop; empty without one. The first reason stays."""
    stop_by_s: float | None = None
    """Time at which a stop without a live epoch ends without a save; None in a live epoch."""
    deadline: Deadline | None = None
    """Earliest deadline of a stop; None without one."""
    tickets: list[int] = field(default_factory=list)
    """Snapshot calls without a save yet."""
    copies: list[WeightsCall] = field(default_factory=list)
    """Calls for copies of the weights that have not begun. Each makes a copy of its own."""
    save_failed_at: int | None = None
    """Version of the last failed periodic save, which is not retried."""

    def answer(self, event: ControlAsked, *, attempting: bool, now_s: float) -> list[Effect]:
        """Notes a call to pause, resume, stop, save or copy, and confirms it. A call to save or to
        copy is answered when that is done. ``attempting``: an attempt is under way.
        """
        match event.call:
            case ControlCall.PAUSE:
                self.paused = True
                message = "pausing after the attempt under way" if attempting else NOT_STARTING
            case ControlCall.RESUME:
                message = "going on" if self.paused else "the run was not paused"
                self.paused = False
            case ControlCall.STOP:
                self.stop("stopped on request", event.within_s, now_s)
                message = "stopping: the attempt under way ends, then the state is saved"
            case ControlCall.SNAPSHOT:
                self.tickets.append(event.ticket)
                return []
            case ControlCall.WEIGHTS:
                self.copies.append(WeightsCall(ticket=event.ticket, directory=event.directory))
                return []
            case ControlCall.STATUS:
                raise ValueError("a status is no request")
        return [Reply(ticket=event.ticket, reply=pb.ControlReply(message=message))]

    def stop(self, reason: str, within_s: float | None, now_s: float) -> None:
        """Stops the run. Of several reasons the first counts, of several deadlines the earliest."""
        if not self.stop_reason:
            self.stop_reason = reason
            self.stop_by_s = now_s + self.patience_s
        if within_s is None:
            return
        deadline = Deadline.of(now_s, within_s)
        if self.deadline is None or deadline.give_up_s < self.deadline.give_up_s:
            self.deadline = deadline

    def epoch_broke(self, now_s: float) -> None:
        """Restarts the wait of a stop for a live epoch."""
        if self.stop_reason:
            self.stop_by_s = now_s + self.patience_s

    def unsaved_reason(self, version: int, missing: Sequence[str]) -> str:
        """Returns the reason of an end without a live epoch in which to save."""
        return (
            f"{self.stop_reason}; the state of step {version} could not be saved (waited for"
            f" {', '.join(missing) or 'an answer'}), it stays in memory for the next start"
        )

    def late_reason(self, version: int) -> str:
        """Returns the reason of an end that leaves no time to save."""
        return (
            f"{self.stop_reason}; step {version} cannot be saved before the run is killed"
            " (cluster.stop_grace_s, or the end of its job), it stays in memory for the next start"
        )

    def take_tickets(self) -> list[int]:
        """Returns the waiting snapshot calls; the caller answers them."""
        tickets, self.tickets = self.tickets, []
        return tickets

    def answer_snapshots(self, mirror: JournalMirror, error: str = "") -> list[Effect]:
        """Answers all snapshot calls with the newest saved state, or with an error."""
        return snapshot_answers(self.take_tickets(), mirror, error)

    def end_calls(self, mirror: JournalMirror, error: str, saved: bool) -> list[Effect]:
        """Answers all calls to save or to copy, as the run ends: ``error``, or the newest state for
        snapshots if it is ``saved``.
        """
        copies, self.copies = self.copies, []
        refused: list[Effect] = [ReplyError(ticket=call.ticket, error=error) for call in copies]
        return self.answer_snapshots(mirror, "" if saved else error) + refused


def snapshot_answers(tickets: list[int], mirror: JournalMirror, error: str) -> list[Effect]:
    """Returns the answers to snapshot calls: the newest saved state, or an error."""
    if error:
        return [ReplyError(ticket=ticket, error=error) for ticket in tickets]
    directory = "" if mirror.saved is None else mirror.saved.directory
    reply = pb.SnapshotReply(directory=directory, version=mirror.saved_version)
    return [Reply(ticket=ticket, reply=reply) for ticket in tickets]


class Next(Enum):
    """The next activity of a live epoch."""

    SAVE = "save"
    """A save starts; attempts go on when the version is pinned."""
    SAVE_AND_WAIT = "save and wait"
    """A save starts; attempts wait until it is over."""
    WAIT_FOR_SAVE = "wait for the save"
    """Attempts wait until the save or copy under way is over."""
    COPY_WEIGHTS = "copy the weights"
    """A copy of the weights starts; attempts go on when the version is pinned."""
    IDLE_SAVE = "save while idle"
    """The run is paused: the state is settled for the save under way."""
    EVALUATE = "evaluate"
    ATTEMPT = "attempt"
    END = "end"
    WAIT = "wait"
    """The run is paused."""


def is_last(rules: Rules, mirror: JournalMirror) -> bool:
    """Returns whether the committed version is the last one."""
    return mirror.version >= rules.config.train.steps or bool(early_end(rules, mirror))


def early_end(rules: Rules, mirror: JournalMirror) -> str:
    """Returns why ``train.stop_early`` ends the run at the committed version; empty if it does not.

    The journaled evaluations decide, so a scheduler that starts decides the same.
    """
    return mirror.scores.early_end(rules.config, rules.stop_judge, mirror.version)


def is_finished(rules: Rules, mirror: JournalMirror) -> bool:
    """Returns whether the last step is saved, and evaluated if it is to be."""
    saved = mirror.saved_version >= rules.config.train.steps
    if not saved:
        saved = not mirror.unsaved and bool(early_end(rules, mirror))
    return saved and due_set(rules, mirror) is None


def choose(
    rules: Rules,
    mirror: JournalMirror,
    requests: Requests,
    saving: int | None,
    copying: bool = False,
) -> Next:
    """Returns the next activity of a live epoch. ``saving``: version of the save under way; None
    without one. ``copying``: it is a copy of the weights, which saves no state.
    """
    saves_now = saving == mirror.version and not copying
    if requests.stop_reason:
        return _last_save(mirror, requests, saving, saves_now=saves_now)
    if requests.tickets and saving is None:
        return Next.SAVE
    if requests.copies and saving is None:
        return Next.COPY_WEIGHTS  # before a save that is due, as one may be due at each step
    due = _save_is_due(rules, mirror, requests) or _best_is_due(rules, mirror, requests)
    if due and not saves_now:
        return Next.SAVE if saving is None else Next.WAIT_FOR_SAVE
    if due_set(rules, mirror) is not None:
        return Next.EVALUATE
    if is_last(rules, mirror):
        return _last_save(mirror, requests, saving, saves_now=saves_now)
    if not requests.paused:
        return Next.ATTEMPT
    return Next.IDLE_SAVE if saving == mirror.version else Next.WAIT


def _last_save(
    mirror: JournalMirror, requests: Requests, saving: int | None, *, saves_now: bool
) -> Next:
    """Returns how the last version is saved. A save of an older version, or a copy of the weights,
    ends first, if time allows. ``saves_now``: the last version is being saved.
    """
    if not mirror.unsaved:
        return Next.END
    if saving is None or (not saves_now and requests.deadline is not None):
        return Next.SAVE_AND_WAIT
    return Next.WAIT_FOR_SAVE


def _save_is_due(rules: Rules, mirror: JournalMirror, requests: Requests) -> bool:
    every, version = rules.config.train.save_every, mirror.version
    if not every or version % every or requests.save_failed_at == version:
        return False
    return mirror.unsaved


def _best_is_due(rules: Rules, mirror: JournalMirror, requests: Requests) -> bool:
    """Returns whether the committed version is to be saved as the best one so far."""
    judge, version = rules.best_judge, mirror.version
    if judge is None or requests.save_failed_at == version or not mirror.unsaved:
        return False
    if not mirror.scores.has(judge.set_name, version):
        return False
    return mirror.scores.ranking(judge)[:1] == (version,)


def due_set(rules: Rules, mirror: JournalMirror) -> EvaluationSet | None:
    """Returns the set to evaluate at the committed version; None if no evaluation is due."""
    return mirror.scores.due(rules.evaluation_sets, mirror.version)
