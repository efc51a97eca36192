"""What an attempt sends and takes tensors with, and the channel that sends them as messages.

:class:`MessageChannel` goes through host memory over ZeroMQ and works everywhere. :mod:`.group`
goes through a process group of ``torch.distributed`` by a wire such as :mod:`.gloo` or
:mod:`.nccl`. :mod:`.opening` makes what ``cluster.transport`` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from penstock.protocol.wire.frames import Transfer
from penstock.workers.channels.inbox import NamedTensors, TransferKey
from penstock.workers.channels.transport import Transport
from penstock.workers.device import Device
from penstock.workers.waiting import Abort


class Channel(Protocol):
    """Transfers of one epoch. Used by the interpreter's thread only.

    Waits end by ``Interrupted`` when ``abort`` is set and by ``LostMemberError``, which names the
    transfer, after ``timeout_s``. A peer that dies is not an error by itself: the scheduler
    notices, and its Drain aborts.
    """

    def send(
        self,
        peer: int,
        key: TransferKey,
        tensors: Mapping[str, torch.Tensor],
        abort: Abort,
        timeout_s: float,
    ) -> None:
        """Start to send tensors of the device, of any shapes, in a dtype of
        :data:`penstock.workers.channels.tensors.DTYPES`. They must not be written any more.

        Raises:
            Interrupted, LostMemberError: as all waits.
            ProtocolError: a type that cannot travel.
        """

    def post(self, key: TransferKey) -> None:
        """Make room for a transfer that will be taken, if that is possible without waiting."""

    def take(self, key: TransferKey, abort: Abort, timeout_s: float) -> NamedTensors:
        """Wait for a transfer; returns its tensors, on the device, of the shapes and dtypes sent.

        Work given to the device from now on sees what was received.

        Raises:
            Interrupted, LostMemberError: as all waits.
        """

    def arrival_s(self, key: TransferKey) -> float | None:
        """Returns when a transfer that was just taken had arrived (seconds of
        ``time.perf_counter``), None where only the device knows. To be asked once.
        """

    def leftovers(self, phase: str, attempt: int) -> tuple[TransferKey, ...]:
        """Returns what arrived for an attempt and was not taken."""

    def check(self) -> None:
        """Raise if what was taken may not have arrived after all.

        Raises:
            LostMemberError: a wait ended without what it waited for.
        """

    def close(self) -> None:
        """Abandon what is under way; nothing of it reaches another epoch."""


class MessageChannel:
    """See :class:`penstock.workers.channels.base.Channel`."""

    def __init__(self, *, run_id: str, epoch: int, device: Device, transport: Transport) -> None:
        """``transport`` is connected for the epoch, and its inbox open."""
        self._run_id = run_id
        self._epoch = epoch
        self._device = device
        self._transport = transport

    def send(
        self,
        peer: int,
        key: TransferKey,
        tensors: Mapping[str, torch.Tensor],
        abort: Abort,
        timeout_s: float,
    ) -> None:
        """Queue a message: the tensors are copied to the host first, if they are not there."""
        header = Transfer(
            run_id=self._run_id,
            epoch=self._epoch,
            phase=key.phase,
            attempt=key.attempt,
            kind=key.kind,
            stage=key.stage,
            micro_batch=key.micro_batch,
            tensors=(),
        )
        self._transport.send(peer, header, self._device.to_host(tensors), abort, timeout_s)

    def post(self, key: TransferKey) -> None:
        """Do nothing: the inbox has room for all that the plan receives."""

    def take(self, key: TransferKey, abort: Abort, timeout_s: float) -> NamedTensors:
        """Take the transfer out of the inbox, as it arrived, and bring it to the device."""
        return self._device.from_host(self._transport.inbox.take(key, abort, timeout_s))

    def arrival_s(self, key: TransferKey) -> float | None:
        """Returns when the message was complete, or when the device says that it came."""
        return self._device.arrival_s(self._transport.inbox.arrival_s(key))

    def leftovers(self, phase: str, attempt: int) -> tuple[TransferKey, ...]:
        """Returns what the inbox holds of the attempt."""
        return self._transport.inbox.leftovers(phase, attempt)

    def check(self) -> None:
        """Do nothing: what was taken had arrived."""

    def close(self) -> None:
        """Do nothing: sockets and inbox are closed by who opened them."""
