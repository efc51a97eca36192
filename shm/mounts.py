"""Mounts of file systems, as ``/proc/PID/mountinfo`` lists them (proc_pid_mountinfo(5))."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A mount: the folder ``root`` of a file system of type ``kind`` is seen at ``point``.

    ``options`` are the mount's, then the file system's own, which may say the same.
    """

    root: str
    point: str
    kind: str
    options: tuple[str, ...]


def parse_mounts(lines: Iterable[str]) -> list[Mount]:
    """Returns the mounts, in their order; lines of another form are left out."""
    mounts = []
    for line in lines:
        before, dash, after = line.partition(" - ")
        own, theirs = before.split(), after.split()
        if not dash or len(own) < 6 or not theirs:
            continue
        options = (text for field in (own[5], *theirs[2:]) for text in field.split(","))
        root, point = (_unescaped(word) for word in own[3:5])
        mounts.append(Mount(root=root, point=point, kind=theirs[0], options=tuple(options)))
    return mounts


def _unescaped(word: str) -> str:
    """Returns a path of mountinfo, where blanks are octal numbers."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), word)
