"""Exports of weights and optimizer for torch, which loads the folders itself."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.config.schema import parse_config
from penstock.host.errors import ConfigError, StateError
from penstock.models.checkpoints import export
from penstock.models.checkpoints.exports.dcp import verify_dcp
from penstock.models.checkpoints.exports.training import TrainingState
from penstock.models.exchange.dcp.metadata import Values, read_contents
from penstock.models.exchange.readers import open_checkpoint
from penstock.models.prepare import prepare
from penstock.models.surgery.hf import load_run_config
from penstock.models.surgery.skeleton import build_skeleton
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import DType
from tests.models.exchange.fsdp2 import LLAMA, optimizer_of

STEP, LATER_RATE = 12, 0.25
EMBEDDING = "model.embed_tokens.weight"
QWEN_TIED = {"model_type": "qwen3", "tie_word_embeddings": True}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def run_of(root: Path, **changes: Any) -> Path:
    """Returns a prepared run of one layer."""
    root.mkdir()
    (root / "text.txt").write_text("Pumps push water up the hill.\n" * 40)
    hf = {**LLAMA, "num_hidden_layers": 1, "vocab_size": 257, **changes.pop("hf", {})}
    fields: dict[str, Any] = {
        "model": {"hf": hf},
        "data": {"path": str(root / "text.txt"), "sequence_length": 16},
        **changes,
    }
    config, run_dir = parse_config(fields), root / "run"
    run_dir.mkdir()
    (run_dir / "resolved.yaml").write_text(config.to_yaml())
    prepare(config, run_dir, progress=lambda line: None)
    return run_dir


def state_of(run_dir: Path, name: str, seed: int = 0) -> Path:
    """Returns a saved state of random numbers."""
    state = run_dir / name
    state.mkdir()
    table, generator = RunDirectory(run_dir).table, torch.Generator().manual_seed(seed)
    for block in table.blocks:
        tensors = {}
        for spec in block.tensors:
            keys = [spec.name, *(f"{array}.{spec.name}" for array in table.state_arrays)]
            for key in keys if spec.trainable else [f"frozen.{spec.name}"]:
                tensors[key] = torch.rand(spec.shape, generator=generator)
        save_file(tensors, state / f"block-{block.index:04d}.safetensors")
    return state


def numbers(run_dir: Path, state: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a saved state."""
    training = training_state(run_dir, state)
    every = {}
    for parameter in training.parameters:
        every[parameter.name] = training.weight(parameter)
        for array in training.arrays if parameter.spec.trainable else ():
            every[f"{array}.{parameter.name}"] = training.array(parameter, array)
    return every


def training_state(run_dir: Path, state: Path) -> TrainingState:
    """Returns a saved state as the export reads it."""
    return TrainingState.of(run_dir, state, step=STEP, rate=LATER_RATE, dtype=DType.FP32)


def export_dcp(run_dir: Path, state: Path, out: Path, *options: str) -> int:
    """Does the work of ``penstock export``; returns the exit code."""
    words = [str(run_dir), str(state), str(out), "--format", "dcp", "--step", str(STEP)]
    return export.main([*words, "--rate", str(LATER_RATE), *options])


