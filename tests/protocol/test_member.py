"""The member link and the control client against a scripted server over loopback gRPC."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.host import world
from penstock.host.errors import (
    CapacityError,
    ConfigError,
    LostMemberError,
    ProtocolError,
    StateError,
)
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.generated import scheduler_pb2_grpc as rpc
from penstock.protocol.security import credentials
from penstock.protocol.security.credentials import Credentials, Options
from penstock.protocol.wire.control import ControlClient, is_stale
from penstock.protocol.wire.member import _HANGS, HANG_S, Doing, MemberLink, _log

DEADLINE_S = 600.0


class ShowsNothing(Credentials):
    """Connects to servers that ask for nothing."""

    def connect(self, address: str, options: Options) -> credentials.Connection:
        channel = grpc.insecure_channel(address, options=tuple(options))
        return credentials.Connection(channel=channel)


SHOWN = ShowsNothing(Path())


class HangingCall:
    """A stream that does not end when it is cancelled, until the test lets it."""

    def __init__(self, call: credentials.Joined, let_end: threading.Event) -> None:
        self.call = call
        self.cuts = 0
        self.let_end = let_end

    def __iter__(self) -> Iterator[pb.SchedulerMessage]:
        try:
            yield from self.call
        except grpc.RpcError:
            self.let_end.wait(DEADLINE_S)
        yield drain(99)  # too late for the link to take it

    def cancel(self) -> object:
        self.cuts += 1
        return self.call.cancel()


@dataclass(frozen=True, kw_only=True)
class HangingConnection(credentials.Connection):
    calls: list[HangingCall]
    let_end: threading.Event

    def join(self, requests: Iterator[pb.MemberMessage]) -> HangingCall:
        call = credentials.Connection.join(self, requests)
        self.calls.append(HangingCall(call, self.let_end))
        return self.calls[-1]


@contextmanager
def first_hangs() -> Iterator[tuple[Credentials, list[HangingCall]]]:
    """Credentials with which the first stream hangs until the end, and that stream's call."""
    calls: list[HangingCall] = []
    let_end = threading.Event()

    class Access(ShowsNothing):
        def connect(self, address: str, options: Options) -> credentials.Connection:
            connection = super().connect(address, options)
            if calls:
                return connection
            return HangingConnection(channel=connection.channel, calls=calls, let_end=let_end)

    try:
        yield Access(Path()), calls
    finally:
        let_end.set()


class Connection:
    """The server's end of one stream: what the member said, and a way to answer or hang up."""

    def __init__(self) -> None:
        self.heard: queue.Queue[pb.MemberMessage | None] = queue.Queue()
        self.answers: queue.Queue[pb.SchedulerMessage | None] = queue.Queue()

    def next(self, kind: str) -> Any:
        """The next message of ``kind``, skipping heartbeats of the member."""
        while True:
            message = self.heard.get(timeout=DEADLINE_S)
            assert message is not None, f"stream ended, expected {kind}"
            found = message.WhichOneof("body")
            if found == kind:
                return getattr(message, kind)
            assert found == "heartbeat", f"expected {kind}, got {found}"

    def ended(self) -> None:
        """Wait until the member's side is closed."""
        while self.heard.get(timeout=DEADLINE_S) is not None:
            pass


