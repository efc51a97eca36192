"""Odd checkpoints by torch's own writer become the files of a saved state with the same numbers.
Others end in a clear error that names the file and a remedy.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import save as dcp_save

from penstock.host.errors import ConfigError, PenstockError, StateError
from penstock.models.exchange.importing import import_checkpoint
from penstock.models.exchange.mapping import ImportOptions
from tests.models.exchange.fsdp2 import DECAY, LLAMA, RATE, model_of
from tests.models.exchange.test_dcp import HEAD, save, shard
from tests.models.exchange.test_dcp_export import run_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore::FutureWarning")
STEPS, VOCABULARY = 3, 257
NORM = "model.norm.weight"
Groups = Callable[[nn.Module], Any]


def one_group(model: nn.Module) -> Any:
    """Returns all trained parameters as one group, which decays."""
    return [{"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": DECAY}]


def three_groups(model: nn.Module) -> Any:
    """Returns the head with a rate of its own, and norms without decay."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if n == HEAD], "lr": RATE / 2, "weight_decay": 0.0},
        {"params": [p for n, p in named if n != HEAD and p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for n, p in named if n != HEAD and p.ndim < 2], "weight_decay": 0.0},
    ]


def trained(groups: Groups, dtype: torch.dtype, steps: int, freeze: str, **fields: Any) -> Any:
    """Returns a model and its AdamW after some steps. ``freeze``: a part of names."""
    model = model_of({**LLAMA, "num_hidden_layers": 1, "vocab_size": VOCABULARY, **fields}, dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not freeze or freeze not in name
    optimizer = torch.optim.AdamW(groups(model), lr=RATE, eps=1e-4)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in model.parameters():
            if parameter.requires_grad:
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def imported(run_dir: Path, folder: Path, *, weights_only: bool = False) -> dict[str, Any]:
    """Imports a checkpoint; returns the report with the written arrays."""
    report, into = run_dir / "report.json", run_dir / "into"
    options = ImportOptions(weights_only=weights_only)
    import_checkpoint(run_dir, folder, report, options, into=into, verifies=True)
    arrays: dict[str, torch.Tensor] = {}
    for path in into.iterdir():
        arrays |= load_file(path)
    return {**json.loads(report.read_text()), "arrays": arrays}


def check_arrays(arrays: dict[str, torch.Tensor], model: nn.Module, optimizer: Any) -> None:
    """Compares the written arrays with torch's numbers, widened to fp32."""
    expected: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        key = name if parameter.requires_grad else f"frozen.{name}"
        expected[key] = parameter.detach().float()
        for array in ("exp_avg", "exp_avg_sq") if parameter.requires_grad else ():
            expected[f"{array}.{name}"] = optimizer.state[parameter][array].float()
    assert arrays.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(arrays[key].float(), value), key


@pytest.mark.parametrize(
    ("groups", "dtype", "fields", "freeze", "note"),
    [
        (one_group, "float32", {}, "", "norm.weight is 0 in the configuration, 0.1"),
        (three_groups, "float32", {}, "", f"{HEAD} is 0.1 in the configuration, 0"),
        (
            one_group,
            "float32",
            {"tie_word_embeddings": True},
            "",
            "norm.weight is 0 in the configuration, 0.1",
        ),
        (one_group, "float32", {}, "embed_tokens", "norm.weight is 0 in the configuration, 0.1"),
        (one_group, "bfloat16", {}, "", "norm.weight is 0 in the configuration, 0.1"),
        (one_group, "float16", {}, "", "norm.weight is 0 in the configuration, 0.1"),
    ],
    ids=["no decay groups", "three groups", "tied", "frozen", "bf16", "fp16"],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_odd_settings_become_a_state_with_the_same_numbers(
    groups: Groups,
    dtype: str,
    fields: dict[str, Any],
    freeze: str,
    note: str,
    sharded: bool,
    tmp_path: Path,
) -> None:
    changes = {"train": {"freeze": [freeze]}} if freeze else {}
    run_dir = run_of(tmp_path / "root", hf=fields, **changes)
    model, optimizer = trained(groups, getattr(torch, dtype), STEPS, freeze, **fields)
    folder = save(tmp_path / "ck", model, optimizer)
    if sharded:
        shard(folder)
    report = imported(run_dir, folder)
    check_arrays(report["arrays"], model, optimizer)
    assert (report["step"], report["problems"]) == (STEPS, [])
    assert [each["name"] for each in report["unused"]] == [HEAD] * ("tie_word_embeddings" in fields)
    assert any(note in each for each in report["notes"]), report["notes"]


def test_moments_in_fp32_over_weights_in_fp16(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path / "root")
    model, optimizer = trained(one_group, torch.float32, STEPS, "")
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    model.half()
    folder = save(tmp_path / "ck", model, optimizer)
    report = imported(run_dir, folder)
    check_arrays(report["arrays"], model, optimizer)
    assert all(
        torch.equal(a, s["exp_avg"]) for a, s in zip(moments, optimizer.state.values(), strict=True)
    )
    sources = {(each["array"], each["from"]["dtype"]) for each in report["tensors"]}
    assert sources == {
        ("master", "float16"),
        ("exp_avg", "float32"),
        ("exp_avg_sq", "float32"),
    }


def _sharded(folder: Path) -> None:
    save(folder, *trained(one_group, torch.float32, STEPS, ""))
    shard(folder)


def _without_a_file(folder: Path) -> None:
    _sharded(folder)
    (folder / "__1_9.distcp").unlink()


def _truncated(folder: Path) -> None:
    _sharded(folder)
    path = folder / "__2_9.distcp"
    path.write_bytes(path.read_bytes()[:-100])


def _infinite(folder: Path) -> None:
    model, optimizer = trained(one_group, torch.float32, STEPS, "")
    with torch.no_grad():
        model.model.norm.weight[3] = float("inf")
    save(folder, model, optimizer)


def _before_the_first_step(folder: Path) -> None:
    model, _ = trained(one_group, torch.float32, 0, "")
    values = {"model": model.state_dict(), "optimizer": {"state": {}, "param_groups": []}}
    dcp_save(values, checkpoint_id=folder, no_dist=True)


def _frozen(folder: Path) -> None:
    save(folder, *trained(one_group, torch.float32, STEPS, "lm_head"))


def _of_another_optimizer(folder: Path) -> None:
    model, _ = trained(one_group, torch.float32, 0, "")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save(folder, model, optimizer)


@pytest.mark.parametrize(
    ("saved", "error", "words"),
    [
        (_without_a_file, StateError, r"__1_9.distcp: is missing.*copy the files of all ranks"),
        (_truncated, StateError, r"__2_9.distcp: is truncated.*copy the checkpoint again"),
        (_infinite, ConfigError, rf"weight of {NORM} has numbers that are not finite.*earlier"),
        (_before_the_first_step, ConfigError, r"no state of an optimizer; give --weights-only"),
        (_frozen, ConfigError, rf"no exp_avg of {HEAD}.*train.freeze, or give --weights-only"),
        (_of_another_optimizer, ConfigError, r"no exp_avg of any tensor.*momentum_buffer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_checkpoints_that_cannot_be_used_name_the_file_and_a_remedy(
    saved: Callable[[Path], None],
    error: type[PenstockError],
    words: str,
    tmp_path: Path,
) -> None:
    run_dir = run_of(tmp_path / "root")
    saved(tmp_path / "ck")
    with pytest.raises(error, match=words):
        imported(run_dir, tmp_path / "ck")


def test_weights_before_the_first_step_are_taken_alone(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path / "root")
    _before_the_first_step(tmp_path / "ck")
    report = imported(run_dir, tmp_path / "ck", weights_only=True)
    assert report["step"] == 0
    zeros = {key: value for key, value in report["arrays"].items() if key.startswith("exp_avg")}
    assert zeros and not any(value.any() for value in zeros.values())
