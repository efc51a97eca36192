"""``penstock plan`` and ``penstock simulate`` without a configuration: schemes, passes and costs by
name, figures and pictures out. What a configuration leads to is
:mod:`penstock.client.planning.run_report`'s matter.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.client.planning.outputs import heading, read_plan, stages_text
from penstock.config.values import human_bytes
from penstock.host.errors import ConfigError, ProtocolError, reason
from penstock.host.inputs import read_text
from penstock.planner import schemes
from penstock.planner.cost.catalogue import GPUS, MODELS, Gpu
from penstock.planner.cost.sources import CostSource, Prices, UnitCosts, parse_costs
from penstock.planner.orders.search import Effort, Gap, gap
from penstock.planner.passes import PASSES
from penstock.planner.planning.build import ScheduleRequest, with_stages
from penstock.planner.planning.pipeline import (
    OPTIMIZER_WAYS,
    PlanContext,
    operators_named,
    price,
    try_out,
    try_plan,
    try_schedule,
)
from penstock.planner.planning.torch_actions import parse_actions, schedule_of_actions
from penstock.planner.render import ABSTRACT, SECONDS, Caption, timeline
from penstock.planner.schedule.schedule import Schedule, schedule_of
from penstock.planner.simulate import Simulation
from penstock.planner.validate.check import program_grid, validate
from penstock.protocol.plan.plan import MAX_PLAN_BYTES, Plan

_OPTION_OF_KEY = (
    ("train.global_batch / train.micro_batch", "--micro-batches"),
    ("schedule.scheme", "--scheme"),
    ("schedule.forward_stages", "--forward-stages"),
    ("schedule.backward_stages", "--backward-stages"),
    ("schedule.recompute", "--recompute"),
    ("schedule.passes", "--passes"),
    ("cluster.workers", "--devices"),
    ("memory.device_limit", "--memory"),
    ("backward_stages,", "--backward-stages,"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions of a simulation, as the options of ``plan`` and ``simulate`` have them.

    ``costs``: text of ``--costs``; ``optimizer``: a name of
    :data:`~penstock.planner.planning.pipeline.OPTIMIZER_WAYS`; ``search_s``: seconds of the search
    for the best order, ``None``: no search.
    """

    costs: str = "unit"
    optimizer: str = "advance"
    memory_limit_bytes: float | None = None
    search_s: float | None = None

    def context(self, prices: Prices) -> PlanContext:
        """Returns what plans with these prices are made and judged with."""
        return PlanContext(
            prices=prices,
            optimizer=OPTIMIZER_WAYS[self.optimizer],
            memory_limit_bytes=self.memory_limit_bytes,
        )


