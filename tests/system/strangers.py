"""What somebody without keys of a run can send to its ZeroMQ sockets on TCP."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import zmq

from penstock.protocol.wire.frames import BlockRequest, GradientReady, encode
from tests.protocol.hostile import GREETING, HostilePeer

_LISTEN = "0A"
_MAPPED = "0000000000000000FFFF0000"
"""What an IPv6 address begins with that stands for one of IPv4, as the kernel writes it."""
CURVE_GREETING = GREETING.replace(b"NULL\0", b"CURVE")


def socket_inodes(pid: int) -> set[str]:
    """Inodes of what a process has open, as the kernel's tables of sockets name them; none of one
    that has ended.
    """
    inodes = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
    return inodes


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses that a process listens on, of TCP over IPv4; gRPC's are those of IPv6 that stand
    for IPv4. None of one that has ended.
    """
    inodes = socket_inodes(pid)
    found: list[tuple[str, int]] = []
    if not inodes:
        return found
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            place, _, port = fields[1].partition(":")
            if fields[3] != _LISTEN or fields[9] not in inodes:
                continue
            if name == "tcp" or place.startswith(_MAPPED):
                ipv4 = bytes.fromhex(place[-8:])[::-1]
                found.append((socket.inet_ntoa(ipv4), int(port, 16)))
    return found


def speaks_zmtp(place: tuple[str, int]) -> bool:
    """Whether ZeroMQ listens there: it greets whoever connects."""
    with suppress(OSError), socket.create_connection(place, timeout=600.0) as connection:
        connection.settimeout(5.0)  # servers of HTTP wait for more, and say nothing
        connection.sendall(GREETING[:10])
        return connection.recv(1) == b"\xff"
    return False


class Strangers:
    """Threads that send frames until so many were sent to each place; counts them, and answers."""

    def __init__(self, run_id: str, places: list[tuple[str, int]], seed: int = 1) -> None:
        self.places = places
        self.sent = 0
        self.answers = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._frames = [
            encode(
                BlockRequest(
                    run_id=run_id,
                    epoch=1,
                    attempt=1,
                    array="weights",
                    block=1,
                    version=0,
                    contribution=0,
                    num_bytes=64,
                )
            ),
            encode(GradientReady(run_id=run_id, epoch=1, attempt=1, block=0, contribution=0)),
            self._random.randbytes(300),
        ]

    def start(self, per_place: int, kinds: Mapping[str, Attack] | None = None) -> None:
        """Each way of attacking sends ``per_place`` frames to each place."""
        for attack in (ATTACKS if kinds is None else kinds).values():
            thread = threading.Thread(target=self._run, args=(attack, per_place))
            thread.start()
            self._threads.append(thread)

    def join(self) -> None:
        """Wait until all was sent."""
        for thread in self._threads:
            thread.join()

    def _run(self, attack: Attack, per_place: int) -> None:
        for place in self.places:
            attack(self, place, per_place)

    def frame(self, number: int) -> bytes:
        """One of the frames, in turn."""
        return self._frames[number % len(self._frames)]

    def count(self, sent: int, answers: int) -> None:
        """Note frames that went out, and answers other than handshakes."""
        with self._lock:
            self.sent += sent
            self.answers += answers


Attack = Callable[[Strangers, tuple[str, int], int], None]


def send_noise(strangers: Strangers, place: tuple[str, int], count: int) -> None:
    """Bytes that are no ZMTP, or that stop to be; twenty pieces a connection."""
    sent = 0
    while sent < count:
        with suppress(OSError), socket.create_connection(place, timeout=600.0) as connection:
            connection.sendall(CURVE_GREETING[: sent % len(CURVE_GREETING)])
            for number in range(20):
                connection.sendall(strangers.frame(number))
        sent += 20
    strangers.count(sent, 0)


def send_plain(strangers: Strangers, place: tuple[str, int], count: int) -> None:
    """ZMTP without a mechanism: messages right behind the handshake, answered or not."""
    sent = 0
    while sent < count:
        with suppress(OSError):
            peer = HostilePeer.raw(*place)
            with peer.socket:
                peer.socket.sendall(GREETING + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x04PUSH")
                for number in range(50):
                    frame = strangers.frame(number)
                    peer.socket.sendall(b"\x02" + len(frame).to_bytes(8, "big") + frame)
        sent += 50
    strangers.count(sent, 0)


def send_with_keys(strangers: Strangers, place: tuple[str, int], count: int) -> None:
    """CURVE with a key of one's own, and one for the server: sockets of libzmq, whose messages
    never leave; and connections by the hundred that begin such a handshake.
    """
    with zmq.Context() as context:
        server_key = zmq.curve_keypair()[0]
        for kind in (zmq.PUSH, zmq.DEALER):
            socket_: zmq.Socket[Any] = context.socket(kind)
            socket_.set(zmq.LINGER, 0)
            socket_.set(zmq.SNDHWM, 0)
            socket_.curve_publickey, socket_.curve_secretkey = zmq.curve_keypair()
            socket_.curve_serverkey = server_key
            socket_.connect(f"tcp://{place[0]}:{place[1]}")
            for number in range(count // 4):
                with suppress(zmq.Again):
                    socket_.send(strangers.frame(number), zmq.NOBLOCK)
            answers = int(kind == zmq.DEALER and socket_.poll(300) != 0)
            strangers.count(count // 4, answers)
            socket_.close()
    hello = b"\x04\xc8\x05HELLO\x01\0" + bytes(72) + bytes(32) + bytes(88)
    for _ in range(count // 40):
        with suppress(OSError), socket.create_connection(place, timeout=600.0) as connection:
            connection.sendall(CURVE_GREETING + hello * 20)
    strangers.count(count // 2, 0)


ATTACKS: Mapping[str, Attack] = MappingProxyType(
    {"noise": send_noise, "plain": send_plain, "keys": send_with_keys}
)


def main(words: list[str]) -> None:
    """RUN_ID FRAMES HOST:PORT …: sends so many frames of each kind to each; prints the counts."""
    run_id, per_place, *places = words
    pairs = [(host, int(port)) for host, _, port in (place.rpartition(":") for place in places)]
    strangers = Strangers(run_id, pairs)
    strangers.start(int(per_place))
    strangers.join()
    print(json.dumps({"sent": strangers.sent, "answers": strangers.answers}))


if __name__ == "__main__":
    main(sys.argv[1:])
