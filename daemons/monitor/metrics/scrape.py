"""Asks the processes of a node for their pages, all at once, each within one deadline.

The processes' end, and what goes over the socket, is :mod:`penstock.protocol.run.metrics_socket`.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.protocol.run.metrics_socket import LENGTH_BYTES, is_own_user
from penstock.protocol.security.token import peer_process

MAX_PAGE_BYTES = 16 * 2**20
_READ_BYTES = 2**18

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scraped:
    """The result of scraping one process. ``page``: its exposition; None if it did not arrive in
    time. ``pid``: the listening process; None if there is none. ``seconds``: duration of the
    scrape.
    """

    page: bytes | None
    pid: int | None
    seconds: float


@dataclass(slots=True, kw_only=True)
class _Request:
    """A connection to a process, and the bytes read so far."""

    connection: socket.socket
    pid: int
    read: bytearray = field(default_factory=bytearray)

    def advance(self) -> bool:
        """Reads available bytes; returns True at the end, or if there are too many."""
        try:
            part = self.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            return True
        self.read += part
        return not part or len(self.read) > MAX_PAGE_BYTES

    def page(self) -> bytes | None:
        """Returns the page, if it is whole."""
        length = int.from_bytes(self.read[:LENGTH_BYTES], "big")
        whole = len(self.read) >= LENGTH_BYTES and len(self.read) - LENGTH_BYTES == length
        return bytes(self.read[LENGTH_BYTES:]) if whole else None


def scrape(
    addresses: Mapping[str, str],
    deadline_s: float,
    complain: Callable[[str], None] = _log.warning,
) -> dict[str, Scraped]:
    """Scrapes the processes at ``addresses`` (process -> abstract socket). A process that takes
    longer than ``deadline_s`` counts as silent. ``complain`` receives a line about each name that
    another user has taken.
    """
    begun_s = time.monotonic()
    answers: dict[str, Scraped] = {}
    with selectors.DefaultSelector() as selector:
        for process, address in addresses.items():
            call = _request(address, complain)
            if call is None:
                answers[process] = Scraped(page=None, pid=None, seconds=0.0)
            else:
                selector.register(call.connection, selectors.EVENT_READ, (process, call))
        try:
            while selector.get_map():
                ready = selector.select(max(0.0, begun_s + deadline_s - time.monotonic()))
                if not ready:
                    break
                for key, _ in ready:
                    process, call = key.data
                    if call.advance():
                        answers[process] = _answer(selector, call, begun_s, page=call.page())
        finally:
            for key in tuple(selector.get_map().values()):
                process, call = key.data
                answers[process] = _answer(selector, call, begun_s, page=None)
    return answers


def _answer(
    selector: selectors.BaseSelector, call: _Request, begun_s: float, page: bytes | None
) -> Scraped:
    """Closes the connection, and returns the result."""
    selector.unregister(call.connection)
    call.connection.close()
    return Scraped(page=page, pid=call.pid, seconds=time.monotonic() - begun_s)


def _request(address: str, complain: Callable[[str], None]) -> _Request | None:
    """Returns a connection to a process of this user. Returns None if no process listens, its queue
    is full, or it belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(address)
        pid, user = peer_process(connection)
    except OSError:
        connection.close()
        return None
    if not is_own_user(user):
        connection.close()
        complain(f"@{address[1:]}: process {pid} of user {user} listens there: not scraped")
        return None
    return _Request(connection=connection, pid=pid)
