"""Checkpoints with torchtitan's names, against transformers' own rotary code."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from penstock.host.errors import ConfigError
from penstock.models.exchange.foreign import ForeignState
from penstock.models.exchange.readers import open_checkpoint
from penstock.models.surgery.skeleton import build_skeleton
from tests.models.exchange.fsdp2 import LLAMA

HIDDEN, HEADS, GROUPS, SIZE, STEP = 16, 4, 2, 8, 5
FIELDS = {**LLAMA, "num_hidden_layers": 1, "head_dim": SIZE}
ROWS = {"q": HEADS * SIZE, "k": GROUPS * SIZE, "v": GROUPS * SIZE}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def drawn(model: Any, older: bool) -> dict[str, torch.Tensor]:
    """Returns random weights of a model under torchtitan's names."""
    inner, outer = ("attention.", "output") if older else ("attention.qkv_linear.", "lm_head")
    parts = {
        **{f"self_attn.{x}_proj": f"{inner}w{x}" for x in "qkv"},
        **{"self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1"},
        **{"mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3"},
        **{"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"},
        **{"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
        **{"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": outer},
    }
    generator, values = torch.Generator().manual_seed(1), {}
    for name, parameter in model.state_dict().items():
        path = name.removesuffix(".weight")
        if path.startswith("model.layers.0."):
            path = f"layers.0.{parts[path.removeprefix('model.layers.0.')]}"
        else:
            path = parts[path]
        values[f"{path}.weight"] = torch.randn(parameter.shape, generator=generator)
    return values


def save(
    folder: Path, weights: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor]
) -> Path:
    """Saves as torchtitan does: weights at the top, a flat optimizer, and the trainer's step."""
    optimizer: dict[str, Any] = {f"state.{name}.exp_avg": v for name, v in moments.items()}
    optimizer |= {f"state.{name}.step": torch.tensor(float(STEP)) for name in moments}
    optimizer |= {f"param_groups.{name}.lr": 0.5 for name in moments}
    others = {"train_state": {"step": STEP, "ntokens_seen": 9}, "lr_scheduler": {"last_epoch": 5}}
    dcp.save({**weights, "optimizer": optimizer, **others}, checkpoint_id=folder, no_dist=True)
    return folder


def loaded(state: ForeignState, model_config: Any) -> dict[tuple[str, str], torch.Tensor]:
    """Returns the tensors as an import reads them."""
    skeleton = build_skeleton(model_config)
    fitted = state.fitted(skeleton, {name for name, _ in skeleton.model.named_parameters()})
    values = {(tensor.name, tensor.role): tensor.load() for tensor in fitted.tensors}
    for tensor in fitted.tensors:
        assert tensor.shape == values[tensor.name, tensor.role].shape
        assert tensor.num_elements == values[tensor.name, tensor.role].numel()
    return values


