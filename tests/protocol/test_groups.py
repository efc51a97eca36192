"""Groups of parameters: their keys, the ranges that they make, and groups that decide nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.config.schema import parse_config
from penstock.config.training import OptimizerConfig
from penstock.host.errors import ConfigError
from penstock.protocol.plan.groups import check_groups, near_names, step_ranges
from penstock.shm.table import BlockSpec, BlockTable, BorrowedTensor, DType, TensorSpec, padded


def block(index: int, shapes: dict[str, tuple[int, ...]], frozen: Sequence[str] = ()) -> BlockSpec:
    """A block with these tensors, those with two axes first."""
    tensors, ends = [], {True: 0, False: 0}
    for name, shape in shapes.items():
        trainable = name not in frozen
        tensors.append(
            TensorSpec(
                name=name,
                shape=shape,
                trainable=trainable,
                decay=trainable and len(shape) > 1,
                offset=ends[trainable],
            )
        )
        ends[trainable] += padded(tensors[-1].num_elements)
    return BlockSpec(
        index=index,
        name=f"block{index}",
        kind="layer",
        layer_index=None,
        tensors=tuple(tensors),
        borrows=(),
        trainable_elements=ends[True],
        frozen_elements=ends[False],
        contributions=1,
        forward_flops=1.0,
        activation_bytes=1.0,
        output_bytes=1.0,
    )


LAYER = {
    "layers.0.q_proj.weight": (4, 4),
    "layers.0.k_proj.weight": (4, 8),
    "layers.0.up_proj.weight": (4, 4),
    "layers.0.q_proj.bias": (4,),
    "layers.0.norm.weight": (20,),
}


@pytest.fixture
def table() -> BlockTable:
    """An embedding that the head borrows, a layer, and a norm with a frozen scale."""
    embedding = block(0, {"embed_tokens.weight": (4, 8)})
    head = block(2, {"norm.weight": (8,), "scale": (3,)}, frozen=["scale"])
    tied = BorrowedTensor(
        name="embed_tokens.weight", local_name="lm_head.weight", owner=0, contribution=0
    )
    return BlockTable(
        blocks=(embedding, block(1, LAYER), BlockSpec(**{**fields(head), "borrows": (tied,)})),
        weight_dtype=DType.FP32,
        grad_dtype=DType.FP32,
        state_arrays=("exp_avg", "exp_avg_sq"),
        vocab_size=4,
        num_parameters=1,
    )


def fields(spec: BlockSpec) -> dict[str, Any]:
    """The fields of a block."""
    return {name: getattr(spec, name) for name in BlockSpec.__slots__}


def optimizer(*groups: dict[str, Any], **keys: Any) -> OptimizerConfig:
    """A section with groups."""
    section = {"weight_decay": 0.1, "groups": list(groups), **keys}
    return parse_config(
        {"optimizer": section, "model": {"hf": {"model_type": "llama"}}, "data": {"path": "x"}}
    ).optimizer


def test_without_groups_tensors_with_two_axes_decay(table: BlockTable) -> None:
    assert step_ranges(optimizer(), table, 1) == [(0, 64, 0.1, 1.0), (64, 112, 0.0, 1.0)]
    assert step_ranges(optimizer(weight_decay=0.0), table, 1) == [(0, 112, 0.0, 1.0)]
    assert step_ranges(optimizer(), table, 2) == [(0, 16, 0.0, 1.0)]


def test_the_first_group_decides_and_neighbours_share_a_range(table: BlockTable) -> None:
    groups = optimizer(
        {"match": ["q_proj", "k_proj"], "rate": 0.5},
        {"match": "bias|norm", "weight_decay": 0.2},
        {"match": "layers", "rate": 2.0, "weight_decay": 0.0},
    )
    assert step_ranges(groups, table, 1) == [
        (0, 48, 0.1, 0.5),
        (48, 64, 0.0, 2.0),
        (64, 80, 0.0, 0.5),
        (80, 112, 0.2, 1.0),
    ]


@pytest.mark.parametrize("name", ["embed_tokens", "^lm_head"])
def test_a_tied_tensor_is_matched_by_each_of_its_names(table: BlockTable, name: str) -> None:
    tied = optimizer({"match": name, "rate": 0.1, "weight_decay": 0.0})
    check_groups(table, tied.groups)
    assert step_ranges(tied, table, 0) == [(0, 32, 0.0, 0.1)]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [{"match": "q_porj", "rate": 2.0}],
            r"optimizer.groups.0.match: 'q_porj' matches no parameter; .* such as layers.0.q_proj",
        ),
        (
            [{"match": "scale", "rate": 2.0}],
            r"groups.0.match: \['scale'\] matches only parameters that are not trained .*such as",
        ),
        (
            [{"match": "q_proj", "rate": 2.0}, {"match": "q_proj.bias", "rate": 3.0}],
            r"groups.1.match: \['q_proj.bias'\] matches only parameters of earlier groups",
        ),
    ],
)
def test_groups_that_decide_nothing_are_refused(
    table: BlockTable, groups: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_groups(table, optimizer(*groups).groups)


def test_near_names_are_of_different_tensors() -> None:
    names = [f"layers.{i}.{part}.weight" for i in range(30) for part in ("up_proj", "attn.norm")]
    assert near_names("atn_norm", names) == ["layers.0.attn.norm.weight", "layers.0.up_proj.weight"]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"match": "x", "rate": 0}, r"optimizer.groups.0.rate = 0: accepted .* 0 \(`?train.freeze"),
        ({"match": "x", "rate": -1.0}, r"optimizer.groups.0.rate = -1.0: .*train.freeze"),
        (
            {"match": "x", "weight_decay": -1.0},
            r"optimizer.groups.0.weight_decay = -1.0: .*0 or more",
        ),
        ({"match": "x"}, r"optimizer.groups: the group of x has neither rate nor weight_decay"),
        ({"match": "(", "rate": 2.0}, r"optimizer.groups.0.match = '\('.*no regular expression"),
        ({"match": [], "rate": 2.0}, r"optimizer.groups.0.match = \[\]: accepted is a regular"),
        ({"match": 3, "rate": 2.0}, r"optimizer.groups.0.match = 3: accepted is a regular"),
        ({"rate": 2.0}, r"optimizer.groups.0.match: is missing; accepted is a regular"),
        ({"match": "x", "lr": 2.0}, r"optimizer.groups.0.lr"),
    ],
)
def test_bad_groups_are_named(group: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        optimizer(group)
