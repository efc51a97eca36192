"""Positions of a model, and the warning about longer rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import parse_config
from penstock.protocol.plan.positions import position_warning, positions_of


@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        ({}, None),
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 64}, "max_position_embeddings": 8}, 64),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4}}, 16384),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
    ],
)
def test_positions_are_those_after_rope_scaling(
    settings: dict[str, Any], positions: int | None
) -> None:
    assert positions_of(settings) == positions


def test_rows_beyond_the_positions_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    fields: dict[str, Any] = {
        "model": {"path": str(tmp_path)},
        "data": {"path": "@stdlib", "sequence_length": 1024},
        "train": {"steps": 1},
    }
    assert position_warning(parse_config(fields, source="test")) == (
        "warning: data.sequence_length = 1024: the model has 512 positions (rope scaling included),"
        " and texts with more tokens go beyond them; 512 is the longest row within them"
    )
    fields["data"]["sequence_length"] = 512
    assert position_warning(parse_config(fields, source="test")) is None
