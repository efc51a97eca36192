"""Numbers of a checkpoint that a run cannot go on from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.host.errors import ConfigError
from penstock.models.exchange.importing import import_checkpoint
from penstock.models.exchange.mapping import ImportOptions
from tests.models.exchange.fsdp2 import LLAMA
from tests.models.exchange.test_dcp_export import run_of
from tests.models.exchange.trainers import saved_untrained

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.pt"
NAN, INFINITE = float("nan"), float("inf")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("importing") / "a")


def checkpoint(run: Path, folder: Path) -> Path:
    """Saves a new model of a run's kind, as the Trainer does."""
    hf_config = AutoConfig.from_pretrained(run / "model")
    return saved_untrained(folder, AutoModelForCausalLM.from_config(hf_config))


@pytest.mark.parametrize(
    ("file", "role", "value", "words"),
    [
        (WEIGHTS, "weight", NAN, "are not finite"),
        (OPTIMIZER, "exp_avg", -INFINITE, "are not finite"),
        (OPTIMIZER, "exp_avg_sq", NAN, "are not finite"),
        (OPTIMIZER, "exp_avg_sq", -1e-9, "has negative numbers"),
    ],
)
def test_numbers_without_a_next_step_are_refused(
    file: str, role: str, value: float, words: str, prepared: Path, tmp_path: Path
) -> None:
    source = checkpoint(prepared, tmp_path / "source")
    report, into = tmp_path / "report.json", tmp_path / "into"
    import_checkpoint(prepared, source, report, ImportOptions(), into=into, verifies=True)
    if file == WEIGHTS:
        tensors = load_file(source / file)
        name = "model.embed_tokens.weight"
        tensors[name][-1, -1] = value
        save_file(tensors, source / file, metadata={"format": "pt"})
    else:
        state = torch.load(source / file)
        name = "model.embed_tokens.weight"  # the first of the model
        state["state"][0][role][-1, -1] = value
        torch.save(state, source / file)
    with pytest.raises(ConfigError, match=f"{file}: {role} of {name} has .*{words[4:]}"):
        import_checkpoint(prepared, source, report, ImportOptions(), into=tmp_path / "other")


def test_a_master_that_the_weights_cannot_hold_is_refused(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "a",
        model={"dtype": "fp16", "hf": {**LLAMA, "num_hidden_layers": 1, "vocab_size": 257}},
    )
    source, report = checkpoint(run, tmp_path / "source"), tmp_path / "report.json"
    tensors = load_file(source / WEIGHTS)
    tensors["model.norm.weight"][0] = 1e5
    save_file(tensors, source / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"that fp16 cannot hold; .* set model.dtype to a wider"):
        import_checkpoint(run, source, report, ImportOptions(), into=tmp_path / "into")
