"""The interface to a GPU: streams, events, pinned memory, and memory that streams share.

Copies, swaps and updates call a :class:`Gpu` and never ``torch.cuda``. So another implementation
can check that their order suffices. Kernels and allocations are plain torch on :attr:`Gpu.device`.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol, cast

import torch


class Event(Protocol):
    """A point in a stream."""

    def record(self, stream: Any) -> None:
        """Moves the event behind all work issued to the stream so far."""

    def synchronize(self) -> None:
        """Blocks the host until the event has passed."""

    def query(self) -> bool:
        """Returns whether the event has passed; does not wait."""

    def elapsed_time(self, end_event: Any) -> float:
        """Returns the milliseconds from this event to another; both have passed."""


class Stream(Protocol):
    """A queue of work, executed in the order of issue."""

    def wait_event(self, event: Any) -> None:
        """Orders later work of this stream after the event."""

    def wait_stream(self, stream: Any) -> None:
        """Orders later work of this stream after all work issued to ``stream`` so far."""

    def synchronize(self) -> None:
        """Blocks the host until all work issued so far is done."""


class Gpu(Protocol):
    """One GPU in this process. Threads have a current GPU and a current stream each."""

    device: torch.device

    @property
    def name(self) -> str:
        """The driver's name of the GPU."""

    @property
    def memory_bytes(self) -> float:
        """All of the GPU's memory, shared by all processes."""

    @property
    def allocated_bytes(self) -> float:
        """Bytes of tensors that live now."""

    @property
    def peak_bytes(self) -> float:
        """Largest number of bytes that tensors had since :meth:`restart_peak`."""

    def restart_peak(self) -> None:
        """Resets the peak to the bytes allocated now."""

    def make_current(self) -> None:
        """Makes the GPU current for this thread. Otherwise CUDA would make a second context on GPU
        0.
        """

    def current(self) -> AbstractContextManager[Any]:
        """Makes the GPU current for this thread inside the context."""

    def stream(self) -> Stream:
        """Returns another stream. A process has few, so callers keep it."""

    def current_stream(self) -> Stream:
        """Returns the stream that this thread issues work to."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Issues this thread's work to the stream inside; its GPU is current."""

    def event(self, *, blocking: bool = False, timing: bool = False) -> Event:
        """Returns an event that counts as passed until it is recorded. ``blocking``: a waiting host
        thread sleeps; by default it would keep a core busy. ``timing``: the event records a time.
        """

    def synchronize(self) -> None:
        """Blocks the host until all streams are done."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is in the memory of a GPU."""

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """Protects a tensor's memory after its last reference is gone. The memory is reused only
        after all work that the stream has by then is done.
        """

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Returns pinned host memory, flat uint8. It is not reused while copies to or from it are
        in progress.
        """

    def on_peer(self, distance: int, num_bytes: int) -> torch.Tensor:
        """Returns memory, flat uint8, of the GPU with this one's number plus ``distance``."""

    def register(self, address: int, num_bytes: int, read_only: bool = False) -> int:
        """Pins host memory, for reading only or not; returns the driver's error code, 0 if none.
        Several devices of a process may register the same range.
        """

    def unregister(self, address: int) -> int:
        """Unpins a range after its last device has released it; returns the driver's error code."""


_READ_ONLY = 0x08
"""``cudaHostRegisterReadOnly``."""
_PINNED: Counter[int] = Counter()
"""Number of this process's devices that have registered a range, by its first address."""


class CudaGpu:
    """A GPU by torch's CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    @property
    def name(self) -> str:
        """The driver's name of the GPU."""
        return str(torch.cuda.get_device_name(self.device))

    @property
    def memory_bytes(self) -> float:
        """Bytes of memory, as reported by the driver."""
        return float(torch.cuda.get_device_properties(self.device).total_memory)

    @property
    def allocated_bytes(self) -> float:
        """Bytes allocated, as reported by the caching allocator."""
        return float(torch.cuda.memory_allocated(self.device))

    @property
    def peak_bytes(self) -> float:
        """Peak of allocated bytes, as reported by the caching allocator."""
        return float(torch.cuda.max_memory_allocated(self.device))

    def restart_peak(self) -> None:
        """Resets the caching allocator's peak."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def make_current(self) -> None:
        """Sets this thread's current device."""
        torch.cuda.set_device(self.device)

    def current(self) -> AbstractContextManager[Any]:
        """Sets this thread's current device inside the context."""
        return torch.cuda.device(self.device)

    def stream(self) -> Stream:
        """Returns one of torch's 32 streams."""
        return cast(Stream, torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        """Returns the default stream, or the stream of an enclosing :meth:`on`."""
        return cast(Stream, torch.cuda.current_stream(self.device))

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Sets this thread's current stream inside the context."""
        return torch.cuda.stream(stream)

    def event(self, *, blocking: bool = False, timing: bool = False) -> Event:
        """Returns an event that no stream has recorded yet."""
        return torch.cuda.Event(enable_timing=timing, blocking=blocking)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Waits for all streams of the device."""
        torch.cuda.synchronize(self.device)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether the tensor's device is a GPU."""
        return tensor.is_cuda

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """Records the stream's use of the tensor with the caching allocator."""
        tensor.record_stream(stream)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Allocates from torch's pinned allocator, which rounds up to a power of two."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def on_peer(self, distance: int, num_bytes: int) -> torch.Tensor:
        """Makes a context on the peer at the first call, which takes a few hundred MB."""
        assert self.device.index is not None, "a worker's GPU has a number"
        peer = (self.device.index + distance) % torch.cuda.device_count()  # workers may share GPUs
        return torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", peer))

    def register(self, address: int, num_bytes: int, read_only: bool = False) -> int:
        """Calls ``cudaHostRegister``, which takes about 0.1 s per GB."""
        code = 0
        if not _PINNED[address]:
            flags = _READ_ONLY if read_only else 0
            code = int(self._runtime.cudaHostRegister(address, num_bytes, flags))
        if code:
            self._forget_error()
        else:
            _PINNED[address] += 1
        return code

    def unregister(self, address: int) -> int:
        """Calls ``cudaHostUnregister`` after the last device has released the range."""
        _PINNED[address] -= 1
        code = 0
        if not _PINNED[address]:
            code = int(self._runtime.cudaHostUnregister(address))
        if code:
            self._forget_error()
        return code

    def _forget_error(self) -> None:
        """Clears CUDA's stored error, which the next query would return. Torch queries after its
        kernels, so a later kernel would fail with the error. Torch has no call to clear it, but a
        query does.
        """
        with suppress(RuntimeError):
            torch.ones(1, device=self.device)
