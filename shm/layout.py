"""Byte layout of a node's segments, computed from the block table.

One segment per kind of array, every array of a block page-aligned inside it, large ones with a few
pages between them (:func:`tag`)::

    weights   | block 0: slot 0 | slot 1 | block 1: slot 0 | …               weight dtype
    frozen    | block 0 | block 1 | …                                        weight dtype
    state     | block 0: master | exp_avg | exp_avg_sq | block 1: …          fp32
    grads     | block 0: copy 0: contribution 0, 1, … | copy 1: … | block 1  gradient dtype
    control   | header, records, sweep intent, undo area, block words         penstock.shm.control

With a split master (:mod:`penstock.shm.memory`) ``state`` is::

    state     | block 0: low | exp_avg | exp_avg_sq | block 1: …             low: uint16, rest fp32

and the upper halves of version v of the state are its weights, in slot v mod 2. These bytes are
state until a sweep has stepped the block to v + 1; the slot's version word may say otherwise
(:mod:`penstock.daemons.optimizer.machine.words`).

Blocks with state that workers flush (:attr:`Storage.flushed`) have two copies of it, like slots::

    state     | block 0: copy 0: master | exp_avg | … | copy 1: master | …   fp32

State of version v is in copy v mod 2; the block's state version selects it. The other copy is room
for the next version, and may hold any bytes.

An array has ``trainable_elements`` elements, in ``frozen`` ``frozen_elements``. ``weights``,
``frozen`` and ``state`` hold the blocks that the node owns. ``grads`` holds the contributions
(gradient partials) that are *computed* on the node. These are of owned blocks, of a tied tensor's
other uses, and of the plan's other routes. The owner pulls contributions of other nodes. With R
routes a block of U uses has R x U contributions, route by route: number ``r * U + use``; where the
plan reduces gradients, U. Writers of weights and state: optimizerd (memoryd and the loader during a
restore). Writers of frozen: memoryd and the loader. Writer of a contribution in grads: the one
worker that computes it. Every process computes the same layout from the same table, plan and
:class:`Storage`.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import lru_cache

from penstock.shm.table import BlockTable

PAGE_BYTES = 4096
WEIGHT_SLOTS = 2
LARGE_BYTES = 1 << 20
"""Arrays from this size on start at addresses that caches can tell apart, see :func:`tag`."""
GRADS_MARGIN = 40 * PAGE_BYTES
"""Bytes left free at both ends of large gradients. Segments are mapped next to each other in any
order. Without the margin, distances between arrays of two segments could equal those inside a
segment.
"""
STATE_COPIES = 2
"""At most, see :class:`Storage`."""
GRADIENT_COPIES = 2
"""At most, see :class:`Storage`."""


class SegmentKind(StrEnum):
    """The segments of a node."""

    CONTROL = "control"
    WEIGHTS = "weights"
    FROZEN = "frozen"
    STATE = "state"
    GRADS = "grads"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRange:
    """Bytes ``[offset, offset + num_bytes)`` of a segment."""

    segment: SegmentKind
    offset: int
    num_bytes: int


ArrayKey = tuple[int, str, int, int]
"""(block, array name, slot or copy, contribution); unused parts are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """``owner[b]`` is the node (index) that owns block b.

    ``computed_on[b][k]`` is the node that computes gradient contribution k of block b; there are as
    many as uses of the block in all routes.
    """

    owner: tuple[int, ...]
    computed_on: tuple[tuple[int, ...], ...]

    @classmethod
    def from_backward_nodes(
        cls,
        table: BlockTable,
        node_of_block: Sequence[int],
        other_routes: Sequence[Sequence[int]] = (),
    ) -> Ownership:
        """Returns the ownership that follows from the node of each block's backward in route 0.

        ``other_routes``: the nodes of each further route, which only contribute gradients.
        Contributions of borrowed tensors are computed where the borrowing block's backward runs.
        """
        computed_on: list[list[int]] = [[] for _ in table.blocks]
        for nodes in (node_of_block, *other_routes):
            for nodes_of_uses, uses in zip(computed_on, _nodes_of_uses(table, nodes), strict=True):
                nodes_of_uses += uses
        return cls(owner=tuple(node_of_block), computed_on=tuple(map(tuple, computed_on)))


