"""Private file systems that faults can fill: a disk for the run, and /dev/shm.

Only root may mount. Only this process and its children see the mounts, which end with the last of
these processes.
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
        """Fills the file system."""
        with (self.path / _FILLER).open("ab", buffering=0) as file:
            while (room := self.free_bytes()) > 0:
                try:
                    # Allocated, not written: writing gigabytes would take longer than the fault.
                    os.posix_fallocate(file.fileno(), file.tell(), room)
                    file.seek(0, os.SEEK_END)
                except OSError:
                    try:
                        file.write(bytes(min(room, _PIECE_BYTES)))
                    except OSError:
                        return  # another process took the rest

    def clear(self) -> None:
        """Frees the space."""
        (self.path / _FILLER).unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Returns the free bytes."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize


def may_mount() -> bool:
    """Returns whether :func:`own_disks` can work for this user."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


def own_disks(mount: Path, disk_bytes: int, shm_bytes: int) -> tuple[Disk, Disk]:
    """Mounts a private disk at ``mount`` and a private /dev/shm. Must run before this process has
    threads or children.

    Raises:
        ConfigError: mounting is not permitted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise ConfigError(
            f"--kinds disk,shm: private mounts are not allowed"
            f" ({os.strerror(ctypes.get_errno())}); leave out these kinds"
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
            f"--kinds disk,shm: mount {' '.join(words)}: {done.stderr.strip()}; leave out these"
            " kinds"
        )
