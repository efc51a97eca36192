"""The simulator reproduces bubble formulas and figures 2 and 8 of the SPipe paper."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from penstock.planner.build import build_plan
from penstock.planner.costs import BlockCost, CostModel, Costs, block_costs
from penstock.planner.render import svg, timeline
from penstock.planner.simulate import (
    Lane,
    OptimizerStart,
    Simulation,
    simulate,
    simulate_config,
)
from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError
from penstock.protocol.plan import Plan
from penstock.shm.table import BlockTable

Tables = Callable[..., BlockTable]
Configs = Callable[..., Config]
Build = Callable[..., Plan]


@pytest.fixture(name="build")
def _build(make_table: Tables, make_config: Configs) -> Build:
    def build(scheme: str, num_blocks: int, **config: Any) -> Plan:
        return build_plan(make_config(scheme, **config), make_table(num_blocks))

    return build


@pytest.mark.parametrize("scheme", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_bubble_of_gpipe_and_1f1b(scheme: str, p: int, m: int, build: Build) -> None:
    costs = Costs(blocks=(BlockCost(forward_s=1.0, backward_s=2.0),) * p)
    plan = build(scheme, p, workers=p, micro_batches=m)
    simulation = simulate(plan, costs, devices_per_node=p)
    assert simulation.bubble_ratio == pytest.approx((p - 1) / (m + p - 1))
    assert simulation.pipeline_s == pytest.approx(3.0 * (m + p - 1))


@pytest.mark.parametrize(("p", "k", "m"), [(4, 2, 4), (2, 3, 4), (4, 1, 8), (1, 2, 2)])
def test_bubble_of_mobius(p: int, k: int, m: int, build: Build) -> None:
    """With recomputation counted into the backward, as the paper draws it."""
    costs = Costs(blocks=(BlockCost(forward_s=1.0, backward_s=2.0),) * (p * k))
    plan = build("mobius", p * k, workers=p, micro_batches=m, forward_stages=p * k)
    simulation = simulate(plan, costs, devices_per_node=p)
    assert simulation.bubble_ratio == pytest.approx((p - 1) / (k * m + p - 1))


@pytest.mark.parametrize(("p", "d", "m"), [(4, 2, 4), (2, 3, 4), (4, 2, 4), (1, 2, 2)])
def test_bubble_of_spipe(p: int, d: int, m: int, build: Build) -> None:
    """Backward stages as long as forward stages: only the skew of p - 1 steps remains."""
    num_forward = 2 * p
    unit = BlockCost(forward_s=1.0 / d, backward_s=1.0)
    plan = build(
        "spipe",
        num_forward * d,
        workers=p,
        micro_batches=m,
        forward_stages=num_forward,
        backward_stages=num_forward * d,
    )
    simulation = simulate(plan, Costs(blocks=(unit,) * (num_forward * d)), devices_per_node=p)
    steps = 2 * m + 2 * d * m
    assert simulation.bubble_ratio == pytest.approx((p - 1) / (steps + p - 1))


_PAPER = BlockCost(forward_s=0.5, backward_s=1.0, fetch_s=1.0, offload_s=1.0, optimizer_s=2.0)
"""Half a forward stage of figures 2 and 8: see :func:`test_figures_2_and_8`."""


def _paper_mobius(build: Build) -> Simulation:
    plan = build("mobius", 16, workers=4, micro_batches=4, forward_stages=8)
    return simulate(
        plan,
        Costs(blocks=(_PAPER,) * 16),
        devices_per_node=1,
        optimizer_start=OptimizerStart.FLUSH,
    )


def _paper_spipe(build: Build) -> Simulation:
    plan = build("spipe", 16, workers=4, micro_batches=4, forward_stages=8, backward_stages=16)
    return simulate(plan, Costs(blocks=(_PAPER,) * 16), devices_per_node=1)


def test_figures_2_and_8(build: Build) -> None:
    """4 devices, 4 micro-batches, 8 forward and 16 backward stages: SPipe 25 %, Mobius 47 %.

    The paper does not print the units of its figures. Its two ratios follow from these: a forward
    of a stage takes 1, the backward (recomputation included) of a fine stage 1 too, so that of a
    whole stage 2; weights of a forward stage (p_i) and gradients of a coarse stage (g_i) take 2, of
    a fine stage 1; the optimizer takes 4 for a coarse stage, 2 for a fine one, with one lane per
    device; the first fetch and the optimizer's tail count as bubbles; the optimizer of Mobius
    starts when all gradients are there. Devices work 24 units: Mobius takes 2 + 33 + 2 + 8 = 45,
    SPipe 2 + 27 + 1 + 2 = 32.
    """
    mobius, spipe = _paper_mobius(build), _paper_spipe(build)
    assert [device.busy_s for device in mobius.devices + spipe.devices] == [24.0] * 8
    assert (mobius.makespan_s, spipe.makespan_s) == (45.0, 32.0)
    assert f"{mobius.idle_ratio:.0%} {spipe.idle_ratio:.0%}" == "47% 25%"
    # Without transfers and optimizer: the pipelines alone.
    assert (mobius.pipeline_s, spipe.pipeline_s) == (35.0, 29.0)


def test_our_mobius_beats_the_papers(build: Build) -> None:
    """Optimizers start on offload, and recomputation before the gradient arrives."""
    plan = build("mobius", 16, workers=4, micro_batches=4, forward_stages=8)
    block = BlockCost(
        forward_s=0.5, recompute_s=0.5, backward_s=0.5, fetch_s=1.0, offload_s=1.0, optimizer_s=2.0
    )
    simulation = simulate(plan, Costs(blocks=(block,) * 16), devices_per_node=1)
    assert simulation.pipeline_s < 35.0
    assert simulation.makespan_s < 45.0


def test_transfers_delay_their_consumers(build: Build) -> None:
    """Two devices, one micro-batch: forward 1, transfer 0.5 + 0.25, forward 1, backward 2,
    transfer, 2.
    """
    costs = Costs(
        blocks=(BlockCost(forward_s=1.0, backward_s=2.0, output_s=0.5),) * 2, latency_s=0.25
    )
    simulation = simulate(build("gpipe", 2, workers=2, micro_batches=1), costs, devices_per_node=2)
    assert simulation.pipeline_s == pytest.approx(1.0 + 0.75 + 1.0 + 2.0 + 0.75 + 2.0)
    links = [s for s in simulation.spans if s.lane is Lane.LINK]
    assert [(s.label, s.place, s.peer) for s in links] == [
        ("activation 0 0", 0, 1),
        ("gradient 1 0", 1, 0),
    ]


def test_weights_are_prefetched_during_the_stage_before(build: Build) -> None:
    """Mobius on one device: only the first fetch is exposed while a stage takes longer than a
    fetch.
    """
    costs = Costs(blocks=(BlockCost(forward_s=1.0, backward_s=2.0, fetch_s=1.5),) * 4)
    plan = build("mobius", 4, workers=1, micro_batches=2, forward_stages=4)
    simulation = simulate(plan, costs, devices_per_node=1)
    assert simulation.pipeline_s == pytest.approx(1.5 + 24.0)


def test_optimizers_of_a_node_share_its_rate(build: Build) -> None:
    costs = Costs(blocks=(BlockCost(forward_s=1.0, backward_s=1.0, optimizer_s=10.0),) * 2)
    plan = build("gpipe", 2, workers=2, micro_batches=1)
    shared = simulate(plan, costs, devices_per_node=2)
    apart = simulate(plan, costs, devices_per_node=1)
    # Gradients of stage 1 are there at 3, those of stage 0 at 4.
    assert (apart.makespan_s, apart.optimizer_tail_s) == (14.0, 10.0)
    assert (shared.makespan_s, shared.optimizer_tail_s) == (23.0, 19.0)


def test_simulation_of_a_configuration(make_table: Tables, make_config: Configs) -> None:
    config, table = make_config("spipe", workers=2), make_table(12)
    plan = build_plan(config, table)
    simulation = simulate_config(config, table, plan)
    summary = simulation.summary()
    assert summary["makespan_seconds"] == simulation.makespan_s > 0.0
    assert 0.0 < summary["bubble_ratio"] < 1.0
    assert len(summary["peak_bytes"]) == 2
    # Two weight buffers of at most three blocks each, 4 bytes a parameter.
    assert 0 < summary["peak_bytes"][0]["weights"] <= 2 * 3 * 1024 * 4


def test_block_costs_follow_the_rates(make_table: Tables) -> None:
    model = CostModel(
        device_flops=1e6,
        backward_ratio=2.0,
        fetch_bandwidth=4096.0,
        offload_bandwidth=2048.0,
        transfer_bandwidth=512.0,
        optimizer_rate=512.0,
    )
    assert block_costs(make_table(1), model, tokens=10).blocks == (
        BlockCost(
            forward_s=0.01,
            recompute_s=0.01,
            backward_s=0.02,
            fetch_s=1.0,
            offload_s=2.0,
            optimizer_s=2.0,
            output_s=1.25,
        ),
    )


def test_cost_model_profile_round_trip() -> None:
    model = CostModel(device_flops=3.5e12)
    assert CostModel.from_json(model.to_json()) == model
    assert CostModel.from_json('{"optimizer_rate": 2}') == CostModel(optimizer_rate=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object with keys among device_flops"),
        ('{"speed": 1}', "expected an object with keys among device_flops"),
        ('{"device_flops": 0}', "device_flops is 0, expected a positive number"),
        ('{"device_flops": "fast"}', "device_flops is 'fast'"),
        ('{"device_flops": NaN}', "device_flops is nan"),
        ('{"device_flops": true}', "device_flops is True"),
    ],
)
def test_bad_profiles_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CostModel.from_json(text)


def test_timeline_of_figure_8(build: Build) -> None:
    assert timeline(_paper_spipe(build), width=64) == (
        "device 0    |....F0F0F0F0F4F4F4F4BbBbBbBbBbBbBbBbB7B7B7B7B3B3B3B3............|\n"
        "device 1    |......F1F1F1F1F5F5F5F5BbBbBbBbBbBbBbBbB6B6B6B6B2B2B2B2..........|\n"
        "device 2    |........F2F2F2F2F6F6F6F6BbBbBbBbB9B9B9B9B5B5B5B5B1B1B1B1........|\n"
        "device 3    |..........F3F3F3F3F7F7F7F7BbBbBbBbB8B8B8B8B4B4B4B4B0B0B0B0......|\n"
        "optimizer 0 |..............................U15u....U11u....U7uu....U3uu......|\n"
        "optimizer 1 |................................U14u....U10u....U6uu....U2uu....|\n"
        "optimizer 2 |..................................U13u....U9uu....U5uu....U1uu..|\n"
        "optimizer 3 |....................................U12u....U8uu....U4uu....U0uu|\n"
    )


def test_svg_has_every_span_and_parses(build: Build) -> None:
    simulation = _paper_spipe(build)
    root = ElementTree.fromstring(svg(simulation))
    groups = root.findall("{http://www.w3.org/2000/svg}g")
    drawn = [span for span in simulation.spans if span.lane is not Lane.LINK]
    assert len(groups) == len(drawn) > 100
    assert any("bubbles 17.2%" in (text.text or "") for text in root.iter() if text.text)


CONFIGURATIONS = [
    {"scheme": "gpipe", "workers": 4, "micro_batches": 3, "recompute": "full"},
    {"scheme": "1f1b", "workers": 4, "micro_batches": 7},
    {"scheme": "mobius", "workers": 2, "micro_batches": 5, "forward_stages": 6},
    {"scheme": "spipe", "workers": 4, "micro_batches": 5},
    {"scheme": "spipe", "workers": 1, "micro_batches": 1, "forward_stages": 1},
]


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=lambda c: f"{c['scheme']}-{c['workers']}")
def test_conservation(config: dict[str, Any], make_table: Tables, make_config: Configs) -> None:
    """All work is done once, no resource serves two things at a time, and order costs no less than
    work.
    """
    table = make_table(13, costs=[1.0, *[3.0] * 11, 5.0])
    plan = build_plan(make_config(**config), table)
    costs = block_costs(table, CostModel(device_flops=100.0, instruction_s=0.0), tokens=4)
    simulation = simulate(plan, costs, devices_per_node=2)
    whole = costs.of(range(13))
    recomputed = any("R 0 0" in map(str, program) for program in plan.programs)
    per_micro_batch = (1 + recomputed) * whole.forward_s + whole.backward_s
    busy_s = sum(device.busy_s for device in simulation.devices)
    assert busy_s == pytest.approx(per_micro_batch * plan.num_microbatches)
    assert sum(
        s.end_s - s.start_s for s in simulation.spans if s.lane is Lane.OPTIMIZER
    ) == pytest.approx(whole.optimizer_s)
    lanes: dict[tuple[Lane, int], list[tuple[float, float]]] = {}
    for span in simulation.spans:
        if span.lane is not Lane.LINK:
            lanes.setdefault((span.lane, span.place), []).append((span.start_s, span.end_s))
    for intervals in lanes.values():
        intervals.sort()
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(intervals))
    assert simulation.makespan_s >= simulation.pipeline_s >= busy_s / plan.num_devices
