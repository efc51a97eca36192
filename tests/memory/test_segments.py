"""What a starting memoryd does about segments that are there already."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from penstock.daemons.memory import segments
from penstock.daemons.memory.segments import acquire
from penstock.protocol.errors import CapacityError, StateError
from penstock.shm.cgroup import MemoryLimit
from penstock.shm.control import ControlView
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.shm.process import ProcessIdentity
from penstock.shm.segment import SHM_ROOT, Segment, list_segments, unlink


def names(spec: MemorySpec) -> list[str]:
    return list_segments(f"/penstock-{spec.run_id}")


def dead_process() -> ProcessIdentity:
    return dataclasses.replace(ProcessIdentity.current(), start_ticks=1)


def test_fresh(spec: MemorySpec) -> None:
    memory = acquire(spec)
    assert memory.control.incarnation == 0
    assert memory.control.owner == ProcessIdentity.current()
    assert names(spec) == sorted(spec.sizes())
    memory.close()


def test_adopts_what_a_dead_owner_left(memory: NodeMemory) -> None:
    memory.control.set_owner(dead_process())
    memory.control.set_incarnation(6)
    memory.state(0, "master")[:] = 2.5
    adopted = acquire(memory.spec)
    assert adopted.control.owner == ProcessIdentity.current()
    assert adopted.control.incarnation == 6
    assert set(adopted.state(0, "master").tolist()) == {2.5}
    adopted.close()


def test_refuses_a_living_owner(memory: NodeMemory) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        identity = ProcessIdentity.of(other.pid)
        assert identity is not None
        memory.control.set_owner(identity)
        message = f"another memoryd of this run, process {other.pid}, which is alive"
        with pytest.raises(StateError, match=message):
            acquire(memory.spec)
        assert memory.control.owner == identity
        other.communicate(b"\n")


@pytest.mark.parametrize("kind", [SegmentKind.STATE, SegmentKind.CONTROL])
def test_reclaims_a_creation_that_was_cut_short(spec: MemorySpec, kind: SegmentKind) -> None:
    for leftover in (SegmentKind.WEIGHTS, kind):
        Segment.create(spec.name(leftover), 4096).close()
    memory = acquire(spec)
    assert memory.control.incarnation == 0
    assert names(spec) == sorted(spec.sizes())
    memory.close()


def test_reclaims_an_empty_control_segment(spec: MemorySpec) -> None:
    """The name exists before its pages are reserved."""
    (SHM_ROOT / spec.name(SegmentKind.CONTROL).lstrip("/")).touch(0o600)
    memory = acquire(spec)
    assert names(spec) == sorted(spec.sizes())
    memory.close()


def test_refuses_another_layout_and_touches_nothing(memory: NodeMemory) -> None:
    memory.control.set_owner(dead_process())
    before = bytes(memory.control._buffer)
    layout = dataclasses.replace(memory.spec.layout, digest=bytes(32))
    with pytest.raises(StateError, match="made for another model"):
        acquire(dataclasses.replace(memory.spec, layout=layout))
    assert bytes(memory.control._buffer) == before


def test_refuses_memory_with_a_missing_segment(memory: NodeMemory) -> None:
    memory.control.set_owner(dead_process())
    unlink(memory.spec.name(SegmentKind.STATE))
    with pytest.raises(
        StateError, match=r"was removed from /dev/shm, and the rest is worth nothing .* --force"
    ):
        acquire(memory.spec)


def test_refuses_a_foreign_header(spec: MemorySpec) -> None:
    segment = Segment.create(spec.name(SegmentKind.CONTROL), 1 << 20)
    ControlView.initialize(
        segment.buffer, run_id="ffffffffffff", digest=bytes(32), num_blocks=1, undo_bytes=8
    )
    with pytest.raises(StateError, match="belongs to run 'ffffffffffff'"):
        acquire(spec)
    assert names(spec) == [segment.name]
    segment.close()


def test_too_little_space_names_dead_runs(
    spec: MemorySpec, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = NodeMemory.create(make_run().memory_spec(0))
    dead.control.set_owner(dead_process())
    job = MemoryLimit(owner="cgroup /job_5", limit=8192, available=4096)
    monkeypatch.setattr(segments, "room", lambda: job)
    with pytest.raises(CapacityError) as error:
        acquire(spec)
    text = str(error.value)
    assert "0.00 GiB, cgroup /job_5 has 0.00 GiB free" in text
    assert "penstock doctor --clean would remove" in text
    assert f"of dead run {dead.spec.run_id} (node a)" in text
    assert names(spec) == []
    assert names(dead.spec) != []
    dead.close()
