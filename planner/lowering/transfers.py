"""Insert sends and receives between compute instructions that run on different devices.

Sends follow the instruction that produced the tensor: the activation or gradient first (a peer may
be waiting for it), then the checkpoints, the one needed first in front. Receives only post a
buffer; where they are posted decides memory and deadlocks:

- An activation or gradient is posted one compute instruction ahead of its consumer: two buffers. -
  A checkpoint is posted when its sender sends it (at matching steps, by :mod:`.timing`), at the
  latest one compute instruction ahead of its RECOMPUTE. - Between two devices, receives are posted
  in the order of the sends, and everything sent before a tensor is posted before the tensor's
  consumer. So an ordered channel whose sends wait for their receives cannot block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.planner.layout import Order, OrderedInstruction, StageLayout
from penstock.planner.timing import OrderTimes, makes, order_times, unit_costs
from penstock.protocol.instructions import (
    Backward,
    BackwardInput,
    Forward,
    Instruction,
    Keep,
    Program,
    RecvActivation,
    RecvCheckpoint,
    RecvGradient,
    SendActivation,
    SendCheckpoint,
    SendGradient,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """Sent after compute instruction ``produced`` of ``source``, used by ``used`` of ``target``."""

    source: int
    target: int
    produced: int
    used: int
    send: Instruction
    receive: Instruction


_Places = Mapping[tuple[str, int, int], int]


def insert_transfers(layout: StageLayout, orders: Sequence[Order]) -> tuple[Program, ...]:
    """Compute-only orders -> the same with transfers."""
    places = {
        key: position
        for order in orders
        for position, instruction in enumerate(order)
        for key in makes(instruction)
    }
    times = order_times(layout, orders, unit_costs(layout))
    messages = [
        message
        for device, order in enumerate(orders)
        for position, instruction in enumerate(order)
        for message in _messages(layout, places, device, position, instruction)
    ]
    posts = _post_positions(messages, times)
    return _merge(orders, messages, posts)


def _messages(
    layout: StageLayout,
    places: _Places,
    source: int,
    position: int,
    instruction: OrderedInstruction,
) -> Iterator[_Message]:
    """What leaves ``source`` after ``instruction``, in sending order."""
    match instruction:
        case Forward(stage=s, micro_batch=m):
            if layout.is_last_forward(s):
                target = source
            else:
                target = layout.forward[s + 1].device
            if target != source:
                yield _Message(
                    source=source,
                    target=target,
                    produced=position,
                    used=places["F", s + 1, m],
                    send=SendActivation(stage=s, micro_batch=m, peer=target),
                    receive=RecvActivation(stage=s, micro_batch=m, peer=source),
                )
            if instruction.keep is Keep.INPUT:
                yield from _checkpoints(layout, places, source, position, instruction)
        case Backward(stage=b, micro_batch=m) | BackwardInput(stage=b, micro_batch=m):
            if layout.is_first_backward(b):
                return
            target = layout.backward[b - 1].device
            if target != source:
                yield _Message(
                    source=source,
                    target=target,
                    produced=position,
                    used=places["B", b - 1, m],
                    send=SendGradient(stage=b, micro_batch=m, peer=target),
                    receive=RecvGradient(stage=b, micro_batch=m, peer=source),
                )


def _checkpoints(
    layout: StageLayout, places: _Places, source: int, position: int, forward: Forward
) -> Iterator[_Message]:
    m = forward.micro_batch
    for b in reversed(layout.checkpoints_of(forward.stage)):
        target = layout.backward[b].device
        if target != source and not layout.is_first_backward(b):
            yield _Message(
                source=source,
                target=target,
                produced=position,
                used=places["R", b, m],
                send=SendCheckpoint(stage=b, micro_batch=m, peer=target),
                receive=RecvCheckpoint(stage=b, micro_batch=m, peer=source),
            )


def _post_positions(messages: Sequence[_Message], times: OrderTimes) -> list[int]:
    """For each message the compute instruction of its target before which its receive is posted."""
    channels: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, message in enumerate(messages):
        channels[message.source, message.target].append(index)
    posts = [0] * len(messages)
    for channel in channels.values():
        previous = 0
        for index in channel:
            message = messages[index]
            posts[index] = max(message.used - 1, 0)
            if isinstance(message.send, SendCheckpoint):
                sent_at = times.ends[message.source][message.produced]
                matching = bisect_left(times.starts[message.target], sent_at)
                posts[index] = min(posts[index], max(matching, previous))
            previous = posts[index]
        # In sending order, at the latest where a later message of the channel has to be posted.
        for earlier, later in zip(channel[-2::-1], channel[:0:-1], strict=True):
            posts[earlier] = min(posts[earlier], posts[later])
    return posts


def _merge(
    orders: Sequence[Order], messages: Sequence[_Message], posts: Sequence[int]
) -> tuple[Program, ...]:
    before: dict[tuple[int, int], list[Instruction]] = defaultdict(list)
    after: dict[tuple[int, int], list[Instruction]] = defaultdict(list)
    for message, post in zip(messages, posts, strict=True):
        before[message.target, post].append(message.receive)
        after[message.source, message.produced].append(message.send)
    programs: list[Program] = []
    for device, order in enumerate(orders):
        program: list[Instruction] = []
        for position, instruction in enumerate(order):
            program += [*before[device, position], instruction, *after[device, position]]
        programs.append(tuple(program))
    return tuple(programs)
