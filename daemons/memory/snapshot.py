"""Saved states: one safetensors file a block and a manifest. Checking, reading, comparing.

``block-%04d.safetensors`` holds, for the trained tensors the block owns: ``<name>`` (fp32 master,
joined if memory has it in halves) and ``<array>.<name>`` (state arrays, fp32). Frozen tensors are
``frozen.<name>`` in the weight dtype. They are in a file of the run's base
(:mod:`penstock.protocol.run.saved_base`) or, in states of format 1, in the block's file. All are
without padding. The scheduler writes ``manifest.json`` last and renames the directory; memoryd
writes the files of the blocks its node owns (:mod:`penstock.daemons.memory.saving`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.daemons.memory.bases.sharing import verified
from penstock.daemons.memory.machine.events import WrittenFile
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
from penstock.host.errors import StateError
from penstock.host.limits.cgroup import usable_cpus
from penstock.protocol.run.checksums import check_object
from penstock.protocol.run.rundir import SHARED
from penstock.protocol.run.saved_base import BASE, FILE_DTYPES, base_folder, base_paths, block_of
from penstock.shm.memory import Halves, NodeMemory
from penstock.shm.table import BlockSpec, BlockTable, DType

MANIFEST_FORMAT = 1
BASE_FORMAT = 2
"""Format of a manifest that lists files of the run's base. States without frozen tensors stay
readable for an older Penstock.
"""
MANIFEST_NAME = "manifest.json"
MAX_THREADS = 4
HEADER_BYTES = 128
"""Bytes that a tensor takes in the header of its file. An estimate."""

T = TypeVar("T")
_log = logging.getLogger(__name__)

_NUMPY_DTYPES = MappingProxyType({"F32": np.float32, "BF16": np.uint16, "F16": np.float16})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Size and checksum of one file of a saved state."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """``manifest.json``. ``scheduler`` is what the scheduler needs to go on from this state.
    ``base``: files with frozen tensors, in the run's base. ``numerics``: digest of the recipe of
    its last step; empty in manifests of an older Penstock.
    """

    run_id: str
    version: int
    table_digest: str
    files: Mapping[str, FileEntry]
    scheduler: Mapping[str, Any]
    numerics: str = ""
    base: Mapping[str, FileEntry] = field(default_factory=dict)

    def paths(self, directory: Path) -> dict[Path, FileEntry]:
        """Returns the files of the state in ``directory``, and those of its base."""
        folders = ((directory, self.files), (base_folder(directory), self.base))
        return {folder / name: listed[name] for folder, listed in folders for name in listed}


CheckedFiles = Mapping[Path, Mapping[str, TensorPlace]]
"""Verified files of a block, with the places of their tensors."""


def block_file(block: int) -> str:
    """Returns the file name of a block."""
    return f"block-{block:04d}.safetensors"


def block_tensors(memory: NodeMemory, block: BlockSpec, version: int) -> tuple[TensorBytes, ...]:
    """Returns the trained and the frozen tensors of an owned block."""
    return trained_tensors(memory, block, version) + frozen_tensors(memory, block)


def trained_tensors(
    memory: NodeMemory, block: BlockSpec, version: int, *, weights_only: bool = False
) -> tuple[TensorBytes, ...]:
    """Returns the trained tensors of an owned block with state at ``version``, as views of the
    node's memory. ``weights_only``: without the optimizer's arrays.
    """
    table, copy = memory.spec.table, memory.state_copy(block.index, version)
    tensors: list[TensorBytes] = []
    arrays: list[tuple[str, memoryview | Halves]] = [
        ("", memory.halves(block.index, version))
        if memory.split_master
        else ("", memory.raw((block.index, "master", copy, 0)))
    ]
    arrays += [
        (f"{name}.", memory.raw((block.index, name, copy, 0)))
        for name in table.state_arrays
        if not weights_only
    ]
    for prefix, array in arrays:
        tensors += _cut(array, block, trainable=True, prefix=prefix, dtype=DType.FP32)
    return tuple(tensors)


def frozen_tensors(memory: NodeMemory, block: BlockSpec) -> tuple[TensorBytes, ...]:
    """Returns the frozen tensors of an owned block, as views of the node's memory."""
    raw = memory.raw((block.index, "frozen", 0, 0))
    return frozen_tensors_in(raw, block, memory.spec.table.weight_dtype)


