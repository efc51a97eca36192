"""A node's memory: its segments and NumPy views of every array in them.

A float32 master may be split in two halves (:class:`Halves`). The upper half is the float32,
rounded half up in the bits, and also the bf16 weight. The lower half is its low 16 bits. Together
they restore the exact float32, for all bit patterns (``native/storage.h`` has the sweeps' way)::

    split   high = (bits + 0x8000) >> 16           low = bits & 0xFFFF
    join    bits = (high << 16) + low - ((low >> 15) << 16)
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.shm.control import ControlView, control_bytes
from penstock.shm.layout import WEIGHT_SLOTS, ArrayKey, NodeLayout, SegmentKind
from penstock.shm.pages import NodeRange, huge_bytes
from penstock.shm.segment import (
    TOKEN_BYTES,
    TOKEN_PAGE_BYTES,
    Segment,
    StrangeSegmentError,
    VersionMismatchError,
    path_of,
    unlink,
)
from penstock.shm.table import BlockTable, DType

_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """Two uint16 arrays of one length that hold float32 values."""

    high: npt.NDArray[np.uint16]
    low: npt.NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.low)

    def part(self, start: int, end: int) -> Halves:
        """Returns elements ``[start, end)``, in place."""
        return Halves(high=self.high[start:end], low=self.low[start:end])

    def load(self, start: int = 0, end: int | None = None) -> npt.NDArray[np.float32]:
        """Returns elements ``[start, end)``, joined: a copy."""
        high, low = self.high[start:end].astype(np.uint32), self.low[start:end].astype(np.uint32)
        high -= low >> 15
        high <<= 16
        high |= low
        return high.view(np.float32)

    def store(self, values: npt.NDArray[Any], start: int = 0) -> None:
        """Writes float32 values from element ``start`` on."""
        for first in range(0, values.size, _CHUNK_ELEMENTS):
            bits = values[first : first + _CHUNK_ELEMENTS].view(np.uint32)
            place = slice(start + first, start + first + bits.size)
            self.low[place] = bits & 0xFFFF
            # The carry of the rounding falls out of the upper half, as in the sweeps.
            self.high[place] = (bits >> 16) + ((bits >> 15) & 1)


Array = npt.NDArray[Any]

NUMPY_TYPES = {DType.FP32: np.float32, DType.BF16: np.uint16, DType.FP16: np.float16}
"""NumPy has no bfloat16: its bits travel as uint16."""

ANYWHERE: Mapping[SegmentKind, Sequence[NodeRange]] = MappingProxyType({})


def segment_name(run_id: str, node_name: str, kind: SegmentKind) -> str:
    """Returns ``/penstock-<run id>-<node>-<kind>``."""
    return f"/penstock-{run_id}-{node_name}-{kind.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpec:
    """Identity of a node's memory, sufficient to create or attach it.

    ``step_terms``: terms, as text, with which a committed step that is not settled must be settled.
    """

    run_id: str
    node_name: str
    table: BlockTable
    layout: NodeLayout
    undo_bytes: int
    step_terms: str = ""

    @property
    def digest(self) -> bytes:
        """Tells apart memories of one name that must not be taken for each other."""
        return hashlib.sha256(self.layout.digest + self.step_terms.encode()).digest()

    def sizes(self) -> dict[str, int]:
        """Returns segment name -> bytes, for the segments that are not empty."""
        sizes = {kind: size for kind, size in self.layout.sizes.items() if size}
        sizes[SegmentKind.CONTROL] = control_bytes(len(self.table.blocks), self.undo_bytes)
        return {self.name(kind): size for kind, size in sizes.items()}

    @property
    def file_bytes(self) -> int:
        """Returns the bytes of the node's files in /dev/shm: all segments, and a page for the token
        of each but the control segment.
        """
        sizes = self.sizes()
        return sum(sizes.values()) + TOKEN_PAGE_BYTES * (len(sizes) - 1)

    def name(self, kind: SegmentKind) -> str:
        """Returns the name of one of the node's segments."""
        return segment_name(self.run_id, self.node_name, kind)


