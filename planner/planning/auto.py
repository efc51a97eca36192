"""Searches for the best plan of a configuration: ``schedule: auto``, and ``penstock tune``.

:mod:`.search_space` has the grid, :mod:`.plan_search` the search. The caller knows the memory of
the machine (:class:`Capacity`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol, get_args

from penstock.config.execution import ScheduleConfig
from penstock.config.schema import Config
from penstock.config.values import AUTO, CHOSEN_LATER, PAIR, human_bytes
from penstock.host.errors import CapacityError, ConfigError
from penstock.planner.cost.cluster import PREVIEW_SETTLE, OptimizerModel
from penstock.planner.cost.costs import Costs
from penstock.planner.cost.profile import Guess
from penstock.planner.planning.configured import dropped_operators, trainable_plan
from penstock.planner.planning.overlapped_updates import overlap_as_configured, with_overlap
from penstock.planner.planning.pipeline import (
    PlanContext,
    make_plan,
    operators_named,
    try_plan,
)
from penstock.planner.planning.plan_search import (
    Progress,
    Search,
    SearchOutcome,
    fragment,
    host_bytes,
)
from penstock.planner.planning.pricing import config_context
from penstock.planner.planning.search_space import Candidate, Space, known_pass_sets, powers_of_two
from penstock.planner.render.units import SECONDS
from penstock.planner.schemes import SCHEMES
from penstock.protocol.plan.instructions import Forward, Keep, Recompute
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.names import storage
from penstock.shm.table import BlockTable


class Capacity(Protocol):
    """The memory of a machine."""

    def check(self, config: Config, plan: Plan, costs: Costs) -> None:
        """Compares the memory that a plan of a configuration needs with the machine's.

        Raises:
            CapacityError: the plan needs more.
        """


KEPT = 10
"""Outcomes that ``schedule: auto`` keeps. Passes and overlapped state updates are tried on the best
of them. Candidates that cannot beat the last one are not simulated.
"""

WORK = 90_000
"""Instructions of plans after which ``schedule: auto`` ends: some seconds of a core."""

STREAMING_COST = 0.03
"""The share of a step that streaming must win on GPUs. Copies take bandwidth of the memory from
computation, and no rate describes that loss.
"""

_SEARCHED = frozenset(
    "scheme forward_stages backward_stages stages_per_device replicas recompute drop passes"
    " file".split()
)
"""Keys of the schedule that the search decides; all others are as valid with its winner."""

_REFUSED = ("file", "stages_per_device")
"""Keys that make no sense while the scheme is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestPlan:
    """The best plan that a search found.

    ``config``: the configuration with the chosen schedule. ``plan``: complete, with the blocks of
    ``optimizer.settle: auto``. ``default``: describes the speed without a search; ``reasons``: for
    the choice, a line each. ``constraints``: the keys that restricted the search; None where the
    schedule was given and the micro-batch chosen.
    """

    config: Config
    plan: Plan
    step_s: float
    default: str
    reasons: tuple[str, ...] = ()
    num_candidates: int
    left_out: Mapping[str, int]
    constraints: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.left_out.items()))
        micro_batch, schedule = self.config.train.micro_batch, self.config.schedule
        key = "train.micro_batch" if self.constraints is None else "schedule"
        chosen = (
            f"{key}: auto chose {describe(schedule)}, micro-batches of {micro_batch}:"
            f" {SECONDS.format(self.step_s)} a step, simulated; {self.default}."
            f" {self.num_candidates} candidates{f' (left out: {reasons})' if reasons else ''}"
        )
        return "\n  ".join((chosen, *self.reasons))


def device_bytes(config: Config, context: PlanContext) -> float:
    """Returns the bytes of one device's memory: its limit, or what a device of the cluster has."""
    limit = config.memory.device_limit
    return context.prices.cluster.device_memory_bytes if limit is None else limit


def streaming_cost(config: Config) -> float:
    """Returns :data:`STREAMING_COST` on GPUs; 0 on devices that compute in the host's memory."""
    platform = config.cluster.platform
    return STREAMING_COST if platform.own_memory and not platform.simulated_clock else 0.0


_NOTHING = "nothing is recomputed"


