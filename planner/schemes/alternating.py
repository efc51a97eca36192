"""The common part of all 1F1B orders: warm-up forwards, pairs of forward and backward, the rest.

A device has V chunks, chunk c being stage ``c p + d`` of the model. Micro-batches go through a
device's chunks in rounds of ``g``: g micro-batches through chunk 0, the same g through chunk 1, …,
then the next g. Backwards do the same from the last chunk. With one chunk this is plain 1F1B. With
a split backward, BACKWARD_WEIGHT of device d lags d backwards behind (ZB-H1), so that all devices
keep about as much. The rest fills the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.planner.schedule.layout import ComputeInstruction, Order, StageLayout
from penstock.planner.schemes.base import Recomputation, backward_weight
from penstock.protocol.plan.instructions import MAX_INDEX


def round_size(num_microbatches: int, num_devices: int) -> int | None:
    """Returns the micro-batches of a round: as many as devices, or more if that makes all rounds
    equal.

    Returns ``None`` if rounds cannot be equal. Megatron admits multiples of the number of devices
    only. torch.distributed.pipelining and this module admit all numbers that fit into rounds of one
    size.
    """
    rounds = max(1, num_microbatches // num_devices)
    return None if num_microbatches % rounds else num_microbatches // rounds


def equal_rounds(num_microbatches: int, num_devices: int, num_forward: int) -> str | None:
    """Returns a complaint unless several chunks per device can take micro-batches in equal
    rounds.
    """
    if num_forward == num_devices or round_size(num_microbatches, num_devices) is not None:
        return None
    nearest = [
        next(m for m in candidates if round_size(m, num_devices) is not None)
        for candidates in (range(num_microbatches, 0, -1), range(num_microbatches, MAX_INDEX))
    ]
    return (
        f"equal rounds of {num_devices} micro-batches or a few more; the nearest are"
        f" {nearest[0]} and {nearest[1]} (any multiple of {num_devices} will do)"
    )


def alternating_orders(
    layout: StageLayout, recompute: Recomputation, *, lead: int = 1, split: bool = False
) -> tuple[Order, ...]:
    """Returns the orders of all devices.

    A device starts ``lead`` forwards more than the next device. The last device starts with a round
    of each chunk but one. ``split``: BACKWARD becomes BACKWARD_INPUT and a later BACKWARD_WEIGHT.
    """
    return tuple(
        _device_order(layout, device, recompute, lead, split)
        for device in range(layout.num_devices)
    )


def _device_order(
    layout: StageLayout, device: int, recompute: Recomputation, lead: int, split: bool
) -> Order:
    forwards = list(_rounds(layout, device))
    backwards = list(_rounds(layout, device, last_first=True))
    further_chunks = len(layout.forward) // layout.num_devices - 1
    warmup = further_chunks * _round(layout) + lead * (layout.num_devices - 1 - device)
    warmup = min(warmup, len(forwards))
    order: list[ComputeInstruction] = []
    for step in range(len(forwards) + warmup):
        if step < len(forwards):
            order.append(recompute.forward(*forwards[step]))
        done = step - warmup
        if done >= 0 and not split:
            order.extend(recompute.backward(*backwards[done]))
        elif done >= 0:
            order.extend(recompute.backward_input(*backwards[done]))
            if done >= device:
                order.append(backward_weight(*backwards[done - device]))
    if split:
        rest = max(len(backwards) - device, 0)
        order.extend(backward_weight(*which) for which in backwards[rest:])
    return tuple(order)


def _round(layout: StageLayout) -> int:
    """Returns the micro-batches of a round; with one chunk its size changes nothing."""
    return round_size(layout.num_microbatches, layout.num_devices) or layout.num_microbatches


def _rounds(
    layout: StageLayout, device: int, *, last_first: bool = False
) -> Iterator[tuple[int, int]]:
    """Yields (stage, micro-batch) in the order in which a device takes them."""
    stages = range(device, len(layout.forward), layout.num_devices)
    size = _round(layout)
    for first in range(0, layout.num_microbatches, size):
        for stage in reversed(stages) if last_first else stages:
            for micro_batch in range(first, first + size):
                yield stage, micro_batch
