"""What the validator says of split backwards, selective recomputation, swaps, updates, several
routes, skipped forwards, sharded weights: one broken rule each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from penstock.host.errors import ConfigError
from penstock.planner.schedule.layout import Residency, StageLayout
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.validate.check import PlanError, validate
from penstock.protocol.plan.instructions import Instruction, parse_instruction, parse_program
from penstock.protocol.plan.plan import Plan, StageRange

Execute = Callable[[Plan], None]

DOWN = ((0, 1, 0), (1, 2, 1))
UP = ((0, 1, 1), (1, 2, 0))


def plan_of(
    orders: str,
    stages: tuple[tuple[int, int, int], ...] = DOWN,
    backward: tuple[tuple[int, int, int], ...] | None = None,
    *,
    routes: tuple[int, ...] = (),
    micro_batches: int = 2,
    residency: Residency = Residency.RESIDENT,
    rebinds_weights: bool = False,
    shards_weights: bool = False,
    reduces_gradients: bool = False,
) -> Plan:
    """A lowered plan; stages as (start, stop, device), orders as text."""
    layout = StageLayout(
        num_devices=2,
        num_microbatches=micro_batches,
        forward=tuple(StageRange(start=a, stop=b, device=d) for a, b, d in stages),
        backward=tuple(StageRange(start=a, stop=b, device=d) for a, b, d in backward or stages),
        routes=routes,
    )
    return lower(
        Schedule(
            scheme="test",
            layout=layout,
            orders=parse_program(orders),
            residency=residency,
            rebinds_weights=rebinds_weights,
            shards_weights=shards_weights,
            reduces_gradients=reduces_gradients,
        )
    )


SPLIT = plan_of(
    """
    device 0: F 0 0 keep=all; F 0 1 keep=all; BI 0 0; BI 0 1; BW 0 0,1
    device 1: F 1 0 keep=all; F 1 1 keep=all; BI 1 0; BI 1 1; BW 1 0; BW 1 1
    """
)
SELECTIVE = plan_of(
    """
    device 0: F 0 0 keep=selective drop=gelu; F 0 1 keep=all; R 0 0; B 0 0; B 0 1
    device 1: F 1 0 keep=all; B 1 0; F 1 1 keep=all; B 1 1
    """
)
SWAP = plan_of(
    """
    device 0: F 0 0 keep=all; SO 0 0 fraction=0.5 peer=1; F 0 1 keep=all
      SI 0 0 fraction=0.5 peer=1; B 0 0; B 0 1
    device 1: F 1 0 keep=all; B 1 0; F 1 1 keep=all; B 1 1
    """
)
UPDATE = plan_of(
    """
    device 0: F 0 0 keep=all; F 0 1 keep=all; B 0 0; B 0 1; U 0; U 1
    device 1: F 1 0 keep=all; B 1 0; F 1 1 keep=all; B 1 1
    """,
    reduces_gradients=True,
)
BIDIRECTIONAL = plan_of(
    """
    device 0: F 0 0 keep=all; F 3 1 keep=all; B 3 1; B 0 0
    device 1: F 2 1 keep=all; F 1 0 keep=all; B 1 0; B 2 1
    """,
    DOWN + UP,
    routes=(0, 1),
)
SUMMED = plan_of(
    """
    device 0: F 0 0 keep=all; F 3 1 keep=all; B 3 1; B 0 0
    device 1: F 2 1 keep=all; F 1 0 keep=all; B 1 0; B 2 1
    """,
    DOWN + UP,
    routes=(0, 1),
    reduces_gradients=True,
)
SKIPPED = plan_of(
    """
    device 0: F 0 0 keep=input; F 0 1 keep=input; R 0 0; B 0 0; R 0 1; B 0 1
    device 1: R 1 0; B 1 0; R 1 1; B 1 1
    """
)
SHARDED = plan_of(
    """
    device 0: F 0 0 keep=all; F 1 0 keep=all; B 1 0; B 0 0
    device 1: F 2 1 keep=all; F 3 1 keep=all; B 3 1; B 2 1
    """,
    ((0, 1, 0), (1, 2, 0), (0, 1, 1), (1, 2, 1)),
    routes=(0, 1),
    residency=Residency.STREAMED,
    shards_weights=True,
    reduces_gradients=True,
)
PLANS = {
    "split": SPLIT,
    "selective": SELECTIVE,
    "swap": SWAP,
    "update": UPDATE,
    "bidirectional": BIDIRECTIONAL,
    "summed": SUMMED,
    "skipped": SKIPPED,
    "sharded": SHARDED,
}


@pytest.mark.parametrize("name", PLANS)
def test_they_are_accepted_and_compute(name: str, execute: Execute) -> None:
    validate(PLANS[name])
    execute(PLANS[name])


def edited(plan: Plan, device: int, edit: Callable[[list[Instruction]], object]) -> Plan:
    """The plan with one device's program changed in place by ``edit``."""
    programs = [list(program) for program in plan.programs]
    edit(programs[device])
    return dataclasses.replace(plan, programs=tuple(map(tuple, programs)))


