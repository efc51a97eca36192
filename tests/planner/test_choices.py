"""The choices of ``schedule: auto`` for models of known shapes on known machines."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.schema import Config, parse_config
from penstock.planner.cost.catalogue import GPUS
from penstock.planner.cost.emulation import Emulation
from penstock.planner.cost.profile import guess_of_gpu
from penstock.planner.planning import auto
from penstock.planner.planning import plan_search as tuning
from penstock.planner.planning.auto import WORK, choose
from penstock.planner.planning.configured import trainable_plan
from penstock.planner.planning.pipeline import try_plan
from penstock.planner.planning.plan_search import Progress, Search
from penstock.planner.planning.pricing import config_context
from penstock.planner.planning.search_space import Space
from penstock.planner.simulate import Simulation, simulate
from penstock.protocol.plan.plan import Plan
from penstock.shm.table import BlockTable, DType
from tests.planner.conftest import AnyMachine


def config_of(device: str, **sections: dict[str, Any]) -> Config:
    """A configuration that leaves schedule and micro-batch open; bf16 weights."""
    base: dict[str, dict[str, Any]] = {
        "model": {"hf": {"model_type": "llama"}, "dtype": "bf16"},
        "data": {"path": "@stdlib", "sequence_length": 512},
        "train": {"global_batch": 8, "micro_batch": "auto"},
        "schedule": {"scheme": "auto"},
        "cluster": {"device": device, "workers": 2},
    }
    return parse_config({name: {**base.get(name, {}), **sections.get(name, {})} for name in base})


def table_of(model: str, **sections: dict[str, Any]) -> BlockTable:
    """The block table of a model of the catalogue, at full size."""
    return Emulation.of(config_of(f"emulated:analytic:H100:{model}", **sections)).table


def test_workers_on_cpus_train_one_pipeline_each_and_keep_everything() -> None:
    """As README's fine-tuning does. Streamed plans hide copies and sweeps behind computation only
    where these have cores of their own.
    """
    winner = choose(config_of("cpu"), table_of("gpt3-760m"), AnyMachine())
    schedule = winner.config.schedule
    assert (schedule.scheme, schedule.replicas, schedule.recompute) == ("1f1b", 2, "none")
    assert not schedule.passes


ONE_GPU: dict[str, dict[str, Any]] = {
    "cluster": {"workers": 1},
    "data": {"sequence_length": 2048},
    "train": {"global_batch": 32},
}


@pytest.mark.parametrize(
    ("gpu", "model", "keeps"),
    [
        ("H200", "gpt3-125m", (True, True)),
        ("RTX4090", "gpt3-125m", (True, True)),
        ("H200", "llama3-1b", (True, True)),
        ("H200", "gpt3-2.7b", (True, True)),
        ("H200", "llama2-7b", (True, True)),
        ("RTX4090", "llama2-7b", (False, False)),
        ("H200", "llama2-70b", (False, False)),
    ],
)
def test_one_gpu_keeps_what_fits(
    gpu: str, model: str, keeps: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are streamed, and activations recomputed, only where a device has no room for both.
    A search simulates a bounded number of plans.
    """
    simulated: list[Plan] = []
    searches: list[Search] = []

    def counting(plan: Plan, *arguments: Any, **options: Any) -> Simulation:
        simulated.append(plan)
        return simulate(plan, *arguments, **options)

    class Kept(Search):
        def run(self, space: Space, progress: Progress = lambda done, of, best: None) -> None:
            searches.append(self)
            super().run(space, progress)

    monkeypatch.setattr(tuning, "simulate", counting)
    monkeypatch.setattr(auto, "Search", Kept)
    table = table_of(model, **ONE_GPU)
    guess = guess_of_gpu(gpu, DType.BF16)
    winner = choose(config_of("cuda", **ONE_GPU), table, AnyMachine(), guess=guess)
    best = searches[0].best
    assert best is not None and best.keeps == keeps, winner
    assert best.device_bytes <= GPUS[gpu].memory_bytes
    plan = trainable_plan(winner.config, table, config_context(winner.config, table, guess))
    assert plan == best.plan, "the winner is the plan that train makes"
    longest = max(map(num_instructions, simulated))
    assert sum(map(num_instructions, simulated)) <= WORK + 2 * longest
    assert len(simulated) <= 500
    lines = str(winner).splitlines()
    words = ("stay on devices", "nothing is recomputed"), ("are streamed", "are recomputed")
    assert all(word in lines[1] for word in words[not keeps[0]])
    assert ("does not fit" in lines[2]) == (not keeps[0])


@pytest.mark.parametrize(("model", "share"), [("llama2-7b", 0.015), ("llama3-8b", 0.03)])
def test_the_end_of_a_streamed_step_is_short(model: str, share: float) -> None:
    """The share of a step behind the last gradient: with 32 K tokens of vocabulary, and with 128 K.
    The host of the guess updates 1.5 billion parameters a second, so the GPU takes the last blocks.
    """
    table, guess = table_of(model, **ONE_GPU), guess_of_gpu("H200", DType.BF16)
    sections: dict[str, dict[str, Any]] = {
        **ONE_GPU,
        "train": {"global_batch": 32, "micro_batch": 4},
    }
    blocks, tails, steps = len(table.blocks), [], []
    for passes in (["keep-graphs"], ["keep-graphs", "device-update"]):
        schedule = {"scheme": "mobius", "forward_stages": blocks, "recompute": "full"}
        config = config_of("cuda", **sections, schedule={**schedule, "passes": passes})
        context = config_context(config, table, guess)
        plan = trainable_plan(config, table, context)
        step = try_plan(plan, context)
        tails.append(step.optimizer_tail_s / step.makespan_s)
        steps.append(step.makespan_s)
    assert tails[1] <= share < tails[0] and steps[1] < 0.98 * steps[0]
    assert set(plan.backward_stages[0].blocks) <= set(plan.updates)


def num_instructions(plan: Plan) -> int:
    return sum(map(len, plan.programs))


def test_a_micro_batch_is_chosen_within_the_memory_of_the_gpu() -> None:
    """Also where the schedule is the user's."""
    table = table_of("gpt3-1.3b", **ONE_GPU)
    config = config_of("cuda", **ONE_GPU, schedule={"scheme": "1f1b", "recompute": "none"})
    sizes = [
        choose(config, table, AnyMachine(), guess=guess_of_gpu(gpu, DType.BF16)).config
        for gpu in ("RTX4090", "H200")
    ]
    small, large = (size.train.micro_batch for size in sizes)
    assert small < large
