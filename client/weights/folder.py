"""The folder that gets a copy of weights: it appears whole, or takes the place of an older copy.

A copy is made in ``.DIR.NUMBER.weights/files``, and the command holds a lock in the folder above.
When all files are on disk, the folder is renamed, or exchanged with the older copy in one call.

Each copy has a note with its step and its files. A folder without the note, or with other files,
is not replaced. A process that has a file of the older copy open keeps reading it; files that the
process opens later are of the newer one. Where a copy has several weight files, their names contain
the step. So a reader of the older index finds either all of its files, or misses them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.host.errors import ConfigError
from penstock.host.files import (
    DAMAGED,
    exchange,
    follow_umask,
    is_locked,
    make_directory,
    parse_json,
    sync_directory,
    writing,
)

NOTE = "penstock_weights.json"
"""Name of a copy's note, which transformers and vLLM ignore."""

KIND = "weights of a Penstock run"
INDEX = "model.safetensors.index.json"
_FILES, _LOCK, _ENDING = "files", "lock", ".weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Content of :data:`NOTE`. ``files``: bytes of each file by its path in the folder."""

    run_id: str
    run_name: str
    step: int
    form: str
    dtype: str
    files: dict[str, int]

    def to_json(self) -> str:
        """Returns the text of the note."""
        fields = {
            "kind": KIND,
            "run_id": self.run_id,
            "run_name": self.run_name,
            "step": self.step,
            "format": self.form,
            "dtype": self.dtype,
            "files": self.files,
        }
        return json.dumps(fields, indent=1) + "\n"

    @classmethod
    def from_json(cls, content: bytes) -> Note:
        """Returns the note of a text.

        Raises:
            ValueError: the text is none of a note.
        """
        try:
            fields: dict[str, Any] = parse_json(content)
            if fields["kind"] != KIND or type(fields["step"]) is not int:
                raise ValueError("it is no note of a copy of weights")
            return cls(
                run_id=str(fields["run_id"]),
                run_name=str(fields["run_name"]),
                step=fields["step"],
                form=str(fields["format"]),
                dtype=str(fields["dtype"]),
                files={str(name): int(size) for name, size in fields["files"].items()},
            )
        except DAMAGED as error:
            raise ValueError(str(error)) from error


def older_copy(target: Path) -> Note | None:
    """Returns the note of the copy in a folder that may be replaced; None if nothing is there.

    Raises:
        ConfigError: something else is there, or files that the copy does not have.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    remedy = "give another folder, or move it away"
    if not target.is_dir():
        raise ConfigError(f"--to {target}: a file is there; {remedy}")
    try:
        note = Note.from_json((target / NOTE).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--to {target}: is not empty, and penstock weights did not write it (it has no"
            f" {NOTE}, or a damaged one); {remedy}"
        ) from error
    strange = sorted(listing(target).keys() - note.files.keys() - {NOTE})
    if strange:
        raise ConfigError(
            f"--to {target}: has {strange[0]!r}, which penstock weights did not write, and which a"
            f" newer copy would remove; {remedy}"
        )
    return note


def listing(folder: Path) -> dict[str, int]:
    """Returns the bytes of all files below a folder, by their paths in the folder."""
    return {
        str(path.relative_to(folder)): path.lstat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or not path.is_dir()
    }


@contextmanager
def unfinished(beside: Path) -> Iterator[Path]:
    """Yields an empty folder for a copy on the disk of ``beside``, and removes the folder at the
    end. Folders of commands that were killed are removed before.

    Raises:
        ConfigError: it cannot be made.
    """
    make_directory(beside.parent)
    _remove_left(beside)
    home = beside.with_name(f".{beside.name}.{secrets.token_hex(4)}{_ENDING}")
    make_directory(home)
    with writing(home, 0):
        lock = (home / _LOCK).open("wb")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            make_directory(home / _FILES)
            yield home / _FILES
        finally:
            # A memoryd may still write into a dropped copy, and make the removal incomplete.
            shutil.rmtree(home, ignore_errors=True)


def _remove_left(beside: Path) -> None:
    """Removes folders of copies that killed commands left."""
    for home in beside.parent.glob(f".{beside.name}.*{_ENDING}"):
        try:
            with (home / _LOCK).open("rb") as lock:
                left = not is_locked(lock.fileno())
        except OSError:
            continue  # its command has just begun
        if left:
            shutil.rmtree(home, ignore_errors=True)


def name_step(folder: Path, step: int) -> None:
    """Puts the step into the names of several weight files, and into their index."""
    path = folder / INDEX
    if not path.is_file():
        return
    index = json.loads(path.read_text(encoding="utf-8"))
    names = {
        name: name.replace("model-", f"model-step{step}-", 1)
        for name in set(index["weight_map"].values())
    }
    for name, renamed in names.items():
        (folder / name).rename(folder / renamed)
    index["weight_map"] = {tensor: names[name] for tensor, name in index["weight_map"].items()}
    path.write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")


def complete(folder: Path, target: Path, note: Note) -> None:
    """Forces a copy to disk, and makes it ``target``, or puts it in the place of an older copy.

    Raises:
        ConfigError: the file system cannot exchange two folders, or refuses.
    """
    with writing(folder, 0):
        (folder / NOTE).write_text(note.to_json(), encoding="utf-8")
        follow_umask(folder)
        for path in folder.rglob("*"):
            if path.is_dir():
                sync_directory(path)
                continue
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(folder)
    # Again: something may have come there while the copy was made.
    if older_copy(target) is None:
        with writing(target, 0):
            folder.rename(target)
            sync_directory(target.parent)
        return
    try:
        exchange(folder, target)
        sync_directory(target.parent)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise ConfigError(
                f"--to {target}: its file system cannot exchange two folders in one call; remove"
                " the folder first, or give a new one for each copy"
            ) from error
        raise ConfigError(f"--to {target}: {error.strerror or error}") from error
