"""From a configuration and a block table to a validated plan."""

from __future__ import annotations

from pathlib import Path

from penstock.planner.layout import StageLayout
from penstock.planner.partition import partition
from penstock.planner.passes import complete
from penstock.planner.schemes import SCHEMES, RecomputeMode, Scheme, forward_only
from penstock.planner.validate import validate
from penstock.protocol.config import Config, ScheduleConfig
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
        plan = _build(config, table)
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


def _build(config: Config, table: BlockTable) -> Plan:
    scheme = SCHEMES[config.schedule.scheme]
    recompute = _recompute(config.schedule, scheme)
    num_forward, num_backward = _numbers_of_stages(config, scheme, len(table.blocks))
    placement = scheme.place(num_forward, num_backward, config.num_workers)
    layout = StageLayout(
        num_devices=config.num_workers,
        num_microbatches=config.train.num_microbatches,
        forward=_cut(table, placement.forward),
        backward=_cut(table, placement.backward),
    )
    return Plan(
        scheme=scheme.name,
        num_devices=layout.num_devices,
        num_microbatches=layout.num_microbatches,
        forward_stages=layout.forward,
        backward_stages=layout.backward,
        programs=complete(layout, scheme.order(layout, recompute)),
        evaluation=complete(layout, forward_only(layout)),
    )


def _recompute(schedule: ScheduleConfig, scheme: Scheme) -> RecomputeMode:
    if schedule.recompute is None:
        return scheme.recompute_modes[0]
    if schedule.recompute not in scheme.recompute_modes:
        raise ConfigError(
            f"schedule.recompute = {schedule.recompute!r}: {scheme.name} releases weights between"
            f" forward and backward, so it cannot keep activations; accepted:"
            f" {', '.join(scheme.recompute_modes)}"
        )
    return schedule.recompute


def _numbers_of_stages(config: Config, scheme: Scheme, num_blocks: int) -> tuple[int, int]:
    schedule, num_devices = config.schedule, config.num_workers
    if num_devices > num_blocks:
        raise ConfigError(
            f"cluster.workers: {num_devices} workers in all for {num_blocks} blocks; at most"
            f" {num_blocks} workers can be used"
        )
    if schedule.forward_stages is not None:
        _check_maximum("forward_stages", schedule.forward_stages, num_blocks)
    num_forward, num_backward = scheme.default_stages(
        num_devices, num_blocks, schedule.forward_stages
    )
    if schedule.backward_stages is not None:
        _check_maximum("backward_stages", schedule.backward_stages, num_blocks)
        num_backward = schedule.backward_stages
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


def _cut(table: BlockTable, devices: tuple[int, ...]) -> tuple[StageRange, ...]:
    """Balanced by forward work; backward work is proportional to it."""
    costs = [block.forward_flops for block in table.blocks]
    return tuple(
        StageRange(start=blocks.start, stop=blocks.stop, device=device)
        for blocks, device in zip(partition(costs, len(devices)), devices, strict=True)
    )
