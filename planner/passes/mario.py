"""Mario: activation checkpointing in the bubbles of a pipeline, for next to nothing.

Source: Liu, Li, Tan, Jia, "Mario: Near Zero-cost Activation Checkpointing in Pipeline Parallelism",
PPoPP 2025, section 5.1. Passes 1 to 4 in the paper's order, and ``mario``, which applies them until
nothing gets shorter. None knows the shape of the pipeline. They work on every scheme with coupled
forward and backward stages, and leave existing recomputations alone.

Passes 2 to 4 never make a schedule slower: a rearrangement that would is dropped. With weights that
are streamed (:class:`~penstock.planner.schedule.layout.Residency`) nothing is moved, since leaving
a stage and coming back costs another fetch.

The paper's step 1 recomputes only when the gradient has arrived (28 units in figure 2); a plan
writes ``R s m after=gradient``. So the first step of overlapping is not to wait.

Section 5.1 distinguishes two places for the send of a forward that is preposed, because its sends
block until they are received. Ours do not: a send starts a transfer, a receive posts a buffer.
Lowering posts it one instruction ahead of the forward that consumes it.

- The next device preposes its forward as well: the receive is posted early, and the output leaves
  at once (the paper's case 1).
- It does not: the transfer waits for the receive, and the output stays in the sender's memory until
  then (case 2).

Neither can deadlock, because lowering posts all receives between two devices in the order of the
sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from penstock.planner.passes.base import Pass, PassContext
from penstock.planner.passes.dispatch import fill_waits
from penstock.planner.schedule.layout import Order, OrderedInstruction, Residency
from penstock.planner.schedule.schedule import Schedule
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    Forward,
    Keep,
    Recompute,
    RecomputeAfter,
    SwapIn,
    SwapOut,
)


def apply_checkpoint(schedule: Schedule, context: PassContext) -> Schedule:
    """Applies pass 1: forwards keep their input only, and each backward recomputes right before it
    starts.

    The recomputation waits for the gradient, as in frameworks that recompute inside their backward.
    Swaps of activations that are not kept any more go. A device then holds the activations of one
    micro-batch and one stage, and of every other micro-batch the input. With v stages per device
    the activations are 1/v of a device's share (table 1), for any number of devices.
    """
    del context
    kept = {
        (i.stage, i.micro_batch)
        for order in schedule.orders
        for i in order
        if isinstance(i, Forward) and i.keep is Keep.ALL
    }
    if not kept:
        return schedule
    orders = tuple(tuple(_checkpointed(order, kept)) for order in schedule.orders)
    return replace(schedule, orders=orders)


def _checkpointed(order: Order, kept: set[tuple[int, int]]) -> Iterator[OrderedInstruction]:
    for instruction in order:
        match instruction:
            case Forward(stage=s, micro_batch=m) if (s, m) in kept:
                yield Forward(stage=s, micro_batch=m, keep=Keep.INPUT)
            case SwapOut(stage=s, micro_batch=m) | SwapIn(stage=s, micro_batch=m) if (s, m) in kept:
                pass
            case Backward(stage=s, micro_batch=m) | BackwardInput(stage=s, micro_batch=m):
                if (s, m) in kept:
                    yield Recompute(stage=s, micro_batch=m, after=RecomputeAfter.GRADIENT)
                yield instruction
            case _:
                yield instruction


def overlap_recompute(schedule: Schedule, context: PassContext) -> Schedule:
    """Applies pass 2: recomputations run while the gradient is on its way, and ahead of forwards
    that wait.

    A recomputation is never moved ahead of another backward, so the activations of one micro-batch
    exist at a time, as after pass 1.
    """
    orders = tuple(tuple(map(_without_waiting, order)) for order in schedule.orders)
    return _filled(replace(schedule, orders=orders), context, (Recompute,))


def _without_waiting(instruction: OrderedInstruction) -> OrderedInstruction:
    if isinstance(instruction, Recompute) and instruction.after is RecomputeAfter.GRADIENT:
        return replace(instruction, after=RecomputeAfter.CHECKPOINT)
    return instruction


def remove_redundancy(schedule: Schedule, context: PassContext) -> Schedule:
    """Applies pass 3: a forward directly followed by its recomputation and backward keeps
    everything.

    The memory is the same, since the recomputation would fill it at once.
    """
    del context
    layout = schedule.layout
    orders = tuple(
        tuple(
            _without_redundancy(order, set(filter(layout.is_coupled, range(len(layout.forward)))))
        )
        for order in schedule.orders
    )
    return replace(schedule, orders=orders) if orders != schedule.orders else schedule


def _without_redundancy(order: Order, coupled: set[int]) -> Iterable[OrderedInstruction]:
    result: list[OrderedInstruction] = []
    for instruction in order:
        if isinstance(instruction, Backward | BackwardInput) and len(result) >= 2:
            s, m = instruction.stage, instruction.micro_batch
            forward, recompute = result[-2:]
            if (
                s in coupled
                and forward == Forward(stage=s, micro_batch=m, keep=Keep.INPUT)
                and isinstance(recompute, Recompute)
                and (recompute.stage, recompute.micro_batch) == (s, m)
            ):
                result[-2:] = [replace(forward, keep=Keep.ALL)]
        result.append(instruction)
    return result


def prepose_forward(schedule: Schedule, context: PassContext) -> Schedule:
    """Applies pass 4: forwards that keep their input only run in earlier bubbles.

    That leaves bubbles later, which recomputations fill, so these move along (as in pass 2). Each
    preposed forward costs one more input checkpoint on its device.
    """
    return _filled(schedule, context, (Forward, Recompute))


def _filled(
    schedule: Schedule, context: PassContext, movable: tuple[type[OrderedInstruction], ...]
) -> Schedule:
    if schedule.residency is Residency.STREAMED:
        return schedule
    return fill_waits(schedule, context, movable)


def mario(schedule: Schedule, context: PassContext) -> Schedule:
    """Applies pass 1 once, then passes 2 to 4 until passes 2 and 3 find nothing more to do."""
    schedule = apply_checkpoint(schedule, context)
    while True:
        candidate = remove_redundancy(overlap_recompute(schedule, context), context)
        if candidate.orders == schedule.orders:
            return schedule
        schedule = prepose_forward(candidate, context)


PASSES = (
    Pass(
        name="apply-checkpoint",
        summary="keep inputs only, recompute before each backward (Mario, 5.1, pass 1)",
        run=apply_checkpoint,
    ),
    Pass(
        name="overlap-recompute",
        summary="recompute while the gradient is on its way (Mario, 5.1, pass 2)",
        run=overlap_recompute,
    ),
    Pass(
        name="remove-redundancy",
        summary="keep everything where the backward follows at once (Mario, 5.1, pass 3)",
        run=remove_redundancy,
    ),
    Pass(
        name="prepose-forward",
        summary="run checkpointed forwards in earlier bubbles (Mario, 5.1, pass 4)",
        run=prepose_forward,
    ),
    Pass(
        name="mario",
        summary="the four passes of Mario until nothing gets shorter",
        run=mario,
    ),
)
