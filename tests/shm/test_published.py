"""Tensors of published files as views of a block's tensors: places, rounding, and refusals."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from penstock.host.errors import ConfigError, StateError
from penstock.shm.memory import Halves
from penstock.shm.published import (
    CHUNK_ELEMENTS,
    PublishedFile,
    PublishedLayout,
    PublishedTensor,
    bf16,
    pieces,
    rounded,
)
from penstock.shm.table import BlockSpec, BlockTable, DType, TensorSpec

TORCH = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}
SHAPE = (5, 7, 11)


def make_table() -> BlockTable:
    """Two blocks with one tensor each."""
    blocks = tuple(
        BlockSpec(
            index=index,
            name=f"b{index}",
            kind="layer",
            layer_index=index,
            tensors=(
                TensorSpec(name=f"t{index}", shape=SHAPE, trainable=True, decay=True, offset=0),
            ),
            borrows=(),
            trainable_elements=400,
            frozen_elements=0,
            contributions=1,
            forward_flops=1.0,
            activation_bytes=1.0,
            output_bytes=1.0,
        )
        for index in range(2)
    )
    return BlockTable(
        blocks=blocks,
        weight_dtype=DType.BF16,
        grad_dtype=DType.FP32,
        state_arrays=("exp_avg",),
        vocab_size=9,
        num_parameters=770,
    )


def view_of(view: torch.Tensor, dtype: DType = DType.FP32) -> PublishedTensor:
    """The place of a view of a whole tensor."""
    return PublishedTensor(
        block=0,
        source="t0",
        offset=int(view.storage_offset()),
        shape=tuple(view.shape),
        strides=view.stride(),
        dtype=dtype,
        start=0,
    )


def patterns() -> np.ndarray[Any, Any]:
    """All upper halves of fp32 with lower halves around ties; infinities and NaN among them."""
    high = np.arange(2**16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    return (high[:, None] | low).reshape(-1).view(np.float32)


@pytest.mark.parametrize("given", DType)
@pytest.mark.parametrize("wanted", DType)
def test_numbers_are_rounded_as_torch_does(given: DType, wanted: DType) -> None:
    values = torch.from_numpy(patterns().copy()).to(TORCH[given])
    array = (values.view(torch.uint16) if given is DType.BF16 else values).numpy()
    expected = values.to(torch.float32).to(TORCH[wanted])
    actual = rounded(array, given, wanted)
    result = torch.from_numpy(actual)
    if wanted is DType.BF16:
        result = result.view(torch.bfloat16)
    assert result.dtype is expected.dtype
    assert torch.equal(result.isnan(), expected.isnan())
    keep = ~expected.isnan()
    bits = torch.int32 if wanted is DType.FP32 else torch.int16
    assert torch.equal(result[keep].view(bits), expected[keep].view(bits))


@pytest.mark.parametrize("size", [6, 1 << 16])
def test_halves_are_rounded_as_whole_numbers_are(size: int) -> None:
    values = patterns()
    halves = Halves(high=np.zeros(values.size, np.uint16), low=np.zeros(values.size, np.uint16))
    halves.store(values)
    kept = halves.high.copy()
    parts = [bf16(halves, first, first + size) for first in range(0, values.size, size)]
    assert np.array_equal(np.concatenate(parts), rounded(values, DType.FP32, DType.BF16))
    assert np.array_equal(halves.high, kept)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "cut",
    [
        lambda t: t,
        lambda t: t[2],
        lambda t: t[1:4, 2:3],
        lambda t: t.transpose(1, 2),
        lambda t: t.permute(2, 0, 1)[3:],
        lambda t: t[:, ::2, 5],
        lambda t: t[4, 6, 10],
        lambda t: t.chunk(2, dim=1)[1],
    ],
)
def test_views(cut: Any, split: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.shm.published.CHUNK_ELEMENTS", 16)
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    flat: Any = values.reshape(-1).numpy()
    view = cut(values)
    if split:
        halves = Halves(high=np.zeros(385, np.uint16), low=np.zeros(385, np.uint16))
        halves.store(flat)
        flat = halves
    tensor = view_of(view, DType.BF16)
    assert tensor.contiguous == view.is_contiguous()
    content = b"".join(pieces(tensor, flat, DType.FP32))
    assert content == view.to(torch.bfloat16).reshape(-1).view(torch.uint8).numpy().tobytes()


def test_pieces_are_small() -> None:
    flat = np.zeros(3 * CHUNK_ELEMENTS + 5, np.float32)
    whole = view_of(torch.from_numpy(flat), DType.BF16)
    assert max(map(len, pieces(whole, flat, DType.FP32))) == 2 * CHUNK_ELEMENTS
    turned = view_of(torch.from_numpy(flat[:-5].reshape(4, -1)).T, DType.BF16)
    assert max(map(len, pieces(turned, flat, DType.FP32))) <= 2 * CHUNK_ELEMENTS


def test_a_number_that_fp16_cannot_hold_is_refused() -> None:
    flat = np.array([1.0, 7e4], np.float32)
    with pytest.raises(ConfigError, match="t0 has numbers that fp16 cannot hold"):
        list(pieces(view_of(torch.from_numpy(flat), DType.FP16), flat, DType.FP32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": 2}, "no tensor 't0' in block 2"),
        ({"source": "t1"}, "no tensor 't1' in block 0"),
        ({"offset": 1}, "element 386 of 385"),
        ({"strides": [77, 11, 2]}, "element 395 of 385"),
        ({"shape": [5, 7]}, "shape"),
        ({"shape": [0, 7, 11]}, "shape"),
        ({"offset": -1}, "-1 is not a count"),
        ({"start": 1000}, "ends after the file's 2000 bytes"),
        ({"dtype": "int8"}, "int8"),
    ],
)
def test_places_outside_are_refused(changes: dict[str, Any], message: str) -> None:
    table = make_table()
    tensor = view_of(torch.empty(SHAPE))
    file = PublishedFile(name="model.safetensors", num_bytes=2000, tensors=(tensor,))
    text = PublishedLayout(table_digest=table.digest, files=(file,)).to_json()
    assert PublishedLayout.from_json(text.encode(), table, "here").files == (file,)
    fields = json.loads(text)
    fields["files"][0]["tensors"][0].update(changes)
    with pytest.raises(StateError, match=f"here: the layout is damaged: .*{message}"):
        PublishedLayout.from_json(json.dumps(fields).encode(), table, "here")


def test_other_damage_is_refused() -> None:
    table = make_table()
    tensor = view_of(torch.empty(SHAPE))
    file = PublishedFile(name="a", num_bytes=2000, tensors=(tensor,))
    twice = (file, PublishedFile(name="b", num_bytes=2000, tensors=(tensor,)))
    outside = (PublishedFile(name="../a", num_bytes=2000, tensors=()),)
    for digest, files, message in (
        ("00", (file,), "of the table 00"),
        (table.digest, twice, "block 0 is in two files"),
        (table.digest, outside, "not a file name"),
    ):
        text = PublishedLayout(table_digest=digest, files=files).to_json()
        with pytest.raises(StateError, match=message):
            PublishedLayout.from_json(text.encode(), table, "here")
    with pytest.raises(StateError, match="the layout is damaged"):
        PublishedLayout.from_json(b"[]", table, "here")