def frozen_tensors_in(raw: memoryview, block: BlockSpec, dtype: DType) -> tuple[TensorBytes, ...]:
    """Returns the frozen tensors of a block, as views of the bytes of its frozen array."""
    return tuple(_cut(raw, block, trainable=False, prefix="frozen.", dtype=dtype))


def saved_bytes(table: BlockTable) -> int:
    """Returns the bytes on disk of a saved state of a model, on all nodes together, without its
    base. Names and shapes in the files' headers are counted with :data:`HEADER_BYTES`.
    """
    arrays = 1 + len(table.state_arrays)
    tensors = (tensor for block in table.blocks for tensor in block.tensors if tensor.trainable)
    return sum(arrays * (4 * tensor.num_elements + HEADER_BYTES) for tensor in tensors)


def base_bytes(table: BlockTable) -> int:
    """Returns the bytes on disk of the frozen tensors of a model, which a run keeps once."""
    item_bytes = table.weight_dtype.itemsize
    tensors = (tensor for block in table.blocks for tensor in block.tensors if not tensor.trainable)
    return sum(item_bytes * tensor.num_elements + HEADER_BYTES for tensor in tensors)


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
        if format_number not in (MANIFEST_FORMAT, BASE_FORMAT):
            raise StateError(
                f"{path}: format {format_number!r}, this Penstock reads {MANIFEST_FORMAT} and"
                f" {BASE_FORMAT}"
            )
        if not _has_checksum(fields, path):
            _log.warning(
                "%s has no checksum of its own (saved by an older Penstock): the position in the"
                " data is used unchecked",
                path,
            )
        files = {_file_name(name): _entry(entry) for name, entry in fields["files"].items()}
        base = {name: _entry(entry) for name, entry in fields.get(BASE, {}).items()}
        for name, entry in base.items():
            block_of(name, entry.sha256)
        return Manifest(
            run_id=str(fields["run_id"]),
            version=_count(fields["version"]),
            table_digest=str(fields["table_digest"]),
            files=files,
            scheduler=dict(fields["scheduler"]),
            numerics=str(fields.get("numerics", "")),
            base=base,
        )
    except OSError as error:
        raise DamagedError(f"{path}: cannot read it: {error}; is the state complete?") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(
            f"{path}: the manifest is damaged: {type(error).__name__}: {error}"
        ) from error


def check(
    memory: NodeMemory, directory: Path, version: int, cancelled: Callable[[], bool]
) -> dict[int, CheckedFiles]:
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
    specs, listed = memory.spec.table.blocks, manifest.paths(directory)
    base = {block_of(name, entry.sha256): name for name, entry in manifest.base.items()}

    def check_block(block: int, stopped: Callable[[], bool]) -> CheckedFiles:
        path = directory / block_file(block)
        if path not in listed:
            raise DamagedError(f"{directory / MANIFEST_NAME}: lists no {path.name}")
        paths = [path]
        if block in base:
            paths.append(base_folder(directory) / base[block])
        for path in paths:
            check_size(path, listed[path])
        files = {path: read_header(path) for path in paths}
        _check_tensors(files, block_tensors(memory, specs[block], version))
        for path in paths:
            check_content(path, listed[path], stopped)
        return files

    blocks = memory.owned_blocks()
    return dict(zip(blocks, in_parallel(blocks, check_block, cancelled), strict=True))


def base_files(directory: Path) -> dict[int, WrittenFile]:
    """Returns the files of the base of a saved state, by block.

    Raises:
        StateError: the manifest is damaged.
    """
    return {
        block_of(name, entry.sha256): WrittenFile(
            name=name, num_bytes=entry.num_bytes, sha256=entry.sha256, base=True, reused=True
        )
        for name, entry in read_manifest(directory).base.items()
    }


def load_block(memory: NodeMemory, block: int, version: int, files: CheckedFiles) -> None:
    """Copies the checked files of a block at ``version`` into memory.

    Raises:
        StateError: a file changed since it was checked.
    """
    _load(files, block_tensors(memory, memory.spec.table.blocks[block], version))