def scores_in_pairs(x: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor) -> torch.Tensor:
    """Returns products of rotated queries and keys, ``(head, query, key)``: neighbours rotate as
    complex numbers, as in the code that Meta published with Llama.
    """
    length = len(x)
    rates = 10000.0 ** (-torch.arange(0, SIZE, 2).float() / SIZE)
    turns = torch.polar(torch.ones(length, SIZE // 2), torch.outer(torch.arange(length), rates))

    def rotated(weight: torch.Tensor) -> torch.Tensor:
        heads = (x @ weight.T).reshape(length, -1, SIZE // 2, 2)
        return torch.view_as_real(torch.view_as_complex(heads) * turns[:, None]).flatten(2)

    keys = rotated(wk).repeat_interleave(HEADS // GROUPS, dim=1)
    return torch.einsum("qhd,khd->hqk", rotated(wq), keys)


def scores_in_halves(x: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor) -> torch.Tensor:
    """Returns the same products by the code of transformers."""
    config = LlamaConfig(**FIELDS)
    places = torch.arange(len(x))[None]
    cos, sin = LlamaRotaryEmbedding(config)(x[None], places)
    queries, keys = (
        (x @ w.T).reshape(1, len(x), -1, SIZE).transpose(1, 2).contiguous() for w in (wq, wk)
    )
    queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
    keys = keys.repeat_interleave(HEADS // GROUPS, dim=1)
    return torch.einsum("hqd,hkd->hqk", queries[0], keys[0])


@pytest.mark.parametrize("older", [True, False])
def test_rows_of_llama3_rotate_in_transformers_as_in_torchtitan(
    older: bool, tmp_path: Path
) -> None:
    config = LlamaConfig(**FIELDS)
    weights = drawn(LlamaForCausalLM(config), older)
    moments = {name: value * 2 for name, value in weights.items()}
    state = open_checkpoint(save(tmp_path / "ck", weights, moments))
    assert (state.kind, state.step, set(state.steps.values())) == ("torchtitan", STEP, {STEP})
    values = loaded(state, config)
    attention = "model.layers.0.self_attn"
    prefix = "layers.0.attention." if older else "layers.0.attention.qkv_linear."
    x = torch.randn(7, HIDDEN)
    for role in ("weight", "exp_avg"):
        wq, wk = (
            values[f"{attention}.q_proj.weight", role],
            values[f"{attention}.k_proj.weight", role],
        )
        factor = 1.0 if role == "weight" else 2.0
        theirs = weights[f"{prefix}wq.weight"] * factor, weights[f"{prefix}wk.weight"] * factor
        expected = scores_in_pairs(x, *theirs)
        assert torch.allclose(scores_in_halves(x, wq, wk), expected, rtol=1e-4, atol=1e-3)
        assert not torch.allclose(scores_in_halves(x, *theirs), expected, rtol=1e-2, atol=1e-1)
    for name, value in LlamaForCausalLM(config).state_dict().items():
        assert values[name, "weight"].shape == value.shape
        assert torch.equal(values[name, "exp_avg"], values[name, "weight"] * 2)
    assert torch.equal(
        values[f"{attention}.v_proj.weight", "weight"], weights[f"{prefix}wv.weight"]
    )


def test_joined_moments_are_divided(tmp_path: Path) -> None:
    """Release 0.3.0 divides joined weights as it saves, and leaves the moments joined."""
    config = LlamaConfig(**FIELDS)
    weights = drawn(LlamaForCausalLM(config), older=False)
    prefix = "layers.0.attention.qkv_linear."
    parts = [weights[f"{prefix}w{x}.weight"] * 3 for x in "qkv"]
    moments = {name: value * 3 for name, value in weights.items() if prefix not in name}
    shares = [part.reshape(GROUPS, -1, SIZE, HIDDEN) for part in parts]
    moments[f"{prefix}wqkv.weight"] = torch.cat(shares, dim=1).reshape(-1, HIDDEN)
    state = open_checkpoint(save(tmp_path / "ck", weights, moments))
    values = loaded(state, config)
    for name in LlamaForCausalLM(config).state_dict():
        assert torch.equal(values[name, "exp_avg"], values[name, "weight"] * 3), name
        assert state.steps[name] == STEP
    (group,) = state.groups
    assert {f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"} <= set(group.names)


def test_rows_of_qwen3_stay(tmp_path: Path) -> None:
    config = Qwen3Config(**{**FIELDS, "model_type": "qwen3"})
    weights = drawn(Qwen3ForCausalLM(config), older=True)
    values = loaded(open_checkpoint(save(tmp_path / "ck", weights, weights)), config)
    for x in ("wq", "wk"):
        name = f"model.layers.0.self_attn.{x[1]}_proj.weight"
        assert torch.equal(values[name, "weight"], weights[f"layers.0.attention.{x}.weight"])
    assert {name for name, _ in values} == set(Qwen3ForCausalLM(config).state_dict())


@pytest.mark.parametrize(
    "name",
    ["layers.0.moe.experts.w1", "layers.0.attention.sinks", "layers.0.attention.wkv_a.weight"],
)
def test_other_families_are_refused_by_name(name: str, tmp_path: Path) -> None:
    weights = {**drawn(LlamaForCausalLM(LlamaConfig(**FIELDS)), older=True), name: torch.ones(2, 2)}
    folder = save(tmp_path / "ck", weights, {})
    with pytest.raises(
        ConfigError, match=rf"torchtitan and has {name}, which is not in its llama3"
    ):
        open_checkpoint(folder)


def test_a_configuration_with_other_heads_is_refused(tmp_path: Path) -> None:
    weights = drawn(LlamaForCausalLM(LlamaConfig(**FIELDS)), older=True)
    state = open_checkpoint(save(tmp_path / "ck", weights, {}))
    with pytest.raises(ConfigError, match="rows, and a head of the configuration's model has 12"):
        loaded(state, LlamaConfig(**{**FIELDS, "head_dim": 12}))
