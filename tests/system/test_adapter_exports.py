"""Adapters of runs in PEFT's files, out and in again. PEFT is the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from penstock.models.adapters.files import WEIGHTS
from penstock.protocol.run.rundir import RunDirectory
from tests.folders import start_from_folder
from tests.system import conftest as H
from tests.system.reference import ReferenceLoop, reference_loop
from tests.system.test_parity import final_weights

STEPS = 4
PREFIX = "base_model.model."

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning"),
]


class LoadedLoop(ReferenceLoop):
    """The run's model of transformers with the adapter of ``adapter.path`` as PEFT loads it."""

    def load_model(self, folder: Path) -> Any:
        given = self.config.adapter
        assert given is not None and given.path is not None
        return PeftModel.from_pretrained(super().load_model(folder), given.path, is_trainable=True)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        for part in (PREFIX, ".default", ".modules_to_save"):
            named = {name.replace(part, ""): parameter for name, parameter in named.items()}
        return named


def trained(runner: H.Runner, name: str, adapter: dict[str, Any]) -> Path:
    """The directory of a finished run."""
    changes = {
        "run": {"name": name, "dir": str(runner.root / name)},
        "train": {"steps": STEPS, "save_every": STEPS},
        "adapter": adapter,
        "optimizer": {"lr": 2e-3},
    }
    return runner.train(start_from_folder(runner.configure(name, changes)))


def test_an_adapter_goes_out_and_in(runner: H.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # PEFT's bars are off, and start a thread
    settings = {"r": 4, "alpha": 16, "rank_pattern": {"q_proj": 2}, "modules_to_save": ["norm"]}
    run_dir = trained(runner, "first", settings)
    out, whole = runner.root / "peft", runner.root / "whole"
    code, text = runner.call("export", str(run_dir), str(out), "--format", "peft", "--verify")
    assert code == 0 and "in PEFT's files" in text and "verified: every tensor" in text, text
    tensors, saved = load_file(out / WEIGHTS), final_weights(run_dir)
    assert {name.removeprefix(PREFIX) for name in tensors} == saved.keys()
    for name, value in saved.items():
        np.testing.assert_array_equal(tensors[PREFIX + name].numpy(), value, err_msg=name)
    code, text = runner.call("export", str(run_dir), str(whole), "--verify")
    assert code == 0 and "its adapter is merged into the weights" in text, text
    base: Any = AutoModelForCausalLM.from_pretrained(RunDirectory(run_dir).config.model.path)
    expected = PeftModel.from_pretrained(base, out).merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(whole).state_dict()
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], value) for name, value in expected.items())

    again = trained(runner, "second", {"path": str(out)})
    reference = reference_loop(again, STEPS, LoadedLoop)
    losses = [line["loss"] for line in H.metrics(again)]
    np.testing.assert_allclose(losses, reference.losses, rtol=1e-6)
    weights = final_weights(again)
    assert weights.keys() == reference.weights.keys() == saved.keys()
    for name, value in weights.items():
        theirs = reference.weights[name]
        assert np.linalg.norm(value - theirs) <= 1e-6 * np.linalg.norm(theirs), name
        assert not np.array_equal(value, saved[name]), "the second run trained on"
    resolved = yaml.safe_load((again / "resolved.yaml").read_text())
    assert resolved["adapter"]["path"] == str(out)


def test_a_run_without_an_adapter_has_none_to_export(
    runner: H.Runner, plain_run: Path, tmp_path: Path
) -> None:
    code, text = runner.call("export", str(plain_run), str(tmp_path / "out"), "--format", "peft")
    assert code == 2 and "has no adapter; give --format hf" in " ".join(text.split()), text
