"""Checks of the user's token file against ``data.token_dtype``.

The first bytes identify files of other formats. Every number is compared with the vocabulary.
Samples of the whole file reveal numbers of another width or byte order, even where the vocabulary
cannot. An int32 file, for example, is its tokens with a 0 after each if read as uint16.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.host.errors import ConfigError
from penstock.models.data.chunks import Bytes

_MAGIC = (
    (b"\x93NUMPY", "a NumPy .npy file"),
    (b"(\xb5/\xfd", "compressed with zstd"),
    (b"\xfd7zXZ\x00", "compressed with xz"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"MMIDIDX\x00\x00", "an index of Megatron (.idx); the numbers are in the .bin file"),
    (b"version https://git-lfs", "a Git LFS pointer (git lfs pull gets the file)"),
    (struct.pack("<2i", 20240520, 1), "a file of llm.c, with a header of 1,024 bytes"),
    (struct.pack("<2i", 20240801, 7), "a file of llm.c, with a header of 1,024 bytes"),
    (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9", "a file of torch.save"),
)
"""First bytes of files that are not plain numbers."""

_PICKLE = re.compile(rb"\x80[\x02-\x05][\x95c\]}(]")
_TEXT = re.compile(rb"[\t\n\r\x20-\x7e]+")
_HEAD_BYTES = 1 << 12
_SAMPLE_BYTES = 1 << 20
_MIN_FULL = 16
_MIN_SPREAD_NUMBERS = 1 << 12
_SPREAD_MARGIN = 16
_SCAN_NUMBERS = 1 << 22

_CANDIDATES = {
    "<i8": "int64",
    ">i8": "big-endian int64",
    "<u4": "uint32",
    ">u4": "big-endian uint32",
    "<u2": "uint16",
    ">u2": "big-endian uint16",
}
"""Types of numbers that files have; the widest first, as zeros are numbers below any vocabulary."""

_ZEROS: dict[tuple[bool, ...], str] = {
    (False, True, False, True): "of every two numbers the second is 0",
    (True, False, True, False): "of every two numbers the first is 0",
    (False, True, True, True): "of every four numbers only the first is not 0",
    (True, True, True, False): "of every four numbers only the last is not 0",
}
"""Zeros among four numbers in a row, for wide numbers that are read as narrow ones."""


class TokenFile:
    """A file of token ids of ``dtype`` (uint16 or uint32) for a vocabulary of ``vocab_size``."""

    def __init__(self, path: Path, dtype: str, vocab_size: int) -> None:
        """Checks the size and the first bytes of the file.

        Raises:
            ConfigError: the file does not hold such numbers.
        """
        self.path, self._dtype, self._vocab_size = (
            path,
            np.dtype(dtype).newbyteorder("<"),
            vocab_size,
        )
        self._name, self._type = f"data.tokens = {str(path)!r}", dtype
        self._size = path.stat().st_size
        if kind := _format(path, self._size):
            raise ConfigError(
                f"{self._name}: is {kind}; give a file of {dtype} numbers and nothing else, as"
                " numpy's tofile writes it"
            )
        if self._size % self._dtype.itemsize:
            raise self._refused(f"{self._size:,} bytes are no whole number of {dtype}")
        if vocab_size > np.iinfo(self._dtype).max + 1:
            raise self._refused(
                f"the model has a vocabulary of {vocab_size:,}, and {dtype} (data.token_dtype)"
                f" ends at {np.iinfo(self._dtype).max:,}: greater ids would have been cut off"
            )

    @property
    def num_tokens(self) -> int:
        """Number of ids in the file."""
        return self._size // self._dtype.itemsize

    def check(self, start: int, content: Bytes) -> None:
        """Checks the bytes of the file from offset ``start`` on, a multiple of 8. Several threads
        may call this.

        Raises:
            ConfigError: a number is beyond the vocabulary, or numbers are of another width or byte
                order.
        """
        tokens = content.view(self._dtype)
        if zeros := _zeros(tokens):
            raise self._refused(f"read as {self._type}, {zeros} (from offset {start:,} on)")
        if int(tokens.max()) >= self._vocab_size:
            place = int(np.argmax(tokens >= self._vocab_size))
            offset = start + place * self._dtype.itemsize
            raise self._refused(
                f"holds token {tokens[place]} at offset {offset:,}, the model has a vocabulary of"
                f" {self._vocab_size}"
            )
        if self._dtype.itemsize == 2:
            self._check_order(start, content[:_SAMPLE_BYTES])

    def _check_order(self, start: int, content: Bytes) -> None:
        """Refuses numbers in the other byte order. Low bytes of ids take all values; high bytes
        only those up to the largest id's.
        """
        if len(content) < 2 * _MIN_SPREAD_NUMBERS:
            return
        low, high = (
            int(np.count_nonzero(np.bincount(content[place::2], minlength=256)))
            for place in range(2)
        )
        if high > low + _SPREAD_MARGIN:
            raise self._refused(
                f"read as little-endian, the numbers from offset {start:,} on have {high} different"
                f" high bytes and only {low} low ones, as big-endian numbers have"
            )

    def _refused(self, seen: str) -> ConfigError:
        """Returns the error, with the type by which every number would be a token."""
        fitting = next((name for name in _CANDIDATES if self._fits(np.dtype(name))), None)
        if fitting is None:
            advice = "check model.hf.vocab_size and data.token_dtype"
        elif fitting in ("<u2", "<u4"):
            advice = (
                f"read as {_CANDIDATES[fitting]} all numbers are tokens of the model: set"
                f" data.token_dtype to {_CANDIDATES[fitting]}"
            )
        else:
            target = "<u2" if self._vocab_size <= 2**16 else "<u4"
            advice = (
                f"read as {_CANDIDATES[fitting]} all numbers are tokens of the model: write them as"
                f" little-endian {_CANDIDATES[target]} (numpy.fromfile(FILE, {fitting!r})"
                f".astype({target!r}).tofile(NEW)), and set data.token_dtype to"
                f" {_CANDIDATES[target]}"
            )
        return ConfigError(f"{self._name}: {seen}; {advice}")

    def _fits(self, dtype: np.dtype[np.generic]) -> bool:
        if dtype == self._dtype or self._size % dtype.itemsize or not self._size:
            return False
        numbers = np.memmap(self.path, dtype=dtype, mode="r")
        parts = (
            numbers[start : start + _SCAN_NUMBERS]
            for start in range(0, len(numbers), _SCAN_NUMBERS)
        )
        return _zeros(numbers) is None and all(
            0 <= int(part.min()) and int(part.max()) < self._vocab_size for part in parts
        )


def _zeros(numbers: NDArray[Any]) -> str | None:
    """Returns a description of zeros among the numbers that indicate wider numbers, if any."""
    sample = numbers[: _SAMPLE_BYTES // numbers.itemsize]
    counts = [int(np.count_nonzero(sample[place::4])) for place in range(4)]
    most = max(counts)
    if most < _MIN_FULL:
        return None
    return _ZEROS.get(tuple(count * 20 < most for count in counts))


def _format(path: Path, size: int) -> str | None:
    """Returns the format of a file that is no plain numbers; None where it may be."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        file.seek(max(0, size - 4))
        tail = file.read(4)
    for magic, name in _MAGIC:
        if head.startswith(magic) and (magic != b"PAR1" or tail == magic):
            return name
    if head.startswith(b"BZh") and head[4:10] == b"1AY&SY":
        return "compressed with bzip2"
    if head.startswith(b"PK\x03\x04") and zipfile.is_zipfile(path):
        return "a zip archive, as .npz files and those of torch.save are"
    if head.startswith(b"\x1f\x8b") and _inflates(head):
        return "compressed with gzip"
    if _PICKLE.match(head) and tail.endswith(b"."):
        return "a Python pickle"
    if _is_safetensors(head, size):
        return "a safetensors file"
    if len(head) >= 16 and _TEXT.fullmatch(head):
        return "text; text to train on goes to data.path"
    return None


def _inflates(head: bytes) -> bool:
    try:
        zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head)
    except zlib.error:
        return False
    return True


def _is_safetensors(head: bytes, size: int) -> bool:
    length = int.from_bytes(head[:8], "little")
    return head[8:10] == b'{"' and 8 + length <= size
