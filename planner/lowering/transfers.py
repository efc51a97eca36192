"""Insert sends and receives between compute instructions that run on different devices.

Sends follow the instruction that produced the tensor: the activation or gradient first (a peer may
be waiting for it), then the checkpoints, the one needed first in front. Receives only post a
buffer; where they are posted decides memory and deadlocks:

- An activation or gradient is posted one compute instruction ahead of its consumer: two buffers.

- A checkpoint is posted when its sender sends it (at matching steps, by
  :mod:`penstock.planner.orders.timing`), at the latest one compute instruction ahead of its
  RECOMPUTE.

- Between two devices, receives are posted in the order of the sends, and everything sent before a
  tensor is posted before the tensor's consumer. So an ordered channel whose sends wait for their
  receives cannot block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.planner.layout import Order, OrderedInstruction, StageLayout
from penstock.planner.orders.timing import OrderTimes, order_times, unit_costs
from penstock.planner.tensors import Receive, Send, TensorKind
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    Forward,
    Instruction,
    Keep,
    Program,
    Recompute,
    RecomputeAfter,
    RecvActivation,
    RecvCheckpoint,
    RecvGradient,
    SendActivation,
    SendCheckpoint,
    SendGradient,
)

_TRANSFERS: Mapping[TensorKind, tuple[Callable[..., Send], Callable[..., Receive]]] = {
    TensorKind.ACTIVATION: (SendActivation, RecvActivation),
    TensorKind.GRADIENT: (SendGradient, RecvGradient),
    TensorKind.CHECKPOINT: (SendCheckpoint, RecvCheckpoint),
}


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


class _Uses:
    """Where tensors are used: the first position of the instruction that waits for each."""

    def __init__(self, layout: StageLayout, orders: Sequence[Order]) -> None:
        self._first: dict[tuple[TensorKind, int, int], int] = {}
        for order in orders:
            for position, instruction in enumerate(order):
                self._note(layout, position, instruction)

    def _note(self, layout: StageLayout, position: int, instruction: OrderedInstruction) -> None:
        first = self._first
        match instruction:
            case Forward(stage=s, micro_batch=m):
                first.setdefault((TensorKind.ACTIVATION, s - 1, m), position)
            case Recompute(stage=b, micro_batch=m, after=after):
                first.setdefault((TensorKind.CHECKPOINT, b, m), position)
                if after is RecomputeAfter.GRADIENT:
                    first.setdefault((TensorKind.GRADIENT, b + 1, m), position)
            case Backward(stage=b, micro_batch=m) | BackwardInput(stage=b, micro_batch=m):
                first.setdefault((TensorKind.GRADIENT, b + 1, m), position)

    def of(self, kind: TensorKind, stage: int, micro_batch: int) -> int | None:
        """``None`` for what nobody uses."""
        return self._first.get((kind, stage, micro_batch))


def insert_transfers(layout: StageLayout, orders: Sequence[Order]) -> tuple[Program, ...]:
    """Compute-only orders -> the same with transfers.

    Raises:
        ValueError: the orders cannot finish.
    """
    uses = _Uses(layout, orders)
    times = order_times(layout, orders, unit_costs(layout))
    messages = [
        message
        for device, order in enumerate(orders)
        for position, instruction in enumerate(order)
        for message in _messages(layout, uses, device, position, instruction)
    ]
    _post(messages, times)
    return _merge(orders, messages)


def _messages(
    layout: StageLayout,
    uses: _Uses,
    source: int,
    position: int,
    instruction: OrderedInstruction,
) -> Iterator[_Message]:
    """What leaves ``source`` after ``instruction``, in sending order."""
    for kind, stage, target in _left_by(layout, uses, instruction):
        assert isinstance(instruction, Forward | Backward | BackwardInput)
        used = uses.of(kind, stage, instruction.micro_batch)
        if used is not None and target != source:
            send, receive = _TRANSFERS[kind]
            yield _Message(
                source=source,
                target=target,
                produced=position,
                used=used,
                send=send(stage=stage, micro_batch=instruction.micro_batch, peer=target),
                receive=receive(stage=stage, micro_batch=instruction.micro_batch, peer=source),
            )


def _left_by(
    layout: StageLayout, uses: _Uses, instruction: OrderedInstruction
) -> Iterator[tuple[TensorKind, int, int]]:
    """Tensors that an instruction makes: kind, stage, and the device that uses it.

    The output of a forward is the next forward's input or, where that is left out, the checkpoint
    of the backward stage that starts there.
    """
    match instruction:
        case Forward(stage=s, micro_batch=m, keep=keep):
            if not layout.is_last_forward(s):
                following = layout.checkpoint_after(s)
                if uses.of(TensorKind.ACTIVATION, s, m) is not None:
                    yield TensorKind.ACTIVATION, s, layout.forward[s + 1].device
                elif following is not None:
                    yield TensorKind.CHECKPOINT, following, layout.backward[following].device
            if keep is Keep.INPUT:
                for b in reversed(layout.checkpoints_of(s)):
                    if not layout.is_first_backward(b):
                        yield TensorKind.CHECKPOINT, b, layout.backward[b].device
        case Backward(stage=b) | BackwardInput(stage=b):
            if not layout.is_first_backward(b):
                yield TensorKind.GRADIENT, b, layout.backward[b - 1].device


def _post(messages: Sequence[_Message], times: OrderTimes) -> None:
    """Decide before which instruction of its target each receive is posted."""
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