def loaded_by_torch(
    run_dir: Path, folder: Path, frozen: str = ""
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns transformers' model and AdamW as torch loads them."""
    hf_config = AutoConfig.from_pretrained(run_dir / "model")
    model = AutoModelForCausalLM.from_config(hf_config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not frozen or frozen not in name
    optimizer = optimizer_of(model)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    values = {"model": weights, "optimizer": state}
    dcp.load(values, checkpoint_id=folder, no_dist=True)
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options
    )
    return model, optimizer


@pytest.mark.parametrize(
    ("changes", "frozen"),
    [
        ({}, ""),
        ({"hf": {"tie_word_embeddings": True}}, ""),
        ({"train": {"freeze": ["embed_tokens"]}}, "embed_tokens"),
    ],
    ids=["plain", "tied", "frozen"],
)
def test_torch_loads_weights_moments_and_settings(
    changes: dict[str, Any], frozen: str, tmp_path: Path
) -> None:
    run_dir, out = run_of(tmp_path / "root", **changes), tmp_path / "out"
    state = state_of(run_dir, "state")
    assert export_dcp(run_dir, state, out, "--verify") == 0
    expected = numbers(run_dir, state)
    model, optimizer = loaded_by_torch(run_dir, out, frozen)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
        if not parameter.requires_grad:
            continue
        arrays = optimizer.state[parameter]
        assert arrays["step"].item() == STEP
        for array in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(arrays[array], expected[f"{array}.{name}"])
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == [0.1, 0.0]
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (LATER_RATE, (0.9, 0.95), 1e-8)
    again = open_checkpoint(out)
    assert again.step == STEP and set(again.steps.values()) == {STEP}
    read = {t.name if t.role == "weight" else f"{t.role}.{t.name}": t.load() for t in again.tensors}
    assert expected.keys() <= read.keys() and read.keys() - expected.keys() <= {"lm_head.weight"}
    assert all(torch.equal(read[key], value) for key, value in expected.items())


def test_torch_loads_a_scheduler_s_settings_of_the_groups(tmp_path: Path) -> None:
    """A scheduler adds the rate before schedules to the groups, and the load asks for each key."""
    run_dir, out = run_of(tmp_path / "root"), tmp_path / "out"
    assert export_dcp(run_dir, state_of(run_dir, "state"), out) == 0
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run_dir / "model"))
    optimizer = optimizer_of(model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=out, no_dist=True)
    assert state[f"param_groups.{EMBEDDING}.lr"] == LATER_RATE
    assert (
        state[f"param_groups.{EMBEDDING}.initial_lr"] == RunDirectory(run_dir).config.optimizer.lr
    )


@pytest.mark.parametrize(
    "hf", [{}, {"model_type": "qwen3"}, QWEN_TIED], ids=["llama", "qwen3", "tied"]
)
def test_an_export_with_torchtitan_s_names_has_the_same_bits_after_an_import(
    hf: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, out = run_of(tmp_path / "root", hf={**hf, "head_dim": 4}), tmp_path / "out"
    state = state_of(run_dir, "state")
    options = ("--format", "torchtitan", "--samples", "48", "--verify")
    assert export_dcp(run_dir, state, out, *options) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "one weight_decay for all parameters, 0.1" in json.loads(line)["note"]
    contents = read_contents(out)
    assert ("tok_embeddings.weight",) in contents.tensors
    values = {keys: Values(out).read(place) for keys, place in contents.values.items()}
    assert values["train_state", "step"] == STEP
    assert values["train_state", "ntokens_seen"] == 48 * 16
    assert values["lr_scheduler", "last_epoch"] == STEP
    assert values["lr_scheduler", "_last_lr"] == [LATER_RATE]
    again = open_checkpoint(out)
    assert (again.kind, again.step) == ("torchtitan", STEP)
    skeleton = build_skeleton(load_run_config(run_dir))
    fitted = again.fitted(skeleton, {name for name, _ in skeleton.model.named_parameters()})
    read = {t.name if t.role == "weight" else f"{t.role}.{t.name}": t for t in fitted.tensors}
    expected = numbers(run_dir, state)
    assert read.keys() - expected.keys() == (
        {"lm_head.weight"} if "tie_word_embeddings" in hf else set()
    )
    assert all(torch.equal(read[key].load(), value) for key, value in expected.items())


def test_an_export_for_torchtitan_says_that_parts_are_not_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, out = run_of(tmp_path / "root", train={"freeze": ["lm_head"]}), tmp_path / "out"
    assert export_dcp(run_dir, state_of(run_dir, "state"), out, "--format", "torchtitan") == 0
    notes = [json.loads(line)["note"] for line in capsys.readouterr().out.splitlines()]
    assert len(notes) == 2 and "1 tensors such as lm_head.weight are not trained" in notes[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hf": {"tie_word_embeddings": True}}, "its llama3 ties no weights"),
        ({"hf": {"head_dim": 8}}, "its llama3 has no head_dim of its own, such as 8"),
        ({"hf": {"attention_bias": True}}, r"q_proj.bias has no name in its llama3 and qwen3"),
        ({"hf": {"model_type": "mistral"}}, "models of type 'mistral' have no names there"),
        ({"optimizer": {"name": "sgd"}}, "trains with Adam and AdamW, and optimizer.name is sgd"),
    ],
)
def test_a_run_that_torchtitan_has_no_place_for_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, out = run_of(tmp_path / "root", **changes), tmp_path / "out"
    assert export_dcp(run_dir, state_of(run_dir, "state"), out, "--format", "torchtitan") == 2
    error = capsys.readouterr().err
    assert re.search(f"--names torchtitan: .*{words}.*; leave --names out", error), error
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_narrow_weights_and_the_list_of_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, out = run_of(tmp_path / "root"), tmp_path / "out"
    state = state_of(run_dir, "state")
    assert export_dcp(run_dir, state, out, "--dtype", "bf16", "--verify") == 0
    tensors = open_checkpoint(out).tensors
    types = {(tensor.role, tensor.dtype) for tensor in tensors}
    moments = {("exp_avg", "float32"), ("exp_avg_sq", "float32")}
    assert types == {("weight", "bfloat16")} | moments
    capsys.readouterr()
    assert export_dcp(run_dir, state, tmp_path / "none", "--list") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = {line["name"] for line in lines}
    assert {f"model.{EMBEDDING}", f"optimizer.state.{EMBEDDING}.step"} <= names
    assert len(names) == len(lines) == len(tensors) + len(tensors) // 3
    assert not (tmp_path / "none").exists()


