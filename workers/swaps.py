"""Copies of swapped activations to host memory and back, beside the computation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.models.kept import Allocate, CopyStream, CudaCopies, PlainCopies, host_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapStreams:
    """A stream for each direction, and where host memory comes from."""

    out: CopyStream
    back: CopyStream
    allocate: Allocate

    @classmethod
    def of(cls, device: torch.device) -> SwapStreams:
        """Those of a device; on a GPU the host memory is pinned, and torch keeps it for reuse."""
        if device.type != "cuda":
            return cls(out=PlainCopies(), back=PlainCopies(), allocate=host_memory)
        streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
        return cls(out=CudaCopies(streams[0]), back=CudaCopies(streams[1]), allocate=_pinned)


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
