"""The interface of schemes: places of stages, and the order in which each device computes.

Orders contain compute and swap instructions only; :mod:`penstock.planner.schedule.lowering` inserts
transfers, weights and gradients. In every scheme a stage takes its micro-batches in ascending
order. So gradients accumulate in one order, and schemes with the same cut agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from penstock.planner.schedule.layout import ComputeInstruction, Order, Residency, StageLayout
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Keep,
    Recompute,
    RecomputeAfter,
)

RecomputeMode = Literal["none", "full", "selective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """The tensors that forwards keep and backwards make again. Mode ``selective`` makes the outputs
    of operators ``drop`` again.

    ``after``: the event that a RECOMPUTE waits for.
    """

    mode: RecomputeMode
    drop: tuple[str, ...] = ()
    after: RecomputeAfter = RecomputeAfter.CHECKPOINT

    def forward(self, stage: int, micro_batch: int) -> Forward:
        """Returns the FORWARD that keeps what the mode says."""
        keep = {"none": Keep.ALL, "full": Keep.INPUT, "selective": Keep.SELECTIVE}[self.mode]
        return Forward(stage=stage, micro_batch=micro_batch, keep=keep, drop=self.drop)

    def backward(self, stage: int, micro_batch: int) -> Iterable[ComputeInstruction]:
        """Yields the BACKWARD of one micro-batch, after its RECOMPUTE unless everything was
        kept.
        """
        yield from self._again(stage, micro_batch)
        yield Backward(stage=stage, micro_batch=micro_batch)

    def backward_input(self, stage: int, micro_batch: int) -> Iterable[ComputeInstruction]:
        """Yields the BACKWARD_INPUT of one micro-batch, after its RECOMPUTE unless everything was
        kept.
        """
        yield from self._again(stage, micro_batch)
        yield BackwardInput(stage=stage, micro_batch=micro_batch)

    def _again(self, stage: int, micro_batch: int) -> Iterable[ComputeInstruction]:
        if self.mode != "none":
            yield Recompute(stage=stage, micro_batch=micro_batch, after=self.after)


def backward_weight(stage: int, micro_batch: int) -> BackwardWeight:
    """Returns the BACKWARD_WEIGHT of one micro-batch."""
    return BackwardWeight(stage=stage, micro_batches=(micro_batch,))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDevices:
    """The device of every forward stage and of every backward stage, one route after the other."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


Complaint = tuple[str, str]
"""A complaint names a key of the configuration's ``schedule`` or ``train`` section, and what is
accepted there.
"""


def any_devices(num_devices: int) -> str | None:
    """Returns no complaint: the scheme works on any number of devices."""
    del num_devices
    return None


def any_microbatches(num_microbatches: int, num_devices: int, num_forward: int) -> str | None:
    """Returns no complaint: the scheme works with any number of micro-batches."""
    del num_microbatches, num_devices, num_forward
    return None


