"""Keys of config.json for readers older than transformers 5.

transformers 5 writes ``rope_parameters`` and ``dtype`` alone. Older readers ignore both: they take
a rope base of 10,000 and fp32, without a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LOCAL_BASE = {
    "gemma3_text": "rope_local_base_freq",
    "gemma3n_text": "rope_local_base_freq",
    "modernbert": "local_rope_theta",
    "modernbert-decoder": "local_rope_theta",
}
"""Types with a second base for their layers with a sliding window, and the older key of it."""
_GLOBAL_BASE = {"modernbert": "global_rope_theta", "modernbert-decoder": "global_rope_theta"}


def with_older_keys(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a config.json with older keys added to the new ones, where both mean
    the same. ``quantization_config`` is left out: an export has plain weights.
    """
    kept = {key: value for key, value in fields.items() if key != "quantization_config"}
    if isinstance(kept.get("dtype"), str):
        kept["torch_dtype"] = kept["dtype"]
    return {**_rope_keys(kept), **kept}


def _rope_keys(fields: Mapping[str, Any]) -> dict[str, Any]:
    rope = fields.get("rope_parameters")
    if not isinstance(rope, dict) or not rope:
        return {}
    if "rope_theta" in rope:
        return _keys_of(rope, "original_max_position_embeddings" in fields)
    model_type = str(fields.get("model_type"))
    full, local = rope.get("full_attention"), rope.get("sliding_attention")
    if model_type not in _LOCAL_BASE or not isinstance(full, dict) or not isinstance(local, dict):
        return {}
    if local.get("rope_type") != "default":
        return {}
    keys = _keys_of(full, False)
    if model_type in _GLOBAL_BASE:
        keys = {_GLOBAL_BASE[model_type]: full["rope_theta"]}
    return {**keys, _LOCAL_BASE[model_type]: local["rope_theta"]}


def _keys_of(rope: Mapping[str, Any], original_outside: bool) -> dict[str, Any]:
    """Returns the older keys for one set of rope parameters. ``original_outside``: the length
    of the first training is a key of the whole configuration, as phi3 has it.
    """
    keys = {"rope_theta": rope["rope_theta"]}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        keys["partial_rotary_factor"] = rope["partial_rotary_factor"]
    outside = ("rope_theta", "partial_rotary_factor")
    scaling = {key: value for key, value in rope.items() if key not in outside}
    kind = scaling.get("rope_type", "default")
    if kind == "longrope" and original_outside:
        factors = {key: scaling[key] for key in ("short_factor", "long_factor")}
        keys["rope_scaling"] = {"type": kind, **factors}
    elif kind != "default":
        keys["rope_scaling"] = scaling
    return keys
