"""Bytes of devices, instruction by instruction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.planner.cost.costs import BlockCost, Costs, OperatorCost
from penstock.planner.memory.footprint import DevicePeak, device_peaks, footprints, swapped_peaks
from penstock.planner.schedule.layout import Residency, StageLayout
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.protocol.plan.instructions import Update, parse_program
from penstock.protocol.plan.plan import Plan, StageRange
from penstock.protocol.plan.resources import staging_bytes

BLOCK = BlockCost(
    output_bytes=1.0,
    activation_bytes=10.0,
    deferred_bytes=6.0,
    workspace_bytes=0.5,
    parameters=3.0,
    weight_bytes=100.0,
    device_gradient_bytes=1000.0,
    static_bytes=10000.0,
    operators=(OperatorCost(name="gelu", forward_s=0.0, activation_bytes=4.0),),
)

B_DEVICE_1 = "device 1: F 1 0 keep=all; B 1 0; F 1 1 keep=all; B 1 1"


def plan_of(
    orders: str,
    stages: tuple[tuple[int, int, int], ...] = ((0, 1, 0), (1, 2, 1)),
    *,
    backward: tuple[tuple[int, int, int], ...] | None = None,
    micro_batches: int = 2,
    residency: Residency = Residency.RESIDENT,
) -> Plan:
    layout = StageLayout(
        num_devices=2,
        num_microbatches=micro_batches,
        forward=tuple(StageRange(start=a, stop=b, device=d) for a, b, d in stages),
        backward=tuple(StageRange(start=a, stop=b, device=d) for a, b, d in backward or stages),
    )
    return lower(
        Schedule(scheme="test", layout=layout, orders=parse_program(orders), residency=residency)
    )


def costs_of(plan: Plan) -> Costs:
    return Costs(blocks=(BLOCK,) * plan.num_blocks)


def activations(plan: Plan, device: int) -> list[tuple[str, float]]:
    """What is held beside weights and gradients while each instruction runs, as text."""
    held = footprints(plan, costs_of(plan))[device].activation_bytes
    return [
        (str(instruction).split(" peer")[0], num_bytes)
        for instruction, num_bytes in zip(plan.programs[device], held, strict=True)
    ]


@pytest.mark.parametrize(("together", "copies"), [("BW 0 0; BW 0 1", 0.0), ("BW 0 0,1", 12.0)])
def test_concatenated_weight_gradients_need_copies(together: str, copies: float) -> None:
    """Of one product at a time: at most what a block defers, 6 bytes a micro-batch."""
    orders = f"device 0: F 0 0 keep=all; F 0 1 keep=all; BI 0 0; BI 0 1; {together}\n{B_DEVICE_1}"
    plan = plan_of(orders)
    costs = replace(costs_of(plan), blocks=(replace(BLOCK, workspace_bytes=0.0),) * 2)
    concatenating = replace(plan, concatenates_gradients=True)
    found = [max(footprints(p, costs)[0].workspace_bytes) for p in (plan, concatenating)]
    assert found == [0.0, copies]


def test_everything_is_kept() -> None:
    """A graph is 10 bytes, an activation or gradient 1; what is sent goes with its send."""
    plan = plan_of(f"device 0: F 0 0 keep=all; F 0 1 keep=all; B 0 0; B 0 1\n{B_DEVICE_1}")
    assert activations(plan, 0) == [
        ("FW 0 phase=forward", 0.0),
        ("F 0 0 keep=all", 11.0),
        ("SA 0 0", 11.0),
        ("RG 1 0", 11.0),
        ("F 0 1 keep=all", 22.0),
        ("SA 0 1", 22.0),
        ("RG 1 1", 22.0),
        ("B 0 0", 22.0),
        ("B 0 1", 11.0),
        ("OG 0", 0.0),
        ("RW 0 phase=forward", 0.0),
    ]
    assert activations(plan, 1)[1:7] == [
        ("RA 0 0", 1.0),
        ("F 1 0 keep=all", 10.0),  # what came is part of what is kept
        ("RA 0 1", 11.0),
        ("B 1 0", 12.0),
        ("SG 1 0", 2.0),
        ("F 1 1 keep=all", 10.0),
    ]


def test_weights_gradients_and_what_is_always_there() -> None:
    plan = plan_of(f"device 0: F 0 0 keep=all; F 0 1 keep=all; B 0 0; B 0 1\n{B_DEVICE_1}")
    footprint = footprints(plan, costs_of(plan))[0]
    names = [str(instruction).split(" ")[0] for instruction in plan.programs[0]]
    weights = dict(zip(names, footprint.weight_bytes, strict=True))
    gradients = dict(zip(names, footprint.gradient_bytes, strict=True))
    workspace = dict(zip(names, footprint.workspace_bytes, strict=True))
    assert (weights["FW"], weights["OG"], weights["RW"]) == (100.0, 100.0, 0.0)
    # On a device that copies them, the sums of the last stage leave beside what follows.
    assert (gradients["F"], gradients["B"], gradients["OG"]) == (0.0, 1000.0, 1000.0)
    summed_in_place = replace(costs_of(plan), separate_memory=False)
    found = footprints(plan, summed_in_place)[0].gradient_bytes
    assert found[len(plan.programs[0]) - 2] == 0.0
    assert (workspace["F"], workspace["SA"], workspace["B"]) == (0.5, 0.0, 0.5)
    assert device_peaks(plan, costs_of(plan))[0] == DevicePeak(
        weight_bytes=100.0,
        gradient_bytes=1000.0,
        activation_bytes=22.0,
        workspace_bytes=0.5,
        static_bytes=10000.0,
    )


def test_residents_are_always_there() -> None:
    """16 bytes a parameter on the device that updates them, whatever else an update needs."""
    update = Update(block=0, resident=True)
    plan = plan_of(f"device 0: F 0 0 keep=all; F 0 1 keep=all; B 0 0; B 0 1\n{B_DEVICE_1}")
    costs = costs_of(plan)
    updated = replace(plan, programs=((*plan.programs[0], update), plan.programs[1]))
    before, after = (device_peaks(one, costs)[0].static_bytes for one in (plan, updated))
    assert after - before == 16 * costs.blocks[0].parameters > 0.0


def test_what_backward_inputs_leave_stays_until_the_weight_gradients() -> None:
    plan = plan_of(
        "device 0: F 0 0 keep=all; F 0 1 keep=all; BI 0 0; BI 0 1; BW 0 0,1\n"
        "device 1: F 1 0 keep=all; BI 1 0; F 1 1 keep=all; BI 1 1; BW 1 0; BW 1 1"
    )
    held = dict(activations(plan, 0))
    assert (held["BI 0 0"], held["BI 0 1"], held["BW 0 0,1"], held["OG 0"]) == (22.0, 17.0, 12.0, 0)
    held = dict(activations(plan, 1))
    assert (held["BW 1 0"], held["BW 1 1"]) == (12.0, 6.0)
    gradients = footprints(plan, costs_of(plan))[1].gradient_bytes
    # A BACKWARD_INPUT adds what cannot wait, such as gradients of norms.
    names = [str(instruction) for instruction in plan.programs[1]]
    assert (gradients[names.index("BI 1 0") - 1], gradients[names.index("BI 1 0")]) == (0.0, 1000.0)


def test_dropped_operators_are_not_kept_until_they_are_made_again() -> None:
    plan = plan_of(
        "device 0: F 0 0 keep=selective drop=gelu; F 0 1 keep=all; R 0 0; B 0 0; B 0 1\n"
        + B_DEVICE_1
    )
    held = dict(activations(plan, 0))
    assert held["F 0 0 keep=selective drop=gelu"] == 6.0 + 1.0
    assert held["F 0 1 keep=all"] == 6.0 + 10.0 + 1.0
    assert held["R 0 0"] == 10.0 + 10.0 + 1.0


def test_recomputation_keeps_checkpoints_only() -> None:
    """Device 1's checkpoint is the activation that came, under another name."""
    plan = plan_of(
        "device 0: F 0 0 keep=input; F 0 1 keep=input; R 0 0; B 0 0; R 0 1; B 0 1\n"
        "device 1: F 1 0 keep=input; F 1 1 keep=input; R 1 0; B 1 0; R 1 1; B 1 1"
    )
    held = dict(activations(plan, 1))
    assert held["F 1 0 keep=input"] == 2.0  # its input, and that of the next, which is posted
    assert held["F 1 1 keep=input"] == 2.0
    assert held["R 1 0"] == 1.0 + 10.0  # its own checkpoint is part of the graph
    assert held["B 1 0"] == 1.0 + 10.0 + 1.0
    assert held["R 1 1"] == 10.0


