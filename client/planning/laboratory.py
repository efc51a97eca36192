"""``penstock plan`` and ``penstock simulate`` without a configuration: schemes, passes and costs by
name, figures and pictures out. What a configuration leads to is
:mod:`penstock.client.planning.configured`'s matter.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from penstock.client.planning.outputs import heading, read_plan, stages_text
from penstock.planner import schemes
from penstock.planner.build import ScheduleRequest
from penstock.planner.cost.sources import CostSource, Prices, UnitCosts, parse_costs
from penstock.planner.orders.search import Effort, Gap, gap
from penstock.planner.passes import PASSES
from penstock.planner.pipeline import (
    OPTIMIZERS,
    Recipe,
    Terms,
    operators_named,
    price,
    settle_stages,
    try_out,
    try_plan,
    try_schedule,
)
from penstock.planner.render import ABSTRACT, SECONDS, Caption, format_bytes, timeline
from penstock.planner.schedule import schedule_of
from penstock.planner.schemes import RecomputeMode
from penstock.planner.simulate import Simulation
from penstock.planner.torch_actions import parse_actions, schedule_of_actions
from penstock.planner.validate.check import program_grid, validate
from penstock.protocol.errors import ConfigError, ProtocolError, reason
from penstock.protocol.plan.instructions import RecomputeAfter
from penstock.protocol.plan.plan import Plan

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
class Wish:
    """The options of ``penstock plan`` and ``penstock simulate``; ``None`` where not given."""

    scheme: str | None = None
    num_devices: int | None = None
    num_microbatches: int | None = None
    stages_per_device: int | None = None
    forward_stages: int | None = None
    backward_stages: int | None = None
    recompute: RecomputeMode | None = None
    recompute_after: RecomputeAfter = RecomputeAfter.GRADIENT
    drop: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    costs: str | None = None
    optimizer: str = "advance"
    memory_limit_bytes: float | None = None
    search_s: float | None = None

    def require_nothing(self) -> None:
        """With a configuration, its keys say all this.

        Raises:
            ConfigError: an option was given; says which, and what to write instead.
        """
        for field, key in _KEY_OF_FIELD.items():
            if getattr(self, field) not in (None, ()):
                raise ConfigError(
                    f"--{field.replace('num_', '').replace('_', '-')}: with a configuration write"
                    f" --set {key}=…"
                )

    def request(self) -> ScheduleRequest:
        """What to schedule, with 4 devices and 2 micro-batches per device unless given.

        Raises:
            ConfigError: no scheme.
        """
        if self.scheme is None:
            raise ConfigError(
                "give a configuration (penstock plan examples/tiny.yaml) or a scheme (penstock plan"
                f" --scheme 1f1b); schemes: {', '.join(schemes.SCHEMES)}"
            )
        num_devices = self.num_devices or 4
        return ScheduleRequest(
            scheme=self.scheme,
            num_devices=num_devices,
            num_microbatches=self.num_microbatches or 2 * num_devices,
            stages_per_device=self.stages_per_device,
            forward_stages=self.forward_stages,
            backward_stages=self.backward_stages,
            recompute=self.recompute,
            recompute_after=self.recompute_after,
            drop=self.drop,
        )

    @property
    def costs_text(self) -> str:
        """Where costs come from."""
        return self.costs or "unit"


_KEY_OF_FIELD = MappingProxyType(
    {
        "scheme": "schedule.scheme",
        "num_devices": "cluster.workers",
        "num_microbatches": "train.micro_batch",
        "stages_per_device": "schedule.forward_stages",
        "forward_stages": "schedule.forward_stages",
        "backward_stages": "schedule.backward_stages",
        "recompute": "schedule.recompute",
        "drop": "schedule.recompute",
        "passes": "schedule.passes",
        "memory_limit_bytes": "memory.device_limit",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabReport:
    """A simulation, and how to speak about it."""

    simulation: Simulation
    passes: tuple[str, ...]
    costs: str
    abstract: bool
    memory_limit_bytes: float | None
    gap: Gap | None = None

    @property
    def caption(self) -> Caption:
        """For pictures."""
        return Caption(
            heading=heading(self.simulation.plan, self.passes),
            unit=ABSTRACT if self.abstract else SECONDS,
        )

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
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
        """For people."""
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


def make_lab_report(wish: Wish) -> LabReport:
    """Schedule, transform and simulate what was asked for.

    Raises:
        ConfigError: impossible combination; names the option, its value, and what would do.
    """
    with options_named():
        source = parse_costs(wish.costs_text)
        request = _with_operators(settle_stages(wish.request()), source)
        terms = _terms(price(source, request), wish)
        simulation = try_out(Recipe(request=request, passes=wish.passes), terms)
        return _report(simulation, wish, terms)


def make_simulation_report(path: Path, wish: Wish) -> LabReport:
    """Simulate a plan, or actions of ``torch.distributed.pipelining``, that are in a file.

    Of the wish only passes, costs, optimizer and memory count.

    Raises:
        ConfigError: the file makes no sense, or does not go with the costs.
    """
    with options_named():
        source = parse_costs(wish.costs_text)
        if path.suffix == ".csv":
            simulation, terms = _simulate_actions(path, source, wish)
        else:
            simulation, terms = _simulate_plan(read_plan(path), source, wish)
        return _report(simulation, wish, terms)


def _simulate_plan(plan: Plan, source: CostSource, wish: Wish) -> tuple[Simulation, Terms]:
    prices = source.price(
        forward_stages=len(plan.forward_stages) // plan.num_routes,
        backward_stages=len(plan.backward_stages) // plan.num_routes,
        num_devices=plan.num_devices,
    )
    terms = _terms(prices, wish)
    if not wish.passes:
        return try_plan(plan, terms), terms
    validate(plan)
    return try_schedule(schedule_of(plan), wish.passes, terms), terms


def _simulate_actions(path: Path, source: CostSource, wish: Wish) -> tuple[Simulation, Terms]:
    try:
        actions = parse_actions(path.read_text(encoding="utf-8"))
        num_stages = 1 + max(action.stage for rank in actions for action in rank)
        prices = source.price(
            forward_stages=num_stages, backward_stages=num_stages, num_devices=len(actions)
        )
        schedule = schedule_of_actions(actions, block_work=prices.block_work)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read it: {reason(error)}") from error
    except ProtocolError as error:
        raise ConfigError(f"{path}: {error}") from error
    terms = _terms(prices, wish)
    return try_schedule(schedule, wish.passes, terms), terms


def _report(simulation: Simulation, wish: Wish, terms: Terms) -> LabReport:
    return LabReport(
        simulation=simulation,
        passes=wish.passes,
        costs=wish.costs_text,
        abstract=wish.costs_text.split(":")[0] == "unit",
        memory_limit_bytes=wish.memory_limit_bytes,
        gap=None if wish.search_s is None else _search(simulation.plan, terms, wish.search_s),
    )


def _search(plan: Plan, terms: Terms, time_limit_s: float) -> Gap:
    """How far the plan's orders are from the best ones: compute and hops only."""
    context = terms.context
    return gap(
        schedule_of(plan),
        context.costs,
        memory_limit_bytes=context.memory_limit_bytes,
        hop_s=context.hop_s,
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
    """Names of operator sets replaced by their operators; ``--drop`` implies selective."""
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


def _terms(prices: Prices, wish: Wish) -> Terms:
    return Terms(
        prices=prices,
        optimizer=OPTIMIZERS[wish.optimizer],
        memory_limit_bytes=wish.memory_limit_bytes,
    )


@contextmanager
def options_named() -> Iterator[None]:
    """Errors about keys of a configuration speak of the command's options instead."""
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
    """``--list``: every scheme and pass with a line about it."""
    width = max(map(len, (*schemes.SCHEMES, *PASSES)))
    lines = ["schemes:"]
    lines += [f"  {name:<{width}}  {_summary(scheme)}" for name, scheme in schemes.SCHEMES.items()]
    lines.append("passes (applied in the order of --passes):")
    lines += [f"  {name:<{width}}  {one.summary}" for name, one in PASSES.items()]
    return "\n".join(lines)


def _summary(scheme: schemes.Scheme) -> str:
    """The first line of the text of the module that makes a scheme."""
    if scheme.name == "1f1b-2":
        return "1F1B with twice as many micro-batches as devices."
    for module in vars(schemes).values():
        if isinstance(module, ModuleType) and any(v is scheme for v in vars(module).values()):
            text = (inspect.getdoc(module) or "").split("\n\n")[0]
            return " ".join(text.split()).partition(": ")[2] or text
    return ""


def _bytes(value: float, abstract: bool) -> str:
    return f"{value:.4g}" if abstract else format_bytes(value)
