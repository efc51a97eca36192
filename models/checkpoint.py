"""Reading a local Hugging Face directory of safetensors tensor by tensor, never the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penstock.protocol.errors import ConfigError, StateError

_INDEX = "model.safetensors.index.json"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Checkpoint:
    """The tensors of a directory by name. At most one file is mapped at a time."""

    def __init__(self, directory: Path) -> None:
        """Find out which file holds what.

        Raises:
            ConfigError: there are no safetensors files.
            StateError: the index is damaged, or a file it names is missing.
        """
        self._directory = directory
        self._open_name = ""
        self._open_file: Any = None
        self._file_of = self._read_index()

    def find(self, names: list[str]) -> str | None:
        """The first of several names that exists."""
        return next((name for name in names if name in self._file_of), None)

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor as fp32, a copy of its own.

        Raises:
            StateError: the file is damaged, or the tensor has another shape or no floating type.
        """
        file_name = self._file_of[name]
        value: torch.Tensor = self._tensor(file_name, name)
        if tuple(value.shape) != shape:
            raise StateError(
                f"{self._directory / file_name}: {name} has shape {tuple(value.shape)}, the model's"
                f" configuration asks for {shape}"
            )
        if value.dtype not in _FLOATS:
            raise StateError(
                f"{self._directory / file_name}: {name} is {value.dtype}; quantized weights cannot"
                " be trained, give fp32, fp16 or bf16"
            )
        return value.to(torch.float32, copy=True)

    def _tensor(self, file_name: str, name: str) -> torch.Tensor:
        try:
            if self._open_name != file_name:
                self._open_file = safe_open(self._directory / file_name, framework="pt")
                self._open_name = file_name
            tensor: torch.Tensor = self._open_file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise StateError(f"{self._directory / file_name}: {error}") from error
        return tensor

    def _read_index(self) -> dict[str, str]:
        index = self._directory / _INDEX
        if index.exists():
            try:
                file_of = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise StateError(
                    f"{index}: not an index of safetensors files: {error!r}"
                ) from error
            missing = sorted(n for n in set(file_of.values()) if not (index.parent / n).is_file())
            if missing:
                raise StateError(f"{index} names {missing[0]}, which is missing")
            return file_of
        files = sorted(self._directory.glob("*.safetensors"))
        if not files:
            raise ConfigError(
                f"model.path = {str(self._directory)!r}: has no *.safetensors; no other format"
                " is read"
            )
        return {name: file.name for file in files for name in self._names(file)}

    def _names(self, file: Path) -> list[str]:
        try:
            with safe_open(file, framework="pt") as opened:
                return list(opened.keys())
        except (OSError, SafetensorError) as error:
            raise StateError(f"{file}: {error}") from error