def test_a_skipped_forward_needs_no_activation() -> None:
    """Its checkpoint comes from the stage before."""
    plan = plan_of(
        "device 0: F 0 0 keep=input; F 0 1 keep=input; R 0 0; B 0 0; R 0 1; B 0 1\n"
        "device 1: R 1 0; B 1 0; R 1 1; B 1 1"
    )
    assert activations(plan, 1)[1:6] == [
        ("RC 1 0", 1.0),
        ("R 1 0", 10.0),
        ("RC 1 1", 11.0),
        ("B 1 0", 12.0),
        ("SG 1 0", 2.0),
    ]
    assert activations(plan, 0)[1:3] == [("F 0 0 keep=input", 1.0), ("SC 1 0", 1.0)]


@pytest.mark.parametrize(("peer", "host"), [("", 5.0), (" peer=1", 0.0)])
def test_swapped_activations_are_elsewhere(peer: str, host: float) -> None:
    plan = plan_of(
        f"device 0: F 0 0 keep=all; SO 0 0 fraction=0.5{peer}; F 0 1 keep=all;"
        f" SI 0 0 fraction=0.5{peer}; B 0 0; B 0 1\n{B_DEVICE_1}"
    )
    held = dict(activations(plan, 0))
    assert held["F 0 1 keep=all"] == 5.0 + 10.0 + 1.0
    assert held["SI 0 0 fraction=0.5"] == 20.0 + 1.0
    assert swapped_peaks(plan, costs_of(plan)) == (host, 0.0)


