"""Plans of configurations: what ``schedule`` asks for, or what is in ``schedule.file``.

A configuration becomes a :class:`~penstock.planner.planning.build.ScheduleRequest` and a
:class:`~penstock.planner.planning.pipeline.PlanContext`; from there on it takes the way of all
requests (:mod:`penstock.planner.planning.pipeline`). Here, too: what ``train`` refuses, and the
smallest memory limit that a configuration could meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from penstock.config.execution import DeviceUpdates, ScheduleConfig
from penstock.config.platforms import CoreUse
from penstock.config.schema import Config
from penstock.host.errors import CapacityError, ConfigError, ProtocolError, reason
from penstock.host.inputs import read_bytes, read_text
from penstock.planner.cost.cluster import OptimizerModel
from penstock.planner.cost.emulation import Emulation, optimizer_way
from penstock.planner.cost.operators import OPERATOR_SETS
from penstock.planner.cost.profile import Guess, cluster_of, guess_of, table_costs
from penstock.planner.cost.sources import Prices
from penstock.planner.memory.footprint import device_peaks
from penstock.planner.planning.build import ScheduleRequest
from penstock.planner.planning.pipeline import PlanContext, finished, lowered, make_schedule
from penstock.planner.planning.settling import settle_as_configured
from penstock.planner.planning.torch_actions import parse_actions, schedule_of_actions
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schemes import Recomputation
from penstock.planner.validate.check import PlanError, validate
from penstock.protocol.plan.plan import MAX_PLAN_BYTES, Plan
from penstock.protocol.plan.profile import load_profile
from penstock.protocol.run.executable import check_executable, check_updates
from penstock.shm.table import BlockTable

_NEAR = 1.005
"""How near to the smallest limit the named one is, where it has to be searched for."""


def config_prices(config: Config, table: BlockTable, guess: Guess | None = None) -> Prices:
    """Returns the cluster, and the costs of blocks for a configuration's micro-batches: those of
    ``schedule.profile``; else those of the cluster that ``cluster.device`` models, or ``guess``, by
    default the platform's.

    Raises:
        ConfigError: the profile cannot be read, or is of another model.
    """
    profile, platform = config.schedule.profile, config.cluster.platform
    if profile is None and platform.simulated_clock:
        emulation = Emulation.of(config)
        return Prices(costs=emulation.costs, cluster=emulation.cluster)
    source = load_profile(profile) if profile is not None else guess or guess_of(platform)
    return Prices(
        costs=table_costs(
            table,
            source,
            tokens=(config.train.micro_batch or 1) * config.data.sequence_length,
            own_memory=platform.own_memory,
        ),
        cluster=replace(
            cluster_of(source, devices_per_node=config.cluster.workers),
            update_fetch_bytes=config.optimizer.name.traits.stepped_bytes,
            shares_cores=platform.cores is CoreUse.COMPUTE,
        ),
    )


def optimizer_of(config: Config) -> OptimizerModel:
    """Returns how a configuration's optimizer works on its nodes' cores."""
    emulated = config.cluster.platform.simulated_clock
    way = Emulation.of(config).optimizer if emulated else optimizer_way(config.optimizer)
    return replace(way, mirrored=config.mirrors)


def config_context(config: Config, table: BlockTable, guess: Guess | None = None) -> PlanContext:
    """Returns what plans of a configuration are made and simulated with (:func:`config_prices`).

    Raises:
        ConfigError: the profile cannot be read, or is of another model.
    """
    optimizer = optimizer_of(config)
    early = config.optimizer.settle == "early"
    return PlanContext(
        prices=config_prices(config, table, guess),
        block_work=tuple(block.forward_flops for block in table.blocks),
        optimizer=optimizer,
        stops_early=True,
        memory_limit_bytes=config.memory.device_limit,
        updates_by=(early and optimizer.early) or optimizer,
        update_stride=config.schedule.update_stride,
        resident_share=config.schedule.resident_share,
        device_updates=config.schedule.device_updates,
    )


def _in(context: PlanContext | None, config: Config, table: BlockTable) -> PlanContext:
    """Returns a context with what a configuration like the one it was made of says differently."""
    if context is None:
        return config_context(config, table)
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
    file, context = config.schedule.file, _in(context, config, table)
    _check_used(config)
    if file is not None and file.suffix.lower() != ".csv":
        plan = _load(file, config)
    elif file is not None:
        schedule = _read_actions(file, config, context.work)
        plan = lowered(finished(schedule, _request(config), context))
    else:
        plan = lowered(make_schedule(_request(config), context))
    _check_fits(plan, config, table)
    plan = settle_as_configured(config, table, plan)
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


def plan_within_limit(config: Config, table: BlockTable, context: PlanContext) -> Plan:
    """Returns :func:`trainable_plan`; where ``memory.device_limit`` is in its way, the error names
    the smallest limit that is not.

    Raises:
        ConfigError: no plan can be built, or workers cannot run it.
        CapacityError: there is one, but not within ``memory.device_limit``; says what would do.
    """
    try:
        return trainable_plan(config, table, context)
    except ConfigError as error:
        limited = config.memory.device_limit is not None
        smallest = _smallest_limit(config, table, context) if limited else None
        if smallest is None:
            raise
        raise CapacityError(
            f"{str(error).splitlines()[0]}. The smallest limit with which this configuration has a"
            f" plan: memory.device_limit = {smallest}"
        ) from error


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
    found: dict[str, None] = {}
    for word in words:
        if word not in OPERATOR_SETS and word not in known:
            raise ConfigError(
                f"schedule.drop = {list(words)}: unknown operator {word!r}; accepted:"
                f" {', '.join(known)}, or the sets {', '.join(OPERATOR_SETS)}"
            )
        found |= dict.fromkeys(OPERATOR_SETS.get(word, (word,)))
    return tuple(sorted(found))


def _unless_default(schedule: ScheduleConfig) -> str:
    preview = schedule.device_updates is DeviceUpdates.PREVIEW
    return "" if preview else schedule.device_updates.value


def _check_used(config: Config) -> None:
    """Refuses keys for passes that no configured pass looks at."""
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
    """Hold the numbers of a plan from a file against configuration and model."""
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
