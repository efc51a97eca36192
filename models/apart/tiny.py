"""A tiny model of the same type: the configuration of a run's model with small sizes.

Every kind of layer stays. Flags, forms of positions and ratios of heads stay, too. Windows and
chunks that a row of the run exceeds become shorter than the rows of the measurement. So a fault
beyond 4,096 tokens shows within 40.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from transformers import PretrainedConfig

from penstock.models.surgery.skeleton import Skeleton

LONGEST_ROW = 40
"""Tokens of the longest row that a tiny model sees."""

SMALL_LIMIT = 12
"""Tokens of limits, such as ``original_max_position_embeddings``, that rows exceed."""

FIRST_TOKEN, VOCABULARY = 3, 61
"""Tokens of samples are from the first number on; those below are marks."""

_ROOM = 64
"""Tokens of limits that no row exceeds."""

_MOST_LAYERS = 6
"""Most layers of a tiny model."""

_HEADS, _EXPERTS = 4, 4

_LAYERS = frozenset(
    (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
        *("num_decoder_layers", "num_blocks"),
    )
)
_POSITIONS = frozenset(
    (
        *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"),
        *("max_sequence_length", "max_target_positions", "context_length"),
        "original_max_position_embeddings",
    )
)
_WINDOWS = frozenset(
    (
        *("sliding_window", "sliding_window_size", "attention_window", "attention_window_size"),
        *("window_size", "local_attention", "keep_window_size", "attention_chunk_size"),
        *("floor_scale", "log_scaling_n_floor", "rel_extent", "index_topk"),
    )
)
"""Numbers of tokens after which a layer does something else."""

_KEY_HEADS = frozenset(
    (
        *("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"),
        *("num_global_key_value_heads", "linear_num_key_heads", "num_query_groups"),
    )
)
_PER_TOKEN = frozenset(
    (
        *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
        *("n_group", "num_expert_group", "index_n_heads", "moe_top_k"),
    )
)
_INDICES = frozenset(("full_attn_idxs", "hybrid_layer_ids", "moe_layers", "mlp_only_layers"))
_INDICES_FROM_ONE = frozenset(("kda_layers", "full_attn_layers"))
_FACTORS = frozenset(("short_factor", "long_factor"))
_SECTIONS = frozenset(("mrope_section", "xdrope_section"))


def _sizes() -> Iterator[tuple[str, int]]:
    by_size = {
        1: "topk_group first_k_dense_replace mamba_n_groups n_groups num_dense_layers"
        " moe_layer_start_index",
        4: "num_attention_heads n_head n_heads attention_heads decoder_attention_heads num_heads"
        " encoder_attention_heads mamba_n_heads mamba_num_heads linear_num_value_heads"
        " linear_num_heads num_decoder_attention_heads swa_num_attention_heads num_experts"
        " num_local_experts n_routed_experts moe_num_experts state_size mamba_d_state mamba_d_conv"
        " mamba_dt_rank time_step_rank ssm_state_size zero_expert_num d_rel conv_kernel",
        8: "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim rotary_dim linear_key_head_dim"
        " linear_value_head_dim linear_head_dim swa_head_dim global_head_dim kv_channels"
        " attention_head_dim mamba_chunk_size chunk_size",
        16: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"
        " q_lora_rank kv_lora_rank qk_head_dim index_head_dim word_embed_proj_dim mamba_d_head"
        " mamba_head_dim ffn_hidden_size hidden_size_per_layer_input o_lora_rank"
        " moe_shared_expert_intermediate_size shared_experts_intermediate_size router_hidden_size"
        " index_n_heads"
        " gated_norm_rank loop_gate_rank attention_head_size moe_latent_size",
        32: "hidden_size d_model n_embd dim lru_width embedding_size emb_dim embedding_dim"
        " input_embedding_size dim_head",
        48: "intermediate_size ffn_dim decoder_ffn_dim dim_ff dff intermediate_size_mlp"
        " shared_intermediate_size output_embedding_size dense_intermediate_size",
        64: "mamba_d_ssm attention_hidden_size",
        VOCABULARY: "vocab_size unpadded_vocab_size vocab_size_per_layer_input decoder_vocab_size",
    }
    for size, names in by_size.items():
        for name in names.split():
            yield name, size


_SIZES: Mapping[str, int] = MappingProxyType(dict(_sizes()))
_RANDOM = re.compile(r"dropout|pdrop|layerdrop|jitter")
_LEFT_OUT = frozenset(
    ("architectures", "dtype", "torch_dtype", "quantization_config", "id2label", "label2id")
)
_TOKEN = re.compile(r"_token_id$")
_TOKENS: Mapping[str, int] = MappingProxyType({"bos_token_id": 0, "eos_token_id": 1})


def candidates(
    hf_config: PretrainedConfig, skeleton: Skeleton, length: int, *, exceeded: bool
) -> Iterator[PretrainedConfig]:
    """Yields tiny configurations of the model of ``skeleton``, the likeliest first. Some may not be
    valid for the type: a build raises any error. ``length``: tokens of a row of the run.
    ``exceeded``: rows are longer than the model's positions, in the run and in the tiny model.
    """
    for chosen in _choices([part.kind for part in skeleton.parts[1:-1]]):
        shrink = _Shrink(hf_config, chosen, length, exceeded=exceeded)
        yield from shrink.configurations()


def _choices(kinds: Sequence[str]) -> Iterator[list[int]]:
    """Yields numbers of layers that have each kind: the first layer of each, or all layers up to
    the last of these.
    """
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    if len(firsts) < 2 <= len(kinds):
        firsts.append(next(i for i in range(len(kinds)) if i not in firsts))
    chosen = sorted(firsts)[:_MOST_LAYERS]
    yield chosen
    upto = list(range(min(max(chosen) + 1, _MOST_LAYERS)))
    if upto != chosen:
        yield upto


class _Shrink:
    """Makes fields of a configuration small."""

    def __init__(
        self, hf_config: PretrainedConfig, chosen: Sequence[int], length: int, *, exceeded: bool
    ) -> None:
        self._kind, self._fields = type(hf_config), hf_config.to_dict()
        self._chosen, self._length, self._exceeded = list(chosen), length, exceeded
        self._num_layers = int(hf_config.num_hidden_layers)
        self._heads = self._fields.get("num_attention_heads")

    def configurations(self) -> Iterator[PretrainedConfig]:
        """Yields the small configuration; first with few positions if rows exceed them, then with
        enough, for tables with a row for each position.
        """
        for positions in ([SMALL_LIMIT] if self._exceeded else []) + [_ROOM]:
            fields = self._small(self._fields, positions)
            yield self._kind(**fields)

    def _small(self, fields: Mapping[Any, Any], positions: int) -> dict[Any, Any]:
        small = {}
        for key, value in fields.items():
            if key not in _LEFT_OUT:
                small[key] = self._value(str(key), value, positions)
        return small

    def _value(self, key: str, value: Any, positions: int) -> Any:
        if isinstance(value, Mapping):
            if value and all(isinstance(number, int) for number in value):
                value = {self._chosen.index(i): value[i] for i in self._chosen if i in value}
            return self._small(value, positions)
        if isinstance(value, (list, tuple)):
            return self._list(key, list(value))
        if isinstance(value, float):
            return 0.0 if _RANDOM.search(key) else value
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        return self._number(key, value, positions)

    def _number(self, key: str, value: int, positions: int) -> int:
        if key in _LAYERS and value == self._num_layers:
            return len(self._chosen)
        if key in _POSITIONS:
            small = SMALL_LIMIT if key == "original_max_position_embeddings" else positions
            return small if self._exceeded else _ROOM
        if key in _WINDOWS:
            return 6 if 0 < value < self._length else _ROOM
        if key in _KEY_HEADS:
            return 1 if value == 1 else _HEADS if value == self._heads else _HEADS // 2
        if key in _PER_TOKEN:
            return min(value, 2)
        if _TOKEN.search(key):
            return _TOKENS.get(key, 2)
        return _SIZES.get(key, value)

    def _list(self, key: str, value: list[Any]) -> Any:
        if key in _INDICES:
            return [self._chosen.index(i) for i in value if i in self._chosen]
        if key in _INDICES_FROM_ONE:
            return [self._chosen.index(i - 1) + 1 for i in value if i - 1 in self._chosen]
        if key in _FACTORS:
            return _evenly(value, self._rotated() // 2)
        if key in _SECTIONS:
            return _shared_out(value, self._rotated() // 2)
        if _TOKEN.search(key):
            return _TOKENS.get(key, 2)
        if len(value) == self._num_layers:
            return [self._value(key, value[i], _ROOM) for i in self._chosen]
        return value

    def _rotated(self) -> int:
        """Returns the elements of a tiny head that turn with the position."""
        rope = self._fields.get("rope_parameters")
        share = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
        share = self._fields.get("partial_rotary_factor", share)
        return int(_SIZES["head_dim"] * (1.0 if share is None else float(share)))


def _evenly(values: list[Any], count: int) -> list[Any]:
    """Returns ``count`` of the values, from the first to the last."""
    last = len(values) - 1
    return [values[last * i // max(1, count - 1)] for i in range(count)]


def _shared_out(parts: list[int], total: int) -> list[int]:
    """Returns parts in the same ratios, with another total."""
    shares = [part * total // sum(parts) for part in parts]
    shares[-1] += total - sum(shares)
    return shares


def layer_kinds(skeleton: Skeleton) -> list[str]:
    """Returns the distinct kinds of a model's layers."""
    return list(dict.fromkeys(part.kind for part in skeleton.parts if part.layer_index is not None))


def limits(hf_config: PretrainedConfig) -> list[int]:
    """Returns the numbers of positions that a configuration names."""
    return [value for key, value in _numbers(hf_config.to_dict()) if key in _POSITIONS]


def shorter_than(hf_config: PretrainedConfig, length: int) -> list[int]:
    """Returns the windows of a configuration that rows of ``length`` tokens exceed."""
    numbers = _numbers(hf_config.to_dict())
    return [value for key, value in numbers if key in _WINDOWS and value < length]


def _numbers(fields: Mapping[Any, Any]) -> Iterator[tuple[str, int]]:
    """Yields the positive integers of a configuration with their keys."""
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield str(key), value