def _recomputed(plan: Plan) -> str:
    """Describes the activations that a plan recomputes."""
    work = [instruction for program in plan.programs for instruction in program]
    graphs = sum(isinstance(i, Forward) and i.keep is Keep.ALL for i in work)
    made = sum(isinstance(instruction, Recompute) for instruction in work)
    if not made:
        return _NOTHING
    share = f" but for {graphs / (graphs + made):.0%}, which memory has room for" if graphs else ""
    return f"activations are recomputed{share}"


def _reasons(search: Search, best: SearchOutcome) -> Iterator[str]:
    """Yields the reasons for the best outcome of a search, in lines."""
    keeps_weights, recomputed = best.keeps[0], _recomputed(best.plan)
    memory = f" of {human_bytes(search.device_bytes)}" if search.device_bytes < inf else ""
    yield (
        f"weights {'stay on devices' if keeps_weights else 'are streamed'},"
        f" {recomputed}; a device needs"
        f" {human_bytes(best.device_bytes)}{memory}"
    )
    if not keeps_weights or recomputed != _NOTHING:
        kept = search.fastest.get((True, True))
        takes = "does not fit" if kept is None else f"takes {SECONDS.format(kept.step_s)} a step"
        yield f"keeping weights and activations on devices {takes}"
    updated, blocks = len(best.plan.updates), best.plan.num_blocks
    if updated:
        yield f"devices update {updated} of {blocks} blocks, the host's cores the others"


def describe(schedule: ScheduleConfig) -> str:
    """Describes a chosen schedule in a few words."""
    stages = dict.fromkeys((schedule.forward_stages, schedule.backward_stages))
    number = "/".join(str(count) for count in stages if count is not None)
    words = [str(schedule.scheme)]
    if number:
        words.append(f"{number} {'stage' if number == '1' else 'stages'}")
    if schedule.replicas > 1:
        words.append(f"{schedule.replicas} replicas")
    words.append(f"recompute {' '.join((schedule.recompute or 'none', *schedule.drop))}")
    if schedule.passes:
        words.append(f"passes {', '.join(schedule.passes)}")
    return ", ".join(words)


def search_constraints(schedule: ScheduleConfig) -> dict[str, Any]:
    """Returns the keys of a schedule with ``scheme: auto`` that restrict the search."""
    given = schedule.model_dump(mode="json", exclude_unset=True, exclude={"scheme"})
    keys = {*_SEARCHED, "profile"}
    return {key: value for key, value in given.items() if key in keys and value is not None}


def settings_of(schedule: ScheduleConfig) -> dict[str, Any]:
    """Returns the keys that no search decides."""
    return schedule.model_dump(exclude={*_SEARCHED})


def searched_keys(schedule: ScheduleConfig) -> dict[str, Any]:
    """Returns the keys that a search decides, as JSON has them."""
    return schedule.model_dump(mode="json", include={*_SEARCHED})


