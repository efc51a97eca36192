"""Reading a local Hugging Face directory of safetensors tensor by tensor, never the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penstock.protocol.errors import ConfigError, StateError
from penstock.protocol.run.files import parse_json

_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
"""Element types as safetensors names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a file says of a tensor before its data: which file, element type (as safetensors names
    it), shape.
    """

    file_name: str
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a directory by name. At most one file is mapped at a time."""

    def __init__(self, directory: Path) -> None:
        """Read the headers of all files; takes seconds, however large the model is.

        Raises:
            ConfigError: there are no safetensors files.
            StateError: the index or a file is damaged, or a file that the index names is missing.
        """
        self._directory = directory
        self._open_name = ""
        self._open_file: Any = None
        self.headers: dict[str, Header] = {}
        for file_name in self._file_names():
            self.headers |= self._read_headers(file_name)

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor, of the shape in its header, as fp32 on the CPU, with memory of its own.

        Raises:
            StateError: the file is damaged, or the tensor has no floating type.
        """
        self.check_type(name)
        file_name = self.headers[name].file_name
        try:
            value: torch.Tensor = self._file(file_name).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise StateError(f"{self._directory / file_name}: {error}") from error
        # A copy in any case: the tensor's memory may be that of the mapped file.
        return value.to(torch.float32, copy=True)

    def check_type(self, name: str) -> None:
        """Refuse what cannot be trained.

        Raises:
            StateError: the tensor has no floating type.
        """
        header = self.headers[name]
        if header.dtype not in _FLOATS:
            raise StateError(
                f"{self._directory / header.file_name}: {name} is {header.dtype}; quantized weights"
                " cannot be trained, give fp32, fp16 or bf16"
            )

    def _file(self, file_name: str) -> Any:
        if self._open_name != file_name:
            self._open_file = safe_open(self._directory / file_name, framework="pt")
            self._open_name = file_name
        return self._open_file

    def _read_headers(self, file_name: str) -> dict[str, Header]:
        found = {}
        try:
            file = self._file(file_name)
            for name in file.keys():
                entry = file.get_slice(name)
                shape = tuple(entry.get_shape())
                found[name] = Header(file_name=file_name, dtype=entry.get_dtype(), shape=shape)
        except (OSError, SafetensorError) as error:
            raise StateError(f"{self._directory / file_name}: {error}") from error
        return found

    def _file_names(self) -> list[str]:
        index = self._directory / _INDEX
        if index.exists():
            try:
                weight_map = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
                named = sorted({str(name) for name in weight_map.values()})
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise StateError(
                    f"{index}: not an index of safetensors files: {error!r}"
                ) from error
            missing = [name for name in named if not (index.parent / name).is_file()]
            if missing:
                raise StateError(f"{index} names {missing[0]}, which is missing")
            return named
        files = sorted(path.name for path in self._directory.glob("*.safetensors"))
        if not files:
            raise ConfigError(
                f"model.path = {str(self._directory)!r}: has no *.safetensors; no other format"
                " is read"
            )
        return files
