"""The identity of a run's frozen weights: which runs may share them, known before they are read.

The identity of a block covers names, shapes and type of its frozen tensors, and their source. The
source is a model folder or a seed. Files with weights in a folder count by their stamps
(:mod:`penstock.host.stamps`). A stamp is inode, size and times of change, or the content of a file
that is new or on a tmpfs. So a second run finds the weights without reading a file; a copy of a
folder is another source. Packages that convert or draw weights count with their versions.

A node notes its source as soon as its frozen weights are complete, in ``model/base-NODE.json``. A
resume from a saved state has these weights even if the folder has changed since.
"""

from __future__ import annotations

import hashlib
import json
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock.config.schema import Config
from penstock.host.errors import StateError
from penstock.host.files import DAMAGED, holds_text, parse_json, write_atomically
from penstock.host.stamps import stamps_of
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.bases import own_bases
from penstock.shm.memory import MemorySpec
from penstock.shm.table import BlockTable

CONVERSION = 1
"""Number of the way from a source to an array: to be raised when other bytes come of the same
source.
"""
WEIGHT_FILES = "weight_files"
"""Key of ``RUN_DIR/model/meta.json``: the files of ``model.path`` that hold the initial weights."""
FORMAT = 1
_SOURCE = re.compile("[0-9a-f]{64}", re.ASCII)


def expected_bases(run: RunDirectory, spec: MemorySpec) -> tuple[tuple[int, bytes], ...]:
    """Returns the block and the digest of each base that fresh memory of a node is to have. A node
    with frozen weights of its own has none.

    Raises:
        StateError: a file of the model cannot be examined.
    """
    source = _expected_source(run, run.config, spec.node_name)
    return () if source is None else bases_of(spec, source)


def present_bytes(run: RunDirectory, config: Config, node: str) -> int:
    """Returns the bytes of bases in /dev/shm that a start of the run would use.

    Raises:
        StateError: a file of the model cannot be examined.
    """
    source = _expected_source(run, config, node)
    if source is None:
        return 0
    blocks = range(len(run.table.blocks))
    digests = {base_digest(run.table, block, source).hex() for block in blocks}
    return sum(entry.num_bytes for entry in own_bases() if entry.digest in digests)


def current_source(run: RunDirectory, config: Config, as_of_s: float | None = None) -> str | None:
    """Returns the source of weights that a node reads or draws now; None if it is not known.
    ``as_of_s``: see :func:`penstock.host.stamps.stamps_of`.

    Raises:
        StateError: a file of the model cannot be examined.
    """
    made = [CONVERSION, hashlib.sha256(_config_file(run).read_bytes()).hexdigest()]
    made += [_version("transformers")]
    if config.model.path is None:
        return _digest([*made, "drawn", config.run.seed, _version("torch")])
    names = weight_files(run.path)
    if names is None:
        return None
    folder = config.model.path
    paths = [folder / name for name in ("config.json", *names)]
    try:
        return _digest([*made, "folder", list(names), stamps_of(paths, as_of_s)])
    except OSError as error:
        raise StateError(f"model.path = {str(folder)!r}: {error}") from error


def private_source(run: RunDirectory, node: str) -> str:
    """Returns the source of weights that no other run is known to have."""
    return _digest([CONVERSION, "run", run.run_id, node])


def recorded_source(run: RunDirectory, node: str) -> str | None:
    """Returns the source of the frozen weights that the run has; None if the run has no record."""
    place = run.path / "model" / f"base-{node}.json"
    for path in (place, *sorted((run.path / "model").glob("base-*.json"))):
        source = read_source(path)
        if source is not None:
            return source
    return None


def read_source(path: Path) -> str | None:
    """Returns the source in a record; None if the file is missing or damaged."""
    try:
        fields = parse_json(path.read_bytes())
        source = fields["source"]
    except (OSError, *DAMAGED):
        return None
    sound = fields.get("format") == FORMAT and isinstance(source, str) and _SOURCE.fullmatch(source)
    return source if sound else None


def record_source(run: RunDirectory, node: str, source: str) -> None:
    """Notes the source of the frozen weights that a node has."""
    path = run.path / "model" / f"base-{node}.json"
    text = json.dumps({"format": FORMAT, "source": source})
    if not holds_text(path, text):
        write_atomically(path, text)


def weight_files(run_dir: Path) -> tuple[str, ...] | None:
    """Returns the files that a run took from ``model.path`` when it was prepared; None where the
    run has no record of them.
    """
    try:
        files = parse_json((run_dir / "model" / "meta.json").read_bytes()).get(WEIGHT_FILES)
        return None if files is None else tuple(str(name) for name in files)
    except (OSError, *DAMAGED):
        return None


def bases_of(spec: MemorySpec, source: str) -> tuple[tuple[int, bytes], ...]:
    """Returns the block and the digest of each base of a node's memory."""
    return tuple((b, base_digest(spec.table, b, source)) for b in spec.frozen_places())


def base_digest(table: BlockTable, index: int, source: str) -> bytes:
    """Returns the digest of a block's base."""
    block = table.blocks[index]
    frozen = [[t.name, t.shape, t.offset] for t in block.tensors if not t.trainable]
    identity = [source, index, table.weight_dtype.value, frozen, block.frozen_elements]
    return bytes.fromhex(_digest(identity))


def _expected_source(run: RunDirectory, config: Config, node: str) -> str | None:
    frozen = any(block.frozen_elements for block in run.table.blocks)
    shares = config.memory.share_base == "auto" and not config.model.imports and frozen
    if not shares or not _config_file(run).is_file():
        return None
    source = recorded_source(run, node)
    if source is None and not _has_saved(run):
        return current_source(run, config)
    # Runs of an older Penstock have saved states and no record: their weights are their own.
    return source


def _has_saved(run: RunDirectory) -> bool:
    return any(run.state_dir.glob("step-*"))


def _config_file(run: RunDirectory) -> Path:
    return run.path / "model" / "config.json"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