class ScriptedServer(rpc.MembershipServicer, rpc.ControlServicer):
    """Hands each joined stream to the test; control calls answer with ``control``."""

    def __init__(self, port: int = 0) -> None:
        self.joined: queue.Queue[Connection] = queue.Queue()
        self.control: Callable[[grpc.ServicerContext], Any] | None = None
        self.open: list[Connection] = []
        self.patient = False
        """Whether streams are kept after members have finished theirs."""
        self.pool = futures.ThreadPoolExecutor(max_workers=8)
        self.server = grpc.server(self.pool, options=(("grpc.so_reuseport", 0),))
        rpc.add_MembershipServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]
        rpc.add_ControlServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def Join(
        self, request_iterator: Iterator[pb.MemberMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.SchedulerMessage]:
        connection = Connection()
        self.open.append(connection)

        def read() -> None:
            try:
                for message in request_iterator:
                    connection.heard.put(message)
            except grpc.RpcError:
                pass
            connection.heard.put(None)
            if not self.patient:
                connection.answers.put(None)

        reader = threading.Thread(target=read)
        reader.start()
        self.joined.put(connection)
        while (answer := connection.answers.get()) is not None:
            yield answer
        context.cancel()  # type: ignore[no-untyped-call]
        reader.join()

    def _answer(self, request: Any, context: grpc.ServicerContext) -> Any:
        assert self.control is not None
        return self.control(context)

    Status = Pause = Resume = Snapshot = Stop = _answer

    def close(self) -> None:
        for connection in self.open:
            connection.answers.put(None)
        self.server.stop(grace=0.5).wait()
        self.pool.shutdown()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + DEADLINE_S
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
def make_link(no_leaks: None) -> Iterator[Callable[..., MemberLink]]:
    links = []

    def make(address: str, **options: Any) -> MemberLink:
        arguments: dict[str, Any] = {
            "access": SHOWN,
            "hello": lambda: pb.Hello(member="worker.0", pid=7),
            "heartbeat_interval_s": 0.05,
            "silence_timeout_s": 5.0,
        } | options
        link = MemberLink(address=address, **arguments)
        link.start()
        links.append(link)
        return link

    yield make
    for link in links:
        link.close(timeout_s=0.2)


class OwnClock(world.World):
    """A clock that only the test moves, for the threads that are made while it is entered."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def thread(self, target: Callable[..., object], **options: Any) -> threading.Thread:
        def live() -> None:
            world.enter(self)
            target()

        return super().thread(live, **options)

    def run_until(self, condition: Callable[[], bool]) -> None:
        """The clock runs, at twice the speed of time, until the condition is met."""
        while not condition():
            self.now_s += 0.1
            time.sleep(0.05)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread lives by this clock."""
        world.enter(self)
        yield
        world.enter(world.REAL)


def drain(epoch: int) -> pb.SchedulerMessage:
    return pb.SchedulerMessage(drain=pb.Drain(epoch=epoch))


def beat() -> pb.SchedulerMessage:
    return pb.SchedulerMessage(heartbeat=pb.Heartbeat())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_hello_first_then_messages_in_order_both_ways(
    server: ScriptedServer, make_link: Callable[..., MemberLink]
) -> None:
    link = make_link(server.address)
    stream = server.joined.get(timeout=DEADLINE_S)
    hello = stream.next("hello")
    assert hello == pb.Hello(member="worker.0", pid=7, nonce=hello.nonce) and hello.nonce
    assert not link.connected
    for epoch in range(3):
        stream.answers.put(beat())
        stream.answers.put(drain(epoch))
    received = [link.receive(DEADLINE_S) for _ in range(3)]
    assert received == [drain(epoch) for epoch in range(3)]
    assert link.connected
    for epoch in range(100):
        link.send(pb.MemberMessage(ready=pb.Ready(epoch=epoch)))
    assert [stream.next("ready").epoch for _ in range(100)] == list(range(100))
    assert link.receive(0.0) is None


def test_heartbeats_count_up(server: ScriptedServer, make_link: Callable[..., MemberLink]) -> None:
    make_link(server.address)
    stream = server.joined.get(timeout=DEADLINE_S)
    stream.next("hello")
    assert [stream.next("heartbeat").sequence for _ in range(3)] == [1, 2, 3]


def test_a_process_of_which_a_thread_stands_still_is_silent(
    server: ScriptedServer, make_link: Callable[..., MemberLink]
) -> None:
    """So the scheduler has it replaced, though the thread that sends heartbeats lives on."""
    doing = [Doing(stuck=True)]
    make_link(server.address, doing=lambda: doing[-1])
    stream = server.joined.get(timeout=DEADLINE_S)
    assert stream.next("hello")
    with pytest.raises(queue.Empty):
        stream.heard.get(timeout=0.3)  # six intervals
    doing.append(Doing())
    assert stream.next("heartbeat").sequence == 1


def test_reconnects_with_a_fresh_hello_and_keeps_old_messages_in_order(
    server: ScriptedServer, make_link: Callable[..., MemberLink]
) -> None:
    epochs = iter([4, 5])
    link = make_link(server.address, hello=lambda: pb.Hello(epoch=next(epochs)))
    first = server.joined.get(timeout=DEADLINE_S)
    assert first.next("hello").epoch == 4
    first.answers.put(drain(1))
    first.answers.put(None)
    second = server.joined.get(timeout=DEADLINE_S)
    assert second.next("hello").epoch == 5
    second.answers.put(drain(2))
    assert [link.receive(DEADLINE_S), link.receive(DEADLINE_S)] == [drain(1), drain(2)]


def test_messages_sent_without_a_scheduler_are_dropped_and_it_is_found_when_it_comes(
    make_link: Callable[..., MemberLink],
) -> None:
    port, attempts = free_port(), count(1)
    begun: list[int] = []

    def hello() -> pb.Hello:  # asked for by each attempt
        begun.append(next(attempts))
        return pb.Hello(member="worker.0", pid=7)

    link = make_link(f"127.0.0.1:{port}", hello=hello)
    wait_for(lambda: len(begun) >= 2)
    link.send(pb.MemberMessage(ready=pb.Ready(epoch=1)))
    assert not link.connected
    sent_in = len(begun)
    wait_for(lambda: len(begun) > sent_in)  # the attempt that may hold the message has failed
    server = ScriptedServer(port)
    try:
        stream = server.joined.get(timeout=DEADLINE_S)
        stream.next("hello")
        stream.answers.put(beat())
        wait_for(lambda: link.connected)
        link.send(pb.MemberMessage(ready=pb.Ready(epoch=2)))
        assert stream.next("ready").epoch == 2
    finally:
        server.close()


def test_a_silent_scheduler_is_left_and_joined_again(
    server: ScriptedServer, make_link: Callable[..., MemberLink]
) -> None:
    clock = OwnClock()
    with clock.entered():
        link = make_link(server.address, silence_timeout_s=0.3)
    first = server.joined.get(timeout=DEADLINE_S)
    first.next("hello")
    for _ in range(8):  # it speaks for longer than the timeout, so the stream stays
        first.answers.put(beat())
        wait_for(lambda: link.heard_s == clock.now_s and link.connected)
        first.next("heartbeat")
        clock.now_s += 0.1
        first.next("heartbeat")
    assert server.joined.empty()
    spoke_s = link.heard_s
    clock.run_until(lambda: not server.joined.empty())
    assert clock.now_s - spoke_s > 0.3
    second = server.joined.get(timeout=DEADLINE_S)
    first.ended()
    second.next("hello")


def test_a_stream_that_does_not_end_is_left_behind(
    server: ScriptedServer, make_link: Callable[..., MemberLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC may lose the end of a cancelled call. The member joins again all the same."""
    clock, errors = OwnClock(), list[str]()
    monkeypatch.setattr(_log, "error", lambda text, *values: errors.append(text))
    with first_hangs() as (access, calls):
        with clock.entered():
            link = make_link(server.address, silence_timeout_s=0.3, access=access)
        first = server.joined.get(timeout=DEADLINE_S)
        first.next("hello")
        clock.run_until(lambda: any(call.cuts > 0 for call in calls))
        first.ended()
        assert server.joined.empty()
        clock.now_s += HANG_S + 0.1
        second = server.joined.get(timeout=DEADLINE_S)
        second.next("hello")
        assert errors == [_HANGS]
    second.answers.put(drain(2))
    assert link.receive(DEADLINE_S) == drain(2)
    link.close(timeout_s=0.2)
    assert link.receive(0.0) is None


def test_close_returns_though_a_stream_does_not_end(
    server: ScriptedServer, make_link: Callable[..., MemberLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, errors = OwnClock(), list[str]()
    monkeypatch.setattr(_log, "error", lambda text, *values: errors.append(text))
    with first_hangs() as (access, calls), clock.entered():
        link = make_link(server.address, access=access)
        server.joined.get(timeout=DEADLINE_S).next("hello")
        closing = world.thread(target=partial(link.close, timeout_s=0.0))
        closing.start()
        wait_for(lambda: any(call.cuts > 0 for call in calls))
        clock.now_s += HANG_S + 0.1
        closing.join(timeout=DEADLINE_S)
        assert not closing.is_alive()
    assert errors == [_HANGS]


def test_listener_hears_a_message_before_it_is_queued(
    server: ScriptedServer, make_link: Callable[..., MemberLink]
) -> None:
    heard: list[pb.SchedulerMessage] = []
    link = make_link(server.address, listener=heard.append)
    stream = server.joined.get(timeout=DEADLINE_S)
    stream.answers.put(beat())
    stream.answers.put(drain(9))
    assert link.receive(DEADLINE_S) == drain(9)
    assert heard == [drain(9)]


def test_a_raising_listener_is_reported_to_the_receiver(
    server: ScriptedServer, make_link: Callable[..., MemberLink]
) -> None:
    def fail(message: pb.SchedulerMessage) -> None:
        raise KeyError("no handler")

    link = make_link(server.address, listener=fail)
    server.joined.get(timeout=DEADLINE_S).answers.put(drain(1))
    with pytest.raises(ProtocolError, match="no handler"):
        link.receive(DEADLINE_S)


def test_refused_is_delivered(server: ScriptedServer, make_link: Callable[..., MemberLink]) -> None:
    link = make_link(server.address)
    refused = pb.SchedulerMessage(refused=pb.Refused(reason="fenced"))
    server.joined.get(timeout=DEADLINE_S).answers.put(refused)
    assert link.receive(DEADLINE_S) == refused


def test_close_writes_what_is_queued(
    server: ScriptedServer, make_link: Callable[..., MemberLink]
) -> None:
    link = make_link(server.address)
    stream = server.joined.get(timeout=DEADLINE_S)
    stream.next("hello")
    for block in range(500):
        link.send(pb.MemberMessage(block_status=pb.BlockStatus(block=block)))
    link.send(pb.MemberMessage(failed=pb.Failed(error="no room")))
    link.close()
    assert [stream.next("block_status").block for _ in range(500)] == list(range(500))
    assert stream.next("failed").error == "no room"
    assert link.receive(DEADLINE_S) is None


def test_close_ends_although_nobody_ever_answered(make_link: Callable[..., MemberLink]) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        link = make_link(f"127.0.0.1:{mute.getsockname()[1]}")
        link.close(timeout_s=0.2)
    assert link.receive(DEADLINE_S) is None


def test_close_cuts_a_stream_that_begins_while_it_closes(
    server: ScriptedServer, make_link: Callable[..., MemberLink]
) -> None:
    server.patient = True
    asked, go_on = threading.Event(), threading.Event()

    def hello() -> pb.Hello:
        asked.set()
        go_on.wait(DEADLINE_S)
        return pb.Hello(member="worker.0", pid=7)

    link = make_link(server.address, hello=hello)
    assert asked.wait(DEADLINE_S)
    closing = threading.Thread(target=link.close, kwargs={"timeout_s": 0.0})
    closing.start()
    time.sleep(0.1)  # it has looked for a stream, and there is none yet
    go_on.set()
    closing.join(timeout=600.0)
    ended = not closing.is_alive()
    server.close()
    closing.join()
    assert ended


def test_control_calls_return_typed_replies(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "endpoint.json").write_text(json.dumps({"scheduler": server.address, "pid": 1}))
    with ControlClient.for_run(tmp_path, access=SHOWN) as client:
        server.control = lambda context: pb.StatusReply(version=3)
        assert client.status().version == 3
        server.control = lambda context: pb.ControlReply(message="done")
        assert [client.pause(), client.resume(), client.stop()] == ["done"] * 3
        server.control = lambda context: pb.SnapshotReply(directory="step-00000003", version=3)
        assert client.snapshot().directory == "step-00000003"


def test_an_endpoint_that_a_dead_node_left_is_no_run(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    endpoint = tmp_path / "endpoint.json"
    for host, stale in [("127.0.0.1", True), ("[::1]", True), ("10.0.0.7", False)]:
        endpoint.write_text(json.dumps({"scheduler": f"{host}:9", "pid": ended.pid}))
        assert is_stale(tmp_path) is stale
    endpoint.write_text(json.dumps({"scheduler": "127.0.0.1:9", "pid": os.getpid()}))
    assert not is_stale(tmp_path)
    endpoint.write_text(json.dumps({"scheduler": "127.0.0.1:9", "pid": ended.pid}))
    with (tmp_path / ".lock-a").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not is_stale(tmp_path), "as from another PID namespace"
    with pytest.raises(ConfigError, match=r"left by a first node that is dead.*doctor --clean"):
        ControlClient.for_run(tmp_path, access=SHOWN)


def test_control_errors_say_what_was_tried(server: ScriptedServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"endpoint\.json does not exist"):
        ControlClient.for_run(tmp_path)
    (tmp_path / "endpoint.json").write_text("[]")
    with pytest.raises(StateError, match="expected"):
        ControlClient.for_run(tmp_path)
    port = free_port()
    with ControlClient(f"127.0.0.1:{port}", SHOWN) as client:
        with pytest.raises(LostMemberError, match=f"127.0.0.1:{port}"):
            client.status()
    with ControlClient(server.address, SHOWN, timeout_s=0.2) as client:
        hold = threading.Event()
        server.control = lambda context: hold.wait(DEADLINE_S)
        with pytest.raises(LostMemberError, match=r"within 0\.2 s"):
            client.status()
        hold.set()
        server.control = lambda context: context.abort(
            grpc.StatusCode.RESOURCE_EXHAUSTED, "disk full"
        )
        with pytest.raises(CapacityError, match="disk full"):
            client.snapshot()
