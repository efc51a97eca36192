"""Metrics of all processes: where they are served, whose they are, and what is left out."""

from __future__ import annotations

import base64
import socket
import ssl
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from penstock.daemons.optimizer.metrics import OptimizerMetrics
from penstock.protocol.config.schema import Config, parse_config
from penstock.protocol.errors import ConfigError
from penstock.protocol.run.metrics import LateGauge, listen, serve_metrics
from penstock.protocol.run.names import expected_members
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.authority import make, renew
from penstock.workers.telemetry.metrics import WorkerMetrics


def config(**observability: object) -> Config:
    return parse_config(
        {
            "run": {"name": "served"},
            "model": {"hf": {"model_type": "llama"}},
            "data": {"path": "@stdlib"},
            "cluster": {"workers": 2, "nodes": [{"name": "a"}, {"name": "b"}]},
            "observability": observability,
        }
    )


def page(port: int, host: str = "127.0.0.1") -> str:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def test_every_process_says_whose_its_metrics_are(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path)
    (tmp_path / "resolved.yaml").write_text(config().to_yaml())
    places = {
        "schedulerd": ("a", ""),
        "node.a": ("a", ""),
        "memoryd.b": ("b", ""),
        "optimizerd.b": ("b", ""),
        "worker.1": ("a", "1"),
        "worker.2": ("b", "2"),
    }
    assert places.keys() - {"schedulerd"} <= set(expected_members(run.config))
    for process, (node, device) in places.items():
        server = serve_metrics(CollectorRegistry(), run, process)
        try:
            assert (
                f'penstock_process_info{{device="{device}",node="{node}",process="{process}",'
                f'run="served",run_id="{run.run_id}"}} 1.0'
            ) in page(server.port)
        finally:
            server.close()


def test_where_metrics_are_served_and_what_is_in_the_way() -> None:
    registry = CollectorRegistry()
    Gauge("penstock_test_bytes", "For this test", registry=registry).set(5)
    server = listen(registry, config(metrics_host="127.0.0.2"), 0, "a")
    try:
        assert "penstock_test_bytes 5.0" in page(server.port, "127.0.0.2")
        with pytest.raises(OSError, match="refused"):
            page(server.port)
    finally:
        server.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics_port = {port}: cannot listen"):
            listen(registry, config(), port, "a")
    elsewhere = config(metrics_host="192.0.2.1")
    with pytest.raises(ConfigError, match=r"metrics_host = '192\.0\.2\.1': others than this"):
        listen(registry, elsewhere, 0, "a")
    said = elsewhere.cluster.model_copy(update={"insecure": True})
    with pytest.raises(ConfigError, match=r"observability.metrics_host = '192\.0\.2\.1': cannot"):
        listen(registry, elsewhere.model_copy(update={"cluster": said}), 0, "a")


def test_with_keys_metrics_take_tls_and_a_password(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make(keys, "served", ["a", "b"])
    secured = config().cluster.model_copy(update={"security": "tls", "keys": keys})
    server = listen(CollectorRegistry(), config().model_copy(update={"cluster": secured}), 0, "b")
    context = ssl.create_default_context(cafile=str(keys / "metrics" / "ca.pem"))
    password = (keys / "metrics" / "password").read_text()

    def get(user: str, word: str) -> tuple[int, str]:
        """Status and page, asked for as Prometheus does with server_name metrics.penstock."""
        login = base64.b64encode(f"{user}:{word}".encode()).decode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as plain:
            with context.wrap_socket(plain, server_hostname="metrics.penstock") as shielded:
                shielded.sendall(
                    f"GET /metrics HTTP/1.0\r\nAuthorization: Basic {login}\r\n\r\n".encode()
                )
                with shielded.makefile("rb") as answer:
                    text = answer.read().decode()
        return int(text.split()[1]), text

    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
    try:
        status, text = get("penstock", password)
        assert status == 200 and "penstock_keys_expire_timestamp_seconds 1." in text
        for user, word in (("penstock", password[:-1]), ("root", password), ("penstock", "")):
            status, text = get(user, word)
            assert status == 401 and "penstock_keys" not in text
        silent[0].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        silent[0].settimeout(5)
        assert b"HTTP/1." not in silent[0].recv(100), "nothing is said in plain text"
        renew(keys, days=2)
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as plain:
            with context.wrap_socket(plain, server_hostname="metrics.penstock") as shielded:
                found = shielded.getpeercert()
        assert found is not None
        left_s = ssl.cert_time_to_seconds(str(found["notAfter"])) - time.time()
        assert left_s < 3 * 86400, "renewed keys are shown at once"
    finally:
        for connection in silent:
            connection.close()
        server.close()


def test_what_was_not_measured_is_absent() -> None:
    registry = CollectorRegistry()
    late = LateGauge("penstock_test_late", "For this test", registry)
    assert registry.get_sample_value("penstock_test_late") is None
    late.set(0)
    late.set(3)
    assert registry.get_sample_value("penstock_test_late") == 3

    worker = WorkerMetrics(registry)
    assert "peak_device_bytes" not in generate_latest(registry).decode()
    worker.set_peak(7)
    assert registry.get_sample_value("penstock_worker_peak_device_bytes") == 7


def test_epochs_are_counted_not_measured() -> None:
    registry = CollectorRegistry()
    optimizer = OptimizerMetrics(registry)
    for epoch in (0, 7, 7, 9):
        optimizer.in_epoch(epoch)
    assert registry.get_sample_value("penstock_optimizer_epochs_total") == 2
