"""Pickles and ``torch.save`` files of other trainers, read without running their code.

The pickle goes through :mod:`~penstock.models.exchange.unpickler`. A tensor becomes a
:class:`PickledTensor`: its place in the file, which ``load`` maps. So a file of any size takes
memory for its names alone. A needed value is checked with :func:`expect`.
"""

from __future__ import annotations

import math
import mmap
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import SEEK_CUR, SEEK_END, SEEK_SET
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar

import torch

from penstock.host.errors import StateError
from penstock.host.files import is_file
from penstock.models.exchange.unpickler import (
    CONTAINERS,
    MAX_PICKLE_BYTES,
    Constructor,
    PickleError,
    StandIn,
    Unpickler,
)

MAX_DIRECTORY_BYTES = 16 * 2**20
"""Longest directory of a zip file: about 200,000 tensors."""

_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of a file of torch before 1.6: the pickle of a magic number."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Signature, length of the name and length of the extra field of an entry of a zip file."""


@dataclass(slots=True, kw_only=True)
class _Storage:
    """Numbers of one or several tensors, in a row in the file from ``start``. ``checksum`` 0: torch
    wrote none.
    """

    path: Path
    dtype: torch.dtype
    start: int
    num_bytes: int
    checksum: int
    is_verified: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledTensor:
    """A tensor in a file of ``torch.save``. ``offset`` and ``stride`` count elements of the
    storage.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: _Storage = field(repr=False)

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return self.num_elements * self.dtype.itemsize

    @property
    def path(self) -> Path:
        """The file of the numbers."""
        return self.storage.path

    def load(self) -> torch.Tensor:
        """Returns the tensor over the mapped file, which must not be written to. The first load
        of a storage compares its checksum.

        Raises:
            StateError: the file has changed, or its checksum differs.
        """
        if not self.num_elements:
            return torch.empty(self.shape, dtype=self.dtype)
        storage, size = self.storage, self.dtype.itemsize
        if not storage.is_verified:
            _verify(storage)
            storage.is_verified = True
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        start = storage.start + self.offset * size
        mapped, skipped = _mapped(storage.path, start, (last + 1) * size)
        with warnings.catch_warnings():
            # The mapping is read-only, as a private writable one would count as this process's
            # memory. torch cannot know, and warns.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(mapped, dtype=self.dtype, count=last + 1, offset=skipped)
        return flat.as_strided(self.shape, self.stride)


def _mapped(path: Path, start: int, num_bytes: int) -> tuple[mmap.mmap, int]:
    """Maps bytes of a file; returns the mapping, and the bytes before ``start`` in it."""
    skipped = start % mmap.ALLOCATIONGRANULARITY
    try:
        with path.open("rb") as file:
            length = num_bytes + skipped
            mapped = mmap.mmap(
                file.fileno(), length, offset=start - skipped, access=mmap.ACCESS_READ
            )
    except (OSError, ValueError) as error:  # ValueError: the file is shorter
        raise StateError(f"{path}: has changed since it was opened ({error})") from error
    return mapped, skipped


def _verify(storage: _Storage) -> None:
    if not storage.checksum:
        return
    mapped, skipped = _mapped(storage.path, storage.start, storage.num_bytes)
    with mapped, memoryview(mapped) as view:
        checksum = zlib.crc32(view[skipped:])
    if checksum != storage.checksum:
        raise StateError(f"{storage.path}: is damaged: a tensor's checksum differs; copy it again")


_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        name: getattr(torch, name)
        for name in (
            *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
            *("int64", "int32", "int16", "int8", "uint8", "bool"),
        )
    }
)
_STORAGES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "torch.DoubleStorage": torch.float64,
        "torch.FloatStorage": torch.float32,
        "torch.HalfStorage": torch.float16,
        "torch.BFloat16Storage": torch.bfloat16,
        "torch.LongStorage": torch.int64,
        "torch.IntStorage": torch.int32,
        "torch.ShortStorage": torch.int16,
        "torch.CharStorage": torch.int8,
        "torch.ByteStorage": torch.uint8,
        "torch.BoolStorage": torch.bool,
        "torch.UntypedStorage": torch.uint8,
        "torch.storage.UntypedStorage": torch.uint8,
    }
)
"""Classes of storages, and types of their elements."""


def _ints(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > 64:
        raise PickleError("a tensor has sizes that are no list")
    if not all(type(number) is int and number.bit_length() < 64 for number in value):
        raise PickleError("a tensor has sizes that are no integers")
    return tuple(value)


def _tensor(args: tuple[Any, ...]) -> PickledTensor | StandIn:
    """Returns the tensor of ``_rebuild_tensor_v2``, or of ``_rebuild_tensor_v3`` with a dtype."""
    if len(args) < 4 or not isinstance(args[0], _Storage):
        raise PickleError("a tensor has no storage")
    storage, offset, shape, stride = args[0], args[1], _ints(args[2]), _ints(args[3])
    dtype = args[6] if len(args) > 6 and isinstance(args[6], torch.dtype) else storage.dtype
    (offset,) = _ints((offset,))
    if len(shape) != len(stride) or min((offset, *shape, *stride)) < 0:
        raise PickleError("a tensor's sizes and strides do not match")
    last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    elements = math.prod(shape)
    room = storage.num_bytes // dtype.itemsize
    if elements and (offset + last >= room or elements > room):
        raise PickleError("a tensor is larger than its storage")
    return PickledTensor(dtype=dtype, shape=shape, stride=stride, offset=offset, storage=storage)


def _parameter(args: tuple[Any, ...]) -> Any:
    if not args:
        raise PickleError("a parameter has no tensor")
    return args[0]


def _tensor_with_attributes(args: tuple[Any, ...]) -> Any:
    """Returns the tensor of ``(function, class, arguments, attributes)`` without attributes."""
    if len(args) == 4 and isinstance(args[0], StandIn) and isinstance(args[1], StandIn):
        if args[0].args is None and args[1].name in _CLASSES and isinstance(args[2], tuple):
            if args[0].name in (
                "torch._utils._rebuild_tensor_v2",
                "torch._utils._rebuild_parameter",
            ):
                return _CONSTRUCTORS[args[0].name](args[2])
    return StandIn("torch._tensor._rebuild_from_type_v2", args)


_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter")
_CONSTRUCTORS: Mapping[str, Constructor] = MappingProxyType(
    {
        **CONTAINERS,
        "torch.Size": lambda args: _ints(args[0]) if args else (),
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor,
        "torch._tensor._rebuild_from_type_v2": _tensor_with_attributes,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
    }
)
_VALUES: Mapping[str, torch.dtype] = MappingProxyType(
    {f"torch.{name}": dtype for name, dtype in _DTYPES.items()}
)


class _Part:
    """A part of a file as a file, with reads of a bounded size."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._position = 0

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns the position in the part."""
        return self._position

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """Moves the position, as of a file."""
        base = {SEEK_SET: 0, SEEK_CUR: self._position, SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a position before the start")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Returns the next bytes.

        Raises:
            PickleError: more than :data:`MAX_DIRECTORY_BYTES` are asked for.
        """
        left = max(0, self._length - self._position)
        size = left if size < 0 else min(size, left)
        if size > MAX_DIRECTORY_BYTES:
            raise PickleError("its directory is too long")
        self._file.seek(self._offset + self._position)
        data = self._file.read(size)
        self._position += len(data)
        return data


