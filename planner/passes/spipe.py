"""SPipe: forward and backward of a block on different devices, and finer backward stages.

Source: Ryu et al., "SPipe: Hybrid GPU and CPU Pipeline for Training LLMs under Memory Pressure",
section 3.1. Two passes work on schedules of all forwards, then all backwards, with full
recomputation and streamed weights (Mobius): ``decouple-backward`` and ``refine-backward``. Mobius
with both is the scheme :mod:`penstock.planner.schemes.spipe`.

The rest of section 3 does not concern the order of compute instructions, and holds for every
schedule:

- Checkpoints leave right after the forward that makes them, and their receives are posted at the
  matching step (asynchronous checkpoint communication):
  :mod:`penstock.planner.schedule.lowering.transfers`.
- The next stage's weights arrive while the current one computes:
  :mod:`penstock.planner.schedule.lowering.weights`. Gradients leave when the last micro-batch of
  their stage is done: ``.transfers``.
- Each backward stage's gradients are an optimizer task of their own. It starts as soon as they are
  in host memory (asynchronous CPU optimizer, section 3.2):
  :class:`penstock.planner.cost.cluster.OptimizerStart`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from penstock.host.errors import ConfigError
from penstock.host.sums import added
from penstock.planner.cost.costs import Costs
from penstock.planner.passes.base import Pass, PassContext
from penstock.planner.schedule.layout import Residency, StageLayout, partition
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schemes.base import Recomputation, all_forward_all_backward
from penstock.planner.schemes.spipe import SCHEME
from penstock.protocol.plan.instructions import Forward, Keep, Recompute
from penstock.protocol.plan.plan import StageRange


def decouple_backward(schedule: Schedule, context: PassContext) -> Schedule:
    """Assigns backward stages to devices in the order in which devices become free (decoupled
    assignment).

    Raises:
        ConfigError: not all forwards come first, activations are kept, or weights are resident.
    """
    del context
    require_decouplable(schedule, "decouple-backward")
    return with_backward_cut(schedule, [stage.blocks for stage in schedule.layout.backward])


def refine_backward(schedule: Schedule, context: PassContext) -> Schedule:
    """Cuts backward stages finer (equation 1): each becomes d stages of 1/d of its blocks.

    d makes a backward stage (recomputation and backward) about as long as a forward stage. It is
    the mean ratio of the two, rounded; a stage becomes no more stages than it has blocks.

    Raises:
        ConfigError: as :func:`decouple_backward`.
    """
    require_decouplable(schedule, "refine-backward")
    finer = backward_to_forward(schedule.layout, context.costs)
    cut: list[range] = []
    for stage in schedule.layout.backward:
        count = min(finer, len(stage.blocks))
        work = [_backward_s(context.costs, block) for block in stage.blocks]
        cut += [
            range(stage.start + part.start, stage.start + part.stop)
            for part in partition(work, count)
        ]
    return with_backward_cut(schedule, cut)


def backward_to_forward(layout: StageLayout, costs: Costs) -> int:
    """Returns equation 1's d: how many backward stages each take as long as one forward stage."""
    blocks = range(layout.num_blocks)
    forward_s = costs.of(blocks).forward_s
    backward_s = added(_backward_s(costs, block) for block in blocks)
    ratio = backward_s * len(layout.forward) / (forward_s * len(layout.backward) or 1.0)
    return max(1, round(ratio))


def with_backward_cut(schedule: Schedule, cut: Sequence[range]) -> Schedule:
    """Returns the schedule with these backward stages, placed and ordered as SPipe does."""
    layout = schedule.layout
    placement = SCHEME.place(len(layout.forward), len(cut), layout.num_devices)
    layout = replace(
        layout,
        backward=tuple(
            StageRange(start=blocks.start, stop=blocks.stop, device=device)
            for blocks, device in zip(cut, placement.backward, strict=True)
        ),
    )
    orders = all_forward_all_backward(layout, Recomputation(mode="full"))
    waits = {i.after for order in schedule.orders for i in order if isinstance(i, Recompute)}
    if len(waits) == 1:
        (after,) = waits
        orders = tuple(
            tuple(replace(i, after=after) if isinstance(i, Recompute) else i for i in order)
            for order in orders
        )
    return replace(schedule, scheme=SCHEME.name, layout=layout, orders=orders)


def require_decouplable(schedule: Schedule, name: str) -> None:
    """Checks that forwards keep inputs only and come first, that weights are streamed, and that
    there is one route.

    Raises:
        ConfigError: the schedule has another shape; the message names the pass.
    """
    forwards_first = all(
        not isinstance(later, Forward)
        for order in schedule.orders
        for earlier, later in pairwise(order)
        if not isinstance(earlier, Forward)
    )
    keeps = {i.keep for order in schedule.orders for i in order if isinstance(i, Forward)}
    problems = (
        (schedule.residency is not Residency.STREAMED, "keeps weights on their devices"),
        (schedule.layout.num_routes > 1, "has several routes"),
        (keeps != {Keep.INPUT}, "keeps activations"),
        (not forwards_first, "runs forwards between backwards"),
    )
    for wrong, reason in problems:
        if wrong:
            raise ConfigError(
                f"passes: {name}: {schedule.scheme} {reason}; accepted: mobius or spipe with"
                " recompute full"
            )


def _backward_s(costs: Costs, block: int) -> float:
    cost = costs.blocks[block]
    return cost.recompute_s + cost.backward_s


PASSES = (
    Pass(
        name="decouple-backward",
        summary="SPipe, 3.1: backward stages go to the devices in the order they become free",
        run=decouple_backward,
    ),
    Pass(
        name="refine-backward",
        summary="SPipe, 3.1, eq. 1: cut backward stages until they take as long as forward stages",
        run=refine_backward,
    ),
)
"""The passes of this module, in the order in which they are meant to run."""
