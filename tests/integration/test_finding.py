"""A real Prometheus finds real runs: by files, by HTTP, by annotations of pods."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import tests.system.conftest as H
from penstock.protocol.run.names import SCHEDULERD
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.authority import make
from tests.integration.prometheus import Prometheus, missing
from tests.system.conftest import runner as runner

pytestmark = [
    pytest.mark.skipif(missing() != "", reason=missing()),
    pytest.mark.integration,
]

EXAMPLES = Path(__file__).parents[2] / "grafana" / "prometheus"
SCRAPE_S = 5.0
"""A scrape may take so long, too: a target on a busy machine is not taken for one that is down."""
NODES = {"workers": 1, "nodes": [{"name": "a"}, {"name": "b"}]}
MEMBERS = {
    *(SCHEDULERD, "observerd", "worker.0", "worker.1"),
    *(f"{kind}.{node}" for kind in ("node", "memoryd", "optimizerd", "metricsd") for node in "ab"),
}


def by_files(folder: Path) -> dict[str, Any]:
    return {
        "job_name": "penstock",
        "honor_labels": True,
        "file_sd_configs": [{"files": [f"{folder}/*.json"]}],
    }


def pid_of(run_dir: Path, process: str) -> int:
    """The process id of a helper, which no member list has."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            kind, _, node = process.partition(".")
            if kind in words and node in words and str(run_dir / "resolved.yaml") in words:
                return int(entry.name)
    raise AssertionError(f"{process} does not run")


def test_a_prometheus_follows_a_run_from_its_start_to_its_end(runner: Any, tmp_path: Path) -> None:
    """Every process is seen; a killed metricsd comes back without the run's noticing; what stands
    still is down, and its samples are gone; after the end nothing is left.
    """
    folder = tmp_path / "targets"
    folder.mkdir()  # what is not there when Prometheus starts it looks for every five minutes
    changes = {"observability": {"targets": str(folder)}, "train": {"steps": 10**6}}
    # Nobody is taken for lost: what was killed is seen at once, and what stands still goes on.
    patient = {**NODES, "heartbeat_timeout_s": 600.0}
    run = runner.start(runner.configure("seen", {**changes, "cluster": patient}))
    with Prometheus(tmp_path / "prometheus", [by_files(folder)], interval_s=SCRAPE_S) as prometheus:

        def up(value: int) -> set[str]:
            return {
                s.labels["process"] for s in prometheus.query(f"penstock_process_up == {value}")
            }

        def soon(condition: Callable[[], bool], what: str, within_s: float = 600.0) -> None:
            deadline = time.monotonic() + within_s
            while not condition():
                assert time.monotonic() < deadline, f"{what}: {up(1)} {prometheus.targets()}"
                time.sleep(0.2)

        H.wait_for_step(run, 2)
        soon(lambda: up(1) == MEMBERS, "all processes are up")
        targets = prometheus.wait_for("up == 1", until=lambda series: len(series) == 2)
        places = [("seen", "a"), ("seen", "b")]
        assert sorted((s.labels["run"], s.labels["node"]) for s in targets) == places
        [worker] = prometheus.wait_for('penstock_process_up{process="worker.1"}')
        assert worker.labels.items() >= {("node", "b"), ("device", "1"), ("run", "seen")}
        [facts] = prometheus.wait_for('penstock_run_info{node="a"}')
        assert facts.labels["run_id"] == RunDirectory(run.run_dir).run_id
        [offset] = prometheus.wait_for("penstock_clock_offset_seconds")
        bound = prometheus.value("penstock_clock_offset_error_seconds", offset.points[0][0])
        assert abs(offset.value) <= bound + 1e-3 and offset.labels["peer"] == "a"

        killed = pid_of(run.run_dir, "metricsd.b")
        os.kill(killed, signal.SIGKILL)
        counted = 'penstock_restarts_total{member="metricsd.b",cause="killed"} == 1'
        prometheus.wait_for(counted)
        soon(lambda: up(1) == MEMBERS, "metricsd came back")
        [restarts] = prometheus.wait_for("sum(penstock_restarts_total)")
        [epochs] = prometheus.wait_for("penstock_epochs_total")
        assert (restarts.value, epochs.value) == (1, 1), "nobody else noticed"

        still = run.members()["memoryd.a"]
        os.kill(still, signal.SIGSTOP)
        try:
            soon(lambda: up(0) == {"memoryd.a"}, "it is down")
            assert prometheus.query('penstock_committed_step{process="memoryd.a"}') == []
            prometheus.wait_for("penstock_step")
        finally:
            os.kill(still, signal.SIGCONT)
        soon(lambda: up(1) == MEMBERS, "it is back")

        os.kill(run.process.pid, signal.SIGINT)
        run.wait(600)
        assert list(folder.iterdir()) == []
        soon(lambda: not prometheus.query('{__name__=~"penstock_.+"}'), "all is stale at once")
        soon(lambda: not prometheus.targets(), "nobody is to be scraped any more")


