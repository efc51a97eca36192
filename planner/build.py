"""From a configuration and a block table to a validated plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.planner.layout import Residency, StageLayout
from penstock.planner.partition import partition
from penstock.planner.schedule import Schedule, lower
from penstock.planner.schemes import SCHEMES, Recomputation, RecomputeMode, Scheme
from penstock.planner.validate import validate
from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError, ProtocolError
from penstock.protocol.plan import Plan, StageRange
from penstock.shm.table import BlockTable


def build_plan(config: Config, table: BlockTable) -> Plan:
    """The plan that a configuration asks for: its scheme, or the plan of ``schedule.file``.

    Raises:
        ConfigError: impossible combination; names key, value, and what would be accepted. A
            :class:`~penstock.planner.validate.PlanError` for a plan file that makes no sense.
    """
    schedule = config.schedule
    if schedule.passes:
        raise ConfigError(
            f"schedule.passes = {list(schedule.passes)}: unknown pass {schedule.passes[0]!r};"
            " this version has no optional passes, accepted is []"
        )
    if schedule.file is not None:
        plan = _load(schedule.file, config)
    else:
        plan = lower(
            build_schedule(
                ScheduleRequest(
                    scheme=schedule.scheme,
                    num_devices=config.num_workers,
                    num_microbatches=config.train.num_microbatches,
                    forward_stages=schedule.forward_stages,
                    backward_stages=schedule.backward_stages,
                    recompute=schedule.recompute,
                ),
                [block.forward_flops for block in table.blocks],
            )
        )
    validate(
        plan,
        table,
        memory_limit=config.memory.device_limit,
        tokens=config.train.micro_batch * config.data.sequence_length,
    )
    return plan


def _load(path: Path, config: Config) -> Plan:
    """Read a plan file and hold it against the configuration."""
    try:
        plan = Plan.from_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"schedule.file = {str(path)!r}: cannot read it: {error}") from error
    except (ProtocolError, ConfigError) as error:
        raise ConfigError(f"schedule.file = {str(path)!r}: {error}") from error
    expected = (
        ("devices", plan.num_devices, config.num_workers, "cluster.workers x nodes"),
        (
            "micro-batches",
            plan.num_microbatches,
            config.train.num_microbatches,
            "train.global_batch / train.micro_batch",
        ),
    )
    for name, planned, configured, keys in expected:
        if planned != configured:
            raise ConfigError(
                f"schedule.file = {str(path)!r}: the plan is for {planned} {name}, the"
                f" configuration has {configured} ({keys})"
            )
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """What someone wants scheduled; numbers of stages (of one route) default to the scheme's.

    ``drop`` names the operators that ``recompute="selective"`` makes again.
    """

    scheme: str
    num_devices: int
    num_microbatches: int
    forward_stages: int | None = None
    backward_stages: int | None = None
    recompute: RecomputeMode | None = None
    drop: tuple[str, ...] = ()


def build_schedule(request: ScheduleRequest, block_work: Sequence[float]) -> Schedule:
    """The schedule of a scheme, for blocks with these amounts of forward work.

    Stages are balanced by forward work; backward work is taken to be proportional to it.

    Raises:
        ConfigError: impossible combination; names key, value, and what would be accepted.
    """
    scheme = SCHEMES[request.scheme]
    recompute = _recompute(request, scheme)
    num_forward, num_backward = _numbers_of_stages(request, scheme, len(block_work))
    complaint = scheme.check_microbatches(request.num_microbatches, request.num_devices)
    if complaint is not None:
        raise ConfigError(
            f"{complaint[0]}: {request.num_microbatches} micro-batches; {scheme.name} with"
            f" {request.num_devices} workers accepts {complaint[1]}"
        )
    placement = scheme.place(num_forward, num_backward, request.num_devices)
    layout = StageLayout(
        num_devices=request.num_devices,
        num_microbatches=request.num_microbatches,
        forward=_cut(block_work, num_forward, placement.forward),
        backward=_cut(block_work, num_backward, placement.backward),
        routes=scheme.routes(request.num_microbatches),
    )
    return Schedule(
        scheme=scheme.name,
        layout=layout,
        orders=scheme.order(layout, recompute),
        residency=scheme.residency,
    )


def _recompute(request: ScheduleRequest, scheme: Scheme) -> Recomputation:
    mode = request.recompute or scheme.recompute_modes[0]
    if mode not in scheme.recompute_modes:
        why = (
            "releases weights between forward and backward, so it cannot keep activations"
            if scheme.residency is Residency.STREAMED
            else "does not recompute this way"
        )
        raise ConfigError(
            f"schedule.recompute = {mode!r}: {scheme.name} {why}; accepted:"
            f" {', '.join(scheme.recompute_modes)}"
        )
    if (mode == "selective") != bool(request.drop):
        raise ConfigError("schedule.recompute = 'selective' and operators to drop belong together")
    return Recomputation(mode=mode, drop=request.drop)


def _numbers_of_stages(
    request: ScheduleRequest, scheme: Scheme, num_blocks: int
) -> tuple[int, int]:
    num_devices = request.num_devices
    if num_devices > num_blocks:
        raise ConfigError(
            f"cluster.workers: {num_devices} workers in all for {num_blocks} blocks; at most"
            f" {num_blocks} workers can be used"
        )
    if request.forward_stages is not None:
        _check_maximum("forward_stages", request.forward_stages, num_blocks)
    num_forward, num_backward = scheme.default_stages(
        num_devices, num_blocks, request.forward_stages
    )
    if request.backward_stages is not None:
        _check_maximum("backward_stages", request.backward_stages, num_blocks)
        num_backward = request.backward_stages
    complaint = scheme.check_stages(num_forward, num_backward, num_devices)
    if complaint is not None:
        key, accepted = complaint
        value = num_forward if key == "forward_stages" else num_backward
        raise ConfigError(
            f"schedule.{key} = {value}: {scheme.name} with {num_devices} workers accepts {accepted}"
        )
    return num_forward, num_backward


def _check_maximum(key: str, value: int, num_blocks: int) -> None:
    if value > num_blocks:
        raise ConfigError(
            f"schedule.{key} = {value}: more stages than blocks; the model has {num_blocks} blocks,"
            f" so at most {num_blocks}"
        )


def _cut(
    block_work: Sequence[float], num_stages: int, devices: tuple[int, ...]
) -> tuple[StageRange, ...]:
    """One balanced cut, repeated for every route; ``devices`` of the stages of all routes."""
    cut = partition(block_work, num_stages)
    return tuple(
        StageRange(start=blocks.start, stop=blocks.stop, device=device)
        for blocks, device in zip(cut * (len(devices) // num_stages), devices, strict=True)
    )
