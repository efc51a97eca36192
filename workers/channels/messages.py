"""Transfers as ZeroMQ messages, through host memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.protocol.wire.frames import Transfer
from penstock.workers.channels.inbox import NamedTensors, TransferKey
from penstock.workers.channels.transport import Transport
from penstock.workers.platforms.base import Device
from penstock.workers.waiting import Abort


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
