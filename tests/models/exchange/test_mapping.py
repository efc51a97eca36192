"""Checkpoints that do not fit a configuration are refused before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.config.schema import parse_config
from penstock.daemons.scheduler.machine.position import LIMIT
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


def planned(
    state: ForeignState,
    *,
    tied: bool,
    weights_only: bool = False,
    samples_seen: int | None = None,
    freeze: Sequence[str] = (),
    **optimizer: Any,
) -> ImportPlan:
    fields = {**TINY_LLAMA, "tie_word_embeddings": tied}
    config = parse_config(
        {
            "model": {"hf": fields, "dtype": "fp32"},
            "data": {"path": "a", "tokenizer": "byte", "sequence_length": 8},
            "train": {"steps": 9, "global_batch": 4, "freeze": list(freeze)},
            "optimizer": {"weight_decay": 0.1, **optimizer},
        },
        source="test",
    )
    hf_config = LlamaConfig(**fields)
    skeleton = build_skeleton(hf_config)
    table = build_table(config, hf_config)
    options = ImportOptions(weights_only=weights_only, samples_seen=samples_seen)
    return plan_import(state, config, table, skeleton, options)


@pytest.mark.parametrize("tied", [False, True])
def test_all_tensors_have_their_place(tied: bool) -> None:
    plan = planned(checkpoint(tied), tied=tied)
    assert not plan.problems
    assert (plan.step, plan.samples_seen) == (3, 12)
    assert all(each.source is not None for each in plan.assignments)
    assert any("weight decay of" in note and "norm" in note for note in plan.notes)


def test_weights_come_without_moments_and_without_the_step() -> None:
    plan = planned(checkpoint(tied=False), tied=False, weights_only=True, samples_seen=8)
    assert not plan.problems and (plan.step, plan.samples_seen) == (0, 8)
    sources = {each.array: set() for each in plan.assignments}
    for each in plan.assignments:
        sources[each.array].add(None if each.source is None else each.source.role)
    assert sources == {"master": {WEIGHT}, "exp_avg": {None}, "exp_avg_sq": {None}}


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
    none = tuple(t for t in state.tensors if t.name != "lm_head.weight")
    for freeze, remedy in (
        ([], "give the configuration of the model that was trained"),
        (["lm_head"], "save it again with its frozen weights"),
    ):
        problems = planned(replace(state, tensors=none), tied=False, freeze=freeze).problems
        assert "has no weights of lm_head.weight" in problems[0] and problems[0].endswith(remedy)
    more = (*state.tensors, tensor("model.layers.99.a", WEIGHT, torch.ones(2)))
    problems = planned(replace(state, tensors=more), tied=False).problems
    assert problems and "no place for model.layers.99.a" in problems[0]
    more = (*more, tensor("model.layers.99.a", "exp_avg", torch.ones(2)))
    assert planned(replace(state, tensors=more), tied=False).problems == problems, "one name"
    odd = replace(state, steps={**state.steps, "lm_head.weight": 2})
    (problem,) = planned(odd, tied=False).problems
    assert "steps of the tensors differ: 2, 3" in problem
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


def test_another_optimizers_arrays_are_refused() -> None:
    """Lion's exp_avg is not Adam's, though both have the name."""
    (problem,) = planned(checkpoint(tied=False), tied=False, name="lion").problems
    assert "keeps exp_avg_sq, the configuration's exp_avg; set optimizer.name" in problem
    assert not planned(checkpoint(tied=False), tied=False, name="lion", weights_only=True).problems
    (group,) = checkpoint(tied=False).groups
    state = replace(
        checkpoint(tied=False), groups=(replace(group, others={"decoupled_weight_decay": False}),)
    )
    notes = planned(state, tied=False).notes
    assert any("applies weight decay to gradients, optimizer.name adamw" in each for each in notes)
    notes = planned(state, tied=False, name="adam").notes
    assert not any("applies weight decay" in each for each in notes)


@pytest.mark.parametrize("key", ["amsgrad", "maximize"])
def test_steps_of_another_rule_are_refused(key: str) -> None:
    (group,) = checkpoint(tied=False).groups
    for is_on in (False, True):
        groups = (group, replace(group, others={key: is_on}))
        plan = planned(replace(checkpoint(tied=False), groups=groups), tied=False)
        refused = [problem for problem in plan.problems if f"a: {key} is on, and" in problem]
        assert len(refused) == is_on


def test_the_optimizers_own_problem_is_the_only_one() -> None:
    state = checkpoint(tied=False)
    named = [
        replace(each, name=f"parameter {number}") if each.role != WEIGHT else each
        for number, each in enumerate(state.tensors)
    ]
    state = replace(state, tensors=tuple(named), state_problems=("p; give --weights-only",))
    assert planned(state, tied=False).problems == ("p; give --weights-only",)
    assert planned(state, tied=False, weights_only=True).problems == ()


def test_integers_are_no_moments() -> None:
    state = checkpoint(tied=False)
    wrong = [
        tensor(each.name, each.role, each.load().int()) if each.role == "exp_avg" else each
        for each in state.tensors
    ]
    (problem,) = planned(replace(state, tensors=tuple(wrong)), tied=False).problems
    assert problem.startswith("a: exp_avg of") and "is of type int32" in problem


def test_numbers_of_eight_bits_are_refused() -> None:
    state = checkpoint(tied=False)
    first = state.tensors[0]
    narrow = tensor(first.name, first.role, first.load().to(torch.float8_e4m3fn))
    changed = replace(state, tensors=(narrow, *state.tensors[1:]))
    (problem,) = planned(changed, tied=False).problems
    assert "is of type float8_e4m3fn; give fp32, fp16 or bf16" in problem


def test_a_tensor_that_is_there_twice_is_refused() -> None:
    state = checkpoint(tied=False)
    for each in (state.tensors[0], state.tensors[-1]):
        repeated = replace(state, tensors=(*state.tensors, replace(each, file="b")))
        (problem,) = planned(repeated, tied=False).problems
        assert f"has {each.role} of {each.name} twice, in a and in b" in problem
    assert not planned(repeated, tied=False, weights_only=True).problems, "moments stay behind"


def test_settings_of_the_model_are_compared() -> None:
    settings = LlamaConfig(**{**TINY_LLAMA, "tie_word_embeddings": False}).to_dict()
    state = replace(checkpoint(tied=False), model_settings={**settings, "use_cache": False})
    same = planned(state, tied=False).notes
    assert not any("config.json" in note for note in same)
    state = replace(state, model_settings={**settings, "rms_norm_eps": 0.5, "_name_or_path": "b"})
    notes = [note for note in planned(state, tied=False).notes if "config.json" in note]
    (note,) = notes
    assert note.startswith("rms_norm_eps is 0.5 in the checkpoint's config.json, 1e-06 in the")
    state = replace(state, model_settings={"model_type": "gpt2", "n_embd": 4})
    notes = [note for note in planned(state, tied=False).notes if "config.json" in note]
    assert len(notes) == 1 and notes[0].startswith("model_type is gpt2")


def test_counts_have_bounds() -> None:
    state = checkpoint(tied=False)
    (problem,) = planned(state, tied=False, samples_seen=10**30).problems
    assert f"samples seen: {10**30} is no count" in problem and "--samples-seen" in problem
    for count, accepted in ((LIMIT - 1, True), (LIMIT, False)):
        assert (planned(state, tied=False, samples_seen=count).problems == ()) is accepted
    many = replace(state, steps=dict.fromkeys(state.steps, 10**30), samples_seen=0)
    assert any(
        f"the step: {10**30} is no count" in each for each in planned(many, tied=False).problems
    )
    done = replace(state, steps=dict.fromkeys(state.steps, 9))
    assert any("nothing is left to train" in note for note in planned(done, tied=False).notes)


def test_another_batch_is_a_note() -> None:
    state = replace(checkpoint(tied=False), samples_seen=24, samples_note="how")
    notes = planned(state, tied=False).notes
    assert "how" in notes
    assert "train.global_batch is 4, the checkpoint has 24 samples in 3 steps" in notes
    notes = planned(state, tied=False, samples_seen=12).notes
    assert not any("how" in note or "global_batch" in note for note in notes)


def test_weights_alone_have_one_problem() -> None:
    state = checkpoint(tied=False)
    weights = tuple(each for each in state.tensors if each.role == WEIGHT)
    state = replace(state, tensors=weights, steps={}, groups=())
    assert planned(state, tied=False).problems == (
        "a: has no state of an optimizer; give --weights-only",
    )
    assert planned(state, tied=False, weights_only=True).problems == ()
