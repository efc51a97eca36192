"""Where lowering puts transfers, weights and gradients; when orders run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from penstock.planner.cost.costs import BlockCost, Costs, OperatorCost
from penstock.planner.schedule.layout import Residency, StageLayout
from penstock.planner.schedule.schedule import Schedule, lower, schedule_of
from penstock.planner.schedule.tensors import TensorKind, endpoints
from penstock.planner.schedule.timing import order_times, unit_costs
from penstock.planner.validate.check import validate
from penstock.protocol.plan.instructions import (
    FetchWeights,
    Instruction,
    OffloadGradients,
    ReleaseWeights,
    format_instruction,
    parse_program,
)
from penstock.protocol.plan.plan import Plan, StageRange
from penstock.protocol.plan.resources import PlanFacts

Execute = Callable[[Plan], None]
Stages = tuple[tuple[int, int, int], ...]


def layout_of(
    stages: Stages,
    backward: Stages | None = None,
    *,
    micro_batches: int = 1,
    routes: tuple[int, ...] = (),
) -> StageLayout:
    """Stages as (start, stop, device), on two devices."""
    return StageLayout(
        num_devices=2,
        num_microbatches=micro_batches,
        forward=tuple(StageRange(start=a, stop=b, device=d) for a, b, d in stages),
        backward=tuple(StageRange(start=a, stop=b, device=d) for a, b, d in backward or stages),
        routes=routes,
    )


def plan_of(layout: StageLayout, orders: str, residency: Residency = Residency.RESIDENT) -> Plan:
    return lower(
        Schedule(scheme="test", layout=layout, orders=parse_program(orders), residency=residency)
    )


def texts(program: tuple[Instruction, ...], *kinds: type[Instruction]) -> list[str]:
    """Instructions of some kinds, or all, as text."""
    return [format_instruction(i) for i in program if not kinds or isinstance(i, kinds)]


def test_routes_end_where_they_end(execute: Execute) -> None:
    """Two routes through the same devices, up and down: nothing passes from one to the other."""
    layout = layout_of(((0, 1, 0), (1, 2, 1), (0, 1, 1), (1, 2, 0)), micro_batches=2, routes=(0, 1))
    plan = plan_of(
        layout,
        """
        device 0: F 0 0 keep=all; F 3 1 keep=all; B 3 1; B 0 0
        device 1: F 2 1 keep=all; F 1 0 keep=all; B 1 0; B 2 1
        """,
    )
    validate(plan)
    execute(plan)
    assert texts(plan.programs[0]) == [
        "FW 0 phase=forward",
        "FW 3 phase=forward",
        "RA 2 1 peer=1",
        "F 0 0 keep=all",
        "SA 0 0 peer=1",
        "F 3 1 keep=all",
        "RG 1 0 peer=1",
        "B 3 1",
        "SG 3 1 peer=1",
        "OG 3",
        "RW 3 phase=forward",
        "B 0 0",
        "OG 0",
        "RW 0 phase=forward",
    ]


def test_the_output_before_a_skipped_forward_is_a_checkpoint(execute: Execute) -> None:
    layout = layout_of(((0, 2, 0), (2, 4, 1)), ((0, 1, 0), (1, 2, 1), (2, 4, 1)))
    orders = """
        device 0: F 0 0 keep=input; R 0 0; B 0 0
        device 1: R 2 0; B 2 0; R 1 0; B 1 0
        """
    plan = plan_of(layout, orders)
    validate(plan)
    execute(plan)
    assert texts(plan.programs[0])[2:5] == [
        "F 0 0 keep=input",
        "SC 2 0 peer=1",
        "SC 1 0 peer=1",
    ]
    assert PlanFacts.of(layout, plan.programs).skipped == {(1, 0)}
    assert layout.checkpoint_source(2) == 1
    assert layout.checkpoint_source(2, skipped=True) == 0
    assert endpoints(layout, TensorKind.CHECKPOINT, 2) == (1, 1)
    assert endpoints(layout, TensorKind.CHECKPOINT, 2, skipped=True) == (0, 1)


def test_endpoints_know_routes() -> None:
    layout = layout_of(((0, 1, 0), (1, 2, 1), (0, 1, 1), (1, 2, 0)), micro_batches=2, routes=(0, 1))
    activations = [endpoints(layout, TensorKind.ACTIVATION, s) for s in range(-1, 5)]
    gradients = [endpoints(layout, TensorKind.GRADIENT, b) for b in range(-1, 5)]
    checkpoints = [endpoints(layout, TensorKind.CHECKPOINT, b) for b in range(-1, 5)]
    assert activations == [None, (0, 1), None, (1, 0), None, None]
    assert gradients == [None, None, (1, 0), None, (0, 1), None]
    assert checkpoints == [None, None, (1, 1), None, (0, 0), None]


def test_a_gradient_is_received_before_the_recomputation_that_waits_for_it() -> None:
    orders = """
        device 0: F 0 0 keep=input; R 0 0 {}; B 0 0
        device 1: F 1 0 keep=all; B 1 0
        """
    layout = layout_of(((0, 1, 0), (1, 2, 1)))
    early = plan_of(layout, orders.format("after=gradient"))
    late = plan_of(layout, orders.format(""))
    validate(early)
    assert texts(early.programs[0])[1:5] == [
        "RG 1 0 peer=1",
        "F 0 0 keep=input",
        "SA 0 0 peer=1",
        "R 0 0 after=gradient",
    ]
    assert texts(late.programs[0])[3:6] == ["RG 1 0 peer=1", "R 0 0", "B 0 0"]


ROW_OF_SIX = tuple((i, i + 1, i % 2) for i in range(6))


def test_streamed_weights_arrive_one_stage_ahead() -> None:
    """A buffer takes the stage after the next as soon as its own has ended; the last one stays."""
    plan = plan_of(
        layout_of(ROW_OF_SIX),
        """
        device 0: F 0 0 keep=input; F 2 0 keep=input; F 4 0 keep=input; R 4 0; B 4 0
          R 2 0; B 2 0; R 0 0; B 0 0
        device 1: F 1 0 keep=input; F 3 0 keep=input; F 5 0 keep=input; R 5 0; B 5 0
          R 3 0; B 3 0; R 1 0; B 1 0
        """,
        Residency.STREAMED,
    )
    validate(plan)
    assert texts(plan.programs[0], FetchWeights, ReleaseWeights) == [
        "FW 0 phase=forward",
        "FW 2 phase=forward",
        "RW 0 phase=forward",
        "FW 4 phase=forward",
        "RW 4 phase=forward",
        "FW 0 phase=backward",
        "RW 2 phase=forward",
        "RW 0 phase=backward",
    ]


def test_two_stages_in_turns_are_fetched_once() -> None:
    plan = plan_of(
        layout_of(((0, 1, 0), (1, 2, 1), (2, 3, 0), (3, 4, 1)), micro_batches=2),
        """
        device 0: F 0 0 keep=input; F 2 0 keep=input; F 0 1 keep=input; R 2 0; B 2 0
          R 0 0; B 0 0; F 2 1 keep=input; R 2 1; B 2 1; R 0 1; B 0 1
        device 1: F 1 0 keep=input; F 3 0 keep=input; F 1 1 keep=input; R 3 0; B 3 0
          R 1 0; B 1 0; F 3 1 keep=input; R 3 1; B 3 1; R 1 1; B 1 1
        """,
        Residency.STREAMED,
    )
    validate(plan)
    assert texts(plan.programs[0], FetchWeights, ReleaseWeights) == [
        "FW 0 phase=forward",
        "FW 2 phase=forward",
        "RW 2 phase=forward",
        "RW 0 phase=forward",
    ]


def test_weight_gradients_fetch_nothing() -> None:
    """They read no weights, so three stages' can wait until the end."""
    plan = plan_of(
        layout_of(ROW_OF_SIX),
        """
        device 0: F 0 0 keep=input; F 2 0 keep=input; F 4 0 keep=input; R 4 0; BI 4 0
          R 2 0; BI 2 0; R 0 0; BI 0 0; BW 4 0; BW 2 0; BW 0 0
        device 1: F 1 0 keep=input; F 3 0 keep=input; F 5 0 keep=input; R 5 0; BI 5 0
          R 3 0; BI 3 0; R 1 0; BI 1 0; BW 5 0; BW 3 0; BW 1 0
        """,
        Residency.STREAMED,
    )
    validate(plan)
    assert texts(plan.programs[0])[-8:] == [
        "BI 0 0",
        "RW 0 phase=backward",
        "BW 4 0",
        "OG 4",
        "BW 2 0",
        "OG 2",
        "BW 0 0",
        "OG 0",
    ]


