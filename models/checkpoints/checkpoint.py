"""Reading a local Hugging Face directory of safetensors tensor by tensor, never the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from penstock.host.errors import StateError
from penstock.host.files import is_file
from penstock.models.binding import TORCH_DTYPES
from penstock.models.checkpoints.mapped import MappedFile
from penstock.shm.table import DType

FLOATS = ("F64", "F32", "F16", "BF16")
"""Element types as safetensors names them."""
_PIECE_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The description of a tensor in a file: file name, element type (in safetensors' terms),
    shape.
    """

    file_name: str
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of some files of a directory by name."""

    def __init__(self, directory: Path, files: Sequence[str]) -> None:
        """Reads the headers of the files; takes seconds, independent of the model's size. If
        several files have a tensor, the last one counts, as in transformers.

        Raises:
            StateError: a file is missing or damaged.
        """
        self._directory = directory
        self._open_name = ""
        self._open_file: MappedFile | None = None
        self.headers: dict[str, Header] = {}
        self._repeated: list[tuple[str, Header]] = []
        for file_name in files:
            headers = self._read_headers(file_name)
            repeated = self.headers.keys() & headers.keys()
            self._repeated += [(name, self.headers[name]) for name in sorted(repeated)]
            self.headers |= headers

    def check_repeated(self) -> None:
        """Refuses a tensor that two files have with different numbers.

        Raises:
            StateError: names the tensor and the files.
        """
        for name, header in self._repeated:
            last = self.headers[name]
            if not _equal(self._raw(name, header.file_name), self._raw(name, last.file_name)):
                raise StateError(
                    f"{self._directory}: {header.file_name} and {last.file_name} both have {name},"
                    " with different numbers; keep one of them"
                )

    def equal(self, one: str, other: str) -> bool:
        """Returns whether two tensors have the same shape and, as fp32, the same numbers.

        Raises:
            StateError: a file is damaged, or a tensor has no floating type.
        """
        tensors = []
        for name in (one, other):
            self.check_type(name)
            tensors.append(self._raw(name, self.headers[name].file_name))
        return _equal(*tensors)

    def read(self, name: str, dtype: DType = DType.FP32) -> torch.Tensor:
        """Returns a tensor, of the shape in its header, as fp32 on the CPU, with memory of its own.
        ``dtype`` is the type that the run will store.

        Raises:
            StateError: the file is damaged, or the tensor has no floating type, or a number that is
                not finite or that ``dtype`` cannot hold.
        """
        self.check_type(name)
        header = self.headers[name]
        value = self._raw(name, header.file_name)
        self._check_numbers(name, value, dtype)
        # A copy in any case: the tensor's memory may be that of the mapped file.
        return value.to(torch.float32, copy=True)

    def read_as_is(self, name: str) -> torch.Tensor:
        """Returns a tensor in the type and shape of its file, with memory of its own.

        Raises:
            StateError: the file is damaged.
        """
        return self.view(name).clone()

    def view(self, name: str) -> torch.Tensor:
        """Returns a tensor in the type and shape of its file, over the mapped file.

        Raises:
            StateError: the file is damaged.
        """
        return self._raw(name, self.headers[name].file_name)

    def check_type(self, name: str) -> None:
        """Refuses tensors that cannot be trained.

        Raises:
            StateError: the tensor has no floating type.
        """
        header = self.headers[name]
        if header.dtype not in FLOATS:
            raise StateError(
                f"{self._directory / header.file_name}: {name} is {header.dtype}; quantized weights"
                " cannot be trained, give fp32, fp16 or bf16"
            )

    def _check_numbers(self, name: str, value: torch.Tensor, dtype: DType) -> None:
        """Refuses NaN, infinities, and numbers that become infinite in ``dtype``."""
        if not value.numel():
            return
        # NaN makes both ends NaN: one walk over the tensor, and no memory.
        ends = torch.stack(value.aminmax())
        if ends.to(torch.float32).to(TORCH_DTYPES[dtype]).isfinite().all():
            return
        if finite := bool(ends.isfinite().all()):
            bad = ~value.to(torch.float32).to(TORCH_DTYPES[dtype]).isfinite()
        else:
            bad = ~value.isfinite()
        place, count = bad.nonzero()[0].tolist(), int(bad.sum())
        verb = "are" if count > 1 else "is"
        fault = f"that {dtype.value} cannot hold" if finite else f"that {verb} not finite"
        remedy = "set model.dtype to a wider type" if finite else "such weights cannot be trained"
        raise StateError(
            f"{self._directory / self.headers[name].file_name}: {name} has {count}"
            f" number{'s' * (count > 1)} {fault} ({value[tuple(place)].item():g} at {place});"
            f" {remedy}"
        )

    def _raw(self, name: str, file_name: str) -> torch.Tensor:
        """Returns a tensor over the mapped file."""
        try:
            return self._file(file_name).tensor(name)
        except (OSError, SafetensorError, ValueError) as error:
            raise StateError(f"{self._directory / file_name}: {error}") from error

    def _file(self, file_name: str) -> MappedFile:
        if self._open_file is None or self._open_name != file_name:
            self._open_file = MappedFile(self._directory / file_name)
            self._open_name = file_name
        return self._open_file

    def _read_headers(self, file_name: str) -> dict[str, Header]:
        headers = {}
        path = self._directory / file_name
        if not is_file(path):
            raise StateError(f"{path}: is missing")
        try:
            for name, (dtype, shape, _) in self._file(file_name).entries.items():
                headers[name] = Header(file_name=file_name, dtype=dtype, shape=shape)
        except (OSError, SafetensorError) as error:
            raise StateError(f"{path}: {error}") from error
        return headers


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype == other.dtype:
        return torch.equal(one, other)
    # By pieces: as fp32, an embedding takes some GB.
    pieces = (torch.split(t.reshape(-1), _PIECE_ELEMENTS) for t in (one, other))
    pairs = zip(*pieces, strict=True)
    return all(torch.equal(a.to(torch.float32), b.to(torch.float32)) for a, b in pairs)
