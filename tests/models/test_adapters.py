"""Compares adapted modules, ranks and factors with those of PEFT, the reference."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel

from penstock.config.adapter import AdapterConfig
from penstock.config.schema import parse_config
from penstock.host.errors import ConfigError
from penstock.models.adapters.modules import drawn
from penstock.models.adapters.settings import Adapter, is_adapter_tensor, resolved
from penstock.models.checkpoints.constants import narrowed
from penstock.models.surgery.skeleton import build_skeleton
from penstock.models.surgery.table import build_table
from penstock.planner.cost.profile import Guess, block_costs
from penstock.shm.table import DType
from tests.models.conftest import (
    make_batch,
    make_case,
    make_config,
    make_hf_config,
    original_loss,
    our_name,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning"),
]

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "list": {"r": 4, "alpha": 32, "targets": ["q_proj", "v_proj"]},
    "regex": {"r": 2, "targets": r".*layers\.[02]\..*(q|k)_proj", "rslora": True},
    "exclude": {"targets": "all-linear", "exclude": ["down_proj"]},
    "exclude-regex": {"exclude": r".*\.mlp\..*"},
    "patterns": {
        "r": 4,
        "rank_pattern": {"q_proj": 16, r"layers\.1\.mlp\.up_proj": 2},
        "alpha_pattern": {"q_proj": 3, "down_proj": 64},
        "rslora": True,
    },
    "ranks": {"r": 4, "alpha": 6, "rank_pattern": {"q_proj": 16, "v_proj": 1}},
    "factors": {"r": 4, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 3, "o_proj": 5}},
    "embedding": {"r": 3, "targets": ["embed_tokens", "o_proj"]},
    "saved": {"r": 3, "modules_to_save": ["lm_head", "norm"]},
    "saved-layer": {"modules_to_save": ["mlp"]},
    "saved-target": {"targets": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]},
    "saved-beginning": {"targets": ["q_proj"], "modules_to_save": ["layers.1"]},
}


def peft_settings(given: AdapterConfig) -> LoraConfig:
    """The same settings under PEFT's names."""

    def names(value: Any) -> Any:
        return value if isinstance(value, str) else list(value)

    return LoraConfig(
        r=given.r,
        lora_alpha=given.alpha,
        use_rslora=given.rslora,
        target_modules=names(given.targets),
        exclude_modules=names(given.exclude) or None,
        modules_to_save=list(given.modules_to_save) or None,
        rank_pattern=dict(given.rank_pattern),
        alpha_pattern=dict(given.alpha_pattern),
    )


def with_peft(model: Any, given: AdapterConfig) -> Any:
    """The model with the adapters of PEFT, and with saved modules in place of their originals."""
    return get_peft_model(model, peft_settings(given))


@pytest.mark.parametrize("fields", SETTINGS.values(), ids=SETTINGS)
def test_modules_ranks_and_factors_are_those_of_peft(fields: dict[str, Any]) -> None:
    given = AdapterConfig(**fields)
    hf_config = make_hf_config(make_config("llama"))
    ours = build_skeleton(hf_config, given)
    theirs: Any = get_peft_model(AutoModelForCausalLM.from_config(hf_config), peft_settings(given))
    layers = {our_name(n): m for n, m in theirs.named_modules() if isinstance(m, LoraLayer)}
    assert ours.adapter is not None
    assert {name: (a.r, a.scale) for name, a in ours.adapter.modules.items()} == {
        name: (layer.r["default"], layer.scaling["default"]) for name, layer in layers.items()
    }
    trained = {our_name(n): tuple(p.shape) for n, p in theirs.named_parameters() if p.requires_grad}
    assert trained == {
        name: tuple(parameter.shape)
        for name, parameter in ours.model.named_parameters()
        if ours.adapter.trains(name)
    }


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "qwen2", "mamba", "bert"])
def test_tensors_have_their_blocks(model_type: str) -> None:
    config = make_config(model_type)
    skeleton = build_skeleton(make_hf_config(config), AdapterConfig())
    names = [name for part in skeleton.parts for name in part.tensors]
    assert any(is_adapter_tensor(name) for name in names)
    plain = build_skeleton(make_hf_config(config))
    kept = [name for name in names if not is_adapter_tensor(name)]
    assert kept == [name for part in plain.parts for name in part.tensors]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no such target": ("llama", {"targets": ["q_prj"]}, r"'q_prj' matches no module.*q_proj"),
    "no such regex": ("llama", {"targets": "nothing.*"}, "'nothing.*' matches no module"),
    "norm": ("llama", {"targets": ["input_layernorm"]}, "is a LlamaRMSNorm; adapters are for"),
    "all excluded": ("llama", {"targets": ["q_proj"], "exclude": ["q_proj"]}, "leave no module"),
    "no such saved": ("llama", {"modules_to_save": ["lm_haed"]}, "'lm_haed' matches no.*lm_head"),
    "act_fn": ("llama", {"modules_to_save": ["act_fn"]}, "has no parameters.*leave it out"),
    "fused": ("mamba", {"targets": ["out_proj"]}, "models of type mamba read its weight"),
    "experts": ("mixtral", {}, "experts in one tensor"),
    "expert": ("mixtral", {"targets": ["gate_up_proj"]}, "is a parameter, .*target_parameters"),
}