class _Archive:
    """A zip file of ``torch.save``."""

    def __init__(self, path: Path, file: BinaryIO, offset: int, length: int) -> None:
        self._path, self._file = path, file
        self._offset, self._length = offset, length
        with zipfile.ZipFile(_Part(file, offset, length)) as archive:
            self._entries = {
                entry.filename.partition("/")[2]: entry for entry in archive.infolist()
            }
        if sum(entry.compress_size for entry in self._entries.values()) > length:
            raise PickleError("entries of its directory overlap")
        self._storages: dict[str, _Storage] = {}

    def load(self) -> Any:
        """Returns the value of the archive's pickle.

        Raises:
            PickleError: the archive or its pickle is damaged.
        """
        order = self._entries.get("byteorder")
        if order is not None and self._content(order) != b"little":
            raise PickleError("its numbers are not in little-endian order")
        if "data.pkl" not in self._entries:
            raise PickleError("has no data.pkl; it is no file of torch.save")
        data = self._content(self._entries["data.pkl"])
        return Unpickler(_CONSTRUCTORS, _VALUES, self._storage).load(data)

    def _start(self, entry: zipfile.ZipInfo) -> int:
        """Returns the entry's first byte in the file."""
        self._file.seek(self._offset + entry.header_offset)
        header = self._file.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
            raise PickleError("an entry of its directory is damaged")
        _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        start = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise PickleError("an entry is compressed", "save it with torch.save, uncompressed")
        if start + entry.file_size > self._length:
            raise PickleError("it is truncated")
        return int(self._offset + start)

    def _content(self, entry: zipfile.ZipInfo) -> bytes:
        start = self._start(entry)
        if entry.file_size > MAX_PICKLE_BYTES:
            raise PickleError(f"its pickle is longer than {MAX_PICKLE_BYTES >> 20} MiB")
        self._file.seek(start)
        data = self._file.read(entry.file_size)
        if entry.CRC and zlib.crc32(data) != entry.CRC:
            raise PickleError(f"the checksum of its entry {entry.filename!r} differs")
        return data

    def _storage(self, identifier: Any) -> _Storage:
        """Returns the storage of ``("storage", class, key, device, elements)``."""
        if not isinstance(identifier, tuple) or len(identifier) < 5 or identifier[0] != "storage":
            raise PickleError("its pickle has an unknown persistent identifier")
        _, kind, key, _, elements = identifier[:5]
        if not isinstance(kind, StandIn):
            raise PickleError("a tensor's storage has no class")
        if kind.name not in _STORAGES:
            shown = kind.name[:100]
            raise PickleError(f"a tensor's numbers are of the class {shown}", "save them in fp32")
        entry = self._entries.get(f"data/{key}") if isinstance(key, str) else None
        if entry is None:
            raise PickleError("a tensor's numbers are missing")
        dtype = _STORAGES[kind.name]
        if type(elements) is not int or not 0 <= elements * dtype.itemsize <= entry.file_size:
            raise PickleError("a tensor's storage is larger than its numbers")
        if key not in self._storages:
            self._storages[key] = _Storage(
                path=self._path,
                dtype=dtype,
                start=self._start(entry),
                num_bytes=entry.file_size,
                checksum=entry.CRC,
            )
        if self._storages[key].dtype is not dtype:
            raise PickleError("a tensor's storage has two types")
        return self._storages[key]


