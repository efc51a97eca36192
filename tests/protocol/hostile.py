"""A peer that speaks ZMTP 3.0 over a raw socket, and does not mean well."""

from __future__ import annotations

import socket
import struct
import time


def greeting(mechanism: bytes) -> bytes:
    """What both sides say first."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


GREETING = greeting(b"NULL")


class HostilePeer:
    """One connection to a ZeroMQ socket, past the handshake. ``kind``: what it says it is;
    ``password``: what it shows, where one is asked for (PLAIN).

    Raises ``OSError`` where nobody speaks ZMTP.
    """

    def __init__(self, host: str, port: int, kind: bytes, password: bytes | None = None) -> None:
        self.socket = socket.create_connection((host, port), timeout=600.0)
        try:
            self._shake_hands(kind, password)
        except BaseException:
            self.socket.close()
            raise

    @classmethod
    def raw(cls, host: str, port: int) -> HostilePeer:
        """A connection on which nothing was said yet."""
        found = cls.__new__(cls)
        found.socket = socket.create_connection((host, port), timeout=600.0)
        return found

    def _shake_hands(self, kind: bytes, password: bytes | None) -> None:
        about_us = b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
        if password is None:
            self.socket.sendall(GREETING)
            self._hear(len(GREETING))
            self._command(b"\x05READY" + about_us)
        else:
            self.socket.sendall(greeting(b"PLAIN"))
            self._hear(len(GREETING))
            self._command(b"\x05HELLO\x08penstock" + bytes([len(password)]) + password)
            self._hear_command()
            self._command(b"\x08INITIATE" + about_us)
        self._hear_command()
        time.sleep(0.05)  # messages that come with the handshake are an error

    def _command(self, body: bytes) -> None:
        self.socket.sendall(b"\x04" + bytes([len(body)]) + body)

    def _hear_command(self) -> bytes:
        return self._hear(self._hear(2)[1])

    def _hear(self, num_bytes: int) -> bytes:
        heard = b""
        while len(heard) < num_bytes:
            more = self.socket.recv(num_bytes - len(heard))
            if not more:
                raise ConnectionResetError("cut in the handshake")
            heard += more
        return heard

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
