"""``schedule: auto``: the tuner's winner among what ``train`` can run, as a configuration.

Also what every search over a configuration needs: its prices, its space, and plans as ``train``
makes and refuses them. The grid itself is in :mod:`.space`, the search in :mod:`.tune`. What memory
this machine has is the caller's to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, get_args

from penstock.planner.build import build_plan, dropped_operators
from penstock.planner.cost.cluster import OptimizerModel
from penstock.planner.cost.prices import config_prices, optimizer_of
from penstock.planner.cost.sources import Prices
from penstock.planner.pipeline import Terms, try_plan
from penstock.planner.render.units import SECONDS, format_bytes
from penstock.planner.schemes import SCHEMES
from penstock.planner.settling import choose_settled_early, is_to_choose
from penstock.planner.tuning.search import Limits, Progress, Search, Settler, fragment
from penstock.planner.tuning.space import Candidate, Space, known_pass_sets
from penstock.protocol.config.execution import ScheduleConfig
from penstock.protocol.config.schema import Config
from penstock.protocol.config.values import AUTO
from penstock.protocol.errors import CapacityError, ConfigError
from penstock.protocol.plan.executable import check_executable, check_updates
from penstock.protocol.plan.plan import Plan
from penstock.shm.table import BlockTable

Fits = Callable[[Config, Plan], None]
"""Holds a plan of a configuration against the memory there is.

Raises:
    CapacityError: something is short.
"""

KEPT = 10
"""Outcomes that a search for one winner keeps: passes are tried on the best of them, it is chosen
which of their blocks are settled early, and candidates that cannot be faster than all of them are
not simulated.
"""

_SEARCHED = frozenset(
    "scheme forward_stages backward_stages stages_per_device replicas recompute drop passes"
    " file".split()
)
"""Keys of the schedule that the search decides; all others are as valid with its winner."""

_REFUSED = ("file", "stages_per_device")
"""Keys that make no sense while the scheme is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The winner. ``config``: with its schedule; ``default``: what the default scheme comes to."""

    config: Config
    step_s: float
    default: str
    num_candidates: int
    left_out: Mapping[str, int]

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.left_out.items()))
        return (
            f"schedule: auto chose {describe(self.config.schedule)}:"
            f" {SECONDS.format(self.step_s)} a step, simulated; {self.default}."
            f" {self.num_candidates} candidates{f' (left out: {reasons})' if reasons else ''}"
        )


def describe(schedule: ScheduleConfig) -> str:
    """A chosen schedule in a few words."""
    stages = dict.fromkeys((schedule.forward_stages, schedule.backward_stages))
    number = "/".join(map(str, stages))
    words = [f"{schedule.scheme}, {number} {'stage' if number == '1' else 'stages'}"]
    if schedule.replicas > 1:
        words.append(f"{schedule.replicas} replicas")
    words.append(f"recompute {' '.join((schedule.recompute or 'none', *schedule.drop))}")
    if schedule.passes:
        words.append(f"passes {', '.join(schedule.passes)}")
    return ", ".join(words)


def asked_of(schedule: ScheduleConfig) -> dict[str, Any]:
    """What a schedule with ``scheme: auto`` restricts the search to, key by key, as JSON has it."""
    given = schedule.model_dump(mode="json", exclude_unset=True, exclude={"scheme"})
    keys = {*_SEARCHED, "profile"}
    return {key: value for key, value in given.items() if key in keys and value is not None}


def settings_of(schedule: ScheduleConfig) -> dict[str, Any]:
    """The keys that no search decides."""
    return schedule.model_dump(exclude={*_SEARCHED, "asked"})


def choose(config: Config, table: BlockTable, fits: Fits, progress: Progress) -> Choice:
    """Search for the fastest schedule that ``train`` can run within all memory limits.

    ``config.schedule`` may fix ``forward_stages``, ``backward_stages``, ``replicas``,
    ``recompute`` (with ``drop``) and ``passes``: only candidates with these are looked at.
    ``train.micro_batch`` stays what it is. ``table``: at full size.

    Raises:
        ConfigError: a key that does not go with ``auto``, or nothing is possible with those given.
        CapacityError: nothing fits; says what was in the way.
    """
    _check_keys(config.schedule)
    asked, terms = asked_of(config.schedule), config_terms(config, table)
    plans = _Plans(config=config, table=table, prices=terms.prices, asked=asked, fits=fits)
    limits = _limits(config, terms.prices)
    search = Search(
        pricer=lambda size: terms.prices,
        limits=limits,
        planner=plans.of_candidate,
        optimizer=terms.optimizer,
        stops_early=terms.stops_early,
        settler=settler_of(config, terms.optimizer),
    )
    search.run(space_of(config, len(table.blocks)), progress)
    if search.best is None:
        raise _nothing(config, asked, search, plans.refused, limits)
    return Choice(
        config=plans.config_of(search.best.candidate),
        step_s=search.best.step_s,
        default=_default(plans, terms, search.settler),
        num_candidates=search.num_tried,
        left_out=dict(search.left_out),
    )


def space_of(config: Config, num_blocks: int) -> Space:
    """What ``schedule: auto`` looks at."""
    schedule, given = config.schedule, config.schedule.model_fields_set
    space: dict[str, Any] = {}
    if schedule.recompute is not None:
        space["recomputations"] = ((schedule.recompute, dropped_operators(schedule.drop)),)
    return Space(
        num_devices=config.num_workers,
        global_batch=config.train.global_batch,
        num_blocks=num_blocks,
        schemes=trainable_schemes(),
        micro_batches=(config.train.micro_batch,),
        forward_stages=schedule.forward_stages,
        backward_stages=schedule.backward_stages,
        replicas=schedule.replicas if "replicas" in given else None,
        passes=schedule.passes,
        pass_sets=() if "passes" in given else known_pass_sets(),
        **space,
    )


def trainable_schemes() -> tuple[str, ...]:
    """What ``schedule.scheme`` accepts beside ``auto``."""
    accepted = get_args(ScheduleConfig.model_fields["scheme"].annotation)
    return tuple(name for name in SCHEMES if name in accepted)


def trainable_plan(config: Config, table: BlockTable, prices: Prices | None = None) -> Plan:
    """The plan of a configuration, refused as ``train`` refuses it; arguments as
    :func:`~penstock.planner.build.build_plan`.

    Raises:
        ConfigError: no plan can be built, or workers cannot run it.
    """
    plan = build_plan(config, table, prices)
    check_executable(plan, devices_per_node=config.cluster.workers)
    check_updates(config, table, plan)
    return plan


def config_terms(config: Config, table: BlockTable, profile: Path | None = None) -> Terms:
    """What a configuration's plans are simulated with: ``profile``, or that of its schedule, or a
    guess at the device.

    Raises:
        ConfigError: the profile cannot be read, or is of another model.
    """
    return Terms(
        prices=config_prices(config, table, profile),
        optimizer=optimizer_of(config),
        stops_early=True,
    )


@dataclass(slots=True, kw_only=True)
class _Plans:
    """Plans of candidates as ``train`` makes them; ``refused``: a first example of each kind of
    refusal.
    """

    config: Config
    table: BlockTable
    prices: Prices
    asked: dict[str, Any]
    fits: Fits
    refused: dict[type[Exception], str] = field(default_factory=dict)

    def of_candidate(self, candidate: Candidate, terms: Terms) -> Plan:
        """The plan, refused in every way in which ``train`` would."""
        del terms
        try:
            return self.of_config(self.config_of(candidate))
        except (ConfigError, CapacityError) as error:
            name = f"{candidate.scheme} with {candidate.forward_stages} forward stages"
            self.refused.setdefault(type(error), f"{name}: {error}")
            raise

    def of_config(self, config: Config) -> Plan:
        plan = trainable_plan(config, self.table, self.prices)
        self.fits(config, plan)
        return plan

    def config_of(self, candidate: Candidate) -> Config:
        return self.with_schedule(fragment(candidate)["schedule"])

    def with_schedule(self, keys: dict[str, Any]) -> Config:
        """The configuration with these keys in the place of the search."""
        settings = settings_of(self.config.schedule)
        schedule = ScheduleConfig.model_validate({**settings, "asked": self.asked, **keys})
        return self.config.model_copy(update={"schedule": schedule})


def settler_of(config: Config, optimizer: OptimizerModel) -> Settler | None:
    """``optimizer.settle: auto``'s choice, if there is something to choose."""
    if not is_to_choose(config):
        return None
    return lambda plan, prices: choose_settled_early(plan, prices, optimizer)


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