def choose(
    config: Config,
    table: BlockTable,
    capacity: Capacity,
    progress: Progress = lambda done, of, best: None,
    guess: Guess | None = None,
) -> BestPlan:
    """Searches for the fastest plan that ``train`` can run within all memory limits.

    ``config.schedule`` may fix ``forward_stages``, ``backward_stages``, ``replicas``,
    ``recompute`` (with ``drop``) and ``passes``, and ``train.micro_batch`` a number: all candidates
    have these. If only the micro-batch is ``auto``, the schedule stays. ``table``: at full size.

    Raises:
        ConfigError: a key excludes ``auto``, or no candidate has the given keys.
        CapacityError: no plan fits; names the memory that is short.
    """
    if config.schedule.scheme != AUTO:
        return _choose_micro_batch(config, table, capacity, guess)
    _check_keys(config.schedule)
    constraints = search_constraints(config.schedule)
    some = config.with_micro_batch(config.train.micro_batch or 1)
    tuned = TunedConfig(config=some, table=table, capacity=capacity, guess=guess)
    # ``capacity`` checks the memory of hosts when a candidate is planned.
    space = space_of(config, len(table.blocks), trainable_schemes())
    search = tuned.searched(space, progress, keep=KEPT, work=WORK)
    if search.best is None:
        raise _nothing(tuned, constraints, search)
    return BestPlan(
        config=tuned.config_of(search.best.candidate),
        plan=search.best.plan,
        step_s=search.best.step_s,
        default=_default(tuned),
        reasons=tuple(_reasons(search, search.best)),
        num_candidates=search.num_tried,
        left_out=dict(search.left_out),
        constraints=constraints,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTerms:
    """The terms of a search among all schedules. ``schemes``: those that are tried. ``optimizer``
    replaces the configured one. ``any_plan``: also plans that ``train`` refuses. ``host_bytes``: of
    a node. ``keep``: most outcomes. ``drops``: sets of operators to try selective recomputation of.
    """

    schemes: tuple[str, ...]
    optimizer: OptimizerModel | None = None
    any_plan: bool = False
    host_bytes: float = inf
    keep: int = 20
    drops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedPlan:
    """The search among all schedules and micro-batches for a configuration, and its best outcome.
    ``tuned`` has the configuration.
    """

    tuned: TunedConfig
    search: Search
    best: SearchOutcome


def search_all(
    config: Config,
    table: BlockTable,
    terms: SearchTerms,
    capacity: Capacity,
    progress: Progress = lambda done, of, best: None,
    guess: Guess | None = None,
) -> SearchedPlan:
    """Searches among all schedules and micro-batches, not only the configured ones.

    Raises:
        ConfigError: impossible model or profile.
        CapacityError: no schedule fits; names the reasons.
    """
    tuned = TunedConfig(
        config=config.with_micro_batch(config.train.micro_batch or 1),
        table=table,
        capacity=capacity,
        guess=guess,
        optimizer=terms.optimizer,
        any_plan=terms.any_plan,
    )
    everything = tuned.with_schedule({"scheme": AUTO}).with_micro_batch(CHOSEN_LATER)
    space = space_of(everything, len(table.blocks), terms.schemes)
    if terms.drops:
        costs = tuned.context(tuned.config.train.micro_batch).prices.costs
        dropped = [operators_named((name,), costs) for name in terms.drops]
        modes = list(space.recomputations)
        modes += [("selective", operators) for operators in dropped]
        space = replace(space, recomputations=tuple(modes))
    search = tuned.searched(space, progress, keep=terms.keep, host_bytes=terms.host_bytes)
    return SearchedPlan(tuned=tuned, search=search, best=search.required_best())


def _choose_micro_batch(
    config: Config, table: BlockTable, capacity: Capacity, guess: Guess | None
) -> BestPlan:
    """Returns the configuration with the micro-batch of the shortest step; its schedule stays.

    Raises:
        ConfigError: no micro-batch has a plan.
        CapacityError: none of the plans fits.
    """
    steps_s, plans = dict[int, float](), dict[int, Plan]()
    refused: list[ConfigError | CapacityError] = []
    for size in _sizes(config):
        tuned = TunedConfig(
            config=config.with_micro_batch(size), table=table, capacity=capacity, guess=guess
        )
        try:
            plans[size], steps_s[size] = tuned.timed_plan(tuned.config)
        except (ConfigError, CapacityError) as error:
            refused.append(error)
    if not steps_s:
        raise refused[0]
    best = min(steps_s, key=steps_s.__getitem__)
    smallest = min(steps_s)
    return BestPlan(
        config=config.with_micro_batch(best),
        plan=plans[best],
        step_s=steps_s[best],
        default=f"micro-batches of {smallest} {SECONDS.format(steps_s[smallest])}",
        num_candidates=len(steps_s) + len(refused),
        left_out={"impossible": len(refused)} if refused else {},
    )


def _sizes(config: Config) -> tuple[int, ...]:
    """Returns the micro-batches to choose from."""
    batch = config.train.global_batch
    least = PAIR if config.trains_on_pairs else 1
    return tuple(size for size in powers_of_two(batch) if batch % size == 0 and size >= least)


def space_of(config: Config, num_blocks: int, schemes: tuple[str, ...]) -> Space:
    """Returns the candidates that a configuration with ``schedule: auto`` leaves open."""
    schedule, given = config.schedule, config.schedule.model_fields_set
    space: dict[str, Any] = {}
    sizes: tuple[int, ...] = ()
    if config.train.micro_batch != CHOSEN_LATER:
        sizes = (config.train.micro_batch,)
    elif config.trains_on_pairs:
        sizes = _sizes(config)
    if schedule.recompute not in (None, AUTO):
        space["recomputations"] = ((schedule.recompute, dropped_operators(schedule.drop)),)
    return Space(
        num_devices=config.num_workers,
        global_batch=config.train.global_batch,
        num_blocks=num_blocks,
        schemes=schemes,
        micro_batches=sizes,
        forward_stages=schedule.forward_stages,
        backward_stages=schedule.backward_stages,
        replicas=schedule.replicas if "replicas" in given else None,
        passes=schedule.passes,
        pass_sets=()
        if "passes" in given
        else known_pass_sets(own_memory=config.cluster.platform.own_memory),
        **space,
    )


def trainable_schemes() -> tuple[str, ...]:
    """Returns the names that ``schedule.scheme`` accepts, without ``auto``."""
    accepted = get_args(ScheduleConfig.model_fields["scheme"].annotation)
    return tuple(name for name in SCHEMES if name in accepted)


@dataclass(slots=True, kw_only=True)
class TunedConfig:
    """A configuration to search schedules for (:class:`~.plan_search.Tunable`).

    Candidates are planned and refused as ``train`` plans and refuses them; with ``any_plan`` all
    plans are accepted. ``guess``: rates where nothing was measured; ``optimizer`` replaces the
    configured one. ``capacity`` checks plans against a machine. ``refused``: a first example of
    each kind.
    """

    config: Config
    table: BlockTable
    guess: Guess | None = None
    optimizer: OptimizerModel | None = None
    any_plan: bool = False
    capacity: Capacity | None = None
    refused: dict[type[Exception], str] = field(default_factory=dict)

    def context(self, micro_batch: int) -> PlanContext:
        """Returns the configuration's context, with the costs of micro-batches of that size."""
        context = config_context(self.config.with_micro_batch(micro_batch), self.table, self.guess)
        return replace(context, optimizer=self.optimizer or context.optimizer)

    def searched(
        self,
        space: Space,
        progress: Progress,
        *,
        keep: int,
        host_bytes: float = inf,
        work: float = inf,
    ) -> Search:
        """Returns a search that has tried a space within the memory of devices; arguments as those
        of :class:`~.plan_search.Search`.
        """
        context = self.context(self.config.train.micro_batch)
        search = Search(
            tuned=self,
            device_bytes=device_bytes(self.config, context),
            host_bytes=host_bytes,
            keep=keep,
            streaming_cost=streaming_cost(self.config),
            work=work,
        )
        search.run(space, progress)
        return search

    def step_s(self, config: Config) -> float:
        """Returns the seconds of :meth:`timed_plan`."""
        return self.timed_plan(config)[1]

    def timed_plan(self, config: Config) -> tuple[Plan, float]:
        """Returns the plan of a configuration with another schedule, and the seconds of its step.

        Raises:
            ConfigError: the plan cannot be trained. CapacityError: it does not fit.
        """
        context = self.context(config.train.micro_batch)
        plan = self.with_overlap(self.plan_of(config, context), context)
        limited = replace(context, memory_limit_bytes=device_bytes(config, context))
        return plan, try_plan(plan, limited).makespan_s

    def plan(self, candidate: Candidate, context: PlanContext) -> Plan:
        """Returns the plan of a candidate; keeps the first refusal of each kind."""
        if self.any_plan:
            context = replace(context, block_work=None, updates_by=PREVIEW_SETTLE)
            return make_plan(candidate.request, context)
        try:
            return self.plan_of(self.config_of(candidate), context)
        except (ConfigError, CapacityError) as error:
            name = f"{candidate.request.scheme} with {candidate.stages[0]} forward stages"
            self.refused.setdefault(type(error), f"{name}: {error}")
            raise

    def plan_of(self, config: Config, context: PlanContext) -> Plan:
        """Returns the plan of a configuration that fits.

        Raises:
            ConfigError: it cannot be trained. CapacityError: it does not fit.
        """
        plan = trainable_plan(config, self.table, context)
        if self.capacity is not None:
            self.capacity.check(config, plan, context.prices.costs)
        return plan

    def with_overlap(self, plan: Plan, context: PlanContext) -> Plan:
        """Returns the plan with the blocks that ``optimizer.settle: auto`` chooses."""
        return with_overlap(self.config, plan, context) if self.optimizer is None else plan

    def host_bytes(self, plan: Plan, context: PlanContext) -> float:
        """Returns the bytes of the fullest host, as the configured optimizer stores its state."""
        stored = storage(self.config, overlap_as_configured(self.config, self.table, plan))
        moments_bytes = self.config.optimizer.name.traits.state_bytes
        return host_bytes(plan, context.prices, storage=stored, moments_bytes=moments_bytes)

    def config_of(self, candidate: Candidate) -> Config:
        """Returns the configuration with a candidate in the place of its own schedule."""
        parts = fragment(candidate)
        config = self.with_schedule(parts["schedule"])
        return config.model_copy(update={"train": config.train.model_copy(update=parts["train"])})

    def with_schedule(self, keys: dict[str, Any]) -> Config:
        """Returns the configuration with these keys in the place of those that a search decides."""
        settings = settings_of(self.config.schedule)
        schedule = ScheduleConfig.model_validate({**settings, **keys})
        return self.config.model_copy(update={"schedule": schedule})

    def fragment_of(self, candidate: Candidate) -> dict[str, Any]:
        """Returns the keys that turn the configuration into the candidate's. Keys that only the
        configuration sets get their defaults.
        """
        parts, default = fragment(candidate), ScheduleConfig().model_dump(mode="json")
        configured = self.config.schedule.model_dump(mode="json")
        unset = {
            key: default[key]
            for key in sorted(_SEARCHED)
            if configured[key] != default[key] and key not in parts["schedule"]
        }
        return {**parts, "schedule": {**parts["schedule"], **unset}}


def _check_keys(schedule: ScheduleConfig) -> None:
    for key in _REFUSED:
        value = getattr(schedule, key)
        if value is not None:
            raise ConfigError(
                f"schedule.{key} = {str(value)!r}: does not go with schedule.scheme = auto, which"
                " chooses the scheme; leave one of them out (auto goes with forward_stages,"
                " backward_stages, replicas, recompute, drop, passes, and profile)"
            )
    if schedule.drop and schedule.recompute != "selective":
        raise ConfigError(
            f"schedule.drop = {list(schedule.drop)}: needs schedule.recompute = selective"
        )


def _default(tuned: TunedConfig) -> str:
    """Describes the simulated speed of the default scheme."""
    name = ScheduleConfig().scheme
    try:
        step_s = tuned.step_s(tuned.with_schedule({}))
    except (ConfigError, CapacityError) as error:
        return f"{name}, the default, is not possible here ({str(error).splitlines()[0]})"
    return f"{name}, the default, {SECONDS.format(step_s)}"


def _nothing(
    tuned: TunedConfig, constraints: Mapping[str, Any], search: Search
) -> ConfigError | CapacityError:
    """Returns the error of a search without an outcome. If memory was short for a candidate, the
    error names memory.
    """
    config, refused = tuned.config, tuned.refused
    counts = ", ".join(f"{n} {reason}" for reason, n in sorted(search.left_out.items()))
    given = "".join(f", schedule.{key} = {value!r}" for key, value in constraints.items())
    tried = (
        f"schedule.scheme = {AUTO}: none of {search.num_tried} candidates for {config.num_workers}"
        f" workers and {config.train.num_microbatches} micro-batches{given} can be trained"
        f"{f' ({counts})' if counts else ''}"
    )
    short = [text for kind, text in refused.items() if issubclass(kind, CapacityError)]
    if short or any("memory" in reason for reason in search.left_out):
        limit = search.device_bytes
        devices = [] if limit == inf else [f"devices have {human_bytes(limit)}"]
        advice = (
            "use more workers, smaller micro-batches, a smaller model, or raise memory.device_limit"
            " or memory.host_limit"
        )
        return CapacityError("; ".join((tried, *devices, *short[:1], advice)))
    first = next(iter(refused.values()), "no scheme accepts these numbers")
    return ConfigError(f"{tried}; for example {first}")
