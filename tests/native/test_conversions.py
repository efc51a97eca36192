"""Conversions between float32 and the 16-bit formats, against torch, on every vector path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock import _native

# Lower halves that decide about rounding: exact, just above, around the tie, just below the next.
BF16_TAILS = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
FP16_TAILS = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF], np.uint32)


def floats_from(heads: NDArray[np.uint32], tails: NDArray[np.uint32]) -> NDArray[np.float32]:
    """All combinations of leading and trailing bits."""
    bits: NDArray[np.uint32] = (heads[:, None] | tails[None, :]).reshape(-1)
    return bits.view(np.float32)


def cast(
    kit: Any, cores: list[int], path: str, values: NDArray[np.float32], dtype: Any
) -> NDArray[np.uint16]:
    """Weights of a master with these values."""
    weights: NDArray[np.uint16] = kit.weights(values.size, dtype)
    with _native.Pool([cores[0]], vector_path=path) as pool:
        master = kit.aligned_copy(values)
        _native.cast_weights(pool, master=master, weights=weights, weights_dtype=dtype)
    return weights


@pytest.mark.parametrize("path", _native.available_vector_paths())
def test_bf16_rounds_like_torch(path: str, kit: Any, cores: list[int]) -> None:
    values = floats_from(np.arange(1 << 16, dtype=np.uint32) << np.uint32(16), BF16_TAILS)
    found = cast(kit, cores, path, values, _native.WeightsDtype.BFLOAT16)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(found[numbers], expected[numbers])
    assert np.all(found[~numbers] == 0x7FC0)


@pytest.mark.parametrize("path", _native.available_vector_paths())
def test_fp16_rounds_like_torch(path: str, kit: Any, cores: list[int]) -> None:
    values = floats_from(np.arange(1 << 19, dtype=np.uint32) << np.uint32(13), FP16_TAILS)
    found = cast(kit, cores, path, values, _native.WeightsDtype.FLOAT16)
    expected = torch.from_numpy(values).to(torch.float16).view(torch.uint16).numpy()
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(found[numbers], expected[numbers])
    assert np.all(found[~numbers] == 0x7E00)


@pytest.mark.parametrize("path", _native.available_vector_paths())
def test_bf16_gradients_are_widened_exactly(path: str, kit: Any, cores: list[int]) -> None:
    """With beta1 = 0 and nothing else, exp_avg becomes the gradient."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    grad = kit.aligned_copy(patterns)
    values = (patterns.astype(np.uint32) << 16).view(np.float32)
    finite = np.isfinite(values)
    grad[~finite] = 0
    block = kit.block(grad.size, 1)
    for array in block.each:
        array[:] = 0
    with _native.Pool([cores[0]], vector_path=path) as pool:
        _native.settle(
            pool, grads=[grad], hyper=kit.hyper(beta1=0.0), undo=block.undo, **block.state
        )
    np.testing.assert_array_equal(block.exp_avg, np.where(finite, values, 0))


@pytest.mark.parametrize("path", _native.available_vector_paths())
def test_float32_weights_are_a_copy(path: str, kit: Any, cores: list[int]) -> None:
    values = kit.block(4096 + 48, 5).master
    found = cast(kit, cores, path, values, _native.WeightsDtype.FLOAT32)
    assert found.tobytes() == values.tobytes()


def test_halves_of_one_length_are_rounded() -> None:
    high = np.array([0x3F80, 0x3F81, 0x3F81, 0xBF81], np.uint16)
    low = np.array([0, 0x8000, 0x8001, 0x8000], np.uint16)
    out = np.zeros(4, np.uint16)
    assert _native.round_halves(high=high, low=low, out=out)
    assert out.tolist() == [0x3F80, 0x3F80, 0x3F81, 0xBF80]
    for doubtful in (0, 0x8000, 0x7F80, 0xFF80, 0x7FC0):
        high[2] = doubtful
        assert not _native.round_halves(high=high, low=low, out=out)
    with pytest.raises(ValueError, match="equal lengths"):
        _native.round_halves(high=high, low=low[1:], out=out)
    with pytest.raises(TypeError):
        _native.round_halves(high=high.view(np.int16), low=low, out=out)
