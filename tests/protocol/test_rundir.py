"""The run directory: identity, atomic files, and errors that name the damaged one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from penstock.config.schema import Config, parse_config
from penstock.host.errors import ConfigError, StateError
from penstock.host.files import write_atomically
from penstock.protocol.run.names import (
    devices_of_node,
    expected_members,
    ipc_address,
    metrics_port,
    node_index,
    node_of_device,
)
from penstock.protocol.run.rundir import RunDirectory

HEX = re.compile(r"[0-9a-f]{12}")


def make_config(metrics_port: int = 0) -> Config:
    return parse_config(
        {
            "model": {"hf": {"model_type": "llama"}},
            "data": {"path": "@stdlib"},
            "cluster": {"workers": 2, "nodes": [{"name": "a"}, {"name": "b"}]},
            "observability": {"metrics_port": metrics_port},
        }
    )


def test_identity_is_made_once(tmp_path: Path) -> None:
    first = RunDirectory.create(tmp_path / "run")
    assert HEX.fullmatch(first.run_id)
    assert RunDirectory.create(tmp_path / "run").run_id == first.run_id
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"run.json", "token"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"format": 1}', "is damaged"),
        ('{"format": 2, "run_id": "0123456789ab"}', "format 2, this Penstock reads 1"),
        ('{"format": 1, "run_id": "../../x"}', "is not 12 hexadecimal digits"),
    ],
)
def test_damaged_identity(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(StateError, match=rf"run.json: .*{message}"):
        _ = RunDirectory(tmp_path).run_id


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with pytest.raises(ConfigError, match=r"table.json does not exist: start the run"):
        _ = directory.table
    (tmp_path / "table.json").write_text("{}")
    with pytest.raises(StateError, match=r"table.json: not a block table"):
        _ = directory.table
    (tmp_path / "plan.json").write_bytes(b"\xff")
    with pytest.raises(StateError, match=r"plan.json: cannot read it"):
        _ = directory.plan


def test_atomic_write_replaces_or_leaves(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    write_atomically(path, json.dumps({"new": 1}))
    assert path.read_text() == '{"new": 1}'
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_names() -> None:
    config = make_config()
    assert expected_members(config) == (
        "node.a",
        "memoryd.a",
        "optimizerd.a",
        "worker.0",
        "worker.1",
        "node.b",
        "memoryd.b",
        "optimizerd.b",
        "worker.2",
        "worker.3",
    )
    assert [node_of_device(config, device) for device in range(4)] == [0, 0, 1, 1]
    assert devices_of_node(config, 1) == range(2, 4)
    assert node_index(config, "b") == 1
    with pytest.raises(ConfigError, match=r"--node c: cluster\.nodes has a, b"):
        node_index(config, "c")
    assert (
        ipc_address("0123456789ab", "a", "memory")
        == "ipc:///dev/shm/.penstock-0123456789ab-a/memory"
    )


def test_nodes_on_one_machine_have_metrics_ports_in_a_row() -> None:
    assert metrics_port(make_config(), 1) == 0
    config = make_config(metrics_port=9000)
    assert [metrics_port(config, node) for node in (0, 1)] == [9000, 9001]
    apart = [
        node.model_copy(update={"host": f"10.0.0.{i}"})
        for i, node in enumerate(config.cluster.nodes)
    ]
    cluster = config.cluster.model_copy(update={"nodes": tuple(apart)})
    config = config.model_copy(update={"cluster": cluster})
    assert [metrics_port(config, node) for node in (0, 1)] == [9000, 9000]
