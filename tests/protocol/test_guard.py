"""Connections that bring frames without end are cut; those that bring messages are not."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from penstock.protocol.wire.connection_limiter import Bounds, ConnectionLimiter, allow_own_user_only
from tests.protocol.hostile import HostilePeer

MIB = 2**20
BOUNDS = Bounds(connections=4, connection_bytes=4 * MIB, total_bytes=6 * MIB, silent_bytes=6 * MIB)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Server:
    """A guarded PULL socket whose messages are counted."""

    def __init__(self, bounds: Bounds = BOUNDS) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.socket.set(zmq.MAXMSGSIZE, MIB)
        self.socket.set(zmq.RCVHWM, 1)
        self.socket.bind("tcp://127.0.0.1:0")
        self.address = self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.port = int(self.address.rpartition(":")[2])
        self.num_cut = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.received = threading.Semaphore(0)
        self.limiter = ConnectionLimiter(self.socket, bounds, self._count)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _count(self) -> None:
        self.num_cut += 1
        assert self.may_go_on.wait(600.0)

    def wait_cut(self, number: int) -> None:
        """Until so many connections were cut, and no more."""
        deadline = time.monotonic() + 600.0
        while self.num_cut < number and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.num_cut == number

    def _run(self) -> None:
        while not self._closing.is_set():
            if self.socket.poll(20):
                self.limiter.heard(self.socket.recv_multipart(copy=False)[-1])
                self.received.release()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self.limiter.close()
        self.context.destroy(linger=0)


@pytest.fixture
def server() -> Iterator[Server]:
    instance = Server()
    yield instance
    instance.close()


@pytest.mark.parametrize("part_bytes", [0, 200, 60_000])
def test_frames_without_end_are_cut_again_and_again(server: Server, part_bytes: int) -> None:
    friend = server.context.socket(zmq.PUSH)
    friend.connect(server.address)
    before = resident()
    for number in range(1, 7):
        peer = HostilePeer("127.0.0.1", server.port, b"PUSH")
        sent = peer.send_parts(part_bytes, 10**9)
        peer.close()
        assert sent < 10**9, "cut"
        server.wait_cut(number)
        friend.send(b"x" * MIB)
        assert server.received.acquire(timeout=600.0), "others go on"
    assert resident() - before < 300 * MIB
    assert server.num_cut == 6
    friend.close(linger=0)


def test_large_messages_one_after_the_other_are_no_offence(server: Server) -> None:
    friends = [server.context.socket(zmq.PUSH) for _ in range(3)]
    for friend in friends:
        friend.connect(server.address)
    for _ in range(40):
        for friend in friends:
            friend.send_multipart([b"head", b"x" * (MIB // 2), b"y" * (MIB // 4)])
    for _ in range(120):
        assert server.received.acquire(timeout=600.0)
    assert server.num_cut == 0
    for friend in friends:
        friend.close(linger=0)


def test_all_together_are_bounded_and_the_largest_goes_first(server: Server) -> None:
    peers = [HostilePeer("127.0.0.1", server.port, b"PUSH") for _ in range(3)]
    for peer, parts_bytes in zip(peers, (2 * MIB, 3 * MIB, 2 * MIB), strict=True):
        assert peer.send_parts(1000, parts_bytes) >= parts_bytes
    peers[1].socket.settimeout(600.0)
    with pytest.raises(ConnectionResetError):
        peers[1].socket.recv(10)
    server.wait_cut(1)
    for peer in peers:
        peer.close()


def test_those_that_never_sent_a_message_have_less_room() -> None:
    bounds = Bounds(connections=9, connection_bytes=MIB, total_bytes=4 * MIB, silent_bytes=MIB)
    server = Server(bounds)
    friend = HostilePeer("127.0.0.1", server.port, b"PUSH")
    peers = [HostilePeer("127.0.0.1", server.port, b"PUSH") for _ in range(3)]
    try:
        friend.socket.sendall(b"\0\x05hello")
        assert server.received.acquire(timeout=600.0)
        time.sleep(0.1)  # the limiter looks
        friend.send_parts(1000, MIB * 3 // 4)
        for number, peer in enumerate(peers):
            assert peer.send_parts(1000, MIB * 3 // 4), number
        server.wait_cut(2)
        friend.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            friend.socket.recv(10)
    finally:
        for peer in (friend, *peers):
            peer.close()
        server.close()


def test_too_many_connections_cost_the_oldest_that_never_said_anything(server: Server) -> None:
    friend = server.context.socket(zmq.PUSH)
    friend.connect(server.address)
    friend.send(b"hello")
    assert server.received.acquire(timeout=600.0)
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20.0))
            for _ in range(12)
        ]
        for connection in silent[:9]:
            with pytest.raises(ConnectionResetError):
                while connection.recv(100):
                    pass  # the greeting, then the end
        friend.send(b"again")
        assert server.received.acquire(timeout=600.0)
        server.wait_cut(9)
    friend.close(linger=0)


def test_who_spoke_before_the_guard_saw_them_come_is_not_silent() -> None:
    server = Server(Bounds(connections=2, connection_bytes=MIB, total_bytes=MIB, silent_bytes=MIB))
    friend = server.context.socket(zmq.PUSH)
    silent: list[socket.socket] = []

    def connect() -> None:
        silent.append(socket.create_connection(("127.0.0.1", server.port), 20.0))
        while not silent[-1].recv(100):
            pass  # libzmq's greeting: it was accepted

    try:
        server.may_go_on.clear()  # the limiter's thread stays in the first cut
        for _ in range(3):
            connect()
        friend.connect(server.address)
        friend.send(b"hello")
        assert server.received.acquire(timeout=600.0)
        server.may_go_on.set()
        server.wait_cut(2)
        for _ in range(2):
            connect()
        server.wait_cut(4)
        for connection in silent[:4]:
            with pytest.raises(ConnectionResetError):
                while connection.recv(100):
                    pass
        friend.send(b"again")
        assert server.received.acquire(timeout=600.0)
        assert server.num_cut == 4
    finally:
        server.may_go_on.set()
        for connection in silent:
            connection.close()
        friend.close(linger=0)
        server.close()


def test_local_sockets_are_for_their_own_user() -> None:
    """A filter for nobody's user keeps this one out: whose sockets it is for may connect."""
    context: zmq.Context[Any] = zmq.Context()
    for allowed in (True, False):
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        if allowed:
            allow_own_user_only(pull)
        else:
            pull.set(zmq.IPC_FILTER_UID, 65534)
        address = f"ipc://@penstock-test-limiter-{allowed}"
        pull.bind(address)
        push.connect(address)
        push.send(b"x")
        assert bool(pull.poll(5000 if allowed else 300)) is allowed
        push.close(linger=0)
        pull.close(linger=0)
    context.destroy(linger=0)