@pytest.mark.parametrize("example", ["http.yml", "tls.yml"])
def test_one_address_of_a_run_leads_to_all(runner: Any, tmp_path: Path, example: str) -> None:
    """The example, but for addresses and paths; with TLS, clocks need no password."""
    cluster: dict[str, Any] = dict(NODES)
    if example == "tls.yml":
        make(tmp_path / "keys", "led", ["a", "b"])
        cluster |= {"security": "tls", "keys": str(tmp_path / "keys")}
    run = runner.start(runner.configure("led", {"cluster": cluster, "train": {"steps": 10**6}}))
    H.wait_for_step(run, 1)
    [entry] = json.loads((run.run_dir / "metrics" / "b.json").read_text())
    text = (EXAMPLES / example).read_text().replace("10.0.0.1:29700", entry["targets"][0])
    [job] = yaml.safe_load(text.replace("keys/metrics", f"{tmp_path}/keys/metrics"))[
        "scrape_configs"
    ]
    job["scrape_interval"] = f"{SCRAPE_S:g}s"
    with Prometheus(tmp_path / "prometheus", [job], interval_s=SCRAPE_S) as prometheus:
        found = prometheus.wait_for('up{run="led"} == 1', until=lambda series: len(series) == 2)
        assert {series.labels["node"] for series in found} == {"a", "b"}
        prometheus.wait_for('penstock_clock_offset_seconds{node="b", peer="a"}')
        expected = 2 if example == "tls.yml" else 0
        expiry = "penstock_keys_expire_timestamp_seconds > time()"
        prometheus.wait_for(expiry, until=lambda series: len(series) == expected)
    os.kill(run.process.pid, signal.SIGINT)
    run.wait(600)


def test_pods_are_found_by_their_annotations(tmp_path: Path) -> None:
    """The example's rules for labels, with pods as Kubernetes' discovery would describe them."""
    [job] = yaml.safe_load((EXAMPLES / "kubernetes.yml").read_text())["scrape_configs"]
    del job["kubernetes_sd_configs"]
    prefix = "__meta_kubernetes_pod_"

    def pod(ip: str, **changes: str) -> dict[str, Any]:
        labels = {
            "label_app_kubernetes_io_name": "penstock",
            "label_app_kubernetes_io_instance": "tiny",
            "annotation_prometheus_io_scrape": "true",
            "annotation_prometheus_io_port": "29700",
            "annotation_prometheus_io_scheme": "https",
            "phase": "Running",
            "ip": ip,
            **changes,
        }
        return {"targets": [ip], "labels": {prefix + name: text for name, text in labels.items()}}

    pods = [
        pod("127.0.0.8"),
        pod("127.0.0.9", phase="Succeeded"),
        pod("127.0.0.10", label_app_kubernetes_io_name="other"),
        pod("127.0.0.11", annotation_prometheus_io_scrape=""),
    ]
    (tmp_path / "pods.json").write_text(json.dumps(pods))
    job["file_sd_configs"] = [{"files": [str(tmp_path / "pods.json")]}]
    with Prometheus(tmp_path / "prometheus", [job]) as prometheus:
        deadline = time.monotonic() + 600
        while not (targets := prometheus.targets()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    [found] = targets
    assert found["scrapeUrl"] == "https://127.0.0.8:29700/metrics"
    assert found["labels"]["run"] == "tiny"
