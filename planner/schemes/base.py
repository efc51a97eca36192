"""What a scheme is: where stages go, and in which order each device computes.

Orders contain FORWARD, RECOMPUTE and BACKWARD only; transfers, weights and gradients are inserted
by :mod:`penstock.planner.passes`. In every scheme a stage takes its micro-batches in ascending
order, so that gradients accumulate in one order and schemes agree to the last bit where the cut is
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from penstock.planner.layout import ComputeInstruction, Order, StageLayout
from penstock.protocol.instructions import Backward, Forward, Keep, Recompute

RecomputeMode = Literal["none", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Device of every forward stage and of every backward stage."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A named schedule.

    ``default_stages(num_devices, num_blocks, num_forward or None)`` gives the numbers of forward
    and backward stages. ``check_stages(num_forward, num_backward, num_devices)`` returns ``(key,
    what is accepted)`` when the scheme cannot work with them. ``recompute_modes`` lists what it
    supports, the default first.
    """

    name: str
    recompute_modes: tuple[RecomputeMode, ...]
    default_stages: Callable[[int, int, int | None], tuple[int, int]]
    check_stages: Callable[[int, int, int], tuple[str, str] | None]
    place: Callable[[int, int, int], Placement]
    order: Callable[[StageLayout, RecomputeMode], tuple[Order, ...]]


def backward_of(
    stage: int, micro_batch: int, recompute: RecomputeMode
) -> Iterable[ComputeInstruction]:
    """BACKWARD of one micro-batch, after its RECOMPUTE where the scheme recomputes."""
    if recompute == "full":
        yield Recompute(stage=stage, micro_batch=micro_batch)
    yield Backward(stage=stage, micro_batch=micro_batch)


def kept_by_forward(recompute: RecomputeMode) -> Keep:
    """What FORWARD keeps under a recompute mode."""
    return Keep.INPUT if recompute == "full" else Keep.ALL


def all_forward_all_backward(layout: StageLayout, recompute: RecomputeMode) -> tuple[Order, ...]:
    """All forwards of a device, stage by stage, then all its backwards, last stage first (AFAB)."""
    return tuple(_afab(layout, device, recompute) for device in range(layout.num_devices))


def _afab(layout: StageLayout, device: int, recompute: RecomputeMode) -> Order:
    micro_batches = range(layout.num_microbatches)
    keep = kept_by_forward(recompute)
    forwards: list[ComputeInstruction] = [
        Forward(stage=stage, micro_batch=m, keep=keep)
        for stage in layout.forward_stages_on(device)
        for m in micro_batches
    ]
    backwards = [
        instruction
        for stage in layout.backward_stages_on(device)
        for m in micro_batches
        for instruction in backward_of(stage, m, recompute)
    ]
    return tuple(forwards + backwards)


def forward_only(layout: StageLayout) -> tuple[Order, ...]:
    """The evaluation order: every forward stage for all micro-batches, nothing kept."""
    return tuple(
        tuple(
            Forward(stage=stage, micro_batch=m, keep=Keep.NONE)
            for stage in layout.forward_stages_on(device)
            for m in range(layout.num_microbatches)
        )
        for device in range(layout.num_devices)
    )


def one_stage_per_device(
    num_devices: int, num_blocks: int, num_forward: int | None
) -> tuple[int, int]:
    """Default numbers of stages of the schemes that keep a stage's weights on its device."""
    del num_blocks
    num_stages = num_devices if num_forward is None else num_forward
    return num_stages, num_stages


def require_one_per_device(
    num_forward: int, num_backward: int, num_devices: int
) -> tuple[str, str] | None:
    """Complaint unless there is one forward and one backward stage per device."""
    if num_forward != num_devices:
        return "forward_stages", f"{num_devices} (one per worker)"
    if num_backward != num_forward:
        return "backward_stages", f"{num_forward} (the same as forward_stages)"
    return None


def round_robin(num_forward: int, num_backward: int, num_devices: int) -> Placement:
    """Stage i on device i mod N, in both directions: the coupled pass assignment."""
    return Placement(
        forward=tuple(i % num_devices for i in range(num_forward)),
        backward=tuple(i % num_devices for i in range(num_backward)),
    )
