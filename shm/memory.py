"""A node's memory: its segments and NumPy views of every array in them.

A float32 master may be split in two halves (:class:`Halves`). The upper half is the float32,
rounded half up in the bits, and also the bf16 weight. The lower half is its low 16 bits. Together
they restore the exact float32, for all bit patterns (``native/storage.h`` has the sweeps' way)::

    split   high = (bits + 0x8000) >> 16           low = bits & 0xFFFF
    join    bits = (high << 16) + low - ((low >> 15) << 16)
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.shm.base_users import sweep
from penstock.shm.bases import (
    Base,
    BaseMapping,
    UnfilledBaseError,
    base_name,
    open_base,
    open_filling,
)
from penstock.shm.bases import file_bytes as base_file_bytes
from penstock.shm.control import ControlView, control_bytes
from penstock.shm.layout import (
    PAGE_BYTES,
    WEIGHT_SLOTS,
    ArrayKey,
    ArrayRange,
    NodeLayout,
    SegmentKind,
)
from penstock.shm.pages import NodeRange, huge_bytes
from penstock.shm.segment import (
    TOKEN_BYTES,
    TOKEN_PAGE_BYTES,
    Segment,
    SegmentMissingError,
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
    ``bases``: blocks and digests of bases that hold the frozen weights, where runs share them
    (:mod:`penstock.shm.bases`): those that fresh memory is to have. Memory that exists says itself
    whether it has any, and they are no part of the digest.
    """

    run_id: str
    node_name: str
    table: BlockTable
    layout: NodeLayout
    undo_bytes: int
    step_terms: str = ""
    bases: tuple[tuple[int, bytes], ...] = ()

    @property
    def digest(self) -> bytes:
        """Tells apart memories of one name that must not be taken for each other."""
        return hashlib.sha256(self.layout.digest + self.step_terms.encode()).digest()

    def sizes(self) -> dict[str, int]:
        """Returns segment name -> bytes, for the segments that are not empty. Bases are none."""
        sizes = {kind: size for kind, size in self.layout.sizes.items() if size}
        if self.bases:
            del sizes[SegmentKind.FROZEN]
        sizes[SegmentKind.CONTROL] = control_bytes(len(self.table.blocks), self.undo_bytes)
        return {self.name(kind): size for kind, size in sizes.items()}

    def frozen_places(self) -> dict[int, ArrayRange]:
        """Returns the place of each block's frozen weights, for blocks that have some."""
        arrays = self.layout.arrays.items()
        return {
            b: place for (b, name, _, _), place in arrays if name == "frozen" and place.num_bytes
        }

    def frozen_ranges(self) -> list[range]:
        """Returns the bytes of each block's frozen weights among those of all, in whole pages."""
        return [
            range(place.offset, place.offset + -(-place.num_bytes // PAGE_BYTES) * PAGE_BYTES)
            for place in self.frozen_places().values()
        ]

    def base_sizes(self) -> dict[bytes, int]:
        """Returns the bytes of the file of each base, by digest."""
        places = self.frozen_places()
        return {digest: base_file_bytes(places[block].num_bytes) for block, digest in self.bases}

    @property
    def file_bytes(self) -> int:
        """Returns the bytes of the node's files in /dev/shm: all segments, and a page for the token
        of each but the control segment.
        """
        sizes = self.sizes()
        return sum(sizes.values()) + TOKEN_PAGE_BYTES * (len(sizes) - 1)

    @property
    def filler(self) -> str:
        """Returns the name of this memory in bases that its memoryd fills."""
        return f"{self.run_id}-{self.node_name}"

    def name(self, kind: SegmentKind) -> str:
        """Returns the name of one of the node's segments."""
        return segment_name(self.run_id, self.node_name, kind)


class NodeMemory:
    """The mapped segments of one node.

    Views stay valid after :meth:`close`, until the last reference to them goes.
    """

    def __init__(
        self,
        spec: MemorySpec,
        segments: dict[str, Segment],
        control: ControlView,
        shared: BaseMapping | None = None,
    ) -> None:
        self.spec = spec
        self.control = control
        self.unlinked = False
        """True if this process has removed the names."""
        self._segments = segments
        self._shared = shared
        self._held: dict[int, Base] = {}

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
                bases=spec.bases,
            )
            shared = _addresses(spec, writable=True) if spec.bases else None
        except BaseException:
            # The control segment, if it exists, goes first: it stands for complete memory.
            for segment in reversed(segments.values()):
                segment.unlink()
                segment.close()
            raise
        return cls(spec, segments, control, shared)

    @classmethod
    def attach(
        cls,
        spec: MemorySpec,
        kinds: Collection[SegmentKind] = tuple(SegmentKind),
        *,
        writable: bool = True,
        adopt: bool = False,
        fill: bool = False,
    ) -> NodeMemory:
        """Maps existing segments after checks of owners, headers, digest, sizes and tokens.

        The control segment is always mapped, other segments if in ``kinds``. ``adopt``: memory of
        an older Penstock, which has no tokens, is accepted as well. No base is mapped then: memoryd
        calls, which locks bases first (:meth:`hold`). ``fill``: the caller writes initial weights,
        also those of bases that memoryd has claimed.

        Raises:
            UnfilledBaseError: memoryd has yet to fill the memory and its bases.
            SegmentError: a segment is missing, short, foreign or damaged; nothing was touched.
        """
        segments: dict[str, Segment] = {}
        shared: BaseMapping | None = None
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
            spec = replace(spec, bases=control.bases)
            if spec.bases and (adopt or SegmentKind.FROZEN in kinds):
                shared = _addresses(spec, writable=writable)
                if not adopt:
                    _show_bases(spec, shared, filled=bool(control.incarnation), fill=fill)
            marked = any(control.tokens)
            if not marked and not adopt:
                raise StrangeSegmentError(f"segment {name} has no tokens: memoryd did not make it")
            for kind, size in spec.layout.sizes.items():
                if size and kind in kinds and not (spec.bases and kind is SegmentKind.FROZEN):
                    token = control.token(kind) if marked else None
                    segments[spec.name(kind)] = Segment.attach(
                        spec.name(kind), size, writable=writable, token=token
                    )
        except BaseException:
            for segment in segments.values():
                segment.close()
            if shared is not None:
                shared.close()
            raise
        return cls(spec, segments, control, shared)

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

    def rename_bases(self, bases: tuple[tuple[int, bytes], ...]) -> None:
        """Names other bases than before, of the same blocks. The memory holds no model."""
        self.control.set_bases(bases)
        self.spec = replace(self.spec, bases=bases)

    def hold(self, block: int, base: Base) -> None:
        """Maps a base that this process has locked: to be written, unless it is complete. It is
        closed with the memory.
        """
        assert self._shared is not None, "the memory has bases"
        self.release(block)
        self._held[block] = base
        self._shared.show(block, base.descriptor, writable=not base.complete)

    def release(self, block: int) -> None:
        """Closes the base of a block, if this process holds it."""
        base = self._held.pop(block, None)
        if base is not None:
            assert self._shared is not None, "the memory has bases"
            self._shared.hide(block)
            base.close()

    @property
    def shows_bases(self) -> bool:
        """True unless memoryd has named other bases since this process mapped them."""
        return self._shared is None or self.control.bases == self.spec.bases

    def protect(self, block: int) -> None:
        """Maps a base that was completed just now for reading only."""
        assert self._shared is not None, "the memory has bases"
        self._shared.show(block, self._held[block].descriptor)

    @property
    def held(self) -> Mapping[int, Base]:
        """Returns the bases that this process has locked, by block."""
        return self._held

    def has_complete_base(self, block: int) -> bool:
        """Returns whether the frozen weights of the block are complete, in a base: a write into
        them would end the process.
        """
        return self._shared is not None and self._shared.is_read_only(block)

    @contextmanager
    def scratch(self, block: int) -> Iterator[None]:
        """Puts private memory at the place of a block's base, which this process holds, for a
        while.
        """
        assert self._shared is not None, "the memory has bases"
        self._shared.hide(block)
        try:
            yield
        finally:
            self._shared.show(block, self._held[block].descriptor)

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
        if place.segment is SegmentKind.FROZEN and self._shared is not None:
            buffer = self._shared.buffer
        else:
            buffer = self._segments[self.spec.name(place.segment)].buffer
        return buffer[place.offset : place.offset + place.num_bytes]

    def segment_buffer(self, kind: SegmentKind) -> memoryview | None:
        """Returns a whole segment, which a GPU worker registers; None if empty or not mapped. Bases
        are one range of addresses, as a segment would be.
        """
        if kind is SegmentKind.FROZEN and self._shared is not None:
            return self._shared.buffer
        segment = self._segments.get(self.spec.name(kind))
        return None if segment is None else segment.buffer

    def huge_bytes(self) -> dict[SegmentKind, int]:
        """Returns the bytes of each mapped segment in huge pages of this process."""
        counts = huge_bytes()
        sizes = {
            kind: counts[str(path_of(self.spec.name(kind)))]
            for kind in SegmentKind
            if self.spec.name(kind) in self._segments
        }
        if self._shared is not None:
            names = {base_name(digest) for _, digest in self.spec.bases}
            sizes[SegmentKind.FROZEN] = sum(counts[str(path_of(name))] for name in names)
        return sizes

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
        """Unmaps all segments, and gives the locks of bases back."""
        for segment in self._segments.values():
            segment.close()
        if self._shared is not None:
            self._shared.close()
        for base in self._held.values():
            base.close()
        self._held.clear()

    def unlink(self) -> None:
        """Removes the names, control first, so that half-removed memory does not seem complete.
        Bases that no other memory uses are removed as well.
        """
        self.unlinked = True
        for kind in (SegmentKind.CONTROL, *self.spec.layout.sizes):
            unlink(self.spec.name(kind))
        for base in self._held.values():
            base.close()
        sweep()

    def _view(self, key: ArrayKey, dtype: DType) -> Array:
        return np.frombuffer(self.raw(key), dtype=NUMPY_TYPES[dtype])


def _addresses(spec: MemorySpec, *, writable: bool) -> BaseMapping:
    size = spec.layout.sizes[SegmentKind.FROZEN]
    return BaseMapping(size, spec.frozen_places(), writable=writable)


def _show_bases(spec: MemorySpec, shared: BaseMapping, *, filled: bool, fill: bool) -> None:
    """Maps bases that this process does not lock: memoryd does."""
    if not filled and not fill:
        raise UnfilledBaseError(f"memory of node {spec.node_name} is not filled yet")
    for block, place in spec.frozen_places().items():
        digest = dict(spec.bases)[block]
        try:
            descriptor, writable = open_base(digest, place.num_bytes), False
        except SegmentMissingError:
            if filled:
                raise
            descriptor, writable = open_filling(digest, place.num_bytes, spec.filler), True
        try:
            shared.show(block, descriptor, writable=writable)
        finally:
            os.close(descriptor)
