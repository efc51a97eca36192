"""A worker's or optimizerd's end of fetchd: requests ranges, and copies them out of staging memory.

The socket is local, of the same user only. Each connection has its own staging memory, a descriptor
without a name. fetchd reads ranges of other nodes' arrays into it, and reports each range that is
complete and was not written meanwhile. The serving side is :mod:`penstock.daemons.fetch.clients`.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import socket as sockets
from collections import deque
from collections.abc import Callable

from penstock.host import world
from penstock.host.errors import LostMemberError, PenstockError, ProtocolError
from penstock.protocol.run.names import socket_folder
from penstock.protocol.security.token import peer_process
from penstock.protocol.wire.blocks import FetchCancelledError
from penstock.protocol.wire.frames import (
    MAX_HEADER_BYTES,
    BlockRequest,
    ReadReply,
    ReadRequest,
    Staging,
    decode,
    encode,
)

FETCH_SOCKET = "fetch"
STAGING_SLOTS = 4
SLOT_BYTES = 4 << 20
ANSWER_TIMEOUT_S = 8.0
"""Seconds until a silent fetchd counts as stopped; fetchd itself ends a read earlier."""
_POLL_S = 0.02
_PAUSES_S = (0.0002, 0.0005, 0.001, 0.002)
"""Seconds before requests for an incomplete array are repeated: each costs both sides a read over
the network.
"""


class AwayError(PenstockError):
    """The peer cannot be read one-sidedly now; the message has the reason."""


def socket_address(run_id: str, node: str) -> str:
    """Returns the path of the local socket of a node's fetchd."""
    return str(socket_folder(run_id, node) / FETCH_SOCKET)


