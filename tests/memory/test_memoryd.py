"""memoryd as a process, with a scheduler played by the test: kill it, and the bytes stay."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from penstock.daemons.memory import saving, snapshot
from penstock.daemons.memory.machine.events import WrittenFile
from penstock.daemons.memory.pinning import PinnedVersion
from penstock.host.errors import StateError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.blocks import BlockClient, attach
from penstock.protocol.wire.frames import BlockRequest
from penstock.protocol.wire.sockets import socket_access
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import NodeMemory
from penstock.shm.segment import Segment, list_segments, unlink
from tests.pages import page_of

A, B = "memoryd.a", "memoryd.b"
WAIT_S = 600.0


def bring_up(scheduler: Any, member: str, *, epoch: int = 1, incarnation: int = 1) -> None:
    """Drain, initial restore, begin."""
    scheduler.wait_for(member, pb.Hello)
    scheduler.send(member, drain=pb.Drain(epoch=epoch))
    drained = scheduler.wait_for(member, pb.Drained)
    assert drained.epoch == epoch
    assert drained.memory.incarnation == 0
    scheduler.send(member, restore=pb.Restore(epoch=epoch, incarnation=incarnation, version=0))
    restored = scheduler.wait_for(member, pb.Restored)
    assert (restored.epoch, restored.incarnation) == (epoch, incarnation)
    begin(scheduler, member, epoch)


def begin(scheduler: Any, member: str, epoch: int) -> None:
    scheduler.send(member, begin=pb.Begin(epoch=epoch))
    assert scheduler.wait_for(member, pb.Ready).epoch == epoch


def state_of(memory: NodeMemory) -> dict[str, bytes]:
    """Everything in the segments but who owns them."""
    found = {str(key): bytes(memory.raw(key)) for key in memory.spec.layout.arrays}
    control = bytearray(memory.control._buffer)
    control[88:120] = bytes(32)
    return found | {"control": bytes(control)}


def end(process: Any) -> tuple[int, str]:
    """Exit code and stderr."""
    _, said = process.communicate(timeout=WAIT_S)
    return process.returncode, said.decode()


def segments_of(run: RunDirectory) -> list[str]:
    return list_segments(f"/penstock-{run.run_id}")


def test_killed_memoryd_is_replaced_and_every_byte_stays(
    make_run: Any, scheduler: Any, start_memoryd: Any
) -> None:
    run = make_run()
    first = start_memoryd(run)
    bring_up(scheduler, A)
    memory = attach(run, 0, "test")
    assert memory.control.owner.pid == first.pid
    assert memory.state(1, "master")[:3].tolist() == pytest.approx([1, 1 + 1 / 7, 1 + 2 / 7])
    assert memory.control.readable(2, 0)
    memory.grads(0, 1, 0)[:] = 3.25
    before = state_of(memory)

    first.send_signal(signal.SIGKILL)
    assert end(first) == (-signal.SIGKILL, "")
    second = start_memoryd(run)
    assert scheduler.wait_for(A, pb.Hello).pid == second.pid
    scheduler.send(A, drain=pb.Drain(epoch=2))
    drained = scheduler.wait_for(A, pb.Drained)
    assert (drained.memory.incarnation, drained.memory.committed) == (1, 0)
    begin(scheduler, A, 2)
    assert memory.control.owner.pid == second.pid
    assert state_of(memory) == before

    # As an epilogue does that cleans /dev/shm: who has the memory keeps it, nobody else gets it.
    unlink(run.memory_spec(0).name(SegmentKind.STATE))
    with pytest.raises(StateError, match="removed from /dev/shm while the run is active"):
        attach(run, 0, "test")
    assert state_of(memory) == before
    scheduler.send(A, shutdown=pb.Shutdown(reason="done"))
    assert end(second) == (0, "")
    assert segments_of(run) == []
    memory.close()


def test_hello_names_the_process_and_its_port(
    make_run: Any, scheduler: Any, start_memoryd: Any
) -> None:
    run = make_run()
    process = start_memoryd(run)
    hello = scheduler.wait_for(A, pb.Hello)
    assert (hello.run_id, hello.pid, hello.epoch) == (run.run_id, process.pid, 0)
    assert hello.data_endpoint.startswith("tcp://127.0.0.1:")
    scheduler.send(A, drain=pb.Drain(epoch=1))
    scheduler.wait_for(A, pb.Drained)
    text = page_of(run.run_id, A)
    assert "penstock_memoryd_holds_model 0.0" in text
    assert 'penstock_shm_segment_bytes{segment="weights"} 24576.0' in text
    assert 'penstock_shm_huge_page_bytes{segment="weights"} 0.0' in text  # smaller than one


def test_sigterm_keeps_the_memory(make_run: Any, scheduler: Any, start_memoryd: Any) -> None:
    run = make_run()
    process = start_memoryd(run)
    bring_up(scheduler, A)
    process.send_signal(signal.SIGTERM)
    assert end(process) == (130, "")
    assert len(segments_of(run)) == 5
    again = start_memoryd(run)
    scheduler.wait_for(A, pb.Hello)
    scheduler.send(A, drain=pb.Drain(epoch=2))
    assert scheduler.wait_for(A, pb.Drained).memory.incarnation == 1
    scheduler.send(A, shutdown=pb.Shutdown(keep_memory=True))
    assert end(again) == (0, "")
    assert len(segments_of(run)) == 5


def test_save_and_restore_from_it(
    make_run: Any, scheduler: Any, start_memoryd: Any, tmp_path: Path, helpers: Any
) -> None:
    run = make_run()
    process = start_memoryd(run)
    bring_up(scheduler, A)
    memory = attach(run, 0, "test")
    helpers.fill(memory)
    helpers.commit(memory, 7)
    directory = tmp_path / "step-00000007"
    scheduler.send(A, save=pb.Save(epoch=1, version=7, directory=str(directory)))
    saved = scheduler.wait_for(A, pb.Saved)
    assert (saved.version, saved.error) == (7, "")
    owned = [file.name for file in saved.files if not file.base]
    assert owned == [snapshot.block_file(b) for b in range(3)]
    assert [(file.base, file.reused) for file in saved.files].count((True, False)) == 3
    files = [
        WrittenFile(name=f.name, num_bytes=f.bytes, sha256=f.sha256, base=f.base)
        for f in saved.files
    ]
    helpers.manifest(memory, directory, 7, files)
    before = bytes(memory.raw((1, "exp_avg_sq", 0, 0)))

    memory.raw((1, "exp_avg_sq", 0, 0))[:] = b"\xff" * len(before)
    scheduler.send(A, drain=pb.Drain(epoch=2))
    scheduler.wait_for(A, pb.Drained)
    restore = pb.Restore(epoch=2, incarnation=2, source=str(directory), version=7)
    scheduler.send(A, restore=restore)
    assert scheduler.wait_for(A, pb.Restored).incarnation == 2
    assert bytes(memory.raw((1, "exp_avg_sq", 0, 0))) == before
    assert memory.control.committed == 7

    begin(scheduler, A, 2)
    scheduler.send(A, save=pb.Save(epoch=2, version=7, directory=str(tmp_path / "again")))
    again = scheduler.wait_for(A, pb.Saved)
    assert sorted(f.name for f in again.files) == sorted(f.name for f in saved.files)
    assert [file.reused for file in again.files if file.base] == [True] * 3
    scheduler.send(A, save=pb.Save(epoch=2, version=9, directory=str(directory)))
    assert "version 7 of incarnation 2 is committed" in scheduler.wait_for(A, pb.Saved).error
    scheduler.send(A, save=pb.Save(epoch=2, version=7, directory="/proc/nowhere"))
    assert "/proc/nowhere" in scheduler.wait_for(A, pb.Saved).error
    scheduler.send(A, shutdown=pb.Shutdown())
    assert end(process)[0] == 0
    memory.close()


def test_a_damaged_state_is_told_and_nothing_is_touched(
    make_run: Any, scheduler: Any, start_memoryd: Any, tmp_path: Path, helpers: Any
) -> None:
    run = make_run()
    process = start_memoryd(run)
    bring_up(scheduler, A)
    memory = attach(run, 0, "test")
    helpers.commit(memory, 7)
    files = saving.save(PinnedVersion(memory, 7), tmp_path / "state", lambda: False)
    helpers.manifest(memory, tmp_path / "state", 7, files)
    os.truncate(tmp_path / "state" / snapshot.block_file(1), 500)
    before = state_of(memory)

    scheduler.send(A, drain=pb.Drain(epoch=2))
    scheduler.wait_for(A, pb.Drained)
    source = str(tmp_path / "state")
    scheduler.send(A, restore=pb.Restore(epoch=2, incarnation=2, source=source, version=7))
    found = scheduler.wait_for(A, pb.Restored).damaged
    assert "block-0001.safetensors: has 500 bytes, the manifest says" in found
    assert state_of(memory) == before
    scheduler.send(A, shutdown=pb.Shutdown())
    assert end(process)[0] == 0
    memory.close()


def test_two_memoryds_serve_each_others_blocks(
    make_run: Any, scheduler: Any, start_memoryd: Any
) -> None:
    run = make_run(nodes=2)
    processes = [start_memoryd(run, "a"), start_memoryd(run, "b")]
    endpoints = {}
    for member in (A, B):
        endpoints[member] = scheduler.wait_for(member, pb.Hello).data_endpoint
        scheduler.send(member, drain=pb.Drain(epoch=1))
        scheduler.wait_for(member, pb.Drained)
        scheduler.send(member, restore=pb.Restore(epoch=1, incarnation=1, version=0))
    for member in (A, B):
        scheduler.wait_for(member, pb.Restored)
    memories = {A: attach(run, 0, "test"), B: attach(run, 1, "test")}
    assert [memory.owned_blocks() for memory in memories.values()] == [(2,), (0, 1)]
    with zmq.Context() as context:
        client = BlockClient(context, access=socket_access(run.config, run.path, "a"))
        for block, member in ((0, B), (1, B), (2, A)):
            expected = memories[member].weights(block, 0)
            out = np.zeros_like(expected)
            request = BlockRequest(
                run_id=run.run_id,
                epoch=1,
                attempt=1,
                array="weights",
                block=block,
                version=0,
                contribution=0,
            )
            client.fetch(endpoints[member], request, out, timeout_s=WAIT_S)
            assert expected.any()
            assert np.array_equal(out, expected)
        client.close()
    for member, process in zip((A, B), processes, strict=True):
        scheduler.send(member, shutdown=pb.Shutdown())
        assert end(process)[0] == 0
    assert segments_of(run) == []
    for memory in memories.values():
        memory.close()


def test_a_second_memoryd_is_turned_away(make_run: Any, scheduler: Any, start_memoryd: Any) -> None:
    run = make_run()
    first = start_memoryd(run)
    bring_up(scheduler, A)
    second = start_memoryd(run)
    code, said = end(second)
    assert code == 2
    assert "another memoryd of this run is alive" in said
    memory = attach(run, 0, "test")
    assert memory.control.owner.pid == first.pid
    memory.close()


def test_memory_that_does_not_fit_is_reported(
    make_run: Any, scheduler: Any, start_memoryd: Any
) -> None:
    run = make_run(elements=2 * 10**12)
    process = start_memoryd(run)
    failed = scheduler.wait_for(A, pb.Failed)
    assert failed.exit_code == 3
    assert "the segments of node a need" in failed.error
    code, said = end(process)
    assert code == 3
    assert said.startswith("penstock: the segments of node a need")
    assert segments_of(run) == []


def test_cores_that_are_not_there_are_reported_before_memory_is_made(
    make_run: Any, scheduler: Any, start_memoryd: Any
) -> None:
    run = make_run(optimizer={"cores": [0, 4095]})
    process = start_memoryd(run)
    failed = scheduler.wait_for(A, pb.Failed)
    assert failed.exit_code == 2
    assert "optimizer.cores = 0,4095: 4095 not on this machine" in failed.error
    assert end(process)[0] == 2
    assert segments_of(run) == []


def test_leftovers_of_a_killed_creation_are_reclaimed(
    make_run: Any, scheduler: Any, start_memoryd: Any
) -> None:
    run = make_run()
    Segment.create(run.memory_spec(0).name(SegmentKind.WEIGHTS), 4096).close()
    process = start_memoryd(run)
    bring_up(scheduler, A)
    scheduler.send(A, shutdown=pb.Shutdown())
    assert end(process)[0] == 0


def test_killed_at_any_moment_of_its_start(
    make_run: Any, scheduler: Any, start_memoryd: Any
) -> None:
    """Wherever the kill lands, the next memoryd comes up with whole segments."""
    run = make_run(elements=1_000_000)
    for delay_s in (0.3, 0.45, 0.55, 0.65):
        process = start_memoryd(run)
        time.sleep(delay_s)
        process.kill()
        end(process)
    last = start_memoryd(run)
    while scheduler.wait_for(A, pb.Hello).pid != last.pid:
        pass
    scheduler.send(A, drain=pb.Drain(epoch=1))
    assert scheduler.wait_for(A, pb.Drained).memory.incarnation == 0
    scheduler.send(A, shutdown=pb.Shutdown())
    assert end(last)[0] == 0
    assert segments_of(run) == []


def test_killed_during_a_restore_leaves_no_model(
    make_run: Any, scheduler: Any, start_memoryd: Any
) -> None:
    run = make_run(elements=300_000)
    process = start_memoryd(run)
    bring_up(scheduler, A)
    memory = attach(run, 0, "test")
    scheduler.send(A, drain=pb.Drain(epoch=2))
    scheduler.wait_for(A, pb.Drained)
    scheduler.send(A, restore=pb.Restore(epoch=2, incarnation=2, version=0))
    deadline = time.monotonic() + WAIT_S
    while memory.control.incarnation == 1:
        assert time.monotonic() < deadline, f"the restore did not begin within {WAIT_S} s"
        time.sleep(0.001)
    process.kill()
    end(process)
    assert memory.control.incarnation in (0, 2)  # 2: the kill came when all was written
    again = start_memoryd(run)
    while scheduler.wait_for(A, pb.Hello).pid != again.pid:
        pass
    scheduler.send(A, drain=pb.Drain(epoch=3))
    found = scheduler.wait_for(A, pb.Drained).memory
    assert found.incarnation == memory.control.incarnation
    scheduler.send(A, restore=pb.Restore(epoch=3, incarnation=3, version=0))
    assert scheduler.wait_for(A, pb.Restored).incarnation == 3
    scheduler.send(A, shutdown=pb.Shutdown())
    assert end(again)[0] == 0
    memory.close()


def test_refused_by_the_scheduler(make_run: Any, scheduler: Any, start_memoryd: Any) -> None:
    run = make_run()
    process = start_memoryd(run)
    scheduler.wait_for(A, pb.Hello)
    scheduler.send(A, refused=pb.Refused(reason="fenced"))
    assert end(process)[0] == 4


def test_heartbeats_go_on_during_a_long_restore(
    make_run: Any, scheduler: Any, start_memoryd: Any
) -> None:
    run = make_run(elements=1_000_000)
    start_memoryd(run)
    scheduler.wait_for(A, pb.Hello)
    scheduler.send(A, drain=pb.Drain(epoch=1))
    scheduler.wait_for(A, pb.Drained)
    before = scheduler.heartbeats
    scheduler.send(A, restore=pb.Restore(epoch=1, incarnation=1, version=0))
    scheduler.send(A, drain=pb.Drain(epoch=2))
    drained = scheduler.wait_for(A, pb.Drained)
    assert drained.epoch == 2
    deadline = time.monotonic() + 600.0
    while scheduler.heartbeats == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)
