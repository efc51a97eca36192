"""Who is at the other end of a call, and how he is sent away although he does not want to go.

gRPC's server for event loops can end a call with a status, which waits behind what the caller has
not read yet, for ever if he likes. Beyond a while his connection is reset instead.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
import stat
import struct
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import grpc

END_TIMEOUT_S = 1.0
"""A status that was not sent for so long is not going to be."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class SentAway(Exception):
    """The caller was sent away while something was done for him."""


class Caller:
    """The other end of one call; everything happens on the event loop of the call."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self._away = asyncio.get_running_loop().create_future()

    @property
    def is_sent_away(self) -> bool:
        """Whether :meth:`send_away` was called."""
        return self._away.done()

    def send_away(self) -> None:
        """Have the call end soon, whatever is going on in it."""
        if not self._away.done():
            self._away.set_result(None)

    async def unless_sent_away(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns what ``work`` comes to.

        Raises:
            SentAway: he was sent away before; the work was cancelled.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._away), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if self.is_sent_away and not task.done():
            with suppress(asyncio.CancelledError, Exception):
                await task
            raise SentAway
        return task.result()

    async def end(self) -> None:
        """Ends the call of somebody who was sent away.

        Raises:
            grpc.aio.AbortError: always, as gRPC wants it.
        """
        ending = asyncio.ensure_future(
            self._context.abort(grpc.StatusCode.CANCELLED, "sent away by the scheduler")
        )
        await asyncio.wait((ending,), timeout=END_TIMEOUT_S)
        if not ending.done():
            peer = self._context.peer()
            _log.debug("%s does not take its status", peer)
            reset_connection(peer)
        await ending


def reset_connection(peer: str) -> None:
    """Reset this process's TCP connection with ``peer``, as gRPC writes it (``ipv4:HOST:PORT``,
    ``ipv6:[HOST]:PORT``), if there is one.
    """
    kind, _, place = peer.partition(":")
    host, _, port = place.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return
    wanted = host.strip("[]"), int(port)
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError, ValueError):
            if not stat.S_ISSOCK(os.stat(entry).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.getpeername()[:2] == wanted:
                    _reset(connection)


def _reset(connection: socket.socket) -> None:
    """Connecting a TCP socket to no address is how Linux resets it (connect(2))."""
    nowhere = struct.pack("=H14x", socket.AF_UNSPEC)
    ctypes.CDLL(None, use_errno=True).connect(connection.fileno(), nowhere, len(nowhere))
