"""A GPU that is not there, behind the interface that device code uses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.streams.checker import Checker
from tests.streams.memory import Block
from tests.streams.shadow import Region
from tests.streams.streams import CheckedEvent, CheckedStream


def gpu_of(checker: Checker, index: int) -> CheckedGpu:
    """Returns the device with a number; made when it is first asked for."""
    with checker.lock:
        if index not in checker.gpus:
            checker.gpus[index] = CheckedGpu(checker, index)
        return checker.gpus[index]


class CheckedGpu:
    """A :class:`penstock.models.gpu.Gpu` whose tensors are in host memory of their own.

    Tensors are made on ``cpu:N``; torch says ``cpu`` of them afterwards, so whose they are is told
    by their address.
    """

    name = "checked"
    memory_bytes = float(1 << 40)

    def __init__(self, checker: Checker, index: int) -> None:
        self.checker = checker
        self.device = torch.device("cpu", index + 1)
        self.registered: dict[int, int] = {}
        self.memory = checker.new_memory(f"GPU {index}")
        self.pinned_memory = checker.new_memory(f"pinned memory of GPU {index}")
        self._index = index
        self._guests = checker.new_memory(f"memory of a peer that GPU {index} uses")
        self._threads = threading.local()
        self.compute = checker.new_stream(f"compute stream of GPU {index}", eager=True)
        self._peers = checker.new_stream(f"default stream of GPU {index} on peers", eager=True)
        self.streams = [self.compute, self._peers]

    @property
    def allocated_bytes(self) -> float:
        """Of blocks that somebody has."""
        with self.checker.lock:
            self.checker.collect()
            return float(self.memory.allocated_bytes)

    @property
    def peak_bytes(self) -> float:
        """Since :meth:`restart_peak`."""
        return float(self.memory.peak_bytes)

    def restart_peak(self) -> None:
        """With what there is."""
        self.memory.peak_bytes = self.memory.allocated_bytes

    def make_current(self) -> None:
        """Devices are told apart by memory."""

    @contextmanager
    def current(self) -> Iterator[None]:
        """Devices are told apart by memory."""
        yield

    def stream(self) -> CheckedStream:
        """Late, with a number."""
        stream = self.checker.new_stream(f"stream {len(self.streams)} of GPU {self._index}")
        self.streams.append(stream)
        return stream

    def current_stream(self) -> CheckedStream:
        """Of this thread."""
        return getattr(self._threads, "stream", self.compute)

    @contextmanager
    def on(self, stream: CheckedStream) -> Iterator[None]:
        """Of this thread."""
        before = self.current_stream()
        self._threads.stream = stream
        try:
            yield
        finally:
            self._threads.stream = before

    def event(self, *, blocking: bool = False, timing: bool = False) -> CheckedEvent:
        """Not of any stream yet."""
        return CheckedEvent(self.checker)

    def synchronize(self) -> None:
        """All streams of this device."""
        self.checker.host_waits(*self.streams)

    def holds(self, tensor: torch.Tensor) -> bool:
        """By its address."""
        return self._block_of(tensor) is not None

    def _block_of(self, tensor: torch.Tensor) -> Block | None:
        return self.memory.block_of(tensor) or self._guests.block_of(tensor)

    def keep_for(self, tensor: torch.Tensor, stream: CheckedStream) -> None:
        """Until it is let go of and the stream has come so far."""
        with self.checker.lock:
            block = self._block_of(tensor)
            assert block is not None, "only a device's memory is kept for a stream"
            block.kept_for.append(stream)

    def on_peer(self, distance: int, num_bytes: int) -> torch.Tensor:
        """Of the allocator that this process has there."""
        with self.checker.lock:
            self.checker.collect()
            return self._guests.take(num_bytes, self._peers)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Watched; torch's allocator records an event behind each copy."""
        with self.checker.lock:
            self.checker.collect()
            return self.pinned_memory.take(num_bytes, self.compute)

    def register(self, address: int, num_bytes: int, read_only: bool = False) -> int:
        """Watched from now on."""
        with self.checker.lock:
            users = self.checker.pinned.setdefault(address, [])
            if not users:
                self.checker.regions.add(Region(address, num_bytes, "registered memory"))
            users.append(self)
            self.registered[address] = num_bytes
            return 0

    def unregister(self, address: int) -> int:
        """No copy may be under way."""
        with self.checker.lock:
            for stream in self.streams:
                if stream.done < stream.issued:
                    self.checker.faults.append(
                        f"memory is unregistered while work of {stream.name} is under way"
                    )
                    stream.run_until(stream.issued)
            del self.registered[address]
            users = self.checker.pinned[address]
            users.remove(self)
            if not users:
                self.checker.regions.remove(address)
            return 0
