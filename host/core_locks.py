"""Locks that one process of a machine holds at a time, such as on a core.

A claim is the name of an abstract socket. The kernel gives a name to one process, of any user. When
the process ends for any reason, the kernel frees the name: no file can become stale. Each network
namespace has its own names, so processes in different namespaces do not see each other's claims.
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
        """Frees the names."""
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
