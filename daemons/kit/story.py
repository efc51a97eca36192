"""What a machine heard and decided of late, kept in memory and told when it contradicts itself.

A daemon's log says what changed; it does not say everything that led there. So each loop keeps a
:class:`FlightRecorder`: the last few thousand stimuli with their effects. It is written to the log
when the machine raises an error or breaks its invariant. A stimulus costs about a microsecond,
because values are kept as they are and put into words only when the story is told.

The values are small: machines see names, numbers and short texts, never tensors. A machine whose
events hold something longer, such as a plan, says with ``abridged`` what is kept instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

MAX_STIMULI = 4000
MAX_CHARACTERS = 300
"""Of one event or effect, when the story is told."""
MAX_EFFECTS = 20
"""Of one stimulus, when the story is told."""


class Record(NamedTuple):
    """One event and what the machine decided; a tuple, as it is made for every event.

    ``cause`` is the number of the stimulus whose effects led to the event, 0 if it came from
    outside; ``at_s`` is the time that the machine was told.
    """

    number: int
    cause: int
    at_s: float
    event: object
    effects: Sequence[object]


class FlightRecorder:
    """The last :data:`MAX_STIMULI` stimuli of one machine.

    Events that are ``routine`` are left out when they lead to nothing: they come many times a
    second and would push out the others.
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
        """Remember a stimulus; returns its number, the cause of what its effects lead to."""
        self._number += 1
        if effects or not self._routine(event):
            kept = tuple(map(self._abridged, effects)) if effects else ()
            self._stimuli.append(
                Record(self._number, cause, at_s, self._abridged(event), kept),
            )
        return self._number

    @property
    def stimuli(self) -> tuple[Record, ...]:
        """All that is remembered, oldest first."""
        return tuple(self._stimuli)

    def tell(self) -> Iterator[str]:
        """Yields the story in words, a line a stimulus::

        #812 <- #811 at 95.310 s: Started(name='memoryd.a', pid=7) => Kill(name='memoryd.a')
        """
        for number, cause, at_s, event, effects in self._stimuli:
            because = f" <- #{cause}" if cause else ""
            shown = [_in_words(effect) for effect in effects[:MAX_EFFECTS]]
            if len(effects) > MAX_EFFECTS:
                shown.append(f"{len(effects) - MAX_EFFECTS} more")
            told = "; ".join(shown) or "nothing"
            yield f"#{number}{because} at {at_s:.3f} s: {_in_words(event)} => {told}"


def _in_words(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"
