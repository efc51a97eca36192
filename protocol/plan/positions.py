"""Positions of a model, by its settings, and the warning about rows beyond them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from penstock.config.schema import Config
from penstock.host.files import DAMAGED, parse_json

_LIMITS = ("max_position_embeddings", "n_positions", "max_sequence_length")
_SCALINGS = ("rope_scaling", "rope_parameters")


def positions_of(settings: Mapping[str, Any]) -> int | None:
    """Returns the positions of a model with rope scaling; None if its settings name none."""
    inner = settings.get("text_config")
    for fields in (inner if isinstance(inner, dict) else {}, settings):
        for name in _LIMITS:
            value = fields.get(name)
            if isinstance(value, int) and value > 0:
                return max(value, _scaled(fields, value))
    return None


def _scaled(fields: Mapping[str, Any], positions: int) -> int:
    """Returns the positions that a factor of rope scaling leads to; 0 without one."""
    for name in _SCALINGS:
        scaling = fields.get(name)
        factor = scaling.get("factor") if isinstance(scaling, dict) else None
        if isinstance(scaling, dict) and isinstance(factor, (int, float)) and factor > 1:
            original = scaling.get("original_max_position_embeddings")
            return int(factor * (original if isinstance(original, int) else positions))
    return 0


def position_warning(config: Config) -> str | None:
    """Returns the warning about rows with more tokens than the model has positions; None without a
    reason.
    """
    settings: Any = config.model.hf
    if config.model.path is not None:
        with suppress(OSError, *DAMAGED):
            settings = parse_json((config.model.path / "config.json").read_bytes())
    positions = positions_of(settings) if isinstance(settings, Mapping) else None
    length = config.data.sequence_length
    if positions is None or length <= positions:
        return None
    return (
        f"warning: data.sequence_length = {length}: the model has {positions:,} positions (rope"
        f" scaling included), and texts with more tokens go beyond them; {positions} is the longest"
        " row within them"
    )