def _nodes_of_uses(table: BlockTable, node_of_block: Sequence[int]) -> list[list[int]]:
    """Returns the node that computes the gradient of each use of each block, in one route."""
    nodes_of_uses = [[node_of_block[b.index]] * b.contributions for b in table.blocks]
    for block in table.blocks:
        for borrowed in block.borrows:
            if borrowed.contribution == 0:
                continue  # a frozen tensor has no gradient; contribution 0 is the owner's own
            nodes_of_uses[borrowed.owner][borrowed.contribution] = node_of_block[block.index]
    return nodes_of_uses


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Storage of the state, where the table leaves a choice.

    ``split_master``: lower halves in the state, weights as the upper halves. ``single_gradients``:
    blocks with one copy of gradients, if all their contributions are computed on the owner's node.
    Other writers of that copy wait until the state has consumed the gradients. Contributions that
    are pulled keep two copies: the node that computes them cannot read the owner's words.
    ``flushed``: blocks with two copies of the state, because workers write the next state next to
    the committed state.
    """

    split_master: bool = False
    single_gradients: tuple[int, ...] = ()
    flushed: tuple[int, ...] = ()


TWO_COPIES = Storage()
"""A master of its own, two copies of gradients: what any optimizer and plan works with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """Places of all arrays of one node, and sizes of its segments.

    ``contributions[b]``: gradient contributions of block b, on all nodes; ``gradient_copies[b]``:
    copies of each, version v in copy ``v % gradient_copies[b]``; ``state_copies[b]`` likewise.
    """

    node: int
    arrays: dict[ArrayKey, ArrayRange]
    sizes: dict[SegmentKind, int]
    contributions: tuple[int, ...]
    gradient_copies: tuple[int, ...]
    state_copies: tuple[int, ...]
    storage: Storage
    digest: bytes

    @classmethod
    def compute(
        cls, table: BlockTable, ownership: Ownership, node: int, storage: Storage = TWO_COPIES
    ) -> NodeLayout:
        """Places the node's arrays; ``sizes`` lacks the control segment."""
        builder = _Builder()
        copies = tuple(_copies(ownership, b.index, storage) for b in table.blocks)
        states = tuple(STATE_COPIES if b.index in storage.flushed else 1 for b in table.blocks)
        for block in table.blocks:
            b, weight, grad = block.index, table.weight_dtype.itemsize, table.grad_dtype.itemsize
            if ownership.owner[b] == node:
                for slot in range(WEIGHT_SLOTS):
                    builder.add(
                        SegmentKind.WEIGHTS,
                        (b, "weights", slot, 0),
                        block.trainable_elements * weight,
                    )
                builder.add(SegmentKind.FROZEN, (b, "frozen", 0, 0), block.frozen_elements * weight)
                for copy in range(states[b]):
                    for name, itemsize in _state(table, storage):
                        builder.add(
                            SegmentKind.STATE,
                            (b, name, copy, 0),
                            block.trainable_elements * itemsize,
                        )
            for copy in range(copies[b]):
                for k, place in enumerate(ownership.computed_on[b]):
                    if place == node:
                        builder.add(
                            SegmentKind.GRADS,
                            (b, "grads", copy, k),
                            block.trainable_elements * grad,
                        )
        placed = [_storage(table), ownership.owner, ownership.computed_on, node, _kept(storage)]
        digest = hashlib.sha256(json.dumps(placed, sort_keys=True).encode()).digest()
        return cls(
            node=node,
            arrays=builder.arrays,
            sizes=builder.finish(),
            contributions=tuple(map(len, ownership.computed_on)),
            gradient_copies=copies,
            state_copies=states,
            storage=storage,
            digest=digest,
        )


