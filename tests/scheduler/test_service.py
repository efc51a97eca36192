"""schedulerd as a process, with fake members on real streams."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.client.views.screen.following import WATCH_INTERVAL_S
from penstock.host.errors import CapacityError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.generated import scheduler_pb2_grpc as rpc
from penstock.protocol.run.names import expected_members
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.token import token_path
from tests.scheduler.fakes import (
    DEADLINE_S,
    FakeCluster,
    SchedulerProcess,
    free_port,
    make_run,
    wait_for,
)


class FakeRun:
    """A run, its fake members, and as many schedulers in a row as a test wants."""

    def __init__(self, path: Path, **sections: dict[str, Any]) -> None:
        self.directory: RunDirectory = make_run(path, **sections)
        self.port = free_port()
        self.cluster = FakeCluster(self.directory, self.port)
        self.schedulers: list[SchedulerProcess] = []

    def schedule(self) -> SchedulerProcess:
        self.schedulers.append(SchedulerProcess(self.directory, self.port))
        return self.schedulers[-1]

    def lines(self) -> list[dict[str, Any]]:
        text = (self.directory.path / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def steps(self) -> list[str]:
        return sorted(path.name for path in (self.directory.path / "state").iterdir())

    def check_history(self, batch: int = 8) -> int:
        """Each version once, in order; data positions of committed attempts without a gap.

        For a scheduler that has ended: a running one writes a step's line after it has told the
        members. Returns the committed version.
        """
        assert all(scheduler.process.poll() is not None for scheduler in self.schedulers)
        applied = list(self.cluster.memory.applied)
        steps = len(applied)
        assert [record.version for record in applied] == list(range(1, steps + 1))
        attempts = {attempt.attempt: attempt for attempt in self.cluster.attempts}
        assert len(attempts) == len(self.cluster.attempts), "an attempt number came twice"
        positions = [attempts[record.attempt].data_position for record in applied]
        assert positions == [batch * i for i in range(steps)]
        lines = [line for line in self.lines() if line["phase"] == "train"][:steps]
        assert [line["step"] for line in lines] == list(range(1, steps + 1))
        assert [line["attempt"] for line in lines] == [record.attempt for record in applied]
        return steps

    def close(self) -> None:
        self.cluster.close()
        for scheduler in self.schedulers:
            if scheduler.process.poll() is None:
                scheduler.kill()


@pytest.fixture
def make_fake_run(tmp_path: Path) -> Iterator[Callable[..., FakeRun]]:
    runs = []

    def make(**sections: dict[str, Any]) -> FakeRun:
        runs.append(FakeRun(tmp_path / "run", **sections))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def test_a_whole_run(make_fake_run: Callable[..., FakeRun]) -> None:
    run = make_fake_run(train={"steps": 5, "save_every": 2, "eval_every": 5, "keep_snapshots": 1})
    run.cluster.start()
    assert run.schedule().wait() == (0, "")
    assert run.check_history() == 5
    assert run.steps() == ["step-00000005"]
    manifest = json.loads((run.directory.path / "state/step-00000005/manifest.json").read_text())
    assert manifest["version"] == 5 and manifest["table_digest"] == run.directory.table.digest
    assert manifest["scheduler"]["data_position"] == 40
    assert sorted(manifest["files"]) == [f"block-{b:04d}.safetensors" for b in range(3)]
    evaluation = run.lines()[-1]
    assert (evaluation["phase"], evaluation["loss"], evaluation["step"]) == ("eval", 2.0, 5)
    shutdowns = run.cluster.shutdowns
    assert set(shutdowns) == set(expected_members(run.directory.config))
    assert not any(shutdown.keep_memory for shutdown in shutdowns.values())
    assert [attempt.base_version for attempt in run.cluster.attempts] == [0, 1, 2, 3, 4]


def test_who_watches_a_run_sees_its_end(make_fake_run: Callable[..., FakeRun]) -> None:
    """Asking as ``penstock watch`` does; one that has stopped asking holds nothing up for long."""
    run = make_fake_run(train={"steps": 60})
    scheduler = run.schedule()
    run.cluster.start()
    seen = []
    wait_for(run.cluster.status, "status")
    with run.cluster.control() as gone, run.cluster.control() as client:
        gone.status()
        while not seen or seen[-1].phase not in ("done", "failed"):
            seen.append(client.status())
            time.sleep(WATCH_INTERVAL_S)
    assert (seen[-1].phase, seen[-1].version) == ("done", 60)
    assert scheduler.wait() == (0, "")


def test_a_killed_scheduler_comes_back_and_goes_on(make_fake_run: Callable[..., FakeRun]) -> None:
    run = make_fake_run(train={"steps": 200})
    scheduler = run.schedule()
    run.cluster.start()
    for version in (20, 70):
        run.cluster.wait_for_version(version)
        scheduler.kill()
        scheduler = run.schedule()
    assert scheduler.wait() == (0, "")
    assert run.check_history() == 200
    assert len(run.cluster.memory.restores) == 1, "the memory lived on"
    assert run.cluster.fences == [] and run.cluster.refused == []


def test_a_run_is_resumed_from_its_saved_state(make_fake_run: Callable[..., FakeRun]) -> None:
    run = make_fake_run(train={"steps": 100000})
    scheduler = run.schedule()
    run.cluster.start()
    run.cluster.wait_for_version(3)
    scheduler.process.send_signal(signal.SIGTERM)
    assert scheduler.wait() == (5, ""), "not finished"
    version = run.cluster.memory.committed
    assert run.steps() == [f"step-{version:08d}"]
    run.cluster.close()
    attempts = run.cluster.attempts
    run.cluster = FakeCluster(run.directory, run.port)
    scheduler = run.schedule()
    run.cluster.start()
    run.cluster.wait_for_version(version + 2)
    [restore] = run.cluster.memory.restores
    assert (restore.version, Path(restore.source).name) == (version, run.steps()[0])
    resumed = run.cluster.attempts[0]
    assert resumed.base_version == version and resumed.data_position == 8 * version
    assert resumed.attempt > attempts[-1].attempt
    assert resumed.epoch > attempts[-1].epoch


def test_dead_and_silent_members_are_replaced(make_fake_run: Callable[..., FakeRun]) -> None:
    run = make_fake_run(train={"steps": 100000}, cluster={"heartbeat_timeout_s": 2.0})
    scheduler = run.schedule()
    run.cluster.start()
    for name in ("worker.1", "optimizerd.a", "memoryd.a"):
        run.cluster.wait_for_version(run.cluster.memory.committed + 5)
        run.cluster.die(name)
        wait_for(lambda n=name: n in run.cluster.fences, "fence")  # type: ignore[misc]
    run.cluster.wait_for_version(run.cluster.memory.committed + 5)
    status = run.cluster.status()
    assert status is not None and status.phase in {"running", "deciding"}
    assert {m.member: m.restarts for m in status.members if m.restarts} == dict.fromkeys(
        ("worker.1", "optimizerd.a", "memoryd.a"), 1
    )
    scheduler.process.send_signal(signal.SIGTERM)
    assert scheduler.wait()[0] == 5
    run.check_history()


def test_members_that_beat_and_do_nothing_are_replaced(
    make_fake_run: Callable[..., FakeRun],
) -> None:
    run = make_fake_run(train={"steps": 100000}, cluster={"attempt_timeout_s": 0.5})
    scheduler = run.schedule()
    run.cluster.start()
    for name in ("worker.1", "optimizerd.a"):
        run.cluster.wait_for_version(run.cluster.memory.committed + 5)
        run.cluster.silent.add(name)
        wait_for(lambda n=name: n in run.cluster.fences, "fence")  # type: ignore[misc]
    run.cluster.wait_for_version(run.cluster.memory.committed + 5)
    assert run.cluster.fences == ["worker.1", "optimizerd.a"]
    scheduler.process.send_signal(signal.SIGTERM)
    assert scheduler.wait()[0] == 5
    run.check_history()


def test_a_member_that_hangs_in_every_life_ends_the_run(
    make_fake_run: Callable[..., FakeRun],
) -> None:
    run = make_fake_run(cluster={"attempt_timeout_s": 0.3})
    scheduler = run.schedule()
    run.cluster.stuck.add("worker.0")
    run.cluster.start()
    code, errors = scheduler.wait()
    assert code == 4 and run.cluster.fences == ["worker.0"] * 3
    assert "the attempt after step 0 hung 3 times in a row, the last time worker.0: no" in errors
    kept = [shutdown.keep_memory for shutdown in run.cluster.shutdowns.values()]
    assert kept and not any(kept), "nothing was trained"


def test_a_stopped_scheduler_kills_nobody(make_fake_run: Callable[..., FakeRun]) -> None:
    run = make_fake_run(train={"steps": 100000})
    scheduler = run.schedule()
    run.cluster.start()
    run.cluster.wait_for_version(5)
    os.kill(scheduler.process.pid, signal.SIGSTOP)
    time.sleep(1.5)  # past the members' patience: their streams are cut
    os.kill(scheduler.process.pid, signal.SIGCONT)
    before = run.cluster.memory.committed
    run.cluster.wait_for_version(before + 20)
    assert run.cluster.fences == [] and run.cluster.refused == []


def test_control_calls(make_fake_run: Callable[..., FakeRun]) -> None:
    run = make_fake_run(train={"steps": 100000})
    scheduler = run.schedule()
    run.cluster.start("node.a", "memoryd.a", "optimizerd.a", "worker.0")
    wait_for(run.cluster.status, "status")
    with run.cluster.control() as client:
        assert client.status().message.endswith("waiting for worker.1")
        client.pause()
        run.cluster.start("worker.1")
        wait_for(lambda: client.status().phase == "paused", "pause")
        assert client.status().version == 0
        client.resume()
        run.cluster.wait_for_version(3)
        snapshot = client.snapshot()
        assert Path(snapshot.directory).name == f"step-{snapshot.version:08d}"
        client.pause()
        wait_for(lambda: client.status().phase == "paused", "pause")
        status = client.status()
        assert status.has_saved and status.saved_version == snapshot.version
        assert json.loads(status.last_metrics_json)["step"] == status.version
        run.cluster.save_error = "no space left on device"
        with pytest.raises(CapacityError, match="no space left on device"):
            client.snapshot()
        run.cluster.save_error = ""
        with grpc.insecure_channel(run.cluster.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="penstock.v1.Control")
            assert stub.Check(request, timeout=DEADLINE_S, metadata=run.cluster.shown()).status == 1
        assert "stopping" in client.stop()
    assert scheduler.wait()[0] == 5
    assert run.steps()[-1] == f"step-{run.cluster.memory.committed:08d}"


STOPPABLE = """
import os, sys
from pathlib import Path
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.generated import scheduler_pb2_grpc as rpc
from penstock.protocol.security.credentials import Credentials
from penstock.protocol.wire.member import MemberLink

