"""Files of frozen weights that runs share: processes that fill, adopt, leave, and are killed."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.shm import bases
from penstock.shm.base_users import base_uses, remove_unusable, sweep
from penstock.shm.bases import (
    FILLING,
    UNUSABLE,
    Base,
    BusyBaseError,
    DamagedBaseError,
    base_name,
    open_base,
)
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.shm.segment import (
    NoSpaceError,
    SegmentError,
    SegmentMissingError,
    ShortSegmentError,
    StrangeSegmentError,
    path_of,
    status_of,
    unlink,
)

ARRAY_BYTES = 32  # of block 0: 16 elements of bf16
CONTENT = bytes(range(ARRAY_BYTES))


@pytest.fixture
def digest() -> Iterator[bytes]:
    """A base of this test alone; its files are removed."""
    drawn = secrets.token_bytes(32)
    yield drawn
    for ending in ("", FILLING, ".stalled"):
        unlink(base_name(drawn) + ending)


@pytest.fixture
def shared(spec: MemorySpec, digest: bytes) -> MemorySpec:
    """A node that has block 0's frozen weights in the base."""
    return replace(spec, bases=((0, digest),))


def made(digest: bytes) -> Base:
    """Fills and completes a base."""
    base = Base.claim(digest, ARRAY_BYTES, "test-a")
    assert base is not None
    os.pwrite(base.descriptor, CONTENT, 0)
    assert base.seal()
    return base


def names(digest: bytes) -> list[str]:
    """Endings of the base's names in /dev/shm."""
    return [end for end in ("", FILLING) if status_of(base_name(digest) + end) is not None]


def test_a_base_is_filled_under_another_name_and_then_only_read(digest: bytes) -> None:
    base = Base.claim(digest, ARRAY_BYTES, "test-a")
    assert base is not None and names(digest) == [FILLING]
    assert Base.adopt(digest, ARRAY_BYTES) is None
    assert Base.claim(digest, ARRAY_BYTES, "test-b") is None, "it is being filled"
    os.pwrite(base.descriptor, CONTENT, 0)
    assert base.seal()
    status = status_of(base_name(digest))
    assert names(digest) == [""] and status is not None
    assert (status.st_mode & 0o777, status.st_nlink) == (0o400, 1)
    other = Base.adopt(digest, ARRAY_BYTES)
    assert other is not None and os.pread(other.descriptor, ARRAY_BYTES, 0) == CONTENT
    assert Base.claim(digest, ARRAY_BYTES, "test-b") is None and names(digest) == [""]
    for user in (base, other):
        user.close()


def test_of_two_that_fill_one_wins_and_replaces_nothing(digest: bytes) -> None:
    """A filler without progress has lost its name; it may still be the first to finish."""
    slow = Base.claim(digest, ARRAY_BYTES, "test-a")
    bases.take_claim(digest)
    quick = Base.claim(digest, ARRAY_BYTES, "test-b")
    assert slow is not None and quick is not None
    assert slow.seal()
    inode = os.fstat(slow.descriptor).st_ino
    assert not quick.seal()
    quick.close()
    status = status_of(base_name(digest))
    assert names(digest) == [""] and status is not None and status.st_ino == inode
    assert status_of(base_name(digest) + ".stalled") is None
    slow.close()


