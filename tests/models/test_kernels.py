"""Attention kernels that are observed without weights are those of a whole transformers model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.config.schema import parse_config
from penstock.host.files import write_atomically
from penstock.models import kernels as kernels_module
from penstock.models.kernels import observe_kernels
from penstock.models.prepare import prepare
from penstock.models.surgery.hf import load_run_config
from penstock.models.torch_internals import TorchDispatchMode
from penstock.protocol.run.numerics import Attention, Kernels
from penstock.protocol.run.rundir import RunDirectory

LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
FLASH = "flash_attention_for_cpu"


class Fused(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes fused attention operators; ``math`` where a pass has none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _, found, name = str(func.name()).partition("_scaled_dot_product_")
        self.names |= {name} if found else set()
        return func(*args, **(kwargs or {}))

    def __str__(self) -> str:
        return ", ".join(sorted(self.names)) or "math"


def whole_models(run_dir: Path) -> Attention:
    """Returns the kernels of a transformers model with weights."""
    model: Any = AutoModelForCausalLM.from_config(load_run_config(run_dir))
    ids = torch.zeros(1, 16, dtype=torch.int64)
    model.train()
    with Fused() as forward:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with Fused() as backward:
        loss.backward()
    model.eval()
    with Fused() as evaluation, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return Attention(forward=str(forward), backward=str(backward), evaluation=str(evaluation))


@pytest.mark.parametrize(
    ("model", "forward"),
    [
        ({"model_type": "llama", **LLAMA}, FLASH),
        ({"model_type": "gpt2", **GPT2}, "math"),
        ({"model_type": "gpt2", **GPT2, "attn_pdrop": 0.0}, FLASH),
        ({"model_type": "mixtral", **LLAMA, "num_local_experts": 4}, FLASH),
        ({"model_type": "gemma2", **LLAMA, "head_dim": 8}, "model"),
    ],
)
@pytest.mark.parametrize("masks", [False, True])
def test_kernels_are_those_of_the_whole_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: dict[str, Any],
    forward: str,
    masks: bool,
) -> None:
    """Dropout rules the fused kernel out in training; a soft cap has no call of attention."""
    monkeypatch.setattr(kernels_module, "repeat_bits", lambda: None)  # it is for a whole process
    (tmp_path / "text.txt").write_text("hello world " * 100)
    data = {"path": str(tmp_path / "text.txt"), "sequence_length": 16, "document_masks": masks}
    config = parse_config({"model": {"hf": model}, "data": data, "train": {"global_batch": 2}})
    run = RunDirectory.create(tmp_path / "run")
    write_atomically(run.path / "resolved.yaml", config.to_yaml())
    prepare(config, run.path)
    observe_kernels(config, run.path)
    path = run.path / "model" / "kernels.json"
    kernels = Kernels.from_json(path.read_text(), str(path))
    assert {found.forward for found in kernels.attention.values()} == {forward}
    if forward != "model":
        assert set(map(str, kernels.attention.values())) == {str(whole_models(run.path))}
    assert not kernels.arithmetic.deterministic and kernels.compiler.backend == "inductor"
