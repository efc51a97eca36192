"""Copies of swapped activations to host memory or to a peer, and back, beside the computation.

A peer is another device of the node. The memory of CPU devices is host memory, so theirs is the
same copy. A GPU allocates on the peer's GPU and copies to it directly, over NVLink or PCIe where
the driver allows that; the first swap makes a CUDA context there, which takes a few hundred MB.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch

from penstock.models.saved_activations import (
    Allocate,
    CopyStream,
    CudaCopies,
    PlainCopies,
    host_memory,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapStreams:
    """A stream for each direction, and where memory elsewhere comes from."""

    out: CopyStream
    back: CopyStream
    allocate: Allocate

    @classmethod
    @cache  # attempt after attempt would take others of torch's 32 streams, those of weights too
    def of(cls, device: torch.device, distance: int | None = None) -> SwapStreams:
        """Those of a device; on a GPU the host memory is pinned, and torch keeps it for reuse.

        ``distance``: to the peer, whose number on the node is the device's plus this; ``None``: to
        the host.
        """
        if device.type != "cuda":
            return cls(out=PlainCopies(), back=PlainCopies(), allocate=host_memory)
        streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
        allocate: Allocate = _pinned
        if distance is not None:
            assert device.index is not None, "a worker's GPU has a number"
            peer = (device.index + distance) % torch.cuda.device_count()  # workers may share GPUs
            allocate = partial(_on_peer, torch.device("cuda", peer))
        return cls(out=CudaCopies(streams[0]), back=CudaCopies(streams[1]), allocate=allocate)


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _on_peer(peer: torch.device, num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=peer)
