"""Who is let in to a ZeroMQ socket on TCP, whom a process talks to, and what strangers cost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from penstock.host.errors import ConfigError, LostMemberError, ProtocolError
from penstock.protocol.security.authority import make
from penstock.protocol.wire.blocks import BlockClient
from penstock.protocol.wire.connection_limiter import PRE_AUTH_BYTES, Bounds, ConnectionLimiter
from penstock.protocol.wire.frames import BlockRequest
from penstock.protocol.wire.sockets import (
    OPEN,
    Connection,
    CurveAccess,
    PlainAccess,
    SocketAccess,
    ZapAuthenticator,
)
from tests.protocol.hostile import GREETING, HostilePeer

MIB = 2**20
REQUEST = BlockRequest(
    run_id="r", epoch=1, attempt=1, array="frozen", block=0, version=0, contribution=0
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of a run with nodes ``a`` and ``b``; below ``other`` those of another run."""
    folder = tmp_path_factory.mktemp("keys")
    make(folder / "ours", "run", ("a", "b"))
    make(folder / "other", "run", ("a", "b"))
    return folder


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as found:
        yield found


def access_of(keys: Path, node: str, run: str = "ours") -> CurveAccess:
    return CurveAccess(keys / run / f"node.{node}")


class Server:
    """A guarded PULL socket."""

    def __init__(self, access: SocketAccess, kind: int = zmq.PULL) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.authenticator = ZapAuthenticator(self.context, access)
        self.socket = self.context.socket(kind)
        access.protect(self.socket)
        self.socket.set(zmq.RCVHWM, 4)
        self.socket.bind("tcp://127.0.0.1:0")
        endpoint = self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.address = access.announce(endpoint)
        self.port = int(endpoint.rpartition(":")[2])
        self.cuts = 0
        bounds = Bounds(
            connections=64, connection_bytes=4 * MIB, total_bytes=8 * MIB, silent_bytes=8 * MIB
        )
        said = access.pre_auth_reply_bytes
        self.limiter = ConnectionLimiter(
            self.socket, bounds, self._count, pre_auth_reply_bytes=said
        )

    def _count(self) -> None:
        self.cuts += 1

    def receive(self, timeout_ms: int) -> bytes | None:
        """The next message's last frame."""
        if not self.socket.poll(timeout_ms):
            return None
        frames = self.socket.recv_multipart(copy=False)
        self.limiter.heard(frames[-1])
        return bytes(frames[-1].bytes)

    def close(self) -> None:
        self.limiter.close()
        self.authenticator.close()
        self.context.destroy(linger=0)


@pytest.fixture
def server(keys: Path) -> Iterator[Server]:
    found = Server(access_of(keys, "a"))
    yield found
    found.close()


def say_hello(socket: zmq.Socket[bytes]) -> None:
    """Send a message, unless the other end has hung up already."""
    with suppress(zmq.Again):
        socket.send(b"hello", zmq.NOBLOCK)


def knock(
    context: zmq.Context[Any], server: Server, access: SocketAccess, timeout_ms: int = 500
) -> tuple[bytes | None, str]:
    """Send a message with what ``access`` has: what arrived, and why nothing can."""
    socket = context.socket(zmq.PUSH)
    socket.set(zmq.LINGER, 0)
    connection = Connection(socket, server.address, access)
    say_hello(socket)
    heard, refusal, deadline = server.receive(timeout_ms), "", time.monotonic() + 5.0
    while heard is None and not refusal and time.monotonic() < deadline:
        time.sleep(0.01)
        refusal = connection.refusal()
    connection.close()
    return heard, refusal


def test_only_nodes_of_the_run_are_let_in(
    keys: Path, server: Server, context: zmq.Context[Any]
) -> None:
    assert knock(context, server, access_of(keys, "b"), 5000) == (b"hello", "")
    turned_away = "it does not let this node's key or token in"
    assert knock(context, server, _pretender(keys)) == (None, turned_away)
    server.address = server.address.partition("?")[0]
    assert knock(context, server, OPEN) == (
        None,
        "it has not the cluster.security of this process",
    )


