"""What metricsd serves: where, to whom, and how Prometheus is told."""

from __future__ import annotations

import base64
import json
import os
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.config.schema import Config, parse_config
from penstock.daemons.monitor.metrics.clocks import compare, context_of
from penstock.daemons.monitor.metrics.collection import Collection, labels_of
from penstock.daemons.monitor.metrics.exporter import Exporter
from penstock.daemons.monitor.metrics.serving import application, check_port, listen
from penstock.daemons.monitor.metrics.targets import (
    addresses,
    former_port,
    read_targets,
    remove_targets,
    renew_targets,
    write_targets,
)
from penstock.host.errors import ConfigError
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.authority import make, renew

RUN_ID = "0123456789ab"


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


def serve(settings: Config, run_dir: Path = Path(), node: str = "a", former: int = 0) -> Exporter:
    """A metricsd's pages; none of the node's processes runs."""
    names: Mapping[str, Mapping[str, str]] = {
        "worker.1": labels_of(settings, node, "worker.1"),
        f"node.{node}": labels_of(settings, node, f"node.{node}"),
    }
    ours = labels_of(settings, node, f"metricsd.{node}")
    collection = Collection(RUN_ID, names, bytes, ours)
    return listen(application(collection, settings, run_dir), settings, node, former)


def page(port: int, host: str = "127.0.0.1", path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=600) as answer:
        return str(answer.read().decode())


def test_every_sample_says_whose_it_is() -> None:
    server = serve(config())
    try:
        text = page(server.port)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            page(server.port, path="/metric")
    finally:
        server.close()
    for labels in (
        'run="served",node="a",process="worker.1",device="1"} 0.0',
        'run="served",node="a",process="node.a"} 0.0',
        'run="served",node="a",process="metricsd.a"} 1.0',
    ):
        assert f"penstock_process_up{{{labels}" in text


def test_prometheus_is_told_where_metrics_are_as_long_as_they_are(tmp_path: Path) -> None:
    shared = tmp_path / "targets"
    run = RunDirectory.create(tmp_path / "run")
    settings = config(targets=str(shared))
    (run.path / "resolved.yaml").write_text(settings.to_yaml())
    for node, port in (("a", 4100), ("b", 4200)):
        write_targets(run, node, port)
    (run.path / "metrics" / "c.json").write_text("[{}]")
    found = [
        {
            "targets": [f"127.0.0.1:{port}"],
            "labels": {
                "__scheme__": "http",
                "__meta_penstock_run_id": run.run_id,
                "run": "served",
                "node": node,
            },
        }
        for node, port in (("a", 4100), ("b", 4200))
    ]
    assert read_targets(run.path) == found
    assert json.loads((shared / f"{run.run_id}.b.json").read_text()) == found[1:]
    assert addresses(run.path)["a"] == "http://127.0.0.1:4100/metrics"
    server = serve(settings, run.path)
    try:
        assert json.loads(page(server.port, path="/targets")) == found
        assert "http://127.0.0.1:4200/metrics" in page(server.port, path="/")
    finally:
        server.close()
    told = shared / f"{run.run_id}.b.json"
    os.utime(told, (0, 0))
    renew_targets(run, "b", 4200)
    assert told.stat().st_mtime > time.time() - 60, "it is no leftover"
    told.unlink()
    renew_targets(run, "b", 4200)
    assert json.loads(told.read_text()) == found[1:]
    for node in ("a", "b"):
        remove_targets(run, node)
    assert read_targets(run.path) == [] and list(shared.iterdir()) == []


def test_metrics_are_served_where_they_were_before_a_kill(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path)
    settings = config()
    (tmp_path / "resolved.yaml").write_text(settings.to_yaml())
    assert former_port(run, "a") == 0
    killed = serve(settings)
    write_targets(run, "a", killed.port)
    killed.close()
    next_one = serve(settings, former=former_port(run, "a"))
    try:
        assert next_one.port == killed.port
        beside = serve(settings, former=next_one.port)
        beside.close()
        assert beside.port != next_one.port, "taken: any other will do"
    finally:
        next_one.close()
    (tmp_path / "metrics" / "a.json").write_text('[{"targets": ["a:99999"], "labels": {}}]')
    assert former_port(run, "a") == 0


def test_others_are_told_an_address_that_they_reach(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path)
    everywhere = config(metrics_host="0.0.0.0")
    nodes = tuple(
        node.model_copy(update={"host": f"fd00::{i}"})
        for i, node in enumerate(everywhere.cluster.nodes)
    )
    cluster = everywhere.cluster.model_copy(update={"nodes": nodes, "security": "insecure"})
    (tmp_path / "resolved.yaml").write_text(
        everywhere.model_copy(update={"cluster": cluster}).to_yaml()
    )
    write_targets(run, "b", 4200)
    assert addresses(tmp_path) == {"b": "http://[fd00::1]:4200/metrics"}


def test_where_metrics_are_served_and_what_is_in_the_way() -> None:
    server = serve(config(metrics_host="127.0.0.2"))
    try:
        assert "penstock_process_up" in page(server.port, "127.0.0.2")
        with pytest.raises(OSError, match="refused"):
            page(server.port)
    finally:
        server.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics_port = {port}: cannot listen"):
            serve(config(metrics_port=port))
        with pytest.raises(ConfigError, match=f"metrics_port = {port}: cannot listen"):
            check_port(config(metrics_port=port - 1), "b")
    check_port(config(metrics_port=port), "a")
    elsewhere = config(metrics_host="192.0.2.1")
    with pytest.raises(ConfigError, match=r"metrics_host = '192\.0\.2\.1': others than this"):
        serve(elsewhere)
    said = elsewhere.cluster.model_copy(update={"security": "insecure"})
    with pytest.raises(ConfigError, match=r"observability.metrics_host = '192\.0\.2\.1': cannot"):
        serve(elsewhere.model_copy(update={"cluster": said}))


def test_with_keys_metrics_take_tls_and_a_password(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make(keys, "served", ["a", "b"])
    secured = config().cluster.model_copy(update={"security": "tls", "keys": keys})
    server = serve(config().model_copy(update={"cluster": secured}), node="b")
    context = ssl.create_default_context(cafile=str(keys / "metrics" / "ca.pem"))
    password = (keys / "metrics" / "password").read_text()

    def get(user: str, word: str) -> tuple[int, str]:
        """Status and page, asked for as Prometheus does with server_name metrics.penstock."""
        login = base64.b64encode(f"{user}:{word}".encode()).decode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=600) as plain:
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
        assert status == 200 and "penstock_process_up{" in text
        for user, word in (("penstock", password[:-1]), ("root", password), ("penstock", "")):
            status, text = get(user, word)
            assert status == 401 and "penstock_" not in text
        there = compare(f"https://127.0.0.1:{server.port}", context_of(keys / "node.a"))
        assert abs(there.offset_s) <= there.error_s < 2, "another node needs no password for that"
        silent[0].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        silent[0].settimeout(600.0)
        assert b"HTTP/1." not in silent[0].recv(100), "nothing is said in plain text"
        renew(keys, days=2)
        with socket.create_connection(("127.0.0.1", server.port), timeout=600) as plain:
            with context.wrap_socket(plain, server_hostname="metrics.penstock") as shielded:
                found = shielded.getpeercert()
        assert found is not None
        left_s = ssl.cert_time_to_seconds(str(found["notAfter"])) - time.time()
        assert left_s < 3 * 86400, "renewed keys are shown at once"
    finally:
        for connection in silent:
            connection.close()
        server.close()
