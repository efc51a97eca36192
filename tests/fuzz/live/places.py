"""Where the processes of a run listen: TCP, and local sockets."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from tests.system.strangers import listening, socket_inodes

_LISTENS = "00010000"
"""Flag of a listening socket in /proc/net/unix."""
_SEQPACKET = "0005"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One listening socket. ``address``: host and port, or a local name."""

    process: str
    pid: int
    family: int
    kind: int
    address: tuple[str, int] | str

    def __str__(self) -> str:
        return f"{self.process} at {self.address!r}"

    def connect(self, timeout_s: float = 5.0) -> socket.socket:
        """Returns a connection.

        Raises:
            OSError: nobody takes it.
        """
        found = socket.socket(self.family, self.kind)
        try:
            found.settimeout(timeout_s)
            found.connect(self.address)
        except OSError:
            found.close()
            raise
        return found

    @property
    def speaks_zmtp(self) -> bool:
        """Whether it is a socket of ZeroMQ."""
        if self.family == socket.AF_INET:
            return self.process.partition(".")[0] in ("memoryd", "optimizerd", "worker")
        name = str(self.address)
        return self.kind == socket.SOCK_STREAM and not name.endswith("/metrics")


def places_of(processes: dict[str, int]) -> list[Place]:
    """Returns where processes (name -> pid) listen."""
    found = []
    for name, pid in processes.items():
        for address in listening(pid):
            found.append(
                Place(
                    process=name,
                    pid=pid,
                    family=socket.AF_INET,
                    kind=socket.SOCK_STREAM,
                    address=address,
                )
            )
        found += _local(name, pid)
    return found


def _local(process: str, pid: int) -> list[Place]:
    inodes = socket_inodes(pid)
    found: list[Place] = []
    if not inodes:
        return found  # it has ended
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[3] == _LISTENS and fields[6] in inodes:
            kind = socket.SOCK_SEQPACKET if fields[4] == _SEQPACKET else socket.SOCK_STREAM
            name = fields[7]
            address = "\0" + name[1:] if name.startswith("@") else name
            found.append(
                Place(process=process, pid=pid, family=socket.AF_UNIX, kind=kind, address=address)
            )
    return found
