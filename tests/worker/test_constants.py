"""Persistent buffers through real workers: read from files, never trained, part of exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from penstock.config.schema import parse_config
from penstock.host.errors import ConfigError, StateError
from penstock.models.binding import SkeletonModules
from penstock.models.checkpoints.constants import read_constants
from penstock.models.prepare import prepare
from penstock.models.runtime import ModelRuntime
from penstock.models.surgery.hf import load_run_config
from penstock.models.surgery.skeleton import build_skeleton
from penstock.protocol.run.checksums import CHECKSUMS, CONSTANTS, checksums_text
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import DType
from tests.worker.causal_types import SIZES, reduced, save
from tests.worker.folder_parity import compare, configured, exported_differences

BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"
WEIGHTS = "model.safetensors"


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """A deepseek_v3 whose routers have biases of their own."""
    disable_progress_bar()
    save("deepseek_v3", tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "minimax_m2", "apertus"])
def test_runs_and_exports_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    disable_progress_bar()
    save(model_type, tmp_path / "model")
    compared = compare(tmp_path / "model", tmp_path / "run")
    assert compared.loss < 1e-6 and compared.gradients < 1e-5 and compared.exported == []


def test_constants_have_the_values_and_types_that_transformers_loads(folder: Path) -> None:
    """In bf16, too: the biases and weights of routers stay fp32."""
    run_dir = folder.parent / "run"
    lines: list[str] = []
    config = configured(folder, run_dir, dtype="bf16", progress=lines.append)
    assert lines == [
        "model: transformers keeps model.layers.1-3.mlp.gate.weight in fp32; workers compute with"
        " bf16, masters and exports have fp32"
    ]
    constants = read_constants(run_dir)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    buffers = {name: reference.get_buffer(name) for name in constants}
    assert len(constants) == 3 and all(value.any() for value in constants.values())
    assert all(torch.equal(value, buffers[name]) for name, value in constants.items())
    assert {value.dtype for value in (*constants.values(), *buffers.values())} == {torch.float32}
    assert exported_differences(folder, config, run_dir, DType.BF16) == []
    exported = load_file(folder.parent / "run-export" / WEIGHTS)
    kept = {name for name, value in exported.items() if value.dtype is torch.float32}
    theirs = {n for n, value in reference.state_dict().items() if value.dtype is torch.float32}
    assert kept == theirs and len(kept) == 6


def test_files_without_constants_leave_those_of_a_new_model(folder: Path) -> None:
    """As transformers does with files from before a type had them."""
    tensors = load_file(folder / WEIGHTS)
    removed = BIAS.format(2)
    del tensors[removed]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    configured(folder, folder.parent / "run")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    constants = read_constants(folder.parent / "run")
    assert torch.equal(constants[removed], reference.get_buffer(removed))
    assert not constants[removed].any() and constants[BIAS.format(1)].any()


def test_a_model_without_files_has_its_own(tmp_path: Path) -> None:
    hf = reduced("deepseek_v3").to_diff_dict() | {"model_type": "deepseek_v3", "vocab_size": 257}
    data = {"path": "@stdlib", "sequence_length": 8}
    hf = {key: hf[key] for key in hf if key in ("model_type", "vocab_size", *SIZES)}
    config = parse_config({"model": {"hf": hf, "dtype": "bf16"}, "data": data})
    prepare(config, tmp_path, table_only=True)
    constants = read_constants(tmp_path)
    assert len(constants) == 3
    assert all(v.dtype is torch.float32 and not v.any() for v in constants.values())
    hf = {"model_type": "apertus", "hidden_size": 32, "num_attention_heads": 4}
    config = parse_config({"model": {"hf": hf}, "data": data})
    with pytest.raises(ConfigError, match=r"does not say how to fill its buffer .*; give its wei"):
        prepare(config, tmp_path, table_only=True)


def test_edited_constants_are_refused(folder: Path) -> None:
    run_dir = folder.parent / "run"
    configured(folder, run_dir)
    (run_dir / CHECKSUMS).write_text(checksums_text(run_dir, {}))
    constants = read_constants(run_dir)
    save_file({name: value + 1 for name, value in constants.items()}, run_dir / CONSTANTS)
    with pytest.raises(StateError, match=r"constants\.safetensors: is not what it was"):
        read_constants(run_dir)
    (run_dir / CONSTANTS).unlink()
    with pytest.raises(StateError, match=r"constants\.safetensors of the run lacks model\.layers"):
        ModelRuntime(
            load_run_config(run_dir),
            RunDirectory(run_dir).table,
            device="cpu",
            compute_dtype=torch.float32,
            seed=0,
            constants=read_constants(run_dir),
        )


def test_a_forward_that_changes_a_constant_is_refused(folder: Path) -> None:
    run_dir = folder.parent / "run"
    configured(folder, run_dir)
    skeleton, constants = build_skeleton(load_run_config(run_dir)), read_constants(run_dir)
    modules = SkeletonModules(skeleton, constants)
    runtime = ModelRuntime(
        load_run_config(run_dir),
        RunDirectory(run_dir).table,
        device="cpu",
        compute_dtype=torch.float32,
        seed=0,
        constants=constants,
    )
    spec = RunDirectory(run_dir).table.blocks[3]
    bound = runtime.bind(3, weights=torch.zeros(spec.trainable_elements))
    gate = modules.layers[spec.kind].get_submodule("mlp.gate")
    with modules.installed(bound, training=True):
        assert torch.equal(gate.e_score_correction_bias, constants[BIAS.format(2)])
    with (
        pytest.raises(ConfigError, match=r"its forward changes the buffer model\.layers\.2\.mlp"),
        modules.installed(bound, training=True),
    ):
        gate.e_score_correction_bias.add_(1)


def test_running_statistics_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    class Normed(modeling_llama.LlamaMLP):
        def __init__(self, config: object) -> None:
            super().__init__(config)
            self.norm = nn.BatchNorm1d(4)

    monkeypatch.setattr(modeling_llama, "LlamaMLP", Normed)
    hf = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2}
    data = {"path": "@stdlib", "sequence_length": 8}
    config = parse_config({"model": {"hf": {**hf, "num_attention_heads": 4}}, "data": data})
    with pytest.raises(ConfigError, match=r"keeps running statistics \(model\.layers\.0\.mlp\.no"):
        prepare(config, tmp_path, table_only=True)
