"""Names and places of a run's base: the frozen tensors, which no step changes.

``RUN_DIR/state/base/`` has a file ``block-BBBB-DIGEST.safetensors`` for each block with frozen
tensors. The digest is the start, 16 digits, of the file's SHA-256, so a file never changes.
Memoryd writes a base once for all saved states of a run. The manifest of each state lists the files
with sizes and checksums. No file of a base is removed.

Hard links in the folders of saved states would be another way. Some network file systems have
none, and ``cp -r`` or an upload of a run would make one copy for each state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.host.errors import StateError
from penstock.host.files import DAMAGED, parse_json
from penstock.shm.table import DType

BASE = "base"
"""Name of the folder, and of the field in a manifest."""

FILE_DTYPES = MappingProxyType({DType.FP32: "F32", DType.BF16: "BF16", DType.FP16: "F16"})
"""Names of types in the files of saved states, as safetensors has them."""

_DIGITS = 16
_NAME = re.compile(rf"block-(\d{{4,}})-([0-9a-f]{{{_DIGITS}}})\.safetensors")


def base_folder(state: Path) -> Path:
    """Returns the folder of the base that a saved state shares with the others of its run."""
    return state.parent / BASE


def base_file(block: int, sha256: str) -> str:
    """Returns the name of the file with a block's frozen tensors. ``sha256``: of the file."""
    return f"block-{block:04d}-{sha256[:_DIGITS]}.safetensors"


def block_of(name: str, sha256: str) -> int:
    """Returns the block of a file of a base.

    Raises:
        ValueError: no file of a base with this checksum has such a name.
    """
    match = _NAME.fullmatch(name)
    if match is None or not sha256.startswith(match[2]):
        raise ValueError(f"{name!r} is no name of a file with frozen tensors and SHA-256 {sha256}")
    return int(match[1])


def base_paths(state: Path) -> dict[int, Path]:
    """Returns the files of the base of a saved state by block; none where the state has all tensors
    in its own files.

    Raises:
        StateError: the manifest is damaged; names it.
    """
    path = state / "manifest.json"
    try:
        listed: dict[str, Any] = parse_json(path.read_bytes()).get(BASE, {})
        return {
            block_of(name, str(entry["sha256"])): base_folder(state) / name
            for name, entry in listed.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, *DAMAGED) as error:
        raise StateError(f"{path}: the manifest is damaged: {error}") from error


def file_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """Returns the start of a file of a saved state: the length of the header, and the header.
    ``tensors`` are names, types as safetensors names them, shapes and bytes, in the order of the
    file.
    """
    fields: dict[str, object] = {}
    position = 0
    for name, dtype, shape, num_bytes in tensors:
        end = position + num_bytes
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start 8-byte aligned, as the format asks
    return len(text).to_bytes(8, "little") + text
