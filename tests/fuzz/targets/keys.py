"""Keys, tokens, passwords and addresses, and what other nodes' metricsd answers."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from http.client import HTTPException
from pathlib import Path

from penstock.daemons.monitor.metrics.clocks import compare
from penstock.daemons.monitor.metrics.exporter import USER, _knows
from penstock.protocol.security.authority import _read_authority, make
from penstock.protocol.security.folders import KeyFolder
from penstock.protocol.security.identity import Identity
from penstock.protocol.security.token import read_token
from penstock.protocol.wire.sockets import CurveAccess
from tests.fuzz.target import Decoder, Form, Open, Target, plainly


@cache
def _keys() -> dict[str, bytes]:
    """Returns the files of a small authority, by name."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "keys", "run", ("a", "b"))
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in Path(folder).rglob("*")
            if path.is_file()
        }


def _of_keys(names: Sequence[str], read: Callable[[Path], object]) -> Open:
    """Returns ``open`` of a reader of a folder of keys, one file of which is the input; its first
    byte says which.
    """

    @contextmanager
    def opened(folder: Path) -> Iterator[Decoder]:
        for name, content in _keys().items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.write_bytes(content)
            path.chmod(0o600)

        def decode(data: bytes) -> object:
            name = names[data[0] % len(names)] if data else names[0]
            path = folder / "keys" / name
            path.write_bytes(data[1:])
            try:
                return read(folder / "keys")
            finally:
                path.write_bytes(_keys()[f"keys/{name}"])

        yield decode

    return opened


def _seeds(names: Sequence[str]) -> list[bytes]:
    return [bytes([i]) + _keys()[f"keys/{name}"] for i, name in enumerate(names)]


TLS = ("node.a/ca.pem", "node.a/tls.pem")
"""A key that is no pair of its certificate may be about to be replaced, and is waited for."""
AUTHORITY = ("authority/ca.key", "authority/ca.pem")
CURVE = ("node.a/curve.public", "node.a/curve.secret", "node.a/peers/b.public")


def _curve(keys: Path) -> None:
    access = CurveAccess(keys / "node.a")
    access.check("tcp://10.0.0.1:1?key=" + "00" * 32, "b")


@contextmanager
def _address(folder: Path) -> Iterator[Decoder]:
    with _of_keys(CURVE, lambda keys: None)(folder):
        access = CurveAccess(folder / "keys" / "node.a")
        yield lambda data: access.check(data.decode(errors="replace"), "b")


def _token(data: bytes, folder: Path) -> object:
    path = folder / "token"
    path.write_bytes(data)
    path.chmod(0o600)
    return read_token(path)


@contextmanager
def _tokens(folder: Path) -> Iterator[Decoder]:
    yield lambda data: _token(data, folder)


@contextmanager
def _password(folder: Path) -> Iterator[Decoder]:
    path = folder / "metrics.sha256"
    path.write_bytes(b"0" * 64)
    path.chmod(0o600)

    def ask(data: bytes) -> None:
        assert not _knows(data.decode("latin-1"), path)

    yield ask


@contextmanager
def _clock(folder: Path) -> Iterator[Decoder]:
    """A node whose metricsd answers with the input, whatever it is asked."""
    del folder
    answers: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    if not answers:
                        return
                    connection.sendall(answers.pop())

        thread = threading.Thread(target=serve)
        thread.start()
        host, port = listener.getsockname()

        def ask(data: bytes) -> object:
            answers.append(data)
            return compare(f"http://{host}:{port}/metrics", None)

        try:
            yield ask
        finally:
            answers.clear()
            with socket.create_connection((host, port)) as last:
                last.sendall(b"\n")
            thread.join()


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def _identity(data: bytes) -> None:
    uri = data.decode(errors="replace")
    found = Identity.parse(uri)
    assert found is None or found.uri == uri


KEYS = (
    Target(
        name="certificates",
        open=_of_keys(TLS, lambda keys: KeyFolder(keys / "node.a").peek()),
        covers=(
            "protocol.security.folders.KeyFolder._parse",
            "protocol.security.folders.read_private",
        ),
        seeds=lambda: _seeds(TLS),
        examples=30,
        keeps=False,
    ),
    Target(
        name="authority",
        open=_of_keys(AUTHORITY, lambda keys: _read_authority(keys / "authority")),
        covers=("protocol.security.authority._read_authority",),
        seeds=lambda: _seeds(AUTHORITY),
        examples=30,
        keeps=False,
    ),
    Target(
        name="curve-keys",
        open=_of_keys(CURVE, _curve),
        covers=("protocol.wire.sockets._decoded",),
        seeds=lambda: _seeds(CURVE),
        keeps=False,
    ),
    Target(
        name="curve-addresses",
        open=_address,
        covers=("protocol.wire.sockets.CurveAccess._named_key",),
        seeds=lambda: [b"tcp://10.0.0.1:4711?key=" + b"ab" * 32, b"ipc://@x"],
        form=Form.TEXT,
    ),
    Target(
        name="token",
        open=_tokens,
        covers=("protocol.security.token.read_token",),
        seeds=lambda: [b"0" * 64],
    ),
    Target(
        name="identity",
        open=plainly(_identity),
        covers=("protocol.security.identity.Identity.parse",),
        seeds=lambda: [b"penstock://run%20a/node/b", b"penstock://run/role/look"],
        form=Form.TEXT,
        allowed=(),
    ),
    Target(
        name="metrics-password",
        open=_password,
        covers=("daemons.monitor.metrics.exporter._knows",),
        seeds=lambda: [b"Basic " + base64.b64encode(USER.encode() + b":x")],
        form=Form.TEXT,
        allowed=(),
    ),
    Target(
        name="clock-answers",
        open=_clock,
        covers=("daemons.monitor.metrics.clocks.compare",),
        seeds=lambda: [_answer(b'{"seconds": 1.5}'), _answer(b"[]"), b"HTTP/1.1 404 No\r\n\r\n"],
        allowed=(OSError, HTTPException, ValueError),
        examples=40,
    ),
)