class NodeMemory:
    """The mapped segments of one node.

    Views stay valid after :meth:`close`, until the last reference to them goes.
    """

    def __init__(
        self, spec: MemorySpec, segments: dict[str, Segment], control: ControlView
    ) -> None:
        self.spec = spec
        self.control = control
        self.unlinked = False
        """True if this process has removed the names."""
        self._segments = segments

    @classmethod
    def create(
        cls,
        spec: MemorySpec,
        places: Mapping[SegmentKind, Sequence[NodeRange]] = ANYWHERE,
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> NodeMemory:
        """Creates all segments, the control segment last: if it exists, the others do too.

        ``places``: NUMA nodes for ranges of segments, as far as the kernel grants them. ``draw``:
        source of random bytes.

        Raises:
            SegmentError: a segment cannot be created; those created before are removed again.
        """
        segments: dict[str, Segment] = {}
        try:
            ranges_of = {spec.name(kind): ranges for kind, ranges in places.items()}
            tokens = {spec.name(kind): draw(TOKEN_BYTES) for kind in SegmentKind}
            control_name = spec.name(SegmentKind.CONTROL)
            for name, size in spec.sizes().items():  # control is the last entry
                token = b"" if name == control_name else tokens[name]
                segments[name] = Segment.create(name, size, ranges_of.get(name, ()), token)
            control = ControlView.initialize(
                segments[control_name].buffer,
                run_id=spec.run_id,
                digest=spec.digest,
                num_blocks=len(spec.table.blocks),
                undo_bytes=spec.undo_bytes,
                tokens=b"".join(tokens.values()),
            )
        except BaseException:
            # The control segment, if it exists, goes first: it stands for complete memory.
            for segment in reversed(segments.values()):
                segment.unlink()
                segment.close()
            raise
        return cls(spec, segments, control)

    @classmethod
    def attach(
        cls,
        spec: MemorySpec,
        kinds: Collection[SegmentKind] = tuple(SegmentKind),
        *,
        writable: bool = True,
        adopt: bool = False,
    ) -> NodeMemory:
        """Maps existing segments after checks of owners, headers, digest, sizes and tokens.

        The control segment is always mapped, other segments if in ``kinds``. ``adopt``: memory of
        an older Penstock, which has no tokens, is accepted as well.

        Raises:
            SegmentError: a segment is missing, short, foreign or damaged; nothing was touched.
        """
        segments: dict[str, Segment] = {}
        try:
            name = spec.name(SegmentKind.CONTROL)
            segments[name] = Segment.attach(name, writable=writable)
            control = ControlView.open(
                segments[name].buffer, run_id=spec.run_id, digest=spec.digest
            )
            sizes = (control.num_blocks, control.undo_bytes)
            if sizes != (expected := (len(spec.table.blocks), spec.undo_bytes)):
                raise VersionMismatchError(
                    f"segment {name} has words of {sizes[0]} blocks and an undo area of {sizes[1]}"
                    f" bytes, this Penstock uses {expected[0]} and {expected[1]}"
                )
            marked = any(control.tokens)
            if not marked and not adopt:
                raise StrangeSegmentError(f"segment {name} has no tokens: memoryd did not make it")
            for kind, size in spec.layout.sizes.items():
                if size and kind in kinds:
                    token = control.token(kind) if marked else None
                    segments[spec.name(kind)] = Segment.attach(
                        spec.name(kind), size, writable=writable, token=token
                    )
        except BaseException:
            for segment in segments.values():
                segment.close()
            raise
        return cls(spec, segments, control)

    def mark(self, draw: Callable[[int], bytes]) -> None:
        """Gives memory of an older Penstock its tokens; ``draw``: source of random bytes. The
        control segment comes last: a process killed before leaves memory without tokens.

        Raises:
            NoSpaceError: there is no room for one more page of each segment.
        """
        tokens = {self.spec.name(kind): draw(TOKEN_BYTES) for kind in SegmentKind}
        control = self.spec.name(SegmentKind.CONTROL)
        for name, segment in self._segments.items():
            if name != control:
                segment.mark(tokens[name])
        self.control.set_tokens(b"".join(tokens.values()))

    def weights(self, block: int, slot: int) -> Array:
        """Returns trainable weights in ``slot``, 1-D, in the weight dtype (bf16 as uint16 bits)."""
        return self._view((block, "weights", slot, 0), self.spec.table.weight_dtype)

    def frozen(self, block: int) -> Array:
        """Returns frozen weights, 1-D, in the weight dtype."""
        return self._view((block, "frozen", 0, 0), self.spec.table.weight_dtype)

    def state(self, block: int, name: str, version: int = 0) -> Array:
        """Returns ``master`` or one of the table's state arrays, at the place of ``version``, 1-D
        fp32. The version matters only to blocks with two copies of their state.
        """
        return self._view((block, name, self.state_copy(block, version), 0), DType.FP32)

    def state_copy(self, block: int, version: int) -> int:
        """Returns the copy of a block's state that is of ``version``, if any is."""
        return version % self.spec.layout.state_copies[block]

    @property
    def split_master(self) -> bool:
        """True if masters are :meth:`halves`; then no ``master`` array exists."""
        return self.spec.layout.storage.split_master

    def halves(self, block: int, version: int) -> Halves:
        """Returns the split master of a block with state of ``version``."""
        return Halves(
            high=self.weights(block, version % WEIGHT_SLOTS),
            low=np.frombuffer(self.raw((block, "low", 0, 0)), dtype=np.uint16),
        )

    def load_master(self, block: int, version: int) -> Array:
        """Returns the master of a block with state of ``version``, 1-D fp32: a copy."""
        if self.split_master:
            return self.halves(block, version).load()
        return self.state(block, "master", version).copy()

    def store_master(self, block: int, version: int, values: Array) -> None:
        """Writes the master of a block that will have state of ``version``; ``values``: 1-D
        fp32.
        """
        if self.split_master:
            self.halves(block, version).store(values)
        else:
            self.state(block, "master", version)[:] = values

    def grads(self, block: int, copy: int, contribution: int) -> Array:
        """Returns the gradients of one contribution, 1-D, in the gradient dtype (bf16 as uint16
        bits).
        """
        return self._view((block, "grads", copy, contribution), self.spec.table.grad_dtype)

    def raw(self, key: ArrayKey) -> memoryview:
        """Returns the bytes of an array."""
        place = self.spec.layout.arrays[key]
        if not place.num_bytes:
            return memoryview(bytearray())  # as writable as the others
        buffer = self._segments[self.spec.name(place.segment)].buffer
        return buffer[place.offset : place.offset + place.num_bytes]

    def segment_buffer(self, kind: SegmentKind) -> memoryview | None:
        """Returns a whole segment, which a GPU worker registers; None if empty or not mapped."""
        segment = self._segments.get(self.spec.name(kind))
        return None if segment is None else segment.buffer

    def huge_bytes(self) -> dict[SegmentKind, int]:
        """Returns the bytes of each mapped segment in huge pages of this process."""
        counts = huge_bytes()
        return {
            kind: counts[str(path_of(self.spec.name(kind)))]
            for kind in SegmentKind
            if self.spec.name(kind) in self._segments
        }

    def has(self, key: ArrayKey) -> bool:
        """Returns whether this node holds the array."""
        return key in self.spec.layout.arrays

    def owned_blocks(self) -> tuple[int, ...]:
        """Numbers of the blocks with weights and state in this memory, in order."""
        return tuple(
            b for b, name, slot, _ in self.spec.layout.arrays if (name, slot) == ("weights", 0)
        )

    @property
    def is_named(self) -> bool:
        """True if the names still lead to this memory. memoryd removes them when a run ends, and a
        later memoryd creates other memory.
        """
        return self._segments[self.spec.name(SegmentKind.CONTROL)].is_named

    def close(self) -> None:
        """Unmaps all segments."""
        for segment in self._segments.values():
            segment.close()

    def unlink(self) -> None:
        """Removes the names, control first, so that half-removed memory does not seem complete."""
        self.unlinked = True
        for kind in (SegmentKind.CONTROL, *self.spec.layout.sizes):
            unlink(self.spec.name(kind))

    def _view(self, key: ArrayKey, dtype: DType) -> Array:
        return np.frombuffer(self.raw(key), dtype=NUMPY_TYPES[dtype])
