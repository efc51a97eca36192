"""Split masters: two halves hold the very bits, in every sweep, and after a kill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock import _native
from penstock._native import WeightsDtype

PATHS = _native.available_vector_paths()
SIZE = 4096 + 96
BF16 = WeightsDtype.BFLOAT16


def split(bits: NDArray[np.uint32]) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Upper halves, rounded half up in the bits, and lower halves."""
    rounded = (bits.astype(np.uint64) + 0x8000) >> 16
    return rounded.astype(np.uint16), bits.astype(np.uint16)


@dataclass(slots=True)
class Split:
    """A block with a split master and two slots of weights."""

    slots: list[NDArray[np.uint16]]
    low: NDArray[np.uint16]
    block: Any

    @classmethod
    def of(cls, kit: Any, block: Any) -> Split:
        """The same state; the weights are in slot 0."""
        high, low = split(block.master.view(np.uint32))
        slots = [kit.aligned_copy(high), kit.aligned(block.master.size, np.uint16)]
        return cls(slots, kit.aligned_copy(low), block.copy())

    def state(self, slot: int) -> dict[str, Any]:
        """Arguments of sweeps, with the version's weights in ``slot``."""
        return {**self.block.state, "master": (self.slots[slot], self.low)}

    def repair(self, slot: int) -> list[tuple[int, int]]:
        """Put back what a killed sweep left half-written."""
        arrays = self.state(slot)
        return _native.repair(self.block.undo, master=arrays["master"], arrays=arrays["arrays"])

    def master(self, slot: int) -> bytes:
        """The bits of the float32 master."""
        high, low = self.slots[slot].astype(np.uint32), self.low.astype(np.uint32)
        return ((high << 16) + low - ((low >> 15) << 16)).astype(np.uint32).tobytes()

    def bits(self, slot: int) -> tuple[bytes, bytes, bytes]:
        """As those of a block that is not split."""
        return self.master(slot), self.block.exp_avg.tobytes(), self.block.exp_avg_sq.tobytes()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("low", [0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF, "random"])
def test_every_upper_half_joins_to_the_same_bits(
    path: str, low: int | str, kit: Any, cores: list[int]
) -> None:
    """Through the kernels: a step of learning rate 0 without decay leaves all bits in place.

    All but Inf and NaN, which decay would not leave alone, and -0, which adding makes 0.
    """
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = (
        np.random.default_rng(1).integers(0, 1 << 16, high.size, np.uint32)
        if low == "random"
        else np.full(high.size, low, np.uint32)
    )
    bits = high | lower
    assert np.array_equal(join(*split(bits)), bits)  # the rule itself, NaNs included
    bits = np.where(bits & 0x7F800000 == 0x7F800000, bits & 0x807FFFFF, bits).astype(np.uint32)
    bits[bits == 0x80000000] = 0
    block = kit.block(bits.size, 1)
    block.ranges[:] = [(0, bits.size, 0.0, 1.0)]
    block.master[:] = bits.view(np.float32)
    halves = Split.of(kit, block)
    zeros = kit.aligned(bits.size, np.float32)
    arguments = {"grads": [zeros], "hyper": kit.hyper(lr=0.0), "weights_dtype": BF16}
    with _native.Pool([cores[0]], vector_path=path) as pool:
        _native.hold(
            pool,
            weights=halves.slots[1],
            undo=halves.block.undo,
            **arguments,
            **halves.state(0),
        )
    assert halves.master(1) == bits.tobytes()


