"""Looks at what device code does to streams and memory, and says where the order is not enough."""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from tests.streams.clocks import Clocks, Known, this_thread
from tests.streams.memory import DeviceMemory
from tests.streams.shadow import Access, Region, Regions
from tests.streams.streams import CheckedStream

if TYPE_CHECKING:
    from tests.streams.gpu import CheckedGpu

_OWN = ("/tests/streams/",)

Order = Literal["late", "at once"] | int


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses that nothing orders."""

    later: str
    earlier: str

    def __str__(self) -> str:
        return f"{self.later} is not ordered behind {self.earlier}"


class Checker:
    """What is known of all devices of the process.

    ``order``: work runs as late as the waits allow, as soon as it is issued, or at moments that
    follow from a number.
    """

    def __init__(self, order: Order = "late") -> None:
        self.lock = threading.RLock()
        self.clocks = Clocks()
        self.regions = Regions()
        self.races: dict[tuple[str, str], Race] = {}
        self.faults: list[str] = []
        self.gpus: dict[int, CheckedGpu] = {}
        self.pinned: dict[int, list[CheckedGpu]] = {}
        self.operations = 0
        self.dropped = False
        self._random = random.Random(order) if isinstance(order, int) else None
        self._at_once = order == "at once"
        self._memories: list[DeviceMemory] = []
        self._streams: list[CheckedStream] = []
        self._threads = threading.local()
        self._announced: dict[int, Known] = {}

    def new_stream(self, name: str, *, eager: bool = False) -> CheckedStream:
        """Returns one that takes part."""
        stream = CheckedStream(self, name, eager=eager or self._at_once)
        self._streams.append(stream)
        return stream

    def new_memory(self, name: str) -> DeviceMemory:
        """Returns an allocator that takes part."""
        memory = DeviceMemory(self, name)
        self._memories.append(memory)
        return memory

    def computes(self, gpu: CheckedGpu) -> None:
        """The calling thread makes tensors of this device from now on, unless it says otherwise."""
        self._threads.gpu = gpu

    def computing(self) -> CheckedGpu | None:
        """Returns the device of the calling thread."""
        return getattr(self._threads, "gpu", None)

    # ---- what happens; the lock is held ----

    def issues(self, stream: CheckedStream) -> None:
        """The calling thread gives a stream something: what the thread knows is known there."""
        self.collect()
        self.clocks.learns(stream.name, self.clocks.knows(this_thread()))
        self._let_some_run()
        stream.catch_up()

    def host_learns(self, known: Known) -> None:
        """The calling thread waited for a point."""
        self.collect()
        self.clocks.learns(this_thread(), known)

    def collect(self) -> None:
        """Take memory back that nobody refers to any more."""
        for memory in self._memories:
            memory.collect()

    def host_waits(self, *streams: CheckedStream) -> None:
        """The calling thread waits for all that streams were given."""
        with self.lock:
            for stream in streams:
                stream.run_until(stream.issued)
                self.host_learns(self.clocks.knows(stream.name))

    def access(
        self, actor: str, address: int, num_bytes: int, *, writes: bool, what: str
    ) -> Region | None:
        """An actor reads or writes bytes, if anybody watches them; knows what its clock says."""
        region = self.regions.at(address)
        if region is None or num_bytes == 0:
            return region
        count = self.clocks.tick(actor)
        end, what = address + num_bytes, f"{region.name}: {what}"
        access = Access(address, end, writes, actor, count, what)
        other = region.conflict(access, self.clocks.knows(actor))
        if other is not None:
            self.found(access, other)
        region.add(access)
        return region

    def found(self, later: Access, earlier: Access) -> None:
        """Keep one race of each kind."""
        at = f" ({place()})"
        race = Race(str(later) + at, str(earlier))
        self.races.setdefault((later.what, earlier.what), race)

    def host_access(self, tensor: torch.Tensor, *, writes: bool, what: str) -> None:
        """The calling thread, or who it tells to, reads or writes a tensor in host memory."""
        with self.lock:
            self.collect()
            address, num_bytes = extent(tensor)
            self.access(this_thread(), address, num_bytes, writes=writes, what=what)

    def announces(self, tensor: torch.Tensor) -> None:
        """The calling thread sets the word that says that a tensor in host memory is complete."""
        with self.lock:
            self.clocks.tick(this_thread())
            self._announced[tensor.data_ptr()] = dict(self.clocks.knows(this_thread()))

    def was_announced(self, tensor: torch.Tensor) -> None:
        """The calling thread has seen that word."""
        with self.lock:
            known = self._announced.get(tensor.data_ptr())
            if known is not None:
                self.host_learns(known)

    def host_writes_all(self, what: str) -> None:
        """The calling thread lets others write all registered memory."""
        with self.lock:
            self.collect()
            for gpu in self.gpus.values():
                for address, size in gpu.registered.items():
                    self.access(this_thread(), address, size, writes=True, what=what)

    def _let_some_run(self) -> None:
        if self._random is None:
            return
        for stream in self._streams:
            if not stream.eager and stream.done < stream.issued and self._random.random() < 0.2:
                stream.run_one()

    def drop_queues(self) -> int:
        """Forget everything that is under way, as when a process dies; returns how much it was."""
        with self.lock:
            self.dropped = True
            return sum(stream.drop() for stream in self._streams)

    def check(self) -> None:
        """Raise if anything was found, or nothing was looked at."""
        assert self.operations, "no operator ran on a checked device"
        assert not self.races, "\n".join(str(race) for race in self.races.values())
        assert not self.faults, "\n".join(self.faults)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the address and the bytes from a tensor's first element to its last."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def place() -> str:
    """Returns the innermost line of the package that is under way."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/penstock/" in name and not any(own in name for own in _OWN):
            return f"{name.rpartition('/penstock/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
