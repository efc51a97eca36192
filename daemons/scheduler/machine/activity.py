"""What the scheduler's machine can be busy with: one activity at a time, each a small machine.

An activity belongs to one epoch. It is started, fed with the members' messages of that epoch, and
dropped, whatever it was doing, when the epoch breaks; only what it journaled stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from penstock.daemons.kit.events import Say
from penstock.daemons.scheduler.machine.events import Effect, Send
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.rules import Rules, RunPhase
from penstock.protocol.generated import scheduler_pb2 as pb


class Activity:
    """Base of all activities.

    ``waiting``: members that owe an answer, until ``deadline_s`` if that is set. ``title``: what
    messages call it. ``started_s``: when it began.
    """

    phase: RunPhase
    title: ClassVar[str]
    answers: ClassVar[Mapping[str, Callable[[Any, str, Any, float], list[Effect]]]] = {}
    """Kind of a member's message -> handler(self, member, message, now_s)."""

    def __init__(self, rules: Rules, mirror: JournalMirror) -> None:
        self.rules = rules
        self.mirror = mirror
        self.started = False
        self.started_s = 0.0
        self.done = False
        self.waiting: set[str] = set()
        self.deadline_s: float | None = None

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Members whose work this activity consists of, as long as they owe some; they have to get
        on (:class:`~penstock.daemons.scheduler.machine.membership.Hangs`).
        """
        return ()

    def start(self, now_s: float) -> list[Effect]:
        """Returns the first effects."""
        raise NotImplementedError

    def receive(self, member: str, kind: str, body: Any, now_s: float) -> list[Effect]:
        """Hear a message of the present epoch; kinds that mean nothing here are ignored."""
        handler = self.answers.get(kind)
        return [] if handler is None else handler(self, member, body, now_s)

    def answered(self, member: str) -> bool:
        """Tick a member off; whether it was the last that owed an answer."""
        if member not in self.waiting:
            return False
        self.waiting.discard(member)
        return not self.waiting


def send_all(members: Iterable[str], message: pb.SchedulerMessage) -> list[Effect]:
    """Returns the effects that send one message to several members."""
    return [Send(member=member, message=message) for member in members]


def with_cause(effect: Effect, cause: str) -> Effect:
    """Returns the effect, naming the failure: of what is said or ordered while a run recovers."""
    if isinstance(effect, Say):
        return replace(effect, cause=cause)
    if isinstance(effect, Send) and effect.message.HasField("fence"):
        effect.message.fence.cause = cause
    return effect