def one_route(num_microbatches: int, num_devices: int) -> tuple[int, ...]:
    """Returns no routes, which means that every micro-batch takes route 0."""
    del num_microbatches, num_devices
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A named schedule.

    Numbers of stages are those *of one route* everywhere. ``default_stages(num_devices, num_blocks,
    num_forward or None)`` gives the numbers of forward and backward stages.
    ``check_stages(num_forward, num_backward, num_devices)`` returns a complaint when the scheme
    cannot work with them. ``check_devices(num_devices)`` and ``check_microbatches(num_microbatches,
    num_devices, num_forward)`` return what the scheme accepts instead, or ``None``.
    ``place(num_forward, num_backward, num_devices)`` places the stages of all routes;
    ``routes(num_microbatches, num_devices)`` distributes micro-batches over them.
    ``recompute_modes`` lists what it supports, the default first. ``order`` may rely on everything
    that was checked.

    ``whole_model_per_device``: a route has all its stages on one device (data parallelism); else
    every device has a share of every route. ``shards_weights`` and ``reduces_gradients`` as in
    :class:`~penstock.planner.schedule.schedule.Schedule`.
    """

    name: str
    recompute_modes: tuple[RecomputeMode, ...]
    default_stages: Callable[[int, int, int | None], tuple[int, int]]
    check_stages: Callable[[int, int, int], Complaint | None]
    place: Callable[[int, int, int], StageDevices]
    order: Callable[[StageLayout, Recomputation], tuple[Order, ...]]
    residency: Residency = Residency.RESIDENT
    check_devices: Callable[[int], str | None] = any_devices
    check_microbatches: Callable[[int, int, int], str | None] = any_microbatches
    routes: Callable[[int, int], tuple[int, ...]] = one_route
    whole_model_per_device: bool = False
    shards_weights: bool = False
    reduces_gradients: bool = False


def all_forward_all_backward(layout: StageLayout, recompute: Recomputation) -> tuple[Order, ...]:
    """Returns AFAB orders: all forwards of a device, stage by stage, then all its backwards, last
    stage first.
    """
    return tuple(_afab(layout, device, recompute) for device in range(layout.num_devices))


def _afab(layout: StageLayout, device: int, recompute: Recomputation) -> Order:
    micro_batches = range(layout.num_microbatches)
    forwards: list[ComputeInstruction] = [
        recompute.forward(stage, m)
        for stage in layout.forward_stages_on(device)
        for m in micro_batches
    ]
    backwards = [
        instruction
        for stage in layout.backward_stages_on(device)
        for m in micro_batches
        for instruction in recompute.backward(stage, m)
    ]
    return tuple(forwards + backwards)


def one_stage_per_device(
    num_devices: int, num_blocks: int, num_forward: int | None
) -> tuple[int, int]:
    """Returns the default numbers of stages: one per device."""
    del num_blocks
    num_stages = num_devices if num_forward is None else num_forward
    return num_stages, num_stages


def two_stages_per_device(
    num_devices: int, num_blocks: int, num_forward: int | None
) -> tuple[int, int]:
    """Returns the default numbers of stages: two per device, one where blocks are too few."""
    per_device = 2 if 2 * num_devices <= num_blocks else 1
    num_stages = per_device * num_devices if num_forward is None else num_forward
    return num_stages, num_stages


def require_one_per_device(
    num_forward: int, num_backward: int, num_devices: int
) -> Complaint | None:
    """Returns a complaint unless there is one forward and one backward stage per device."""
    if num_forward != num_devices:
        return "forward_stages", f"{num_devices} (one per worker)"
    return require_as_many_backward(num_forward, num_backward)


def require_two_per_device(
    num_forward: int, num_backward: int, num_devices: int
) -> Complaint | None:
    """Returns a complaint unless there are two forward and two backward stages per device."""
    if num_forward != 2 * num_devices:
        return "forward_stages", f"{2 * num_devices} (two per worker)"
    return require_as_many_backward(num_forward, num_backward)


def require_same_on_each_device(
    num_forward: int, num_backward: int, num_devices: int
) -> Complaint | None:
    """Returns a complaint unless each device can have the same number of stages, the same both
    ways.
    """
    if num_forward % num_devices:
        return "forward_stages", f"a multiple of {num_devices} (the same number on each worker)"
    return require_as_many_backward(num_forward, num_backward)


def require_as_many_backward(num_forward: int, num_backward: int) -> Complaint | None:
    """Returns a complaint unless there are as many backward as forward stages."""
    if num_backward != num_forward:
        return "backward_stages", f"{num_forward} (the same as forward_stages)"
    return None


def round_robin(num_forward: int, num_backward: int, num_devices: int) -> StageDevices:
    """Places stage i on device i mod N, in both directions: the coupled assignment of stages."""
    return StageDevices(
        forward=tuple(i % num_devices for i in range(num_forward)),
        backward=tuple(i % num_devices for i in range(num_backward)),
    )


def wave(num_forward: int, num_backward: int, num_devices: int) -> StageDevices:
    """Places stages down the devices and up again: 0, 1, … N - 1, N - 1, … 1, 0, 0, 1, …"""
    turn = (*range(num_devices), *reversed(range(num_devices)))
    return StageDevices(
        forward=tuple(turn[i % len(turn)] for i in range(num_forward)),
        backward=tuple(turn[i % len(turn)] for i in range(num_backward)),
    )
