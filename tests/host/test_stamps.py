"""Stamps of files: another content has another stamp, also under the same name, size and times."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.host import stamps, world
from penstock.host.stamps import SETTLED_S, content_digest, stamps_of


class Later(world.World):
    """A world with a clock that is ahead."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def wall(self) -> float:
        """Returns a time in the future."""
        return super().wall() + self._ahead_s


@pytest.fixture
def later() -> Iterator[None]:
    """Lets two minutes pass."""
    world.enter(Later(2 * SETTLED_S))
    yield
    world.enter(world.REAL)


@pytest.fixture
def on_tmpfs() -> Iterator[Path]:
    """A file on a tmpfs."""
    path = Path("/dev/shm") / f"stamps-{secrets.token_hex(8)}"
    path.write_bytes(b"a" * 4096)
    yield path
    path.unlink()


def rewrite(path: Path, content: bytes) -> None:
    """Changes a file in place and sets its times back."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)


@pytest.mark.usefixtures("later")
def test_a_settled_file_has_the_kernels_time_and_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program sets the time of the last write back, and not the time of the inode."""
    monkeypatch.setattr(stamps, "_is_in_memory", lambda path: False)
    monkeypatch.setattr(stamps, "content_digest", None)
    path = tmp_path / "a"
    path.write_bytes(b"one")
    status, first = path.stat(), stamps_of([path])
    assert first == [[3, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]]
    # The kernel's clock of files has ticks of some milliseconds.
    while path.stat().st_ctime_ns == status.st_ctime_ns:
        rewrite(path, b"two")
    assert stamps_of([path]) != first


def test_a_new_file_counts_by_its_content(tmp_path: Path) -> None:
    path, copy = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"one")
    copy.write_bytes(b"one")
    first = stamps_of([path])
    assert first == stamps_of([copy]) == [[3, content_digest(path)]]
    rewrite(path, b"two")
    assert stamps_of([path]) != first


def test_the_time_of_the_first_look_decides_how_a_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file does not change because the caller worked for a minute."""
    monkeypatch.setattr(stamps, "_is_in_memory", lambda path: False)
    path = tmp_path / "a"
    path.write_bytes(b"one")
    now_s = path.stat().st_ctime + SETTLED_S - 1
    first = stamps_of([path], now_s)
    assert first == stamps_of([path], now_s)
    assert len(first[0]) == 2 and len(stamps_of([path], now_s + 2)[0]) == 4


@pytest.mark.usefixtures("later")
def test_a_file_on_a_tmpfs_counts_by_its_content(on_tmpfs: Path) -> None:
    """A write through a mapping changes no time of the file."""
    with on_tmpfs.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as mapping:
        mapping[0] = ord("b")
        first, before = stamps_of([on_tmpfs]), on_tmpfs.stat()
        mapping[0] = ord("c")
        after = on_tmpfs.stat()
        assert (before.st_mtime_ns, before.st_ctime_ns) == (after.st_mtime_ns, after.st_ctime_ns)
        assert stamps_of([on_tmpfs]) != first


def test_a_digest_has_every_byte_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stamps, "_CHUNK_BYTES", 4)
    path = tmp_path / "a"
    digests = set()
    for content in (b"", b"a", b"abcdefghij", b"efghabcdij", b"abcdefghiJ", b"abcdefgh"):
        path.write_bytes(content)
        digests.add(content_digest(path))
    assert len(digests) == 6
