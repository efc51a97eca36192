"""What /dev/shm allows is read as the kernel writes it; segments get huge pages where it allows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.shm.pages import HugePages, allowed_huge_pages, huge_bytes


@pytest.mark.parametrize(
    ("options", "overruling", "expected"),
    [
        ("rw,size=4k", "always [never] deny force", HugePages.NEVER),
        ("rw,huge=advise", "always [never] deny force", HugePages.ADVISE),
        ("rw,huge=within_size", "[always] never deny force", HugePages.WITHIN_SIZE),
        ("rw,huge=always", "always never [deny] force", HugePages.NEVER),
        ("rw", "always never deny [force]", HugePages.ALWAYS),
    ],
)
def test_the_mount_decides_unless_overruled(
    tmp_path: Path, options: str, overruling: str, expected: HugePages
) -> None:
    mounts, enabled = tmp_path / "mounts", tmp_path / "shmem_enabled"
    mounts.write_text(
        "tmpfs /dev/shm tmpfs rw,huge=always 0 0\n"  # hidden by the next
        f"tmpfs /dev/shm tmpfs {options} 0 0\ntmpfs /tmp tmpfs rw,huge=always 0 0\n"
    )
    enabled.write_text(overruling)
    found = allowed_huge_pages(Path("/dev/shm"), mounts=mounts, shmem_enabled=enabled)
    assert found is expected


def test_huge_bytes_are_added_up_by_file(tmp_path: Path) -> None:
    entry = "7f00-7f01 rw-s 00000000 00:1a 7 {}\nRss: 9 kB\nShmemPmdMapped: {} kB\nVmFlags: rd hg\n"
    smaps = tmp_path / "smaps"
    smaps.write_text(
        entry.format("/dev/shm/a", 2048)
        + entry.format("/dev/shm/b", 0)
        + entry.format("", 4096)
        + entry.format("/dev/shm/a", 4096)
    )
    assert huge_bytes(smaps) == {"/dev/shm/a": 6 << 20}


SEGMENT_ON_A_MOUNT_OF_ITS_OWN = """
import os
from penstock.shm import segment
from penstock.host.limits.cgroup import MemoryLimit
from penstock.shm.segment import NoSpaceError
from penstock.shm.pages import huge_bytes
from penstock.shm.segment import SHM_ROOT, Segment
size = (6 << 20) + 4096
created = Segment.create("/penstock-0-t-state", size)
here = huge_bytes()
attached = Segment.attach("/penstock-0-t-state", size)
status = os.stat(SHM_ROOT / "penstock-0-t-state")
# Space that was there when looked at is gone when pages are touched.
segment.room = lambda: MemoryLimit(owner="x", limit=2**62, available=2**62)
try:
    Segment.create("/penstock-1-t-state", 64 << 20)
except NoSpaceError:
    print(segment.list_segments())
print(status.st_blocks * 512 >= size, *here.values(), *huge_bytes().values())
"""


def test_segments_get_huge_pages_where_the_mount_gives_them_on_advice() -> None:
    mount = "mount -t tmpfs -o huge=advise,size=32M none /dev/shm"
    program = f"{mount} && exec {sys.executable} -"
    try:
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", program],
            input=SEGMENT_ON_A_MOUNT_OF_ITS_OWN,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("no unshare on this machine")
    if done.returncode and ("unshare:" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"no mounts of one's own here: {done.stderr.strip()}")
    # Both mappings: the whole huge pages, all but the last small one.
    assert done.stdout.split() == [
        "['/penstock-0-t-state']",
        "True",
        str(6 << 20),
        str(12 << 20),
    ], done.stderr
    assert not os.path.exists("/dev/shm/penstock-0-t-state")