@pytest.mark.parametrize("instant", ["claimed", "written", "mode", "renamed", "sealed"])
def test_a_filler_killed_at_any_instant_leaves_a_base_or_nothing(
    digest: bytes, instant: str
) -> None:
    program = f"""
import os, signal, fcntl
from penstock.shm import bases
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
at = {instant!r}
base = bases.Base.claim(bytes.fromhex({digest.hex()!r}), {ARRAY_BYTES}, "test-a")
if at == "claimed": die()
os.pwrite(base.descriptor, bytes(range({ARRAY_BYTES})), 0)
if at == "written": die()
if at == "mode": bases._rename = die
if at == "renamed": bases.fcntl.flock = die
base.seal()
die()
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False, timeout=600)
    assert killed.returncode == -signal.SIGKILL
    complete = instant in ("renamed", "sealed")
    assert names(digest) == ([""] if complete else [FILLING])
    if not complete:
        assert Base.claim(digest, ARRAY_BYTES, "test-b") is None, "the dead one's is removed"
        assert names(digest) == []
        made(digest).close()
    adopted = Base.adopt(digest, ARRAY_BYTES)
    assert adopted is not None and os.pread(adopted.descriptor, ARRAY_BYTES, 0) == CONTENT
    adopted.close()
    assert base_name(digest) in sweep() and names(digest) == []


def test_the_last_user_removes_a_base(shared: MemorySpec, digest: bytes) -> None:
    other = replace(shared, run_id=secrets.token_hex(6))
    memories = [NodeMemory.create(each) for each in (shared, other)]
    memories[0].hold(0, made(digest))
    adopted = Base.adopt(digest, ARRAY_BYTES)
    assert adopted is not None
    memories[1].hold(0, adopted)
    (use,) = [use for use in base_uses() if use.digest == digest.hex()]
    assert use.runs == tuple(sorted((shared.run_id, other.run_id))) and use.in_use
    memories[0].unlink()
    memories[0].close()
    assert names(digest) == [""]
    assert memories[1].frozen(0).tobytes() == CONTENT
    memories[1].unlink()
    memories[1].close()
    assert names(digest) == []


def test_memory_without_processes_keeps_its_base(shared: MemorySpec, digest: bytes) -> None:
    memory = NodeMemory.create(shared)
    memory.hold(0, made(digest))
    memory.close()
    sweep()
    assert names(digest) == [""]
    unlink(shared.name(SegmentKind.CONTROL))
    assert base_name(digest) in sweep() and names(digest) == []


def test_a_base_that_is_removed_while_it_is_opened_is_none(
    digest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(digest).close()
    lock = bases._lock

    def removed_before(descriptor: int, kind: int) -> bool:
        unlink(base_name(digest))
        return lock(descriptor, kind)

    monkeypatch.setattr(bases, "_lock", removed_before)
    assert Base.adopt(digest, ARRAY_BYTES) is None


def test_a_lock_for_a_moment_is_no_answer(digest: bytes) -> None:
    made(digest).close()
    descriptor = os.open(path_of(base_name(digest)), os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(BusyBaseError):
        Base.adopt(digest, ARRAY_BYTES)
    os.close(descriptor)


def grow(path: Path) -> None:
    path.chmod(0o600)
    os.truncate(path, path.stat().st_size + 4096)
    path.chmod(0o400)


def overwrite_trailer(path: Path) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(4096 + 30)
        file.write(b"x")
    path.chmod(0o400)


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        (grow, ShortSegmentError, "has 12288 bytes, of which 8192 are reserved; 8192 are expected"),
        (overwrite_trailer, StrangeSegmentError, "is not the base of its name"),
        (lambda path: path.chmod(0o600), StrangeSegmentError, "has mode 0600, expected 0400"),
        (lambda path: path.chmod(0o440), StrangeSegmentError, "has mode 0440, so that other users"),
        (lambda path: os.chown(path, 65534, -1), StrangeSegmentError, r"\(uid 65534\)"),
    ],
    ids=["size", "trailer", "writable", "readable", "owner"],
)
def test_a_strange_base_is_not_used(
    digest: bytes, harm: object, error: type[SegmentError], message: str
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    made(digest).close()
    path = path_of(base_name(digest))
    assert callable(harm)
    harm(path)
    with pytest.raises(error, match=message) as refused:
        Base.adopt(digest, ARRAY_BYTES)
    assert isinstance(refused.value, UNUSABLE)
    os.chown(path, os.geteuid(), -1)


def test_a_damaged_base_is_not_adopted_by_fresh_memory(digest: bytes) -> None:
    """Every byte of the array counts. Memory that holds a model has compared it before."""
    made(digest).close()
    path = path_of(base_name(digest))
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(ARRAY_BYTES - 1)
        file.write(b"x")
    path.chmod(0o400)
    with pytest.raises(DamagedBaseError, match="is damaged: its checksum differs"):
        Base.adopt(digest, ARRAY_BYTES, compares=True)
    base = Base.adopt(digest, ARRAY_BYTES)
    assert base is not None
    assert not remove_unusable(base_name(digest), ""), "a process uses it"
    base.close()
    assert remove_unusable(base_name(digest), "") and names(digest) == []


def test_memory_of_an_older_penstock_keeps_its_base(digest: bytes) -> None:
    """Bases of format 1 have no checksum, so fresh memory takes none."""
    made(digest).close()
    path = path_of(base_name(digest))
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(4096 + 8)
        file.write((1).to_bytes(8, "little"))
        file.seek(4096 + 24 + 32 + 64)
        file.write(bytes(32))
    path.chmod(0o400)
    base = Base.adopt(digest, ARRAY_BYTES)
    assert base is not None and os.pread(base.descriptor, ARRAY_BYTES, 0) == CONTENT
    base.close()
    with pytest.raises(DamagedBaseError):
        Base.adopt(digest, ARRAY_BYTES, compares=True)


@pytest.mark.parametrize("mode", [0o000, 0o440, 0o666])
def test_a_base_of_another_mode_is_removed_without_users(
    shared: MemorySpec, digest: bytes, mode: int
) -> None:
    made(digest).close()
    path_of(base_name(digest)).chmod(mode)
    memory = NodeMemory.create(shared)
    control = shared.name(SegmentKind.CONTROL)
    (use,) = [use for use in base_uses() if use.digest == digest.hex()]
    assert use.in_use and not remove_unusable(base_name(digest), ""), "other memory names it"
    assert base_name(digest) not in sweep()
    assert remove_unusable(base_name(digest), control) and names(digest) == []
    made(digest).close()
    path_of(base_name(digest)).chmod(mode)
    unlink(control)
    (use,) = [use for use in base_uses() if use.digest == digest.hex()]
    assert not use.in_use and base_name(digest) in sweep()
    memory.close()


def test_no_room_leaves_nothing(digest: bytes) -> None:
    with pytest.raises(NoSpaceError, match=r"needs \d+ bytes; .* has \d+ free"):
        Base.claim(digest, 1 << 50, "test-a")
    assert names(digest) == []


def test_views_of_a_complete_base_cannot_be_written(shared: MemorySpec, digest: bytes) -> None:
    memory = NodeMemory.create(shared)
    memory.hold(0, made(digest))
    assert memory.has_complete_base(0)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.close(2)
        memory.frozen(0)[0] = 1
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    memory.unlink()
    memory.close()


def test_processes_map_what_memoryd_holds(shared: MemorySpec, digest: bytes) -> None:
    memory = NodeMemory.create(shared)
    with pytest.raises(bases.UnfilledBaseError):
        NodeMemory.attach(shared)
    claimed = Base.claim(digest, ARRAY_BYTES, shared.filler)
    assert claimed is not None
    memory.hold(0, claimed)
    with NodeMemoryOf(shared, fill=True) as loader:
        loader.frozen(0)[:] = np.frombuffer(CONTENT, np.uint16)
    assert claimed.seal()
    memory.protect(0)
    memory.control.set_incarnation(1)
    with NodeMemoryOf(replace(shared, bases=())) as worker:
        assert worker.frozen(0).tobytes() == CONTENT and worker.shows_bases
        buffer = worker.segment_buffer(SegmentKind.FROZEN)
        assert buffer is not None and bytes(buffer[:ARRAY_BYTES]) == CONTENT
        memory.rename_bases(((0, bytes(31) + b"x"),))
        assert not worker.shows_bases
    memory.unlink()
    memory.close()
    with pytest.raises(SegmentMissingError):
        open_base(digest, ARRAY_BYTES)


class NodeMemoryOf:
    """Memory that is attached for a while."""

    def __init__(self, spec: MemorySpec, *, fill: bool = False) -> None:
        self._memory = NodeMemory.attach(spec, fill=fill)

    def __enter__(self) -> NodeMemory:
        return self._memory

    def __exit__(self, *_: object) -> None:
        self._memory.close()


def test_memory_of_format_3_has_its_own_frozen_segment(spec: MemorySpec) -> None:
    """The format of the Penstock before bases."""
    memory = NodeMemory.create(spec)
    memory.frozen(0)[:] = 7
    buffer = memory.segment_buffer(SegmentKind.FROZEN)
    assert buffer is not None
    control = memory.control._buffer
    control[8:16] = (3).to_bytes(8, "little")
    control[-4096 + 352 : -4096 + 384] = bytes(range(32))  # unused in this format
    attached = NodeMemory.attach(spec)
    assert attached.spec.bases == () and attached.frozen(0).tolist() == [7] * 16
    for view in (attached, memory):
        view.close()
