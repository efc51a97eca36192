"""The loader process against real shared memory of two nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.schema import Config
from penstock.host.errors import ConfigError, StateError
from penstock.host.files import write_atomically
from penstock.models.checkpoints import loader
from penstock.models.checkpoints.initial import initial_blocks, pack
from penstock.models.checkpoints.loader import load_node
from penstock.models.prepare import prepare
from penstock.models.surgery.hf import load_run_config
from penstock.planner.planning.configured import build_plan
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.memory import NodeMemory


def prepared(path: Path, config: Config) -> RunDirectory:
    write_atomically(RunDirectory.create(path).path / "resolved.yaml", config.to_yaml())
    prepare(config, path)
    plan = build_plan(config, RunDirectory(path).table)
    write_atomically(path / "plan.json", plan.to_json())
    return RunDirectory(path)


def on_two_nodes(tmp_path: Path, make_config, **schedule: Any) -> RunDirectory:
    base = make_config("llama", freeze=(r"layers\.1\.mlp",), vocab_size=257).model_dump(mode="json")
    (tmp_path / "text.txt").write_text("some words " * 100)
    base["data"]["path"] = str(tmp_path / "text.txt")
    base["model"]["dtype"] = "bf16"
    base["cluster"].update(workers=1, nodes=[{"name": "a"}, {"name": "b"}])
    base["schedule"].update(schedule)
    return prepared(tmp_path / "run", Config.model_validate(base))


@pytest.fixture(name="files")
def _files(tmp_path: Path, make_config) -> RunDirectory:
    return on_two_nodes(tmp_path, make_config)


@pytest.fixture(name="memories")
def _memories(files: RunDirectory) -> Iterator[list[NodeMemory]]:
    made = [NodeMemory.create(files.memory_spec(node)) for node in range(2)]
    yield made
    for memory in made:
        memory.unlink()
        memory.close()


def test_each_node_gets_the_blocks_it_owns(files: RunDirectory, memories: list[NodeMemory]) -> None:
    command = [sys.executable, "-m", "penstock.models.checkpoints.loader"]
    command += ["--config", str(files.path / "resolved.yaml"), "--node", "a"]
    done = subprocess.run(
        [*command, "--parent-pid", str(os.getpid())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=600,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    load_node(files.path, "b")
    blocks = range(len(files.table.blocks))
    owned = [memory.owned_blocks() for memory in memories]
    assert sorted([*owned[0], *owned[1]]) == list(blocks) and all(owned)
    wanted = initial_blocks(files.config, load_run_config(files.path), files.table, blocks)
    for block, tensors in wanted:
        memory = memories[0 if block in owned[0] else 1]
        trainable, frozen = pack(files.table.blocks[block], tensors)
        assert np.array_equal(memory.state(block, "master"), trainable)
        bits = torch.from_numpy(frozen).to(torch.bfloat16).view(torch.uint16).numpy()
        assert np.array_equal(memory.frozen(block), bits)
    assert files.table.blocks[2].frozen_elements > 0


def masters(memory: NodeMemory) -> list[bytes]:
    """Of all blocks of a node."""
    return [memory.state(block, "master").tobytes() for block in memory.owned_blocks()]


def test_several_processes_write_the_same_bytes(
    files: RunDirectory, memories: list[NodeMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if one of them is killed at once: its share is done again."""
    load_node(files.path, "a")
    wanted = masters(memories[0])
    monkeypatch.setattr(loader, "PROCESS_ELEMENTS", 64)
    monkeypatch.setattr(loader, "usable_cpus", lambda: 3)
    started: list[int] = []
    start = loader._start

    def killed(*arguments: Any) -> int:
        started.append(start(*arguments))
        if len(started) == 4:
            os.kill(started[-1], signal.SIGKILL)
        return started[-1]

    monkeypatch.setattr(loader, "_start", killed)
    for _ in range(2):
        for block in memories[0].owned_blocks():
            memories[0].state(block, "master")[:] = 0
        load_node(files.path, "a")
        assert masters(memories[0]) == wanted
    assert len(started) == 4, "this process, and two others"


def test_a_node_that_owns_no_block_has_nothing_to_load(tmp_path: Path, make_config) -> None:
    """As the second of two replicas where each has one device."""
    files = on_two_nodes(tmp_path, make_config, scheme="gpipe", replicas=2)
    memory = NodeMemory.create(files.memory_spec(1))
    try:
        assert not memory.owned_blocks()
        load_node(files.path, "b")
    finally:
        memory.unlink()
        memory.close()


def test_what_cannot_be_loaded_is_named(files: RunDirectory) -> None:
    with pytest.raises(ConfigError, match=r"--node c: cluster.nodes has a, b"):
        load_node(files.path, "c")
    with pytest.raises(StateError, match=r"memory of node a: .*does not exist"):
        load_node(files.path, "a")
