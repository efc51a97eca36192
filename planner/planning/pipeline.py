"""The one way from what is asked for to figures::

    request -> schedule -> passes -> replicas -> lowering -> validation -> memory -> simulation

:func:`make_plan` goes as far as validation, :func:`try_out` to the end; plans and schedules that
are there already enter on the way (:func:`try_plan`, :func:`try_schedule`). All of it is pure, and
decided by one :class:`PlanContext`. Requests and contexts of configurations come from
:mod:`penstock.planner.planning.configured`, prices by name from
:mod:`penstock.planner.cost.sources`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from penstock.config.execution import DeviceUpdates
from penstock.config.values import human_bytes
from penstock.host.errors import ConfigError
from penstock.planner.cost.cluster import (
    ADVANCE,
    IN_PLACE,
    PREVIEW_SETTLE,
    SYNCHRONOUS,
    OptimizerModel,
)
from penstock.planner.cost.costs import Costs
from penstock.planner.cost.operators import OPERATOR_SETS
from penstock.planner.cost.sources import CostSource, Prices
from penstock.planner.memory.footprint import DevicePeak, device_peaks
from penstock.planner.passes import PASSES, PassContext
from penstock.planner.passes.activation_budget import with_kept_graphs
from penstock.planner.planning.build import ScheduleRequest, build_schedule, with_stages
from penstock.planner.schedule.replicas import replicate, with_reduction
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.simulate import Simulation, simulate
from penstock.planner.validate.check import validate
from penstock.protocol.plan.plan import Plan

OPTIMIZER_WAYS: Mapping[str, OptimizerModel] = MappingProxyType(
    {
        "advance": ADVANCE,
        "preview-settle": PREVIEW_SETTLE,
        "in-place": IN_PLACE,
        "synchronous": SYNCHRONOUS,
    }
)
"""Ways of a CPU optimizer, by the names that ``--optimizer`` accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """Costs, limits and settings that plans are made and judged with.

    ``block_work``: the work by which stages are balanced; forward seconds unless given.
    ``memory_limit_bytes``: of one device, ``None`` for no limit. ``optimizer`` and ``stops_early``:
    see :func:`penstock.planner.simulate.simulate`. Passes decide about updates by ``updates_by``,
    ``update_stride``, ``resident_share`` and ``device_updates``, see
    :class:`~penstock.planner.passes.PassContext`.
    """

    prices: Prices
    block_work: tuple[float, ...] | None = None
    memory_limit_bytes: float | None = None
    optimizer: OptimizerModel = ADVANCE
    stops_early: bool = False
    updates_by: OptimizerModel = PREVIEW_SETTLE
    update_stride: float | None = None
    resident_share: float = 0.0
    device_updates: DeviceUpdates = DeviceUpdates.PREVIEW

    @property
    def work(self) -> tuple[float, ...]:
        """The work of each block, by which stages are balanced."""
        return self.block_work or self.prices.block_work

    @property
    def of_passes(self) -> PassContext:
        """The context of passes; a hop carries the largest output between blocks."""
        costs, cluster = self.prices.costs, self.prices.cluster
        largest = max(block.output_bytes for block in costs.blocks)
        return PassContext(
            costs=costs,
            cluster=cluster,
            memory_limit_bytes=self.memory_limit_bytes,
            hop_s=largest / cluster.peer_bandwidth + cluster.latency_s,
            optimizer=self.updates_by,
            update_stride=self.update_stride,
            resident_share=self.resident_share,
            device_updates=self.device_updates,
        )


def price(source: CostSource, request: ScheduleRequest) -> Prices:
    """Returns what a source says about the model that a request cuts.

    Raises:
        ConfigError: as :func:`~penstock.planner.planning.build.with_stages`, or what the source
        complains
            about.
    """
    complete = with_stages(request)
    assert complete.forward_stages is not None and complete.backward_stages is not None
    return source.price(
        forward_stages=complete.forward_stages,
        backward_stages=complete.backward_stages,
        num_devices=request.num_devices,
    )


def make_schedule(request: ScheduleRequest, context: PlanContext) -> Schedule:
    """Returns the schedule of a request, with everything that it asks for.

    Raises:
        ConfigError: impossible combination, or unknown pass; says what would be accepted.
    """
    return finished(build_schedule(request, context.work), request, context)


def finished(schedule: Schedule, request: ScheduleRequest, context: PlanContext) -> Schedule:
    """Returns one replica's schedule with a request's passes, replicas and sums of gradients.

    Raises:
        ConfigError: one of these cannot be done to this schedule.
    """
    schedule = apply_passes(schedule, request.passes, context)
    if request.recompute == "auto":
        schedule = with_kept_graphs(schedule, context.of_passes)
    schedule = replicate(schedule, request.replicas)
    if request.reduce_gradients is not None:
        per_node = context.prices.cluster.devices_per_node
        schedule = with_reduction(schedule, request.reduce_gradients, per_node)
    if request.concatenates_gradients is not None:
        schedule = replace(schedule, concatenates_gradients=request.concatenates_gradients)
    return schedule


def apply_passes(schedule: Schedule, passes: Sequence[str], context: PlanContext) -> Schedule:
    """Returns the schedule after passes, applied in order. The results between two passes are
    validated. The caller validates the last result when it lowers it (:func:`validated`).

    Raises:
        ConfigError: unknown pass, or one that cannot work on this schedule.
    """
    for name in passes:
        if name not in PASSES:
            raise ConfigError(
                f"schedule.passes = {list(passes)}: unknown pass {name!r}; accepted:"
                f" {', '.join(PASSES)}"
            )
    for count, name in enumerate(passes, start=1):
        schedule = PASSES[name].run(schedule, context.of_passes)
        if count < len(passes):
            validated(schedule, passes[:count])
    return schedule


