"""Seconds of a block's operators, distinguished as in recomputation.

Every kernel of a forward is timed and belongs to the operator that
:class:`~penstock.models.saved_activations.OperatorTracker` names. So an operator's seconds are
those of the kernels that run again if it is dropped. :mod:`penstock.models.profiling.drops` has the
savings.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from penstock.models.saved_activations import OperatorTracker
from penstock.models.torch_device import torch_device
from penstock.models.torch_internals import OpOverload, TorchDispatchMode, schema_of


class OperatorProbe:
    """Watches forwards of one block; the first one warms up and does not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runs: list[dict[str, float]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Runs one forward of the block inside, on this thread."""
        tracker = OperatorTracker()
        tracker.restart()
        stopwatch = _KernelStopwatch(tracker, self._device)
        with tracker.watching(), stopwatch:
            yield
        self._runs.append(dict(stopwatch.seconds))

    @property
    def seconds(self) -> dict[str, float]:
        """Median seconds of each operator by name, in the order in which they first begin."""
        counted = self._runs[1:]
        return {
            name: statistics.median(run.get(name, 0.0) for run in counted) for name in counted[-1]
        }


class _KernelStopwatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Adds up the seconds of kernels by operator; those of no module are left out."""

    def __init__(self, tracker: OperatorTracker, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._tracker = tracker
        self._device = torch_device(device)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        operator = self._tracker.operator_of(schema_of(func).name.split("::")[-1])
        self._device.synchronize()  # so that the seconds of a kernel are its own
        started_s = time.perf_counter()
        result = func(*args, **kwargs)
        self._device.synchronize()
        if operator not in (None, "loss"):  # outside of all modules: never dropped
            self.seconds[operator] += time.perf_counter() - started_s
        return result
