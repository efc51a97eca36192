"""Byte layout of a node's segments, computed from the block table.

One segment per kind of array, every array of a block page-aligned inside it::

    weights   | block 0: slot 0 | slot 1 | block 1: slot 0 | …               weight dtype
    frozen    | block 0 | block 1 | …                                        weight dtype
    state     | block 0: master | exp_avg | exp_avg_sq | block 1: …          fp32
    grads     | block 0: copy 0: contribution 0, 1, … | copy 1: … | block 1  gradient dtype
    control   | header, records, pass intent, undo area, block words         penstock.shm.control

An array has ``trainable_elements`` elements, in ``frozen`` ``frozen_elements``. ``weights``,
``frozen`` and ``state`` hold the blocks the node owns. ``grads`` holds the contributions that are
*computed* on the node: those of owned blocks, of a tied tensor's other uses, and of the plan's
other routes (the owner pulls what it did not compute). With R routes a block of U uses has R x U
contributions, route by route: number ``r * U + use``; where the plan reduces gradients, U. Writers:
weights, state: optimizerd (memoryd and the loader during a restore); frozen: memoryd and the
loader; grads: the one worker that computes the contribution. Every process computes the same layout
from the same table and plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.shm.table import BlockTable

PAGE_BYTES = 4096
WEIGHT_SLOTS = 2
GRADIENT_COPIES = 2


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
        """From the node that runs each block's backward in route 0: it owns the block.

        ``other_routes``: the same of each further route; these contribute gradients only.
        Contributions of borrowed tensors are computed where the borrowing block's backward runs.
        """
        computed_on: list[list[int]] = [[] for _ in table.blocks]
        for nodes in (node_of_block, *other_routes):
            for found, uses in zip(computed_on, _nodes_of_uses(table, nodes), strict=True):
                found += uses
        return cls(owner=tuple(node_of_block), computed_on=tuple(map(tuple, computed_on)))


def _nodes_of_uses(table: BlockTable, node_of_block: Sequence[int]) -> list[list[int]]:
    """The node that computes the gradient of each use of each block, in one route."""
    found = [[node_of_block[b.index]] * b.contributions for b in table.blocks]
    for block in table.blocks:
        for borrowed in block.borrows:
            if borrowed.contribution == 0:
                continue  # a frozen tensor has no gradient; contribution 0 is the owner's own
            found[borrowed.owner][borrowed.contribution] = node_of_block[block.index]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """Where every array of one node lies, and how large its segments are.

    ``contributions[b]``: gradient contributions of block b, on all nodes.
    """

    node: int
    arrays: dict[ArrayKey, ArrayRange]
    sizes: dict[SegmentKind, int]
    contributions: tuple[int, ...]
    digest: bytes

    @classmethod
    def compute(cls, table: BlockTable, ownership: Ownership, node: int) -> NodeLayout:
        """Lay out the node's arrays; ``sizes`` lacks the control segment."""
        builder = _Builder()
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
                for name in ("master", *table.state_arrays):
                    builder.add(SegmentKind.STATE, (b, name, 0, 0), block.trainable_elements * 4)
            for copy in range(GRADIENT_COPIES):
                for k, place in enumerate(ownership.computed_on[b]):
                    if place == node:
                        builder.add(
                            SegmentKind.GRADS,
                            (b, "grads", copy, k),
                            block.trainable_elements * grad,
                        )
        digest = hashlib.sha256(
            json.dumps(
                [_storage(table), ownership.owner, ownership.computed_on, node], sort_keys=True
            ).encode()
        ).digest()
        return cls(
            node=node,
            arrays=builder.arrays,
            sizes=builder.sizes,
            contributions=tuple(map(len, ownership.computed_on)),
            digest=digest,
        )


def _storage(table: BlockTable) -> list[object]:
    """What decides where bytes lie and what they mean; estimates such as FLOPs do not."""
    blocks = [
        [[t.name, t.shape, t.trainable, t.offset] for t in block.tensors] for block in table.blocks
    ]
    return [table.weight_dtype, table.grad_dtype, table.state_arrays, blocks]


class _Builder:
    def __init__(self) -> None:
        self.arrays: dict[ArrayKey, ArrayRange] = {}
        self.sizes = dict.fromkeys(
            (SegmentKind.WEIGHTS, SegmentKind.FROZEN, SegmentKind.STATE, SegmentKind.GRADS), 0
        )

    def add(self, kind: SegmentKind, key: ArrayKey, num_bytes: int) -> None:
        offset = self.sizes[kind]
        self.arrays[key] = ArrayRange(segment=kind, offset=offset, num_bytes=num_bytes)
        self.sizes[kind] = -(-(offset + num_bytes) // PAGE_BYTES) * PAGE_BYTES
