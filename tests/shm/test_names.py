"""Names in /dev/shm that anybody may take: nothing but a private file of this user is opened."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.host.trust import UntrustedError, open_own, printable
from penstock.shm.inventory import inventory, shm_names
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.shm.segment import (
    SHM_ROOT,
    Segment,
    SegmentMissingError,
    StrangeSegmentError,
    exists,
    unlink,
)

NOBODY = 65534


@pytest.fixture
def place() -> Iterator[Path]:
    """The place of a control segment of a run that does not exist."""
    path = SHM_ROOT / f"penstock-{secrets.token_hex(6)}-a-control"
    yield path
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


STRANGE: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: path.mkdir(),
    "symbolic link": lambda path: path.symlink_to("/etc/passwd"),
    "dangling link": lambda path: path.symlink_to("/nowhere/at/all"),
    "link to itself": lambda path: path.symlink_to(path),
    "socket": bind,
    "FIFO": lambda path: os.mkfifo(path, 0o600),
}


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_junk_is_listed_and_neither_opened_nor_removed(
    place: Path, make: Callable[[Path], object]
) -> None:
    make(place)
    name = f"/{place.name}"
    names = shm_names()
    assert str(place) in [junk.path for junk in names.junk]
    assert not [entry for entry in names.segments if name in entry.names]
    assert not exists(name)
    for writable in (True, False):
        with pytest.raises(StrangeSegmentError, match=place.name):
            Segment.attach(name, writable=writable)
    with pytest.raises(StrangeSegmentError, match=place.name):
        Segment.create(name, 4096)
    unlink(name)
    assert place.is_symlink() or place.exists()


def test_a_file_that_others_may_open_or_reach_is_no_segment(place: Path) -> None:
    name = f"/{place.name}"
    Segment.create(name, 4096).close()
    place.chmod(0o640)
    with pytest.raises(StrangeSegmentError, match="has mode 0640, so that other users"):
        Segment.attach(name)
    place.chmod(0o600)
    second = place.with_name(f"{place.name}-again")
    os.link(place, second)
    try:
        with pytest.raises(StrangeSegmentError, match=r"has 2 names \(hard links\)"):
            Segment.attach(name)
    finally:
        second.unlink()
    Segment.attach(name).close()


def test_another_user_s_file_is_no_segment_whatever_its_mode(place: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    name = f"/{place.name}"
    Segment.create(name, 4096).close()
    os.chown(place, NOBODY, NOBODY)
    for mode in (0o600, 0o666):
        place.chmod(mode)
        with pytest.raises(StrangeSegmentError, match=r"belongs to user nobody \(uid 65534\)"):
            Segment.attach(name)
    assert not exists(name) and not [e for e in inventory() if name in e.names]
    (theirs,) = [e for e in shm_names().segments if name in e.names]
    assert (theirs.uid, theirs.owner, theirs.committed) == (NOBODY, None, None)
    unlink(name)
    assert place.exists()


def test_names_of_two_users_are_two_memories(spec: MemorySpec) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    memory = NodeMemory.create(spec)
    weights = SHM_ROOT / spec.name(SegmentKind.WEIGHTS)[1:]
    os.chown(weights, NOBODY, NOBODY)
    mine, theirs = sorted(
        (e for e in shm_names().segments if e.run_id == spec.run_id), key=lambda e: e.uid
    )
    assert spec.name(SegmentKind.WEIGHTS) not in mine.names and mine.owner is not None
    assert theirs.names == (spec.name(SegmentKind.WEIGHTS),)
    memory.close()
    weights.unlink()


@pytest.mark.parametrize("size", [0, 100, 4096, 10 << 30])
def test_a_file_without_our_header_costs_one_page_to_look_at(place: Path, size: int) -> None:
    """The file of 10 GiB is sparse: reading or populating it would take all memory."""
    place.touch(0o600)
    os.truncate(place, size)
    (entry,) = [e for e in inventory() if f"/{place.name}" in e.names]
    assert (entry.owner, entry.committed, entry.num_bytes) == (None, None, size)
    assert place.stat().st_blocks == 0


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"penstock-\x1b[2J\n", r"penstock-\x1b[2J\n"),
        (b"penstock-\xff\xfe", r"penstock-\udcff\udcfe"),
        ("penstock-‮x".encode(), r"penstock-\u202ex"),
    ],
)
def test_names_of_strangers_are_fit_to_be_printed(raw: bytes, shown: str) -> None:
    path = os.fsencode(SHM_ROOT) + b"/" + raw + secrets.token_hex(4).encode()
    with open(path, "wb"):
        pass
    try:
        found = [junk.path for junk in shm_names().junk]
        expected = str(SHM_ROOT / shown) + os.fsdecode(path[-8:])
        assert expected in found
        assert expected.isprintable() and printable(Path(os.fsdecode(path))) == expected
    finally:
        os.unlink(path)


def test_own_files_are_opened_and_missing_ones_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        open_own(path, os.O_RDWR)
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    assert os.get_blocking(descriptor) and not os.get_inheritable(descriptor)
    os.close(descriptor)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(UntrustedError, match="is a symbolic link of user"):
        open_own(tmp_path / "link", os.O_RDWR | os.O_CREAT)
    with pytest.raises(SegmentMissingError):
        Segment.attach("/penstock-0-a-control")
