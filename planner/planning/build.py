"""The schedule of a scheme that a request names: one replica, before passes.

:mod:`penstock.planner.planning.pipeline` applies passes and replicas. Requests of configurations:
:mod:`penstock.planner.planning.configured`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.host.errors import ConfigError
from penstock.planner.schedule.layout import Residency, StageLayout, partition
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schemes import SCHEMES, Recomputation, RecomputeMode, Scheme
from penstock.protocol.plan.instructions import RecomputeAfter
from penstock.protocol.plan.plan import StageRange

_BLOCKS_PER_DEVICE = 6
"""A model with so many blocks lets every scheme choose its own numbers of stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """A request for a schedule: scheme, passes, replicas.

    Numbers are those of one replica, numbers of stages those of one route; they default to the
    scheme's. ``stages_per_device``: forward stages of a route on each of its devices, instead of
    ``forward_stages``. ``drop`` names the operators that ``recompute="selective"`` makes again.
    ``recompute="auto"`` keeps as many activations as devices have room for. ``recompute_after``:
    the event that a recomputation waits for. ``passes`` are applied in order; then the schedule is
    repeated for ``replicas``. ``reduce_gradients``: see
    :func:`~penstock.planner.schedule.replicas.with_reduction`. ``concatenates_gradients``: see
    :class:`~penstock.protocol.plan.plan.Plan`. ``None`` keeps the values of the scheme and the
    passes.
    """

    scheme: str
    num_devices: int
    num_microbatches: int
    forward_stages: int | None = None
    backward_stages: int | None = None
    stages_per_device: int | None = None
    recompute: RecomputeMode | Literal["auto"] | None = None
    drop: tuple[str, ...] = ()
    recompute_after: RecomputeAfter = RecomputeAfter.CHECKPOINT
    passes: tuple[str, ...] = ()
    replicas: int = 1
    reduce_gradients: bool | Literal["auto"] | None = None
    concatenates_gradients: bool | None = None


def build_schedule(request: ScheduleRequest, block_work: Sequence[float]) -> Schedule:
    """Returns one replica of the scheme's schedule, before any pass.

    ``block_work``: the forward work of each block, in any unit. Stages are balanced by it; backward
    work is taken to be proportional to it.

    Raises:
        ConfigError: impossible combination; names key, value, and what would be accepted.
    """
    _check_numbers(request)
    scheme = _scheme(request)
    recompute = _recompute(request, scheme)
    _check_devices(request, scheme, len(block_work))
    num_forward, num_backward = _numbers_of_stages(request, scheme, len(block_work))
    accepted = scheme.check_microbatches(request.num_microbatches, request.num_devices, num_forward)
    if accepted is not None:
        raise ConfigError(
            f"train.global_batch / train.micro_batch = {request.num_microbatches} micro-batches:"
            f" {scheme.name} with {request.num_devices} workers accepts {accepted}"
        )
    placement = scheme.place(num_forward, num_backward, request.num_devices)
    layout = StageLayout(
        num_devices=request.num_devices,
        num_microbatches=request.num_microbatches,
        forward=_cut(block_work, num_forward, placement.forward),
        backward=_cut(block_work, num_backward, placement.backward),
        routes=scheme.routes(request.num_microbatches, request.num_devices),
    )
    return Schedule(
        scheme=scheme.name,
        layout=layout,
        orders=scheme.order(layout, recompute),
        residency=scheme.residency,
        rebinds_weights=scheme.residency is Residency.STREAMED and recompute.mode != "full",
        shards_weights=scheme.shards_weights,
        reduces_gradients=scheme.reduces_gradients,
    )


def with_stages(request: ScheduleRequest) -> ScheduleRequest:
    """Returns the request with the numbers of stages that its scheme chooses for a long model.

    Raises:
        ConfigError: unknown scheme, or two numbers that contradict each other.
    """
    scheme = _scheme(request)
    num_forward, num_backward = scheme.default_stages(
        request.num_devices,
        _BLOCKS_PER_DEVICE * request.num_devices,
        _forward_stages(request, scheme),
    )
    return replace(
        request,
        forward_stages=num_forward,
        backward_stages=request.backward_stages or num_backward,
        stages_per_device=None,
    )


def _scheme(request: ScheduleRequest) -> Scheme:
    if request.scheme not in SCHEMES:
        raise ConfigError(
            f"schedule.scheme = {request.scheme!r}: unknown scheme; accepted: {', '.join(SCHEMES)}"
        )
    return SCHEMES[request.scheme]


