"""What device code asks of a GPU: streams, events, pinned memory, and memory that streams share.

Copies, swaps and updates ask a :class:`Gpu` for these and never ``torch.cuda``, so that another
implementation can look whether the order that they are given is enough. Kernels and allocations are
plain torch on :attr:`Gpu.device`.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol, cast

import torch


class Event(Protocol):
    """A point in a stream."""

    def record(self, stream: Any) -> None:
        """It is from now on the point behind what the stream was given so far."""

    def synchronize(self) -> None:
        """The host waits until it is passed."""

    def query(self) -> bool:
        """Returns whether it is passed; does not wait."""

    def elapsed_time(self, end_event: Any) -> float:
        """Returns the milliseconds from this one to another; both are passed."""


class Stream(Protocol):
    """Work in the order in which it was issued."""

    def wait_event(self, event: Any) -> None:
        """What is issued from now on comes behind the event."""

    def wait_stream(self, stream: Any) -> None:
        """What is issued from now on comes behind all that another stream was given so far."""

    def synchronize(self) -> None:
        """The host waits for all that was issued so far."""


class Gpu(Protocol):
    """One GPU in this process. Threads have a current GPU and a current stream each."""

    device: torch.device

    @property
    def name(self) -> str:
        """What the driver calls it."""

    @property
    def memory_bytes(self) -> float:
        """All of its memory, whoever uses it."""

    @property
    def allocated_bytes(self) -> float:
        """Of tensors that live now."""

    @property
    def peak_bytes(self) -> float:
        """The most that tensors had since :meth:`restart_peak`."""

    def restart_peak(self) -> None:
        """The most that tensors have is what they have now."""

    def make_current(self) -> None:
        """Of this thread, from now on. CUDA would make a second context on GPU 0 otherwise."""

    def current(self) -> AbstractContextManager[Any]:
        """It is this thread's current GPU inside."""

    def stream(self) -> Stream:
        """Returns another stream; a process has few, so ask once."""

    def current_stream(self) -> Stream:
        """Returns the one that this thread's work is issued to."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Work of this thread is issued to the stream inside; its GPU is current."""

    def event(self, *, blocking: bool = False, timing: bool = False) -> Event:
        """Returns an event that counts as passed until it is recorded. ``blocking``: whoever waits
        for it sleeps, by default it would keep a core busy. ``timing``: with a time.
        """

    def synchronize(self) -> None:
        """The host waits for all streams."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is in the memory of a GPU."""

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """The memory of a tensor, when nobody refers to it any more, is not used again before what
        the stream was given until then is done.
        """

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Returns pinned host memory, flat uint8; it is not used again while copies to or from it
        are under way.
        """

    def on_peer(self, distance: int, num_bytes: int) -> torch.Tensor:
        """Returns memory, flat uint8, of the GPU whose number is this one's plus ``distance``."""

    def register(self, address: int, num_bytes: int) -> int:
        """Pin host memory; returns the driver's error code, 0 if none. Several devices of a process
        may ask for the same range.
        """

    def unregister(self, address: int) -> int:
        """The last device that asked for a range lets go of it; returns the driver's error code."""


_PINNED: Counter[int] = Counter()
"""By address, how many devices of this process asked for the range that starts there."""


class CudaGpu:
    """A GPU by torch's CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    @property
    def name(self) -> str:
        """What the driver says."""
        return str(torch.cuda.get_device_name(self.device))

    @property
    def memory_bytes(self) -> float:
        """As the driver says."""
        return float(torch.cuda.get_device_properties(self.device).total_memory)

    @property
    def allocated_bytes(self) -> float:
        """As the caching allocator counts."""
        return float(torch.cuda.memory_allocated(self.device))

    @property
    def peak_bytes(self) -> float:
        """As the caching allocator counts."""
        return float(torch.cuda.max_memory_allocated(self.device))

    def restart_peak(self) -> None:
        """In the caching allocator."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def make_current(self) -> None:
        """Of this thread."""
        torch.cuda.set_device(self.device)

    def current(self) -> AbstractContextManager[Any]:
        """Of this thread."""
        return torch.cuda.device(self.device)

    def stream(self) -> Stream:
        """One of torch's 32."""
        return cast(Stream, torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        """The default stream, unless :meth:`on` says otherwise."""
        return cast(Stream, torch.cuda.current_stream(self.device))

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, for this thread."""
        return torch.cuda.stream(stream)

    def event(self, *, blocking: bool = False, timing: bool = False) -> Event:
        """Not of any stream yet."""
        return torch.cuda.Event(enable_timing=timing, blocking=blocking)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """All of the device."""
        torch.cuda.synchronize(self.device)

    def holds(self, tensor: torch.Tensor) -> bool:
        """By its device."""
        return tensor.is_cuda

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """The caching allocator is told."""
        tensor.record_stream(stream)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """From torch's pinned allocator, which rounds up to a power of two."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def on_peer(self, distance: int, num_bytes: int) -> torch.Tensor:
        """Makes a context there, which takes a few hundred MB, the first time."""
        assert self.device.index is not None, "a worker's GPU has a number"
        peer = (self.device.index + distance) % torch.cuda.device_count()  # workers may share GPUs
        return torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", peer))

    def register(self, address: int, num_bytes: int) -> int:
        """``cudaHostRegister``, takes about 0.1 s per GB."""
        code = 0
        if not _PINNED[address]:
            code = int(self._runtime.cudaHostRegister(address, num_bytes, 0))
        if code:
            self._forget_error()
        else:
            _PINNED[address] += 1
        return code

    def unregister(self, address: int) -> int:
        """``cudaHostUnregister``."""
        _PINNED[address] -= 1
        code = 0
        if not _PINNED[address]:
            code = int(self._runtime.cudaHostUnregister(address))
        if code:
            self._forget_error()
        return code

    def _forget_error(self) -> None:
        """CUDA keeps the error of a call for whoever asks next, and torch asks behind its kernels:
        some later one would fail with it. torch has no call that clears it, but asking does.
        """
        with suppress(RuntimeError):
            torch.ones(1, device=self.device)