def request_of(
    *, scheme: str | None, num_devices: int | None, num_microbatches: int | None, **others: Any
) -> ScheduleRequest:
    """Returns what the options ask for: 4 devices and 2 micro-batches per device unless given.

    Raises:
        ConfigError: no scheme.
    """
    if scheme is None:
        raise ConfigError(
            "give a configuration (penstock plan examples/tiny.yaml) or a scheme (penstock plan"
            f" --scheme 1f1b); schemes: {', '.join(schemes.SCHEMES)}"
        )
    num_devices = num_devices or 4
    return ScheduleRequest(
        scheme=scheme,
        num_devices=num_devices,
        num_microbatches=num_microbatches or 2 * num_devices,
        **others,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A simulation, and how to speak about it."""

    simulation: Simulation
    passes: tuple[str, ...]
    costs: str
    abstract: bool
    memory_limit_bytes: float | None
    gap: Gap | None = None

    @property
    def caption(self) -> Caption:
        """The heading of pictures, and the unit of their times."""
        return Caption(
            heading=heading(self.simulation.plan, self.passes),
            unit=ABSTRACT if self.abstract else SECONDS,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
        plan = self.simulation.plan
        return {
            **self.simulation.summary(),
            "forward_stages": [[s.start, s.stop, s.device] for s in plan.forward_stages],
            "backward_stages": [[s.start, s.stop, s.device] for s in plan.backward_stages],
            "passes": list(self.passes),
            "costs": self.costs,
            **({} if self.gap is None else {"search": _gap_dict(self.gap)}),
        }

    def to_text(self, width: int, *, instructions: bool) -> str:
        """Returns the report for people."""
        simulation, unit = self.simulation, self.caption.unit
        plan = simulation.plan
        parts = [
            f"{heading(plan, self.passes)}; costs: {self.costs}",
            f"forward stages   {stages_text(plan.forward_stages)}",
            f"backward stages  {stages_text(plan.backward_stages)}",
            "",
            timeline(simulation, width=max(20, width - 14), abstract=self.abstract).rstrip(),
            "",
            f"makespan {unit.format(simulation.makespan_s)}: computing"
            f" {unit.format(simulation.pipeline_s)},"
            f" optimizer tail {unit.format(simulation.optimizer_tail_s)};"
            f" bubbles {simulation.bubble_ratio:.1%}",
            self._distance(),
            *self._searched(),
            "",
            *self._devices(),
        ]
        if instructions:
            parts += ["", program_grid(plan.programs).rstrip()]
        return "\n".join(parts)

    def _distance(self) -> str:
        unit, bound = self.caption.unit, self.simulation.lower_bound_s
        computing = self.simulation.pipeline_s
        saved = 1.0 - bound / computing if computing > 0.0 else 0.0
        if saved < 1e-9:
            return f"lower bound {unit.format(bound)}: no order of this work is faster"
        return f"lower bound {unit.format(bound)}: reordering could save at most {saved:.1%}"

    def _searched(self) -> Iterator[str]:
        if self.gap is None:
            return
        unit, best = self.caption.unit, self.gap.best
        proved = (
            "proved optimal"
            if best.optimal
            else f"not proved; no order takes less than {unit.format(best.lower_bound_s)}"
        )
        yield (
            f"search: the best order found computes in {unit.format(best.makespan_s)} ({proved});"
            f" this schedule in {unit.format(self.gap.makespan_s)}, {self.gap.at_least:.1%} more"
        )

    def _devices(self) -> Iterator[str]:
        unit = self.caption.unit
        limit = self.memory_limit_bytes
        memory = "kept" if self.abstract else "peak memory"
        yield f"{'device':<8} {'busy':>11} {'idle':>11} {'bubbles':>8} {memory:>12}"
        simulation = self.simulation
        for device, times in enumerate(simulation.devices):
            text = _bytes(simulation.peaks[device].total_bytes, self.abstract)
            of = "" if limit is None else f"  of {_bytes(limit, self.abstract)}"
            yield (
                f"{device:<8} {unit.format(times.busy_s):>11} {unit.format(times.idle_s):>11}"
                f" {simulation.device_bubble_ratios[device]:>8.1%} {text:>12}{of}"
            )
        if self.abstract:
            yield "(kept: activations, those of one forward stage and micro-batch are 1)"


def make_plan_report(request: ScheduleRequest, conditions: Conditions) -> PlanReport:
    """Schedules, transforms and simulates what was asked for.

    Raises:
        ConfigError: impossible combination; names the option, its value, and what would do.
    """
    with options_named():
        source = parse_costs(conditions.costs)
        request = _with_operators(with_stages(request), source)
        context = conditions.context(price(source, request))
        return _report(try_out(request, context), request.passes, conditions, context)


def make_simulation_report(
    path: Path, passes: tuple[str, ...], conditions: Conditions
) -> PlanReport:
    """Simulates a plan, or actions of ``torch.distributed.pipelining``, that are in a file, after
    passes.

    Raises:
        ConfigError: the file makes no sense, or does not go with the costs.
    """
    with options_named():
        source = parse_costs(conditions.costs)
        if path.suffix == ".csv":
            schedule, prices = _read_actions(path, source)
            context = conditions.context(prices)
            return _report(try_schedule(schedule, passes, context), passes, conditions, context)
        plan = read_plan(path)
        prices = source.price(
            forward_stages=len(plan.forward_stages) // plan.num_routes,
            backward_stages=len(plan.backward_stages) // plan.num_routes,
            num_devices=plan.num_devices,
        )
        context = conditions.context(prices)
        if not passes:
            return _report(try_plan(plan, context), passes, conditions, context)
        validate(plan)
        simulation = try_schedule(schedule_of(plan), passes, context)
        return _report(simulation, passes, conditions, context)


def _read_actions(path: Path, source: CostSource) -> tuple[Schedule, Prices]:
    """Reads actions, and prices a model of as many stages."""
    try:
        actions = parse_actions(read_text(path, MAX_PLAN_BYTES))
        num_stages = 1 + max(action.stage for rank in actions for action in rank)
        prices = source.price(
            forward_stages=num_stages, backward_stages=num_stages, num_devices=len(actions)
        )
        return schedule_of_actions(actions, block_work=prices.block_work), prices
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it: {reason(error)}") from error
    except ProtocolError as error:
        raise ConfigError(f"{path}: {error}") from error


def _report(
    simulation: Simulation, passes: tuple[str, ...], conditions: Conditions, context: PlanContext
) -> PlanReport:
    limit_s = conditions.search_s
    return PlanReport(
        simulation=simulation,
        passes=passes,
        costs=conditions.costs,
        abstract=conditions.costs.split(":")[0] == "unit",
        memory_limit_bytes=conditions.memory_limit_bytes,
        gap=None if limit_s is None else _search(simulation.plan, context, limit_s),
    )


def _search(plan: Plan, context: PlanContext, time_limit_s: float) -> Gap:
    """Returns how far the plan's orders are from the best ones: compute and hops only."""
    seen = context.of_passes
    return gap(
        schedule_of(plan),
        seen.costs,
        memory_limit_bytes=seen.memory_limit_bytes,
        hop_s=seen.hop_s,
        effort=Effort(time_limit_s=time_limit_s),
    )


def _gap_dict(found: Gap) -> dict[str, Any]:
    return {
        "makespan": found.makespan_s,
        "best": found.best.makespan_s,
        "lower_bound": found.best.lower_bound_s,
        "optimal": found.best.optimal,
        "at_least": found.at_least,
        "at_most": found.at_most,
    }


def _with_operators(request: ScheduleRequest, source: CostSource) -> ScheduleRequest:
    """Returns the request with operators in place of their sets; ``--drop`` implies selective."""
    if request.drop and request.recompute is None:
        request = replace(request, recompute="selective")
    if request.recompute != "selective":
        return request
    if isinstance(source, UnitCosts):
        raise ConfigError(
            "schedule.recompute = 'selective': unit costs know no operators; accepted: none, full,"
            " or --costs analytic:GPU:MODEL"
        )
    prices = price(source, request)
    return replace(request, drop=operators_named(request.drop, prices.costs))


@contextmanager
def options_named() -> Iterator[None]:
    """Names the command's options in errors about keys of a configuration."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        for key, option in _OPTION_OF_KEY:
            text = text.replace(key, option)
        if text.startswith("passes: "):
            text = f"--{text}"
        raise ConfigError(text) from error


def names_known() -> str:
    """Returns the text of ``--list``: every scheme and pass with a line about it, and the GPUs and
    models of ``--costs analytic:GPU:MODEL``.
    """
    width = max(map(len, (*schemes.SCHEMES, *PASSES)))
    lines = ["schemes:"]
    lines += [f"  {name:<{width}}  {_summary(scheme)}" for name, scheme in schemes.SCHEMES.items()]
    lines.append("passes (applied in the order of --passes):")
    lines += [f"  {name:<{width}}  {one.summary}" for name, one in PASSES.items()]
    lines.append("GPUs (of --costs analytic:GPU:MODEL, and penstock tune --gpu):")
    lines += [f"  {name:<{width}}  {_gpu_summary(gpu)}" for name, gpu in GPUS.items()]
    lines.append("models (of --costs analytic:GPU:MODEL, and penstock tune --model):")
    lines += [f"  {name:<{width}}  {model.summary}" for name, model in MODELS.items()]
    return "\n".join(lines)


def _summary(scheme: schemes.Scheme) -> str:
    """Returns the first line of the text of the module that makes a scheme."""
    if scheme.name == "1f1b-2":
        return "1F1B with twice as many micro-batches as devices."
    for module in vars(schemes).values():
        if isinstance(module, ModuleType) and any(v is scheme for v in vars(module).values()):
            text = (inspect.getdoc(module) or "").split("\n\n")[0]
            return " ".join(text.split()).partition(": ")[2] or text
    return ""


def _gpu_summary(gpu: Gpu) -> str:
    return (
        f"{gpu.peak_flops / 1e12:.0f} TFLOP/s, {gpu.memory_bytes / 1e9:.0f} GB at"
        f" {gpu.memory_bandwidth / 1e9:.0f} GB/s"
    )


def _bytes(value: float, abstract: bool) -> str:
    return f"{value:.4g}" if abstract else human_bytes(value)
