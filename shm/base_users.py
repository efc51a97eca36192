"""The users of bases: control segments of this user that name them. The last user removes a base.

A base is removed under its exclusive lock, after all control segments were read. A new user names
the base before it takes a lock (:mod:`penstock.shm.bases`). So either the remover sees the name, or
the new user finds the file gone and makes another one.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from penstock.host import world
from penstock.host.trust import kind_of
from penstock.shm.bases import DIGEST_IN_NAME, BaseName, lock_alone, own_bases, remove_dead
from penstock.shm.control import ControlView, block_words_offset
from penstock.shm.inventory import control_names
from penstock.shm.layout import PAGE_BYTES
from penstock.shm.segment import (
    SegmentError,
    StrangeSegmentError,
    VersionMismatchError,
    exists,
    is_own,
    open_segment,
    path_of,
    status_of,
)

_PATIENCE_S = 1.0
"""Seconds for a process that holds the lock of a base while it reads control segments."""
_POLL_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseUse:
    """A base of this user. ``runs``: ids of the runs with memory that names the base. ``in_use``:
    a run names it, or a process has it locked.
    """

    digest: str
    name: str
    num_bytes: int
    runs: tuple[str, ...]
    in_use: bool
    filling: bool


def base_uses() -> list[BaseUse]:
    """Returns the bases of this user with their runs; incomplete files, too."""
    entries = own_bases()
    users = {} if not entries else users_of_bases()
    known = users or {}
    uses = []
    for entry in entries:
        runs = tuple(sorted(known.get(entry.digest, ())))
        # A file that is being filled may be named by a run of dead processes.
        named = users is None or (bool(runs) and not entry.filling)
        uses.append(
            BaseUse(
                digest=entry.digest,
                name=entry.name,
                num_bytes=entry.num_bytes,
                runs=runs,
                in_use=named or _is_locked(entry.name),
                filling=entry.filling,
            )
        )
    return uses


def sweep() -> list[str]:
    """Removes the bases of this user that no memory uses, and files of dead fillers. Returns their
    names.
    """
    entries = own_bases()
    if not entries:
        return []
    users = users_of_bases()
    return [entry.name for entry in entries if users is not None and _remove(entry, users)]


def users_of_bases(besides: str = "") -> Mapping[str, Collection[str]] | None:
    """Returns the runs of this user that name each base, by digest. None: some memory is of a newer
    Penstock, and its bases are not known. ``besides``: name of a control segment to leave out.
    """
    users: dict[str, set[str]] = {}
    for run_id, name in control_names():
        if name == besides:
            continue
        try:
            for _, digest in _named_in(run_id, name):
                users.setdefault(digest.hex(), set()).add(run_id)
        except VersionMismatchError:
            return None
        except SegmentError:
            continue  # gone, cut short, or no control segment
    return users


def remove_unusable(name: str, besides: str) -> bool:
    """Removes a file that has the name of a base and is none. Returns whether the name is free.
    ``besides``: the control segment of the memory that needs the base.

    A file of another user stays. So does a file that other memory names, or that a process uses.
    """
    status = status_of(name)
    if status is None:
        return True
    if status.st_uid != os.geteuid() or kind_of(status) == "folder":
        return False
    if not is_own(status):  # a link, or a file of another type, which has no lock
        os.unlink(path_of(name))
        return True
    descriptor = lock_alone(name)
    if descriptor is None:
        return not exists(name)
    try:
        match = DIGEST_IN_NAME.search(name)
        if match is not None and _is_named(match[0], besides):
            return False
        os.unlink(path_of(name))
    finally:
        os.close(descriptor)
    return True


def missing_bytes(sizes: Mapping[bytes, int]) -> int:
    """Returns the bytes of those bases that no file has room for yet. ``sizes``: of their files."""
    here = {entry.digest for entry in own_bases()}
    return sum(size for digest, size in sizes.items() if digest.hex() not in here)


def _named_in(run_id: str, name: str) -> tuple[tuple[int, bytes], ...]:
    descriptor = open_segment(name, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        page = os.pread(descriptor, PAGE_BYTES, 0)
        header = ControlView.open(memoryview(page), run_id=run_id, digest=None, size=size)
        start = block_words_offset(header.undo_bytes, 0)
        # The undo area is left out: its bytes are many, and say nothing here.
        content = bytearray(page) + bytearray(start - len(page))
        content += os.pread(descriptor, size - start, start)
    finally:
        os.close(descriptor)
    return ControlView(memoryview(content)).bases


def _remove(entry: BaseName, users: Mapping[str, Collection[str]]) -> bool:
    with suppress(StrangeSegmentError):
        if entry.filling:
            return remove_dead(entry.name)
    if users.get(entry.digest):
        return False
    deadline_s = world.monotonic() + _PATIENCE_S
    while (descriptor := lock_alone(entry.name)) is None:
        if not exists(entry.name) or _is_named(entry.digest) or world.monotonic() > deadline_s:
            return False
        world.sleep(_POLL_S)
    try:
        if _is_named(entry.digest):
            return False
        os.unlink(path_of(entry.name))
    finally:
        os.close(descriptor)
    return True


def _is_named(digest: str, besides: str = "") -> bool:
    users = users_of_bases(besides)
    return users is None or bool(users.get(digest))


def _is_locked(name: str) -> bool:
    descriptor = lock_alone(name)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False
