"""Closes or silences connections between processes of a run from outside.

``pidfd_getfd`` copies a descriptor of another process of the same user, as a debugger could.
``shutdown`` on the copy closes the connection. A socket filter that drops every packet silences the
connection: nothing from the peer is acknowledged, and neither end sees an error. A cut cable or a
power failure has the same effect.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.host.errors import ConfigError

_PIDFD_GETFD = 438
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""One instruction of classic BPF: return 0 bytes of the packet."""
_TCP_ESTABLISHED = "01"
_UNIX_STREAM, _UNIX_CONNECTED = "0001", "03"
_INODE = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenConnection:
    """One end of a connection: a descriptor of a process. ``ends`` are the local and the remote TCP
    address; None for a local socket.
    """

    pid: int
    descriptor: int
    inode: int
    ends: tuple[str, str] | None

    def __str__(self) -> str:
        return f"pid {self.pid} descriptor {self.descriptor} ({'tcp' if self.ends else 'local'})"


def connections_of(pid: int, *, tcp_only: bool) -> list[OpenConnection]:
    """Returns the open stream connections of a process, in the order of their descriptors."""
    tcp, local = _tcp(pid), set() if tcp_only else _local(pid)
    connections = []
    for descriptor, inode in _sockets(pid):
        if inode in tcp or inode in local:
            ends = tcp.get(inode)
            connections.append(
                OpenConnection(pid=pid, descriptor=descriptor, inode=inode, ends=ends)
            )
    return sorted(connections, key=lambda connection: connection.descriptor)


def close(connection: OpenConnection) -> None:
    """Closes a connection in both directions; both ends notice at once.

    Raises:
        OSError: the connection is gone.
    """
    with _borrowed(connection) as borrowed:
        borrowed.shutdown(socket.SHUT_RDWR)


def deafen(connection: OpenConnection, pids: Iterable[int], *, one_way: bool) -> None:
    """Silences one end of a TCP connection. Without ``one_way``, also silences the other end, if a
    process in ``pids`` has it.

    Raises:
        OSError: the connection is gone.
    """
    ends = [connection]
    if not one_way and connection.ends is not None:
        swapped = connection.ends[::-1]
        others = (other for pid in pids for other in connections_of(pid, tcp_only=True))
        ends += [other for other in others if other.ends == swapped]
    for end in ends:
        with _borrowed(end) as borrowed:
            program = ctypes.create_string_buffer(_DROP_ALL)
            address = ctypes.addressof(program)
            value = struct.pack("HxxxxxxP", 1, address)
            borrowed.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, value)


@contextmanager
def _borrowed(connection: OpenConnection) -> Iterator[socket.socket]:
    pidfd = os.pidfd_open(connection.pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = libc.syscall(_PIDFD_GETFD, pidfd, connection.descriptor, 0)
        if descriptor < 0:
            number = ctypes.get_errno()
            if isinstance(error := OSError(number, os.strerror(number)), PermissionError):
                raise ConfigError(
                    "--kinds closed,half-open: this machine forbids to copy descriptors of another"
                    " process (ptrace is restricted); leave out these kinds"
                ) from error
            raise error
    finally:
        os.close(pidfd)
    with socket.socket(fileno=descriptor) as borrowed:
        yield borrowed


def _sockets(pid: int) -> Iterator[tuple[int, int]]:
    """Yields descriptor and inode of each socket of a process."""
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for entry in entries:
        try:
            match = _INODE.fullmatch(os.readlink(entry))
        except OSError:
            continue  # closed meanwhile
        if match is not None:
            yield int(entry.name), int(match[1])


def _rows(pid: int, table: str) -> Iterator[list[str]]:
    try:
        lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    except OSError:
        return
    yield from (line.split() for line in lines)


def _tcp(pid: int) -> dict[int, tuple[str, str]]:
    """Returns the addresses of established TCP connections in a process's network, by inode."""
    rows = (row for table in ("tcp", "tcp6") for row in _rows(pid, table))
    return {int(row[9]): (row[1], row[2]) for row in rows if row[3] == _TCP_ESTABLISHED}


def _local(pid: int) -> set[int]:
    """Returns the inodes of connected local stream sockets."""
    connected = (_UNIX_STREAM, _UNIX_CONNECTED)
    return {int(row[6]) for row in _rows(pid, "unix") if (row[4], row[5]) == connected}
