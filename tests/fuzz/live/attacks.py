"""What is done to the listening sockets of a run that trains. Every attack ends by itself."""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from penstock.host.errors import ProtocolError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.credentials import TOKEN_KEY
from penstock.protocol.security.token import read_token, token_path
from penstock.protocol.wire.frames import encode
from penstock.protocol.wire.sockets import PlainAccess
from tests.fuzz.live.places import Place
from tests.fuzz.mutating import Mutator
from tests.fuzz.target import Form
from tests.fuzz.targets.wire import HEADERS, KINDS, decode
from tests.protocol.hostile import GREETING, HostilePeer

HUGE = 2**62
MAX_ENDLESS_BYTES = 16 << 20
HTTP = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
"""Preface and settings (RFC 9113)."""
HTTP2_HEADERS = HTTP2 + b"\0\0\1\1\0\0\0\0\1\x82"
"""A call whose headers go on, ..."""
CONTINUED = b"\0\x3f\x85\x09\0\0\0\0\1" + b"\x40\1x\x7f\x80\x7e" + b"z" * 16255
"""... with a field of 16 KiB and no word that it was the last (RFC 7541: a literal)."""


@dataclass(slots=True, kw_only=True)
class Attacker:
    """Attacks the sockets of one run; ``done`` counts by kind."""

    run_dir: Path
    seed: int
    idle: int
    """Connections that are held at each socket."""
    ended: Callable[[], bool]
    """Whether the run is over."""
    done: Counter[str] = field(default_factory=Counter)
    chance: random.Random = field(init=False)
    run_id: str = field(init=False)
    token: str = field(init=False)
    frames: list[bytes] = field(init=False)
    _mutator: Mutator = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.run_id = RunDirectory(self.run_dir).run_id
        self.token = read_token(token_path(self.run_dir))
        stale = [_of_run(header, self.run_id) for header in HEADERS]
        self.frames = [encode(header) for header in stale]
        self._mutator = Mutator(Form.MSGPACK, self.frames)

    def mutated(self) -> bytes:
        """Returns a frame of the run that was changed, and is of no epoch that goes on."""
        while True:
            data = self._mutator.changed(self.chance.choice(self.frames), self.chance)
            with suppress(ProtocolError):
                found = decode(data, *KINDS)
                if getattr(found, "epoch", 0) or hasattr(found, "pid"):
                    continue  # of a member's own epoch, or in the name of a living process
            return data

    def password(self, place: Place) -> bytes | None:
        """Returns what a ZeroMQ socket on TCP asks for; local ones ask the kernel."""
        if place.family != socket.AF_INET:
            return None
        host, port = place.address
        return PlainAccess(self.token).password(f"tcp://{host}:{port}")

    def peer(self, place: Place) -> HostilePeer:
        """Returns a connection past the handshake, with the token of the run."""
        sends = b"DEALER" if place.process.startswith("memoryd") else b"PUSH"
        found = HostilePeer.__new__(HostilePeer)
        found.socket = place.connect()
        try:
            found._shake_hands(sends, self.password(place))
        except BaseException:
            found.socket.close()
            raise
        return found


def _of_run(header: Any, run_id: str) -> Any:
    """Returns a message as of this run and epoch 0, which is over."""
    fields = {name: value for name, value in (("run_id", run_id), ("epoch", 0))}
    return replace(header, **{k: v for k, v in fields.items() if hasattr(header, k)})


Attack = Callable[[Attacker, Place], None]


def random_bytes(attacker: Attacker, place: Place) -> None:
    """Noise, also behind the first words of a protocol."""
    for start in (b"", GREETING[:12], GREETING, HTTP, HTTP2):
        with suppress(OSError), place.connect() as connection:
            connection.sendall(start + attacker.chance.randbytes(attacker.chance.choice((9, 4000))))
            attacker.done["random"] += 1


def mutated_frames(attacker: Attacker, place: Place) -> None:
    """Frames of the run, changed, from somebody who has its token."""
    if not place.speaks_zmtp:
        return
    with suppress(OSError):
        peer = attacker.peer(place)
        with peer.socket:
            for _ in range(40):
                parts = [attacker.mutated() for _ in range(attacker.chance.choice((1, 1, 1, 3)))]
                peer.socket.sendall(zmtp(*parts))
                attacker.done["mutated"] += 1


def stale_frames(attacker: Attacker, place: Place) -> None:
    """Whole messages of an epoch that is over."""
    if not place.speaks_zmtp:
        return
    with suppress(OSError):
        peer = attacker.peer(place)
        with peer.socket:
            for frame in attacker.frames:
                if b"Lease" not in frame and b"AgentOffer" not in frame:
                    peer.socket.sendall(zmtp(frame))
                    attacker.done["stale"] += 1


def truncated_frames(attacker: Attacker, place: Place) -> None:
    """Messages that end in the middle, with the connection."""
    with suppress(OSError):
        connection = attacker.peer(place).socket if place.speaks_zmtp else place.connect()
        with connection:
            frame = zmtp(attacker.chance.choice(attacker.frames))
            connection.sendall(frame[: attacker.chance.randrange(len(frame))])
            attacker.done["truncated"] += 1


