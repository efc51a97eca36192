"""What a node's supervisor counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class NodeMetrics:
    """Prometheus metrics of one supervisor, in their own registry."""

    def __init__(self, node: str) -> None:
        self.registry = CollectorRegistry()
        self.restarts = Counter(
            "penstock_node_restarts_total",
            "Times a child process was started again after it had ended.",
            ("node", "process"),
            registry=self.registry,
        )
        self.fences = Counter(
            "penstock_node_fences_total",
            "Child processes killed and reaped by order of the scheduler.",
            ("node", "process"),
            registry=self.registry,
        )
        self.up = Gauge(
            "penstock_node_process_up",
            "1 while the child process runs, else 0.",
            ("node", "process"),
            registry=self.registry,
        )
        self._node = node

    def started(self, process: str, *, again: bool) -> None:
        """A child runs."""
        self.up.labels(self._node, process).set(1)
        if again:
            self.restarts.labels(self._node, process).inc()

    def exited(self, process: str) -> None:
        """A child is dead and reaped."""
        self.up.labels(self._node, process).set(0)

    def fenced(self, process: str) -> None:
        """A fence was answered."""
        self.fences.labels(self._node, process).inc()
