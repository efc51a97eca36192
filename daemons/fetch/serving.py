"""Serves the node's segments, mapped read-only, and the identity of this fetchd.

The identity is a page with a number drawn at each start. Readers read it together with the control
words. So a stale address, from before a restart, never passes for the new memory.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from dataclasses import dataclass

import numpy as np

from penstock.daemons.fetch.agent import Agent
from penstock.protocol.wire.frames import AgentOffer
from penstock.shm.layout import PAGE_BYTES, SegmentKind
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.shm.segment import path_of, status_of

SERVED = (SegmentKind.CONTROL, SegmentKind.WEIGHTS, SegmentKind.FROZEN, SegmentKind.GRADS)
IDENTITY_BYTES = 16
_IDENTITY = struct.Struct("<8sQ")
_MARK = b"PNFETCHD"


def identity_of(generation: int) -> bytes:
    """Returns what stands at the identity's address."""
    return _IDENTITY.pack(_MARK, generation)


def address_of(buffer: memoryview | mmap.mmap) -> int:
    """Returns where a mapping begins; read-only ones, too."""
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A segment's file, when it was mapped."""

    name: str
    inode: int

    @property
    def is_there(self) -> bool:
        status = status_of(self.name)
        return status is not None and status.st_ino == self.inode


class Serving:
    """A node's memory, registered with an agent."""

    def __init__(self, agent: Agent, memory: NodeMemory, generation: int) -> None:
        self.spec: MemorySpec = memory.spec
        self._memory = memory
        self._page = mmap.mmap(-1, PAGE_BYTES)
        self._page[:IDENTITY_BYTES] = identity_of(generation)
        buffers = {kind: memory.segment_buffer(kind) for kind in SERVED}
        self._segments = tuple(
            (kind.value, address_of(buffer), len(buffer))
            for kind, buffer in buffers.items()
            if buffer is not None
        )
        self._seen = tuple(
            _Seen(name=name, inode=os.lstat(path_of(name)).st_ino)
            for name in map(memory.spec.name, (SegmentKind(kind) for kind, _, _ in self._segments))
            if name in memory.spec.sizes()
        )
        identity = address_of(self._page)
        regions = [(identity, PAGE_BYTES), *((start, size) for _, start, size in self._segments)]
        agent.register(regions)
        self.offer = AgentOffer(
            run_id=memory.spec.run_id,
            node=memory.spec.node_name,
            pid=os.getpid(),
            generation=generation,
            metadata=agent.metadata,
            identity=identity,
            segments=self._segments,
            digest=memory.spec.digest,
        )

    @property
    def is_current(self) -> bool:
        """Returns whether the segments are those that were mapped; a memoryd may have made new
        ones.
        """
        return all(seen.is_there for seen in self._seen) and self._memory.shows_bases

    def close(self) -> None:
        """Unmaps the segments after the agent is gone."""
        self._memory.close()
        self._page.close()


def draw_generation() -> int:
    """Returns a number that no other start of a fetchd has."""
    return secrets.randbits(63) | 1
