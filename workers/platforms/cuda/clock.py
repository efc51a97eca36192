"""The time line of a GPU on the host's clock.

Instructions are issued long before they run, so readings of the host's clock are times of issue. A
timing event on a stream passes when the device reaches it. Events are resolved after the attempt,
relative to one event with a known host time, so that nothing waits inside a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.models.gpu import Event, Gpu, Stream


class EventClock:
    """Reusable timing events. Any thread may stamp."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._zero = gpu.event(timing=True)
        self._zero_s = 0.0
        self._free: list[Event] = []

    def start(self, stream: Stream) -> None:
        """Reads both clocks at one moment; waits for the stream. The error is that of the host's
        wait: some 10 µs.
        """
        # An idle stream passes the event at once, between the two readings of the host's clock.
        stream.synchronize()
        before_s = time.perf_counter()
        self._zero.record(stream)
        self._zero.synchronize()
        self._zero_s = (before_s + time.perf_counter()) / 2

    def stamp(self, stream: Stream) -> Event:
        """Returns an event after all work issued to the stream so far."""
        try:
            event = self._free.pop()
        except IndexError:
            event = self._gpu.event(timing=True)
        event.record(stream)
        return event

    def seconds(self, stamps: Sequence[Event | float]) -> list[float]:
        """Returns times on the host's clock; readings of it stay unchanged. Events may repeat in
        one call, and are reused after it.
        """
        events = {id(stamp): stamp for stamp in stamps if not isinstance(stamp, float)}
        times: dict[int, float] = {}
        for key, event in events.items():
            event.synchronize()
            times[key] = self._zero_s + self._zero.elapsed_time(event) / 1e3
        self._free += events.values()
        return [s if isinstance(s, float) else times[id(s)] for s in stamps]
