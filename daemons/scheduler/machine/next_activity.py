"""What comes next between attempts: a pure choice from where the run stands and what was asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from penstock.daemons.scheduler.machine.events import Effect, Reply, ReplyError
from penstock.daemons.scheduler.machine.grace import Deadline
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.rules import Rules
from penstock.protocol.generated import scheduler_pb2 as pb


class Next(Enum):
    """What a live epoch does between attempts."""

    SAVE = "save"
    EVALUATE = "evaluate"
    ATTEMPT = "attempt"
    END = "end"
    WAIT = "wait"


@dataclass(slots=True, kw_only=True)
class Requests:
    """What control clients and signals asked for.

    ``stop_reason``: empty while nobody asked to stop. ``stop_by_s``: without a live epoch the state
    is not waited for any longer. ``deadline``: when the stop has to be over. ``tickets``: snapshot
    calls to answer. ``save_failed_at``: version whose periodic save failed; it is not tried again.
    """

    paused: bool = False
    stop_reason: str = ""
    stop_by_s: float | None = None
    deadline: Deadline | None = None
    tickets: list[int] = field(default_factory=list)
    save_failed_at: int | None = None


def is_last(rules: Rules, mirror: JournalMirror) -> bool:
    """Whether the committed version is the last one."""
    return mirror.version >= rules.config.train.steps


def choose(rules: Rules, mirror: JournalMirror, requests: Requests) -> Next:
    """What to do in a live epoch when nothing is going on."""
    if requests.stop_reason:
        return Next.SAVE if mirror.unsaved else Next.END
    if requests.tickets or _save_is_due(rules, mirror, requests):
        return Next.SAVE
    if _evaluation_is_due(rules, mirror):
        return Next.EVALUATE
    if is_last(rules, mirror):
        return Next.SAVE if mirror.unsaved else Next.END
    return Next.WAIT if requests.paused else Next.ATTEMPT


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


def answer_snapshots(mirror: JournalMirror, requests: Requests, error: str = "") -> list[Effect]:
    """Answer all snapshot calls: with the newest saved state, or with an error."""
    tickets, requests.tickets = requests.tickets, []
    if error:
        return [ReplyError(ticket=ticket, error=error) for ticket in tickets]
    directory = "" if mirror.saved is None else mirror.saved.directory
    reply = pb.SnapshotReply(directory=directory, version=mirror.saved_version)
    return [Reply(ticket=ticket, reply=reply) for ticket in tickets]
