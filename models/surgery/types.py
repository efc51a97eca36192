"""Errors for types of models that transformers does not have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.host.errors import ConfigError

SUPPORTED = (
    "decoder-only types are supported, such as llama, gpt2, qwen2, mistral and mamba, and encoders"
    " such as bert"
)


def unknown_type_of_folder(path: Path, model_type: object) -> ConfigError:
    """Returns the error for the ``model_type`` in the ``config.json`` at ``path``."""
    return ConfigError(
        f"model_type of {path} = {model_type!r}: transformers knows no such type; {SUPPORTED}"
    )


def unknown_type(model_type: str, close: Sequence[str]) -> ConfigError:
    """Returns the error for ``model.hf.model_type``; ``close`` are types with similar names."""
    return ConfigError(
        f"model.hf.model_type = {model_type!r}: transformers knows no such type; try"
        f" {', '.join(close or ['llama', 'gpt2', 'qwen2', 'mistral'])}"
    )