def test_a_peer_holds_what_others_swap_to_it() -> None:
    """From when the forward has ended (1) until device 0 takes it back (2, when B 1 0 starts)."""
    swap = "fraction=0.5 peer=1"
    plan = plan_of(
        f"device 0: F 0 0 keep=all; SO 0 0 {swap}; F 0 1 keep=all; SI 0 0 {swap}; B 0 0; B 0 1\n"
        + B_DEVICE_1
    )
    alone = plan_of(f"device 0: F 0 0 keep=all; F 0 1 keep=all; B 0 0; B 0 1\n{B_DEVICE_1}")
    extra = [
        (name, with_guest - without)
        for (name, with_guest), (_, without) in zip(
            activations(plan, 1), activations(alone, 1), strict=True
        )
    ]
    held = [(name, num_bytes) for name, num_bytes in extra if num_bytes]
    assert held == [("F 1 0 keep=all", 5.0), ("RA 0 1", 5.0)]


def test_an_update_has_its_state_on_the_device() -> None:
    plan = plan_of(f"device 0: F 0 0 keep=all; F 0 1 keep=all; B 0 0; B 0 1; U 0\n{B_DEVICE_1}")
    footprint = footprints(plan, costs_of(plan))[0]
    update = [str(instruction) for instruction in plan.programs[0]].index("U 0")
    assert footprint.workspace_bytes[update] == staging_bytes(3.0)
