"""A peer that speaks ZMTP 3.0 over a raw socket, and does not mean well."""

from __future__ import annotations

import socket
import struct
import time

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


class HostilePeer:
    """One connection to a ZeroMQ socket, past the handshake. ``kind``: what it says it is.

    Raises ``OSError`` where nobody speaks ZMTP.
    """

    def __init__(self, host: str, port: int, kind: bytes) -> None:
        self.socket = socket.create_connection((host, port), timeout=10.0)
        try:
            self._shake_hands(kind)
        except BaseException:
            self.socket.close()
            raise

    @classmethod
    def raw(cls, host: str, port: int) -> HostilePeer:
        """A connection on which nothing was said yet."""
        found = cls.__new__(cls)
        found.socket = socket.create_connection((host, port), timeout=10.0)
        return found

    def _shake_hands(self, kind: bytes) -> None:
        self.socket.sendall(GREETING)
        body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
        self.socket.sendall(b"\x04" + bytes([len(body)]) + body)
        heard = b""
        while len(heard) < len(GREETING) + 2 or len(heard) < len(GREETING) + 2 + heard[65]:
            more = self.socket.recv(4096)
            if not more:
                raise ConnectionResetError("cut in the handshake")
            heard += more
        time.sleep(0.05)  # messages that come with the handshake are an error

    def send_parts(self, part_bytes: int, total_bytes: int) -> int:
        """Send frames that all say that another one follows; how many bytes went out before the
        connection was cut.
        """
        head = (
            bytes([1, part_bytes]) if part_bytes < 256 else b"\x03" + struct.pack(">Q", part_bytes)
        )
        frame = head + bytes(part_bytes)
        block = frame * max(1, 65536 // len(frame))
        sent = 0
        try:
            while sent < total_bytes:
                self.socket.sendall(block)
                sent += len(block)
        except OSError:
            return sent
        return sent

    def close(self) -> None:
        self.socket.close()
