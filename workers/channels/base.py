"""What an attempt sends and takes tensors with.

:mod:`.messages` goes through host memory over ZeroMQ. :mod:`.group` goes through a process group of
``torch.distributed``, by :mod:`.gloo` or :mod:`.nccl`. :mod:`.opening` makes what
``cluster.transport`` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from penstock.workers.channels.inbox import NamedTensors, TransferKey
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