class StagedClient:
    """Fetches arrays through the node's fetchd. Belongs to one thread."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: _Connection | None = None
        self._serial = 0

    def fetch(
        self,
        address: str,
        request: BlockRequest,
        out: memoryview,
        *,
        timeout_s: float,
        cancelled: Callable[[], bool],
    ) -> None:
        """Fills ``out`` with an array of the node with a memoryd on ``address``.

        Raises:
            AwayError: no fetchd runs on one of the nodes, or it ended; fetch from memoryd.
        """
        deadline_s = world.monotonic() + timeout_s
        try:
            if self._connection is None:
                self._connection = _Connection(self._address)
            fetch = _StagedFetch(self._connection, address, request, out, self._serial)
            while not fetch.finished:
                if cancelled():
                    raise FetchCancelledError(f"block {request.block} from {address}: cancelled")
                if world.monotonic() >= deadline_s:
                    raise LostMemberError(
                        f"{request.array} of block {request.block} from {address}:"
                        f" {fetch.num_received} of {len(out)} bytes after {timeout_s:g} s"
                    )
                fetch.turn()
            self._serial = fetch.serial
        except BaseException:
            self.close()  # what is under way would be written into memory that is used again
            raise

    def close(self) -> None:
        """Closes the connection; fetchd frees the staging memory when no read writes into it any
        more.
        """
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Connection:
    """A connection with its staging memory."""

    def __init__(self, address: str) -> None:
        self.socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        self.memory: mmap.mmap | None = None
        try:
            self.socket.settimeout(ANSWER_TIMEOUT_S)
            self.socket.connect(address)
            if peer_process(self.socket)[1] != os.getuid():
                raise AwayError("the fetchd of this node's address belongs to another user")
            data, descriptors, _, _ = sockets.recv_fds(self.socket, MAX_HEADER_BYTES, 1)
            try:
                staging = decode(data, Staging)
                self.slot_bytes, self.num_slots = staging.slot_bytes, staging.slots
                self.memory = mmap.mmap(descriptors[0], self.slot_bytes * self.num_slots)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        except (OSError, IndexError, ValueError, ProtocolError) as error:
            self.close()
            raise AwayError(f"no fetchd on this node: {error}") from error
        except BaseException:
            self.close()
            raise
        self.view = memoryview(self.memory)

    def send(self, request: ReadRequest) -> None:
        try:
            self.socket.send(encode(request))
        except OSError as error:
            raise AwayError(f"fetchd of this node is gone: {error}") from error

    def receive(self, timeout_s: float) -> ReadReply | None:
        self.socket.settimeout(timeout_s)
        try:
            data = self.socket.recv(MAX_HEADER_BYTES)
        except TimeoutError:
            return None
        except OSError as error:
            raise AwayError(f"fetchd of this node is gone: {error}") from error
        if not data:
            raise AwayError("fetchd of this node has ended")
        return decode(data, ReadReply)

    def close(self) -> None:
        if self.memory is not None:
            self.view.release()
            self.memory.close()
            self.memory = None
        self.socket.close()


class _StagedFetch:
    """One array in transfer. All its ranges are of one sequence, or the transfer restarts."""

    def __init__(
        self,
        connection: _Connection,
        address: str,
        request: BlockRequest,
        out: memoryview,
        serial: int,
    ) -> None:
        self._connection = connection
        self._address = address
        self._request = request
        self._out = out
        self.serial = serial
        self._asked: dict[int, tuple[int, int]] = {}  # serial -> (slot, offset)
        self._free = list(range(connection.num_slots))
        self._waits = 0
        self._answered_s = world.monotonic()
        self._begin()

    @property
    def finished(self) -> bool:
        """True if all bytes have arrived, and no request is in flight."""
        return self.num_received == len(self._out) and not self._asked

    def turn(self) -> None:
        """Sends allowed requests, then receives one answer if it arrives soon."""
        window = len(self._free) if self._stamp is not None else 1 - len(self._asked)
        while self._to_ask and self._free and window > 0:
            self._ask(self._to_ask.popleft())
            window -= 1
        reply = self._connection.receive(_POLL_S)
        now_s = world.monotonic()
        if reply is None:
            if now_s - self._answered_s > ANSWER_TIMEOUT_S:
                raise AwayError(f"fetchd of this node says nothing for {ANSWER_TIMEOUT_S:g} s")
            return
        self._answered_s = now_s
        if reply.serial not in self._asked:
            raise ProtocolError(f"fetchd answers {reply.serial}, which was not asked")
        self._take(reply, *self._asked.pop(reply.serial))

    def _begin(self) -> None:
        self._to_ask = deque(range(0, len(self._out), self._connection.slot_bytes))
        self._stamp: tuple[int, int] | None = None
        self.num_received = 0

    def _ask(self, offset: int) -> None:
        self.serial += 1
        slot = self._free.pop()
        self._asked[self.serial] = (slot, offset)
        ranged = dataclasses.replace(
            self._request, offset=offset, num_bytes=len(self._range(offset))
        )
        self._connection.send(
            ReadRequest(serial=self.serial, address=self._address, slot=slot, block=ranged)
        )

    def _take(self, reply: ReadReply, slot: int, offset: int) -> None:
        self._free.append(slot)
        if reply.status in ("wait", "torn"):
            if reply.status == "wait":
                world.sleep(_PAUSES_S[min(self._waits, len(_PAUSES_S) - 1)])
                self._waits += 1
            self._to_ask.appendleft(offset)
            return
        if reply.status == "away":
            raise AwayError(reply.error)
        stamp = (reply.incarnation, reply.sequence)
        if self._stamp is None:
            self._stamp = stamp
        if stamp != self._stamp:
            # Written between two ranges: ranges in flight are requested again as well.
            under_way = self._asked
            self._asked = {}
            self._begin()
            self._drain(under_way)
            return
        target = self._range(offset)
        start = slot * self._connection.slot_bytes
        target[:] = self._connection.view[start : start + len(target)]
        self.num_received += len(target)

    def _drain(self, under_way: dict[int, tuple[int, int]]) -> None:
        """Waits for answers that are not needed any more: reads write their slots until then."""
        while under_way:
            reply = self._connection.receive(ANSWER_TIMEOUT_S)
            if reply is None or reply.serial not in under_way:
                raise AwayError("fetchd of this node does not answer")
            self._free.append(under_way.pop(reply.serial)[0])

    def _range(self, offset: int) -> memoryview:
        return self._out[offset : offset + self._connection.slot_bytes]
