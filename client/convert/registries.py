"""LLaMA-Factory's registry of data sets, as far as a conversion needs its entries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.host.inputs import read_text

REGISTRY = "dataset_info.json"
_BYTES = 16 << 20


def entries_of(registry: Path, names: list[str]) -> Mapping[str, dict[str, Any]]:
    """Returns the entries of data sets in a readable registry."""
    try:
        entries = json.loads(read_text(registry, _BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {name: entries[name] for name in names if isinstance(entries.get(name), dict)}