def complaint(plan: Plan) -> tuple[int, str, str]:
    """Device, instruction (or "end") and reason of the plan's error."""
    with pytest.raises(PlanError) as caught:
        validate(plan)
    error = caught.value
    program = plan.programs[error.device]
    step = str(program[error.position]) if error.position < len(program) else "end"
    return error.device, step, error.reason


@pytest.mark.parametrize(
    ("name", "device", "dropped", "step", "reason"),
    [
        ("split", 0, "BI 0 1", "BW 0 0,1", "BACKWARD_INPUT of micro-batch 1 did not run before it"),
        ("split", 1, "BW 1 1", "OG 1", "BACKWARD_WEIGHT of micro-batch 1 is missing"),
        ("split", 1, "BI 1 0", "SG 1 0 peer=0", "does not exist on this device"),
        ("selective", 0, "R 0 0", "B 0 0", "dropped operators, and no RECOMPUTE made them again"),
        ("swap", 0, "SO 0 0 fraction=0.5 peer=1", "SI 0 0 fraction=0.5 peer=1", "not swapped out"),
        ("swap", 0, "SI 0 0 fraction=0.5 peer=1", "B 0 0", "no SWAP_IN ran before it"),
        ("update", 0, "RD 0", "OG 0", "no REDUCE_GRADIENTS of these ran before it"),
        ("update", 0, "OG 0", "U 0", "OFFLOAD_GRADIENTS 0 did not run before it"),
        ("bidirectional", 1, "B 2 1", "OG 2", "BACKWARD of micro-batch 1 is missing"),
        ("bidirectional", 1, "OG 2", "end", "gradients of backward stage 2 were never offloaded"),
        ("skipped", 0, "F 0 1 keep=input", "SC 1 1 peer=1", "does not exist on this device"),
        ("skipped", 1, "RC 1 1 peer=0", "R 1 1", "no receive of it was posted before"),
        ("sharded", 1, "RD 2", "OG 2", "no REDUCE_GRADIENTS of these ran before it"),
    ],
)
def test_a_missing_instruction_is_found_where_it_is_missed(
    name: str, device: int, dropped: str, step: str, reason: str
) -> None:
    broken = edited(PLANS[name], device, lambda p: p.remove(parse_instruction(dropped)))
    found = complaint(broken)
    assert found[:2] == (device, step)
    assert reason in found[2]


