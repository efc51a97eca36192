"""Where arrays lie: page-aligned, disjoint, where their owner is, equal in every process."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from penstock.shm.layout import (
    PAGE_BYTES,
    ArrayRange,
    NodeLayout,
    Ownership,
    SegmentKind,
    Storage,
    tag,
)
from penstock.shm.memory import Halves
from penstock.shm.table import BlockTable, DType


def layout_of(table: BlockTable, nodes: list[int], node: int) -> NodeLayout:
    return NodeLayout.compute(table, Ownership.from_backward_nodes(table, nodes), node)


def test_every_array_of_an_owned_block(table: BlockTable) -> None:
    layout = layout_of(table, [0, 0], 0)
    assert [key for key in layout.arrays if key[0] == 0] == [
        (0, "weights", 0, 0),
        (0, "weights", 1, 0),
        (0, "frozen", 0, 0),
        (0, "master", 0, 0),
        (0, "exp_avg", 0, 0),
        (0, "exp_avg_sq", 0, 0),
        (0, "grads", 0, 0),
        (0, "grads", 0, 1),
        (0, "grads", 1, 0),
        (0, "grads", 1, 1),
    ]
    assert layout.arrays[0, "weights", 1, 0] == ArrayRange(
        segment=SegmentKind.WEIGHTS, offset=PAGE_BYTES, num_bytes=96
    )
    assert layout.arrays[0, "exp_avg_sq", 0, 0] == ArrayRange(
        segment=SegmentKind.STATE, offset=2 * PAGE_BYTES, num_bytes=192
    )


def test_arrays_are_aligned_and_disjoint(table: BlockTable) -> None:
    layout = layout_of(table, [0, 0], 0)
    for kind, size in layout.sizes.items():
        end = 0
        for place in layout.arrays.values():
            if place.segment is kind:
                assert place.offset % PAGE_BYTES == 0
                assert place.offset >= end
                end = place.offset + place.num_bytes
        assert end <= size


def test_a_borrowers_gradient_lies_where_it_is_computed(table: BlockTable) -> None:
    owner, borrower = layout_of(table, [0, 1], 0), layout_of(table, [0, 1], 1)
    assert (0, "grads", 0, 0) in owner.arrays
    assert (0, "grads", 0, 1) not in owner.arrays
    assert (0, "grads", 0, 1) in borrower.arrays
    assert (0, "weights", 0, 0) not in borrower.arrays
    assert (1, "weights", 0, 0) in borrower.arrays


def test_every_route_contributes_each_use(table: BlockTable) -> None:
    """Block 0 has two uses; route 1 runs block 0 on node 1 and block 1, the borrower, on node 0."""
    owners = Ownership.from_backward_nodes(table, [0, 1], [[1, 0]])
    assert owners == Ownership(owner=(0, 1), computed_on=((0, 1, 1, 0), (1, 0)))
    layouts = [NodeLayout.compute(table, owners, node) for node in range(2)]
    assert [layout.contributions for layout in layouts] == [(4, 2)] * 2
    grads = [
        [(b, k) for b, name, copy, k in layout.arrays if (name, copy) == ("grads", 0)]
        for layout in layouts
    ]
    assert grads == [[(0, 0), (0, 3), (1, 1)], [(0, 1), (0, 2), (1, 0)]]


def test_split_masters_and_single_gradients(table: BlockTable) -> None:
    """A contribution that another node computes keeps two copies: it is pulled."""
    storage = Storage(split_master=True, single_gradients=(0, 1))
    owners = Ownership.from_backward_nodes(table, [0, 1])
    layout = NodeLayout.compute(table, owners, 1, storage)
    assert layout.gradient_copies == (2, 1)
    assert [key[1:] for key in layout.arrays if key[0] == 1] == [
        ("weights", 0, 0),
        ("weights", 1, 0),
        ("frozen", 0, 0),
        ("low", 0, 0),
        ("exp_avg", 0, 0),
        ("exp_avg_sq", 0, 0),
        ("grads", 0, 0),
    ]
    weights, low = layout.arrays[1, "weights", 0, 0], layout.arrays[1, "low", 0, 0]
    assert table.weight_dtype.itemsize == 2 and low.num_bytes == weights.num_bytes
    assert layout.digest != NodeLayout.compute(table, owners, 1).digest


def test_blocks_that_are_flushed_have_two_copies_of_their_state(table: BlockTable) -> None:
    """Others lie, and are told apart, as without such blocks."""
    owners = Ownership.from_backward_nodes(table, [0, 0])
    plain = NodeLayout.compute(table, owners, 0)
    layout = NodeLayout.compute(table, owners, 0, Storage(flushed=(1,)))
    assert (plain.state_copies, layout.state_copies) == ((1, 1), (1, 2))
    names = ("master", "exp_avg", "exp_avg_sq")
    copies = [key for key in layout.arrays if key[1] in names and key[0] == 1]
    assert copies == [(1, name, copy, 0) for copy in (0, 1) for name in names]
    assert layout.digest != plain.digest


@pytest.mark.parametrize("low", [0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_halves_hold_every_float(low: int) -> None:
    bits = (np.arange(1 << 16, dtype=np.uint32) << 16) | low
    halves = Halves(high=np.empty(1 << 16, np.uint16), low=np.empty(1 << 16, np.uint16))
    halves.store(bits.view(np.float32))
    assert np.array_equal(halves.load().view(np.uint32), bits)
    assert np.array_equal(halves.high, ((bits.astype(np.uint64) + 0x8000) >> 16) & 0xFFFF)
    halves.part(5, 9).store(bits.view(np.float32)[:2], start=1)
    assert np.array_equal(halves.load(6, 8).view(np.uint32), bits[:2])


def test_digest_tells_layouts_apart(table: BlockTable) -> None:
    base = layout_of(table, [0, 0], 0).digest
    routes = Ownership.from_backward_nodes(table, [0, 0], [[0, 0]])
    assert NodeLayout.compute(table, routes, 0).digest != base
    assert layout_of(table, [0, 0], 0).digest == base
    assert layout_of(table, [0, 1], 0).digest != base
    assert layout_of(table, [0, 0], 1).digest != base
    assert layout_of(dataclasses.replace(table, grad_dtype=DType.BF16), [0, 0], 0).digest != base


def test_digest_ignores_estimates(table: BlockTable) -> None:
    blocks = tuple(dataclasses.replace(b, forward_flops=99.0) for b in table.blocks)
    other = dataclasses.replace(table, blocks=blocks)
    assert layout_of(other, [0, 0], 0).digest == layout_of(table, [0, 0], 0).digest


@pytest.mark.parametrize("elements", [1 << 22, 1 << 25, 1 << 26, 3 << 25, 202_383_360])
@pytest.mark.parametrize("state_first", [False, True])
def test_caches_can_tell_large_arrays_of_a_block_apart(
    table: BlockTable, elements: int, state_first: bool
) -> None:
    block = dataclasses.replace(
        table.blocks[0], trainable_elements=elements, contributions=1, borrows=()
    )
    table = dataclasses.replace(table, blocks=(block,))
    layout = layout_of(table, [0], 0)
    starts = [layout.arrays[0, name, 0, 0].offset for name in ("master", *table.state_arrays)]
    assert starts[-1] - 2 * 4 * elements < 1 << 16, "a few pages lie between them"
    sizes = layout.sizes  # of mappings in a row
    grads = sizes[SegmentKind.STATE] if state_first else -sizes[SegmentKind.GRADS]
    starts += [grads + layout.arrays[0, "grads", copy, 0].offset for copy in range(2)]
    steps = range(1 << 40, (1 << 40) + elements * 4, (1 << 21) + PAGE_BYTES)
    clashes = sum(len({tag(start + step) for start in starts}) < len(starts) for step in steps)
    assert clashes <= 0.1 * len(steps), "here and there by chance"
