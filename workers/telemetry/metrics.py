"""A worker's metrics; names and meanings are in :mod:`penstock.protocol.metrics.worker`.

Instructions are counted in plain numbers while they run and added here once an attempt, so that
metrics cost nothing per instruction.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from penstock.protocol.metrics.registry import MetricRegistry
from penstock.protocol.metrics.worker import BUSY, WORKER
from penstock.protocol.plan.instructions import Opcode
from penstock.workers.telemetry.account import TimeAccount
from penstock.workers.telemetry.progress import Progress
from penstock.workers.telemetry.timing import Transferred


class WorkerMetrics:
    """The page of one worker. ``account`` has the device's time; ``progress`` has the activity of
    the current attempt.
    """

    def __init__(self, registry: CollectorRegistry, progress: Progress | None = None) -> None:
        self.account = TimeAccount()
        self._progress = progress or Progress()
        self._page = MetricRegistry(WORKER, registry)
        self._shown = self.account.seconds(None)
        self._page.refreshed_by(self._account_for)

    def add_transfers(self, transfers: Mapping[tuple[str, str], Transferred]) -> None:
        """Adds one attempt's copies, and the time of its messages."""
        for (direction, kind), sums in transfers.items():
            self._page.add("penstock_transfer_bytes", sums.num_bytes, direction, kind)
            self._page.add("penstock_transfer_seconds", sums.seconds, direction, kind)

    def add_flops(self, model: float, recomputed: float) -> None:
        """Adds the work of one attempt."""
        self._page.add("penstock_device_model_flops", model)
        self._page.add("penstock_device_recomputed_flops", recomputed)

    def describe_device(self, peak_flops: float | None, limit_bytes: float | None) -> None:
        """Sets the device's speed and memory, as far as they are known."""
        if peak_flops is not None:
            self._page.set("penstock_device_peak_flops_per_second", peak_flops)
        if limit_bytes is not None:
            self._page.set("penstock_device_memory_limit_bytes", limit_bytes)

    def fetched(self, way: str, num_bytes: int, seconds: float) -> None:
        """Adds an array of another node that has come, by ``zmq`` or ``nixl``."""
        self._page.add("penstock_fetch_bytes", num_bytes, way)
        self._page.add("penstock_fetch_seconds", seconds, way)
        self._page.add("penstock_fetches", 1, way)

    def add_instructions(self, counts: Mapping[Opcode, int]) -> None:
        """Adds one attempt's instructions."""
        for opcode, count in counts.items():
            self._page.add("penstock_instructions", count, opcode.name.lower())

    def set_memory(self, held_bytes: float, peak_bytes: float) -> None:
        """Sets device memory at the end of an attempt, and its peak."""
        self._page.set("penstock_device_memory_bytes", held_bytes)
        self._page.set("penstock_device_memory_peak_bytes", peak_bytes)

    def add_outcome(self, outcome: str) -> None:
        """Counts an attempt by its end: ``done``, ``aborted`` or ``failed``."""
        self._page.add("penstock_worker_attempts", 1, outcome)

    def transferred(self, direction: str, kind: str, num_bytes: int) -> None:
        """Adds one message (``direction``: ``send`` or ``receive``)."""
        self._page.add("penstock_transfer_bytes", num_bytes, direction, KINDS_OF_TRANSFERS[kind])

    def dropped(self, reason: str) -> None:
        """Counts one message that was not used."""
        self._page.add("penstock_dropped_messages", 1, reason)

    def _account_for(self) -> None:
        """Publishes the account. Shown values never decrease: a current wait may later count for
        another cause.
        """
        for what, seconds in self.account.seconds(self._progress.running()).items():
            more = seconds - self._shown[what]
            if more > 0:
                self._shown[what] = seconds
                busy = what in BUSY
                name = "penstock_device_busy_seconds" if busy else "penstock_device_idle_seconds"
                self._page.add(name, more, what)


KINDS_OF_TRANSFERS = {
    "activation": "activations",
    "checkpoint": "checkpoints",
    "gradient": "gradients",
    "reduction": "gradients",
    "entry": "weights",
}
"""Kinds of bytes by kind of message; entries announce that a device joins a collective."""
