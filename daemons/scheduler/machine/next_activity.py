"""What comes next between attempts: a pure choice from where the run stands and what was asked.

What the machine can be busy with: one activity at a time, each a small machine of its own.

An activity belongs to one epoch. It is started, fed with the members' messages of that epoch, and
dropped, whatever it was doing, when the epoch breaks; only what it journaled stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from penstock.daemons.scheduler.machine.events import Effect, Reply, ReplyError, Send
from penstock.daemons.scheduler.machine.grace import Deadline
from penstock.daemons.scheduler.machine.ledger import Ledger
from penstock.daemons.scheduler.machine.rules import Phase, Rules
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


class Activity:
    """Base of all activities.

    ``waiting``: members that owe an answer, until ``deadline_s`` if that is set. ``title``: what
    messages call it. ``started_s``: when it began.
    """

    phase: Phase
    title: ClassVar[str]
    answers: ClassVar[Mapping[str, Callable[[Any, str, Any, float], list[Effect]]]] = {}
    """Kind of a member's message -> handler(self, member, message, now_s)."""

    def __init__(self, rules: Rules, ledger: Ledger) -> None:
        self.rules = rules
        self.ledger = ledger
        self.started = False
        self.started_s = 0.0
        self.done = False
        self.waiting: set[str] = set()
        self.deadline_s: float | None = None

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Members whose work this activity consists of, as long as they owe some; they have to get
        on (:mod:`.hangs`).
        """
        return ()

    def start(self, now_s: float) -> list[Effect]:
        """The first effects."""
        raise NotImplementedError

    def receive(self, member: str, kind: str, body: Any, now_s: float) -> list[Effect]:
        """A message of the present epoch; kinds that mean nothing here are ignored."""
        handler = self.answers.get(kind)
        return [] if handler is None else handler(self, member, body, now_s)

    def answered(self, member: str) -> bool:
        """Tick a member off; whether it was the last that owed an answer."""
        if member not in self.waiting:
            return False
        self.waiting.discard(member)
        return not self.waiting


def send_all(members: Iterable[str], message: pb.SchedulerMessage) -> list[Effect]:
    """The same message to several members."""
    return [Send(member=member, message=message) for member in members]


def record_message(record: Any) -> pb.Record:
    """A :class:`~penstock.shm.control.CommitRecord` as it travels."""
    return pb.Record(
        version=record.version,
        attempt=record.attempt,
        decision=int(record.decision),
        coefficient=record.coefficient,
        inverse_loss_scale=record.inverse_loss_scale,
        learning_rate=record.learning_rate,
        bias_step=record.bias_step,
        incarnation=record.incarnation,
    )
