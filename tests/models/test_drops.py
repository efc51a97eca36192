"""What dropping operators saves, for every set of them: predicted from one forward, and done."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from penstock.config.schema import parse_config
from penstock.models.profiling.blocks import BlockBench
from penstock.models.runtime import ModelRuntime
from penstock.models.surgery.hf import resolve_hf_config
from penstock.models.surgery.table import build_table
from penstock.planner.cost.costs import BlockCost, OperatorCost, RecomputeSource

SEQUENCE = 16
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32},
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
}


def bench_of(model: str) -> BlockBench:
    config = parse_config(
        {
            "model": {"hf": {**MODELS[model], "vocab_size": 61}},
            "data": {"path": "@stdlib", "sequence_length": SEQUENCE},
        }
    )
    hf_config = resolve_hf_config(config, tokenizer_vocab_size=None, eos=None)
    table = build_table(config, hf_config)
    cpu = torch.device("cpu")
    return BlockBench(
        ModelRuntime(hf_config, table, device=cpu, compute_dtype=torch.float32, seed=0),
        device=cpu,
        compute_dtype=torch.float32,
        sequence_length=SEQUENCE,
        budget_s=0.0,
    )


@pytest.mark.parametrize("model", MODELS)
def test_savings_of_every_set_of_operators(model: str) -> None:
    """GPT-2's dropouts keep their inputs where these are not dropped, too: savings do not add."""
    bench = bench_of(model)
    measured = bench.operators(1, 2)
    cost = BlockCost(
        operators=tuple(
            OperatorCost(name=name, forward_s=0.0, activation_bytes=num_bytes)
            for name, num_bytes in measured.drops.saved.items()
        ),
        sources=tuple(
            RecomputeSource(operator=operator, needed_by=needed_by, num_bytes=num_bytes)
            for (operator, needed_by), num_bytes in measured.drops.sources.items()
        ),
    )
    everything = bench.kept_bytes(1, 2, ())
    names = sorted(measured.seconds)
    sets = [drop for count in (1, 2, 3) for drop in combinations(names, count)] + [tuple(names)]
    saved = {drop: everything - bench.kept_bytes(1, 2, drop) for drop in sets}
    assert saved == {drop: cost.drop_bytes(drop) for drop in sets}
    assert bool(cost.sources) is (model != "llama")


def test_operators_have_the_names_that_recomputation_uses() -> None:
    """GPT-2 calls its activation NewGELUActivation, and two projections c_proj."""
    assert list(bench_of("gpt2").operators(1, 1).seconds) == [
        "norm",
        "qkv",
        "attention_core",
        "attention_output",
        "dropout",
        "up",
        "gelu",
        "down",
    ]