def declared_huge(attacker: Attacker, place: Place) -> None:
    """Sizes that nobody has memory for, and a little of what they promise."""
    with suppress(OSError):
        connection = attacker.peer(place).socket if place.speaks_zmtp else place.connect()
        with connection:
            if place.speaks_zmtp:
                connection.sendall(b"\x02" + HUGE.to_bytes(8, "big") + bytes(1000))
            else:
                connection.sendall(HTTP + b"Content-Length: %d\r\n\r\n" % HUGE + bytes(1000))
            attacker.done["huge"] += 1
    with suppress(OSError), place.connect() as connection:
        connection.sendall(HTTP2 + b"\xff\xff\xff\0\0\0\0\0\1" + bytes(1000))


def endless_frames(attacker: Attacker, place: Place) -> None:
    """A message that never ends, until somebody cuts it."""
    with suppress(OSError):
        if place.speaks_zmtp:
            peer = attacker.peer(place)
            with peer.socket:
                peer.socket.settimeout(2.0)
                sent = peer.send_parts(attacker.chance.choice((0, 200, 4000)), MAX_ENDLESS_BYTES)
                attacker.done["endless"] += 1
                attacker.done["endless bytes"] += sent
            return
        # A request with headers without end: lines of HTTP/1, continuations of HTTP/2.
        for start, more in ((HTTP, b"X-Y: " + b"z" * 4000 + b"\r\n"), (HTTP2_HEADERS, CONTINUED)):
            attacker.done["endless"] += 1
            attacker.done["endless bytes"] += _pour(place, start, more)


def _pour(place: Place, start: bytes, more: bytes) -> int:
    sent = 0
    with suppress(OSError), place.connect(timeout_s=2.0) as connection:
        connection.sendall(start)
        while sent < MAX_ENDLESS_BYTES:
            connection.sendall(more)
            sent += len(more)
    return sent


def slow_writer(attacker: Attacker, place: Place) -> None:
    """A byte at a time, until it is cut off."""
    with suppress(OSError), place.connect() as connection:
        attacker.done["slow"] += 1
        for byte in (GREETING + HTTP)[:30]:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)


def held_connections(attacker: Attacker, place: Place) -> None:
    """Connections that say nothing, or half of a greeting, or hang up their sending side."""
    held = []
    for number in range(attacker.idle):
        with suppress(OSError):
            connection = place.connect(timeout_s=0.5)
            held.append(connection)
            if number % 3 == 1:
                connection.sendall(GREETING[: number % 60])
            elif number % 3 == 2:
                connection.shutdown(socket.SHUT_WR)
        if attacker.ended():
            break
    time.sleep(0.3)
    attacker.done["idle"] += len(held)
    for connection in held:
        connection.close()


def forged_members(attacker: Attacker, place: Place) -> None:
    """Hellos of others' names, without token, with a wrong one and with the run's; and words of
    an epoch that is over behind them.
    """
    if place.process != "schedulerd" or place.family != socket.AF_INET:
        return
    host, port = place.address
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        join = channel.stream_stream("/penstock.v1.Membership/Join")
        for token in ("", "0" * 64, attacker.token):
            metadata = ((TOKEN_KEY, token),) if token else ()
            for member in ("worker.0", "memoryd.a", "node.b", "optimizerd.a", "nobody", "\0"):
                with suppress(grpc.RpcError):
                    list(join(_forged(attacker, member), timeout=0.5, metadata=metadata))
                attacker.done["forged"] += 1
            if token != attacker.token:
                for order in ("Pause", "Stop", "Snapshot"):
                    with suppress(grpc.RpcError):
                        channel.unary_unary(f"/penstock.v1.Control/{order}")(
                            b"", timeout=0.5, metadata=metadata
                        )
                        raise AssertionError(f"{order} was obeyed without the token")
                    attacker.done["forged"] += 1


def _forged(attacker: Attacker, member: str) -> Iterator[bytes]:
    chance = attacker.chance
    run_id = attacker.run_id if chance.random() < 0.7 else "0" * 12
    hello = pb.Hello(
        run_id=run_id, member=member, pid=chance.randrange(2**31), nonce=chance.randrange(2**63)
    )
    yield pb.MemberMessage(hello=hello).SerializeToString()
    yield pb.MemberMessage(ready=pb.Ready(epoch=0)).SerializeToString()
    yield pb.MemberMessage(fenced=pb.Fenced(member="worker.1", pid=1)).SerializeToString()
    done = pb.AttemptDone(epoch=0, attempt=1, loss_sum=1e9, loss_tokens=1)
    yield pb.MemberMessage(attempt_done=done).SerializeToString()
    yield chance.randbytes(200)


def zmtp(*parts: bytes) -> bytes:
    """Returns a message on the wire of ZMTP 3."""
    found = b""
    for number, part in enumerate(parts, start=1):
        more = int(number < len(parts))
        found += bytes([2 | more]) + len(part).to_bytes(8, "big") + part
    return found


ATTACKS: tuple[Attack, ...] = (
    random_bytes,
    mutated_frames,
    stale_frames,
    truncated_frames,
    declared_huge,
    endless_frames,
    slow_writer,
    held_connections,
    forged_members,
)
