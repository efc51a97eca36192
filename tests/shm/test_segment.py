"""Segments and a node's memory: creation is all or nothing, attaching checks before it trusts."""

from __future__ import annotations

import dataclasses
import mmap
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.host.limits.cgroup import MemoryLimit
from penstock.host.process_identity import ProcessIdentity, start_ticks
from penstock.host.topology import Topology
from penstock.shm import segment as segments
from penstock.shm.inventory import inventory
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.shm.pages import NodeRange, nodes_of_pages
from penstock.shm.segment import (
    ForeignOwnerError,
    NoSpaceError,
    Segment,
    SegmentExistsError,
    SegmentMissingError,
    ShortSegmentError,
    VersionMismatchError,
)


@pytest.fixture
def name() -> Iterator[str]:
    found = f"/penstock-{secrets.token_hex(6)}-t-state"
    yield found
    segments.unlink(found)


def is_mapped(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text()


def resident_bytes(segment: Segment) -> int:
    """Of this process's mapping of the segment, from its page tables."""
    text = Path("/proc/self/smaps").read_text()
    entry = text[text.index(segment.name) :]
    return int(entry[entry.index("Rss:") :].split()[1]) * 1024


def test_create_attach_share_bytes(name: str) -> None:
    first = Segment.create(name, 10_000)
    second = Segment.attach(name, 10_000)
    first.buffer[9_999] = 7
    assert second.buffer[9_999] == 7
    assert (len(second.buffer), second.size) == (10_000, 10_000)
    first.close()
    second.close()


def test_pages_are_populated_when_created_and_when_attached(name: str) -> None:
    size = 8 << 20
    created = Segment.create(name, size)
    assert resident_bytes(created) == size
    created.close()
    attached = Segment.attach(name)
    assert resident_bytes(attached) == size
    attached.close()


def test_create_refuses_a_taken_name(name: str) -> None:
    first = Segment.create(name, 4096)
    first.buffer[0] = 1
    with pytest.raises(SegmentExistsError, match=name):
        Segment.create(name, 4096)
    assert first.buffer[0] == 1
    first.close()


def test_pages_lie_on_the_wanted_node_and_a_refusal_is_only_logged(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    node = min(Topology.read().node_of.values())
    segment = Segment.create(name, 3 * 4096, [NodeRange(offset=4096, num_bytes=8192, node=node)])
    try:
        found = nodes_of_pages(segment.buffer, [4096, 8192])
    except PermissionError:
        pytest.skip("this container forbids move_pages")
    finally:
        segment.close()
        segment.unlink()
    assert found == [node, node] and not caplog.messages
    Segment.create(name, 4096, [NodeRange(offset=0, num_bytes=4096, node=900)]).close()
    assert "pages lie on NUMA nodes as they come: [Errno 22]" in caplog.text


def test_larger_than_free_is_an_error_and_leaves_nothing(name: str) -> None:
    size = segments.room().available + (64 << 20)
    with pytest.raises(NoSpaceError, match=rf"needs {size} bytes; \S.* has \d+ free"):
        Segment.create(name, size)
    assert not segments.exists(name)


def test_a_full_dev_shm_is_an_error_and_leaves_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Space that was there when looked at is gone when it is reserved: the kernel says ENOSPC.
    endless = MemoryLimit(owner="x", limit=2**62, available=2**62)
    monkeypatch.setattr(segments, "room", lambda: endless)
    size = os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize + 4096
    with pytest.raises(NoSpaceError, match=f"needs {size} bytes"):
        Segment.create(name, size)
    assert not segments.exists(name)


def test_attach_names_what_is_missing_or_short(name: str) -> None:
    with pytest.raises(SegmentMissingError, match=name):
        Segment.attach(name)
    path = segments.SHM_ROOT / name.lstrip("/")
    path.touch(0o600)
    with pytest.raises(ShortSegmentError, match="has 0 bytes, its layout needs 1"):
        Segment.attach(name)
    path.write_bytes(b"x" * 100)
    with pytest.raises(ShortSegmentError, match="has 100 bytes, its layout needs 4096"):
        Segment.attach(name, 4096)
    assert path.read_bytes() == b"x" * 100


def test_attach_refuses_unreserved_pages(name: str) -> None:
    """Touching a hole of a full /dev/shm would be a bus error."""
    path = segments.SHM_ROOT / name.lstrip("/")
    path.touch(0o600)
    os.truncate(path, 1 << 20)
    with pytest.raises(ShortSegmentError, match="of which only 0 are reserved"):
        Segment.attach(name, 1 << 20)


def test_views_outlive_close(name: str) -> None:
    segment = Segment.create(name, 4096)
    view = np.frombuffer(segment.buffer, np.uint8)
    segment.close()
    segment.close()
    view[:] = 5
    assert int(view.sum()) == 5 * 4096
    assert is_mapped(name)
    del view
    assert not is_mapped(name), "the mapping ends with its last view, whoever keeps the segment"


def test_memory_views_are_the_arrays(spec: MemorySpec) -> None:
    memory, other = NodeMemory.create(spec), NodeMemory.attach(spec)
    memory.weights(0, 1)[:] = 3
    memory.state(1, "exp_avg_sq")[:] = 0.5
    memory.grads(0, 1, 1)[-1] = 2.0
    memory.frozen(0)[0] = 9
    assert other.weights(0, 1).dtype == np.uint16
    assert other.weights(0, 1).tolist() == [3] * 48
    assert other.weights(0, 0).tolist() == [0] * 48
    assert other.state(1, "exp_avg_sq").tolist() == [0.5] * 16
    assert other.grads(0, 1, 1)[-1] == 2.0
    assert bytes(other.raw((0, "frozen", 0, 0)))[:2] == b"\x09\x00"
    assert other.frozen(1).size == 0
    assert other.owned_blocks() == (0, 1)
    memory.close()
    other.close()


def test_create_is_all_or_nothing(spec: MemorySpec) -> None:
    blocker = Segment.create(spec.name(SegmentKind.GRADS), 4096)
    with pytest.raises(SegmentExistsError):
        NodeMemory.create(spec)
    assert segments.list_segments(f"/penstock-{spec.run_id}") == [blocker.name]
    blocker.close()


def test_create_cleans_up_when_the_header_fails(spec: MemorySpec) -> None:
    foreign = dataclasses.replace(spec, run_id="x" * 17)  # longer than its place in the header
    with pytest.raises(ValueError, match="memoryview assignment"):
        NodeMemory.create(foreign)
    assert segments.list_segments(f"/penstock-{foreign.run_id}") == []


def test_attach_checks_before_it_touches(spec: MemorySpec) -> None:
    with pytest.raises(SegmentMissingError):
        NodeMemory.attach(spec)
    memory = NodeMemory.create(spec)
    with pytest.raises(VersionMismatchError, match="undo area of 1000 bytes"):
        NodeMemory.attach(dataclasses.replace(spec, undo_bytes=2000))
    other = dataclasses.replace(spec.layout, digest=bytes(32))
    with pytest.raises(ForeignOwnerError):
        NodeMemory.attach(dataclasses.replace(spec, layout=other))
    with pytest.raises(ForeignOwnerError, match="optimizer setting of this run: resume with the"):
        NodeMemory.attach(dataclasses.replace(spec, step_terms="another weight decay"))
    segments.unlink(spec.name(SegmentKind.STATE))
    with pytest.raises(SegmentMissingError):
        NodeMemory.attach(spec)
    partial = NodeMemory.attach(spec, kinds=(SegmentKind.WEIGHTS,))
    assert partial.weights(0, 0).size == 48
    partial.close()
    memory.close()


def test_unlink_removes_every_name(spec: MemorySpec) -> None:
    memory = NodeMemory.create(spec)
    memory.unlink()
    memory.unlink()
    assert segments.list_segments(f"/penstock-{spec.run_id}") == []
    memory.close()


def test_identity_survives_reuse_of_process_ids() -> None:
    me = ProcessIdentity.current()
    assert me.alive()
    assert not dataclasses.replace(me, start_ticks=me.start_ticks + 1).alive()
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    identity = ProcessIdentity.of(child.pid)
    child.wait()
    assert start_ticks(child.pid) is None
    assert identity is None or not identity.alive()


def test_inventory_tells_owners_and_users(spec: MemorySpec) -> None:
    memory = NodeMemory.create(spec)
    (mine,) = [group for group in inventory() if group.run_id == spec.run_id]
    assert mine.owner == ProcessIdentity.current()
    assert mine.in_use
    assert mine.names == tuple(sorted(spec.sizes()))
    tokens = 4 * 4096  # each segment but the control segment has a page for its own
    assert mine.num_bytes == sum(spec.sizes().values()) + tokens
    memory.control.set_owner(dataclasses.replace(ProcessIdentity.current(), start_ticks=1))
    assert [g.in_use for g in inventory() if g.run_id == spec.run_id] == [False]
    segments.unlink(spec.name(SegmentKind.CONTROL))
    assert [g.owner for g in inventory() if g.run_id == spec.run_id] == [None]
    memory.close()


def test_mapping_by_another_process_counts_as_use(spec: MemorySpec) -> None:
    memory = NodeMemory.create(spec)
    memory.control.set_owner(dataclasses.replace(ProcessIdentity.current(), start_ticks=1))
    code = (
        "import sys; from penstock.shm.segment import Segment;"
        f"s = Segment.attach({spec.name(SegmentKind.STATE)!r}); print('ok', flush=True);"
        "sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ok\n"
        assert [g.in_use for g in inventory() if g.run_id == spec.run_id] == [True]
        assert child.stdin is not None
        child.stdin.close()
    memory.close()


def test_page_size_is_the_layouts() -> None:
    assert mmap.PAGESIZE == 4096