def lowered(schedule: Schedule) -> Plan:
    """Returns the plan of a schedule, not validated yet.

    Raises:
        ConfigError: its instructions wait for each other, or for work that no device does.
    """
    try:
        return lower(schedule)
    except ValueError as error:
        raise ConfigError(
            f"schedule: the order of {schedule.scheme} cannot run: {error}"
        ) from error


def validated(schedule: Schedule, passes: Sequence[str] = ()) -> Plan:
    """Returns the plan of a schedule to which ``passes`` were applied, by the rules a valid one.

    Raises:
        ConfigError: it makes no sense; names the last pass.
    """
    try:
        plan = lowered(schedule)
        validate(plan)
    except ConfigError as error:
        after = f"after pass {passes[-1]}" if passes else schedule.scheme
        raise ConfigError(f"{after}: {error}") from error
    return plan


def make_plan(request: ScheduleRequest, context: PlanContext) -> Plan:
    """Returns the validated plan of a request.

    Raises:
        ConfigError: as :func:`make_schedule`, or the plan makes no sense.
    """
    return validated(make_schedule(request, context), request.passes)


def try_out(request: ScheduleRequest, context: PlanContext) -> Simulation:
    """Schedules, lowers, validates and simulates a request.

    Raises:
        ConfigError: as :func:`make_plan`, or a device needs more than the limit: which one, how
            much, and what would help.
    """
    return _simulated(make_plan(request, context), context)


def try_schedule(schedule: Schedule, passes: Sequence[str], context: PlanContext) -> Simulation:
    """Applies passes to a schedule that is there already, lowers, validates and simulates it.

    Raises:
        ConfigError: as :func:`try_plan` and :func:`apply_passes`.
    """
    _check_blocks(schedule.layout.num_blocks, context)
    changed = apply_passes(schedule, passes, context)
    return _simulated(validated(changed, passes), context)


def try_plan(plan: Plan, context: PlanContext) -> Simulation:
    """Validates and simulates a plan that is there already.

    Raises:
        ConfigError: it makes no sense, was made for another model, or needs too much memory.
    """
    _check_blocks(plan.num_blocks, context)
    validate(plan)
    return _simulated(plan, context)


def _check_blocks(num_blocks: int, context: PlanContext) -> None:
    priced = len(context.prices.costs.blocks)
    if num_blocks != priced:
        raise ConfigError(
            f"the plan is for {num_blocks} blocks, the costs are of {priced}; use costs of the"
            " model that the plan was made for"
        )


def _simulated(plan: Plan, context: PlanContext) -> Simulation:
    costs = context.prices.costs
    peaks = device_peaks(plan, costs)
    if context.memory_limit_bytes is not None:
        _check_memory(peaks, context.memory_limit_bytes)
    return simulate(
        plan,
        costs,
        context.prices.cluster,
        optimizer=context.optimizer,
        stops_early=context.stops_early,
        peaks=peaks,
    )


def _check_memory(peaks: Sequence[DevicePeak], limit: float) -> None:
    """Holds every device against the limit.

    Raises:
        ConfigError: a device needs more; says which, how much for what, and what would help.
    """
    worst = max(range(len(peaks)), key=lambda device: peaks[device].total_bytes)
    peak = peaks[worst]
    if peak.total_bytes > limit:
        uses = (
            ("weights", peak.weight_bytes),
            ("gradients", peak.gradient_bytes),
            ("activations", peak.activation_bytes),
            ("workspace", peak.workspace_bytes),
            ("optimizer state", peak.static_bytes),
        )
        parts = ", ".join(f"{name} {human_bytes(value)}" for name, value in uses if value)
        raise ConfigError(
            f"memory.device_limit = {human_bytes(limit)}: device {worst} needs"
            f" {human_bytes(peak.total_bytes)} ({parts}); {_advice(peak)}"
        )


def _advice(peak: DevicePeak) -> str:
    """Returns what makes the largest part smaller."""
    state = peak.weight_bytes + peak.gradient_bytes + peak.static_bytes
    if peak.activation_bytes + peak.workspace_bytes > state:
        return (
            "use schedule.recompute: full or selective, smaller micro-batches, more devices, or a"
            " scheme with fewer micro-batches in flight"
        )
    return "use more devices or stages, or a scheme that streams weights (mobius, spipe)"


def operators_named(words: Sequence[str], costs: Costs) -> tuple[str, ...]:
    """Returns the operators that names of operators and of sets stand for, in a model.

    Raises:
        ConfigError: nothing named, or a name that the model does not have; lists those it has.
    """
    known = tuple(dict.fromkeys(op.name for block in costs.blocks for op in block.operators))
    if not known:
        raise ConfigError(
            "operators to drop: these costs know no operators; give measured ones, --costs p.json"
            " (penstock profile makes them)"
        )
    chosen: dict[str, None] = {}
    for word in words:
        members = OPERATOR_SETS.get(word, (word,))
        present = [operator for operator in members if operator in known]
        if not present:
            words = ()
            break
        chosen |= dict.fromkeys(present)
    if not words:
        raise ConfigError(
            f"operators to drop: expected names among {', '.join(known)}, or of the sets"
            f" {', '.join(OPERATOR_SETS)}"
        )
    return tuple(chosen)
