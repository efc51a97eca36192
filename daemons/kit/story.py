"""The flight record of a machine: its last events and effects, logged after an internal error.

A daemon's log tells changes, and not every event that led to them. So each loop keeps a
:class:`FlightRecorder` with the last few thousand events and their effects. The loop writes them to
the log when the machine raises an error or breaks an invariant. A record costs about a microsecond:
values are kept as they are, and become text only when they are logged.

The values are small: names, numbers and short texts, never tensors. A machine with long values in
its events, such as a plan, passes ``abridged`` to keep short ones instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

MAX_STIMULI = 4000
MAX_CHARACTERS = 300
"""Characters of one event or effect in the log."""
MAX_EFFECTS = 20
"""Effects of one event in the log."""


class Record(NamedTuple):
    """One event with the effects of the machine; a tuple, since one is made for every event."""

    number: int
    """Number of the record, counted from 1."""
    cause: int
    """Number of the record with the effects that caused the event; 0 for an input."""
    at_s: float
    """Time that the machine received."""
    event: object
    effects: Sequence[object]


class FlightRecorder:
    """The last :data:`MAX_STIMULI` records of one machine.

    ``routine`` events without effects are left out: many of them arrive each second, and would push
    out all other records.
    """

    def __init__(
        self,
        *,
        routine: Callable[[Any], bool] = lambda event: False,
        abridged: Callable[[Any], object] = lambda value: value,
    ) -> None:
        self._routine = routine
        self._abridged = abridged
        self._stimuli: deque[Record] = deque(maxlen=MAX_STIMULI)
        self._number = 0

    def add(self, event: object, effects: Sequence[object], *, cause: int, at_s: float) -> int:
        """Adds a record; returns its number, the cause of the events that its effects lead to."""
        self._number += 1
        if effects or not self._routine(event):
            kept = tuple(map(self._abridged, effects)) if effects else ()
            self._stimuli.append(
                Record(self._number, cause, at_s, self._abridged(event), kept),
            )
        return self._number

    @property
    def stimuli(self) -> tuple[Record, ...]:
        """All records, oldest first."""
        return tuple(self._stimuli)

    def tell(self) -> Iterator[str]:
        """Yields one line for each record::

        #812 <- #811 at 95.310 s: Started(name='memoryd.a', pid=7) => Kill(name='memoryd.a')
        """
        for number, cause, at_s, event, effects in self._stimuli:
            because = f" <- #{cause}" if cause else ""
            shown = [_in_words(effect) for effect in effects[:MAX_EFFECTS]]
            if len(effects) > MAX_EFFECTS:
                shown.append(f"{len(effects) - MAX_EFFECTS} more")
            decided = "; ".join(shown) or "nothing"
            yield f"#{number}{because} at {at_s:.3f} s: {_in_words(event)} => {decided}"


def _in_words(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"
