"""Streams, copies, allocation, pinning and random numbers of the devices that torch computes on.

Swaps, op logs, runtimes and profiles ask a :class:`TorchDevice` for these and never torch itself.
So another implementation can carry out, or check, their use of streams and memory. Code for one
platform only, such as streaming weights, is in :mod:`penstock.workers.platforms`.

Memory elsewhere comes from an :data:`Allocate`. It is in use as long as the tensor object exists; a
pool may hand out views and take them back with ``weakref.finalize``.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from types import MappingProxyType
from typing import Protocol

import torch

from penstock.models.gpu import CudaGpu, Event, Gpu

Allocate = Callable[[int], torch.Tensor]
"""Bytes wanted -> a flat uint8 tensor of at least that size."""


class Arrival(Protocol):
    """A point in a copy stream, behind all copies issued before it."""

    def wait(self) -> None:
        """Orders later work of the compute stream after the copies."""


class CopyStream(Protocol):
    """Copies concurrent with the computation, in the order of the calls."""

    def follow(self, arrival: Arrival) -> None:
        """Orders later copies after that point, on any stream."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Starts a copy between flat tensors of equal size.

        The copy comes after all work issued to the compute stream so far. The caller may drop both
        tensors at once: the allocator must not reuse memory of the device before the copy is over.
        """

    def record(self) -> Arrival:
        """Returns the end of all copies so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapStreams:
    """A stream for each direction, and the allocator of memory elsewhere."""

    out: CopyStream
    back: CopyStream
    allocate: Allocate


class TorchDevice(Protocol):
    """One device of torch. ``own_memory``: it has memory, and streams, apart from the host's."""

    device: torch.device
    own_memory: bool

    @property
    def name(self) -> str:
        """The device's common name."""

    @property
    def memory_bytes(self) -> float:
        """Bytes of its memory; infinite if its memory is the host's."""

    def synchronize(self) -> None:
        """Waits until all work issued so far is done."""

    def generator(self) -> torch.Generator:
        """Returns the generator that kernels use by default."""

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Returns fresh host memory, a flat uint8 tensor, for copies concurrent with the
        computation.
        """

    def swap_streams(self, distance: int | None = None) -> SwapStreams:
        """Returns the streams that swap to the host, or to a peer: the device of the node with this
        one's number plus ``distance``. Every call returns the same streams.
        """


class Done:
    """The end of copies that were complete at the call."""

    def wait(self) -> None:
        """Returns at once: nothing is in progress."""


class PlainCopies:
    """Copies on the calling thread, for CPUs: their memory is host memory."""

    def follow(self, arrival: Arrival) -> None:
        """Does nothing: each copy is complete when its call returns."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies at once."""
        target.copy_(source)

    def record(self) -> Done:
        """Returns a point that has passed."""
        return Done()


def host_memory(num_bytes: int) -> torch.Tensor:
    """Returns fresh pageable host memory, a flat uint8 tensor."""
    # Modes that count a device's memory must not see it.
    with torch._C._DisableTorchDispatch():
        return torch.empty(num_bytes, dtype=torch.uint8)


class HostDevice:
    """A CPU as a :class:`TorchDevice`: each call returns after its work is done."""

    own_memory = False
    memory_bytes = inf

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """The architecture."""
        return f"CPU ({platform.machine()})"

    def synchronize(self) -> None:
        """Does nothing: no work is in progress."""

    def generator(self) -> torch.Generator:
        """Returns torch's default generator."""
        return torch.default_generator

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Returns pageable memory."""
        return host_memory(num_bytes)

    def swap_streams(self, distance: int | None = None) -> SwapStreams:
        """Returns copies within host memory; that of peers is the host's, too."""
        return SwapStreams(out=PlainCopies(), back=PlainCopies(), allocate=host_memory)


class GpuArrival:
    """An event on a stream of a GPU."""

    def __init__(self, gpu: Gpu, event: Event) -> None:
        self._gpu = gpu
        self.event = event

    def wait(self) -> None:
        """Makes the current stream wait; the host does not."""
        self._gpu.current_stream().wait_event(self.event)