def test_gradients_leave_right_after_the_last_one() -> None:
    plan = plan_of(
        layout_of(((0, 1, 0), (1, 2, 1)), micro_batches=2),
        """
        device 0: F 0 0 keep=all; F 0 1 keep=all; BI 0 0; BI 0 1; BW 0 1; BW 0 0; U 0
        device 1: F 1 0 keep=all; B 1 0; F 1 1 keep=all; B 1 1
        """,
    )
    followers = {
        format_instruction(a): format_instruction(b)
        for program in plan.programs
        for a, b in pairwise(program)
        if isinstance(b, OffloadGradients)
    }
    assert followers == {"BW 0 0": "OG 0", "SG 1 1 peer=0": "OG 1"}


def test_lowering_can_be_undone() -> None:
    layout = layout_of(((0, 1, 0), (1, 2, 1)), micro_batches=2)
    plan = plan_of(
        layout,
        """
        device 0: F 0 0 keep=all; SO 0 0 fraction=0.5; F 0 1 keep=all; SI 0 0 fraction=0.5
          BI 0 0; B 0 1; BW 0 0; U 0
        device 1: F 1 0 keep=input; F 1 1 keep=all; R 1 0; B 1 0; B 1 1
        """,
    )
    assert lower(schedule_of(plan)) == plan
    early = replace(plan, settled_early=(1,))
    assert lower(schedule_of(early)) == early
    with_update = replace(schedule_of(plan), settled_early=(0, 1))
    assert lower(with_update) == early, "devices' blocks are settled early anyway"