def _check_numbers(request: ScheduleRequest) -> None:
    for name in (
        "num_devices",
        "num_microbatches",
        "forward_stages",
        "backward_stages",
        "stages_per_device",
    ):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value}: expected 1 or more")


def _recompute(request: ScheduleRequest, scheme: Scheme) -> Recomputation:
    mode = request.recompute or scheme.recompute_modes[0]
    if mode == "auto":
        mode = "full" if "full" in scheme.recompute_modes else scheme.recompute_modes[0]
    if mode not in scheme.recompute_modes:
        why = (
            "runs forward and backward of a block on different devices, so it keeps no activations"
            if scheme.residency is Residency.STREAMED
            else "does not recompute this way"
        )
        raise ConfigError(
            f"schedule.recompute = {mode!r}: {scheme.name} {why}; accepted:"
            f" {', '.join(scheme.recompute_modes)}"
        )
    if mode == "selective" and not request.drop:
        raise ConfigError(
            "schedule.recompute = 'selective': needs operators to drop, such as those that a"
            " profile lists"
        )
    if mode != "selective" and request.drop:
        raise ConfigError(
            f"schedule.recompute = {mode!r}: operators to drop ({', '.join(request.drop)}) need"
            " 'selective'"
        )
    return Recomputation(mode=mode, drop=request.drop, after=request.recompute_after)


def _check_devices(request: ScheduleRequest, scheme: Scheme, num_blocks: int) -> None:
    num_devices = request.num_devices
    if num_devices > num_blocks and not scheme.whole_model_per_device:
        raise ConfigError(
            f"cluster.workers: {num_devices} workers in all for {num_blocks} blocks; at most"
            f" {num_blocks} workers can be used"
        )
    accepted = scheme.check_devices(num_devices)
    if accepted is not None:
        raise ConfigError(
            f"cluster.workers: {num_devices} workers in all; {scheme.name} accepts {accepted}"
        )


def _numbers_of_stages(
    request: ScheduleRequest, scheme: Scheme, num_blocks: int
) -> tuple[int, int]:
    given = _forward_stages(request, scheme)
    note = f" ({request.stages_per_device} per worker)" if request.stages_per_device else ""
    if given is not None:
        _check_maximum("forward_stages", given, num_blocks, note)
    num_forward, num_backward = scheme.default_stages(request.num_devices, num_blocks, given)
    if request.backward_stages is not None:
        _check_maximum("backward_stages", request.backward_stages, num_blocks)
        num_backward = request.backward_stages
    complaint = scheme.check_stages(num_forward, num_backward, request.num_devices)
    if complaint is not None:
        key, accepted = complaint
        value = f"{num_forward}{note}" if key == "forward_stages" else str(num_backward)
        raise ConfigError(
            f"schedule.{key} = {value}: {scheme.name} with {request.num_devices} workers accepts"
            f" {accepted}"
        )
    _check_maximum("forward_stages", num_forward, num_blocks)
    return num_forward, num_backward


def _forward_stages(request: ScheduleRequest, scheme: Scheme) -> int | None:
    """Returns the number of forward stages that was asked for, in one of two ways."""
    if request.stages_per_device is None:
        return request.forward_stages
    devices_of_a_route = 1 if scheme.whole_model_per_device else request.num_devices
    forward_stages = request.stages_per_device * devices_of_a_route
    if request.forward_stages not in (None, forward_stages):
        raise ConfigError(
            f"stages_per_device = {request.stages_per_device}: gives {forward_stages} forward"
            f" stages, but schedule.forward_stages = {request.forward_stages}; give one of them"
        )
    return forward_stages


def _check_maximum(key: str, value: int, num_blocks: int, note: str = "") -> None:
    if value > num_blocks:
        raise ConfigError(
            f"schedule.{key} = {value}{note}: more stages than blocks; the model has {num_blocks}"
            f" blocks, so at most {num_blocks}"
        )


def _cut(
    block_work: Sequence[float], num_stages: int, devices: tuple[int, ...]
) -> tuple[StageRange, ...]:
    """Returns one balanced cut, repeated for every route; ``devices`` has those of all stages."""
    cut = partition(block_work, num_stages)
    return tuple(
        StageRange(start=blocks.start, stop=blocks.stop, device=device)
        for blocks, device in zip(cut * (len(devices) // num_stages), devices, strict=True)
    )
