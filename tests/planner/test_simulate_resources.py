"""What the simulator shares between whom, on cases small enough to calculate by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from penstock.planner.cost.cluster import ADVANCE, Cluster, OptimizerModel, OptimizerStart
from penstock.planner.cost.costs import BlockCost, Costs, OperatorCost
from penstock.planner.memory.footprint import footprints
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.layout import OrderedInstruction
from penstock.planner.schedule.schedule import lower
from penstock.planner.simulate import Simulation, simulate
from penstock.protocol.plan.instructions import Backward, Forward, SwapIn, SwapOut, parse_program
from penstock.protocol.plan.plan import Plan, StageRange
from penstock.protocol.plan.semantics import Lane


def by_hand(
    text: str, devices_of_stages: tuple[int, ...], *, routes: int = 1, shards_weights: bool = False
) -> Plan:
    """A plan of one-block stages, coupled; every route covers all blocks."""
    per_route = len(devices_of_stages) // routes
    stages = tuple(
        StageRange(start=i % per_route, stop=i % per_route + 1, device=device)
        for i, device in enumerate(devices_of_stages)
    )
    programs = parse_program(text)
    return Plan(
        scheme="by hand",
        num_devices=len(programs),
        num_microbatches=4,
        forward_stages=stages,
        backward_stages=stages,
        programs=programs,
        evaluation=programs,
        routes=tuple(m % routes for m in range(4)) if routes > 1 else (),
        shards_weights=shards_weights,
    )


def uses(simulation: Simulation, *lanes: Lane) -> list[tuple[str, int, float, float]]:
    """Label, place, start and end of what occupies lanes, by start."""
    return [
        (s.label, s.place, round(s.start_s, 9), round(s.end_s, 9))
        for s in simulation.spans
        if s.lane in lanes
    ]


TWO_FETCHES = """device 0:
                   FW 0 phase=forward; F 0 0 keep=none; RW 0 phase=forward
                 device 1:
                   FW 1 phase=forward; F 1 0 keep=none; RW 1 phase=forward"""


def test_devices_that_compute_on_the_hosts_cores_hide_nothing() -> None:
    """Fetches and copies take their turn between computations, and sweeps come last."""
    plan = by_hand(
        """device 0:
             FW 1 phase=forward; FW 0 phase=forward; F 1 0 keep=none; RW 1 phase=forward;
             F 0 0 keep=all; F 0 1 keep=all; F 0 2 keep=all; F 0 3 keep=all;
             B 0 0; B 0 1; B 0 2; B 0 3; OG 0; RW 0 phase=forward""",
        (0, 0),
    )
    block = BlockCost(
        forward_s=1.0,
        backward_input_s=1.0,
        parameters=4.0,
        weight_bytes=6.0,
        gradient_bytes=8.0,
    )
    costs = Costs(blocks=(block, block))
    cluster = Cluster(
        devices_per_node=1, fetch_bandwidth=2.0, offload_bandwidth=4.0, optimizer_rate=1.0
    )
    own = simulate(plan, costs, cluster)
    assert own.makespan_s < 21.0, "a fetch is hidden"
    shared = simulate(plan, costs, replace(cluster, shares_cores=True))
    lanes = (Lane.FETCH, Lane.COMPUTE, Lane.OFFLOAD, Lane.OPTIMIZER)
    spans = sorted((start, end) for _, _, start, end in uses(shared, *lanes))
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert shared.makespan_s == pytest.approx(3.0 + 1.0 + 3.0 + 8.0 + 2.0 + 4.0)


def test_two_devices_share_their_switch() -> None:
    """Each could fetch with 8; together they have 10, so 5 each; on switches of their own, 8."""
    plan = by_hand(TWO_FETCHES, (0, 1))
    costs = Costs(blocks=(BlockCost(forward_s=1.0, weight_bytes=40.0),) * 2)
    shared = Cluster(
        devices_per_node=2, devices_per_switch=2, fetch_bandwidth=8.0, switch_bandwidth=10.0
    )
    assert uses(simulate(plan, costs, shared), Lane.FETCH) == [
        ("FW 0 forward", 0, 0.0, 8.0),
        ("FW 1 forward", 1, 0.0, 8.0),
    ]
    assert simulate(plan, costs, replace(shared, devices_per_switch=1)).makespan_s == 5.0 + 1.0
    assert simulate(plan, costs, replace(shared, devices_per_node=1)).makespan_s == 5.0 + 1.0


def test_a_node_shares_its_dram() -> None:
    """2 on different switches; 6 of DRAM for both, or for each where the nodes differ."""
    plan = by_hand(TWO_FETCHES, (0, 1))
    costs = Costs(blocks=(BlockCost(forward_s=1.0, weight_bytes=12.0),) * 2)
    one_node = Cluster(devices_per_node=2, dram_bandwidth=6.0)
    assert simulate(plan, costs, one_node).makespan_s == 4.0 + 1.0
    assert simulate(plan, costs, replace(one_node, devices_per_node=1)).makespan_s == 2.0 + 1.0


TWO_STAGES = """device 0:
                  F 0 0 keep=all; F 1 0 keep=all; B 1 0; OG 1; B 0 0; OG 0"""

WORK = BlockCost(
    forward_s=1.0, backward_input_s=1.0, gradient_bytes=4.0, parameters=2.0, weight_bytes=3.0
)


def test_a_copy_and_the_optimizer_share_dram() -> None:
    """Gradients of stage 1 are there at 3 + 1. Its pass would take 2 alone: 2 parameters of 10
    bytes with the 10 bytes/s of DRAM. From 4 on the offload of stage 0 takes 4 of them, so the pass
    has moved 6 of its 20 at 5, and ends at 5 + 14 / 10; that of stage 0 takes 2 more.
    """
    cluster = Cluster(devices_per_node=1, offload_bandwidth=4.0, dram_bandwidth=10.0)
    simulation = simulate(
        by_hand(TWO_STAGES, (0, 0)),
        Costs(blocks=(WORK,) * 2),
        cluster,
        optimizer=OptimizerModel(tail_bytes=10.0),
    )
    assert uses(simulation, Lane.OFFLOAD, Lane.OPTIMIZER) == [
        ("OG 1", 0, 3.0, 4.0),
        ("OG 0", 0, 4.0, 5.0),
        ("U 1", 0, 4.0, 6.4),
        ("U 0", 0, 6.4, 8.4),
    ]
    assert simulation.optimizer_tail_s == pytest.approx(4.4)


def test_workers_publish_block_by_block() -> None:
    """A block's pass starts with its own gradients; the papers' systems copy the stage first."""
    request = ScheduleRequest(
        scheme="gpipe", num_devices=1, num_microbatches=1, forward_stages=1, recompute="none"
    )
    plan, costs = lower(build_schedule(request, [1.0] * 2)), Costs(blocks=(WORK,) * 2)
    cluster = Cluster(devices_per_node=1, offload_bandwidth=4.0, optimizer_rate=2.0)
    ours = simulate(plan, costs, cluster, stops_early=True)
    assert uses(ours, Lane.OFFLOAD, Lane.OPTIMIZER) == [
        ("OG 0", 0, 4.0, 5.0),
        ("OG 0", 0, 5.0, 6.0),
        ("U 0", 0, 5.0, 6.0),
        ("U 0", 0, 6.0, 7.0),
    ]
    whole = simulate(plan, costs, cluster)
    assert uses(whole, Lane.OFFLOAD, Lane.OPTIMIZER) == [
        ("OG 0", 0, 4.0, 6.0),
        ("U 0", 0, 6.0, 8.0),
    ]


def test_the_optimizer_is_no_faster_than_its_cores() -> None:
    cluster = Cluster(devices_per_node=1, dram_bandwidth=100.0, optimizer_rate=0.5)
    simulation = simulate(by_hand(TWO_STAGES, (0, 0)), Costs(blocks=(WORK,) * 2), cluster)
    assert uses(simulation, Lane.OPTIMIZER) == [
        ("U 1", 0, 3.04, 7.04),
        ("U 0", 0, 7.04, 11.04),
    ]


def test_a_backward_finds_the_sums_of_one_stage_that_leaves() -> None:
    """That of stage 0 waits for the copy of stage 2, which takes 8 s, and not for that of stage 1:
    then its sums are there beside those of stage 1.
    """
    plan = by_hand(
        "device 0: B 2 0; OG 2; B 1 0; OG 1; B 0 0; OG 0",
        (0, 0, 0),
    )
    block = BlockCost(backward_input_s=1.0, gradient_bytes=16.0, device_gradient_bytes=32.0)
    costs, cluster = Costs(blocks=(block,) * 3), Cluster(devices_per_node=1, offload_bandwidth=2.0)
    backwards = [("B 2 0", 0, 0.0, 1.0), ("B 1 0", 0, 1.0, 2.0), ("B 0 0", 0, 9.0, 10.0)]
    assert uses(simulate(plan, costs, cluster), Lane.COMPUTE) == backwards
    assert footprints(plan, costs)[0].gradient_bytes == (32.0, 32.0, 64.0, 64.0, 64.0, 64.0)
    in_place = replace(costs, separate_memory=False)
    assert uses(simulate(plan, in_place, cluster), Lane.COMPUTE)[-1][2:] == (2.0, 3.0)


def test_a_synchronous_optimizer_starts_when_all_gradients_are_there() -> None:
    cluster = Cluster(devices_per_node=1, optimizer_rate=0.5)
    flush = OptimizerModel(start=OptimizerStart.FLUSH)
    simulation = simulate(
        by_hand(TWO_STAGES, (0, 0)), Costs(blocks=(WORK,) * 2), cluster, optimizer=flush
    )
    assert uses(simulation, Lane.OPTIMIZER) == [("U 1", 0, 4.0, 8.0), ("U 0", 0, 8.0, 12.0)]


TWO_DEVICES = """device 0:
                   F 0 0 keep=all; SA 0 0 peer=1; RG 1 0 peer=1; B 0 0; OG 0
                 device 1:
                   RA 0 0 peer=0; F 1 0 keep=all; B 1 0; SG 1 0 peer=0; OG 1"""


def test_optimizers_of_a_node_share_its_cores() -> None:
    """Gradients of stage 1 are there at 3, those of stage 0 at 4; a pass takes 10."""
    plan = by_hand(TWO_DEVICES, (0, 1))
    costs = Costs(blocks=(BlockCost(forward_s=1.0, backward_input_s=1.0, parameters=10.0),) * 2)
    shared = simulate(plan, costs, Cluster(devices_per_node=2, optimizer_rate=1.0))
    apart = simulate(plan, costs, Cluster(devices_per_node=1, optimizer_rate=1.0))
    assert (apart.makespan_s, apart.optimizer_tail_s) == (14.0, 10.0)
    assert (shared.makespan_s, shared.optimizer_tail_s) == (23.0, 19.0)


def test_numa_domains_have_their_share_of_cores_and_channels() -> None:
    """Bound to halves of the node, each device's pass takes 20 s of half its cores, beside the
    other's; by DRAM, 100 bytes at 5 a second, as long.
    """
    plan = by_hand(TWO_DEVICES, (0, 1))
    costs = Costs(blocks=(BlockCost(forward_s=1.0, backward_input_s=1.0, parameters=10.0),) * 2)
    cores = Cluster(devices_per_node=2, optimizer_rate=1.0, numa_domains=2)
    channels = Cluster(devices_per_node=2, dram_bandwidth=10.0, numa_domains=2)
    ten = OptimizerModel(tail_bytes=10.0)
    for cluster, optimizer in ((cores, ADVANCE), (channels, ten)):
        simulation = simulate(plan, costs, cluster, optimizer=optimizer)
        assert uses(simulation, Lane.OPTIMIZER) == [("U 1", 0, 3.0, 23.0), ("U 0", 0, 4.0, 24.0)]
    assert [channels.domain_of(device) for device in range(4)] == [0, 1, 2, 3]
    halves = replace(channels, devices_per_node=4)
    assert [halves.domain_of(device) for device in range(5)] == [0, 0, 1, 1, 2]


def test_stages_with_threads_of_their_own_step_side_by_side() -> None:
    """Each of two stages could update 1 parameter a second; from 4 on they share 10 bytes/s."""
    cluster = Cluster(devices_per_node=1, dram_bandwidth=10.0)
    costs = Costs(blocks=(replace(WORK, gradient_bytes=0.0),) * 2)
    alone = OptimizerModel(tail_bytes=10.0, stage_rate=0.5)
    simulation = simulate(by_hand(TWO_STAGES, (0, 0)), costs, cluster, optimizer=alone)
    assert uses(simulation, Lane.OPTIMIZER) == [("U 1", 0, 3.0, 7.0), ("U 0", 0, 4.0, 8.0)]
    both = OptimizerModel(tail_bytes=10.0, stage_rate=1.0)
    simulation = simulate(by_hand(TWO_STAGES, (0, 0)), costs, cluster, optimizer=both)
    assert uses(simulation, Lane.OPTIMIZER) == [("U 1", 0, 3.0, 6.0), ("U 0", 0, 4.0, 7.0)]


def test_sweeps_run_in_the_order_in_which_gradients_come() -> None:
    """Those of block 0 at 4, those of block 1 only at 5; both before they are settled."""
    early, late = (
        BlockCost(forward_s=1.0, backward_input_s=1.0, parameters=10.0, gradient_bytes=num_bytes)
        for num_bytes in (0.0, 2.0)
    )
    simulation = simulate(
        by_hand(TWO_DEVICES, (0, 1)),
        Costs(blocks=(early, late)),
        Cluster(devices_per_node=2, optimizer_rate=1.0, offload_bandwidth=1.0),
        optimizer=OptimizerModel(tail_bytes=16.0, settle_bytes=26.0),
    )
    assert uses(simulation, Lane.OPTIMIZER) == [
        ("S 1", 0, 0.0, 10.0),
        ("S 0", 0, 10.0, 20.0),
        ("U 0", 0, 20.0, 30.0),
        ("U 1", 0, 30.0, 40.0),
    ]


def test_the_previous_attempt_is_settled_first() -> None:
    """Two settles of 4 from the start on, then what has arrived meanwhile."""
    cluster = Cluster(devices_per_node=1, optimizer_rate=0.5)
    settling = OptimizerModel(tail_bytes=16.0, settle_bytes=26.0)
    simulation = simulate(
        by_hand(TWO_STAGES, (0, 0)), Costs(blocks=(WORK,) * 2), cluster, optimizer=settling
    )
    assert uses(simulation, Lane.OPTIMIZER) == [
        ("S 1", 0, 0.0, 4.0),
        ("S 0", 0, 4.0, 8.0),
        ("U 1", 0, 8.0, 12.0),
        ("U 0", 0, 12.0, 16.0),
    ]


def test_the_plan_says_which_blocks_are_settled_first() -> None:
    """Block 0, at double speed: 2 from the start on and 2 behind its gradients; block 1 takes 4."""
    cluster = Cluster(devices_per_node=1, optimizer_rate=0.5, preview_speed=2.0, settle_speed=2.0)
    plan = replace(by_hand(TWO_STAGES, (0, 0)), settled_early=(0,))
    costs = Costs(blocks=(WORK,) * 2)
    assert uses(simulate(plan, costs, cluster), Lane.OPTIMIZER) == [
        ("S 0", 0, 0.0, 2.0),
        ("U 1", 0, 3.0, 7.0),
        ("U 0", 0, 7.0, 9.0),
    ]
    in_place = simulate(plan, costs, cluster, optimizer=OptimizerModel(tail_bytes=28.0))
    assert uses(in_place, Lane.OPTIMIZER) == [("U 1", 0, 3.0, 7.0), ("U 0", 0, 7.0, 11.0)]


def test_settling_slows_the_first_fetch() -> None:
    """DRAM has 12: the fetch gets half of it while blocks are settled."""
    plan = by_hand(
        "device 0:\n FW 0 phase=forward; F 0 0 keep=all; B 0 0; OG 0; RW 0 phase=forward", (0,)
    )
    cluster = Cluster(devices_per_node=1, dram_bandwidth=12.0)
    costs = Costs(blocks=(replace(WORK, weight_bytes=24.0),))
    settling = OptimizerModel(tail_bytes=0.0, settle_bytes=60.0)
    simulation = simulate(plan, costs, cluster, optimizer=settling)
    assert uses(simulation, Lane.FETCH) == [("FW 0 forward", 0, 0.0, 4.0)]
    assert simulate(plan, costs, cluster, optimizer=ADVANCE).pipeline_s == 2.0 + 2.0


UPDATES = """device 0:
               F 0 0 keep=all; F 1 0 keep=all; B 1 0; OG 1; U 1; B 0 0; OG 0"""


def test_an_update_on_the_device_leaves_the_other_block_to_the_cores() -> None:
    """Block 1: settled at first; 24 bytes of state from 3 on, kernel when the device is idle, 4
    bytes back.
    """
    cluster = Cluster(
        devices_per_node=1,
        fetch_bandwidth=48.0,
        offload_bandwidth=4.0,
        optimizer_rate=1.0,
        device_optimizer_rate=4.0,
    )
    simulation = simulate(by_hand(UPDATES, (0, 0)), Costs(blocks=(WORK,) * 2), cluster)
    assert uses(simulation, Lane.FETCH, Lane.OFFLOAD, Lane.UPDATE, Lane.OPTIMIZER) == [
        ("S 1", 0, 0.0, 2.0),
        ("OG 1", 0, 3.0, 4.0),
        ("U 1", 0, 3.0, 3.5),
        ("OG 0", 0, 4.0, 5.0),
        ("U 1", 0, 4.0, 4.5),
        ("U 1", 0, 5.0, 6.0),
        ("U 0", 0, 5.0, 7.0),
    ]
    assert (simulation.pipeline_s, simulation.makespan_s) == (4.0, 7.0)
    assert simulation.devices[0].busy_s == 4.0


def test_an_update_of_a_resident_fetches_no_state() -> None:
    """Its kernel takes the last commit in first: twice 2 with a rate of 1."""
    plan = by_hand("device 0:\n F 0 0 keep=all; B 0 0; OG 0; U 0 resident=yes", (0,))
    cluster = Cluster(devices_per_node=1, fetch_bandwidth=1.0, device_optimizer_rate=1.0)
    simulation = simulate(plan, Costs(blocks=(WORK,)), cluster)
    assert uses(simulation, Lane.UPDATE) == [("U 0", 0, 2.0, 6.0)]


def test_an_update_elsewhere_fetches_the_gradients_too() -> None:
    """Device 1 gets the state (24) and the gradients (4) when they have been offloaded at 3."""
    plan = by_hand("device 0:\n F 0 0 keep=all; B 0 0; OG 0\ndevice 1:\n U 0", (0,))
    cluster = Cluster(devices_per_node=2, fetch_bandwidth=28.0, offload_bandwidth=4.0)
    simulation = simulate(plan, Costs(blocks=(WORK,)), cluster)
    assert uses(simulation, Lane.FETCH, Lane.UPDATE) == [("U 0", 1, 3.0, 4.0), ("U 0", 1, 4.0, 4.0)]
    assert simulation.makespan_s == 5.0


SWAP = """device 0:
            F 0 0 keep=selective drop=b; SO 0 0 fraction=0.5{peer}; F 0 1 keep=all
            SI 0 0 fraction=0.5{peer}; F 0 2 keep=all; R 0 0; B 0 0
          device 1:"""


@pytest.mark.parametrize(("peer", "extra_s"), [("", 0.0), (" peer=1", 0.25)])
def test_swaps_go_and_come_back(peer: str, extra_s: float) -> None:
    """Half of the 6 that are kept, with 2: out from 1 to 2.5; in as soon as it is out. Or to the
    memory of device 1 and back, 0.25 later each.
    """
    operators = (
        OperatorCost(name="a", forward_s=0.75, activation_bytes=6.0),
        OperatorCost(name="b", forward_s=0.25, activation_bytes=2.0),
    )
    block = BlockCost(
        forward_s=1.0, backward_input_s=1.0, activation_bytes=8.0, operators=operators
    )
    cluster = Cluster(
        devices_per_node=2,
        fetch_bandwidth=2.0,
        offload_bandwidth=2.0,
        peer_bandwidth=2.0,
        latency_s=0.25,
    )
    simulation = simulate(by_hand(SWAP.format(peer=peer), (0,)), Costs(blocks=(block,)), cluster)
    assert uses(simulation, Lane.SWAP) == [
        ("SO 0 0", 0, 1.0, 2.5),
        ("SI 0 0", 0, 2.5 + extra_s, 4.0 + extra_s),
    ]
    # The recomputation makes what was dropped: 0.25.
    back_s = 4.0 + 2 * extra_s
    assert uses(simulation, Lane.COMPUTE)[3:] == [
        ("R 0 0", 0, back_s, back_s + 0.25),
        ("B 0 0", 0, back_s + 0.25, back_s + 1.25),
    ]


TRANSFERS = """device 0:
                 F 0 0 keep=none; SA 0 0 peer=2
               device 1:
                 F 1 1 keep=none; SA 1 1 peer=3
               device 2:
                 RA 0 0 peer=0; F 1 0 keep=none
               device 3:
                 RA 1 1 peer=1; F 2 1 keep=none"""


def test_nodes_share_their_nic() -> None:
    """Two transfers of 6 from node 0 to node 1: 3 each of the 6 that the NIC has."""
    plan = by_hand(TRANSFERS, (0, 2, 3))
    costs = Costs(blocks=(BlockCost(forward_s=1.0, output_bytes=6.0),) * 3)
    cluster = Cluster(devices_per_node=2, peer_bandwidth=1.0, nic_bandwidth=6.0)
    assert uses(simulate(plan, costs, cluster), Lane.LINK) == [
        ("activation 0 0", 0, 1.0, 3.0),
        ("activation 1 1", 1, 1.0, 3.0),
    ]


def test_transfers_through_the_host_use_dram_twice() -> None:
    """In one node, over PCIe links of 4: alone 4; two of them share a DRAM of 12 as 3 each, since
    each writes and reads it.
    """
    plan = by_hand(TRANSFERS, (0, 2, 3))
    costs = Costs(blocks=(BlockCost(forward_s=1.0, output_bytes=12.0),) * 3)
    cluster = Cluster(
        devices_per_node=4, fetch_bandwidth=4.0, offload_bandwidth=4.0, peer_through_host=True
    )
    assert {s[3] for s in uses(simulate(plan, costs, cluster), Lane.LINK)} == {1.0 + 3.0}
    narrow = replace(cluster, dram_bandwidth=12.0)
    assert {s[3] for s in uses(simulate(plan, costs, narrow), Lane.LINK)} == {1.0 + 4.0}


REPLICAS = """device 0:
                F 0 0 keep=all; B 0 0; RD 0; OG 0
              device 1:
                F 1 1 keep=all; F 1 3 keep=all; B 1 1; B 1 3; RD 1; OG 1"""


def test_gradients_are_reduced_over_routes() -> None:
    """Route 1 sends its sums (6 with 2) when it is done at 4; route 0 offloads what both made, and
    its node updates all weights.
    """
    plan = by_hand(REPLICAS, (0, 1), routes=2)
    cluster = Cluster(
        devices_per_node=1, nic_bandwidth=2.0, offload_bandwidth=2.0, optimizer_rate=1.0
    )
    block = replace(WORK, device_gradient_bytes=6.0)
    simulation = simulate(plan, Costs(blocks=(block,)), cluster)
    assert uses(simulation, Lane.REDUCE, Lane.OFFLOAD, Lane.OPTIMIZER) == [
        ("RD 1", 1, 4.0, 7.0),
        ("OG 0", 0, 7.0, 9.0),
        ("U 0", 0, 9.0, 11.0),
    ]


def test_gradients_are_reduced_over_replicas_of_the_plan() -> None:
    """4 replicas: 2 x 3 / 4 of 4 bytes, with 3 or what the NIC has."""
    plan = by_hand("device 0:\n F 0 0 keep=all; B 0 0; RD 0; OG 0", (0,))
    cluster = Cluster(devices_per_node=1, replicas=4, replica_bandwidth=3.0)
    costs = Costs(blocks=(WORK,))
    assert uses(simulate(plan, costs, cluster), Lane.REDUCE) == [("RD 0", 0, 2.0, 4.0)]
    behind_nic = replace(cluster, nic_bandwidth=2.0)
    assert uses(simulate(plan, costs, behind_nic), Lane.REDUCE) == [("RD 0", 0, 2.0, 5.0)]
    inside = replace(behind_nic, replicas_on_other_nodes=False)
    assert simulate(plan, costs, inside).makespan_s == 4.0


def test_the_owner_of_a_block_sums_what_other_routes_contribute() -> None:
    """Without reduction: route 1 runs on node 1, whose gradients come over the NIC (4 with 2), and
    one optimizer works once.
    """
    plan = by_hand(REPLICAS.replace("RD 0; ", "").replace("RD 1; ", ""), (0, 1), routes=2)
    cluster = Cluster(devices_per_node=1, nic_bandwidth=2.0, optimizer_rate=1.0)
    simulation = simulate(plan, Costs(blocks=(WORK,)), cluster)
    assert uses(simulation, Lane.REDUCE, Lane.OPTIMIZER) == [
        ("OG 1", 1, 4.0, 6.0),
        ("U 0", 0, 6.0, 8.0),
    ]


SHARDS = """device 0:
              FW 0 phase=forward; F 0 0 keep=all; B 0 0; RD 0; OG 0; RW 0 phase=forward
            device 1:
              FW 1 phase=forward; F 1 1 keep=all; B 1 1; RD 1; OG 1; RW 1 phase=forward"""


def test_sharded_weights_are_fetched_in_parts_and_gathered() -> None:
    """Half of the 3 each with 3, then the halves change places, with 1.5. After the backward the
    halves of 4 are reduced with 1.5, and device 0, where the stage's root is, offloads all of it
    with 2. Both devices wait for the whole.
    """
    plan = by_hand(SHARDS, (0, 1), routes=2, shards_weights=True)
    cluster = Cluster(
        devices_per_node=2,
        fetch_bandwidth=3.0,
        offload_bandwidth=2.0,
        peer_bandwidth=1.5,
        optimizer_rate=1.0,
    )
    simulation = simulate(plan, Costs(blocks=(WORK,)), cluster)
    reduced, offloaded, updated = (round(s + 2.0 / 1.5, 9) for s in (3.5, 5.5, 7.5))
    assert [u for u in uses(simulation, *Lane) if u[1] == 0] == [
        ("FW 0 forward", 0, 0.0, 0.5),
        ("FW 0 forward", 0, 0.5, 1.5),
        ("F 0 0", 0, 1.5, 2.5),
        ("B 0 0", 0, 2.5, 3.5),
        ("RD 0", 0, 3.5, reduced),
        ("OG 0", 0, reduced, offloaded),
        ("U 0", 0, offloaded, updated),
    ]
    assert [u for u in uses(simulation, Lane.COMPUTE) if u[1] == 1] == [
        ("F 1 1", 1, 1.5, 2.5),
        ("B 1 1", 1, 2.5, 3.5),
    ]


def test_what_is_swapped_out_is_in_host_memory_till_it_is_swapped_in() -> None:
    """Kept activations are 8 bytes a micro-batch, of which the first leaves a half."""
    plan = by_hand(
        """device 0:
             F 0 0 keep=all; SO 0 0 fraction=0.5; F 0 1 keep=all
             SI 0 0 fraction=0.5; B 0 0; B 0 1""",
        (0,),
    )
    block = BlockCost(forward_s=1.0, backward_input_s=1.0, activation_bytes=8.0)
    costs, cluster = Costs(blocks=(block,)), Cluster(devices_per_node=1)
    [footprint] = footprints(plan, costs)
    assert simulate(plan, costs, cluster).peaks == (footprint.peak,)
    assert footprint.peak.total_bytes == max(footprint.total_bytes) == 16.0
    assert (max(footprint.host_bytes), footprint.host_bytes[-1]) == (4.0, 0.0)


def test_swaps_with_a_peer_do_not_queue_behind_what_the_peer_sends() -> None:
    """The peer's gradient of micro-batch 1 leaves it before device 0 asks for micro-batch 2."""
    schedule = build_schedule(
        ScheduleRequest(scheme="1f1b", num_devices=3, num_microbatches=3), [1.0] * 3
    )
    swapped: list[OrderedInstruction] = []
    for instruction in schedule.orders[0]:
        fields = {"stage": 0, "fraction": 1.0, "peer": 1}
        if isinstance(instruction, Backward):
            swapped.append(SwapIn(micro_batch=instruction.micro_batch, **fields))
        swapped.append(instruction)
        if isinstance(instruction, Forward):
            swapped.append(SwapOut(micro_batch=instruction.micro_batch, **fields))
    plan = lower(replace(schedule, orders=(tuple(swapped), *schedule.orders[1:])))
    block = BlockCost(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    cluster = Cluster(devices_per_node=3, peer_bandwidth=10.0)
    assert simulate(plan, Costs(blocks=(block,) * 3), cluster).makespan_s == 15.0
