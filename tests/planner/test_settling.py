"""Which blocks are settled early: what is chosen, on cases that can be calculated by hand; what is
configured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import Config, parse_config
from penstock.host.errors import ConfigError
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.cost.emulation import Emulation
from penstock.planner.cost.sources import Prices
from penstock.planner.planning.configured import build_plan
from penstock.planner.planning.overlapped_updates import choose_overlap, chooses_overlap
from penstock.planner.planning.pipeline import PlanContext
from penstock.planner.simulate import simulate
from penstock.protocol.plan.instructions import parse_program
from penstock.protocol.plan.plan import Plan, StageRange
from penstock.shm.table import BlockTable
from tests.planner.conftest import planned

Tables = Callable[..., BlockTable]
Configs = Callable[..., Config]

STAGES = tuple(StageRange(start=block, stop=block + 1, device=0) for block in range(4))


def plan(update: str = "") -> Plan:
    """Gradients of blocks 3, 2, 1 and 0 come at 5, 6, 7 and 8, where nothing slows the device."""
    program = parse_program(
        "device 0: F 0 0 keep=all; F 1 0 keep=all; F 2 0 keep=all; F 3 0 keep=all;"
        f" B 3 0; OG 3; B 2 0; OG 2; {update} B 1 0; OG 1; B 0 0; OG 0"
    )
    return Plan(
        scheme="by hand",
        num_devices=1,
        num_microbatches=1,
        forward_stages=STAGES,
        backward_stages=STAGES,
        programs=program,
        evaluation=program,
    )


def chosen(parameters: float, from_plan: Plan | None = None, **cluster: float) -> Plan:
    block = BlockCost(forward_s=1.0, backward_input_s=1.0, parameters=parameters)
    prices = Prices(
        costs=Costs(blocks=(block,) * 4),
        cluster=Cluster(devices_per_node=1, **cluster),  # type: ignore[arg-type]
    )
    context = PlanContext(prices=prices, stops_early=True)
    return choose_overlap(from_plan or plan(), context)


@pytest.mark.parametrize(
    ("parameters", "cluster", "early"),
    [
        # Advances take 2 and end at 13. Three settles of 26/15 end at 5.2, a sweep later at 7.2,
        # and previews of 16/15 at 10.4; a fourth settle would keep all waiting until 6.9.
        pytest.param(2.0, {"dram_bandwidth": 30.0}, (0, 1, 2), id="saturated memory"),
        # The same times, measured: of advance 2, preview 2/1.25, settle 2/1.3.
        pytest.param(
            2.0,
            {"optimizer_rate": 1.0, "preview_speed": 1.25, "settle_speed": 1.3},
            (0, 1, 2),
            id="measured",
        ),
        # Four advances take 80; what is settled early takes 28 instead of 20.
        pytest.param(2.0, {"dram_bandwidth": 3.0}, (), id="nothing but optimizer work"),
        # A preview takes as long as an advance.
        pytest.param(2.0, {"optimizer_rate": 1.0}, (), id="cores are the limit"),
        # Sweeps of 1/4, so only the last one is behind the backwards.
        pytest.param(0.25, {"dram_bandwidth": 30.0}, (0,), id="hidden but for the last"),
        pytest.param(2.0, {"optimizer_rate": inf}, (), id="no tail"),
    ],
)
def test_as_many_of_the_last_blocks_as_shorten_the_step(
    parameters: float, cluster: dict[str, float], early: tuple[int, ...]
) -> None:
    assert chosen(parameters, **cluster).settled_early == early


def test_blocks_of_devices_are_not_the_choices_and_an_older_choice_does_not_count() -> None:
    found = chosen(2.0, plan("U 2;"), dram_bandwidth=30.0, device_optimizer_rate=1e9)
    assert 0 in found.settled_early and 2 not in found.settled_early
    found.validate_shape()
    before = replace(plan(), settled_early=(3,))
    assert chosen(0.25, before, dram_bandwidth=30.0).settled_early == (0,)


def configured(config: Config, **optimizer: str) -> Config:
    return config.model_copy(
        update={"optimizer": config.optimizer.model_copy(update=optimizer)},
    )


def test_keys_and_files_say_it_for_all_blocks(
    make_table: Tables, make_config: Configs, tmp_path: Path
) -> None:
    table, config = make_table(4), make_config("gpipe")
    assert build_plan(config, table).settled_early == ()
    early = build_plan(configured(config, settle="early"), table)
    assert early.settled_early == (0, 1, 2, 3)
    file = tmp_path / "plan.json"
    file.write_text(replace(early, settled_early=(0, 2)).to_json())
    from_file = make_config("gpipe", file=str(file))
    assert planned(from_file, table).plan.settled_early == (0, 2)
    assert build_plan(configured(from_file, settle="advance"), table).settled_early == ()
    with pytest.raises(ConfigError, match=r"settles 2 blocks early .*settle advance"):
        build_plan(configured(from_file, rollback="arithmetic"), table)


def test_auto_needs_rates_and_cores_of_its_own(make_config: Configs) -> None:
    config = make_config("gpipe")

    def on(device: str, **keys: Any) -> Config:
        cluster = config.cluster.model_copy(update={"device": device})
        schedule = config.schedule.model_copy(update=keys)
        return config.model_copy(update={"cluster": cluster, "schedule": schedule})

    profile = Path("profile.json")
    assert chooses_overlap(on("cuda", profile=profile))
    assert chooses_overlap(on("emulated:analytic:V100-32:gpt3-1.3b"))
    foreign = config.emulation.model_copy(update={"optimizer_start": "flush"})
    emulated = on("emulated:analytic:V100-32:gpt3-1.3b")
    assert not chooses_overlap(emulated.model_copy(update={"emulation": foreign}))
    assert not chooses_overlap(on("cuda"))
    assert not chooses_overlap(on("cpu", profile=profile))
    assert not chooses_overlap(on("cuda", profile=profile, file=Path("plan.json")))
    for optimizer in ({"settle": "advance"}, {"rollback": "arithmetic"}, {"speculate": "never"}):
        assert not chooses_overlap(configured(on("cuda", profile=profile), **optimizer))


def test_the_choice_beats_both_ways_on_a_host_with_saturated_memory() -> None:
    """7B parameters on four GPUs. Split masters: what is settled early has one copy of gradients;
    the memory table tells both.
    """
    config = parse_config(
        {
            "model": {"dtype": "bf16"},
            "data": {"path": "@stdlib", "sequence_length": 2048},
            "train": {"global_batch": 8, "micro_batch": 1},
            "optimizer": {"master": "split", "grad_dtype": "bf16"},
            "schedule": {"scheme": "spipe"},
            "cluster": {"workers": 4, "device": "emulated:analytic:A100-40:llama2-7b"},
        }
    )
    emulation = Emulation.of(config)
    run = planned(config, emulation.table)
    every = tuple(range(run.plan.num_blocks))
    steps = {
        early: simulate(
            replace(run.plan, settled_early=early),
            emulation.costs,
            emulation.cluster,
            optimizer=emulation.optimizer,
            stops_early=True,
        ).makespan_s
        for early in ((), run.plan.settled_early, every)
    }
    choice = steps.pop(run.plan.settled_early)
    assert choice < 0.95 * min(steps.values())
    blocks, early = emulation.table.blocks, set(run.plan.settled_early)
    held = {row.use: row.num_bytes for row in run.rows if row.resource == "emulated"}
    assert held["grads, early"] == sum(2 * blocks[b].trainable_elements for b in early)
    assert held["grads, advance"] == sum(
        2 * 2 * block.trainable_elements for block in blocks if block.index not in early
    )
