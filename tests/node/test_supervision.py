"""Real supervisors over stub children: kill, fence, stop, restart, orphans, locks."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import yaml

from penstock.daemons.node.run_lock import RunLock, node_lock_path
from penstock.host.errors import ConfigError, ExitCode, LostMemberError
from penstock.host.process_identity import is_stopped, start_ticks
from penstock.host.stopping import SAME_KEY_S, STOP_ORDER, stop_signals_blocked
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.generated import scheduler_pb2_grpc as rpc
from penstock.protocol.run.run_result import RunEnd
from penstock.protocol.run.rundir import RunDirectory

HERE = Path(__file__).parent
FOREVER = "600"
DEADLINE_S = 600.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s until {what}"
        time.sleep(0.01)


class Node:
    """A supervisor in a child process; its stub children write their pids to files."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        RunDirectory.create(run_dir)
        self.configure(max_restarts=5)
        self.stubs: dict[str, list[str]] = {}
        self.process: subprocess.Popen[str] | None = None

    def configure(self, **cluster: float) -> None:
        config = {
            "model": {"hf": {"model_type": "llama"}},
            "data": {"path": "@stdlib"},
            "cluster": {"workers": 1, **cluster},
        }
        (self.run_dir / "resolved.yaml").write_text(yaml.safe_dump(config))

    def stub(self, name: str, seconds: str = FOREVER, code: int = 0) -> None:
        script = str(HERE / "stub_child.py")
        pids = str(self.run_dir / f"pids-{name}")
        self.stubs[name] = [sys.executable, script, pids, seconds, str(code)]

    def start(self, scheduler: str = "", parent_pid: int | None = None) -> None:
        (self.run_dir / "stubs.json").write_text(json.dumps(self.stubs))
        argv = [sys.executable, str(HERE / "stub_node.py"), str(self.run_dir), scheduler]
        argv += [] if parent_pid is None else [str(parent_pid)]
        self.process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)

    def pids(self, name: str) -> list[int]:
        path = self.run_dir / f"pids-{name}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def wait_started(self, name: str, times: int = 1) -> int:
        wait_until(lambda: len(self.pids(name)) >= times, f"{name} has started {times} times")
        return self.pids(name)[-1]

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> tuple[int, str]:
        assert self.process is not None
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors

    def close(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    instance = Node(tmp_path / "run")
    yield instance
    instance.close()
    pids = [pid for name in instance.stubs for pid in instance.pids(name)]
    wait_until(lambda: not any(start_ticks(pid) for pid in pids), f"none of {pids} is an orphan")


class StubScheduler(rpc.MembershipServicer):
    """Collects what a member says; says what the test puts into ``orders``."""

    def __init__(self) -> None:
        self.heard: queue.Queue[pb.MemberMessage] = queue.Queue()
        self.orders: queue.Queue[pb.SchedulerMessage | None] = queue.Queue()
        self.server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
        rpc.add_MembershipServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def Join(
        self, request_iterator: Iterator[pb.MemberMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.SchedulerMessage]:
        self._pool.submit(self._listen, request_iterator)
        yield pb.SchedulerMessage(heartbeat=pb.Heartbeat())
        while (order := self.orders.get()) is not None:
            yield order

    def _listen(self, messages: Iterator[pb.MemberMessage]) -> None:
        try:
            for message in messages:
                if not message.HasField("heartbeat"):
                    self.heard.put(message)
        except grpc.RpcError:
            return  # the member hung up

    def __enter__(self) -> StubScheduler:
        self._pool = futures.ThreadPoolExecutor(max_workers=2)
        return self

    def __exit__(self, *details: object) -> None:
        self.orders.put(None)
        self.server.stop(grace=1.0).wait()
        self._pool.shutdown()

    def next(self) -> pb.MemberMessage:
        return self.heard.get(timeout=DEADLINE_S)


def test_scheduler_exit_zero_ends_the_node_and_the_endpoint_file(node: Node) -> None:
    node.stub("schedulerd", "0.3", 0)
    node.start()
    wait_until((node.run_dir / "endpoint.json").exists, "endpoint.json is there")
    endpoint = json.loads((node.run_dir / "endpoint.json").read_text())
    assert node.process is not None
    assert endpoint["pid"] == node.process.pid
    assert node.wait()[0] == 0
    assert not (node.run_dir / "endpoint.json").exists()


def test_killed_children_are_replaced(node: Node) -> None:
    node.stub("schedulerd")
    node.stub("memoryd.a")
    node.start()
    for name in node.stubs:
        first = node.wait_started(name)
        os.kill(first, signal.SIGKILL)
        assert node.wait_started(name, 2) != first
    os.kill(node.pids("memoryd.a")[1], signal.SIGTERM)  # ends with 0, but the run goes on
    node.wait_started("memoryd.a", 3)


def test_stopped_children_are_replaced(node: Node) -> None:
    """schedulerd, which no scheduler watches, and a member that has not joined yet."""
    node.configure(heartbeat_interval_s=0.2, heartbeat_timeout_s=1.0)
    node.stub("schedulerd")
    node.stub("worker.0")
    node.start()
    for name in node.stubs:
        first = node.wait_started(name)
        os.kill(first, signal.SIGSTOP)
        assert node.wait_started(name, 2) != first
        assert start_ticks(first) is None


def test_a_node_that_lost_its_scheduler_heeds_the_note_of_the_end(node: Node) -> None:
    node.stub("memoryd.a")
    old = RunEnd(
        reason="stopped", code=ExitCode.STOPPED, keep_memory=False, failed=False, written_s=1.0
    )
    old.write(node.run_dir)
    node.start("127.0.0.1:1")
    first = node.wait_started("memoryd.a")
    assert start_ticks(first) is not None, "the note is of an earlier start"
    replace(old, written_s=2.0).write(node.run_dir)
    code, errors = node.wait()
    assert code == ExitCode.STOPPED
    assert "the run has ended: stopped" in errors
    assert node.pids("memoryd.a") == [first] and start_ticks(first) is None


def test_final_code_of_a_child(node: Node) -> None:
    node.stub("worker.0", "0.2", 3)
    node.start()
    code, errors = node.wait()
    assert code == 3
    assert "worker.0 ended with exit code 3" in errors


def test_restarts_run_out(node: Node) -> None:
    node.configure(max_restarts=2)
    node.stub("worker.0", "0", 1)
    node.start()
    code, errors = node.wait()
    assert code == 4
    assert len(node.pids("worker.0")) == 3
    assert "cluster.max_restarts is 2" in errors


def test_sigkill_of_the_node_kills_its_children(node: Node) -> None:
    for name in ("schedulerd", "memoryd.a", "worker.0"):
        node.stub(name)
    node.start()
    pids = [node.wait_started(name) for name in node.stubs]
    os.kill(pids[2], signal.SIGSTOP)  # a stopped child must die as well
    node.signal(signal.SIGKILL)
    node.wait()
    wait_until(lambda: not any(start_ticks(pid) for pid in pids), "the children are dead")


def test_first_signal_stops_through_the_scheduler_second_kills(node: Node) -> None:
    node.stub("memoryd.a")
    node.stub("schedulerd")
    node.start()
    node.wait_started("memoryd.a")
    node.wait_started("schedulerd")
    node.signal(signal.SIGINT)
    wait_until(lambda: start_ticks(node.pids("schedulerd")[0]) is None, "schedulerd has ended")
    assert start_ticks(node.pids("memoryd.a")[0]) is not None
    time.sleep(2 * SAME_KEY_S)
    node.signal(signal.SIGINT)
    assert node.wait()[0] == 130


@pytest.mark.parametrize("group", [False, True], ids=["parent", "whole group, then parent"])
def test_a_stop_that_comes_before_the_node_listens_is_obeyed(node: Node, group: bool) -> None:
    node.stub("schedulerd")
    with stop_signals_blocked():  # as penstock train starts its nodes
        node.start(parent_pid=os.getpid())
    assert node.process is not None
    if group:
        subprocess.run(["kill", "-TERM", str(node.process.pid)], check=True, timeout=DEADLINE_S)
    node.signal(STOP_ORDER)
    code, errors = node.wait()
    assert code == 0
    assert "stopping: the step under way is finished" in errors


def test_fence_over_the_link(node: Node) -> None:
    node.stub("worker.0")
    with StubScheduler() as scheduler:
        node.start(scheduler.address)
        first = node.wait_started("worker.0")
        hello = scheduler.next().hello
        assert (hello.member, hello.run_id) == ("node.a", RunDirectory(node.run_dir).run_id)
        os.kill(first, signal.SIGSTOP)
        fence = pb.Fence(member="worker.0", pid=first)
        scheduler.orders.put(pb.SchedulerMessage(fence=fence))
        assert scheduler.next().fenced == pb.Fenced(member="worker.0", pid=first)
        assert start_ticks(first) is None
        second = node.wait_started("worker.0", 2)
        scheduler.orders.put(pb.SchedulerMessage(fence=fence))
        assert scheduler.next().fenced == pb.Fenced(member="worker.0", pid=first)
        assert start_ticks(second) is not None
        scheduler.orders.put(pb.SchedulerMessage(drain=pb.Drain(epoch=2)))
        assert scheduler.next().drained.epoch == 2
        stopped = pb.Shutdown(reason="stopped on request", exit_code=5)
        scheduler.orders.put(pb.SchedulerMessage(shutdown=stopped))
        os.kill(second, signal.SIGTERM)
        scheduler.orders.put(None)
        assert node.wait()[0] == 5


def test_two_nodes_of_one_name_are_refused_by_pid(node: Node) -> None:
    node.stub("worker.0")
    node.start()
    node.wait_started("worker.0")
    assert node.process is not None
    with pytest.raises(ConfigError, match=f"in use by process {node.process.pid}"):
        RunLock.acquire(node_lock_path(node.run_dir, "a"), wait_s=5.0)


def test_lock_waits_for_the_children_of_a_killed_node(tmp_path: Path) -> None:
    path = node_lock_path(tmp_path, "a")
    held = RunLock.acquire(path, wait_s=0.0, inheritable=True)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as child:
        held.release()
        with pytest.raises(LostMemberError, match="processes of a killed run are still ending"):
            RunLock.acquire(path, wait_s=0.0)
        assert child.stdin is not None
        end = threading.Timer(0.2, child.stdin.close)
        end.start()
        with RunLock.acquire(path, wait_s=DEADLINE_S):
            assert child.wait(DEADLINE_S) == 0
        end.join()


def test_a_stopped_newborn_of_a_killed_node_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Its parent-death signal is not set yet; a stopped process that only waits is left alone."""
    path = node_lock_path(tmp_path, "a")
    held = RunLock.acquire(path, wait_s=0.0, inheritable=True)
    words = ["sh", "-c", "kill -STOP $$; exit 3"]
    with (
        subprocess.Popen(words, close_fds=False) as newborn,
        path.open() as waiting,
        subprocess.Popen(words, stdin=waiting) as waiter,
    ):
        held.release()
        wait_until(lambda: is_stopped(newborn.pid) and is_stopped(waiter.pid), "both are stopped")
        with RunLock.acquire(path, wait_s=DEADLINE_S):
            assert newborn.wait(DEADLINE_S) == -signal.SIGKILL
            waiter.send_signal(signal.SIGCONT)
            assert waiter.wait(DEADLINE_S) == 3


def test_a_run_that_ends_while_a_node_waits_for_its_lock_is_no_old_run(node: Node) -> None:
    """The node before was killed, its last child is still dying, and the run ends."""
    path = node_lock_path(node.run_dir, "a")
    held = RunLock.acquire(path, wait_s=0.0, inheritable=True)
    child = subprocess.Popen(["sleep", FOREVER], close_fds=False)
    held.release()
    node.stub("worker.0")
    node.start(scheduler="127.0.0.1:9")
    assert node.process is not None
    opened = Path(f"/proc/{node.process.pid}/fd")
    try:
        wait_until(lambda: str(path) in _targets(opened), "the node waits for its lock")
        end = RunEnd(
            reason="stopped", code=ExitCode.STOPPED, keep_memory=False, failed=False, written_s=2.0
        )
        end.write(node.run_dir)
    finally:
        child.kill()
        child.wait()
    assert node.wait()[0] == ExitCode.STOPPED
    assert node.pids("worker.0") == []


def _targets(descriptors: Path) -> set[str]:
    """Returns what a process has open; files that it closes meanwhile are left out."""
    targets = set()
    for file in descriptors.iterdir():
        with suppress(FileNotFoundError):
            targets.add(os.readlink(file))
    return targets
