"""Configurations of transformers for the models that the planner knows by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.planner.cost.language_models import FeedForward, LanguageModel, Mixer

_LONGEST = 131_072
"""Positions of models with rotary embeddings: no limit here."""


def hugging_face_config(model: LanguageModel) -> Mapping[str, Any] | None:
    """Returns the ``config.json`` of a model with the shape of ``model``, in bf16; None for models
    that are not causal.
    """
    if not model.causal:
        return None
    if all(kind.mixer is Mixer.STATE_SPACE for kind in model.pattern):
        fields = _mamba(model)
    elif not model.gated:
        fields = _gpt(model)
    elif model.state_space is not None:
        fields = _jamba(model)
    else:
        fields = _llama(model)
    return {"dtype": "bfloat16", "vocab_size": model.vocab_size, **fields}


def _mamba(model: LanguageModel) -> dict[str, Any]:
    space = model.state_space
    assert space is not None, "its layers are state spaces"
    return {
        "model_type": "mamba",
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "intermediate_size": space.inner_size,
        "expand": space.inner_size // model.hidden_size,
        "state_size": space.state_size,
        "conv_kernel": space.taps,
        "time_step_rank": space.time_rank,
    }


def _gpt(model: LanguageModel) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.intermediate_size,
        "n_positions": model.max_positions,
        "tie_word_embeddings": model.tied,
    }


def _llama(model: LanguageModel) -> dict[str, Any]:
    """Returns the settings of a LLaMA, or of a descendant of it."""
    head = model.head_width // model.num_heads
    fields = {
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.key_value_size // head,
        "head_dim": head,
        "max_position_embeddings": _LONGEST,
        "tie_word_embeddings": model.tied,
    }
    experts = model.experts
    if model.post_norms:
        kinds = (model.layer(index) for index in range(model.num_layers))
        names = {Mixer.WINDOW: "sliding_attention", Mixer.ATTENTION: "full_attention"}
        layers = [names[kind.mixer] for kind in kinds]
        return {
            **fields,
            "model_type": "gemma2",
            "sliding_window": model.window,
            "layer_types": layers,
        }
    if experts is None:
        windows = {"model_type": "mistral", "sliding_window": model.window}
        return {**fields, **(windows if model.window else {})}
    routed = {"num_experts_per_tok": experts.per_token}
    if experts.shared_size:
        return {
            **fields,
            **routed,
            "model_type": "qwen2_moe",
            "num_experts": experts.number,
            "moe_intermediate_size": experts.intermediate_size,
            "shared_expert_intermediate_size": experts.shared_size,
        }
    if model.query_key_norms:
        return {
            **fields,
            **routed,
            "model_type": "qwen3_moe",
            "num_experts": experts.number,
            "moe_intermediate_size": experts.intermediate_size,
        }
    return {**fields, **routed, "model_type": "mixtral", "num_local_experts": experts.number}


def _jamba(model: LanguageModel) -> dict[str, Any]:
    space, experts, kinds = model.state_space, model.experts, model.pattern
    assert space is not None and experts is not None, "Jamba has both"
    attention = [index for index, kind in enumerate(kinds) if kind.mixer is not Mixer.STATE_SPACE]
    routed = [i for i, kind in enumerate(kinds) if kind.feed_forward is FeedForward.EXPERTS]
    return {
        "model_type": "jamba",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.key_value_size * model.num_heads // model.hidden_size,
        "attn_layer_period": len(kinds),
        "attn_layer_offset": attention[0],
        "expert_layer_period": routed[1] - routed[0],
        "expert_layer_offset": routed[0],
        "num_experts": experts.number,
        "num_experts_per_tok": experts.per_token,
        "mamba_expand": space.inner_size // model.hidden_size,
        "mamba_dt_rank": space.time_rank,
        "mamba_d_state": space.state_size,
        "mamba_d_conv": space.taps,
        "tie_word_embeddings": model.tied,
    }
