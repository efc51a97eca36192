"""What an optimizerd counts: sweeps and what they move, its cores, what it waits for, a ceiling."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.daemons.optimizer import ceiling
from penstock.daemons.optimizer.metrics import OptimizerMetrics, cpu_seconds
from penstock.shm.layout import SegmentKind


class Measured:
    def __init__(self) -> None:
        self.now_s = 10.0
        self.registry = CollectorRegistry()
        self.metrics = OptimizerMetrics(self.registry, clock=lambda: self.now_s)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"penstock_{name}", labels)


@pytest.fixture
def measured() -> Measured:
    return Measured()


def test_sweeps_move_bytes_and_keep_cores_busy(measured: Measured) -> None:
    measured.metrics.runs_on(4, ())
    for seconds in (0.5, 1.0):
        measured.metrics.sweep_done("advance", seconds, parameters=100, num_bytes=3000)
    labels = {"pass": "advance"}
    assert measured.value("sweep_seconds_total", **labels) == 1.5
    assert measured.value("sweep_bytes_total", **labels) == 6000
    assert measured.value("sweep_parameters_total", **labels) == 200
    assert measured.value("optimizer_busy_seconds_total") == 6.0
    assert measured.value("optimizer_cores") == 4
    assert measured.value("optimizer_cpu_seconds_total") is None, "of emulated nodes"
    assert measured.value("memory_bandwidth_ceiling_bytes_per_second") is None


def test_cpu_time_is_that_of_the_threads_alone(measured: Measured) -> None:
    started, stop = threading.Event(), threading.Event()
    ids: list[int] = []

    def work() -> None:
        ids.append(threading.get_native_id())
        started.set()
        while not stop.is_set():
            pass

    thread = threading.Thread(target=work)
    thread.start()
    try:
        started.wait()
        measured.metrics.runs_on(1, ids)
        deadline = time.monotonic() + 600.0
        while (measured.value("optimizer_cpu_seconds_total") or 0.0) < 0.02:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join()
    assert cpu_seconds(2**22) == 0.0, "no such thread"
    assert (measured.value("optimizer_cpu_seconds_total") or 0.0) >= 0.02, "and takes nothing back"


def test_waits_by_cause_also_while_they_last(measured: Measured) -> None:
    metrics = measured.metrics
    for cause, seconds in (("idle", 1.0), ("gradients", 2.0), (None, 5.0), ("decision", 0.5)):
        metrics.waits(cause, queue_length=3)
        measured.now_s += seconds
    found = {
        cause: measured.value("optimizer_wait_seconds_total", cause=cause)
        for cause in ("gradients", "fetches", "decision", "idle")
    }
    assert found == {"gradients": 2.0, "fetches": 0.0, "decision": 0.5, "idle": 1.0}
    measured.now_s += 60.0
    assert measured.value("optimizer_wait_seconds_total", cause="decision") == 60.5
    assert measured.value("optimizer_queue_length") == 3


def spec(state_bytes: int) -> Any:
    layout = SimpleNamespace(sizes={SegmentKind.STATE: state_bytes})
    return SimpleNamespace(layout=layout, node_name="a")


def test_the_ceiling_is_measured_once_where_memory_can_be_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = sorted(os.sched_getaffinity(0))[:1]
    assert ceiling.measure_ceiling(cores, num_elements=1 << 16) > 1e8
    calls: list[list[int]] = []

    def measure(cores: list[int]) -> float:
        calls.append(cores)
        return 2e10

    monkeypatch.setattr(ceiling, "measure_ceiling", measure)
    assert ceiling.ceiling_of(tmp_path, spec(1 << 20), cores) is None
    large = spec(ceiling.LEAST_STATE_BYTES)
    assert [ceiling.ceiling_of(tmp_path, large, cores) for _ in range(2)] == [2e10, 2e10]
    assert calls == [cores]
    assert ceiling.ceiling_of(tmp_path, large, [*cores, 99]) == 2e10
    assert calls == [cores, [*cores, 99]], "other cores move other amounts"
    (tmp_path / "ceiling-a.json").write_text('{"cores":')
    assert ceiling.ceiling_of(tmp_path, large, cores) == 2e10
