"""File systems of this process's own, which can be filled: a disk for the run, and /dev/shm.

Only root may mount. The process and those that it starts see the mounts, others do not; they are
gone with the last of them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from penstock.host.errors import ConfigError
from penstock.shm.segment import SHM_ROOT

_CLONE_NEWNS = 0x00020000
_FILLER = "penstock-chaos-filler"
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A file system that can be filled."""

    path: Path

    def fill(self) -> None:
        """Takes all room."""
        with (self.path / _FILLER).open("ab", buffering=0) as file:
            while (room := self.free_bytes()) > 0:
                try:
                    # Reserved, not written: gigabytes would take longer than the fault.
                    os.posix_fallocate(file.fileno(), file.tell(), room)
                    file.seek(0, os.SEEK_END)
                except OSError:
                    try:
                        file.write(bytes(min(room, _PIECE_BYTES)))
                    except OSError:
                        return  # somebody else got the rest

    def clear(self) -> None:
        """Gives the room back."""
        (self.path / _FILLER).unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Returns how much room is left."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize


def may_mount() -> bool:
    """Returns whether :func:`own_disks` can work for this user."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


def own_disks(mount: Path, disk_bytes: int, shm_bytes: int) -> tuple[Disk, Disk]:
    """Gives this process a disk at ``mount`` and a /dev/shm of its own. To be called before it has
    threads or children.

    Raises:
        ConfigError: mounting is not permitted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise ConfigError(
            f"--kinds disk,shm: no mounts of one's own here ({os.strerror(ctypes.get_errno())});"
            " leave these kinds out"
        )
    mount.mkdir(parents=True, exist_ok=True)
    _mount("--make-rprivate", "/")
    for path, num_bytes in ((mount, disk_bytes), (SHM_ROOT, shm_bytes)):
        _mount("-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(path))
    return Disk(path=mount), Disk(path=SHM_ROOT)


def _mount(*words: str) -> None:
    done = subprocess.run(("mount", *words), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(
            f"--kinds disk,shm: mount {' '.join(words)}: {done.stderr.strip()}; leave these kinds"
            " out"
        )