def test_other_numbers_fail_the_verification(tmp_path: Path) -> None:
    run_dir, out = run_of(tmp_path / "root"), tmp_path / "out"
    state, other = state_of(run_dir, "state"), state_of(run_dir, "other", seed=1)
    assert export_dcp(run_dir, state, out) == 0
    verify_dcp(training_state(run_dir, state), out)
    with pytest.raises(StateError, match=r"--verify: .* differs from the saved state"):
        verify_dcp(training_state(run_dir, other), out)


def test_an_optimizer_that_torch_lacks_and_a_full_folder_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, out = run_of(tmp_path / "root", optimizer={"name": "lion"}), tmp_path / "out"
    state = state_of(run_dir, "state")
    assert export_dcp(run_dir, state, out) == 2
    assert "torch has no optimizer 'lion'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="lion"):
        training_state(run_dir, state).settings(training_state(run_dir, state).parameters[0])
    out.mkdir()
    (out / "file").touch()
    assert export_dcp(run_dir, state, out) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["root", "out"]


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_other_optimizers_have_the_arrays_of_torch(name: str, tmp_path: Path) -> None:
    run_dir, out = run_of(tmp_path / "root", optimizer={"name": name}), tmp_path / "out"
    state = state_of(run_dir, "state")
    assert export_dcp(run_dir, state, out, "--verify") == 0
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run_dir / "model"))
    made: dict[str, Any] = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.5),
        "adagrad": lambda parameters: torch.optim.Adagrad(parameters),
        "adam": lambda parameters: torch.optim.Adam(parameters),
    }
    optimizer = made[name](list(model.parameters()))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, values = get_state_dict(model, optimizer, options=options)
    dcp.load({"model": weights, "optimizer": values}, checkpoint_id=out, no_dist=True)
    expected = numbers(run_dir, state)
    for key, value in expected.items():
        array, _, parameter = key.partition(".")
        if f"state.{parameter}.{array}" in values:
            assert torch.equal(values[f"state.{parameter}.{array}"], value)
    assert any(key.startswith("state.") for key in values)


def test_a_damaged_state_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, out = run_of(tmp_path / "root"), tmp_path / "out"
    state = state_of(run_dir, "state")
    path = state / "block-0001.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert export_dcp(run_dir, state, out) == 2
    assert "block-0001.safetensors" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
