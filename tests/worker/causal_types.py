"""Tiny models of all causal types that transformers has, by rules over the keys of their
configurations.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MAX_PARAMETERS = 20_000_000

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "attention_heads", "decoder_attention_heads"),
    *("encoder_attention_heads", "mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"),
)
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "lru_width", "embedding_size")
_WIDE = ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "dim_ff")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SMALL = (
    *("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim"),
    *("linear_key_head_dim", "linear_value_head_dim"),
)
_SIXTEEN = (
    *("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "index_head_dim", "word_embed_proj_dim"),
    *("mamba_d_head", "mamba_head_dim", "ffn_hidden_size", "hidden_size_per_layer_input"),
)
_FOUR = (
    *("state_size", "mamba_d_state", "mamba_d_conv", "mamba_dt_rank", "time_step_rank"),
    *("ssm_state_size", "index_topk"),
)
_TWO = (
    *("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "moe_topk", "n_group"),
    *("num_expert_group", "linear_num_key_heads", "index_n_heads"),
)
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_seq_len": 64,
    "sliding_window": 6,
    "attention_window": 6,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
    **dict.fromkeys((*_LAYERS, *_HEADS, *_EXPERTS, *_FOUR), 4),
    **dict.fromkeys((*_HIDDEN,), 32),
    **dict.fromkeys(_WIDE, 48),
    **dict.fromkeys(_SMALL, 8),
    **dict.fromkeys(_SIXTEEN, 16),
    **dict.fromkeys(_TWO, 2),
}
_LATENT = {"num_key_value_heads": 4}
_PADDED = {"pad_token_id": 1}
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32"), _LATENT),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "minicpm3", "sarvam_mla", "youtu"), _LATENT),
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "xlm-roberta"), _PADDED),
    **dict.fromkeys(("roberta-prelayernorm", "xlm-roberta-xl", "modernbert-decoder"), _PADDED),
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": _LATENT,
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "gemma4_text": {"vocab_size_per_layer_input": 61, "global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "inkling2_text": {"unpadded_vocab_size": 61},
    "inkling2_loop_text": {"unpadded_vocab_size": 61},
    "kimi_linear": {
        **_LATENT,
        "linear_attn_config": {
            "head_dim": 8,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
        },
    },
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": _LATENT,
    "llama4_text": {"intermediate_size_mlp": 48, "attention_chunk_size": 16},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "prophetnet": {"pad_token_id": 2, "num_decoder_layers": 4, "num_decoder_attention_heads": 4},
    "qwen3_next": {"layer_types": None},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True},
}


def reduced(model_type: str) -> PretrainedConfig:
    """Returns a tiny configuration of a type, without dropout.

    Raises:
        Exception: the type takes no such sizes.
    """
    config_class = CONFIG_MAPPING[model_type]
    parameters = inspect.signature(config_class.__init__).parameters
    fields = {
        config_class.attribute_map.get(key, key): value
        for key, value in SIZES.items()
        if key in parameters
    }
    fields |= {
        key: 0.0
        for key, parameter in parameters.items()
        if isinstance(parameter.default, float)
        and any(part in key for part in ("dropout", "pdrop", "layerdrop", "jitter"))
    }
    return config_class(**{**fields, **OVERRIDES.get(model_type, {})})


def save(model_type: str, folder: Path) -> None:
    """Saves a random model of a type whose every parameter and constant matters.

    Raises:
        Exception: the sizes do not suit the type, or transformers itself cannot train it.
    """
    hf_config = reduced(model_type)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    elements = sum(parameter.numel() for parameter in model.parameters())
    if elements > MAX_PARAMETERS:
        raise ValueError(f"the reduced model has {elements:,} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    persistent = set(dict(model.named_buffers())) & set(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0).add_(torch.randn_like(parameter), alpha=0.05)
        for name in sorted(persistent):
            buffer = model.get_buffer(name)
            if buffer.dtype.is_floating_point:
                buffer.add_(torch.rand_like(buffer), alpha=0.1)
    ids = torch.arange(2, 26).view(2, 12)
    model.train()(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    model.save_pretrained(folder)