def load_frozen(
    memory: NodeMemory, directory: Path, version: int, cancelled: Callable[[], bool]
) -> None:
    """Copies the frozen tensors of a saved state into memory, after a check of the node's files.

    Raises:
        StateError: naming the file and what is wrong with it.
        CancelledError: on request.
    """
    for block, files in check(memory, directory, version, cancelled).items():
        if cancelled():
            raise CancelledError
        with verified(memory, block):
            _load(files, frozen_tensors(memory, memory.spec.table.blocks[block]))


def _load(files: CheckedFiles, tensors: Iterable[TensorBytes]) -> None:
    buffers = {tensor.name: tensor.data for tensor in tensors}
    for path, places in files.items():
        try:
            with path.open("rb", buffering=0) as file:
                for name in (name for name in places if name in buffers):
                    read_into(file, places[name], buffers[name])
        except (OSError, EOFError) as error:
            raise StateError(f"{path}: {error}; did it change while it was read?") from error


def read_block(directory: Path, block: BlockSpec) -> dict[str, npt.NDArray[Any]]:
    """Returns all tensors of a block in a saved state by key; bf16 as uint16 bits.

    Raises:
        StateError: missing, cut short, or without a tensor that the block has.
    """
    path = directory / block_file(block.index)
    files = {path: read_header(path)}
    if block.frozen_elements and (base := base_paths(directory).get(block.index)) is not None:
        files[base] = read_header(base)
    shapes = {name: place.shape for places in files.values() for name, place in places.items()}
    for tensor in block.tensors:
        key = tensor.name if tensor.trainable else f"frozen.{tensor.name}"
        if shapes.get(key) != tensor.shape:
            raise StateError(f"{path}: lacks {key!r} of shape {list(tensor.shape)}")
    arrays: dict[str, npt.NDArray[Any]] = {}
    for path, places in files.items():
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
            dtype=FILE_DTYPES[dtype],
            shape=tensor.shape,
            data=data(tensor.offset, tensor.offset + tensor.num_elements),
        )
        for tensor in block.tensors
        if tensor.trainable is trainable
    ]


def check_size(path: Path, entry: FileEntry) -> None:
    """Checks that a file of a saved state is there in its size.

    Raises:
        DamagedError: the file is not; names the file.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        lack = f"the folder {BASE} belongs to the saved states" if path.parent.name == BASE else ""
        raise DamagedError(f"{path}: is not there; {lack or SHARED}") from error
    except OSError as error:
        raise DamagedError(f"{path}: cannot read it: {error}") from error
    if size != entry.num_bytes:
        raise DamagedError(f"{path}: has {size} bytes, the manifest says {entry.num_bytes}")


def check_content(path: Path, entry: FileEntry, cancelled: Callable[[], bool]) -> None:
    """Compares a file of a saved state with its checksum.

    Raises:
        DamagedError: the file changed.
        CancelledError: on request.
    """
    if sha256_of(path, cancelled) != entry.sha256:
        raise DamagedError(f"{path}: its checksum does not match the manifest: damaged")


def _check_tensors(files: CheckedFiles, expected: tuple[TensorBytes, ...]) -> None:
    places = {name: (path, of[name]) for path, of in files.items() for name in of}
    layouts = {tensor.name: (tensor.dtype, tensor.shape) for tensor in expected}
    odd = sorted(layouts.keys() ^ places.keys())
    if odd:
        path = next(iter(files)) if odd[0] in layouts else places[odd[0]][0]
        where = "is not saved" if odd[0] in layouts else "is saved, but not in the model"
        raise StateError(
            f"{path}: saved from another model or optimizer: {odd[0]!r} {where}"
            f" ({len(odd)} such tensors)"
        )
    for name, (dtype, shape) in layouts.items():
        path, place = places[name]
        if (place.dtype, place.shape) != (dtype, shape):
            raise StateError(
                f"{path}: {name!r} is {place.dtype} {list(place.shape)}, the model has {dtype}"
                f" {list(shape)}"
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


def _entry(fields: Mapping[str, Any]) -> FileEntry:
    return FileEntry(num_bytes=_count(fields["bytes"]), sha256=str(fields["sha256"]))


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
