"""Serves workers and the optimizerd of the node: a local socket, and staging memory for each
client.

The socket accepts processes of the same user only. Staging memory has no name; its descriptor is
handed over. It is freed after its client has disconnected and no transfer writes into it. The
clients' end is :mod:`penstock.protocol.wire.staged`.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket as sockets
from typing import Any

from penstock.daemons.fetch.agent import Agent
from penstock.daemons.fetch.reads import SCRATCH_BYTES, Target
from penstock.daemons.fetch.serving import address_of
from penstock.host.errors import ProtocolError, StateError
from penstock.protocol.security.token import peer_process
from penstock.protocol.wire.frames import (
    MAX_HEADER_BYTES,
    ReadReply,
    ReadRequest,
    Staging,
    decode,
    encode,
)
from penstock.protocol.wire.local_names import LocalName
from penstock.protocol.wire.staged import SLOT_BYTES, STAGING_SLOTS, socket_address

MAX_CLIENTS = 128

_log = logging.getLogger(__name__)


class Client:
    """A connection and its memory, registered with the agent."""

    def __init__(self, agent: Agent, connection: sockets.socket, generation: int) -> None:
        """Hands the staging memory over.

        Raises:
            OSError: there is no memory for it, or the client is gone.
        """
        self.socket = connection
        self.busy: set[int] = set()
        """Slots that a transfer may write into."""
        self.gone = False
        self._agent = agent
        size = SLOT_BYTES * STAGING_SLOTS
        descriptor = os.memfd_create("penstock-staging")
        try:
            os.posix_fallocate(descriptor, 0, size)
            self._staging = mmap.mmap(descriptor, size)
            self._scratch = mmap.mmap(-1, SCRATCH_BYTES * STAGING_SLOTS)
            self._view = memoryview(self._scratch)
            staging, scratch = address_of(self._staging), address_of(self._scratch)
            self._registration: Any = agent.register(
                [(staging, size), (scratch, len(self._scratch))]
            )
            self._targets = [
                Target(
                    scratch=self._view[SCRATCH_BYTES * slot : SCRATCH_BYTES * (slot + 1)],
                    scratch_address=scratch + SCRATCH_BYTES * slot,
                    staging_address=staging + SLOT_BYTES * slot,
                )
                for slot in range(STAGING_SLOTS)
            ]
            offer = Staging(generation=generation, slots=STAGING_SLOTS, slot_bytes=SLOT_BYTES)
            sockets.send_fds(connection, [encode(offer)], [descriptor])
        finally:
            os.close(descriptor)

    def receive(self) -> ReadRequest | None:
        """Returns the next request, or None: there is none now.

        Raises:
            ProtocolError: it is none, names a slot that is in use, or the client has disconnected.
        """
        try:
            data = self.socket.recv(MAX_HEADER_BYTES, sockets.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ProtocolError(f"the client is gone: {error}") from error
        if not data:
            raise ProtocolError("the client has disconnected")
        request = decode(data, ReadRequest)
        if request.slot >= STAGING_SLOTS or request.slot in self.busy:
            raise ProtocolError(f"slot {request.slot} is not free")
        if request.block.num_bytes > SLOT_BYTES:
            raise ProtocolError(f"{request.block.num_bytes} bytes do not fit into a slot")
        return request

    def target(self, slot: int) -> Target:
        """Returns where a slot's words and bytes are read to."""
        return self._targets[slot]

    def reply(self, reply: ReadReply) -> None:
        """Sends an answer; a client that is gone, or does not read, is dropped."""
        if not self.gone:
            try:
                self.socket.send(encode(reply), sockets.MSG_DONTWAIT)
            except OSError:
                self.gone = True

    def free(self) -> None:
        """Frees the memory when no slot is busy."""
        assert not self.busy, "a transfer may still write there"
        self.socket.close()
        self._agent.deregister(self._registration)
        for target in self._targets:
            target.scratch.release()
        self._targets.clear()
        self._view.release()
        self._scratch.close()
        self._staging.close()


class Listener:
    """The local socket."""

    def __init__(self, run_id: str, node: str) -> None:
        """Binds the local socket.

        Raises:
            StateError: another fetchd of this run and node is alive.
        """
        address = socket_address(run_id, node)
        self._name = LocalName.take(address, "fetchd")
        self.socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        try:
            self.socket.bind(address)
        except OSError as error:
            self.close()
            raise StateError(f"fetchd of node {node} cannot listen: {error}") from error
        self.socket.listen(MAX_CLIENTS)

    def close(self) -> None:
        """Closes the local socket."""
        self.socket.close()
        self._name.release()

    def accept(self) -> sockets.socket | None:
        """Returns a connection of this user, or None."""
        try:
            connection, _ = self.socket.accept()
        except OSError:
            return None
        _, user = peer_process(connection)
        if user != os.getuid():
            _log.warning("a connection of user %d was refused", user)
            connection.close()
            return None
        connection.setblocking(False)
        return connection
