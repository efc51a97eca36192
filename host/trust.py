"""Checks that a file is private, and printing of names that strangers chose.

Folders such as /dev/shm are open to every user of a machine. Any user may take any name at any
time, with a file of any type, so no name is trusted. :func:`open_own` checks the open descriptor,
since a name may lead elsewhere a moment later.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Collection
from pathlib import Path

FOR_OTHERS = 0o077
"""Permissions of group and others."""

_NO_LETTER = re.compile(r"[^ -~]")
"""Characters that may be unprintable: none of ASCII's letters and signs."""

_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFDIR: "folder",
    stat.S_IFSOCK: "socket",
    stat.S_IFIFO: "FIFO",
    stat.S_IFBLK: "block device",
    stat.S_IFCHR: "character device",
}


class UntrustedError(Exception):
    """A name leads to something else than a private file of this user; the message says to what."""


def open_own(
    path: Path,
    flags: int,
    *,
    mode: int = 0o600,
    owners: Collection[int] = (),
    forbidden: int = FOR_OTHERS,
) -> int:
    """Opens a file and returns its descriptor, once the file is known to be private.

    ``mode`` is for a file that this call creates. ``owners``: other users that may own the file.
    ``forbidden``: permissions that the file must not have.

    Raises:
        UntrustedError: the name leads to a link, a file of another type or owner, a file that
            others may open, or with two names.
    """
    try:
        # NONBLOCK: neither a FIFO without writers nor a stranger's lease may hold this process up.
        quick = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(path, flags | quick, mode)
    except OSError as error:
        reason = _objection_by_name(path, owners, forbidden)
        if reason:
            raise UntrustedError(f"{printable(path)} {reason}") from error
        raise
    try:
        reason = objection(os.fstat(descriptor), owners, forbidden)
        if reason:
            raise UntrustedError(f"{printable(path)} {reason}")
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def objection(
    status: os.stat_result, owners: Collection[int] = (), forbidden: int = FOR_OTHERS
) -> str:
    """Returns why a file is not private to this user, as the rest of a sentence; empty if it is."""
    if not stat.S_ISREG(status.st_mode):
        return f"is a {kind_of(status)} of {user_text(status.st_uid)}"
    if status.st_uid != os.geteuid() and status.st_uid not in owners:
        return f"belongs to {user_text(status.st_uid)}"
    mode = stat.S_IMODE(status.st_mode)
    if mode & forbidden:
        return f"has mode {mode:04o}, so that other users may open it"
    if status.st_nlink > 1:
        return f"has {status.st_nlink} names (hard links)"
    return ""


def owners_in(folder: Path) -> frozenset[int]:
    """Returns the other users that may own files in a folder of this user: root, and the owner of
    the folder. File servers may map all users to one.
    """
    return frozenset((0, os.stat(folder).st_uid))


def kind_of(status: os.stat_result) -> str:
    """Returns the kind of a file: ``file``, ``folder``, ``symbolic link`` and the like."""
    return _KINDS.get(stat.S_IFMT(status.st_mode), "file of an unknown type")


def user_name(uid: int) -> str:
    """Returns the name of a user; the number, if the user has none here."""
    try:
        return printable(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return str(uid)  # of a container, or of a user that was deleted


def user_text(uid: int) -> str:
    """Returns name and number of a user, for messages."""
    return f"user {user_name(uid)} (uid {uid})"


def printable(name: str | Path, kept: str = "") -> str:
    """Returns a name with every character escaped that a terminal might obey or cannot show, but
    for the characters ``kept``.
    """

    def shown(match: re.Match[str]) -> str:
        character = match[0]
        is_shown = character.isprintable() or character in kept
        return character if is_shown else character.encode("unicode_escape").decode()

    return _NO_LETTER.sub(shown, str(name))


def _objection_by_name(path: Path, owners: Collection[int], forbidden: int) -> str:
    try:
        return objection(os.lstat(path), owners, forbidden)
    except OSError:
        return ""