@pytest.mark.parametrize(("model_type", "fields", "words"), REFUSED.values(), ids=REFUSED)
def test_settings_that_mean_something_else_are_refused(
    model_type: str, fields: dict[str, Any], words: str
) -> None:
    model = build_skeleton(make_hf_config(make_config(model_type))).model
    with pytest.raises(ConfigError, match=words):
        resolved(AdapterConfig(**fields), model)


@pytest.mark.parametrize(
    ("model_type", "fields", "names"),
    [
        # No norm of olmo has parameters; of llama4_text, those of queries and keys have none.
        ("olmo", {}, ["lm_head", "norm"]),
        (
            "llama4_text",
            {"moe_layers": [], "no_rope_layers": [1] * 2, "attention_chunk_size": 16},
            ["lm_head", "norm"],
        ),
    ],
)
def test_saved_modules_are_those_of_peft_with_parameters(
    model_type: str, fields: dict[str, Any], names: list[str]
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 61, "head_dim": 8}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    if model_type == "llama4_text":
        sizes["intermediate_size_mlp"] = 24
    given = AutoConfig.for_model(
        model_type, **sizes, **heads, **fields, pad_token_id=0, tie_word_embeddings=False
    )
    chosen = AdapterConfig(targets=["q_proj"], modules_to_save=names)
    ours = build_skeleton(given, chosen)
    theirs: Any = get_peft_model(AutoModelForCausalLM.from_config(given), peft_settings(chosen))
    trained = {our_name(n): tuple(p.shape) for n, p in theirs.named_parameters() if p.requires_grad}
    assert ours.adapter is not None
    assert trained == {
        name: tuple(parameter.shape)
        for name, parameter in ours.model.named_parameters()
        if ours.adapter.trains(name)
    }
    assert (
        any("norm" in n for n in dict(ours.model.named_modules())) and "lm_head.weight" in trained
    )


def test_adapters_of_one_shape_start_in_different_ways() -> None:
    """The first numbers follow from the name and the seed: none repeats, and each comes again."""
    names = [
        f"model.layers.{layer}.self_attn.{part}.lora_A.weight"
        for layer in range(3)
        for part in ("q_proj", "k_proj")
    ]
    firsts = {(name, seed): drawn(name, (4, 16), seed) for name in names for seed in (1, 2)}
    values = list(firsts.values())
    for number, value in enumerate(values):
        assert not any(torch.equal(value, other) for other in values[:number])
    assert all(torch.equal(drawn(*key[:1], (4, 16), key[1]), v) for key, v in firsts.items())
    embeddings = [drawn(f"{n}.lora_embedding_B", (16, 4), 1) for n in ("wte", "wpe")]
    assert not torch.equal(*embeddings)
    for zero in ("q.lora_B.weight", "wte.lora_embedding_A"):
        assert not drawn(zero, (16, 4), 1).any()


def test_a_tied_head_is_not_saved() -> None:
    hf_config = make_hf_config(make_config("llama"))
    hf_config.tie_word_embeddings = True
    with pytest.raises(ConfigError, match="are one tensor"):
        build_skeleton(hf_config, AdapterConfig(modules_to_save=("lm_head",)))


