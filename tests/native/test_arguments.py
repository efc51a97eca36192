"""Wrong arguments are refused with an error that names them, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock import _native
from penstock._native import WeightsDtype

NUM_ELEMENTS = 64


def arguments(kit: Any) -> dict[str, Any]:
    """Correct arguments of an advance."""
    block = kit.block(NUM_ELEMENTS, 0)
    return {
        **block.state,
        "pending_grads": kit.gradients(NUM_ELEMENTS, 1, bf16=True),
        "pending_hyper": kit.hyper(step=1),
        "grads": kit.gradients(NUM_ELEMENTS, 2, bf16=True),
        "hyper": kit.hyper(step=2),
        "weights": kit.weights(NUM_ELEMENTS, WeightsDtype.BFLOAT16),
        "weights_dtype": WeightsDtype.BFLOAT16,
        "undo": block.undo,
    }


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A view that cannot be written."""
    view = array.view()
    view.flags.writeable = False
    return view


def floats(kit: Any, num_elements: int = NUM_ELEMENTS) -> np.ndarray[Any, Any]:
    """An acceptable float32 array."""
    array: np.ndarray[Any, Any] = kit.aligned(num_elements, np.float32)
    return array


Change = Callable[[Any, dict[str, Any]], Any]
WRONG: list[tuple[str, Change, str]] = [
    ("master", lambda kit, a: a["master"].astype(np.float64), "master must"),
    ("master", lambda kit, a: floats(kit, 80)[1:65], "master must start at a multiple of 64 bytes"),
    ("master", lambda kit, a: floats(kit, 128)[::2], "master must be one-dimensional and contig"),
    ("master", lambda kit, a: floats(kit).reshape(8, 8), "master must be one-dimensional"),
    ("master", lambda kit, a: floats(kit, 60), "master has 60 elements: .* multiple of 16"),
    ("master", lambda kit, a: floats(kit, 0), "master has 0 elements"),
    ("master", lambda kit, a: read_only(a["master"]), "master must be writable"),
    ("master", lambda kit, a: (floats(kit),), "master must be one array, or a pair"),
    ("master", lambda kit, a: (floats(kit), floats(kit)), r"master\[0\] must be uint16"),
    (
        "arrays",
        lambda kit, a: [floats(kit, 80), a["arrays"][1]],
        r"arrays\[0\] has 80 elements, master has 64",
    ),
    (
        "arrays",
        lambda kit, a: [a["arrays"][0], floats(kit).view(np.int32)],
        r"arrays\[1\] must be float32",
    ),
    ("arrays", lambda kit, a: [], "arrays lists 0: optimizers have 1 or 2"),
    ("arrays", lambda kit, a: a["arrays"][:1], "arrays lists 1: this optimizer has 2"),
    (
        "hyper",
        lambda kit, a: kit.hyper(optimizer="adam"),
        "pending_hyper and hyper must have the same optimizer",
    ),
    ("grads", lambda kit, a: [], "grads lists 0 contributions: 1 to 12"),
    ("grads", lambda kit, a: a["grads"] * 13, "grads lists 13 contributions"),
    ("grads", lambda kit, a: [a["grads"][0], floats(kit)], r"grads\[1\] has another dtype"),
    ("grads", lambda kit, a: [floats(kit)], "pending_grads and grads must have the same dtype"),
    (
        "grads",
        lambda kit, a: [a["grads"][0].view(np.int16)],
        r"grads\[0\] must be float32, float16, or uint",
    ),
    ("pending_grads", lambda kit, a: [a["grads"][0][:32]], r"pending_grads\[0\] has 32 elements"),
    ("weights", lambda kit, a: floats(kit), "weights must be uint16 for this weights_dtype"),
    ("weights", lambda kit, a: read_only(a["weights"]), "weights must be writable"),
    ("weights_dtype", lambda kit, a: WeightsDtype.FLOAT32, "weights must be float32 for this"),
    ("ranges", lambda kit, a: [], "ranges end at 0, the arrays at 64"),
    ("ranges", lambda kit, a: [(0, 48, 0.1, 1.0)], "ranges end at 48, the arrays at 64"),
    (
        "ranges",
        lambda kit, a: [(0, 16, 0.1, 1.0), (32, 64, 0.1, 1.0)],
        "starts at 32 where 16 was due",
    ),
    (
        "ranges",
        lambda kit, a: [(0, 24, 0.1, 1.0), (24, 64, 0.1, 1.0)],
        r"\(0, 24\): .*multiples of 16",
    ),
    ("ranges", lambda kit, a: [(0, 80, 0.1, 1.0)], r"\(0, 80\): .*within 0\.\.64"),
    ("ranges", lambda kit, a: [(0, 64, -1.0, 1.0)], "weight decay -1"),
    ("ranges", lambda kit, a: [(0, 64, float("nan"), 1.0)], "weight decay nan"),
    ("ranges", lambda kit, a: [(0, 64, 0.1, 0.0)], "rate 0.0.*above 0"),
    ("ranges", lambda kit, a: [(0, 64, 0.1, float("inf"))], "rate inf.*finite"),
    ("spans", lambda kit, a: [], "spans is empty"),
    ("spans", lambda kit, a: [(-16, 16)], r"spans holds \(-16, 16\)"),
    ("spans", lambda kit, a: [(16, 16)], r"spans holds \(16, 16\)"),
    ("spans", lambda kit, a: [(0, 32), (16, 64)], "spans must be sorted"),
    (
        "spans",
        lambda kit, a: [(i, i + 16) for i in range(0, 64, 16)],
        "room for 1 pieces, spans has 4",
    ),
    ("undo", lambda kit, a: a["undo"][:128], r"undo has 128 bytes, .* needs 1216"),
    ("undo", lambda kit, a: a["undo"][8:], "undo must start at a multiple of 64 bytes"),
    ("undo", lambda kit, a: bytes(4096), "not writable"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG)
def test_wrong_arguments_are_refused_by_name(
    name: str, change: Change, message: str, pool: _native.Pool, kit: Any
) -> None:
    args = arguments(kit)
    if name == "spans":
        args["undo"] = args["undo"][: _native.undo_bytes(1)]
    arrays = [args["master"], *args["arrays"], args["weights"], args["undo"]]
    before = [array.copy() for array in arrays]
    changed = args | {name: change(kit, args)}
    with pytest.raises((ValueError, TypeError, BufferError), match=message):
        _native.advance(pool, **changed)
    for old, new in zip(before, arrays, strict=True):
        assert old.tobytes() == new.tobytes()


def test_the_arguments_above_are_correct_otherwise(pool: _native.Pool, kit: Any) -> None:
    assert _native.advance(pool, **arguments(kit)).finite


def test_what_is_no_array_is_a_type_error(pool: _native.Pool, kit: Any) -> None:
    with pytest.raises(TypeError, match="master must be a numpy array"):
        _native.advance(pool, **(arguments(kit) | {"master": "weights"}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("lr", float("inf")),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("beta2", float("nan")),
        ("eps", -1e-8),
        ("step", 0),
        ("coefficient", float("nan")),
    ],
)
def test_impossible_hyper_parameters_are_refused(name: str, value: float, kit: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*it must be"):
        kit.hyper(**{name: value})


def test_hyper_parameters_can_be_read_but_not_changed(kit: Any) -> None:
    hyper = kit.hyper(step=7, coefficient=0.5, optimizer="adam")
    assert repr(hyper) == (
        "Hyper(optimizer='adam', lr=0.01, beta1=0.90000000000000002, beta2=0.94999999999999996, "
        "eps=1e-08, step=7, coefficient=0.5)"
    )
    assert (hyper.step, hyper.coefficient, hyper.optimizer) == (7, 0.5, "adam")
    with pytest.raises(AttributeError):
        hyper.lr = 1.0
