"""What a worker counts; names and meanings are in :mod:`penstock.protocol.metrics.worker`.

Instructions are counted in plain numbers while they run and added here once an attempt, so that
metrics cost nothing per instruction.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from penstock.protocol.metrics.page import MetricPage
from penstock.protocol.metrics.worker import BUSY, WORKER
from penstock.protocol.plan.instructions import Opcode
from penstock.workers.telemetry.account import TimeAccount
from penstock.workers.telemetry.progress import Progress


class WorkerMetrics:
    """The page of one worker. ``account`` has the device's time; of an attempt under way
    ``progress`` says what it is at.
    """

    def __init__(self, registry: CollectorRegistry, progress: Progress | None = None) -> None:
        self.account = TimeAccount()
        self._progress = progress or Progress()
        self._page = MetricPage(WORKER, registry)
        self._shown = self.account.seconds(None)
        self._page.refreshed_by(self._account_for)

    def fetched(self, way: str, num_bytes: int, seconds: float) -> None:
        """An array of another node has come, by ``zmq`` or ``nixl``."""
        self._page.add("penstock_fetch_bytes", num_bytes, way)
        self._page.add("penstock_fetch_seconds", seconds, way)
        self._page.add("penstock_fetches", 1, way)

    def add_instructions(self, counts: Mapping[Opcode, int]) -> None:
        """Add one attempt's instructions."""
        for opcode, count in counts.items():
            self._page.add("penstock_instructions", count, opcode.name.lower())

    def set_peak(self, num_bytes: float) -> None:
        """Device memory of one attempt."""
        self._page.set("penstock_device_memory_peak_bytes", num_bytes)

    def add_outcome(self, outcome: str) -> None:
        """How an attempt ended: ``done``, ``aborted`` or ``failed``."""
        self._page.add("penstock_worker_attempts", 1, outcome)

    def transferred(self, direction: str, kind: str, num_bytes: int) -> None:
        """One message (``direction``: ``send`` or ``receive``)."""
        self._page.add("penstock_transfer_bytes", num_bytes, direction, _KINDS[kind])

    def dropped(self, reason: str) -> None:
        """One message that was not used."""
        self._page.add("penstock_dropped_messages", 1, reason)

    def _account_for(self) -> None:
        """What is shown never goes back: a wait under way may turn out to have been another."""
        for what, seconds in self.account.seconds(self._progress.running()).items():
            more = seconds - self._shown[what]
            if more > 0:
                self._shown[what] = seconds
                busy = what in BUSY
                name = "penstock_device_busy_seconds" if busy else "penstock_device_idle_seconds"
                self._page.add(name, more, what)


_KINDS = {
    "activation": "activations",
    "checkpoint": "checkpoints",
    "gradient": "gradients",
    "reduction": "gradients",
    "entry": "weights",
}
"""Of messages, and what they are counted as; entries say that a device joins a collective."""