@contextmanager
def _opened(path: Path, offset: int, length: int | None) -> Iterator[tuple[BinaryIO, int]]:
    """Yields a file and the length of its part; all faults become StateErrors with its name."""
    is_file(path)  # to open a FIFO would wait; open() reports a missing file
    try:
        with path.open("rb") as file:
            rest = file.seek(0, SEEK_END) - offset
            length = rest if length is None else length
            if offset < 0 or length < 0 or rest < length:
                raise PickleError("it is truncated")
            file.seek(offset)
            yield file, length
    except PickleError as error:
        raise StateError(f"{path}: {error}; {error.remedy}") from error
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise StateError(f"{path}: cannot be read ({error}); copy the checkpoint again") from error


def load_torch(path: Path, *, offset: int = 0, length: int | None = None) -> Any:
    """Returns the value of a file of ``torch.save``, or of the part of it from ``offset``.

    Tensors are :class:`PickledTensor`; objects of other classes are :class:`StandIn`.

    Raises:
        StateError: the file is missing, damaged, or of torch before 1.6; names it.
    """
    with _opened(path, offset, length) as (file, size):
        if file.read(len(_LEGACY)) == _LEGACY:
            raise StateError(
                f"{path}: is a file of torch before 1.6; load it there with torch.load, and save"
                " it again with torch.save"
            )
        return _Archive(path, file, offset, size).load()


def load_pickle(path: Path) -> Any:
    """Returns the value of a plain pickle, such as DCP's ``.metadata``.

    Raises:
        StateError: the file is missing or damaged; names it.
    """
    with _opened(path, 0, None) as (file, size):
        if size > MAX_PICKLE_BYTES:
            raise PickleError(f"its pickle is longer than {MAX_PICKLE_BYTES >> 20} MiB")
        return Unpickler(_CONSTRUCTORS, _VALUES, _no_storage).load(file.read(size))


def _no_storage(identifier: Any) -> Any:
    raise PickleError("its pickle has a persistent identifier, and no file of tensors")


Expected = TypeVar("Expected")
_NAMES: Mapping[type, str] = MappingProxyType({PickledTensor: "a tensor"})
_MOST_BITS = 1024
"""Bits of an integer that has no float."""


def expect(value: Any, kind: type[Expected], path: Path, name: str) -> Expected:
    """Returns a needed value of a file if it is of class ``kind``. An int counts as a float.

    Raises:
        StateError: the value is of another class; names the file and the value.
    """
    if kind is float and type(value) is int and value.bit_length() < _MOST_BITS:
        value = float(value)
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    if isinstance(value, StandIn):
        shown = f"an object of the class {value.name[:100]}, which Penstock does not run"
    else:
        shown = f"of type {type(value).__name__}"
    needed = _NAMES.get(kind, kind.__name__)
    raise StateError(
        f"{path}: {name} is {shown}, in place of {needed}; save the checkpoint with plain tensors"
        " and numbers"
    )


def expect_items(value: Any, kind: type[Expected], path: Path, name: str) -> Mapping[str, Expected]:
    """Returns a needed dictionary with texts as keys and values of class ``kind``.

    Raises:
        StateError: as :func:`expect`.
    """
    items: dict[Any, Any] = expect(value, dict, path, name)
    return {
        expect(key, str, path, f"a key of {name}"): expect(item, kind, path, f"{name}[{key!r}]")
        for key, item in items.items()
    }


def expect_list(value: Any, path: Path, name: str) -> Sequence[Any]:
    """Returns a needed list or tuple.

    Raises:
        StateError: as :func:`expect`.
    """
    return value if isinstance(value, tuple) else expect(value, list, path, name)