@pytest.mark.parametrize(
    ("name", "device", "added", "before", "reason"),
    [
        ("split", 1, "BW 1 0", "BW 1 1", "this work was done before"),
        ("split", 0, "B 0 0", "BW 0 0,1", "this work was done before"),
        ("split", 0, "BW 0 0,0", "BI 0 1", "this work was done before"),
        ("split", 0, "BW 0 0", "BI 0 0", "BACKWARD_INPUT of micro-batch 0 did not run before it"),
        ("split", 1, "OG 1", "BW 1 1", "BACKWARD_WEIGHT of micro-batch 1 is missing"),
        ("split", 0, "R 0 0", "BI 0 0", "its FORWARD kept all activations"),
        ("selective", 0, "R 0 0", "B 0 0", "this work was done before"),
        (
            "selective",
            0,
            "F 0 0 keep=selective",
            "F 0 0 keep=selective drop=gelu",
            "belong together",
        ),
        (
            "selective",
            0,
            "SO 0 0 fraction=1.0",
            "B 0 0",
            "no activations: no FORWARD with keep=all",
        ),
        ("swap", 0, "SO 0 0 fraction=0.5", "F 0 1 keep=all", "was swapped out before"),
        ("swap", 0, "SO 0 1 fraction=0.5 peer=0", "B 0 0", "wrong peer: there are 2 devices"),
        ("swap", 0, "SO 0 1 fraction=0.5 peer=2", "B 0 0", "wrong peer: there are 2 devices"),
        ("swap", 0, "SI 0 0 fraction=0.5", "B 0 0", "these activations are not swapped out"),
        (
            "swap",
            0,
            "SI 0 0 fraction=0.25 peer=1",
            "F 0 1 keep=all",
            "the SWAP_OUT took fraction 0.5 to device 1; this brings back another",
        ),
        ("swap", 0, "SO 1 0 fraction=0.5", "F 0 1 keep=all", "no activations: no FORWARD"),
        ("update", 0, "U 0", "U 1", "this work was done before"),
        ("update", 0, "U 2", "U 1", "there are 2 blocks"),
        ("update", 0, "U 0", "OG 0", "OFFLOAD_GRADIENTS 0 did not run before it"),
        ("update", 0, "RD 0", "B 0 1", "the gradients are not final: BACKWARD of micro-batch 1"),
        ("update", 0, "RD 0", "U 0", "these gradients were offloaded before"),
        ("update", 0, "RD 0", "OG 0", "these gradients were reduced before"),
        (
            "bidirectional",
            0,
            "F 0 1 keep=all",
            "F 3 1 keep=all",
            "micro-batch 1 takes route 1, forward stage 0 is of route 0",
        ),
        ("bidirectional", 0, "B 0 1", "B 0 0", "backward stage 0 is of route 0"),
        ("bidirectional", 0, "SA 0 1 peer=1", "B 0 0", "there is no activation of stage 0"),
        ("bidirectional", 0, "SA 1 0 peer=1", "B 0 0", "there is no activation of stage 1"),
        ("bidirectional", 0, "SG 2 1 peer=1", "B 0 0", "there is no gradient of stage 2"),
        ("skipped", 0, "SA 0 0 peer=1", "R 0 0", "FORWARD 1 0 is missing"),
    ],
)
def test_a_surplus_instruction_is_found(
    name: str, device: int, added: str, before: str, reason: str
) -> None:
    def edit(program: list[Instruction]) -> None:
        program.insert(program.index(parse_instruction(before)), parse_instruction(added))

    found = complaint(edited(PLANS[name], device, edit))
    assert found[:2] == (device, added)
    assert reason in found[2]


def test_a_forward_that_somebody_needs_may_not_be_missing() -> None:
    """Backward stage 2 starts strictly inside forward stage 1: that part of it has to run."""
    stages, backward = ((0, 2, 0), (2, 4, 1)), ((0, 2, 0), (2, 3, 1), (3, 4, 0))
    orders = """
        device 0: F 0 0 keep=input; R 2 0; B 2 0; R 0 0; B 0 0
        device 1: {} R 1 0; B 1 0
        """
    validate(plan_of(orders.format("F 1 0 keep=input;"), stages, backward, micro_batches=1))
    with pytest.raises(ValueError, match="for work of no device"):
        plan_of(orders.format(""), stages, backward, micro_batches=1)


def test_several_forwards_may_be_skipped(execute: Execute) -> None:
    """One backward stage recomputes both forward stages after the first, on the first's device."""
    plan = plan_of(
        """
        device 0: F 0 0 keep=input; F 0 1 keep=input; R 1 0; B 1 0; R 1 1; B 1 1
        device 1: R 0 0; B 0 0; R 0 1; B 0 1
        """,
        ((0, 1, 0), (1, 2, 1), (2, 3, 0)),
        ((0, 1, 1), (1, 3, 0)),
    )
    validate(plan)
    execute(plan)
    assert [str(i) for i in plan.programs[0] if "C" in i.opcode.value] == []


def test_updates_wait_for_gradients_of_other_devices() -> None:
    broken = edited(UPDATE, 1, lambda p: p.remove(parse_instruction("OG 1")))
    assert complaint(broken) == (
        0,
        "U 1",
        "deadlock: device 0 (U 1) waits for the gradients of backward stage 1 in host memory from"
        " 1, which never offloads them",
    )


def test_updates_run_on_the_node_that_owns_the_block() -> None:
    validate(UPDATE, devices_per_node=2)
    with pytest.raises(PlanError, match=r"device 0, .* \(U 1\): block 1 is owned by node 1"):
        validate(UPDATE, devices_per_node=1)


