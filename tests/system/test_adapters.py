"""Adapters through real daemons, with PEFT in a plain loop as the reference."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.host.errors import ExitCode
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.control import ControlClient
from tests.folders import start_from_folder
from tests.models.conftest import our_name
from tests.system import conftest as H
from tests.system.reference import ReferenceLoop, reference_loop
from tests.system.test_exactness import ENDLESS, assert_exact, disturb, obeyed
from tests.system.test_parity import final_weights

STEPS = 50
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"model_type": "qwen2"},
    "mistral": {"model_type": "mistral", "sliding_window": 16},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 16},
    "gpt2": {
        **{"model_type": "gpt2", "n_embd": 32, "n_layer": 6, "n_head": 2, "n_positions": 64},
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
}
"""Models without dropout: a plain loop draws other numbers."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"scheme": "1f1b"},
    "split": {"scheme": "1f1b", "passes": ["split-backward"]},
    "recompute": {"scheme": "1f1b", "recompute": "full"},
    "spipe": {"scheme": "spipe"},
}


pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.:UserWarning"),
]


class PeftLoop(ReferenceLoop):
    """The run's model of transformers with PEFT's adapters, read from the run's start."""

    def load_model(self, folder: Path) -> Any:
        model = super().load_model(folder)
        return PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        named = self.model.named_parameters()
        return {our_name(name): value for name, value in named if value.requires_grad}


def write_adapter(folder: Path, settings: LoraConfig) -> Path:
    """A folder of PEFT with random factors: none of them is zero."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted: Any = get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                scale = 0.05 if "lora_B" in name or "embedding_B" in name else 0.1
                parameter.copy_(torch.randn_like(parameter) * scale)
    adapted.save_pretrained(folder / "adapter")
    return folder / "adapter"


def check_beside_peft(run_dir: Path) -> None:
    """Losses and trained tensors of all steps."""
    expected = reference_loop(run_dir, STEPS, PeftLoop)
    losses = [line["loss"] for line in H.metrics(run_dir)]
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-6)
    assert losses[-1] < 0.98 * losses[0], "the adapters learn"
    weights = final_weights(run_dir)
    assert weights.keys() == expected.weights.keys()
    for name, value in weights.items():
        theirs = expected.weights[name]
        assert np.linalg.norm(value - theirs) <= 1e-6 * np.linalg.norm(theirs), name


def trained(
    runner: H.Runner, name: str, hf: dict[str, Any], settings: LoraConfig, **changes: Any
) -> Path:
    """The directory of a finished run that starts from PEFT's files."""
    base: dict[str, Any] = {
        "run": {"name": name, "dir": str(runner.root / name)},
        "train": {"steps": STEPS},
        # A greater eps: AdamW divides gradients that are rounding errors by their own size.
        "optimizer": {"lr": 1e-3, "eps": 1e-6},
    }
    path = runner.configure(name, H.merge(base, changes))
    fields = yaml.safe_load(path.read_text())
    given = {} if hf.get("model_type") == "gpt2" else fields["model"]["hf"]
    fields["model"]["hf"] = {**given, **hf}
    path.write_text(yaml.safe_dump(fields))
    path = start_from_folder(path)
    fields = yaml.safe_load(path.read_text())
    adapter = write_adapter(Path(fields["model"]["path"]), settings)
    path.write_text(yaml.safe_dump({**fields, "adapter": {"path": str(adapter)}}))
    return runner.train(path)


def all_linear() -> LoraConfig:
    """Adapters of rank 4 on every linear module."""
    return LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")


def check_that_only_adapters_train(run_dir: Path) -> None:
    """Every trained tensor is one of an adapter."""
    table = RunDirectory(run_dir).table
    assert all(".lora_" in t.name for b in table.blocks for t in b.tensors if t.trainable)


def test_a_split_run_is_the_loop_of_peft(runner: H.Runner) -> None:
    run_dir = trained(runner, "split", {}, all_linear(), schedule=SCHEDULES["split"])
    check_that_only_adapters_train(run_dir)
    check_beside_peft(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_and_schedules(runner: H.Runner, family: str, schedule: str) -> None:
    run_dir = trained(runner, family, FAMILIES[family], all_linear(), schedule=SCHEDULES[schedule])
    check_that_only_adapters_train(run_dir)
    check_beside_peft(run_dir)


@pytest.mark.slow
def test_embeddings_and_saved_modules(runner: H.Runner) -> None:
    settings = LoraConfig(
        r=8,
        lora_alpha=8,
        target_modules=["q_proj", "embed_tokens", "down_proj"],
        modules_to_save=["lm_head", "norm"],
        rank_pattern={"q_proj": 2},
        use_rslora=True,
    )
    hf = {"tie_word_embeddings": False}
    run_dir = trained(runner, "saved", hf, settings, schedule=SCHEDULES["split"])
    check_beside_peft(run_dir)


def test_killed_adapters_end_with_the_same_bytes(runner: H.Runner) -> None:
    changes = H.merge(ENDLESS, {"adapter": {"r": 4, "alpha": 16, "dropout": 0.2}})
    run = runner.start(runner.configure("run", changes))
    H.wait_for_step(run, 2)
    for target in ("worker.1", "optimizerd.a", "memoryd.a"):
        disturb(run, target, "kill", random.Random())
        H.wait_for_step(run, H.newest_step(run.run_dir) + 1)
    obeyed(run, ControlClient.stop)
    code, output = run.wait(500)
    assert code == ExitCode.STOPPED, f"exit code {code}\n{output}\n{H.tail_logs(run.run_dir)}"
    steps = H.newest_step(run.run_dir)
    as_long = H.merge(changes, {"train": {"steps": steps}})
    undisturbed = H.state_bytes(runner.train(runner.configure("undisturbed", as_long)))
    assert_exact(run.run_dir, steps, undisturbed)
