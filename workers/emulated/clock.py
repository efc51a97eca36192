"""When the parts of an emulated device are busy.

Times are readings of ``time.monotonic``, the same clock in every process of a machine. Work starts
when its part of the device is free and its inputs are there **on this clock**, whenever Python got
round to saying so, and the caller then sleeps until the clock shows its end. So delays of Python
and of the operating system do not add up, as long as they are shorter than the work itself: a GPU
with its next kernels queued behaves the same.
"""

from __future__ import annotations

import threading
import time

from penstock.workers.waiting import POLL_S, Abort


class Stream:
    """Something that does one thing after the other. Thread-safe."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self._lock = threading.Lock()

    def occupy(self, ready_at: float, seconds: float) -> tuple[float, float]:
        """Start and end of work that can start at ``ready_at``."""
        with self._lock:
            start = max(self.free_at, ready_at)
            self.free_at = start + seconds
            return start, self.free_at


def sleep_until(at: float, abort: Abort | None = None) -> None:
    """Return when the clock shows ``at``.

    Raises:
        Interrupted: aborted.
    """
    while (left_s := at - time.monotonic()) > 0.0:
        if abort is not None:
            abort.check()
        time.sleep(min(left_s, POLL_S))
