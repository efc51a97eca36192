"""Plans of configurations: the schedule that a scheme makes, or the one in ``schedule.file``.

A configuration becomes a :class:`~penstock.planner.planning.build.ScheduleRequest`. With the
:class:`~penstock.planner.planning.pipeline.PlanContext` of its costs
(:mod:`penstock.planner.planning.pricing`) it takes the way of all requests
(:mod:`penstock.planner.planning.pipeline`). The module also refuses plans that ``train`` cannot
run, and finds the smallest memory limit that a configuration can meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from penstock.config.execution import DeviceUpdates, ScheduleConfig
from penstock.config.schema import Config
from penstock.host.errors import CapacityError, ConfigError, ProtocolError, reason
from penstock.host.inputs import read_bytes, read_text
from penstock.planner.cost.operators import OPERATOR_SETS
from penstock.planner.memory.footprint import device_peaks
from penstock.planner.planning.build import ScheduleRequest
from penstock.planner.planning.overlapped_updates import overlap_as_configured, with_overlap
from penstock.planner.planning.pipeline import PlanContext, finished, lowered, make_schedule
from penstock.planner.planning.pricing import config_context
from penstock.planner.planning.torch_actions import parse_actions, schedule_of_actions
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schemes import Recomputation
from penstock.planner.validate.check import PlanError, validate
from penstock.protocol.plan.plan import MAX_PLAN_BYTES, Plan
from penstock.protocol.run.executable import check_executable, check_updates
from penstock.shm.table import BlockTable

_NEAR = 1.005
"""Largest ratio of the limit that an error names to the smallest possible one, if it is searched.
"""


def _with_schedule(context: PlanContext, config: Config) -> PlanContext:
    """Returns a context with the schedule and limits of a configuration. The context was made of
    one that differs in these keys only.
    """
    return replace(
        context,
        memory_limit_bytes=config.memory.device_limit,
        update_stride=config.schedule.update_stride,
        resident_share=config.schedule.resident_share,
        device_updates=config.schedule.device_updates,
    )


def build_plan(config: Config, table: BlockTable, context: PlanContext | None = None) -> Plan:
    """Returns the plan that a configuration asks for: its scheme, or what is in ``schedule.file``.

    ``context``: of this configuration, or of one that differs in its schedule and limits only.

    Raises:
        ConfigError: impossible combination; names key, value, and what would be accepted. A
            :class:`~penstock.planner.validate.check.PlanError` for a plan file that makes no sense.
    """
    file = config.schedule.file
    context = _with_schedule(context or config_context(config, table), config)
    _check_used(config)
    if file is not None and file.suffix.lower() != ".csv":
        plan = _load(file, config)
    elif file is not None:
        schedule = _read_actions(file, config, context.work)
        plan = lowered(finished(schedule, _request(config), context))
    else:
        plan = lowered(make_schedule(_request(config), context))
    _check_fits(plan, config, table)
    plan = overlap_as_configured(config, table, plan)
    try:
        validate(
            plan,
            table,
            costs=context.prices.costs,
            memory_limit=context.memory_limit_bytes,
            devices_per_node=config.cluster.workers,
        )
    except PlanError as error:
        error.source = _source(file) if file is not None else ""
        raise
    return plan


def trainable_plan(config: Config, table: BlockTable, context: PlanContext | None = None) -> Plan:
    """Returns the plan of a configuration, refused as ``train`` refuses it; arguments as
    :func:`build_plan`.

    Raises:
        ConfigError: no plan can be built, or workers cannot run it.
    """
    plan = build_plan(config, table, context)
    check_executable(plan, devices_per_node=config.cluster.workers)
    check_updates(config, table, plan)
    return plan


def complete_plan(config: Config, table: BlockTable, context: PlanContext) -> Plan:
    """Returns :func:`trainable_plan` with the blocks that ``optimizer.settle: auto`` chooses.

    Raises:
        ConfigError: no plan can be built, or workers cannot run it.
        CapacityError: no plan fits ``memory.device_limit``; names the smallest limit that would do.
    """
    try:
        plan = trainable_plan(config, table, context)
    except ConfigError as error:
        limited = config.memory.device_limit is not None
        smallest = _smallest_limit(config, table, context) if limited else None
        if smallest is None:
            raise
        raise CapacityError(
            f"{str(error).splitlines()[0]}. The smallest limit with which this configuration has a"
            f" plan: memory.device_limit = {smallest}"
        ) from error
    return with_overlap(config, plan, context)


def _smallest_limit(config: Config, table: BlockTable, context: PlanContext) -> int | None:
    """Returns bytes of a limit that can be met, at most half a percent above the smallest; ``None``
    if the configuration has no plan with any limit above its own.

    Schemes need what they need. Passes that spend memory by the limit (Obscura's, keep-what-fits,
    2BP's) are tried with limits between.
    """

    def planned(limit: int | None) -> Plan | None:
        memory = config.memory.model_copy(update={"device_limit": limit})
        try:
            return trainable_plan(config.model_copy(update={"memory": memory}), table, context)
        except ConfigError:
            return None

    plan = planned(None)
    if plan is None:
        return None
    peaks = device_peaks(plan, context.prices.costs)
    low, high = config.memory.device_limit or 0, ceil(max(peak.total_bytes for peak in peaks))
    if high <= low:
        return None
    while config.schedule.passes and high > low * _NEAR and high > low + 1:
        middle = (low + high) // 2
        if planned(middle) is None:
            low = middle
        else:
            high = middle
    return high


def _request(config: Config) -> ScheduleRequest:
    """Returns what a configuration wants scheduled.

    Raises:
        ConfigError: replicas cannot share workers or micro-batches evenly, or unknown operators.
    """
    schedule, replicas = config.schedule, config.schedule.replicas
    for name, value, keys in (
        ("workers", config.num_workers, "cluster.workers x nodes"),
        ("micro-batches", config.train.num_microbatches, "train.global_batch / train.micro_batch"),
    ):
        if value % replicas:
            raise ConfigError(
                f"schedule.replicas = {replicas}: {value} {name} ({keys}) cannot be shared out"
                f" evenly; accepted: a divisor of {value}"
            )
    return ScheduleRequest(
        scheme=schedule.scheme,
        num_devices=config.num_workers // replicas,
        num_microbatches=config.train.num_microbatches // replicas,
        forward_stages=schedule.forward_stages,
        backward_stages=schedule.backward_stages,
        stages_per_device=schedule.stages_per_device,
        recompute=schedule.recompute,
        drop=dropped_operators(schedule.drop),
        passes=schedule.passes,
        replicas=replicas,
        reduce_gradients=schedule.reduce_gradients,
        concatenates_gradients=schedule.weight_gradients == "concatenated",
    )


def dropped_operators(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the operators that names of operators and of sets stand for; the model may lack some.

    Raises:
        ConfigError: an unknown name.
    """
    known = dict.fromkeys(name for members in OPERATOR_SETS.values() for name in members)
    chosen: dict[str, None] = {}
    for word in words:
        if word not in OPERATOR_SETS and word not in known:
            raise ConfigError(
                f"schedule.drop = {list(words)}: unknown operator {word!r}; accepted:"
                f" {', '.join(known)}, or the sets {', '.join(OPERATOR_SETS)}"
            )
        chosen |= dict.fromkeys(OPERATOR_SETS.get(word, (word,)))
    return tuple(sorted(chosen))


def _unless_default(schedule: ScheduleConfig) -> str:
    preview = schedule.device_updates is DeviceUpdates.PREVIEW
    return "" if preview else schedule.device_updates.value


def _check_used(config: Config) -> None:
    """Refuses keys that no configured pass uses."""
    schedule = config.schedule
    for key, value, users in (
        ("update_stride", schedule.update_stride, ("interleave-updates",)),
        ("resident_share", schedule.resident_share, ("interleave-updates", "twinflow")),
        ("device_updates", _unless_default(schedule), ("interleave-updates", "device-update")),
    ):
        if value and not set(users) & set(schedule.passes):
            raise ConfigError(
                f"schedule.{key} = {value}: no pass uses the key; leave it out, or have"
                f" {' or '.join(users)} in schedule.passes"
            )


def _load(path: Path, config: Config) -> Plan:
    """Reads a plan file. It says everything, so nothing else may be asked for."""
    schedule = config.schedule
    sums = (schedule.reduce_gradients, schedule.weight_gradients)
    if schedule.replicas != 1 or schedule.passes or sums != ("auto", "looped"):
        raise ConfigError(
            f"{_source(path)}: a plan is complete; schedule.replicas must be 1,"
            " schedule.passes empty, schedule.reduce_gradients auto and schedule.weight_gradients"
            " looped"
        )
    try:
        return Plan.from_json(read_bytes(path, MAX_PLAN_BYTES))
    except OSError as error:
        raise ConfigError(f"{_source(path)}: cannot read it: {reason(error)}") from error
    except (ProtocolError, ConfigError) as error:
        raise ConfigError(f"{_source(path)}: {error}") from error


def _read_actions(path: Path, config: Config, block_work: Sequence[float]) -> Schedule:
    """Reads torch's action text as the schedule of one replica.

    The text does not say what forwards keep; ``schedule.recompute`` does. Its REDUCE_GRAD is
    ignored: ``schedule.reduce_gradients`` says where replicas are summed.
    """
    mode = config.schedule.recompute or "none"
    recompute = Recomputation(
        mode="full" if mode == "auto" else mode, drop=dropped_operators(config.schedule.drop)
    )
    try:
        actions = parse_actions(read_text(path, MAX_PLAN_BYTES))
        return schedule_of_actions(actions, block_work=block_work, recompute=recompute)
    except OSError as error:
        raise ConfigError(f"{_source(path)}: cannot read it: {reason(error)}") from error
    except (ProtocolError, ConfigError) as error:
        raise ConfigError(f"{_source(path)}: {error}") from error


def _source(file: Path) -> str:
    return f"schedule.file = {str(file)!r}"


def _check_fits(plan: Plan, config: Config, table: BlockTable) -> None:
    """Compares the numbers of a plan from a file with configuration and model."""
    file = config.schedule.file
    if file is None:
        return
    microbatches = config.train.num_microbatches
    expected = (
        ("devices", plan.num_devices, config.num_workers, "cluster.workers x nodes"),
        ("micro-batches", plan.num_microbatches, microbatches, "train.global_batch / micro_batch"),
        ("blocks", plan.num_blocks, len(table.blocks), "the model; it was made for another"),
    )
    for name, planned, configured, meaning in expected:
        if planned != configured:
            remedy = f"change these to {planned}, or m" if name != "blocks" else "m"
            raise ConfigError(
                f"{_source(file)}: the plan is for {planned} {name}, the configuration has"
                f" {configured} ({meaning}); {remedy}ake a plan for this configuration (schedule:"
                " auto, or penstock plan CONFIG --out FILE)"
            )
