"""Seconds of work on a device, by its own events where it has some; medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_WARM_UP = 2


class Timer:
    """Times work that is issued to the current stream of a device."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"

    def synchronize(self) -> None:
        """Waits for all streams."""
        if self._cuda:
            torch.cuda.synchronize()

    def median(self, run: Callable[[], object], repeats: int = 9) -> float:
        """Returns the seconds of one ``run``, the device idle before each."""
        for _ in range(_WARM_UP):
            run()
        return statistics.median(self.once(run) for _ in range(repeats))

    def once(self, run: Callable[[], object]) -> float:
        """Returns the seconds of a ``run`` until all streams are done, which began idle."""
        self.synchronize()
        started_s = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - started_s
