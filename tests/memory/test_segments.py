"""What a starting memoryd does about segments that are there already."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest

from penstock.daemons.memory import segments
from penstock.daemons.memory.segments import acquire
from penstock.host.errors import CapacityError, StateError
from penstock.host.limits.cgroup import MemoryLimit
from penstock.host.process_identity import ProcessIdentity
from penstock.shm.control import ControlView
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.shm.segment import (
    SHM_ROOT,
    Segment,
    StrangeSegmentError,
    list_segments,
    path_of,
    unlink,
)


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


def as_an_older_penstock_made_it(memory: NodeMemory) -> None:
    """Takes the tokens away: the rest of the layout is that of e6b6888."""
    memory.control.set_tokens(bytes(len(memory.control.tokens)))
    memory.control.set_owner(dead_process())
    for kind, size in memory.spec.layout.sizes.items():
        if size:
            os.truncate(path_of(memory.spec.name(kind)), size)


def test_memory_of_an_older_penstock_is_adopted_once(memory: NodeMemory) -> None:
    memory.state(0, "master")[:] = 2.5
    as_an_older_penstock_made_it(memory)
    with pytest.raises(StrangeSegmentError, match="has no tokens"):
        NodeMemory.attach(memory.spec)
    adopted = acquire(memory.spec)
    tokens = adopted.control.tokens
    assert len({tokens[start : start + 16] for start in range(0, len(tokens), 16)}) == 5
    assert set(adopted.state(0, "master").tolist()) == {2.5}
    again = NodeMemory.attach(memory.spec)
    assert again.control.tokens == tokens
    for view in (adopted, again):
        view.close()


def test_a_file_of_the_right_name_and_size_is_no_segment_of_this_memory(
    memory: NodeMemory,
) -> None:
    memory.control.set_owner(dead_process())
    name = memory.spec.name(SegmentKind.STATE)
    content = path_of(name).read_bytes()
    unlink(name)
    forged = Segment.create(name, memory.spec.layout.sizes[SegmentKind.STATE], token=bytes(16))
    forged.buffer[:] = content[: forged.size]
    forged.close()
    with pytest.raises(StateError, match="does not bear the token of this memory"):
        acquire(memory.spec)


@pytest.mark.parametrize("kind", [SegmentKind.CONTROL, SegmentKind.STATE])
def test_a_name_that_another_user_has_is_refused_and_he_is_named(
    spec: MemorySpec, kind: SegmentKind
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    path = path_of(spec.name(kind))
    path.touch(0o666)
    path.chmod(0o666)
    os.chown(path, 65534, 65534)
    with pytest.raises(
        StateError, match=r"belongs to user nobody \(uid 65534\), and this run needs"
    ):
        acquire(spec)
    assert names(spec) == [spec.name(kind)] and path.stat().st_size == 0
    path.unlink()


def test_names_that_this_memory_does_not_need_may_be_anything(spec: MemorySpec) -> None:
    layout = dataclasses.replace(spec.layout, sizes=spec.layout.sizes | {SegmentKind.FROZEN: 0})
    path = path_of(spec.name(SegmentKind.FROZEN))
    path.mkdir()
    try:
        acquire(dataclasses.replace(spec, layout=layout)).close()
    finally:
        path.rmdir()


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
        StateError, match=r"was removed from /dev/shm, and the rest is useless without it.* --force"
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
