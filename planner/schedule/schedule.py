"""A schedule: what schemes make and optimising passes transform, before lowering to programs.

A :class:`Schedule` holds stages and, per device, the order of compute, swap and update
instructions. :func:`lower` turns it into a :class:`~penstock.protocol.plan.plan.Plan` by inserting
transfers, weights and gradients (:mod:`penstock.planner.schedule.lowering`); :func:`schedule_of`
goes back, so that a pass can be applied to any plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.schedule.layout import Order, OrderedInstruction, Residency, StageLayout
from penstock.planner.schedule.lowering import complete
from penstock.protocol.plan.instructions import FetchWeights, Forward, Keep, ReduceGradients, Update
from penstock.protocol.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Holds the stages, and per device the order of its instructions.

    ``rebinds_weights``, ``shards_weights``, ``concatenates_gradients`` and ``settled_early`` as in
    :class:`~penstock.protocol.plan.plan.Plan`, but an UPDATE takes its block out of
    ``settled_early``;
    ``reduces_gradients``: a REDUCE_GRADIENTS precedes every offload (data parallelism).
    """

    scheme: str
    layout: StageLayout
    orders: tuple[Order, ...]
    residency: Residency
    rebinds_weights: bool = False
    shards_weights: bool = False
    reduces_gradients: bool = False
    concatenates_gradients: bool = False
    settled_early: tuple[int, ...] = ()


def lower(schedule: Schedule) -> Plan:
    """Returns the plan of a schedule, with its evaluation.

    Raises:
        ValueError: instructions wait for each other in a circle, or for work that no device does.
    """
    layout = schedule.layout
    streamed = schedule.residency is Residency.STREAMED
    completed = complete(
        layout,
        schedule.orders,
        streamed=streamed,
        reduces_gradients=schedule.reduces_gradients,
    )
    updated = {i.block for order in schedule.orders for i in order if isinstance(i, Update)}
    evaluation = complete(layout, forward_only(layout), streamed=streamed, reduces_gradients=False)
    return Plan(
        scheme=schedule.scheme,
        num_devices=layout.num_devices,
        num_microbatches=layout.num_microbatches,
        forward_stages=layout.forward,
        backward_stages=layout.backward,
        programs=completed.programs,
        evaluation=evaluation.programs,
        routes=layout.routes,
        weight_buffers=max(completed.weight_buffers, evaluation.weight_buffers),
        rebinds_weights=schedule.rebinds_weights,
        shards_weights=schedule.shards_weights,
        concatenates_gradients=schedule.concatenates_gradients,
        settled_early=tuple(b for b in schedule.settled_early if b not in updated),
    )


def schedule_of(plan: Plan) -> Schedule:
    """Returns the schedule that a plan came from: its programs without what lowering inserts."""
    orders = tuple(
        tuple(i for i in program if isinstance(i, OrderedInstruction)) for program in plan.programs
    )
    return Schedule(
        scheme=plan.scheme,
        layout=StageLayout.of(plan),
        orders=orders,
        residency=_residency(plan),
        rebinds_weights=plan.rebinds_weights,
        shards_weights=plan.shards_weights,
        concatenates_gradients=plan.concatenates_gradients,
        settled_early=plan.settled_early,
        reduces_gradients=any(
            isinstance(i, ReduceGradients) for program in plan.programs for i in program
        ),
    )


def _residency(plan: Plan) -> Residency:
    """Returns RESIDENT where no device fetches after its first compute instruction."""
    for program in plan.programs:
        computing = False
        for instruction in program:
            computing = computing or isinstance(instruction, OrderedInstruction)
            if computing and isinstance(instruction, FetchWeights):
                return Residency.STREAMED
    return Residency.RESIDENT


def forward_only(layout: StageLayout) -> tuple[Order, ...]:
    """Returns the evaluation order: all forwards, stage by stage, with nothing kept."""
    return tuple(
        tuple(
            Forward(stage=stage, micro_batch=m, keep=Keep.NONE)
            for stage in layout.forward_stages_on(device)
            for m in layout.microbatches_of_route[layout.forward_routes[stage]]
        )
        for device in range(layout.num_devices)
    )
