"""What spans occupy."""

from __future__ import annotations

from enum import StrEnum


class Lane(StrEnum):
    """A kind of resource of a device, or of a node."""

    COMPUTE = "compute"
    """The compute stream of a device."""
    FETCH = "fetch"
    """Its host-to-device stream: weights, and optimizer state of updates."""
    OFFLOAD = "offload"
    """Its device-to-host stream: gradients, and weights of updates."""
    SWAP = "swap"
    """Activations on either of these streams, or on the way to another device's memory."""
    LINK = "link"
    """From one device to another."""
    REDUCE = "reduce"
    """Collectives of a device: sums of gradients, gathered weights, gradients from other nodes."""
    UPDATE = "update"
    """Optimizer kernels on the compute stream of a device."""
    OPTIMIZER = "optimizer"
    """The optimizer cores of a node."""