def test_collectives_are_entered_in_one_order() -> None:
    def edit(program: list[Instruction]) -> None:
        program[0], program[1] = program[1], program[0]

    assert [str(i) for i in SHARDED.programs[1][:2]] == ["FW 2 phase=forward", "FW 3 phase=forward"]
    device, _, reason = complaint(edited(SHARDED, 1, edit))
    assert device in (0, 1)
    assert "collective 0 is the all-gather of blocks" in reason


def test_a_collective_waits_for_everybody() -> None:
    """Device 1 does not gather stage 1, so device 0 waits before it can use its own."""

    def edit(program: list[Instruction]) -> None:
        del program[1:]

    device, step, reason = complaint(edited(SHARDED, 1, edit))
    assert (device, step) == (0, "F 1 0 keep=all")
    assert reason.endswith("waits for the collective 1 with 1, which never enters it")


def test_weights_are_released_between_forward_and_backward_only_where_they_are_found_anew(
    execute: Execute, execution_failed: type[Exception]
) -> None:
    orders = """
        device 0: F 0 0 keep=all; F 2 0 keep=all; F 4 0 keep=all; B 4 0; B 2 0; B 0 0
        device 1: F 1 0 keep=all; F 3 0 keep=all; F 5 0 keep=all; B 5 0; B 3 0; B 1 0
        """
    stages = tuple((i, i + 1, i % 2) for i in range(6))
    plan = plan_of(
        orders, stages, micro_batches=1, residency=Residency.STREAMED, rebinds_weights=True
    )
    validate(plan)
    execute(plan)
    bound = dataclasses.replace(plan, rebinds_weights=False)
    device, step, reason = complaint(bound)
    assert step == f"RW {device} phase=forward"
    assert "still wait for their BACKWARD, which needs these weights" in reason
    with pytest.raises(execution_failed):
        execute(bound)


def test_every_route_has_a_micro_batch() -> None:
    plan = dataclasses.replace(BIDIRECTIONAL, routes=(0, 0))
    with pytest.raises(
        ConfigError, match="no micro-batch takes route 1; 2 micro-batches for 2 routes"
    ):
        validate(plan)


def test_a_long_list_of_waiting_devices_is_cut() -> None:
    """Forty devices in a row wait for the first, which never sends."""
    count = 40
    layout = StageLayout(
        num_devices=count,
        num_microbatches=1,
        forward=tuple(StageRange(start=i, stop=i + 1, device=i) for i in range(count)),
        backward=tuple(StageRange(start=i, stop=i + 1, device=i) for i in range(count)),
    )
    orders = parse_program(
        "".join(f"device {i}: F {i} 0 keep=all; B {i} 0\n" for i in range(count))
    )
    plan = lower(
        Schedule(scheme="test", layout=layout, orders=orders, residency=Residency.RESIDENT)
    )
    broken = edited(plan, 0, lambda p: p.remove(parse_instruction("SA 0 0 peer=1")))
    _, step, reason = complaint(broken)
    assert step == "F 1 0 keep=all"
    assert reason.startswith("deadlock: device 1 (F 1 0 keep=all) waits for the activation")
    assert reason.endswith("; and 24 more devices wait")


def test_sums_that_wait_for_each_other() -> None:
    """Each device publishes for both directions, and sends its own sums too late."""
    first, second = SUMMED.programs
    late = tuple(i for i in first if str(i) not in ("RD 3", "OG 3"))
    late += tuple(parse_program("device 0: RD 3; OG 3")[0])
    with pytest.raises(PlanError) as caught:
        validate(dataclasses.replace(SUMMED, programs=(late, second)))
    assert caught.value.reason == (
        "deadlock: device 0 (OG 0) waits for the gradients of backward stage 2, to sum them from 1,"
        " which waits itself; device 1 (OG 1) waits for the gradients of backward stage 3, to sum"
        " them from 0, which waits itself"
    )


def test_sums_that_nobody_sends() -> None:
    first, second = SUMMED.programs
    silent = tuple(i for i in first if str(i) not in ("RD 3", "OG 3"))
    with pytest.raises(PlanError, match="stage 3, to sum them from 0, which never reduces them"):
        validate(dataclasses.replace(SUMMED, programs=(silent, second)))
