"""What somebody without keys of a run sends to its scheduler; run on a host of the test bed.

``callers.py HOST:PORT KEYS OTHER_KEYS``: plain HTTP/2 frames, gRPC calls in plain text, with TLS
and no certificate, and with keys of another run. Prints what was sent and what came back. Then
holds 1,000 connections, half of them in the middle of a handshake, until a line comes on stdin.
"""

from __future__ import annotations

import json
import resource
import socket
import ssl
import sys
from contextlib import suppress
from pathlib import Path

import grpc

from penstock.protocol.generated import scheduler_pb2 as pb

FRAMES_A_CONNECTION = 250
NUM_CONNECTIONS = 400
NUM_HANDSHAKES = 300
NUM_HELD = 1000
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
PING = b"\0\0\x08\6\0\0\0\0\0" + b"penstock"
METHODS = ("Control/Status", "Control/Stop", "Control/Pause", "Membership/Join")
SCHEDULER = (("grpc.ssl_target_name_override", "scheduler.penstock"),)


def send_frames(place: tuple[str, int]) -> tuple[int, int]:
    """Plain frames; returns how many, and the most bytes that one connection was answered."""
    longest = 0
    for _ in range(NUM_CONNECTIONS):
        heard = 0
        with suppress(OSError), socket.create_connection(place, timeout=600.0) as connection:
            with suppress(OSError):
                connection.sendall(PREFACE + SETTINGS + PING * (FRAMES_A_CONNECTION - 1))
            while data := connection.recv(65536):
                heard += len(data)
        longest = max(longest, heard)
    return NUM_CONNECTIONS * FRAMES_A_CONNECTION, longest


def call(address: str, keys: Path, other: Path) -> tuple[int, int]:
    """gRPC calls of all kinds; returns how many, and how many were answered."""
    ca, foreign = (keys / "look" / "ca.pem").read_bytes(), other / "control"
    pair = [(foreign / name).read_bytes() for name in ("tls.key", "tls.pem")]
    hello = pb.MemberMessage(hello=pb.Hello(run_id="0" * 12, member="worker.0", pid=1))
    num_calls = num_answered = 0
    for credentials in (
        None,
        grpc.ssl_channel_credentials(ca),
        grpc.ssl_channel_credentials(ca, *pair),
        grpc.ssl_channel_credentials((foreign / "ca.pem").read_bytes(), *pair),
    ):
        channel = (
            grpc.insecure_channel(address)
            if credentials is None
            else grpc.secure_channel(address, credentials, SCHEDULER)
        )
        with channel:
            for method in METHODS:
                num_calls += 1
                with suppress(grpc.RpcError):
                    ask = channel.stream_stream(f"/penstock.v1.{method}")
                    list(ask(iter([hello.SerializeToString()]), timeout=1.0))
                    num_answered += 1
    return num_calls, num_answered


def shake_hands(place: tuple[str, int], other: Path) -> int:
    """Handshakes with keys of another run, and a call behind each; returns how many went well."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(other / "control" / "tls.pem", other / "control" / "tls.key")
    context.set_alpn_protocols(["h2"])
    num_well = 0
    for _ in range(NUM_HANDSHAKES):
        # With TLS 1.3 the client is done before the server has judged its certificate.
        with suppress(OSError), socket.create_connection(place, timeout=600.0) as plain:
            with context.wrap_socket(plain) as shielded:
                shielded.sendall(PREFACE + SETTINGS + PING)
                num_well += PING[9:] in shielded.recv(65536)
    return num_well


def hold(place: tuple[str, int]) -> list[socket.socket]:
    """Connections that stay, every other of them with the first half of a TLS handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    talk = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="x.penstock")
    with suppress(ssl.SSLWantReadError):
        talk.do_handshake()
    first = outgoing.read()
    held = []
    for number in range(NUM_HELD):
        with suppress(OSError):
            connection = socket.create_connection(place, timeout=600.0)
            held.append(connection)
            if number % 2:
                connection.sendall(first if number % 4 == 1 else first[: len(first) // 2])
    return held


def main() -> None:
    """Send, and say what came of it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65536), most))
    address, keys, other = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    host, _, port = address.rpartition(":")
    place = (host, int(port))
    num_frames, longest = send_frames(place)
    num_calls, num_answered = call(address, keys, other)
    num_well = shake_hands(place, other)
    held = hold(place)
    found = {
        "frames": num_frames,
        "longest_answer": longest,
        "calls": num_calls,
        "answered": num_answered,
        "handshakes": NUM_HANDSHAKES,
        "well": num_well,
        "held": len(held),
    }
    print(json.dumps(found), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
