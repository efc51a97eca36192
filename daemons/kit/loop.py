"""The loop of a machine: one event at a time, with its effects carried out before the next event.

Each daemon has three parts. The machine is a pure class in the folder ``machine``. The effect
runner is a class that acts. The service waits for input and feeds it to the :class:`Loop`.
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
    """The part of a daemon that decides: without threads, sockets, clocks or files."""

    def handle(self, event: Any, now_s: float) -> Sequence[Any]:
        """Handles ``event`` at ``now_s`` (seconds of any monotonic clock)."""

    def validate(self) -> None:
        """Checks the invariants.

        Raises:
            ValueError: an invariant does not hold; names the values.
        """


class EffectRunner(Protocol):
    """The part of a daemon that acts. ``exit`` is set once an :class:`Exit` was carried out."""

    exit: Exit | None

    def carry_out(self, effects: Sequence[Any]) -> Sequence[Any]:
        """Runs effects in order; returns the events that they caused at once.

        These events are fed to the machine before any input.
        """


class Loop:
    """Feeds ``machine`` with events and has ``runner`` carry out its effects, on one thread."""

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
        """The end of the process; None while it goes on."""
        return self._runner.exit

    def feed(self, event: Any) -> None:
        """Handles one event, and all events that its effects cause.

        Events after an :class:`Exit` are dropped. An error of the machine or of an effect is raised
        after the flight record is logged: the state contradicts itself.
        Errors for the user are raised without the record.
        """
        pending = deque([(event, 0)])
        while pending and self.exit is None:
            event, cause = pending.popleft()
            try:
                number, effects = self._decide(event, cause)
                events = self._runner.carry_out(effects)
            except PenstockError:
                raise  # tells the user what to do
            except Exception as error:
                self._tell(error)
                raise
            pending.extend((event, number) for event in events)

    def _decide(self, event: Any, cause: int) -> tuple[int, Sequence[Any]]:
        now_s, effects = self._clock(), list[Any]()
        try:
            effects += self._machine.handle(event, now_s)
            if effects:  # no effect follows from a contradictory state
                self._machine.validate()
        finally:  # the record includes the event of an error
            number = self.story.add(event, effects, cause=cause, at_s=now_s)
        return number, effects

    def _tell(self, error: Exception) -> None:
        lines = list(self.story.tell())
        _log.error("%r; the last %d stimuli led here", error, len(lines))
        for line in lines:
            _log.error("%s", line)
