"""From a wish to figures: schedule, passes, plan, memory, simulation, for one set of prices.

What ``penstock plan`` shows for one recipe and ``penstock tune`` compares for many. Pure; where
prices come from is :mod:`penstock.planner.cost.sources`'s matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from penstock.planner.build import ScheduleRequest, build_schedule
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
from penstock.planner.render.units import format_bytes
from penstock.planner.schedule import Schedule, lower
from penstock.planner.schemes import SCHEMES
from penstock.planner.simulate import Simulation, simulate
from penstock.planner.validate.check import validate
from penstock.protocol.errors import ConfigError
from penstock.protocol.plan.plan import Plan

OPTIMIZERS: Mapping[str, OptimizerModel] = MappingProxyType(
    {
        "advance": ADVANCE,
        "preview-settle": PREVIEW_SETTLE,
        "in-place": IN_PLACE,
        "synchronous": SYNCHRONOUS,
    }
)
"""How a CPU optimizer can work, by the names that ``--optimizer`` accepts."""

_BLOCKS_PER_DEVICE = 6
"""A model this long lets every scheme choose its own numbers of stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What to schedule, and the names of the passes to apply, in order."""

    request: ScheduleRequest
    passes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a recipe is tried with. ``memory_limit_bytes``: of one device.

    ``stops_early``: as our workers do, see :func:`penstock.planner.simulate.simulate`.
    """

    prices: Prices
    optimizer: OptimizerModel = ADVANCE
    stops_early: bool = False
    memory_limit_bytes: float | None = None

    @property
    def context(self) -> PassContext:
        """What passes decide by; a hop carries the largest output between blocks."""
        costs, cluster = self.prices.costs, self.prices.cluster
        largest = max(block.output_bytes for block in costs.blocks)
        return PassContext(
            costs=costs,
            cluster=cluster,
            memory_limit_bytes=self.memory_limit_bytes,
            hop_s=largest / cluster.peer_bandwidth + cluster.latency_s,
        )


def settle_stages(request: ScheduleRequest) -> ScheduleRequest:
    """The request with numbers of stages filled in as its scheme does for a long model.

    Raises:
        ConfigError: unknown scheme; names the known ones.
    """
    scheme = SCHEMES.get(request.scheme)
    if scheme is None:
        raise ConfigError(
            f"schedule.scheme = {request.scheme!r}: unknown scheme; accepted: {', '.join(SCHEMES)}"
        )
    forward = request.forward_stages
    if request.stages_per_device is not None:
        devices = 1 if scheme.whole_model_per_device else request.num_devices
        forward = request.stages_per_device * devices
        if request.forward_stages not in (None, forward):
            raise ConfigError(
                f"schedule.forward_stages = {request.forward_stages}: does not go with"
                f" {request.stages_per_device} stages per device, which are {forward}; give one"
            )
    num_forward, num_backward = scheme.default_stages(
        request.num_devices, _BLOCKS_PER_DEVICE * request.num_devices, forward
    )
    return replace(
        request,
        forward_stages=num_forward,
        backward_stages=request.backward_stages or num_backward,
        stages_per_device=None,
    )


def price(source: CostSource, request: ScheduleRequest) -> Prices:
    """What a source says about the model that a request cuts.

    Raises:
        ConfigError: as :func:`settle_stages`, or what the source complains about.
    """
    settled = settle_stages(request)
    assert settled.forward_stages is not None and settled.backward_stages is not None
    return source.price(
        forward_stages=settled.forward_stages,
        backward_stages=settled.backward_stages,
        num_devices=request.num_devices,
    )


def make_schedule(recipe: Recipe, terms: Terms) -> Schedule:
    """Build a recipe's schedule and apply its passes, validating after each.

    Raises:
        ConfigError: impossible combination, or unknown pass; says what would be accepted.
    """
    _check_passes(recipe.passes)
    schedule = build_schedule(recipe.request, terms.prices.block_work)
    return apply_passes(schedule, recipe.passes, terms)


def apply_passes(schedule: Schedule, passes: Sequence[str], terms: Terms) -> Schedule:
    """Apply passes in order, validating after each.

    Raises:
        ConfigError: unknown pass, or one that cannot work on this schedule.
    """
    _check_passes(passes)
    context = terms.context
    for name in passes:
        changed = PASSES[name].run(schedule, context)
        if changed is not schedule:
            lowered(changed, f"after pass {name}")
        schedule = changed
    return schedule


