"""Reading files that users name: configurations, plans, profiles, actions.

A name may lead to anything: a folder, an endless device, a pipe without a writer. Reading takes
bounded time and memory. The OSError's ``strerror`` names the kind of file.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from pathlib import Path
from typing import Any

PIPE_S = 5.0
"""Seconds within which a pipe must have been written to its end."""

_CHUNK_BYTES = 1 << 16

_POINTER, _POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024
"""First bytes of a file that Git LFS writes in the place of another file, and its largest size."""

_KINDS = (
    (stat.S_ISDIR, errno.EISDIR, "a folder"),
    (stat.S_ISCHR, errno.EINVAL, "a character device"),
    (stat.S_ISBLK, errno.EINVAL, "a block device"),
    (stat.S_ISSOCK, errno.EINVAL, "a socket"),
)

_MARKS = ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"), (b"\0\0\xfe\xff", "UTF-32"))
"""First bytes of a text in an encoding other than UTF-8."""


def read_bytes(path: Path, limit: int) -> bytes:
    """Returns the content of a regular file, or of a pipe that ends within :data:`PIPE_S`.

    Raises:
        OSError: the path cannot be opened, is neither, or has more than ``limit`` bytes.
    """
    # Asked before it is opened: opening alone does something to some devices.
    _check_kind(os.stat(path).st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        _check_kind(status.st_mode)
        if status.st_size > limit:
            raise _too_large(f"{status.st_size:,}", limit)
        content = _read(descriptor, limit + 1, pipe=stat.S_ISFIFO(status.st_mode))
    finally:
        os.close(descriptor)
    if len(content) > limit:
        raise _too_large("more", limit)
    return content


def read_text(path: Path, limit: int) -> str:
    """Returns the content of a file in UTF-8, without a byte order mark.

    Raises:
        OSError: as for :func:`read_bytes`, or the content is no UTF-8.
    """
    content = read_bytes(path, limit)
    encoding = next((name for mark, name in _MARKS if content.startswith(mark)), None)
    if encoding is not None:
        raise OSError(errno.EILSEQ, f"its text is {encoding}; save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise OSError(
            errno.EILSEQ,
            f"line {line}: byte 0x{content[error.start]:02x} at offset {error.start} is no UTF-8;"
            " save it as UTF-8 text",
        ) from error


def is_pointer(path: Path) -> bool:
    """Returns whether a file is a pointer of Git LFS in the place of the file."""
    try:
        if not path.is_file() or path.stat().st_size > _POINTER_BYTES:
            return False
        return path.read_bytes().startswith(_POINTER)
    except OSError:
        return False  # The read that needs the file reports this error.


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON; the ``object_pairs_hook`` of :func:`json.loads`.

    Raises:
        ValueError: a key is given twice.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        last = {key: number for number, (key, _) in enumerate(pairs)}
        twice = next(key for number, (key, _) in enumerate(pairs) if last[key] > number)
        raise ValueError(f"the key {twice[:80]!r} is given twice")
    return fields


def _check_kind(mode: int) -> None:
    for is_kind, number, words in _KINDS:
        if is_kind(mode):
            raise OSError(number, f"it is {words}, not a file")


def _too_large(size: str, limit: int) -> OSError:
    return OSError(errno.EFBIG, f"it has {size} bytes, and at most {limit:,} are read")


def _read(descriptor: int, limit: int, *, pipe: bool) -> bytes:
    """Returns up to ``limit`` bytes.

    Raises:
        OSError: reading fails, or a pipe does not end in time.
    """
    content = bytearray()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    deadline_s = time.monotonic() + PIPE_S
    while len(content) < limit:
        left_s = deadline_s - time.monotonic()
        # A pipe without a writer reads as empty: poll waits until there was one.
        if pipe and (left_s <= 0 or not poll.poll(left_s * 1000)):
            raise OSError(errno.ETIMEDOUT, f"it is a pipe without an end after {PIPE_S:g} s")
        chunk = os.read(descriptor, min(_CHUNK_BYTES, limit - len(content)))
        if not chunk:
            break
        content += chunk
    return bytes(content)
