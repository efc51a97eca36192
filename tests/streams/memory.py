"""A device's memory: pools by stream, used again at once, and poisoned when it is let go of.

Blocks of a stream go back to its pool the moment that nobody refers to them, as torch's caching
allocator has it: whatever the stream is given next may write there. So letting go is a write on
that stream. What other streams were given before must be known to it, or the allocator must have
been told of them; then the block comes back when they are done.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tests.streams.clocks import Actor, merge, this_thread
from tests.streams.shadow import Access, Region
from tests.streams.streams import CheckedStream, Work

if TYPE_CHECKING:
    from tests.streams.checker import Checker

ROUNDED_BYTES = 512
POISON = 0xFF
"""NaN in every floating-point type."""


@dataclass(slots=True)
class Block:
    """Memory of one size and stream. ``kept_for``: streams that were named since it was handed
    out."""

    memory: npt.NDArray[np.uint8]
    stream: CheckedStream
    region: Region
    kept_for: list[CheckedStream] = field(default_factory=list)
    num_bytes: int = 0


class DeviceMemory:
    """The allocator of one device, or of pinned memory."""

    def __init__(self, checker: Checker, name: str) -> None:
        self._checker = checker
        self._name = name
        self._free: defaultdict[tuple[str, int], list[Block]] = defaultdict(list)
        self._blocks: dict[int, Block] = {}
        self._gone: deque[tuple[Block, Actor]] = deque()
        self.allocated_bytes = 0
        self.peak_bytes = 0

    def take(self, num_bytes: int, stream: CheckedStream) -> torch.Tensor:
        """Returns flat uint8 memory of a stream; holds the lock."""
        size = max(1, -(-num_bytes // ROUNDED_BYTES)) * ROUNDED_BYTES
        free = self._free[stream.name, size]
        block = free.pop() if free else self._fresh(size, stream)
        block.kept_for, block.num_bytes = [], size
        self.allocated_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        view = block.memory[:num_bytes]
        # A finalizer may run inside anything: what it means is worked out at the next call.
        weakref.finalize(view, self._let_go, block).atexit = False
        return torch.from_numpy(view)

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """Returns the block that a tensor is in."""
        region = self._checker.regions.at(tensor.untyped_storage().data_ptr())
        return None if region is None else self._blocks.get(region.start)

    def _fresh(self, size: int, stream: CheckedStream) -> Block:
        memory = np.full(size, POISON, np.uint8)
        region = Region(int(memory.ctypes.data), size, self._name)
        self._checker.regions.add(region)
        self._blocks[region.start] = block = Block(memory, stream, region)
        return block

    def _let_go(self, block: Block) -> None:
        self._gone.append((block, this_thread()))

    def collect(self) -> None:
        """Take back what was let go of; holds the lock."""
        while self._gone:
            block, thread = self._gone.popleft()
            self.allocated_bytes -= block.num_bytes
            self._take_back(block, thread)

    def _take_back(self, block: Block, thread: Actor) -> None:
        clocks, stream, region = self._checker.clocks, block.stream, block.region
        known = dict(clocks.knows(stream.name))
        merge(known, clocks.knows(thread))
        for other in block.kept_for:
            merge(known, clocks.knows(other.name))
        freed = Access(region.start, region.end, True, stream.name, 0, "memory let go of")
        other_access = region.conflict(freed, known)
        if other_access is not None:
            self._checker.found(freed, other_access)
        # What is over is over for everybody: what the thread has waited for, and what the streams
        # do that it is kept for.
        kept, over = {other.name for other in block.kept_for}, clocks.knows(thread)
        region.accesses = [
            access
            for access in region.accesses
            if access.actor not in kept and access.count > over.get(access.actor, 0)
        ]
        waits = {id(other): other for other in block.kept_for if other is not stream}.values()
        self._when_done([(other, other.issued) for other in waits], block)

    def _when_done(self, points: list[tuple[CheckedStream, int]], block: Block) -> None:
        """The block comes back when all points are passed, poisoned in its stream's order."""
        late = next(((s, at) for s, at in points if s.done < at), None)
        if late is not None:
            stream, _ = late
            stream.issue(Work(run=lambda: self._when_done(points, block)))
            return
        self._free[block.stream.name, len(block.memory)].append(block)
        block.stream.issue(Work(run=lambda: block.memory.fill(POISON)))
