"""Which activations are swapped, and the streams that copy them.

Memory elsewhere comes from a callable: bytes wanted -> a flat uint8 tensor of at least that size
(host memory, pinned for a GPU; or another device's). It is in use for as long as that tensor object
exists; a pool may hand out views and take them back with ``weakref.finalize``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from penstock.models.saved_activations.slots import Arrival, StorageSlot

Allocate = Callable[[int], torch.Tensor]
"""Bytes wanted -> a flat uint8 tensor of at least that size."""


class CopyStream(Protocol):
    """Copies beside the computation, in the order in which they are asked for."""

    def follow(self, arrival: Arrival) -> None:
        """Copies asked for from now on come after that point, on whatever stream it is."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy between flat tensors of equal size.

        It comes after everything that the compute stream was given so far. The caller may drop both
        tensors at once: memory of the device must stay untouched till the copy is over.
        """

    def record(self) -> Arrival:
        """The point behind all copies so far."""


class Done:
    """Copies that were over when they were asked for."""

    def wait(self) -> None:
        """Nothing to wait for."""


class PlainCopies:
    """Copies on the calling thread: for a CPU, whose memory is host memory."""

    def follow(self, arrival: Arrival) -> None:
        """Waits."""
        arrival.wait()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies."""
        target.copy_(source)

    def record(self) -> Done:
        """At once."""
        return Done()


class CudaArrival:
    """An event on a CUDA stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        """The current stream waits; the host does not."""
        torch.cuda.current_stream().wait_event(self.event)


class CudaCopies:
    """Copies on a stream of its own; asynchronous if the host memory is pinned."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def follow(self, arrival: Arrival) -> None:
        """Ordered on the device."""
        assert isinstance(arrival, CudaArrival)
        self._stream.wait_event(arrival.event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """The allocator is told that device memory is in use on this stream, too."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)

    def record(self) -> CudaArrival:
        """An event behind the copies so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return CudaArrival(event)


def host_memory(num_bytes: int) -> torch.Tensor:
    """Fresh pageable host memory."""
    # Modes that count a device's memory must not see it.
    with torch._C._DisableTorchDispatch():
        return torch.empty(num_bytes, dtype=torch.uint8)


def chosen(slots: Sequence[StorageSlot], fraction: float) -> list[StorageSlot]:
    """Whole slots of together at least ``fraction`` of the bytes of ``slots``.

    The largest first, the older first among equals; the last one is the smallest that is enough.
    The same slots for the same forward.
    """
    wanted = fraction * sum(slot.num_bytes for slot in slots)
    left = sorted(slots, key=lambda slot: (-slot.num_bytes, slot.order))
    taken: list[StorageSlot] = []
    while wanted > 0 and left:
        enough = [slot for slot in left if slot.num_bytes >= wanted]
        slot = enough[-1] if enough else left[0]
        left.remove(slot)
        taken.append(slot)
        wanted -= slot.num_bytes
    return taken
