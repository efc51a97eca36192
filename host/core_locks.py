"""What only one process of a machine may have at a time, such as a core for its own.

A claim is the name of an abstract socket. The kernel gives each to one process, whoever its user
is, and takes it back when that process is gone, however it ended: there is no file to go stale.
Network namespaces have names of their own, so what runs in several of them does not see each other.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from types import TracebackType

_PREFIX = "\0penstock-claim-"


class Claim:
    """Names that are held until :meth:`release`, or the end of the process."""

    def __init__(self, sockets: Iterable[socket.socket]) -> None:
        self._sockets = tuple(sockets)

    @classmethod
    def of(cls, names: Iterable[str]) -> Claim | None:
        """Returns a claim to all of ``names``, or None, and holds none, if one of them is held."""
        held: list[socket.socket] = []
        for name in names:
            entry = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            held.append(entry)
            try:
                entry.bind(_PREFIX + name)
            except OSError as error:
                cls(held).release()
                if error.errno == errno.EADDRINUSE:
                    return None
                raise
        return cls(held)

    def release(self) -> None:
        """Let others have them."""
        for entry in self._sockets:
            entry.close()

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
