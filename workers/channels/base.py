"""The interface for an attempt's transfers, and the channel that sends tensors as messages.

:class:`MessageChannel` goes through host memory over ZeroMQ and works everywhere. :mod:`.group`
goes through a process group of ``torch.distributed`` by a wire such as :mod:`.gloo` or
:mod:`.nccl`. :mod:`.opening` opens the channel that ``cluster.transport`` names.
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

    Waits end by ``Interrupted`` when ``abort`` is set, and by ``LostMemberError``, which names the
    transfer, after ``timeout_s``. A dead peer is not an error by itself: the scheduler notices its
    death, and its Drain aborts.
    """

    def send(
        self,
        peer: int,
        key: TransferKey,
        tensors: Mapping[str, torch.Tensor],
        abort: Abort,
        timeout_s: float,
    ) -> None:
        """Starts to send tensors of the device, of any shapes, in a dtype of
        :data:`penstock.workers.channels.tensors.DTYPES`. The caller must not write them any more.

        Raises:
            Interrupted, LostMemberError: as all waits.
            ProtocolError: the tensor's type cannot be sent.
        """

    def post(self, key: TransferKey) -> None:
        """Makes room for a later :meth:`take`, if that is possible without waiting."""

    def take(self, key: TransferKey, abort: Abort, timeout_s: float) -> NamedTensors:
        """Waits for a transfer; returns its tensors, on the device, of the shapes and dtypes sent.

        Work given to the device from now on sees the received bytes.

        Raises:
            Interrupted, LostMemberError: as all waits.
        """

    def arrival_s(self, key: TransferKey) -> float | None:
        """Returns the arrival time of a transfer that was just taken (seconds of
        ``time.perf_counter``). None: only the device knows it. One call per transfer.
        """

    def leftovers(self, phase: str, attempt: int) -> tuple[TransferKey, ...]:
        """Returns the transfers of an attempt that arrived and were not taken."""

    def check(self) -> None:
        """Raises if a taken transfer may not have arrived after all.

        Raises:
            LostMemberError: a wait ended without its transfer.
        """

    def close(self) -> None:
        """Abandons current transfers; no byte of them reaches another epoch."""


class MessageChannel:
    """See :class:`penstock.workers.channels.base.Channel`."""

    def __init__(self, *, run_id: str, epoch: int, device: Device, transport: Transport) -> None:
        """Wraps a transport, which is connected for the epoch; its inbox is open."""
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
        """Queues a message; tensors of a device are copied to the host first."""
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
        """Does nothing: the inbox has room for all receives of the plan."""

    def take(self, key: TransferKey, abort: Abort, timeout_s: float) -> NamedTensors:
        """Takes the transfer out of the inbox and moves it to the device."""
        return self._device.from_host(self._transport.inbox.take(key, abort, timeout_s))

    def arrival_s(self, key: TransferKey) -> float | None:
        """Returns the time at which the message was complete, or the device's arrival time."""
        return self._device.arrival_s(self._transport.inbox.arrival_s(key))

    def leftovers(self, phase: str, attempt: int) -> tuple[TransferKey, ...]:
        """Returns the inbox's transfers of the attempt."""
        return self._transport.inbox.leftovers(phase, attempt)

    def check(self) -> None:
        """Does nothing: taken transfers had arrived."""

    def close(self) -> None:
        """Does nothing: the owner of sockets and inbox closes them."""