def test_who_hangs_up_in_each_handshake_refuses(context: zmq.Context[Any]) -> None:
    """Of two that differ the one that finds it first hangs up; the other may hear no more."""
    connection = Connection(context.socket(zmq.PUSH), "inproc://nobody", OPEN)
    for _ in range(2):
        connection.note(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    assert not connection.refusal(), "it may have died"
    connection.note(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    assert connection.refusal() == "it has not the cluster.security of this process"
    connection.note(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    assert not connection.refusal()
    connection.close()


def test_without_keys_the_token_is_asked_for(keys: Path, context: zmq.Context[Any]) -> None:
    """Loopback is open to every user; a password that was shown elsewhere is no good here."""
    server, other = Server(PlainAccess("one")), Server(PlainAccess("one"))
    try:
        assert knock(context, server, PlainAccess("one"), 5000) == (b"hello", "")
        for stranger in (OPEN, PlainAccess("two")):
            assert knock(context, server, stranger)[0] is None
        socket = context.socket(zmq.PUSH)
        socket.set(zmq.PLAIN_USERNAME, b"penstock")
        socket.set(zmq.PLAIN_PASSWORD, PlainAccess("one").password(other.address))
        socket.connect(server.address)
        say_hello(socket)
        assert server.receive(500) is None
        socket.close(linger=0)
        with pytest.raises(ProtocolError, match="asks for a key"):
            PlainAccess("one").check(access_of(keys, "a").announce(server.address), "a")
    finally:
        server.close()
        other.close()


_SQUATTER = """
import os, socket, sys, time
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as found:
    found.bind("\\0" + sys.argv[1])
    found.listen()
    print("listening", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user: run as root")
def test_nothing_is_said_to_another_user_who_took_a_name(context: zmq.Context[Any]) -> None:
    name = f"penstock-test-{os.getpid()}"
    argv = [sys.executable, "-c", _SQUATTER, name]
    socket = context.socket(zmq.DEALER)
    OPEN.connect(socket, f"ipc://@{name}")  # nobody is there yet
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as squatter:
        assert squatter.stdout is not None and squatter.stdout.readline() == "listening\n"
        try:
            for access in (OPEN, PlainAccess("token")):
                with pytest.raises(LostMemberError, match="user 65534 listens there"):
                    access.connect(socket, f"ipc://@{name}")
        finally:
            squatter.kill()
            socket.close(linger=0)


def _pretender(keys: Path) -> CurveAccess:
    """Keys of another run, and our list of peers."""
    found = access_of(keys, "b", "other")
    found._folder = keys / "ours" / "node.b"
    found._look()
    return found


def test_nobody_is_let_in_while_nobody_is_at_the_door(
    keys: Path, server: Server, context: zmq.Context[Any]
) -> None:
    server.authenticator.close()
    assert knock(context, server, access_of(keys, "b"))[0] is None


def test_addresses_name_keys_that_are_looked_up_by_node(keys: Path, server: Server) -> None:
    ours = access_of(keys, "b")
    ours.check(server.address, "a")
    ours.check("ipc://@penstock-x", "a")
    with pytest.raises(ProtocolError, match="is not a key of node b"):
        ours.check(server.address, "b")
    with pytest.raises(ProtocolError, match=r"names no key in .*peers, and cluster.security is"):
        ours.check(server.address.partition("?")[0], "a")
    with pytest.raises(ProtocolError, match="names no key"):
        access_of(keys, "b", "other").check(server.address, "a")
    with pytest.raises(ProtocolError, match="node a asks for a key"):
        OPEN.check(server.address, "a")


def test_lists_are_read_again_when_they_change(
    tmp_path: Path, keys: Path, context: zmq.Context[Any]
) -> None:
    make(tmp_path / "mine", "run", ("a", "b", "c"))
    peers = tmp_path / "mine" / "node.a" / "peers"
    new = access_of(keys, "b")
    new._folder = tmp_path / "mine" / "node.b"
    new._look()
    server = Server(CurveAccess(tmp_path / "mine" / "node.a"))
    try:
        assert knock(context, server, new)[0] is None
        old_key = (peers / "b.public").read_bytes()
        new_key = (keys / "ours" / "node.b" / "curve.public").read_bytes()
        (peers / "b.public").write_bytes(old_key + new_key)
        time.sleep(0.6)
        assert knock(context, server, new, 5000)[0] == b"hello"
        assert knock(context, server, CurveAccess(tmp_path / "mine" / "node.b"), 5000)[0]
        (peers / "c.public").write_bytes(b"half of a k")
        time.sleep(0.6)
        assert knock(context, server, new, 5000)[0] == b"hello", "what was read before stays"
        (peers / "c.public").unlink()
        (peers / "b.public").write_bytes(old_key)
        time.sleep(0.6)
        assert knock(context, server, new)[0] is None
    finally:
        server.close()


def test_who_asks_for_a_key_gets_nothing_from_a_plain_memoryd(
    keys: Path, context: zmq.Context[Any]
) -> None:
    plain = Server(OPEN, zmq.ROUTER)
    client = BlockClient(context, access=access_of(keys, "b"))
    address = access_of(keys, "a").announce(plain.address)
    try:
        with pytest.raises(LostMemberError, match=r"has not the cluster\.security of this process"):
            client.fetch(address, REQUEST, bytearray(4), timeout_s=5.0)
    finally:
        client.close()
        plain.close()


@pytest.mark.parametrize("change", ["mode", "pair", "text"])
def test_keys_of_no_use_are_refused(tmp_path: Path, keys: Path, change: str) -> None:
    make(tmp_path / "k", "run", ("a", "b"))
    folder = tmp_path / "k" / "node.a"
    secret = folder / "curve.secret"
    if change == "mode":
        secret.chmod(0o644)
        message = "mode 0644 lets others read it"
    elif change == "pair":
        secret.write_bytes((keys / "ours" / "node.a" / "curve.secret").read_bytes())
        message = "curve.public is not the public key of curve.secret"
    else:
        secret.write_bytes(b"\xff" * 40)
        message = "curve.secret: is no key"
    with pytest.raises(ConfigError, match=message):
        CurveAccess(folder)


def test_strangers_may_bring_a_handshake_and_no_more(
    keys: Path, server: Server, context: zmq.Context[Any]
) -> None:
    """A thousand bytes of a frame are nothing to a friend, and too much before the handshake."""
    friend = context.socket(zmq.PUSH)
    friend.set(zmq.LINGER, 0)
    connection = Connection(friend, server.address, access_of(keys, "b"))
    with ExitStack() as stack:
        stack.callback(connection.close)
        for _ in range(4):  # and nothing is received, so that the limiter hears of no message
            friend.send(b"x" * (MIB // 2))
        strangers = []
        for _ in range(20):
            peer = HostilePeer.raw("127.0.0.1", server.port)
            stack.callback(peer.close)
            peer.socket.sendall(GREETING.replace(b"NULL\0", b"CURVE"))
            peer.socket.sendall(b"\x06" + (MIB).to_bytes(8, "big") + bytes(2 * PRE_AUTH_BYTES))
            strangers.append(peer)
        deadline = time.monotonic() + 600.0
        while server.cuts < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.cuts == 20
        for _ in range(4):
            assert server.receive(5000) == b"x" * (MIB // 2)
