"""Runs with frozen tensors: saved states hold what is trained, and the base outlives the folder
that the model came from.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.control import ControlClient
from tests.system import conftest as H
from tests.system import test_mirror as M

pytestmark = pytest.mark.slow

FROZEN = ["embed_tokens", "mlp", "k_proj", "layers.2."]
ADAPTED: dict[str, Any] = {"train": {"freeze": []}, "adapter": {"r": 4, "alpha": 16}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model as transformers saves it, with random weights."""
    disable_progress_bar()
    torch.manual_seed(3)
    hf = {**H.TINY_LLAMA, "vocab_size": 257, "num_hidden_layers": 4, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(**hf)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def configure(runner: H.Runner, name: str, folder: Path, changes: dict[str, Any]) -> Path:
    base: dict[str, Any] = {
        "model": {"hf": None, "path": str(folder), "dtype": "bf16"},
        "train": {"steps": 8, "freeze": FROZEN, "save_every": 2},
        "optimizer": {"grad_dtype": "bf16"},
    }
    return runner.configure(name, H.merge(base, changes))


def lose(run: H.TrainProcess) -> None:
    """A machine is gone with all processes and all memory."""
    os.killpg(run.process.pid, signal.SIGKILL)
    run.wait(500)
    for pid in run.members().values():
        os.kill(pid, signal.SIGKILL)
    run_id = RunDirectory(run.run_dir).run_id
    for path in Path("/dev/shm").glob(f"penstock-{run_id}-*"):
        path.unlink()


def endless(runner: H.Runner, folder: Path, changes: dict[str, Any]) -> H.TrainProcess:
    """Starts a run that a test disturbs; it has a state on disk."""
    run = runner.start(configure(runner, "run", folder, H.merge(changes, H.ENDLESS)))
    H.wait_for_step(run, 5)
    return run


def files_of_base(run_dir: Path) -> dict[str, int]:
    """Times at which the files of the base were written, by name."""
    return {path.name: path.stat().st_mtime_ns for path in (run_dir / "state/base").iterdir()}


@pytest.mark.parametrize("trained", [{}, ADAPTED], ids=["frozen", "adapters"])
def test_a_run_goes_on_without_the_folder_of_its_model(
    runner: Any, folder: Path, trained: dict[str, Any]
) -> None:
    given = load_file(folder / "model.safetensors")
    run = endless(runner, folder, trained)
    lose(run)
    elsewhere = folder.rename(folder.with_name("elsewhere"))
    before = files_of_base(run.run_dir)
    last = H.merge(trained, H.endless_until(H.newest_step(run.run_dir) + 3))
    resumed = runner.train(configure(runner, "run", folder, last))
    assert files_of_base(resumed) == before, "nothing of the base is written again"
    whole = runner.train(configure(runner, "whole", elsewhere, last))
    assert H.state_bytes(resumed) == H.state_bytes(whole)
    out = runner.root / "exported"
    for words in (
        ["snapshots", resumed, "verify"],
        ["generate", resumed, "--prompt", "a", "--max-new", "3"],
        ["eval", resumed, "--data", __file__],
        ["export", resumed, "--format", "hf", out],
    ):
        code, output = runner.call(*words)
        assert code == 0, output
    exported = AutoModelForCausalLM.from_pretrained(out).state_dict()
    kept = {name for name in given if torch.equal(exported[name], given[name].bfloat16())}
    unchanged = FROZEN if not trained else ["embed_tokens", "norm", "lm_head"]
    assert kept == {name for name in given if any(part in name for part in unchanged)}


def test_a_node_is_filled_from_its_partner_without_the_folder(runner: Any, folder: Path) -> None:
    changes = H.merge(M.TWO_NODES, {"memory": {"mirror": "partner"}})
    run = endless(runner, folder, changes)
    shutil.rmtree(folder)
    M.wait_for_replicas(run, keeper="a", lost="b", times=1)
    M.lose_node(run, "b")
    M.wait_for_replicas(run, keeper="a", lost="b", times=2)
    assert not M.logged(run.run_dir, "memoryd.b", "no frozen weights from a saved state")
    with ControlClient.for_run(run.run_dir) as client:
        client.stop()
    code, output = run.wait(500)
    assert code == 5, output
    assert len(M.logged(run.run_dir, "schedulerd", "is filled from the replica")) == 1
