"""What was asked of a run, how much time a stop leaves, and what comes next: pure choices.

A run that is told to stop may be killed from outside some time later. Nothing is lost by a save
that is given up: memory keeps the state, and what was written has a temporary name. So a save is
left out only when it cannot end in time; in doubt it is begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

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
"""No storage of a node takes checksummed state faster than this."""
USUAL_BYTES_PER_S = 200e6
"""What a save is expected to take as long as none was seen."""
BARRIER_S = 2.0
"""Dropping an attempt and beginning a new epoch, without which nothing can be saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Of a stop. ``give_up_s``: from then on nothing is waited for but the members' farewell.
    ``leave_by_s``: the scheduler leaves then, whoever is still there.
    """

    give_up_s: float
    leave_by_s: float

    @classmethod
    def of(cls, asked_s: float, within_s: float) -> Deadline:
        """Returns the deadline of a stop asked for at ``asked_s`` that may take ``within_s``."""
        give_up_s = StopDeadline.SCHEDULER.give_up_s(asked_s, within_s)
        return cls(give_up_s=give_up_s, leave_by_s=give_up_s + reserve_s(within_s) / 4)


class SavePace:
    """How long saves of ``num_bytes`` take on ``num_nodes`` that write at the same time."""

    def __init__(self, num_bytes: int, num_nodes: int) -> None:
        self._share_bytes = num_bytes / num_nodes
        self._shortest_s: float | None = None
        self._last_s: float | None = None

    def finished(self, seconds: float) -> None:
        """A save took so long, settling included."""
        self._last_s = seconds
        self._shortest_s = min(seconds, self._shortest_s or seconds)

    @property
    def least_s(self) -> float:
        """No save takes less."""
        if self._shortest_s is not None:
            return self._shortest_s / 2
        return self._share_bytes / FASTEST_BYTES_PER_S

    @property
    def expected_s(self) -> float:
        """What the next save may well take."""
        if self._last_s is not None:
            return self._last_s
        return self._share_bytes / USUAL_BYTES_PER_S

    def hopeless(self, now_s: float, deadline: Deadline) -> bool:
        """Returns whether no save that begins now can end in time."""
        return now_s + self.least_s > deadline.give_up_s

    def forgoes(self, end_s: float, deadline: Deadline) -> bool:
        """Returns whether work that ends at ``end_s`` leaves no time to save after it."""
        return end_s + self.expected_s + BARRIER_S > deadline.give_up_s


NOT_STARTING = "no attempt will start"


@dataclass(slots=True, kw_only=True)
class Requests:
    """What control clients and signals asked for.

    ``patience_s``: how long a stop waits for a live epoch, in which the state can be saved.
    ``stop_reason``: empty while nobody asked to stop. ``stop_by_s``: without a live epoch the state
    is not waited for any longer. ``deadline``: when the stop has to be over. ``tickets``: snapshot
    calls to answer. ``save_failed_at``: version whose periodic save failed; it is not tried again.
    """

    patience_s: float
    paused: bool = False
    stop_reason: str = ""
    stop_by_s: float | None = None
    deadline: Deadline | None = None
    tickets: list[int] = field(default_factory=list)
    save_failed_at: int | None = None

    def answer(self, event: ControlAsked, *, attempting: bool, now_s: float) -> list[Effect]:
        """Take note of a call to pause, resume, stop or save, and say so; a call for a snapshot is
        answered when there is one. ``attempting``: whether an attempt is under way.
        """
        match event.call:
            case ControlCall.PAUSE:
                self.paused = True
                said = "pausing after the attempt under way" if attempting else NOT_STARTING
            case ControlCall.RESUME:
                said = "going on" if self.paused else "the run was not paused"
                self.paused = False
            case ControlCall.STOP:
                self.stop("stopped on request", event.within_s, now_s)
                said = "stopping: the attempt under way ends, then the state is saved"
            case ControlCall.SNAPSHOT:
                self.tickets.append(event.ticket)
                return []
            case ControlCall.STATUS:
                raise ValueError("a status is no request")
        return [Reply(ticket=event.ticket, reply=pb.ControlReply(message=said))]

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
        """Wait for the next live epoch, if the run is to stop, with the full patience again."""
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
        """Returns the snapshot calls that wait; somebody else answers them."""
        tickets, self.tickets = self.tickets, []
        return tickets

    def answer_snapshots(self, mirror: JournalMirror, error: str = "") -> list[Effect]:
        """Answer all snapshot calls: with the newest saved state, or with an error."""
        return snapshot_answers(self.take_tickets(), mirror, error)


def snapshot_answers(tickets: list[int], mirror: JournalMirror, error: str) -> list[Effect]:
    """Returns the answers to snapshot calls: the newest saved state, or an error."""
    if error:
        return [ReplyError(ticket=ticket, error=error) for ticket in tickets]
    directory = "" if mirror.saved is None else mirror.saved.directory
    reply = pb.SnapshotReply(directory=directory, version=mirror.saved_version)
    return [Reply(ticket=ticket, reply=reply) for ticket in tickets]


class Next(Enum):
    """What a live epoch does between attempts."""

    SAVE = "save"
    """Begin to save, and go on when that is safe."""
    SAVE_AND_WAIT = "save and wait"
    WAIT_FOR_SAVE = "wait for the save"
    IDLE_SAVE = "save while idle"
    """The run is paused: the save under way is helped to its end."""
    EVALUATE = "evaluate"
    ATTEMPT = "attempt"
    END = "end"
    WAIT = "wait"


def is_last(rules: Rules, mirror: JournalMirror) -> bool:
    """Returns whether the committed version is the last one."""
    return mirror.version >= rules.config.train.steps


def is_finished(rules: Rules, mirror: JournalMirror) -> bool:
    """Returns whether the last step is saved, and evaluated if it is to be."""
    saved = mirror.saved_version >= rules.config.train.steps
    return saved and not _evaluation_is_due(rules, mirror)


def choose(rules: Rules, mirror: JournalMirror, requests: Requests, saving: int | None) -> Next:
    """Returns what to do in a live epoch when nothing is going on. ``saving``: the version that is
    being saved, None if none is.
    """
    if requests.stop_reason:
        return _last_save(mirror, requests, saving)
    if requests.tickets and saving is None:
        return Next.SAVE
    if _save_is_due(rules, mirror, requests) and saving != mirror.version:
        return Next.SAVE if saving is None else Next.WAIT_FOR_SAVE
    if _evaluation_is_due(rules, mirror):
        return Next.EVALUATE
    if is_last(rules, mirror):
        return _last_save(mirror, requests, saving)
    if not requests.paused:
        return Next.ATTEMPT
    return Next.IDLE_SAVE if saving == mirror.version else Next.WAIT


def _last_save(mirror: JournalMirror, requests: Requests, saving: int | None) -> Next:
    """A save of an older version is waited for, unless time is short."""
    if not mirror.unsaved:
        return Next.END
    if saving is None or (saving != mirror.version and requests.deadline is not None):
        return Next.SAVE_AND_WAIT
    return Next.WAIT_FOR_SAVE


def _save_is_due(rules: Rules, mirror: JournalMirror, requests: Requests) -> bool:
    every, version = rules.config.train.save_every, mirror.version
    if not every or version % every or requests.save_failed_at == version:
        return False
    return mirror.unsaved


def _evaluation_is_due(rules: Rules, mirror: JournalMirror) -> bool:
    every, version = rules.config.train.eval_every, mirror.version
    if not every or not version or version % every:
        return False
    return mirror.evaluated != version