address, run_id, member, token = sys.argv[1:]
hello = pb.Hello(run_id=run_id, member=member, pid=os.getpid())
link = MemberLink(
    address=address,
    access=Credentials(Path(token)),
    hello=lambda: hello,
    heartbeat_interval_s=0.05,
    silence_timeout_s=1.0,
)
link.start()
while True:
    message = link.receive(20.0)
    assert message is not None
    kind = message.WhichOneof("body")
    body = getattr(message, kind)
    if kind == "drain":
        link.send(pb.MemberMessage(drained=pb.Drained(epoch=body.epoch)))
    elif kind == "begin":
        link.send(pb.MemberMessage(ready=pb.Ready(epoch=body.epoch)))
    elif kind == "run_attempt":
        done = pb.AttemptDone(epoch=body.epoch, attempt=body.attempt, loss_tokens=1)
        link.send(pb.MemberMessage(attempt_done=done))
    elif kind == "refused":
        sys.stdout.write(body.reason)
        link.close()
        sys.exit(7)
"""


def test_a_stopped_process_is_fenced_and_refused_when_it_wakes(
    make_fake_run: Callable[..., FakeRun],
) -> None:
    run = make_fake_run(train={"steps": 100000}, cluster={"heartbeat_timeout_s": 2.0})
    cluster = run.cluster
    run.schedule()
    cluster.start("node.a", "memoryd.a", "optimizerd.a", "worker.0")
    command = [
        *(sys.executable, "-c", STOPPABLE, cluster.address, run.directory.run_id, "worker.1"),
        str(token_path(cluster.run.path)),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        cluster.pids["worker.1"] = process.pid
        cluster.wait_for_version(10)
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: "worker.1" in cluster.fences, "fence")
        before = cluster.memory.committed
        cluster.wait_for_version(before + 5)  # with the replacement that the fake node started
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7
    assert "was lost and has been replaced" in output


def test_a_damaged_manifest_is_refused_and_members_are_told(
    make_fake_run: Callable[..., FakeRun],
) -> None:
    run = make_fake_run(train={"steps": 3})
    run.cluster.start()
    assert run.schedule().wait() == (0, "")
    manifest = run.directory.path / "state/step-00000003/manifest.json"
    manifest.write_text(manifest.read_text()[:50])
    run.cluster.close()
    run.cluster = FakeCluster(run.directory, run.port)
    run.cluster.start()
    code, errors = run.schedule().wait()
    assert code == 2 and str(manifest) in errors
    assert run.cluster.memory.restores == []
    shutdowns = run.cluster.shutdowns
    wait_for(lambda: len(shutdowns) == 5, "shutdown of all members")
    assert all(shutdown.keep_memory for shutdown in shutdowns.values())


def test_threads_do_not_grow_with_the_members(make_fake_run: Callable[..., FakeRun]) -> None:
    """Two for each member once; 704 members of 64 nodes were 1,420 threads."""
    run = make_fake_run(train={"steps": 100000}, cluster={"workers": 30})
    scheduler = run.schedule()
    run.cluster.start()
    run.cluster.wait_for_version(3)
    words = Path(f"/proc/{scheduler.process.pid}/status").read_text().split()
    assert int(words[words.index("Threads:") + 1]) < 20, "of 33 members"


class Silent:
    """Callers that open ``calls`` calls of a method on each of several connections, and say nothing
    for as long as they are left.
    """

    def __init__(self, cluster: FakeCluster, method: str, *, connections: int, calls: int) -> None:
        self._end = threading.Event()
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channels = [
            grpc.insecure_channel(cluster.address, options=options) for _ in range(connections)
        ]
        self.calls = [
            channel.stream_stream(method)(self._nothing(), metadata=cluster.shown())
            for channel in self._channels
            for _ in range(calls)
        ]

    def _nothing(self) -> Iterator[bytes]:
        self._end.wait(DEADLINE_S)
        yield from ()

    def close(self) -> None:
        self._end.set()
        for call in self.calls:
            call.cancel()
        for channel in self._channels:
            channel.close()


@pytest.mark.parametrize(
    "method",
    [
        "/penstock.v1.Membership/Join",
        "/penstock.v1.Control/Status",
        "/grpc.health.v1.Health/Check",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
def test_silent_callers_hold_nobody_up(make_fake_run: Callable[..., FakeRun], method: str) -> None:
    """Status answers at once and a dead member is replaced, while 160 calls say nothing, and more
    come all the time.
    """
    run = make_fake_run(train={"steps": 100000})
    scheduler = run.schedule()
    run.cluster.start()
    run.cluster.wait_for_version(3)
    crowds = [Silent(run.cluster, method, connections=10, calls=16)]
    try:
        with run.cluster.control() as client:
            for _ in range(5):
                assert client.status().run_id == run.directory.run_id
                crowds.append(Silent(run.cluster, method, connections=1, calls=30))
            run.cluster.die("worker.1")
            wait_for(lambda: "worker.1" in run.cluster.fences, "fence")
            before = run.cluster.memory.committed
            run.cluster.wait_for_version(before + 3)
            assert client.status().phase in ("running", "deciding")
    finally:
        for crowd in crowds:
            crowd.close()
    scheduler.process.send_signal(signal.SIGTERM)
    assert scheduler.wait()[0] == 5
    run.check_history()


def test_a_huge_hello_is_neither_kept_nor_logged(make_fake_run: Callable[..., FakeRun]) -> None:
    run = make_fake_run(train={"steps": 100000})
    scheduler = run.schedule()
    run.cluster.start()
    run.cluster.wait_for_version(3)
    names = {"too long for gRPC": "x" * 15 * 2**20, "too long": "y" * 2**19, "unprintable": "a\nb"}
    with grpc.insecure_channel(run.cluster.address) as channel:
        stub = rpc.MembershipStub(channel)  # type: ignore[no-untyped-call]  # generated
        for name in names.values():
            hello = pb.Hello(run_id=run.directory.run_id, member=name, pid=1)
            with pytest.raises(grpc.RpcError):
                hellos = iter([pb.MemberMessage(hello=hello)])
                list(stub.Join(hellos, timeout=DEADLINE_S, metadata=run.cluster.shown()))
    assert sum(path.stat().st_size for path in (run.directory.path / "logs").iterdir()) < 200_000
    version = run.cluster.memory.committed
    run.cluster.wait_for_version(version + 3)
    scheduler.process.send_signal(signal.SIGTERM)
    assert scheduler.wait() == (5, "")
    run.check_history()


def test_a_flood_of_messages_waits_outside(make_fake_run: Callable[..., FakeRun]) -> None:
    """A member that sends more than the machine takes is slowed down, and memory does not grow."""
    run = make_fake_run(train={"steps": 100000})
    scheduler = run.schedule()
    run.cluster.start("node.a", "memoryd.a", "optimizerd.a", "worker.0")
    wait_for(lambda: run.cluster.status() is not None, "scheduler that answers")
    status = Path(f"/proc/{scheduler.process.pid}/status")
    hello = pb.Hello(run_id=run.directory.run_id, member="worker.1", pid=os.getpid(), nonce=3)
    text = "z" * (2**20 - 100)
    sent = []

    def flood() -> Iterator[pb.MemberMessage]:
        yield pb.MemberMessage(hello=hello)
        for number in range(400):
            sent.append(number)
            yield pb.MemberMessage(heartbeat=pb.Heartbeat(activity=text))

    with grpc.insecure_channel(run.cluster.address) as channel:
        stub = rpc.MembershipStub(channel)  # type: ignore[no-untyped-call]  # generated
        call = stub.Join(flood(), metadata=run.cluster.shown())
        peak = 0
        wait_for(lambda: len(sent) > 10, "messages")
        deadline = time.monotonic() + DEADLINE_S
        while len(sent) < 400 and time.monotonic() < deadline:
            words = status.read_text().split()
            peak = max(peak, int(words[words.index("VmRSS:") + 1]))
            time.sleep(0.01)
        call.cancel()
    assert len(sent) == 400 and 0 < peak < 300 * 1024, f"{peak} KiB resident"


def test_a_port_in_use_is_named(make_fake_run: Callable[..., FakeRun]) -> None:
    run = make_fake_run()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", run.port))
        taken.listen()
        code, errors = run.schedule().wait()
    assert code == 2
    assert f"cluster.scheduler_port = {run.port}" in errors


def test_a_second_signal_ends_at_once(make_fake_run: Callable[..., FakeRun]) -> None:
    run = make_fake_run(train={"steps": 100000})
    scheduler = run.schedule()
    run.cluster.start()
    run.cluster.wait_for_version(3)
    run.cluster.silent.update(("worker.0", "worker.1"))
    time.sleep(0.3)  # an attempt starts without a working member
    for _ in range(3):  # of one round
        scheduler.process.send_signal(signal.SIGTERM)
    scheduler.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert scheduler.process.poll() is None, "it waits for the attempt"
    scheduler.process.send_signal(signal.SIGINT)
    assert scheduler.wait()[0] == 130
    assert run.cluster.shutdowns["memoryd.a"].keep_memory
