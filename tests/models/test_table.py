"""The block table against the Hugging Face models that it describes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.config.schema import parse_config
from penstock.host.errors import ConfigError
from penstock.models.surgery.skeleton import build_skeleton
from penstock.models.surgery.table import build_table
from penstock.shm.layout import NodeLayout, Ownership
from penstock.shm.table import BlockTable

TESTED = ("llama", "gpt2", "qwen2", "mistral")


def describe(table: BlockTable) -> list[str]:
    return [
        f"{b.name} {b.kind} {len(b.tensors)} tensors {b.trainable_elements}+{b.frozen_elements}"
        f" x{b.contributions}" + "".join(f" <- {x.owner}:{x.contribution}" for x in b.borrows)
        for b in table.blocks
    ]


def test_golden_table_untied(make_config, make_hf_config) -> None:
    config = make_config("llama", tie_word_embeddings=False)
    table = build_table(config, make_hf_config(config))
    assert describe(table) == [
        "embedding embedding 1 tensors 1952+0 x1",
        "layer.0 LlamaDecoderLayer 9 tensors 7744+0 x1",
        "layer.1 LlamaDecoderLayer 9 tensors 7744+0 x1",
        "layer.2 LlamaDecoderLayer 9 tensors 7744+0 x1",
        "head head 2 tensors 1984+0 x1",
    ]


def test_golden_table_tied(make_config, make_hf_config) -> None:
    config = make_config("gpt2")
    table = build_table(config, make_hf_config(config))
    assert describe(table) == [
        "embedding embedding 2 tensors 2976+0 x2",
        "layer.0 GPT2Block 12 tensors 12704+0 x1",
        "layer.1 GPT2Block 12 tensors 12704+0 x1",
        "layer.2 GPT2Block 12 tensors 12704+0 x1",
        "head head 2 tensors 64+0 x1 <- 0:1",
    ]
    assert [b.local_name for b in table.blocks[4].borrows] == ["lm_head.weight"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", TESTED)
def test_every_parameter_has_one_place(model_type, tied, make_config, make_hf_config) -> None:
    config = make_config(model_type, tie_word_embeddings=tied)
    hf_config = make_hf_config(config)
    table = build_table(config, hf_config)
    with torch.device("meta"):
        original = AutoModelForCausalLM.from_config(hf_config)
    shapes = {name: tuple(p.shape) for name, p in original.named_parameters()}
    found = {t.name: t.shape for b in table.blocks for t in b.tensors}
    assert found == shapes
    assert table.num_parameters == sum(p.numel() for p in original.parameters())
    assert table.vocab_size == 61
    for block in table.blocks:
        decays = [t.decay for t in sorted(block.tensors, key=lambda t: t.offset)]
        assert decays == sorted(decays, reverse=True)
        assert all(t.decay == (len(t.shape) >= 2) for t in block.tensors)
    assert BlockTable.from_json(table.to_json()) == table


def test_frozen_tensors_have_an_array_of_their_own(make_config, make_hf_config) -> None:
    config = make_config("llama", freeze=("embed_tokens", r"layers\.0\.", "norm"))
    table = build_table(config, make_hf_config(config))
    assert describe(table) == [
        "embedding embedding 1 tensors 0+1952 x1",
        "layer.0 LlamaDecoderLayer 9 tensors 0+7744 x1",
        "layer.1 LlamaDecoderLayer 9 tensors 7680+64 x1",
        "layer.2 LlamaDecoderLayer 9 tensors 7680+64 x1",
        "head head 2 tensors 1952+32 x1",
    ]
    assert not any(t.decay for b in table.blocks for t in b.tensors if not t.trainable)


@pytest.mark.parametrize("pattern", ["embed_tokens", "lm_head"])
def test_frozen_tied_tensor_has_no_second_contribution(
    pattern, make_config, make_hf_config
) -> None:
    config = make_config("llama", freeze=(pattern,), tie_word_embeddings=True)
    table = build_table(config, make_hf_config(config))
    assert describe(table)[0] == "embedding embedding 1 tensors 0+1952 x1"
    assert describe(table)[4] == "head head 1 tensors 32+0 x1 <- 0:0"
    # On two nodes the frozen use of the head must not move the owner's own contribution.
    ownership = Ownership.from_backward_nodes(table, [0, 0, 0, 1, 1])
    assert ownership.computed_on[0] == (0,)
    assert (0, "grads", 0, 0) in NodeLayout.compute(table, ownership, 0).arrays


def test_pattern_that_matches_nothing(make_config, make_hf_config) -> None:
    config = make_config("llama", freeze=("h.0.attn",))
    with pytest.raises(ConfigError, match=r"train.freeze: 'h.0.attn' matches no parameter.*model"):
        build_table(config, make_hf_config(config))


def test_freezing_everything(make_config, make_hf_config) -> None:
    config = make_config("llama", freeze=("weight",))
    with pytest.raises(ConfigError, match="nothing is left to train"):
        build_table(config, make_hf_config(config))


def test_layers_that_differ_are_of_different_kinds(make_config, make_hf_config) -> None:
    config = make_config("gemma2")
    kinds = [b.kind for b in build_table(config, make_hf_config(config)).blocks[1:-1]]
    assert kinds == ["Gemma2DecoderLayer", "Gemma2DecoderLayer#1", "Gemma2DecoderLayer"]


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_costs_are_near_what_torch_counts(model_type, make_case, make_batch) -> None:
    case = make_case(model_type)
    batch = make_batch(rows=1, length=16)
    layer = case.table.blocks[2]
    case.forward([2], {"hidden": torch.randn(1, 16, 32)}, batch)  # masks are made once
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {flat.untyped_storage().data_ptr() for flat in case.weights}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # A graph to the output alone: what it holds is what the backward needs.
        output = case.forward([2], {"hidden": torch.randn(1, 16, 32)}, batch)
    assert output.tensors["hidden"].requires_grad
    measured = sum(size for pointer, size in kept.items() if pointer not in weights) / 16
    assert 0.5 < layer.activation_bytes / measured < 2.0
    matrices = sum(t.num_elements for t in layer.tensors if t.decay)
    assert layer.forward_flops == 2 * matrices + 2 * 16 * 32
    assert case.table.blocks[4].forward_flops > 2 * 61 * 32
    assert layer.output_bytes == 32 * 4


@pytest.mark.parametrize(
    "changes", [{}, {"rope_parameters": {"rope_type": "linear", "rope_theta": 9.0, "factor": 2.0}}]
)
def test_buffers_are_rebuilt(changes, make_config, make_hf_config) -> None:
    hf_config = make_hf_config(make_config("llama", **changes))
    skeleton = build_skeleton(hf_config)
    original = dict(AutoModelForCausalLM.from_config(hf_config).named_buffers())
    rebuilt = dict(skeleton.model.named_buffers())
    assert rebuilt.keys() == original.keys() and rebuilt
    assert all(torch.equal(rebuilt[name], original[name]) for name in original)
    assert all(p.is_meta for p in skeleton.model.parameters())


def test_models_that_are_no_decoders_are_refused() -> None:
    config = parse_config(
        {
            "model": {"hf": {"model_type": "t5"}},
            "data": {"path": "@stdlib"},
        }
    )
    with pytest.raises(ConfigError, match="cannot build a model of type 't5'"):
        build_table(config, AutoConfig.for_model("t5"))


def test_layers_skipped_at_random_are_refused(make_config, make_hf_config) -> None:
    config = make_config("opt", layerdrop=0.1)
    with pytest.raises(ConfigError, match=r"layerdrop = 0.1"):
        build_table(config, make_hf_config(config))
