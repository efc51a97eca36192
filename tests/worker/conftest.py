"""Clusters in this process, and the files of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.schema import Config, parse_config
from penstock.protocol.run.rundir import RunDirectory
from tests.worker.cluster import LLAMA, Cluster, build_cluster, make_config

MakeCluster = Callable[..., Cluster]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Interpreters share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_cluster() -> Iterator[MakeCluster]:
    """Clusters that are taken down after the test."""
    with ExitStack() as stack:
        yield lambda timeout_s=600.0, undo=False, **settings: build_cluster(
            stack, make_config(**settings), timeout_s=timeout_s, undo=undo
        )


@pytest.fixture
def config_of() -> Callable[[dict[str, Any]], Config]:
    """A configuration with the given ``cluster`` section."""
    return lambda cluster: parse_config(
        {"model": {"hf": LLAMA}, "data": {"path": "@stdlib"}, "cluster": cluster}
    )


@pytest.fixture
def make_run_files(
    tmp_path: Path, config_of: Callable[[dict[str, Any]], Config]
) -> Callable[[dict[str, Any]], RunDirectory]:
    """A run directory that holds an identity and a configuration with the given ``cluster``."""

    def make(cluster: dict[str, Any]) -> RunDirectory:
        identity = {"run_id": "0123456789ab", "created": "2026-01-01T00:00:00Z", "format": 1}
        (tmp_path / "run.json").write_text(json.dumps(identity))
        (tmp_path / "resolved.yaml").write_text(config_of(cluster).to_yaml())
        return RunDirectory(tmp_path)

    return make