def replica_layout(table: BlockTable, ownership: Ownership, owner: int) -> NodeLayout:
    """Lays out the replica of node ``owner`` at its partner: the state of its blocks with separate
    masters, and room for all contributions to two versions. Weights and frozen weights are not
    mirrored: they follow from masters, and from the model.
    """
    builder = _Builder()
    for block in table.blocks:
        if ownership.owner[block.index] != owner:
            continue
        for name, itemsize in _state(table, TWO_COPIES):
            size = block.trainable_elements * itemsize
            builder.add(SegmentKind.STATE, (block.index, name, 0, 0), size)
        for copy in range(GRADIENT_COPIES):
            for k in range(len(ownership.computed_on[block.index])):
                size = block.trainable_elements * table.grad_dtype.itemsize
                builder.add(SegmentKind.GRADS, (block.index, "grads", copy, k), size)
    placed = ["replica", _storage(table), ownership.owner, ownership.computed_on, owner]
    return NodeLayout(
        node=owner,
        arrays=builder.arrays,
        sizes=builder.finish(),
        contributions=tuple(map(len, ownership.computed_on)),
        gradient_copies=(GRADIENT_COPIES,) * len(table.blocks),
        state_copies=(1,) * len(table.blocks),
        storage=TWO_COPIES,
        digest=hashlib.sha256(json.dumps(placed, sort_keys=True).encode()).digest(),
    )


def _state(table: BlockTable, storage: Storage) -> list[tuple[str, int]]:
    """Returns the names and bytes an element of a block's state arrays."""
    master = ("low", 2) if storage.split_master else ("master", 4)
    return [master, *((name, 4) for name in table.state_arrays)]


def _kept(storage: Storage) -> dict[str, object]:
    """Returns a storage for the digest; without blocks that are flushed, as it has always been."""
    storage_fields = asdict(storage)
    if not storage.flushed:
        del storage_fields["flushed"]
    return storage_fields


def _copies(ownership: Ownership, block: int, storage: Storage) -> int:
    local = all(node == ownership.owner[block] for node in ownership.computed_on[block])
    return 1 if block in storage.single_gradients and local else GRADIENT_COPIES


def _storage(table: BlockTable) -> list[object]:
    """Returns the fields that decide the places and meaning of bytes; estimates such as FLOPs do
    not.
    """
    blocks = [
        [[t.name, t.shape, t.trainable, t.offset] for t in block.tensors] for block in table.blocks
    ]
    return [table.weight_dtype, table.grad_dtype, table.state_arrays, blocks]


class _Builder:
    def __init__(self) -> None:
        self._before: dict[SegmentKind, deque[int]] = defaultdict(lambda: deque(maxlen=3))
        self.arrays: dict[ArrayKey, ArrayRange] = {}
        self.sizes = dict.fromkeys(
            (SegmentKind.WEIGHTS, SegmentKind.FROZEN, SegmentKind.STATE, SegmentKind.GRADS), 0
        )

    def add(self, kind: SegmentKind, key: ArrayKey, num_bytes: int) -> None:
        offset = self.sizes[kind]
        if num_bytes >= LARGE_BYTES:
            offset = self._apart(kind, offset)
        self.arrays[key] = ArrayRange(segment=kind, offset=offset, num_bytes=num_bytes)
        self.sizes[kind] = -(-(offset + num_bytes) // PAGE_BYTES) * PAGE_BYTES

    def finish(self) -> dict[SegmentKind, int]:
        """Returns the sizes of the segments."""
        if self._before[SegmentKind.GRADS]:
            self.sizes[SegmentKind.GRADS] += GRADS_MARGIN
        return self.sizes

    def _apart(self, kind: SegmentKind, offset: int) -> int:
        before = self._before[kind]
        if kind is SegmentKind.GRADS and not before:
            offset += GRADS_MARGIN
        while any(collide(offset - other) for other in before):
            offset += PAGE_BYTES
        before.append(offset)
        return offset


@lru_cache(maxsize=4096)
def collide(distance: int) -> bool:
    """Returns whether some addresses this many bytes apart have equal tags, for any carry."""
    return any(tag(a) == tag(a + distance) for a in range(0, 1 << 20, PAGE_BYTES))


def tag(address: int) -> int:
    """Returns the 8-bit tag of an address in AMD's first-level caches. A cache finds a line by its
    set and this tag. Each tag bit combines one of the bits 12 to 19 with one of 20 to 27 (Lipp et
    al., "Take A Way", 2020).

    A cache holds one line of each tag and set at a time. A sweep reads master, moments and
    gradients at equal distances from their starts. If these were powers of two apart, each load
    would evict the others' lines. Sweeps would take up to 2.5 times as long (measured on Zen 4).
    """
    low, high = address >> 12, address >> 20
    mirrored = (high >> 7 & 1) | (high >> 5 & 2) | (high >> 3 & 4)  # 27 is with 12, 26 with 13, …
    return (low ^ mirrored ^ (high & 0x1F) << 3) & 0xFF
