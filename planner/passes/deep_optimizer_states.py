"""UPDATE on devices: optimizer work that the GPUs do while the CPU does the rest.

Source: Maurya et al., "Deep Optimizer States", Middleware 2024, sections 4.1 to 4.3, with blocks as
subgroups. An UPDATE has one of two forms (``context.device_updates``):

- our own *preview*: state in, next weights out
  (:func:`penstock.planner.cost.update_rates.preview_ratio`). The CPU takes the step into the state
  later.
- the paper's *flush*: state in, next weights and state out
  (:func:`penstock.planner.cost.update_rates.flushing`).

``context.optimizer`` is the CPU's way with all other blocks.

- ``interleave-updates``: every k-th block, right behind the last backward of its stage. Its state
  comes over the idle host-to-device stream; the kernel fills a gap between compute instructions.
  With static residents (``resident_share``), the last ones: their kernels run while the bytes of
  others are still being copied.
- ``twinflow``: static residents only, the first ones, and nothing interleaved: DeepSpeed's TwinFlow
  (ZeRO-Offload++), for comparison.
- ``device-update``: only the last blocks, as nothing hides the update of their gradients any more.
  Ours, for SPipe's optimizer tail. The paper's static residents last are the same if no state stays
  on a GPU.

An UPDATE runs on the device that made the block's gradients: it reads them there. Residents are
always previewed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from math import floor, inf
from typing import Protocol

from penstock.config.execution import DeviceUpdates
from penstock.host.errors import ConfigError
from penstock.host.sums import added
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.update_rates import device_rate, flushing, host_rate, preview_stride
from penstock.planner.passes.base import Pass, PassContext
from penstock.planner.schedule.layout import Order, OrderedInstruction, StageLayout
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.schedule.timing import order_times
from penstock.planner.simulate import simulate
from penstock.protocol.plan.instructions import Backward, BackwardInput, BackwardWeight, Update

WORTH_FLUSHING = 0.01
"""Least relative gain of a step for which spare room takes the state of blocks."""

WORTH_EXTENDING = 0.002
"""Least relative gain of a step for which each device takes one block more."""


def subgroups_on_gpu(
    count: int,
    stride: float,
    residents: Collection[int] = (),
    phase: Fraction = Fraction(0),
) -> tuple[int, ...]:
    """Returns which of ``count`` subgroups the GPU updates, in the order of updates (Algorithm 1).

    It updates every ``stride``-th (those with ``(i + 1) % stride == 0``) and the static residents.
    A stride need not be whole: with 1.5 it updates two of three, wherever a multiple of the stride
    is passed. ``phase``, from 0 to 1, is the part of a stride that lies before the first subgroup:
    with different ones GPUs take turns. Residents should be the last ones, so that transfers of
    those before hide behind them (section 4.1).
    """
    share = 1 / Fraction(stride)

    def passed(subgroups: int) -> int:
        return floor(subgroups * share + phase)

    return tuple(i for i in range(count) if i in residents or passed(i + 1) > passed(i))


def interleave_updates(schedule: Schedule, context: PassContext) -> Schedule:
    """Puts every k-th block on its GPU, and the last ones of each GPU as residents.

    k is ``context.update_stride``, or that of our counterpart of equation 1,
    :func:`penstock.planner.cost.update_rates.preview_stride`. Each device counts its own blocks, in
    the order of their final gradients, so that links and GPUs of a node get equal work. The devices
    of a node begin to count a part of a stride apart, so that their shares add up to the node's.
    Without a given stride, two cases change nothing: the cluster's CPU optimizer is no limit, or
    devices are its own cores.

    Raises:
        ConfigError: there are several routes, or the schedule has updates already.
    """
    _require_plain(schedule, "interleave-updates")
    return _in_form(schedule, context, _interleaved)


def _interleaved(schedule: Schedule, context: PassContext, *, flush: bool) -> Schedule:
    stride = context.update_stride
    if stride is None and context.costs.separate_memory:
        stride = preview_stride(_cluster(context, flush=flush), context.optimizer)
    orders = _final_order(schedule, context)
    residents = _residents(schedule, context, [blocks[::-1] for blocks in orders.values()])
    chosen = set(residents)
    if stride is not None:
        per_node = context.cluster.devices_per_node
        for device, blocks in orders.items():
            phase = Fraction(device % per_node, per_node)
            chosen.update(blocks[i] for i in subgroups_on_gpu(len(blocks), stride, (), phase))
    return _with_updates(schedule, chosen, residents, flush=flush) if chosen else schedule


def twinflow(schedule: Schedule, context: PassContext) -> Schedule:
    """Keeps the state of the first blocks of each GPU there, ``context.resident_share`` of it.

    The share is the user's, as in DeepSpeed; it is rounded down to whole blocks.

    Raises:
        ConfigError: there are several routes, updates are there already, or no share is given.
    """
    _require_plain(schedule, "twinflow")
    if not context.resident_share:
        raise ConfigError(
            "passes: twinflow: schedule.resident_share = 0: which share of the optimizer's state"
            " stays on devices? Accepted: above 0, at most 1"
        )
    residents = _residents(schedule, context, _final_order(schedule, context).values())
    return _with_updates(schedule, residents, residents, flush=False)


def _residents(
    schedule: Schedule, context: PassContext, orders: Iterable[Sequence[int]]
) -> set[int]:
    """Returns the first blocks of each device in ``orders``, within its resident share."""
    layout, costs = schedule.layout, context.costs.blocks
    device_of = {b: stage.device for stage in layout.backward for b in stage.blocks}
    room: dict[int, float] = defaultdict(float)
    for block, device in device_of.items():
        room[device] += context.resident_share * costs[block].parameters
    positions: set[int] = set()
    for block in chain.from_iterable(orders):
        device = device_of[block]
        room[device] -= costs[block].parameters
        if room[device] >= -1e-9 * costs[block].parameters:
            positions.add(block)
    return positions


def device_update(schedule: Schedule, context: PassContext) -> Schedule:
    """Puts as many of the last blocks on GPUs as let CPU and GPUs of each node end together.

    In each node the CPU is taken to have the last backward stage of every device left when the
    backwards end. Block by block, work goes from the CPU to the device that is free first, as long
    as the device would finish before the CPU. If the CPU's sweeps are fast (memory moves them
    quicker than PCIe), no block moves. If all of these blocks move, the CPU may still be behind
    with earlier stages. Their blocks follow, the latest first, while that makes the simulated step
    shorter.

    Raises:
        ConfigError: there are several routes, or the schedule has updates already.
    """
    _require_plain(schedule, "device-update")
    return _in_form(schedule, context, _device_updated)


def _device_updated(schedule: Schedule, context: PassContext, *, flush: bool) -> Schedule:
    chosen: set[int] = set()
    nodes = _nodes(schedule, context)
    for node in nodes:
        chosen.update(_balanced(schedule.layout, node, context, flush=flush))
    if not chosen:
        return schedule
    updated = _with_updates(schedule, chosen, (), flush=flush)
    last = {stage for node in nodes for stage in node.last_stages.values()}
    if not all(set(schedule.layout.backward[s].blocks) <= chosen for s in last):
        return updated
    return _extended(schedule, updated, chosen, context, flush=flush)


def _extended(
    schedule: Schedule,
    updated: Schedule,
    chosen: Collection[int],
    context: PassContext,
    *,
    flush: bool,
) -> Schedule:
    """Returns the schedule with updates of earlier blocks, too. Each round adds the latest block of
    each device that is left, while the simulated step gets shorter by :data:`WORTH_EXTENDING`.
    """
    step_s, moved = _step_s(updated, context), set(chosen)
    queues = [
        [block for block in blocks if block not in moved]
        for blocks in _final_order(schedule, context).values()
    ]
    while any(queues):
        moved.update(queue.pop() for queue in queues if queue)
        longer = _with_updates(schedule, moved, (), flush=flush)
        longer_s = _step_s(longer, context)
        if longer_s > (1.0 - WORTH_EXTENDING) * step_s:
            break
        updated, step_s = longer, longer_s
    return updated


class _Updated(Protocol):
    """Puts updates into a schedule, of blocks that suit their form."""

    def __call__(self, schedule: Schedule, context: PassContext, *, flush: bool) -> Schedule: ...


def _in_form(schedule: Schedule, context: PassContext, updated: _Updated) -> Schedule:
    """Returns the schedule with updates in the form that the context asks for.

    With ``auto`` they flush where that makes the simulated step shorter by :data:`WORTH_FLUSHING`.
    Where nothing says how many blocks devices update, a schedule without updates is tried, too.
    """
    requested = context.device_updates
    if requested is not DeviceUpdates.AUTO:
        return updated(schedule, context, flush=requested is DeviceUpdates.FLUSH)
    previewed, flushed = (updated(schedule, context, flush=flush) for flush in (False, True))
    before_s, after_s = (_step_s(one, context) for one in (previewed, flushed))
    best, best_s = previewed, before_s
    if after_s < (1.0 - WORTH_FLUSHING) * before_s:
        best, best_s = flushed, after_s
    given = context.update_stride is not None or context.resident_share > 0.0
    return best if given or best_s <= _step_s(schedule, context) else schedule


def _step_s(schedule: Schedule, context: PassContext) -> float:
    plan, costs = lower(schedule), context.costs
    return simulate(plan, costs, context.cluster, optimizer=context.optimizer).makespan_s


def _cluster(context: PassContext, *, flush: bool) -> Cluster:
    return flushing(context.cluster) if flush else context.cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """The devices of a node, each with its last backward stage and when that ends."""

    last_stages: dict[int, int]
    ends_s: dict[int, float]


def _nodes(schedule: Schedule, context: PassContext) -> list[_Node]:
    times = order_times(schedule.layout, schedule.orders, context.costs, hop_s=context.hop_s)
    nodes: dict[int, _Node] = {}
    for device, order in enumerate(schedule.orders):
        for instruction, end_s in zip(order, times.ends[device], strict=True):
            if isinstance(instruction, Backward | BackwardWeight):
                node = nodes.setdefault(
                    context.cluster.node_of(device), _Node(last_stages={}, ends_s={})
                )
                node.last_stages[device] = instruction.stage
                node.ends_s[device] = end_s
    return list(nodes.values())


def _balanced(layout: StageLayout, node: _Node, context: PassContext, *, flush: bool) -> set[int]:
    """Returns the blocks that devices update, so that all of a node end as early as possible."""
    blocks = context.costs.blocks
    left = {device: list(layout.backward[s].blocks) for device, s in node.last_stages.items()}
    on_cpu = added(blocks[b].parameters for stage in left.values() for b in stage)
    cpu_rate = host_rate(context.cluster, context.optimizer, alone=True)
    gpu_rate = device_rate(_cluster(context, flush=flush))
    last_s = max(node.ends_s.values())
    busy_s = dict(node.ends_s)
    chosen: set[int] = set()
    if cpu_rate == inf or not gpu_rate:
        return chosen
    while any(left.values()):
        device = min((d for d in left if left[d]), key=lambda d: (busy_s[d], d))
        block = left[device].pop()
        parameters = blocks[block].parameters
        ends_s = busy_s[device] + parameters / gpu_rate
        if ends_s * cpu_rate < last_s * cpu_rate + on_cpu:
            busy_s[device] = ends_s
            on_cpu -= parameters
            chosen.add(block)
    return chosen


def _require_plain(schedule: Schedule, name: str) -> None:
    updates = any(isinstance(i, Update) for order in schedule.orders for i in order)
    if updates or schedule.layout.num_routes > 1:
        reason = "has updates on devices already" if updates else "has several routes"
        raise ConfigError(
            f"passes: {name}: {schedule.scheme} {reason}; accepted: one route, no UPDATE"
        )


def _final_order(schedule: Schedule, context: PassContext) -> dict[int, list[int]]:
    """Returns the blocks of every device in the order in which their gradients become final."""
    layout = schedule.layout
    times = order_times(layout, schedule.orders, context.costs, hop_s=context.hop_s)
    final_s: dict[int, float] = {}
    for order, ends in zip(schedule.orders, times.ends, strict=True):
        for instruction, end_s in zip(order, ends, strict=True):
            if isinstance(instruction, Backward | BackwardWeight):
                final_s[instruction.stage] = end_s
    blocks: dict[int, list[int]] = defaultdict(list)
    for stage in sorted(final_s, key=lambda s: (final_s[s], -s)):
        blocks[layout.backward[stage].device] += layout.backward[stage].blocks
    return blocks


def _with_updates(
    schedule: Schedule, chosen: Collection[int], residents: Collection[int], *, flush: bool
) -> Schedule:
    def update(block: int) -> Update:
        resident = block in residents
        return Update(block=block, resident=resident, flush=flush and not resident)

    updates = {
        stage: tuple(update(b) for b in blocks.blocks if b in chosen)
        for stage, blocks in enumerate(schedule.layout.backward)
    }
    orders = tuple(tuple(_inserted(order, updates)) for order in schedule.orders)
    return replace(schedule, orders=orders)


def _inserted(order: Order, updates: dict[int, tuple[Update, ...]]) -> Iterator[OrderedInstruction]:
    last = _last_backwards(order)
    for position, instruction in enumerate(order):
        yield instruction
        if position in last:
            yield from updates[last[position]]


def _last_backwards(order: Sequence[OrderedInstruction]) -> dict[int, int]:
    """Returns stages by the position at which their gradients are final."""
    added = {
        instruction.stage: position
        for position, instruction in enumerate(order)
        if isinstance(instruction, Backward | BackwardInput | BackwardWeight)
    }
    return {position: stage for stage, position in added.items()}


PASSES = (
    Pass(
        name="interleave-updates",
        summary="update every k-th block on its GPU (Deep Optimizer States, 4.2 and 4.3)",
        run=interleave_updates,
    ),
    Pass(
        name="twinflow",
        summary="keep the state of the first blocks on GPUs (TwinFlow, a comparison)",
        run=twinflow,
    ),
    Pass(
        name="device-update",
        summary="update the last blocks on their GPUs, so that CPU and GPUs end together (ours)",
        run=device_update,
    ),
)
