"""Samples that come bit by bit, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from penstock.daemons.monitor.observer.samples import Samples
from penstock.daemons.monitor.observer.sampling import make_sampling
from penstock.host.stopping import StopSignal
from penstock.protocol.run.rundir import RunDirectory
from tests.client.test_trace import PLANS, FakeRun


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    (tmp_path / "run.json").write_text("{}")
    return FakeRun(tmp_path, PLANS["1f1b"])


def found(samples: Samples, *, ending: bool = False) -> list[tuple[int, list[str]]]:
    return [(n, [m.member for m in trace.members]) for n, trace in samples.look(ending=ending)]


def test_a_sample_is_complete_when_something_follows(run: FakeRun) -> None:
    samples = Samples(run.path, 2, since_s=0.0)
    run.write(1)
    run.write(2)
    assert found(samples) == []
    run.write(3)
    members = ["schedulerd", "optimizerd.a", "worker.0", "worker.1"]
    assert found(samples) == [(2, members)]
    run.write(4)
    assert found(samples) == []
    assert found(samples, ending=True) == [(4, members)], "nothing follows any more"
    assert samples.lost == 0


def test_a_sample_that_is_broken_off_or_never_decided_is_lost(run: FakeRun) -> None:
    samples = Samples(run.path, 1, since_s=0.0)
    run.write(1, decided=False, share=0.5)
    assert found(samples) == []
    assert samples.lost == 1
    logs = dict(run.logs)
    for attempt in range(2, 8):  # the scheduler's trace cannot be written
        run.logs = {**logs, "schedulerd": type(logs["schedulerd"])(None, "schedulerd")}
        run.write(attempt)
    assert found(samples) == []
    assert samples.lost == 3, "four may still be decided"


def test_what_an_earlier_observer_has_seen_is_left_out(run: FakeRun) -> None:
    run.write(1)
    run.write(2)
    later_s = run.now_s
    run.write(3)
    run.write(4)
    samples = Samples(run.path, 1, since_s=later_s)
    assert [attempt for attempt, _ in found(samples, ending=True)] == [3, 4]
    assert samples.lost == 0


def test_what_goes_wrong_with_a_sample_is_counted_and_ends_nothing(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (run.path / "resolved.yaml").open("a") as file:
        file.write("observability: {sample_every: 1}\n")
    run.write(1)
    run.write(2)
    run.logs["worker.1"] = type(run.logs["worker.0"])(None, "worker.1")
    run.write(3)
    registry = CollectorRegistry()
    sampling = make_sampling(RunDirectory(run.path), registry)
    monkeypatch.setattr("penstock.daemons.monitor.observer.sampling._born_s", lambda: 0.0)
    stop = StopSignal()
    stop.set()
    sampling.run(stop)
    page = generate_latest(registry).decode()
    assert "penstock_analysed_attempts_total 2.0" in page
    assert 'penstock_analysis_failures_total{reason="incomplete"} 1.0' in page
    seconds = [
        float(line.split()[1])
        for line in page.splitlines()
        if line.startswith("penstock_critical_seconds_total{")
    ]
    (step_s,) = [
        float(line.split()[1])
        for line in page.splitlines()
        if line.startswith("penstock_analysed_step_seconds_total ")
    ]
    assert len(seconds) == 9 and sum(seconds) == pytest.approx(step_s)
