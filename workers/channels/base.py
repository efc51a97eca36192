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
from penstock.workers.platforms.base import Device
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
        """Start to send tensors of the device. They must not be written any more."""

    def post(self, key: TransferKey) -> None:
        """A transfer will be taken; make room for it if that is possible without waiting."""

    def take(self, key: TransferKey, abort: Abort, timeout_s: float) -> NamedTensors:
        """Wait for a transfer: tensors on the device."""

    def arrival_s(self, key: TransferKey) -> float | None:
        """When a transfer that was just taken had arrived (``time.perf_counter``); asked once.

        ``None``: only the device knows.
        """

    def leftovers(self, phase: str, attempt: int) -> tuple[TransferKey, ...]:
        """What arrived for an attempt and was not taken."""

    def check(self) -> None:
        """Raise ``LostMemberError`` if what was taken may not have arrived after all."""

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
        """Queue a message."""
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
        """The inbox has room for all that the plan receives."""

    def take(self, key: TransferKey, abort: Abort, timeout_s: float) -> NamedTensors:
        """From the inbox."""
        return self._device.from_host(self._transport.inbox.take(key, abort, timeout_s))

    def arrival_s(self, key: TransferKey) -> float | None:
        """When the message was complete."""
        return self._transport.inbox.arrival_s(key)

    def leftovers(self, phase: str, attempt: int) -> tuple[TransferKey, ...]:
        """What the inbox holds."""
        return self._transport.inbox.leftovers(phase, attempt)

    def check(self) -> None:
        """What was taken had arrived."""

    def close(self) -> None:
        """Sockets and inbox are closed by who opened them."""
