"""Checksums of the files that decide a run's bytes: JSON objects carry their own, and
``inputs.json`` has those of a run directory's small files.

They detect damage and edits by hand, not forgery: anyone able to write a checksum can write another
one. Token files have checksums by the chunk (:mod:`penstock.models.data.chunks`). Blocks of saved
states have theirs in the manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.host.errors import StateError

CHECKSUM = "checksum"
"""Key of an object's own checksum."""

CHECKSUMS = "inputs.json"
FORMAT = 1

MADE = ("table.json", "model/config.json", "data/meta.json")
"""Files that follow from the run's inputs and are made once."""

CONSTANTS = "model/constants.safetensors"
"""Made once, too, for models that have any: :mod:`penstock.models.checkpoints.constants`."""

ADAPTER = "model/adapter.json"
"""Settings of the adapter that a run starts with: :mod:`penstock.models.adapters.files`."""

CHECKED_FILES = (*MADE, CONSTANTS, ADAPTER, "resolved.yaml", "plan.json", "numerics.json")
"""All files with recorded checksums; the last three are written at every start."""


def with_checksum(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object with its checksum as last field."""
    return {**fields, CHECKSUM: _checksum(fields)}


def check_object(fields: Mapping[str, Any], source: str) -> bool:
    """Returns whether the object has a checksum; older Penstocks wrote none.

    Raises:
        StateError: it has one that is not its own; names ``source``.
    """
    if CHECKSUM not in fields:
        return False
    if fields[CHECKSUM] != _checksum(fields):
        raise StateError(
            f"{source}: its checksum does not match what it says: it is damaged or was edited;"
            " restore it as Penstock wrote it"
        )
    return True


def checksums_text(run_dir: Path, fixed: Mapping[str, Any]) -> str:
    """Returns the content of ``inputs.json``: checksums of the existing files of
    :data:`CHECKED_FILES`, and values of the keys that a resume must not change.
    """
    files = {
        name: hashlib.sha256((run_dir / name).read_bytes()).hexdigest()
        for name in CHECKED_FILES
        if (run_dir / name).is_file()
    }
    fields = with_checksum({"format": FORMAT, "files": files, "fixed": dict(fixed)})
    return json.dumps(fields, indent=1)


def recorded_values(run_dir: Path) -> Mapping[str, Any] | None:
    """Returns the ``fixed`` values of ``inputs.json``; None where there is no such file.

    Raises:
        StateError: ``inputs.json`` is damaged.
    """
    fields = _read(run_dir)
    return None if fields is None else fields["fixed"]


def checksums_digest(run_dir: Path) -> str | None:
    """Returns a checksum (64 hexadecimal digits) of ``inputs.json``, and so of all that was
    prepared for a start; None where there is no such file.
    """
    try:
        return hashlib.sha256((run_dir / CHECKSUMS).read_bytes()).hexdigest()
    except OSError:
        return None


def check_checksum(run_dir: Path, name: str, content: bytes) -> None:
    """Compares the content of ``RUN_DIR/name`` with its checksum, if one is recorded.

    Raises:
        StateError: the content differs from the last start; the message names a remedy.
    """
    fields = _read(run_dir)
    if fields is None:
        return
    expected = fields["files"].get(name)
    if expected is None or hashlib.sha256(content).hexdigest() == expected:
        return
    raise StateError(
        f"{run_dir / name}: is not what it was when the run was started: it is damaged or was"
        f" edited. {_REMEDIES.get(name, _REMEDY)}"
    )


def read_checked(run_dir: Path, name: str) -> bytes:
    """Returns the content of ``RUN_DIR/name``, checked.

    Raises:
        StateError: see :func:`check_checksum`.
    """
    content = (run_dir / name).read_bytes()
    try:
        check_checksum(run_dir, name, content)
    except StateError:
        # The checksum may be older than a start that has just replaced it: read both again.
        content = (run_dir / name).read_bytes()
        check_checksum(run_dir, name, content)
    return content


_REMEDY = "Restore it; or delete it and start again, which makes it from the run's inputs"
_REMEDIES = {
    "resolved.yaml": "Restore it, and make changes in your own configuration or with --set; the"
    " next penstock train writes a new one",
    "plan.json": "The next penstock train writes a new one",
    "numerics.json": "The next penstock train writes a new one",
}


def _read(run_dir: Path) -> dict[str, Any] | None:
    path = run_dir / CHECKSUMS
    try:
        fields = json.loads(path.read_bytes())
        file_format = fields["format"]
        if file_format != FORMAT:
            raise StateError(f"{path}: format {file_format!r}, this Penstock reads {FORMAT}")
        if not check_object(fields, str(path)):
            raise StateError(f"{path}: has no checksum: it is damaged or was edited")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path}: cannot read it: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(f"{path}: is damaged: {error!r}; restore or delete it") from error
    return dict(fields)


def _checksum(fields: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in fields.items() if key != CHECKSUM}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
