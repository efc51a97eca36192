"""A file system of its own, of a few MiB, that a test fills and frees while a run is on it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_HOLD = 'mount -t tmpfs -o size="$1" tmpfs "$2" && echo mounted && exec cat'


@dataclass(frozen=True)
class SmallDisk:
    """A tmpfs that only one mount namespace has. ``mount``: where it is for those inside it;
    ``seen``: the same directory for this process. It is gone when the holder ends.
    """

    mount: Path
    holder: subprocess.Popen[str]

    @property
    def seen(self) -> Path:
        """The mount point, through the holder's namespace."""
        return Path(f"/proc/{self.holder.pid}/root{self.mount}")

    def command(self, *words: str) -> list[str]:
        """A penstock command line inside."""
        enter = ["nsenter", "--target", str(self.holder.pid), "--mount"]
        return [*enter, sys.executable, "-m", "penstock.client.main", *words]

    def free(self) -> int:
        """Bytes."""
        status = os.statvfs(self.seen)
        return status.f_bavail * status.f_frsize

    def fill(self, leave: int = 0) -> None:
        """Take all room but ``leave`` bytes; also what writers got meanwhile was given back."""
        with (self.seen / "filler").open("ab", buffering=0) as file:
            while (room := self.free() - leave) > 0:
                try:
                    file.write(bytes(min(room, 1 << 20)))
                except OSError as error:
                    if error.errno == errno.ENOSPC:
                        return
                    raise

    def clear(self) -> None:
        """Give the room back."""
        (self.seen / "filler").unlink()


@contextmanager
def small_disk(mount: Path, mib: int) -> Iterator[SmallDisk]:
    """Make one of ``mib`` MiB at ``mount``; skips where mounting is not permitted."""
    mount.mkdir()
    words = ["unshare", "--mount", "--propagation", "private"]
    shell = ["sh", "-c", _HOLD, "sh", f"{mib}m", str(mount)]
    holder = subprocess.Popen(
        [*words, *shell],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdin is not None and holder.stdout is not None
        try:
            if holder.stdout.readline() != "mounted\n":
                assert holder.stderr is not None
                pytest.skip(f"no file system of its own can be mounted: {holder.stderr.read()}")
            yield SmallDisk(mount, holder)
        finally:
            holder.stdin.close()
            holder.wait(timeout=600)
