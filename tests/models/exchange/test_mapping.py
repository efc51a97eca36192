"""Checkpoints that do not fit a configuration are refused before anything is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.config.schema import parse_config
from penstock.models.exchange.foreign import (
    WEIGHT,
    ForeignGroup,
    ForeignSchedule,
    ForeignState,
    ForeignTensor,
)
from penstock.models.exchange.mapping import ImportOptions, ImportPlan, plan_import
from penstock.models.surgery.skeleton import build_skeleton
from penstock.models.surgery.table import build_table
from tests.system.conftest import TINY_LLAMA

MOMENTS = ("exp_avg", "exp_avg_sq")


def tensor(name: str, role: str, value: torch.Tensor) -> ForeignTensor:
    return ForeignTensor(
        name=name,
        role=role,
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(value.shape),
        num_elements=value.numel(),
        num_bytes=value.nbytes,
        file="a",
        load=lambda: value,
    )


def checkpoint(tied: bool) -> ForeignState:
    """What plain torch has after three steps of AdamW."""
    model = LlamaForCausalLM(LlamaConfig(**{**TINY_LLAMA, "tie_word_embeddings": tied}))
    tensors = [tensor(n, WEIGHT, p.detach()) for n, p in model.state_dict().items()]
    names = [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        tensors += [tensor(name, role, torch.ones_like(parameter)) for role in MOMENTS]
    group = ForeignGroup(names=tuple(names), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    steps = dict.fromkeys(names, 3)
    return ForeignState(
        kind="test", path=Path("a"), tensors=tuple(tensors), steps=steps, groups=(group,)
    )


def planned(state: ForeignState, *, tied: bool, weights_only: bool = False) -> ImportPlan:
    fields = {**TINY_LLAMA, "tie_word_embeddings": tied}
    config = parse_config(
        {
            "model": {"hf": fields, "dtype": "fp32"},
            "data": {"path": "a", "tokenizer": "byte", "sequence_length": 8},
            "train": {"steps": 9, "global_batch": 4},
            "optimizer": {"weight_decay": 0.1},
        },
        source="test",
    )
    hf_config = LlamaConfig(**fields)
    skeleton = build_skeleton(hf_config)
    table = build_table(config, hf_config)
    options = ImportOptions(weights_only=weights_only)
    return plan_import(state, config, table, skeleton, options)


@pytest.mark.parametrize("tied", [False, True])
def test_all_tensors_have_their_place(tied: bool) -> None:
    plan = planned(checkpoint(tied), tied=tied)
    assert not plan.problems
    assert (plan.step, plan.samples_seen) == (3, 12)
    assert all(each.source is not None for each in plan.assignments)
    assert any("weight decay of" in note and "norm" in note for note in plan.notes)


def test_different_tensors_are_not_tied() -> None:
    plan = planned(checkpoint(tied=False), tied=True)
    assert any("lm_head.weight differ in the checkpoint" in each for each in plan.problems)
    plan = planned(checkpoint(tied=False), tied=True, weights_only=True)
    assert any("lm_head.weight differ in the checkpoint" in each for each in plan.problems)


def test_what_does_not_fit_is_named() -> None:
    state = checkpoint(tied=False)
    lacking = replace(state, tensors=tuple(t for t in state.tensors if t.role != "exp_avg"))
    assert any(
        "has no exp_avg of any tensor" in each for each in planned(lacking, tied=False).problems
    )
    some = tuple(t for t in state.tensors if (t.name, t.role) != ("lm_head.weight", "exp_avg"))
    problems = planned(replace(state, tensors=some), tied=False).problems
    assert problems and "train.freeze" in problems[0] and "lm_head.weight" in problems[0]
    more = (*state.tensors, tensor("model.layers.99.a", WEIGHT, torch.ones(2)))
    problems = planned(replace(state, tensors=more), tied=False).problems
    assert problems and "no place for model.layers.99.a" in problems[0]
    odd = replace(state, steps={**state.steps, "lm_head.weight": 2})
    assert "steps of the tensors differ: 2, 3" in planned(odd, tied=False).problems[0]
    plan = planned(odd, tied=False, weights_only=True)
    assert not plan.problems and plan.step == 0
    assert "does not name its step" in planned(replace(state, steps={}), tied=False).problems[0]


def test_rates_have_names_of_their_place() -> None:
    state = checkpoint(tied=False)
    (group,) = state.groups
    first, *others = group.names
    groups = (replace(group, names=(first,), lr=1e-3), replace(group, names=tuple(others), lr=2e-3))
    plan = planned(replace(state, groups=groups), tied=False)
    assert [(rate.field, rate.value, rate.is_peak) for rate in plan.rates] == [
        ("lr of param_groups", 1e-3, False),
        ("lr of param_groups", 2e-3, False),
    ]
    assert plan.rates[0].tensors == first
    schedule = ForeignSchedule(file="s.pt", rates=(1e-3, 3e-3), base_rates=(1e-2, 1e-2), steps=3)
    state = replace(state, groups=groups, schedule=schedule)
    plan = planned(state, tied=False)
    assert [(rate.field, rate.value, rate.is_peak) for rate in plan.rates] == [
        ("_last_lr of s.pt", 1e-3, False),
        ("base_lrs of s.pt", 1e-2, True),
        ("lr of param_groups", 2e-3, False),  # both, as they differ
        ("_last_lr of s.pt", 3e-3, False),
    ]
    assert not any("last_epoch" in note for note in plan.notes)
    plan = planned(replace(state, schedule=replace(schedule, steps=2)), tied=False)
    assert any("last_epoch is 2, the optimizer has 3 steps" in note for note in plan.notes)
    assert planned(state, tied=False, weights_only=True).rates == ()
