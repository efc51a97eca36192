"""The simulator reproduces bubble formulas and figures 2 and 8 of the SPipe paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from penstock.config.optimizers import OptimizerName
from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.planner.cost.cluster import ADVANCE, SYNCHRONOUS, Cluster
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.planning.configured import build_plan
from penstock.planner.planning.pipeline import try_plan
from penstock.planner.planning.pricing import config_context
from penstock.planner.schedule.schedule import lower
from penstock.planner.schemes import SCHEMES
from penstock.planner.simulate import Simulation, simulate
from penstock.protocol.plan.instructions import parse_program
from penstock.protocol.plan.plan import Plan, StageRange
from penstock.protocol.plan.semantics import Lane
from penstock.shm.table import BlockTable

UNIT = BlockCost(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)


def make_plan(scheme: str, num_blocks: int, devices: int, micro_batches: int, **wish: Any) -> Plan:
    request = ScheduleRequest(
        scheme=scheme, num_devices=devices, num_microbatches=micro_batches, **wish
    )
    return lower(build_schedule(request, [1.0] * num_blocks))


def programs_plan(text: str, *, num_blocks: int | None = None) -> Plan:
    """A plan of one stage per device (or per block), with hand-written programs."""
    programs = parse_program(text)
    devices = len(programs)
    num_stages = num_blocks or devices
    stages = tuple(StageRange(start=i, stop=i + 1, device=i % devices) for i in range(num_stages))
    return Plan(
        scheme="by hand",
        num_devices=devices,
        num_microbatches=4,
        forward_stages=stages,
        backward_stages=stages,
        programs=programs,
        evaluation=programs,
    )


def spans_of(simulation: Simulation, *lanes: Lane) -> list[tuple[str, int, float, float]]:
    return [(s.label, s.place, s.start_s, s.end_s) for s in simulation.spans if s.lane in lanes]


@pytest.mark.parametrize("scheme", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_bubble_of_gpipe_and_1f1b(scheme: str, p: int, m: int) -> None:
    plan = make_plan(scheme, p, p, m, recompute="none")
    simulation = simulate(plan, Costs(blocks=(UNIT,) * p), Cluster(devices_per_node=p))
    assert simulation.bubble_ratio == pytest.approx((p - 1) / (m + p - 1))
    assert simulation.pipeline_s == 3.0 * (m + p - 1)


@pytest.mark.parametrize(("p", "k", "m"), [(4, 2, 4), (2, 3, 4), (4, 1, 8), (1, 2, 2)])
def test_bubble_of_mobius(p: int, k: int, m: int) -> None:
    """With recomputation counted into the backward, as the paper draws it."""
    plan = make_plan("mobius", p * k, p, m, forward_stages=p * k, recompute="full")
    simulation = simulate(plan, Costs(blocks=(UNIT,) * (p * k)), Cluster(devices_per_node=p))
    assert simulation.bubble_ratio == pytest.approx((p - 1) / (k * m + p - 1))


@pytest.mark.parametrize(("p", "d", "m"), [(4, 2, 4), (2, 3, 4), (1, 2, 2)])
def test_bubble_of_spipe(p: int, d: int, m: int) -> None:
    """Backward stages as long as forward stages: only the skew of p - 1 steps remains."""
    num_forward = 2 * p
    block = BlockCost(forward_s=1.0 / d, backward_input_s=0.5, backward_weight_s=0.5)
    plan = make_plan(
        "spipe",
        num_forward * d,
        p,
        m,
        forward_stages=num_forward,
        backward_stages=num_forward * d,
    )
    costs = Costs(blocks=(block,) * (num_forward * d))
    simulation = simulate(plan, costs, Cluster(devices_per_node=p))
    steps = 2 * m + 2 * d * m
    assert simulation.bubble_ratio == pytest.approx((p - 1) / (steps + p - 1))


FIGURE = BlockCost(
    forward_s=0.5,
    backward_input_s=0.5,
    backward_weight_s=0.5,
    weight_bytes=1.0,
    gradient_bytes=1.0,
    parameters=2.0,
)
"""Half a forward stage of figures 2 and 8: see :func:`test_figures_2_and_8`."""

FIGURE_CLUSTER = Cluster(
    devices_per_node=1, fetch_bandwidth=1.0, offload_bandwidth=1.0, optimizer_rate=1.0
)


def test_figures_2_and_8() -> None:
    """4 devices, 4 micro-batches, 8 forward and 16 backward stages: SPipe 25 %, Mobius 47 %.

    The paper does not print the units of its figures. Its two ratios follow from these: a forward
    of a stage takes 1, the backward (recomputation included) of a fine stage 1 too, so that of a
    whole stage 2; weights of a forward stage (p_i) and gradients of a coarse stage (g_i) take 2, of
    a fine stage 1; the optimizer takes 4 for a coarse stage, 2 for a fine one, with one lane per
    device; the first fetch and the optimizer's tail count as bubbles; the optimizer of Mobius
    starts when all gradients are there. Devices work 24 units: Mobius takes 2 + 33 + 2 + 8 = 45,
    SPipe 2 + 27 + 1 + 2 = 32.
    """
    costs = Costs(blocks=(FIGURE,) * 16)
    mobius = simulate(
        make_plan("mobius", 16, 4, 4, forward_stages=8, recompute="full"),
        costs,
        FIGURE_CLUSTER,
        optimizer=SYNCHRONOUS,
    )
    spipe = simulate(
        make_plan("spipe", 16, 4, 4, forward_stages=8, backward_stages=16), costs, FIGURE_CLUSTER
    )
    assert [device.busy_s for device in mobius.devices + spipe.devices] == [24.0] * 8
    assert (mobius.makespan_s, spipe.makespan_s) == (45.0, 32.0)
    assert f"{mobius.idle_ratio:.0%} {spipe.idle_ratio:.0%}" == "47% 25%"
    # Without the optimizer: fetch and pipeline.
    assert (mobius.pipeline_s, spipe.pipeline_s) == (35.0, 29.0)


def test_split_backwards_recomputations_and_updates_take_their_times() -> None:
    """F 1, BI 2, BW 3 each, R 4; two BW in one; an overhead of 0.5 per instruction."""
    plan = programs_plan(
        """device 0:
             F 0 0 keep=input; R 0 0; BI 0 0; F 0 1 keep=all; BI 0 1; BW 0 0,1"""
    )
    block = BlockCost(forward_s=1.0, recompute_s=4.0, backward_input_s=2.0, backward_weight_s=3.0)
    simulation = simulate(
        plan, Costs(blocks=(block,), instruction_s=0.5), Cluster(devices_per_node=1)
    )
    assert spans_of(simulation, Lane.COMPUTE) == [
        ("F 0 0", 0, 0.0, 1.5),
        ("R 0 0", 0, 1.5, 6.0),
        ("BI 0 0", 0, 6.0, 8.5),
        ("F 0 1", 0, 8.5, 10.0),
        ("BI 0 1", 0, 10.0, 12.5),
        ("BW 0 0,1", 0, 12.5, 19.0),
    ]


def test_the_last_forward_may_stop_at_its_last_checkpoint() -> None:
    """Stage 1 of mobius leaves the checkpoint of its own start only: nothing to compute. That of
    SPipe, cut in two for the backward, leaves one in its middle.
    """
    costs, cluster = Costs(blocks=(UNIT,) * 4), Cluster(devices_per_node=2)

    def last_forward_s(plan: Plan, *, stops_early: bool) -> set[float]:
        simulation = simulate(plan, costs, cluster, stops_early=stops_early)
        spans = spans_of(simulation, Lane.COMPUTE)
        return {end - start for label, _, start, end in spans if label.startswith("F 1")}

    mobius = make_plan("mobius", 4, 2, 2, forward_stages=2, recompute="full")
    assert last_forward_s(mobius, stops_early=False) == {2.0}
    assert last_forward_s(mobius, stops_early=True) == {0.0}
    spipe = make_plan("spipe", 4, 2, 2, forward_stages=2, backward_stages=4)
    assert last_forward_s(spipe, stops_early=True) == {1.0}


def test_a_skipped_forward_leaves_the_checkpoint_to_the_stage_before() -> None:
    """Device 0 sends what stage 1 would only have passed on; device 1 recomputes from it."""
    plan = programs_plan(
        """device 0:
             F 0 0 keep=input; SC 1 0 peer=1
           device 1:
             RC 1 0 peer=0; R 1 0; B 1 0"""
    )
    block = BlockCost(forward_s=1.0, recompute_s=1.0, backward_input_s=2.0, output_bytes=3.0)
    cluster = Cluster(devices_per_node=2, peer_bandwidth=1.0)
    simulation = simulate(plan, Costs(blocks=(block,) * 2), cluster)
    assert spans_of(simulation, Lane.COMPUTE, Lane.LINK) == [
        ("F 0 0", 0, 0.0, 1.0),
        ("checkpoint 1 0", 0, 1.0, 4.0),
        ("R 1 0", 1, 4.0, 5.0),
        ("B 1 0", 1, 5.0, 7.0),
    ]


def test_a_recomputation_may_wait_for_the_gradient() -> None:
    """Of two devices: F 1 each, B 2; then device 0 recomputes, or has done so while it waited."""
    text = """device 0:
                F 0 0 keep=input; SA 0 0 peer=1; RG 1 0 peer=1; R 0 0{after}; B 0 0
              device 1:
                RA 0 0 peer=0; F 1 0 keep=all; B 1 0; SG 1 0 peer=0"""
    block = BlockCost(forward_s=1.0, recompute_s=1.0, backward_input_s=2.0)
    costs, cluster = Costs(blocks=(block,) * 2), Cluster(devices_per_node=2)
    late = simulate(programs_plan(text.format(after=" after=gradient")), costs, cluster)
    early = simulate(programs_plan(text.format(after="")), costs, cluster)
    assert (late.makespan_s, early.makespan_s) == (7.0, 6.0)


def test_transfers_delay_their_consumers() -> None:
    """Two devices, one micro-batch: forward 1, transfer 0.5 + 0.25, forward 1, backward 2,
    transfer, 2.
    """
    block = BlockCost(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, output_bytes=2.0)
    cluster = Cluster(devices_per_node=2, peer_bandwidth=4.0, latency_s=0.25)
    simulation = simulate(
        make_plan("gpipe", 2, 2, 1, recompute="none"), Costs(blocks=(block,) * 2), cluster
    )
    assert simulation.pipeline_s == 1.0 + 0.75 + 1.0 + 2.0 + 0.75 + 2.0
    links = [s for s in simulation.spans if s.lane is Lane.LINK]
    assert [(s.label, s.place, s.peer, s.start_s, s.end_s) for s in links] == [
        ("activation 0 0", 0, 1, 1.0, 1.5),
        ("gradient 1 0", 1, 0, 4.75, 5.25),
    ]


def test_a_transfer_waits_until_it_is_posted_and_for_what_was_sent_before() -> None:
    """Device 1 posts the first receive when its own work is over at 3; the second, posted from the
    start, is behind it on the link.
    """
    plan = programs_plan(
        """device 0:
             F 0 0 keep=none; SA 0 0 peer=1; F 0 1 keep=none; SA 0 1 peer=1
           device 1:
             RA 0 1 peer=0; F 0 2 keep=none; F 0 3 keep=none; F 0 2 keep=none; RA 0 0 peer=0
             F 1 0 keep=none; F 1 1 keep=none"""
    )
    block = BlockCost(forward_s=1.0, output_bytes=5.0)
    cluster = Cluster(devices_per_node=2, peer_bandwidth=1.0)
    simulation = simulate(plan, Costs(blocks=(block,) * 2), cluster)
    assert spans_of(simulation, Lane.LINK) == [
        ("activation 0 0", 0, 3.0, 8.0),
        ("activation 0 1", 0, 8.0, 13.0),
    ]


def test_weights_are_prefetched_during_the_stage_before() -> None:
    """Mobius on one device: only the first fetch is exposed while a stage takes longer than a
    fetch.
    """
    block = BlockCost(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, weight_bytes=3.0)
    plan = make_plan("mobius", 4, 1, 2, forward_stages=4, recompute="full")
    cluster = Cluster(devices_per_node=1, fetch_bandwidth=2.0)
    simulation = simulate(plan, Costs(blocks=(block,) * 4), cluster)
    assert simulation.pipeline_s == 1.5 + 24.0


def test_a_fetch_waits_for_the_buffer_that_a_release_frees() -> None:
    """Each fetch takes 2, each forward 1: the third fetch starts when the first stage is done."""
    plan = programs_plan(
        """device 0:
             FW 0 phase=forward; FW 1 phase=forward
             F 0 0 keep=none; RW 0 phase=forward; FW 2 phase=forward
             F 1 0 keep=none; RW 1 phase=forward
             F 2 0 keep=none; RW 2 phase=forward""",
        num_blocks=3,
    )
    block = BlockCost(forward_s=1.0, weight_bytes=2.0)
    cluster = Cluster(devices_per_node=1, fetch_bandwidth=1.0)
    simulation = simulate(plan, Costs(blocks=(block,) * 3), cluster)
    assert spans_of(simulation, Lane.FETCH, Lane.COMPUTE) == [
        ("FW 0 forward", 0, 0.0, 2.0),
        ("F 0 0", 0, 2.0, 3.0),
        ("FW 1 forward", 0, 2.0, 4.0),
        ("F 1 0", 0, 4.0, 5.0),
        ("FW 2 forward", 0, 4.0, 6.0),
        ("F 2 0", 0, 6.0, 7.0),
    ]


def test_an_update_fetches_the_arrays_of_the_configured_optimizer(
    make_table: Callable[..., BlockTable], make_config: Callable[..., Config]
) -> None:
    """The fp32 master, and two numbers a parameter of AdamW or one of Lion."""
    config, table = make_config("spipe"), make_table(4)
    lion = config.optimizer.model_copy(update={"name": OptimizerName.LION})
    fetched = [
        config_context(one, table).prices.cluster.update_fetch_bytes
        for one in (config, config.model_copy(update={"optimizer": lion}))
    ]
    assert fetched == [12.0, 8.0]


def test_simulation_of_a_configuration(
    make_table: Callable[..., BlockTable], make_config: Callable[..., Config]
) -> None:
    config, table = make_config("spipe", workers=2), make_table(12)
    plan = build_plan(config, table)
    simulation = try_plan(plan, config_context(config, table))
    summary = simulation.summary()
    assert summary["makespan"] == summary["makespan_seconds"] == simulation.makespan_s > 0.0
    assert (summary["scheme"], summary["devices"], summary["micro_batches"]) == ("spipe", 2, 4)
    assert 0.0 < summary["bubble_ratio"] < 1.0
    assert 0.0 < summary["lower_bound"] <= simulation.pipeline_s
    assert summary["num_instructions"] == sum(map(len, summary["instructions"]))
    # Two weight buffers of at most three blocks each, 4 bytes a parameter.
    assert 0 < summary["peak_bytes"][0]["weights"] <= 2 * 3 * 1024 * 4
    assert summary["peak_memory_bytes"] == [peak.total_bytes for peak in simulation.peaks]


def test_memory_is_linear_in_instructions() -> None:
    costs, cluster = Costs(blocks=(UNIT,) * 8), Cluster(devices_per_node=8)
    plans = [make_plan("1f1b", 8, 8, m, recompute="none") for m in (64, 512)]
    few, many = (simulate(plan, costs, cluster).array_bytes for plan in plans)
    instructions = [sum(map(len, plan.programs)) for plan in plans]
    assert many / few == pytest.approx(instructions[1] / instructions[0], rel=0.05)


def test_a_plan_that_cannot_finish_is_explained() -> None:
    """Each device sends only after it has received."""
    plan = programs_plan(
        """device 0:
             RG 1 0 peer=1; B 0 0; F 0 0 keep=all; SA 0 0 peer=1
           device 1:
             RA 0 0 peer=0; F 1 0 keep=all; B 1 0; SG 1 0 peer=0"""
    )
    with pytest.raises(ConfigError) as error:
        simulate(plan, Costs(blocks=(UNIT,) * 2), Cluster(devices_per_node=2))
    assert str(error.value) == (
        "plan: it cannot finish; B 0 0 of device 0 waits for gradient 1 0 of device 1 waits for"
        " B 1 0 of device 1 waits for F 1 0 of device 1 waits for activation 0 0 of device 0 waits"
        " for F 0 0 of device 0 waits for B 0 0 of device 0"
    )


def test_a_send_without_receive_is_named() -> None:
    plan = programs_plan("device 0:\n F 0 0 keep=all; SA 0 0 peer=1\ndevice 1:\n")
    with pytest.raises(ConfigError, match=r"device 0, instruction 1 \(SA 0 0 peer=1\): its peer"):
        simulate(plan, Costs(blocks=(UNIT,) * 2), Cluster(devices_per_node=2))


BLOCK = BlockCost(
    forward_s=1.0,
    recompute_s=1.0,
    backward_input_s=1.5,
    backward_weight_s=0.5,
    output_bytes=0.3,
    activation_bytes=2.0,
    parameters=7.0,
    weight_bytes=2.0,
    gradient_bytes=3.0,
)

BUSY_CLUSTER = Cluster(
    devices_per_node=2,
    fetch_bandwidth=2.0,
    offload_bandwidth=1.5,
    devices_per_switch=2,
    switch_bandwidth=3.0,
    peer_bandwidth=2.0,
    peer_through_host=True,
    nic_bandwidth=1.0,
    dram_bandwidth=5.0,
    latency_s=0.01,
    optimizer_rate=3.0,
)


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_conservation(scheme: str) -> None:
    """All work is done once and no resource serves two things at a time, on a cluster where
    everything is scarce.
    """
    plan = make_plan(scheme, 16, 4, 8)
    costs = Costs(blocks=(BLOCK,) * 16)
    simulation = simulate(plan, costs, BUSY_CLUSTER, optimizer=ADVANCE)
    assert simulation.spans == simulate(plan, costs, BUSY_CLUSTER).spans
    codes = Counter(str(i).split()[0] for program in plan.programs for i in program)
    shown = Counter(s.label.split()[0] for s in simulation.spans if s.lane is not Lane.REDUCE)
    for code in ("F", "R", "B", "BI", "BW", "SO", "SI"):
        assert shown[code] == codes[code]
    routes = plan.num_routes if codes["RD"] else 1
    assert shown["OG"] * routes == codes["OG"]
    assert shown["activation"] == codes["SA"]
    assert shown["gradient"] == codes["SG"]
    lanes: dict[tuple[str, int, int | None], list[tuple[float, float]]] = {}
    for span in simulation.spans:
        lane = "compute" if span.lane is Lane.UPDATE else str(span.lane)
        lanes.setdefault((lane, span.place, span.peer), []).append((span.start_s, span.end_s))
    for (lane, _, _), intervals in lanes.items():
        if lane != "swap":
            assert all(a[1] <= b[0] for a, b in pairwise(sorted(intervals)))
    busy_s = sum(device.busy_s for device in simulation.devices)
    assert simulation.makespan_s >= simulation.pipeline_s >= busy_s / plan.num_devices
    assert simulation.pipeline_s >= simulation.lower_bound_s
