"""Prometheus metrics of a worker.

Instructions are counted in plain numbers while they run and added here once an attempt, so that
metrics cost nothing per instruction.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.protocol.plan.instructions import Opcode
from penstock.protocol.run.metrics import LateGauge


class WorkerMetrics:
    """Names carry their unit and the prefix ``penstock_worker_``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._instruction_seconds = Counter(
            "penstock_worker_instruction_seconds",
            "Seconds inside instructions, waiting included",
            ["opcode"],
            registry=registry,
        )
        self._instructions = Counter(
            "penstock_worker_instructions", "Executed instructions", ["opcode"], registry=registry
        )
        self._busy_ratio = Gauge(
            "penstock_worker_busy_ratio",
            "Share of the last attempt's time spent in compute",
            registry=registry,
        )
        self._busy_seconds = Counter(
            "penstock_worker_busy_seconds",
            "Seconds in compute, waiting excluded",
            registry=registry,
        )
        self._peak_bytes = LateGauge(
            "penstock_worker_peak_device_bytes",
            "Most memory that the device held in the last attempt, where it is measured",
            registry,
        )
        self._wait_seconds = Counter(
            "penstock_worker_wait_seconds", "Seconds waited", ["for"], registry=registry
        )
        self._bytes = Counter(
            "penstock_worker_transfer_bytes",
            "Bytes of tensors sent and received",
            ["direction", "kind"],
            registry=registry,
        )
        self._fetched = Counter(
            "penstock_worker_fetched_bytes",
            "Bytes of weights that came from other nodes, by their memoryd (zmq) or read from their"
            " memory (nixl)",
            ["way"],
            registry=registry,
        )
        self._dropped = Counter(
            "penstock_worker_dropped_messages",
            "Messages not used: malformed, stale, unexpected",
            ["reason"],
            registry=registry,
        )
        self._tokens = Counter(
            "penstock_worker_tokens", "Tokens this worker computed the loss of", registry=registry
        )
        self._attempts = Counter(
            "penstock_worker_attempts", "Attempts by how they ended", ["outcome"], registry=registry
        )

    def fetched(self, way: str, num_bytes: int) -> None:
        """An array of another node has come, by ``zmq`` or ``nixl``."""
        self._fetched.labels(way).inc(num_bytes)

    def add_instructions(
        self, seconds: Mapping[Opcode, float], counts: Mapping[Opcode, int]
    ) -> None:
        """Add one attempt's instructions."""
        for opcode, value in seconds.items():
            self._instruction_seconds.labels(opcode.name).inc(value)
        for opcode, count in counts.items():
            self._instructions.labels(opcode.name).inc(count)

    def add_times(self, *, busy_s: float, wall_s: float) -> None:
        """Compute time and duration of one attempt."""
        self._busy_seconds.inc(busy_s)
        self._busy_ratio.set(busy_s / wall_s if wall_s > 0 else 0.0)

    def set_peak(self, num_bytes: float) -> None:
        """Device memory of one attempt."""
        self._peak_bytes.set(num_bytes)

    def add_waits(self, seconds: Mapping[str, float]) -> None:
        """Seconds waited, by what for: weights, activation, gradient, checkpoint."""
        for awaited, value in seconds.items():
            self._wait_seconds.labels(awaited).inc(value)

    def add_tokens(self, tokens: int) -> None:
        """Counted tokens of one attempt."""
        self._tokens.inc(tokens)

    def add_outcome(self, outcome: str) -> None:
        """How an attempt ended: ``done``, ``aborted`` or ``failed``."""
        self._attempts.labels(outcome).inc()

    def transferred(self, direction: str, kind: str, num_bytes: int) -> None:
        """One message (``direction``: ``sent`` or ``received``)."""
        self._bytes.labels(direction, kind).inc(num_bytes)

    def dropped(self, reason: str) -> None:
        """One message that was not used."""
        self._dropped.labels(reason).inc()