class GpuCopies:
    """Copies on a stream of its own; asynchronous if the host memory is pinned."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._stream = gpu.stream()

    def follow(self, arrival: Arrival) -> None:
        """Makes the copy stream wait for the event, on the device."""
        assert isinstance(arrival, GpuArrival)
        self._stream.wait_event(arrival.event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies after all work of the current stream so far. Records the copy stream's use of
        device memory with the allocator.
        """
        # Earlier work may write the source, or still read the target's memory.
        self._stream.wait_stream(self._gpu.current_stream())
        with self._gpu.on(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            # The caller may drop both: the allocator must not reuse them before the copy is over.
            if self._gpu.holds(tensor):
                self._gpu.keep_for(tensor, self._stream)

    def record(self) -> GpuArrival:
        """Returns an event after the copies so far."""
        event = self._gpu.event()
        event.record(self._stream)
        return GpuArrival(self._gpu, event)


class GpuDevice:
    """A GPU as a :class:`TorchDevice`."""

    own_memory = True

    def __init__(self, gpu: Gpu) -> None:
        self.device = gpu.device
        self._gpu = gpu
        self._swaps: dict[int | None, SwapStreams] = {}

    @property
    def name(self) -> str:
        """The driver's name of the GPU."""
        return self._gpu.name

    @property
    def memory_bytes(self) -> float:
        """All of the GPU's memory, shared by all processes."""
        return self._gpu.memory_bytes

    def synchronize(self) -> None:
        """Waits for all streams of the device."""
        self._gpu.synchronize()

    def generator(self) -> torch.Generator:
        """Returns the device's own generator; that of the current device if this one has no
        number.
        """
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        return torch.cuda.default_generators[index]

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Returns pinned memory, which torch keeps for reuse."""
        return self._gpu.pinned(num_bytes)

    def swap_streams(self, distance: int | None = None) -> SwapStreams:
        """Returns streams to pinned memory, or to the peer's GPU: over NVLink or PCIe where the
        driver allows that.
        """
        # New streams in each attempt would take others of torch's 32 streams, also those of
        # weights.
        if distance not in self._swaps:
            allocate: Allocate = self.host_memory
            if distance is not None:
                allocate = partial(self._gpu.on_peer, distance)
            self._swaps[distance] = SwapStreams(
                out=GpuCopies(self._gpu), back=GpuCopies(self._gpu), allocate=allocate
            )
        return self._swaps[distance]


def _cuda(device: torch.device) -> GpuDevice:
    return GpuDevice(CudaGpu(device))


def _first_gpu() -> torch.device | None:
    return torch.device("cuda", 0) if torch.cuda.is_available() else None


_IMPLEMENTATIONS: Mapping[str, Callable[[torch.device], TorchDevice]] = MappingProxyType(
    {"cpu": HostDevice, "cuda": _cuda}
)
_FIRST: Mapping[str, Callable[[], torch.device | None]] = MappingProxyType(
    {"cpu": lambda: torch.device("cpu"), "cuda": _first_gpu}
)
"""Finders of the first device, by torch's type of device."""


@cache  # one object per device, so that its streams are made once
def torch_device(device: torch.device) -> TorchDevice:
    """Returns the object that represents a device of torch in this process."""
    return _IMPLEMENTATIONS[device.type](device)


def first_device(kind: str) -> TorchDevice | None:
    """Returns the first device of one of torch's types, ``None`` if there is none."""
    device = _FIRST[kind]()
    return None if device is None else torch_device(device)


def first_with_room(num_bytes: float) -> torch.device:
    """Returns the first GPU if so many bytes are free on it, else the CPU."""
    gpu = _first_gpu()
    if gpu is None or torch.cuda.mem_get_info(gpu)[0] < num_bytes:
        return torch.device("cpu")
    return gpu


def repeat_bits() -> None:
    """Chooses kernels that give the same bits for the same input, for the whole process. An
    operator without such a kernel is an error. Call this before any computation.
    """
    # cuBLAS requires this for equal bits; it reads the variable at its first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory would cost a pass over every activation.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property of the module
