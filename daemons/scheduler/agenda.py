"""What comes next between attempts: a pure choice from where the run stands and what was asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from penstock.daemons.scheduler.events import Effect, Reply, ReplyError
from penstock.daemons.scheduler.grace import Deadline
from penstock.daemons.scheduler.ledger import Ledger
from penstock.daemons.scheduler.rules import Rules
from penstock.protocol.generated import scheduler_pb2 as pb


class Next(Enum):
    """What a live epoch does between attempts."""

    SAVE = "save"
    EVALUATE = "evaluate"
    ATTEMPT = "attempt"
    END = "end"
    WAIT = "wait"


@dataclass(slots=True, kw_only=True)
class Wishes:
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


def is_last(rules: Rules, ledger: Ledger) -> bool:
    """Whether the committed version is the last one."""
    return ledger.version >= rules.config.train.steps


def choose(rules: Rules, ledger: Ledger, wishes: Wishes) -> Next:
    """What to do in a live epoch when nothing is going on."""
    if wishes.stop_reason:
        return Next.SAVE if ledger.unsaved else Next.END
    if wishes.tickets or _save_is_due(rules, ledger, wishes):
        return Next.SAVE
    if _evaluation_is_due(rules, ledger):
        return Next.EVALUATE
    if is_last(rules, ledger):
        return Next.SAVE if ledger.unsaved else Next.END
    return Next.WAIT if wishes.paused else Next.ATTEMPT


def _save_is_due(rules: Rules, ledger: Ledger, wishes: Wishes) -> bool:
    every, version = rules.config.train.save_every, ledger.version
    if not every or version % every or wishes.save_failed_at == version:
        return False
    return ledger.unsaved


def _evaluation_is_due(rules: Rules, ledger: Ledger) -> bool:
    every, version = rules.config.train.eval_every, ledger.version
    if not every or not version or version % every:
        return False
    return ledger.evaluated != version


def answer_snapshots(ledger: Ledger, wishes: Wishes, error: str = "") -> list[Effect]:
    """Answer all snapshot calls: with the newest saved state, or with an error."""
    tickets, wishes.tickets = wishes.tickets, []
    if error:
        return [ReplyError(ticket=ticket, error=error) for ticket in tickets]
    directory = "" if ledger.saved is None else ledger.saved.directory
    reply = pb.SnapshotReply(directory=directory, version=ledger.saved_version)
    return [Reply(ticket=ticket, reply=reply) for ticket in tickets]
