"""Adapters through real daemons, with PEFT in a plain loop as the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

from penstock.models.adapters.modules import drawn
from penstock.protocol.run.rundir import RunDirectory
from tests.folders import start_from_folder
from tests.system import conftest as H
from tests.system.reference import ReferenceLoop, reference_loop
from tests.system.test_parity import final_weights

STEPS = 50
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"model_type": "qwen2"},
    "mistral": {"model_type": "mistral", "sliding_window": 16},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "attn_implementation": "eager"},
    "gpt2": {
        **{"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64},
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
}


class PeftLoop(ReferenceLoop):
    """The run's model of transformers with PEFT's adapters."""

    def load_model(self, folder: Path) -> Any:
        given = self.config.adapter
        assert given is not None
        settings = LoraConfig(
            r=given.r,
            lora_alpha=given.alpha,
            use_rslora=given.rslora,
            target_modules=given.targets if isinstance(given.targets, str) else list(given.targets),
            modules_to_save=list(given.modules_to_save) or None,
            rank_pattern=given.rank_pattern,
            alpha_pattern=given.alpha_pattern,
        )
        return get_peft_model(super().load_model(folder), settings)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        parameters = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                ours = name.removeprefix("base_model.model.").replace(".default", "")
                ours = ours.replace(".modules_to_save", "")
                parameters[ours] = parameter
                if ".lora_" in ours:
                    start = drawn(ours, tuple(parameter.shape), self.config.run.seed)
                    parameter.data.copy_(start)
        return parameters


pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


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


def trained(runner: H.Runner, name: str, **changes: Any) -> Path:
    """The directory of a finished run with adapters."""
    base: dict[str, Any] = {
        "run": {"name": name, "dir": str(runner.root / name)},
        "train": {"steps": STEPS},
        "adapter": {"r": 4, "alpha": 16},
        "optimizer": {"lr": 2e-3},
    }
    path = runner.configure(name, H.merge(base, changes))
    return runner.train(start_from_folder(path))


def test_adapters_beside_peft(runner: H.Runner) -> None:
    run_dir = trained(runner, "lora")
    check_beside_peft(run_dir)
    table = RunDirectory(run_dir).table
    assert all(".lora_" in t.name for b in table.blocks for t in b.tensors if t.trainable)
