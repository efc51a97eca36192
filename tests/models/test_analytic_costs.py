"""Costs from data sheets beside real blocks: as many parameters, and the same tensors kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    Gemma2Config,
    JambaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from penstock.models.profiling.blocks import BlockBench
from penstock.models.profiling.storages import StorageLedger, StorageMode
from penstock.models.saved_activations import release_values
from penstock.planner.cost.catalogue import MODELS
from penstock.planner.cost.language_models import (
    Experts,
    FeedForward,
    LanguageModel,
    LayerKind,
    StateSpace,
)
from penstock.planner.cost.layer_kernels import Shape
from penstock.planner.cost.operators import feed_forward_kernels, mixer_kernels

MAMBA = {"hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 50280}
PUBLISHED: dict[str, PretrainedConfig] = {
    "mamba-1.4b": MambaConfig(**MAMBA),
    "mistral-7b": MistralConfig(),
    "gemma2-2b": Gemma2Config(num_attention_heads=8, num_key_value_heads=4),
    "mixtral-8x7b": MixtralConfig(),
    "qwen1.5-moe-a2.7b": Qwen2MoeConfig(),
    "qwen3-30b-a3b": Qwen3MoeConfig(num_hidden_layers=48, head_dim=128),
    "jamba-52b": JambaConfig(),
    "bert-large": BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
}
"""Types with the defaults of their first model, as its authors published them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_as_many_parameters_as_the_published_ones(name: str) -> None:
    config = PUBLISHED[name]
    # A pattern's length of layers; what the others are is known.
    layers = len(MODELS[name].pattern)
    whole, config.num_hidden_layers = config.num_hidden_layers, layers
    if "layer_types" in vars(config):
        config.layer_types = config.layer_types[:layers]
    kind: Any = AutoModelForMaskedLM if name.startswith("bert") else AutoModelForCausalLM
    with torch.device("meta"):
        real = kind.from_config(config)
    assert whole == MODELS[name].num_layers
    found = replace(MODELS[name], num_layers=layers)
    assert found.num_parameters == sum(p.numel() for p in real.parameters())


TINY = LanguageModel(
    name="tiny",
    num_layers=3,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    key_value_size=16,
    vocab_size=61,
    gated=True,
)
EXPERTS = (LayerKind(feed_forward=FeedForward.EXPERTS),)
TINY_MODELS = {
    "llama": TINY,
    "mixtral": replace(
        TINY, experts=Experts(number=4, per_token=2, intermediate_size=48), pattern=EXPERTS
    ),
}
SEQUENCE, MICRO_BATCH = 64, 2


def kept_per_token(model: LanguageModel, *, flash: bool = True) -> float:
    """Bytes that a layer keeps, its input among them. Hugging Face's RMSNorms are not fused: each
    keeps its normalized input and a factor in fp32 as well.
    """
    shape = Shape(sequence_length=SEQUENCE, micro_batch=MICRO_BATCH, itemsize=4, flash=flash)
    kind, h = model.layer(0), model.hidden_size
    kernels = mixer_kernels(
        model, shape, kind, residual_kept=kind.feed_forward is not FeedForward.NONE
    )
    kernels += feed_forward_kernels(model, shape, kind)
    norms = sum(kernel.operator == "norm" for kernel in kernels)
    return 4 * h + sum(k.kept_bytes for k in kernels) / shape.tokens + norms * (4 * h + 4)


@pytest.mark.parametrize(("name", "within"), [("llama", 1e-4), ("mixtral", 0.01)])
def test_layers_of_the_runtime_keep_what_is_reckoned(
    name: str, within: float, make_case: Callable[..., Any]
) -> None:
    case = make_case(name, max_position_embeddings=SEQUENCE)
    bench = BlockBench(
        case.runtime,
        device=torch.device("cpu"),
        compute_dtype=torch.float32,
        sequence_length=SEQUENCE,
        budget_s=0.0,
    )
    measured = bench.measure(range(1, 2), MICRO_BATCH)
    model = TINY_MODELS[name]
    parameters = sum(tensor.num_elements for tensor in case.table.blocks[1].tensors)
    kind = model.layer(0)
    assert model.mixer_parameters(kind) + model.feed_forward_parameters(kind) == parameters
    kept = measured.memory.activation_bytes / (SEQUENCE * MICRO_BATCH)
    assert kept == pytest.approx(kept_per_token(model), rel=within)


def test_a_state_space_without_fused_kernels_keeps_what_is_reckoned() -> None:
    config = MambaConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=1, time_step_rank=2, residual_in_fp32=False
    )
    layer = AutoModelForCausalLM.from_config(config).train().backbone.layers[0]
    ledger = StorageLedger()
    with StorageMode(ledger, ""):
        hidden = torch.randn(MICRO_BATCH, SEQUENCE, 32).requires_grad_()
        output = layer(hidden)
        release_values(output)
    model = replace(
        MODELS["mamba-130m"], hidden_size=32, state_space=StateSpace(inner_size=64, time_rank=2)
    )
    assert model.state_space_parameters == sum(p.numel() for p in layer.parameters())
    kept = ledger.live_bytes / (SEQUENCE * MICRO_BATCH)
    assert kept == pytest.approx(kept_per_token(model, flash=False), rel=0.01)
    fused = kept_per_token(model)
    assert fused < kept / 10