@pytest.mark.parametrize("fields", [None, {}, {"r": 64, "targets": ["q_proj", "v_proj"]}])
def test_guessed_costs_of_frozen_layers(fields: dict[str, Any] | None) -> None:
    """The reference counts the operations of torch's own forward and backward. The sequence is
    short, so attention costs little.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    config = make_config("llama", **sizes)
    adapter = None if fields is None else AdapterConfig(**fields)
    hf_config = make_hf_config(config)
    model: Any = AutoModelForCausalLM.from_config(hf_config)
    if adapter is not None:
        model = get_peft_model(model, peft_settings(adapter))
    decoder = next(module for module in model.modules() if isinstance(module, LlamaModel))
    hidden = torch.randn(1, 16, 128, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        loss = decoder(inputs_embeds=hidden).last_hidden_state.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    layers = slice(1, 4)
    table = build_table(config.model_copy(update={"adapter": adapter}), hf_config)
    costs = block_costs(table, Guess(), tokens=16).blocks[layers]
    ratio = sum(cost.backward_s for cost in costs) / sum(cost.forward_s for cost in costs)
    expected = backward.get_total_flops() / forward.get_total_flops()
    assert ratio == pytest.approx(expected, rel=0.03)
    weights = sum(cost.backward_weight_s for cost in costs)
    assert (weights > 0) == any(t.trainable for b in table.blocks[layers] for t in b.tensors)


def test_only_named_parameters_are_trained() -> None:
    config = make_config("llama")
    train = config.train.model_copy(update={"only": (r"layers\.1\.", "^lm_head")})
    table = build_table(config.model_copy(update={"train": train}), make_hf_config(config))
    for tensor in (tensor for block in table.blocks for tensor in block.tensors):
        chosen = "layers.1." in tensor.name or tensor.name.startswith("lm_head")
        assert tensor.trainable == chosen, tensor.name


CONFLICTS: dict[str, tuple[dict[str, Any], str]] = {
    "only and freeze": ({"train": {"only": ["a"], "freeze": ["b"]}}, "both choose the parameters"),
    "only and adapter": ({"train": {"only": ["a"]}, "adapter": {}}, "trains its own parameters"),
    "path and r": ({"adapter": {"path": "x", "r": 4}}, "remove adapter.r, or remove adapter.path"),
    "no rank": ({"adapter": {"r": 0}}, "adapter.r = 0: accepted is a whole number, 1 or more"),
    "no regex": ({"adapter": {"targets": "("}}, "is no regular expression"),
    "unknown": ({"adapter": {"rank": 4}}, "adapter.rank: unknown key; "),
    "a rank of no module": (
        {"adapter": {"rank_pattern": {"q_proj": 0}}},
        "adapter.rank_pattern.q_proj = 0: accepted is a whole number",
    ),
}


@pytest.mark.parametrize(("fields", "words"), CONFLICTS.values(), ids=CONFLICTS)
def test_conflicting_keys_are_refused(fields: dict[str, Any], words: str) -> None:
    base = {"model": {"hf": {"model_type": "llama"}}, "data": {"path": "@stdlib"}}
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_config({**base, **fields})


@pytest.mark.parametrize(
    "model_type",
    ["llama", "gpt2", "qwen3", "mistral", "gemma2", "phi3", "gpt_neox", "opt", "bert", "mamba"],
)
def test_gradients_and_operations_are_those_of_peft(one_thread: None, model_type: str) -> None:
    """The original has the same weights. No product is made for a frozen weight."""
    exclude = ("out_proj", "dt_proj") if model_type == "mamba" else ()
    given = AdapterConfig(r=4, alpha=8, exclude=exclude)
    case = make_case(model_type, adapter=given, adapt=with_peft)
    batch = make_batch()
    loss = original_loss(case.original, batch)
    with FlopCounterMode(display=False) as expected:
        loss.backward()
    blocks = range(len(case.table.blocks))
    output = case.forward(blocks, {}, batch, autograd=True)
    with FlopCounterMode(display=False) as counted:
        case.runtime.backward(output, {})
    assert counted.get_total_flops() <= expected.get_total_flops()
    assert output.loss_sum is not None
    assert output.loss_sum.item() == pytest.approx(loss.item(), rel=1e-6)
    gradients = {our_name(n): p.grad for n, p in case.original.named_parameters()}
    assert case.trainable_names() == [n for n in case.trainable_names() if is_adapter_tensor(n)]
    for name in case.trainable_names():
        torch.testing.assert_close(case.gradient(name), gradients[name], rtol=1e-4, atol=1e-5)


def test_saved_modules_are_whole_names() -> None:
    """layers.1 is no beginning of layers.10."""
    adapter = Adapter(modules={}, saved=("model.layers.1",), dropout=0.0)
    assert adapter.trains("model.layers.1.mlp.up_proj.weight")
    assert not adapter.trains("model.layers.10.mlp.up_proj.weight")


def test_first_numbers_follow_from_seed_and_name() -> None:
    shape, name = (4, 8), "model.layers.0.self_attn.q_proj.lora_A.weight"
    first = drawn(name, shape, 1)
    assert torch.equal(drawn(name, shape, 1), first)
    assert not torch.equal(drawn(name, shape, 2), first)


def test_the_adapters_input_alone_is_dropped_out() -> None:
    given = AdapterConfig(r=4, dropout=0.5, targets=("q_proj",))
    skeleton = build_skeleton(make_hf_config(make_config("llama")), given)
    module = skeleton.model.get_submodule("model.layers.0.self_attn.q_proj").to_empty(device="cpu")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    rows = torch.randn(3, module.in_features)
    torch.manual_seed(2)
    output = module.train()(rows)
    torch.manual_seed(2)
    dropped = nn.functional.dropout(rows, 0.5)
    added = dropped @ module.lora_A.weight.T @ module.lora_B.weight.T * module.lora_scale
    assert not torch.equal(dropped, rows)
    torch.testing.assert_close(output, rows @ module.weight.T + added)


def test_a_scaled_embedding_scales_its_adapter_as_in_peft(one_thread: None) -> None:
    """Gemma multiplies the rows of its embedding; PEFT multiplies those of the adapter, too."""
    given = AdapterConfig(r=3, alpha=5, targets=("embed_tokens",))
    changes = {"tie_word_embeddings": False}
    case = make_case("gemma2", adapter=given, adapt=with_peft, **changes)
    assert case.original.get_input_embeddings().base_layer.embed_scale != 1.0
    batch = make_batch()
    original_loss(case.original, batch).backward()
    case.train([], batch)
    gradients = {our_name(n): p.grad for n, p in case.original.named_parameters()}
    for name in case.trainable_names():
        torch.testing.assert_close(case.gradient(name), gradients[name], rtol=1e-4, atol=1e-5)
    assert any(case.gradient(name).any() for name in case.trainable_names())


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_several_stages_have_the_gradients_of_one(one_thread: None, model_type: str) -> None:
    """Each stage is computed again from its checkpoint, with the same dropout."""
    given = AdapterConfig(r=4, alpha=8, dropout=0.3, modules_to_save=("lm_head",))
    changes = {"tie_word_embeddings": False}
    batch, gradients = make_batch(), []
    for cuts in ([], [1, 3], [2]):
        case = make_case(model_type, adapter=given, adapt=with_peft, **changes)
        case.train(cuts, batch)
        gradients.append({name: case.gradient(name) for name in case.trainable_names()})
    for other in gradients[1:]:
        assert other.keys() == gradients[0].keys()
        assert all(torch.equal(other[name], gradients[0][name]) for name in other)
    assert "lm_head.weight" in gradients[0]


@pytest.mark.parametrize("dtype", list(DType))
def test_adapters_have_the_type_of_the_models_weights(dtype: DType) -> None:
    config = make_config("llama")
    model = config.model.model_copy(update={"dtype": dtype})
    config = config.model_copy(update={"model": model, "adapter": AdapterConfig()})
    hf_config = make_hf_config(config)
    table = build_table(config, hf_config)
    assert table.weight_dtype is dtype
    assert narrowed(hf_config, table) == []
