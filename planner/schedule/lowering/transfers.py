"""Inserts sends and receives between compute instructions that run on different devices.

Sends follow the instruction that produced the tensor. The activation or gradient comes first (a
peer may be waiting for it), then the checkpoints, the one needed first in front. Receives only post
a buffer; the place of the posting decides about memory and deadlocks:

- An activation or gradient is posted one compute instruction ahead of its consumer: two buffers.
- A checkpoint is posted when its sender sends it (at matching steps, by
  :mod:`penstock.planner.schedule.timing`), at the latest one compute instruction ahead of its
  RECOMPUTE.
- Between two devices, receives are posted in the order of the sends, and everything sent before a
  tensor is posted before the tensor's consumer. So an ordered channel with sends that wait for
  their receives cannot block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.planner.schedule.layout import Order, OrderedInstruction, StageLayout
from penstock.planner.schedule.timing import OrderTimes, order_times, unit_costs
from penstock.protocol.plan.instructions import (
    Instruction,
    OffloadGradients,
    Program,
    ReduceGradients,
    SendCheckpoint,
)
from penstock.protocol.plan.resources import PlanFacts, Resource, StateKind, TensorKind
from penstock.protocol.plan.semantics import RECEIVES, SENDS, Lane, classes, makers, makes, reads


@dataclass(slots=True, kw_only=True)
class _Message:
    """Sent after instruction ``produced`` of ``source``, used by ``used`` of ``target``.

    Its receive is posted before instruction ``posted`` of ``target``.
    """

    source: int
    target: int
    produced: int
    used: int
    send: Instruction
    receive: Instruction
    posted: int = 0


def insert_transfers(layout: StageLayout, orders: Sequence[Order]) -> tuple[Program, ...]:
    """Returns compute-only orders with transfers.

    Raises:
        ValueError: the orders cannot finish.
    """
    facts = PlanFacts.of(layout, orders)
    uses = _uses(facts, orders)
    times = order_times(layout, orders, unit_costs(layout))
    messages = [
        message
        for device, order in enumerate(orders)
        for position, instruction in enumerate(order)
        for message in _messages(facts, uses, device, position, instruction)
    ]
    _post(messages, times)
    return _merge(orders, messages)


def _uses(facts: PlanFacts, orders: Sequence[Order]) -> Mapping[Resource, tuple[int, int]]:
    """Returns device and position of the first instruction that reads each resource."""
    first: dict[Resource, tuple[int, int]] = {}
    for device, order in enumerate(orders):
        for position, instruction in enumerate(order):
            for resource in reads(instruction, facts):
                first.setdefault(resource, (device, position))
    return first


def _messages(
    facts: PlanFacts,
    uses: Mapping[Resource, tuple[int, int]],
    source: int,
    position: int,
    instruction: OrderedInstruction,
) -> Iterator[_Message]:
    """Yields what leaves ``source`` after ``instruction``, in sending order."""
    for resource in makes(instruction, facts):
        kind, stage, micro_batch = resource
        if not isinstance(kind, TensorKind) or resource not in uses:
            continue
        target, used = uses[resource]
        if target != source:
            yield _Message(
                source=source,
                target=target,
                produced=position,
                used=used,
                send=SENDS[kind](stage=stage, micro_batch=micro_batch, peer=target),
                receive=RECEIVES[kind](stage=stage, micro_batch=micro_batch, peer=source),
            )


def _post(messages: Sequence[_Message], times: OrderTimes) -> None:
    """Decides before which instruction of its target each receive is posted."""
    channels: dict[tuple[int, int], list[_Message]] = defaultdict(list)
    for message in messages:
        channels[message.source, message.target].append(message)
    for channel in channels.values():
        previous = 0
        for message in channel:
            message.posted = max(message.used - 1, 0)
            if type(message.send) is SendCheckpoint:
                sent_at = times.ends[message.source][message.produced]
                matching = bisect_left(times.starts[message.target], sent_at)
                message.posted = min(message.posted, max(matching, previous))
            previous = message.posted
        # In sending order, at the latest where a later message of the channel has to be posted.
        latest = channel[-1].posted
        for message in reversed(channel):
            latest = message.posted = min(message.posted, latest)


def _merge(orders: Sequence[Order], messages: Sequence[_Message]) -> tuple[Program, ...]:
    before: list[list[list[Instruction]]] = [[[] for _ in order] for order in orders]
    after: list[list[list[Instruction]]] = [[[] for _ in order] for order in orders]
    for message in messages:
        before[message.target][message.posted].append(message.receive)
        after[message.source][message.produced].append(message.send)
    programs: list[Program] = []
    for order, receives, sends in zip(orders, before, after, strict=True):
        program: list[Instruction] = []
        for received, instruction, sent in zip(receives, order, sends, strict=True):
            program += received
            program.append(instruction)
            program += sent
        programs.append(tuple(program))
    return tuple(programs)


_SUMMING = makers(StateKind.SUMS)
_FOLLOWERS = classes(lambda row: row.lane in (Lane.LINK, Lane.REDUCE, Lane.OFFLOAD))


def after_sends(program: Program, position: int) -> int:
    """Returns the first position behind ``position`` and the sends and offloads that follow it.

    Peers wait for sends and the optimizer for offloads, so nothing is put in front of them.
    """
    position += 1
    while position < len(program) and isinstance(program[position], _FOLLOWERS):
        position += 1
    return position


def insert_gradient_offload(
    programs: Sequence[Program], *, reduces_gradients: bool
) -> tuple[Program, ...]:
    """Returns programs, which have transfers, with one OFFLOAD_GRADIENTS per backward stage.

    The offload follows the stage's last BACKWARD or BACKWARD_WEIGHT, so that the optimizer starts
    on a stage while the device computes the next one. Data-parallel gradients are reduced before;
    optimizer updates on the device wait for the offload.
    """
    return tuple(_insert(program, reduces_gradients) for program in programs)


def _insert(program: Program, reduces_gradients: bool) -> Program:
    last = {
        instruction.stage: position
        for position, instruction in enumerate(program)
        if isinstance(instruction, _SUMMING)
    }
    stages = {after_sends(program, position): stage for stage, position in last.items()}
    result: list[Instruction] = []
    for position in range(len(program) + 1):
        if position in stages:
            if reduces_gradients:
                result.append(ReduceGradients(stage=stages[position]))
            result.append(OffloadGradients(stage=stages[position]))
        result += program[position : position + 1]
    return tuple(result)
