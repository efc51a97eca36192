"""The time line of a GPU on the host's clock.

Instructions are issued long before they run, so readings of the host's clock say when they were
issued. A timing event on a stream is passed when the device gets there; events are resolved when
the attempt is over, against one whose moment the host knows, so that nothing waits inside a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.models.gpu import Event, Gpu, Stream


class EventClock:
    """Timing events, used again. Any thread may stamp."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._zero = gpu.event(timing=True)
        self._zero_s = 0.0
        self._free: list[Event] = []

    def start(self, stream: Stream) -> None:
        """Read both clocks at one moment; waits for the stream. As exact as the host waits: some
        10 µs.
        """
        stream.synchronize()
        before_s = time.perf_counter()
        self._zero.record(stream)
        self._zero.synchronize()
        self._zero_s = (before_s + time.perf_counter()) / 2

    def stamp(self, stream: Stream) -> Event:
        """The point behind what the stream was given so far."""
        try:
            event = self._free.pop()
        except IndexError:
            event = self._gpu.event(timing=True)
        event.record(stream)
        return event

    def seconds(self, stamps: Sequence[Event | float]) -> list[float]:
        """Moments on the host's clock; readings of it stay what they are. Events may come several
        times in one call, and are used again after it.
        """
        events = {id(stamp): stamp for stamp in stamps if not isinstance(stamp, float)}
        found: dict[int, float] = {}
        for key, event in events.items():
            event.synchronize()
            found[key] = self._zero_s + self._zero.elapsed_time(event) / 1e3
        self._free += events.values()
        return [s if isinstance(s, float) else found[id(s)] for s in stamps]
