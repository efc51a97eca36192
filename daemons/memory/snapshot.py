"""Saved states: one safetensors file a block and a manifest. Checking, reading, comparing.

``block-%04d.safetensors`` holds, for the tensors the block owns: ``<name>`` (fp32 master, joined if
memory has it in halves), ``<array>.<name>`` (state arrays, fp32) and ``frozen.<name>`` (frozen
tensors in the weight dtype), all without padding. The scheduler writes ``manifest.json`` last and
renames the directory; memoryd writes the files of the blocks its node owns
(:mod:`penstock.daemons.memory.saving`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.daemons.memory.tensorfile import (
    CancelledError,
    DamagedError,
    TensorBytes,
    TensorPlace,
    read_header,
    read_into,
    sha256_of,
)
from penstock.host import world
from penstock.host.cgroup import usable_cpus
from penstock.host.errors import StateError
from penstock.protocol.run.checksums import check_object
from penstock.shm.memory import Halves, NodeMemory
from penstock.shm.table import BlockSpec, BlockTable, DType

MANIFEST_FORMAT = 1
MANIFEST_NAME = "manifest.json"
MAX_THREADS = 4
HEADER_BYTES = 128
"""Bytes that a tensor takes in the header of its file. An estimate."""

T = TypeVar("T")
_log = logging.getLogger(__name__)

_FILE_DTYPES = MappingProxyType({DType.FP32: "F32", DType.BF16: "BF16", DType.FP16: "F16"})
_NUMPY_DTYPES = MappingProxyType({"F32": np.float32, "BF16": np.uint16, "F16": np.float16})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Size and checksum of one file of a saved state."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """``manifest.json``. ``scheduler`` is what the scheduler needs to go on from this state.
    ``numerics``: digest of the recipe of its last step; empty in manifests of an older Penstock.
    """

    run_id: str
    version: int
    table_digest: str
    files: Mapping[str, FileEntry]
    scheduler: Mapping[str, Any]
    numerics: str = ""


def block_file(block: int) -> str:
    """Returns the file name of a block."""
    return f"block-{block:04d}.safetensors"


def block_tensors(memory: NodeMemory, block: BlockSpec, version: int) -> tuple[TensorBytes, ...]:
    """Returns the tensors of an owned block's file, for a block with state at ``version``, as views
    of the node's memory.
    """
    table, copy = memory.spec.table, memory.state_copy(block.index, version)
    tensors: list[TensorBytes] = []
    arrays: list[tuple[str, memoryview | Halves]] = [
        ("", memory.halves(block.index, version))
        if memory.split_master
        else ("", memory.raw((block.index, "master", copy, 0)))
    ]
    arrays += [
        (f"{name}.", memory.raw((block.index, name, copy, 0))) for name in table.state_arrays
    ]
    for prefix, array in arrays:
        tensors += _cut(array, block, trainable=True, prefix=prefix, dtype=DType.FP32)
    raw = memory.raw((block.index, "frozen", 0, 0))
    tensors += _cut(raw, block, trainable=False, prefix="frozen.", dtype=table.weight_dtype)
    return tuple(tensors)


def saved_bytes(table: BlockTable) -> int:
    """Returns the bytes on disk of a saved state of a model, on all nodes together. Names and
    shapes in the files' headers are counted with :data:`HEADER_BYTES`.
    """
    arrays = 1 + len(table.state_arrays)
    total = 0
    for tensor in (tensor for block in table.blocks for tensor in block.tensors):
        item_bytes = 4 * arrays if tensor.trainable else table.weight_dtype.itemsize
        headers = arrays if tensor.trainable else 1
        total += tensor.num_elements * item_bytes + HEADER_BYTES * headers
    return total


def read_manifest(directory: Path) -> Manifest:
    """Reads and checks the manifest of a saved state.

    Raises:
        DamagedError: missing or damaged; names the file.
        StateError: of another format.
    """
    path = directory / MANIFEST_NAME
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        format_number = fields["format"]
        if format_number != MANIFEST_FORMAT:
            raise StateError(
                f"{path}: format {format_number!r}, this Penstock reads {MANIFEST_FORMAT}"
            )
        if not _has_checksum(fields, path):
            _log.warning(
                "%s has no checksum of its own (saved by an older Penstock): the position in the"
                " data is used unchecked",
                path,
            )
        files = {
            _file_name(name): FileEntry(
                num_bytes=_count(entry["bytes"]), sha256=str(entry["sha256"])
            )
            for name, entry in fields["files"].items()
        }
        return Manifest(
            run_id=str(fields["run_id"]),
            version=_count(fields["version"]),
            table_digest=str(fields["table_digest"]),
            files=files,
            scheduler=dict(fields["scheduler"]),
            numerics=str(fields.get("numerics", "")),
        )
    except OSError as error:
        raise DamagedError(f"{path}: cannot read it: {error}; is the state complete?") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(
            f"{path}: the manifest is damaged: {type(error).__name__}: {error}"
        ) from error


def check(
    memory: NodeMemory, directory: Path, version: int, cancelled: Callable[[], bool]
) -> dict[int, Mapping[str, TensorPlace]]:
    """Verifies all of the node's blocks in a saved state before any byte of memory changes.

    Returns, per owned block, the places of its tensors.

    Raises:
        StateError: naming the file and what is wrong with it.
        CancelledError: on request.
    """
    manifest = read_manifest(directory)
    if manifest.version != version:
        raise StateError(
            f"{directory / MANIFEST_NAME}: is of version {manifest.version}, expected {version}"
        )
    specs = memory.spec.table.blocks

    def check_block(block: int, stopped: Callable[[], bool]) -> Mapping[str, TensorPlace]:
        path = directory / block_file(block)
        entry = manifest.files.get(path.name)
        if entry is None:
            raise DamagedError(f"{directory / MANIFEST_NAME}: lists no {path.name}")
        _check_size(path, entry)
        places = read_header(path)
        _check_tensors(path, places, block_tensors(memory, specs[block], version))
        if sha256_of(path, stopped) != entry.sha256:
            raise DamagedError(f"{path}: its checksum does not match the manifest: damaged")
        return places

    blocks = memory.owned_blocks()
    return dict(zip(blocks, in_parallel(blocks, check_block, cancelled), strict=True))


def load_block(
    memory: NodeMemory,
    directory: Path,
    block: int,
    version: int,
    places: Mapping[str, TensorPlace],
) -> None:
    """Copies the checked file of a block at ``version`` into memory.

    Raises:
        StateError: the file changed since it was checked.
    """
    path = directory / block_file(block)
    try:
        with path.open("rb", buffering=0) as file:
            for tensor in block_tensors(memory, memory.spec.table.blocks[block], version):
                read_into(file, places[tensor.name], tensor.data)
    except (OSError, EOFError) as error:
        raise StateError(f"{path}: {error}; did it change while it was read?") from error


def read_block(directory: Path, block: BlockSpec) -> dict[str, npt.NDArray[Any]]:
    """Returns all tensors of a block's file by key; bf16 as uint16 bits.

    Raises:
        StateError: missing, cut short, or without a tensor that the block has.
    """
    path = directory / block_file(block.index)
    places = read_header(path)
    for tensor in block.tensors:
        key = tensor.name if tensor.trainable else f"frozen.{tensor.name}"
        if key not in places or places[key].shape != tensor.shape:
            raise StateError(f"{path}: lacks {key!r} of shape {list(tensor.shape)}")
    arrays: dict[str, npt.NDArray[Any]] = {}
    with path.open("rb", buffering=0) as file:
        for name, place in places.items():
            content = bytearray(place.num_bytes)
            try:
                read_into(file, place, memoryview(content))
            except EOFError as error:
                raise StateError(f"{path}: {error}") from error
            array = np.frombuffer(content, _NUMPY_DTYPES[place.dtype])
            arrays[name] = array.reshape(place.shape)
    return arrays


def compare(left: Path, right: Path, blocks: Iterable[BlockSpec]) -> tuple[str, ...]:
    """Returns the names (``block/key``) of tensors that two saved states have in different bytes,
    or that only one of them has.
    """
    differing: list[str] = []
    for block in blocks:
        one, other = read_block(left, block), read_block(right, block)
        for key in sorted(one.keys() | other.keys()):
            if key not in one or key not in other or one[key].tobytes() != other[key].tobytes():
                differing.append(f"{block.name}/{key}")
    return tuple(differing)


def in_parallel(
    blocks: Sequence[int],
    work: Callable[[int, Callable[[], bool]], T],
    cancelled: Callable[[], bool],
) -> list[T]:
    """Calls ``work(block, stopped)`` for all blocks on a few threads; returns results in order.

    Checksums limit both directions, at about 0.6 GB/s a core. The first error (in block order) is
    raised after all threads have ended; the other threads stop as if cancelled.
    """
    failed = world.event()

    def stopped() -> bool:
        return cancelled() or failed.is_set()

    def guarded(block: int) -> T:
        if stopped():
            raise CancelledError
        try:
            return work(block, stopped)
        except BaseException:
            failed.set()
            raise

    with world.executor(min(MAX_THREADS, usable_cpus()), "saved-state") as pool:
        futures = [pool.submit(guarded, block) for block in blocks]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    # A thread that stopped because another failed says CancelledError: that is not the reason.
    for error in sorted(errors, key=lambda error: isinstance(error, CancelledError)):
        raise error
    return [future.result() for future in futures]


def _cut(
    array: memoryview | Halves, block: BlockSpec, *, trainable: bool, prefix: str, dtype: DType
) -> list[TensorBytes]:
    def data(start: int, end: int) -> memoryview | Halves:
        if isinstance(array, Halves):
            return array.part(start, end)
        return array[start * dtype.itemsize : end * dtype.itemsize]

    return [
        TensorBytes(
            name=prefix + tensor.name,
            dtype=_FILE_DTYPES[dtype],
            shape=tensor.shape,
            data=data(tensor.offset, tensor.offset + tensor.num_elements),
        )
        for tensor in block.tensors
        if tensor.trainable is trainable
    ]


def _check_size(path: Path, entry: FileEntry) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DamagedError(f"{path}: cannot read it: {error}") from error
    if size != entry.num_bytes:
        raise DamagedError(f"{path}: has {size} bytes, the manifest says {entry.num_bytes}")


def _check_tensors(
    path: Path, places: Mapping[str, TensorPlace], expected: tuple[TensorBytes, ...]
) -> None:
    layouts = {tensor.name: (tensor.dtype, tensor.shape) for tensor in expected}
    odd = sorted(layouts.keys() ^ places.keys())
    if odd:
        where = "is not saved" if odd[0] in layouts else "is saved, but not in the model"
        raise StateError(
            f"{path}: saved from another model or optimizer: {odd[0]!r} {where}"
            f" ({len(odd)} such tensors)"
        )
    for name, (dtype, shape) in layouts.items():
        if (places[name].dtype, places[name].shape) != (dtype, shape):
            raise StateError(
                f"{path}: {name!r} is {places[name].dtype} {list(places[name].shape)}, the model"
                f" has {dtype} {list(shape)}"
            )


def _has_checksum(fields: Mapping[str, Any], path: Path) -> bool:
    try:
        return check_object(fields, str(path))
    except StateError as error:
        raise DamagedError(str(error)) from error


def _file_name(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not a file name")
    return name


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