def join(high: NDArray[np.uint16], low: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """The inverse of :func:`split`."""
    wide = (high.astype(np.uint32) << 16) + low - ((low.astype(np.uint32) >> 15) << 16)
    return wide.astype(np.uint32)


def test_rounding_to_even_could_not_be_taken_back() -> None:
    """Why halves round up: these two would share both halves."""
    bits = np.array([0x3F808000, 0x3F7F8000], np.uint32)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    assert even[0] == even[1] and (bits & 0xFFFF)[0] == (bits & 0xFFFF)[1]
    high, low = split(bits)
    assert high[0] != high[1] and low[0] == low[1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
@pytest.mark.parametrize("bf16", [True, False])
def test_steps_have_the_bits_of_a_whole_master(
    path: str, optimizer: str, bf16: bool, kit: Any, cores: list[int]
) -> None:
    """Preview, advance over and over with turning slots, settle; against settles of fp32."""
    whole = kit.block(SIZE, 2)
    halves = Split.of(kit, whole)

    def state_of(arrays: dict[str, Any]) -> dict[str, Any]:
        one = optimizer == "lion"
        return {**arrays, "arrays": arrays["arrays"][:1]} if one else arrays

    def inputs(step: int) -> dict[str, Any]:
        grads = kit.gradients(SIZE, step, bf16=bf16, count=2)
        return {"grads": grads, "hyper": kit.hyper(step=step, optimizer=optimizer)}

    with _native.Pool([cores[0], cores[-1]], vector_path=path) as pool:
        out = {"weights": halves.slots[1], "weights_dtype": BF16}
        _native.preview(pool, **out, **inputs(1), **state_of(halves.state(0)))
        for step in (2, 3, 4):
            pending, slot = inputs(step - 1), step % 2
            status = _native.advance(
                pool,
                pending_grads=pending["grads"],
                pending_hyper=pending["hyper"],
                weights=halves.slots[slot],
                weights_dtype=BF16,
                undo=halves.block.undo,
                **inputs(step),
                **state_of(halves.state(slot)),
            )
            _native.settle(pool, undo=whole.undo, **pending, **state_of(whole.state))
            assert status.finite and halves.bits(1 - slot) == whole.bits()
        last = inputs(4)
        _native.settle(pool, undo=whole.undo, **last, **state_of(whole.state))
        _native.settle(pool, undo=halves.block.undo, **last, **state_of(halves.state(1)))
        assert halves.bits(0) == whole.bits()
        _native.step_in_place(
            pool,
            weights=halves.slots[1],
            weights_dtype=BF16,
            **inputs(5),
            **state_of(halves.state(0)),
        )
        _native.settle(pool, undo=whole.undo, **inputs(5), **state_of(whole.state))
        assert halves.bits(1) == whole.bits()


def test_an_advance_cut_short_is_repaired(pool: _native.Pool, kit: Any) -> None:
    """It overwrote upper halves of the master it settled away from: they come back, too."""
    num_elements = 64
    whole = kit.block(num_elements, 3)
    halves = Split.of(kit, whole)
    first, second = (kit.gradients(num_elements, seed, bf16=True) for seed in (1, 2))
    out = {"weights_dtype": BF16, "hyper": kit.hyper(step=2)}
    _native.preview(
        pool,
        grads=first,
        weights=halves.slots[1],
        **(out | {"hyper": kit.hyper(step=1)}),
        **halves.state(0),
    )
    before = [array.copy() for array in (*halves.slots, halves.low, *halves.block.each[1:])]
    _native.advance(
        pool,
        pending_grads=first,
        pending_hyper=kit.hyper(step=1),
        grads=second,
        weights=halves.slots[0],
        undo=halves.block.undo,
        tag=9,
        **out,
        **halves.state(0),
    )
    _native.settle(pool, grads=first, hyper=kit.hyper(step=1), undo=whole.undo, **whole.state)
    # As if killed in each piece's last vector but one: that one half, the last not at all.
    for now, old in zip((*halves.slots, halves.low, *halves.block.each[1:]), before, strict=True):
        now[num_elements - 16 :] = old[num_elements - 16 :]
    undo = halves.block.undo.view(np.uint64)
    piece = (64 + 0) // 8
    undo[piece + (320 + 192) // 8] = 0  # the slot of the last vector is empty
    undo[0] = 1
    halves.low[num_elements - 32 : num_elements - 24] = 0xDEAD
    halves.slots[0][num_elements - 30 : num_elements - 20] = 0xBEEF
    spans = halves.repair(0)
    assert spans == [(num_elements - 32, num_elements)]
    _native.settle(
        pool,
        grads=first,
        hyper=kit.hyper(step=1),
        undo=halves.block.undo,
        spans=spans,
        tag=9,
        **halves.state(0),
    )
    assert halves.bits(1) == whole.bits()


def test_arguments(pool: _native.Pool, kit: Any) -> None:
    block = kit.block(64, 4)
    halves = Split.of(kit, block)
    (grad,) = kit.gradients(64, 1, bf16=True)
    arguments = {"grads": [grad], "hyper": kit.hyper(), **halves.state(0)}
    with pytest.raises(ValueError, match="weights_dtype must be BFLOAT16 where master is split"):
        _native.preview(
            pool, weights=halves.slots[1], weights_dtype=WeightsDtype.FLOAT16, **arguments
        )
    with pytest.raises(ValueError, match="master must not be split: what the step rounded is lost"):
        _native.invert(pool, undo=block.undo, **arguments)
