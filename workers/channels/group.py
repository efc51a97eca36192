"""Transfers through a process group of ``torch.distributed``, one message each.

Both ends go through the transfers of an ordered pair in the sender's order
(:mod:`penstock.workers.channels.order`). A receiver needs shapes before the bytes. The first
transfer of a kind, phase and stage announces them over ZeroMQ; all later ones of the epoch must
have the same. A receive is posted when the plan posts it, or when a later one of the same sender is
posted.

No default group is made, and nothing is read from the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.host.errors import ProtocolError
from penstock.models.torch_internals import PrefixStore, Store, Work
from penstock.protocol.wire.frames import TensorHeader, TransferShape
from penstock.workers.channels.base import MessageChannel
from penstock.workers.channels.inbox import NamedTensors, ShapeKey, TransferKey
from penstock.workers.channels.order import Direction, OrderedTransfer, Place, TransferOrder
from penstock.workers.channels.tensors import Packing, headers_of
from penstock.workers.channels.transport import Transport
from penstock.workers.waiting import Abort


class Wire(Protocol):
    """Moves flat buffers between devices; matches by order or by tag."""

    def outgoing(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the device's tensors, of any shape, in memory that the wire can read."""

    def incoming(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns tensors that the wire wrote, of any shape, on the device."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Returns memory to receive into, (num_bytes,) uint8."""

    def send(self, peer: int, buffer: torch.Tensor, tag: int) -> None:
        """Starts to send a flat uint8 buffer; keeps it until it has been read."""

    def receive(self, peer: int, buffer: torch.Tensor, tag: int, key: TransferKey) -> None:
        """Starts to receive into a flat uint8 buffer, which the caller keeps until :meth:`wait`."""

    def wait(self, key: TransferKey, abort: Abort, timeout_s: float) -> None:
        """Orders work issued from now on after the transfer: it sees the received bytes.

        Raises:
            Interrupted: the work was aborted.
            LostMemberError: the transfer did not come in ``timeout_s`` seconds.
        """

    def arrival_s(self, key: TransferKey) -> float | None:
        """Returns the arrival time, if the host knows it; one call per transfer, after
        :meth:`wait`.
        """

    def check(self) -> None:
        """Raises if a wait ended without its transfer.

        Raises:
            LostMemberError: such a wait exists.
        """

    def close(self) -> None:
        """Breaks all connections; every wait ends, also at the peers."""


@dataclass(slots=True)
class _Incoming:
    """Posted receives of the current job from one sender: a position in the sender's order."""

    phase: str
    number: int
    posted: int = 0


class GroupChannel:
    """The :class:`penstock.workers.channels.base.Channel` over a wire; used by one thread.

    ``_buffers`` holds posted receives that are not taken: the wire may write into them at any time.
    """

    def __init__(
        self,
        *,
        run_id: str,
        epoch: int,
        device_index: int,
        order: TransferOrder,
        wire: Wire,
        transport: Transport,
        others: MessageChannel,
    ) -> None:
        """Makes the channel. ``others`` takes transfers that are not in ``order``."""
        self._run_id = run_id
        self._epoch = epoch
        self._own = device_index
        self._order = order
        self._arriving = order.arriving(device_index)
        self._wire = wire
        self._transport = transport
        self._others = others
        self._announced: dict[ShapeKey, tuple[TensorHeader, ...]] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._buffers: dict[TransferKey, torch.Tensor] = {}

    def send(
        self,
        peer: int,
        key: TransferKey,
        tensors: Mapping[str, torch.Tensor],
        abort: Abort,
        timeout_s: float,
    ) -> None:
        """Announces the shapes, if they are the first, and starts to send the tensors, of any
        shape.

        Raises:
            ProtocolError: shapes, types or names differ from those announced.
        """
        place = self._order.places.get(
            (Direction(self._own, peer, key.phase), OrderedTransfer.of(key))
        )
        if place is None:
            self._others.send(peer, key, tensors, abort, timeout_s)
            return
        sent = self._wire.outgoing(tensors)
        headers = headers_of(sent)
        self._announce(peer, key, headers, abort, timeout_s)
        packing = Packing(headers)
        if packing.num_bytes:
            self._wire.send(peer, packing.pack(sent), place.tag(key.attempt))
        self._transport.metrics.transferred("send", key.kind, packing.num_bytes)

    def post(self, key: TransferKey) -> None:
        """Posts the receive and all before it, up to the first with unknown shapes."""
        place = self._place(key)
        if place is not None:
            self._post(key, place)

    def take(self, key: TransferKey, abort: Abort, timeout_s: float) -> NamedTensors:
        """Waits for the shapes of this transfer and of those before it, then for the bytes. Returns
        the tensors, of the announced shapes, over the memory received into.

        Raises:
            Interrupted, LostMemberError: as all waits.
        """
        place = self._place(key)
        if place is None:
            return self._others.take(key, abort, timeout_s)
        self._post(key, place, abort, timeout_s)
        buffer = self._buffers[key]
        if buffer.numel():
            self._wire.wait(key, abort, timeout_s)
        # The memory is that of the tensors returned from now on.
        del self._buffers[key]
        packing = self._transport.notices.packing(
            _shape_key(place.direction, OrderedTransfer.of(key))
        )
        assert packing is not None, f"{key} was posted without its shapes"
        self._transport.metrics.transferred("receive", key.kind, packing.num_bytes)
        return self._wire.incoming(packing.unpack(buffer))

    def arrival_s(self, key: TransferKey) -> float | None:
        """Returns when the bytes were there."""
        known = self._place(key) is not None
        return self._wire.arrival_s(key) if known else self._others.arrival_s(key)

    def leftovers(self, phase: str, attempt: int) -> tuple[TransferKey, ...]:
        """Returns the posted receives that were not taken, arrived or not."""
        posted = tuple(k for k in self._buffers if (k.phase, k.attempt) == (phase, attempt))
        return posted + self._others.leftovers(phase, attempt)

    def check(self) -> None:
        """Checks the wire."""
        self._wire.check()

    def close(self) -> None:
        """Breaks the connections."""
        # The wire first: it may write into the buffers until its connections are broken.
        self._wire.close()
        self._buffers.clear()

    def _place(self, key: TransferKey) -> Place | None:
        return self._arriving.get((key.phase, OrderedTransfer.of(key)))

    def _announce(
        self,
        peer: int,
        key: TransferKey,
        headers: tuple[TensorHeader, ...],
        abort: Abort,
        timeout_s: float,
    ) -> None:
        what = (peer, key.phase, key.kind, key.stage)
        announced = self._announced.get(what)
        if announced is None:
            notice = TransferShape(
                run_id=self._run_id,
                epoch=self._epoch,
                sender=self._own,
                phase=key.phase,
                kind=key.kind,
                stage=key.stage,
                tensors=headers,
            )
            self._transport.tell(peer, notice, abort, timeout_s)
            self._announced[what] = headers
        elif announced != headers:
            raise ProtocolError(
                f"{key} holds {_described(headers)}, others of this stage before it"
                f" {_described(announced)}: where shapes vary, set cluster.transport: zmq"
            )

    def _post(
        self, key: TransferKey, place: Place, abort: Abort | None = None, timeout_s: float = 0.0
    ) -> None:
        """Posts all receives up to ``key``; with ``abort``, waits for their shapes."""
        direction = place.direction
        incoming = self._incoming.get(direction.sender)
        if incoming is None or (incoming.phase, incoming.number) != (key.phase, key.attempt):
            incoming = self._incoming[direction.sender] = _Incoming(key.phase, key.attempt)
        # Both ends must start the transfers of a line in one order, so those before come first,
        # even if the plan has not posted them yet.
        while incoming.posted <= place.position:
            transfer = self._order.transfers[direction][incoming.posted]
            named = TransferKey(phase=key.phase, attempt=key.attempt, **transfer._asdict())
            shape_key = _shape_key(direction, transfer)
            packing = self._transport.notices.packing(shape_key)
            if packing is None and abort is None:
                return
            if packing is None:
                assert abort is not None
                packing = self._transport.notices.wait_packing(
                    shape_key, f"{named} from worker {direction.sender}", abort, timeout_s
                )
            buffer = self._buffers[named] = self._wire.buffer(packing.num_bytes)
            if packing.num_bytes:
                tag = Place(direction, incoming.posted).tag(key.attempt)
                self._wire.receive(direction.sender, buffer, tag, named)
            incoming.posted += 1


def _shape_key(direction: Direction, transfer: OrderedTransfer) -> ShapeKey:
    return direction.sender, direction.phase, transfer.kind, transfer.stage


def _described(headers: tuple[TensorHeader, ...]) -> str:
    return ", ".join(f"{h.name} {h.dtype} {list(h.shape)}" for h in headers) or "nothing"


__all__ = ["PointToPoint", "PrefixStore", "Store", "Work"]


class PointToPoint(Protocol):
    """The methods of ``ProcessGroupGloo`` and ``ProcessGroupNCCL`` that move tensors."""

    def rank(self) -> int:
        """Returns the rank of this process."""

    def size(self) -> int:
        """Returns the number of ranks."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """Starts to send one contiguous tensor."""

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """Starts to receive into one contiguous tensor."""

    def abort(self) -> None:
        """Ends current transfers; Gloo's does nothing for transfers."""