def _limits(config: Config, prices: Prices) -> Limits:
    """Of devices; hosts are held against what they have when a candidate is planned."""
    limit = config.memory.device_limit
    there = prices.cluster.device_memory_bytes
    return Limits(device_bytes=there if limit is None else limit, keep=KEPT)


def _default(plans: _Plans, terms: Terms, settler: Settler | None) -> str:
    """What the scheme would come to that is taken where nobody says anything."""
    name = ScheduleConfig().scheme
    try:
        plan = plans.of_config(plans.with_schedule({}))
        if settler is not None:
            plan = settler(plan, terms.prices)
        step_s = try_plan(plan, terms).makespan_s
    except (ConfigError, CapacityError) as error:
        return f"{name}, the default, is not possible here ({str(error).splitlines()[0]})"
    return f"{name}, the default, {SECONDS.format(step_s)}"


def _nothing(
    config: Config,
    asked: Mapping[str, Any],
    search: Search,
    refused: Mapping[type[Exception], str],
    limits: Limits,
) -> ConfigError | CapacityError:
    """Why there is no winner: memory, if that was in the way of anything."""
    counts = ", ".join(f"{n} {reason}" for reason, n in sorted(search.left_out.items()))
    given = "".join(f", schedule.{key} = {value!r}" for key, value in asked.items())
    tried = (
        f"schedule.scheme = {AUTO}: none of {search.num_tried} candidates for {config.num_workers}"
        f" workers and {config.train.num_microbatches} micro-batches{given} can be trained"
        f"{f' ({counts})' if counts else ''}"
    )
    example: Sequence[str] = [
        text for kind, text in refused.items() if issubclass(kind, CapacityError)
    ]
    if example or any("memory" in reason for reason in search.left_out):
        there = (
            []
            if limits.device_bytes == inf
            else [f"devices have {format_bytes(limits.device_bytes)}"]
        )
        advice = (
            "use more workers, smaller micro-batches, a smaller model, or raise memory.device_limit"
            " or memory.host_limit"
        )
        return CapacityError("; ".join((tried, *there, *example[:1], advice)))
    first = next(iter(refused.values()), "no scheme accepts these numbers")
    return ConfigError(f"{tried}; for example {first}")
