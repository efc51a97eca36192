"""Transfers between emulated devices: messages that say themselves when they arrive."""

from __future__ import annotations

from penstock.workers.channels.base import MessageChannel
from penstock.workers.channels.inbox import TransferKey
from penstock.workers.platforms.emulated.device import EmulatedDevice


class EmulatedChannel(MessageChannel):
    """See :class:`penstock.workers.channels.base.Channel`."""

    def arrival_s(self, key: TransferKey) -> float | None:
        """Of the last message that was taken, on the emulated device's clock."""
        device = self._device
        assert isinstance(device, EmulatedDevice)
        return device.arrived_at
