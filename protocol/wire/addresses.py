"""Listening sockets that follow the machine's address when the host name moves during a run.

A socket on an address that the machine loses receives nothing any more. A check costs a system call
a second. The name is resolved again only when the old address is gone.
"""

from __future__ import annotations

import logging
import socket as sockets
from collections.abc import Callable
from typing import Any

import zmq

from penstock.host import world

LOOK_S = 1.0

_log = logging.getLogger(__name__)


class HomeAddress:
    """The IPv4 number of a host name of this machine."""

    def __init__(self, host: str) -> None:
        """Resolves the name.

        Raises:
            OSError: it means nothing.
        """
        self.host = host
        self.number = sockets.gethostbyname(host)
        self._look_s = world.monotonic() + LOOK_S

    def moved(self) -> bool:
        """Returns whether the name now resolves to another address of this machine, and the old
        address is gone. Checks once in :data:`LOOK_S` seconds, and may wait for a name server then.
        """
        now_s = world.monotonic()
        if now_s < self._look_s:
            return False
        self._look_s = now_s + LOOK_S
        if _is_here(self.number):
            return False
        try:
            number = sockets.gethostbyname(self.host)
        except OSError as error:
            _log.warning("%s has gone, and %s means nothing: %s", self.number, self.host, error)
            return False
        if number == self.number or not _is_here(number):
            return False
        _log.warning("%s is at %s now, no more at %s", self.host, number, self.number)
        self.number = number
        return True


class HomeSocket:
    """A ZeroMQ socket that listens on TCP where its host is. Used by the thread that receives;
    :attr:`endpoint` may be read by all.
    """

    def __init__(
        self, socket: zmq.Socket[Any], host: str, announce: Callable[[str], str] = str
    ) -> None:
        """Binds the socket to a port that the system chooses. ``announce`` turns the bound address
        into the text for peers.

        Raises:
            OSError: the name does not resolve.
        """
        self._socket = socket
        self._home = HomeAddress(host)
        self._announce = announce
        self._place = ""
        self._bound = False
        self.endpoint = ""
        self._bind(0)

    def follow(self) -> None:
        """Listens on the new address, on the same port, if the host has moved."""
        if self._home.moved():
            if self._bound:
                self._socket.unbind(self._place)
            self._bound = False
        if not self._bound:
            try:
                self._bind(int(self._place.rpartition(":")[2]))
            except zmq.ZMQError as error:
                # Another process has the port on that address, or the address is gone again: the
                # next call retries.
                _log.warning("cannot listen on %s: %s", self._home.number, error)

    def _bind(self, port: int) -> None:
        # ZeroMQ binds to numbers only.
        self._socket.bind(f"tcp://{self._home.number}:{port}")
        self._bound = True
        self._place = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.endpoint = self._announce(self._place)


def _is_here(number: str) -> bool:
    """Returns whether this machine has the address."""
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        try:
            probe.bind((number, 0))
        except OSError:
            return False
    return True