def _check_passes(passes: Sequence[str]) -> None:
    unknown = [name for name in passes if name not in PASSES]
    if unknown:
        raise ConfigError(
            f"schedule.passes: unknown pass {unknown[0]!r}; accepted: {', '.join(PASSES)}"
        )


def try_out(recipe: Recipe, terms: Terms) -> Simulation:
    """Schedule, lower, validate and simulate a recipe.

    Raises:
        ConfigError: as :func:`make_schedule`, or a device needs more than the limit: which one, how
            much, and what would help.
    """
    schedule = make_schedule(recipe, terms)
    return _simulated(lowered(schedule, recipe.request.scheme), terms)


def try_plan(plan: Plan, terms: Terms) -> Simulation:
    """Validate and simulate a plan that is there already.

    Raises:
        ConfigError: it makes no sense, was made for another model, or needs too much memory.
    """
    _check_blocks(plan.num_blocks, terms)
    validate(plan)
    return _simulated(plan, terms)


def try_schedule(schedule: Schedule, passes: Sequence[str], terms: Terms) -> Simulation:
    """Apply passes to a schedule that is there already, lower, validate and simulate it.

    Raises:
        ConfigError: as :func:`try_plan` and :func:`apply_passes`.
    """
    _check_blocks(schedule.layout.num_blocks, terms)
    changed = apply_passes(schedule, passes, terms)
    return _simulated(lowered(changed, schedule.scheme), terms)


def _check_blocks(num_blocks: int, terms: Terms) -> None:
    priced = len(terms.prices.costs.blocks)
    if num_blocks != priced:
        raise ConfigError(
            f"the plan is for {num_blocks} blocks, the costs are of {priced}; use costs of the"
            " model that the plan was made for"
        )


def lowered(schedule: Schedule, what: str) -> Plan:
    """The validated plan of a schedule; ``what`` begins the error.

    Raises:
        ConfigError: it makes no sense.
    """
    try:
        plan = lower(schedule)
        validate(plan)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error
    return plan


def _simulated(plan: Plan, terms: Terms) -> Simulation:
    costs = terms.prices.costs
    peaks = device_peaks(plan, costs)
    if terms.memory_limit_bytes is not None:
        check_memory(peaks, terms.memory_limit_bytes)
    return simulate(
        plan,
        costs,
        terms.prices.cluster,
        optimizer=terms.optimizer,
        stops_early=terms.stops_early,
        peaks=peaks,
    )


def check_memory(peaks: Sequence[DevicePeak], limit: float) -> None:
    """Hold every device against the limit.

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
        parts = ", ".join(f"{name} {format_bytes(value)}" for name, value in uses if value)
        raise ConfigError(
            f"memory.device_limit = {format_bytes(limit)}: device {worst} needs"
            f" {format_bytes(peak.total_bytes)} ({parts}); {_advice(peak)}"
        )


def _advice(peak: DevicePeak) -> str:
    """What makes the largest part smaller."""
    state = peak.weight_bytes + peak.gradient_bytes + peak.static_bytes
    if peak.activation_bytes + peak.workspace_bytes > state:
        return (
            "use schedule.recompute: full or selective, smaller micro-batches, more devices, or a"
            " scheme with fewer micro-batches in flight"
        )
    return "use more devices or stages, or a scheme that streams weights (mobius, spipe)"


def operators_named(words: Sequence[str], costs: Costs) -> tuple[str, ...]:
    """The operators that names of operators and of operator sets stand for, in a model.

    Raises:
        ConfigError: nothing named, or a name that the model does not have; lists those it has.
    """
    known = tuple(dict.fromkeys(op.name for block in costs.blocks for op in block.operators))
    found: dict[str, None] = {}
    for word in words:
        members = OPERATOR_SETS.get(word, (word,))
        present = [operator for operator in members if operator in known]
        if not present:
            words = ()
            break
        found |= dict.fromkeys(present)
    if not words:
        raise ConfigError(
            f"operators to drop: expected names among {', '.join(known) or 'none'}, or of the sets"
            f" {', '.join(OPERATOR_SETS)}"
        )
    return tuple(found)