class TestOrderTimes:
    """Of two stages, a forward 1, a recomputation 1, a backward 1 + 1, of operator gelu 0.25."""

    costs = Costs(
        blocks=(
            BlockCost(
                forward_s=1.0,
                recompute_s=1.0,
                backward_input_s=1.0,
                backward_weight_s=1.0,
                operators=(OperatorCost(name="gelu", forward_s=0.25, activation_bytes=0.0),),
            ),
        )
        * 2
    )

    def starts(self, orders: str, hop_s: float = 0.0) -> dict[str, float]:
        layout = layout_of(((0, 1, 0), (1, 2, 1)), micro_batches=2)
        programs = parse_program(orders)
        times = order_times(layout, programs, self.costs, hop_s=hop_s)
        return {
            format_instruction(instruction).partition(" keep")[0]: start
            for program, row in zip(programs, times.starts, strict=True)
            for instruction, start in zip(program, row, strict=True)
        }

    def test_split_backwards_and_hops(self) -> None:
        assert self.starts(
            """
            device 0: F 0 0 keep=all; F 0 1 keep=all; BI 0 0; BI 0 1; BW 0 0,1
            device 1: F 1 0 keep=all; BI 1 0; F 1 1 keep=all; BI 1 1; BW 1 0,1
            """,
            hop_s=0.5,
        ) == {
            "F 0 0": 0.0,
            "F 0 1": 1.0,
            "BI 0 0": 4.0,
            "BI 0 1": 6.0,
            "BW 0 0,1": 7.0,
            "F 1 0": 1.5,
            "BI 1 0": 2.5,
            "F 1 1": 3.5,
            "BI 1 1": 4.5,
            "BW 1 0,1": 5.5,
        }

    def test_dropped_operators_and_waiting_for_gradients(self) -> None:
        assert self.starts(
            """
            device 0: F 0 0 keep=selective drop=gelu; F 0 1 keep=input; R 0 0; B 0 0
          R 0 1 after=gradient; B 0 1
            device 1: F 1 0 keep=all; B 1 0; F 1 1 keep=all; B 1 1
            """
        ) == {
            "F 0 0": 0.0,
            "F 0 1": 1.0,
            "R 0 0": 2.0,
            "B 0 0": 4.0,
            "R 0 1 after=gradient": 7.0,
            "B 0 1": 8.0,
            "F 1 0": 1.0,
            "B 1 0": 2.0,
            "F 1 1": 4.0,
            "B 1 1": 5.0,
        }

    def test_a_skipped_forward_is_not_waited_for(self) -> None:
        found = self.starts(
            """
            device 0: F 0 0 keep=input; F 0 1 keep=input; R 0 0; B 0 0; R 0 1; B 0 1
            device 1: R 1 0; B 1 0; R 1 1; B 1 1
            """
        )
        assert (found["R 1 0"], found["B 0 0"], found["B 0 1"]) == (1.0, 4.0, 7.0)

    def test_circles_are_an_error(self) -> None:
        layout = layout_of(((0, 1, 0), (1, 2, 1)))
        orders = parse_program("device 0: B 0 0; F 0 0 keep=all\ndevice 1: F 1 0 keep=all; B 1 0")
        with pytest.raises(ValueError, match="wait for each other in a circle"):
            order_times(layout, orders, unit_costs(layout))
