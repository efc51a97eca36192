"""How a machine is fed: one event at a time, with its effects carried out before the next.

Each daemon has a machine (a pure class of its folder ``machine``), effects (a class that acts) and
a service, which waits for what comes from outside and feeds the :class:`Loop` with it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock.daemons.kit.events import Exit
from penstock.daemons.kit.story import FlightRecorder
from penstock.host.errors import PenstockError
from penstock.protocol.run.process import monotonic_s

_log = logging.getLogger("penstock.story")


class Machine(Protocol):
    """What a daemon decides with: no threads, sockets, clocks or files."""

    def handle(self, event: Any, now_s: float) -> Sequence[Any]:
        """React to ``event`` at ``now_s`` (any monotonic clock, seconds)."""

    def validate(self) -> None:
        """Checks the invariants.

        Raises:
            ValueError: naming what contradicts what.
        """


class EffectRunner(Protocol):
    """What a daemon acts with. ``exit`` is set when an :class:`Exit` was carried out."""

    exit: Exit | None

    def carry_out(self, effects: Sequence[Any]) -> Sequence[Any]:
        """Carry out effects in order; returns the events that they led to at once.

        They are fed to the machine before anything that comes from outside.
        """


class Loop:
    """Feeds ``machine`` with events and has ``runner`` carry out what it decides, on one thread."""

    def __init__(
        self,
        machine: Machine,
        runner: EffectRunner,
        *,
        story: FlightRecorder | None = None,
        clock: Callable[[], float] = monotonic_s,
    ) -> None:
        self._machine = machine
        self._runner = runner
        self._clock = clock
        self.story = FlightRecorder() if story is None else story

    @property
    def exit(self) -> Exit | None:
        """How the process is to end; None as long as it goes on."""
        return self._runner.exit

    def feed(self, event: Any) -> None:
        """Handle one event and all that its effects lead to.

        What follows an :class:`Exit` is dropped. An error of the machine, of its invariant or of an
        effect writes the story to the log and is raised: the process must not go on with a state
        that contradicts itself. Errors for the user are raised without the story.
        """
        pending = deque([(event, 0)])
        while pending and self.exit is None:
            event, cause = pending.popleft()
            try:
                number, effects = self._decide(event, cause)
                events = self._runner.carry_out(effects)
            except PenstockError:
                raise  # says itself what the user can do
            except Exception as error:
                self._tell(error)
                raise
            pending.extend((event, number) for event in events)

    def _decide(self, event: Any, cause: int) -> tuple[int, Sequence[Any]]:
        now_s, effects = self._clock(), list[Any]()
        try:
            effects += self._machine.handle(event, now_s)
            if effects:  # nothing is done on the word of a state that contradicts itself
                self._machine.validate()
        finally:  # the event that led to an error is part of the story
            number = self.story.add(event, effects, cause=cause, at_s=now_s)
        return number, effects

    def _tell(self, error: Exception) -> None:
        told = list(self.story.tell())
        _log.error("%r; the last %d stimuli led here", error, len(told))
        for line in told:
            _log.error("%s", line)
