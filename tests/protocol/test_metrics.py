"""Metrics of processes: what is left out, and what is counted."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from penstock.daemons.optimizer.metrics import OptimizerMetrics
from penstock.protocol.run.metrics import LateGauge
from penstock.workers.telemetry.metrics import WorkerMetrics


def test_what_was_not_measured_is_absent() -> None:
    registry = CollectorRegistry()
    late = LateGauge("penstock_test_late", "For this test", registry)
    assert registry.get_sample_value("penstock_test_late") is None
    late.set(0)
    late.set(3)
    assert registry.get_sample_value("penstock_test_late") == 3

    worker = WorkerMetrics(registry)
    assert "memory_peak_bytes" not in generate_latest(registry).decode()
    worker.set_peak(7)
    assert registry.get_sample_value("penstock_device_memory_peak_bytes") == 7


def test_epochs_are_counted_not_measured() -> None:
    registry = CollectorRegistry()
    optimizer = OptimizerMetrics(registry)
    for epoch in (0, 7, 7, 9):
        optimizer.in_epoch(epoch)
    assert registry.get_sample_value("penstock_optimizer_epochs_total") == 2
