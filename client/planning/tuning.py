"""``penstock tune``: searches schedules for a configuration, or for a named model and cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import dropwhile
from math import inf
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.client.planning.editing import edited
from penstock.client.planning.outputs import rates_of, write_file
from penstock.client.planning.plan_command import options_named
from penstock.client.views.console import Console
from penstock.config.execution import ScheduleConfig
from penstock.config.reading import MAX_BYTES, read_mapping
from penstock.config.schema import Config, parse_config
from penstock.config.words import apply_overrides
from penstock.daemons.node.preparing.places import FILES, PLACES, with_absolute_paths
from penstock.daemons.node.preparing.planned_run import (
    HostMachine,
    RunRequest,
    plan_run,
)
from penstock.daemons.node.preparing.prepare import table_of
from penstock.host.errors import CapacityError, ConfigError
from penstock.host.inputs import read_text
from penstock.planner.cost.cluster import OptimizerModel
from penstock.planner.cost.sources import AnalyticSource
from penstock.planner.planning.auto import (
    SearchTerms,
    TunedConfig,
    describe,
    trainable_schemes,
)
from penstock.planner.planning.pipeline import (
    OPTIMIZER_WAYS,
    PlanContext,
    make_plan,
    operators_named,
)
from penstock.planner.planning.plan_search import Search, SearchOutcome, fragment, host_bytes
from penstock.planner.planning.search_space import Candidate, Space, known_pass_sets
from penstock.planner.render.units import SECONDS, format_bytes
from penstock.planner.schemes import SCHEMES, RecomputeMode
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.executable import check_executable

_HEAD = "# penstock tune: "


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """The options of ``penstock tune``; ``None`` where not given."""

    model: str | None = None
    gpu: str | None = None
    num_devices: int | None = None
    devices_per_node: int = 8
    global_batch: int | None = None
    sequence_length: int = 2048
    schemes: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    device_bytes: float | None = None
    host_bytes: float | None = None
    profile: Path | None = None
    optimizer: str = "advance"
    everything: bool = False
    keep: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneReport:
    """The best candidates, and what they are candidates for. ``notes``: the winner in words, with
    its simulated speed; for a configuration its own speed, too.
    """

    what: str
    num_candidates: int
    outcomes: tuple[SearchOutcome, ...]
    left_out: dict[str, int]
    fragment: dict[str, Any]
    trainable: bool
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
        return {
            "what": self.what,
            "candidates": self.num_candidates,
            "left_out": self.left_out,
            "outcomes": [_outcome_dict(outcome) for outcome in self.outcomes],
            "fragment": self.fragment,
            "trainable": self.trainable,
            "notes": list(self.notes),
        }

    @property
    def heading(self) -> str:
        """Comments for the head of a file: how it was made, and the notes."""
        return "".join(f"{_HEAD}{line}\n" for line in (self.what, *self.notes))

    def fragment_yaml(self) -> str:
        """Returns the winner as part of a configuration, headed by comments."""
        return self.heading + yaml.safe_dump(self.fragment, sort_keys=False)

    def show(self, console: Console) -> None:
        """Prints a table of the best, then the winner's configuration."""
        console.print(f"{self.what}: {self.num_candidates} candidates", highlight=False)
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.left_out.items()))
        if reasons:
            console.print(f"left out: {reasons}", highlight=False)
        console.print(_table(self.outcomes))
        console.print("the fastest, as part of a configuration:", highlight=False)
        console.print(self.fragment_yaml(), highlight=False, markup=False, soft_wrap=True)


def search(config: Config | None, settings: TuneOptions, console: Console) -> TuneReport:
    """Searches for a configuration, or for the model and cluster of the options; shows progress on
    ``console``.

    Raises:
        ConfigError: impossible configuration or options.
        CapacityError: nothing fits; names the memory that is short.
    """
    if config is None:
        return tune_names(settings, console)
    return tune_config(config, settings, console)


def tune_config(config: Config, settings: TuneOptions, console: Console) -> TuneReport:
    """Returns the best schedules of a configuration: by default those that ``train`` can run.

    Raises:
        ConfigError: impossible model or profile.
        CapacityError: nothing fits; says what was in the way.
    """
    runs = not settings.everything
    config = config.with_profile(settings.profile)
    if settings.device_bytes is not None:
        limit = {"device_limit": int(settings.device_bytes)}
        config = config.model_copy(update={"memory": config.memory.model_copy(update=limit)})
    configured = settings.optimizer == "advance"
    terms = SearchTerms(
        schemes=_schemes(settings.schemes or (trainable_schemes() if runs else tuple(SCHEMES))),
        optimizer=None if configured else OPTIMIZER_WAYS[settings.optimizer],
        any_plan=settings.everything,
        host_bytes=_limit(settings.host_bytes, config.memory.host_limit),
        keep=settings.keep,
    )
    what = (
        f"{config.run.name} on {config.num_workers} workers, {config.train.global_batch} sequences"
        f" a step, {'what train runs (--all: everything)' if runs else 'every scheme'}"
    )
    request = RunRequest(config=config, table=table_of(config), terms=terms)
    with _progress(console) as advance, options_named(), _naming(what):
        searched = plan_run(request, HostMachine.here(config), advance).searched
    assert searched is not None, "the request has terms"
    tuned, best = searched.tuned, searched.best
    return _report(
        searched.search,
        what,
        _parts(tuned, best, settings),
        notes=(
            _in_words(best, config.data.sequence_length, rates_of(config), trainable=runs),
            _as_it_is(tuned, config),
        ),
        trainable=runs,
    )


def _parts(tuned: TunedConfig, best: SearchOutcome, settings: TuneOptions) -> dict[str, Any]:
    """Returns the keys of the winner, and those that stand for options of the command."""
    parts = tuned.fragment_of(best.candidate)
    if settings.profile is not None and not tuned.config.cluster.platform.simulated_clock:
        parts["schedule"]["profile"] = str(settings.profile)
    if settings.device_bytes is not None:
        parts["memory"] = {"device_limit": int(settings.device_bytes)}
    return parts


def _in_words(best: SearchOutcome, sequence_length: int, rates: str, *, trainable: bool) -> str:
    """Describes a winner and its simulated speed."""
    candidate = best.candidate
    schedule = ScheduleConfig.model_construct(**fragment(candidate)["schedule"])
    count = candidate.request.num_microbatches * candidate.request.replicas
    speed = count * candidate.micro_batch * sequence_length / best.step_s
    return (
        f"{describe(schedule)}, micro-batches of {candidate.micro_batch}:"
        f" {SECONDS.format(best.step_s)} a step, {speed:,.0f} tokens/s, simulated ({rates})"
        f"{'' if trainable else '; penstock train cannot run all of this yet'}"
    )


def _as_it_is(tuned: TunedConfig, config: Config) -> str:
    """Describes the simulated speed of a configuration with the schedule that it has."""
    if config.with_defaults().chooses:
        return "the configuration as it is has auto choose"
    try:
        step_s = tuned.step_s(config)
    except (ConfigError, CapacityError) as error:
        return f"the configuration as it is cannot be trained ({str(error).splitlines()[0]})"
    return f"the configuration as it is: {SECONDS.format(step_s)} a step, simulated"


def _is_accepted(schedule: dict[str, Any]) -> bool:
    try:
        ScheduleConfig.model_validate(schedule)
    except ValidationError:
        return False
    return True


def tune_names(settings: TuneOptions, console: Console) -> TuneReport:
    """Returns the best schedules of a named model on named GPUs.

    Raises:
        ConfigError: an option is missing or impossible.
        CapacityError: nothing fits; says what was in the way.
    """
    source, num_devices, global_batch = _named(settings)
    prices = source.price(forward_stages=1, backward_stages=1, num_devices=num_devices)
    recomputations: list[tuple[RecomputeMode, tuple[str, ...]]] = [("none", ()), ("full", ())]
    recomputations += [
        ("selective", operators_named((name,), prices.costs)) for name in settings.drop
    ]
    space = Space(
        num_devices=num_devices,
        global_batch=global_batch,
        num_blocks=len(prices.costs.blocks),
        schemes=_schemes(settings.schemes or tuple(SCHEMES)),
        recomputations=tuple(recomputations),
        pass_sets=known_pass_sets(),
    )
    cluster = prices.cluster
    device_bytes = _limit(settings.device_bytes, cluster.device_memory_bytes)
    tried = Search(
        tuned=_Named(
            source=source,
            num_devices=num_devices,
            optimizer=OPTIMIZER_WAYS[settings.optimizer],
            device_bytes=None if device_bytes == inf else device_bytes,
        ),
        device_bytes=device_bytes,
        host_bytes=_limit(settings.host_bytes, cluster.host_memory_bytes),
        keep=settings.keep,
    )
    what = (
        f"{settings.model} on {num_devices} x {settings.gpu}, {global_batch} sequences of"
        f" {settings.sequence_length} tokens a step"
    )
    with _progress(console) as advance, options_named(), _naming(what):
        tried.run(space, advance)
        best = tried.required_best()
    trainable = _is_trainable(best, cluster.devices_per_node)
    words = _in_words(best, settings.sequence_length, "data sheets", trainable=trainable)
    parts = _with_cluster(fragment(best.candidate), settings, space)
    return _report(tried, what, parts, notes=(words,), trainable=trainable)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """A named model and named GPUs to be tuned
    (:class:`~penstock.planner.planning.plan_search.Tunable`).

    The optimizer is Adam, without a choice of blocks that are settled early.
    """

    source: AnalyticSource
    num_devices: int
    optimizer: OptimizerModel
    device_bytes: float | None

    def context(self, micro_batch: int) -> PlanContext:
        """Returns a context with the costs of micro-batches of so many sequences."""
        sized = replace(self.source, micro_batch=micro_batch)
        return PlanContext(
            prices=sized.price(forward_stages=1, backward_stages=1, num_devices=self.num_devices),
            optimizer=self.optimizer,
            memory_limit_bytes=self.device_bytes,
        )

    def plan(self, candidate: Candidate, context: PlanContext) -> Plan:
        """Returns the plan of a candidate, whether workers can run it or not."""
        return make_plan(candidate.request, context)

    def with_overlap(self, plan: Plan, context: PlanContext) -> Plan:
        """Returns the plan as it is."""
        del context
        return plan

    def host_bytes(self, plan: Plan, context: PlanContext) -> float:
        """Returns the bytes of the fullest host, where Adam with a whole master weight works."""
        return host_bytes(plan, context.prices)


def _named(settings: TuneOptions) -> tuple[AnalyticSource, int, int]:
    """Returns the model and cluster that the options name."""
    for option, value in (
        ("--model", settings.model),
        ("--gpu", settings.gpu),
        ("--devices", settings.num_devices),
        ("--global-batch", settings.global_batch),
    ):
        if value is None:
            raise ConfigError(
                f"{option}: is missing; give a configuration (penstock tune examples/tiny.yaml), or"
                " --model, --gpu, --devices and --global-batch"
            )
    assert settings.model and settings.gpu and settings.num_devices and settings.global_batch
    source = AnalyticSource(
        gpu=settings.gpu,
        model=settings.model,
        sequence_length=settings.sequence_length,
        devices_per_node=settings.devices_per_node,
    )
    return source, settings.num_devices, settings.global_batch


def _schemes(names: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in names if name not in SCHEMES]
    if unknown:
        raise ConfigError(
            f"--schemes: unknown scheme {unknown[0]!r}; accepted: {', '.join(SCHEMES)}"
        )
    return names


def _limit(given: float | None, otherwise: float | None) -> float:
    return given if given is not None else otherwise if otherwise is not None else inf


def _is_trainable(best: SearchOutcome, devices_per_node: int) -> bool:
    """Returns whether ``train`` can run the winner."""
    try:
        check_executable(best.plan, devices_per_node=devices_per_node)
    except ConfigError:
        return False
    return _is_accepted(fragment(best.candidate)["schedule"])


def _with_cluster(parts: dict[str, Any], settings: TuneOptions, space: Space) -> dict[str, Any]:
    """Returns the fragment with batch and machines, which no configuration says."""
    per_node = min(settings.devices_per_node, space.num_devices)
    cluster: dict[str, Any] = {"device": "cuda", "workers": per_node}
    if space.num_devices > per_node:
        count = -(-space.num_devices // per_node)
        cluster["nodes"] = [{"name": f"node{index}"} for index in range(count)]
    train = {"global_batch": space.global_batch, **parts["train"]}
    return {**parts, "train": train, "cluster": cluster}


@contextmanager
def _progress(console: Console) -> Iterator[Any]:
    """Shows a bar on a terminal, nothing elsewhere."""
    columns = (
        TextColumn("{task.completed}/{task.total}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=None)

        def advance(done: int, total: int, best: SearchOutcome | None) -> None:
            described = "" if best is None else f"best {SECONDS.format(best.step_s)}"
            progress.update(task, completed=done, total=total, description=described)

        yield advance


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Puts the subject of the search in front of a lack of memory."""
    try:
        yield
    except CapacityError as error:
        raise CapacityError(f"{what}: {error}") from error


def _report(
    tried: Search, what: str, parts: dict[str, Any], *, notes: tuple[str, ...], trainable: bool
) -> TuneReport:
    return TuneReport(
        what=what,
        num_candidates=tried.num_tried,
        outcomes=tuple(tried.outcomes),
        left_out=dict(tried.left_out),
        fragment=parts,
        trainable=trainable,
        notes=notes,
    )


def write_tuned(
    report: TuneReport, path: Path | None, source: Path | None, settings: tuple[str, ...]
) -> None:
    """Writes the result of a search: a whole configuration if ``source`` was tuned, with
    ``settings``. For a named model, or if ``train`` cannot run the result, only the chosen keys are
    written.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        return
    text = report.fragment_yaml()
    if source is not None and report.trainable:
        made_from = " --set ".join((source.name, *settings))
        whole = tuned_text(source, settings, report.fragment, path.parent)
        lines = dropwhile(lambda line: line.startswith(_HEAD), whole.splitlines(keepends=True))
        text = f"{_HEAD}made from {made_from}\n{report.heading}{''.join(lines)}"
    write_file(path, text.encode())


def to_json(report: TuneReport) -> str:
    """Returns the report as JSON."""
    return json.dumps(report.to_dict(), indent=1)


def _outcome_dict(outcome: SearchOutcome) -> dict[str, Any]:
    request = outcome.candidate.request
    return {
        "scheme": request.scheme,
        "pipeline_devices": request.num_devices,
        "replicas": request.replicas,
        "micro_batch": outcome.candidate.micro_batch,
        "micro_batches": request.num_microbatches,
        "forward_stages": request.forward_stages,
        "backward_stages": request.backward_stages,
        "recompute": request.recompute,
        "drop": list(request.drop),
        "passes": list(request.passes),
        "step_seconds": outcome.step_s,
        "bubble_ratio": outcome.bubble_ratio,
        "optimizer_tail_seconds": outcome.optimizer_tail_s,
        "device_bytes": outcome.device_bytes,
        "host_bytes": outcome.host_bytes,
    }


def _table(outcomes: tuple[SearchOutcome, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", justify="right")
    for name in ("scheme", "PPxDP", "stages", "batches", "recompute", "passes"):
        table.add_column(name, no_wrap=name not in ("passes", "recompute"))
    for name in ("step", "bubbles", "tail", "device", "host"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, outcome in enumerate(outcomes, start=1):
        candidate, request = outcome.candidate, outcome.candidate.request
        table.add_row(
            str(number),
            request.scheme,
            f"{request.num_devices}x{request.replicas}",
            "/".join(map(str, dict.fromkeys(candidate.stages))),
            f"{request.num_microbatches} of {candidate.micro_batch}",
            ", ".join((request.recompute or "", *request.drop)),
            ", ".join(request.passes),
            SECONDS.format(outcome.step_s, digits=3),
            f"{outcome.bubble_ratio:.1%}",
            SECONDS.format(outcome.optimizer_tail_s, digits=3),
            format_bytes(outcome.device_bytes),
            format_bytes(outcome.host_bytes),
        )
    return table


_PATHS = (*PLACES, *FILES, "cluster.device")
"""Keys with a path as their value, or inside of it."""


def tuned_text(
    source: Path, settings: tuple[str, ...], parts: Mapping[str, Mapping[str, Any]], folder: Path
) -> str:
    """Returns the text of the configuration file ``source`` with ``settings`` (``--set``) and the
    keys of ``parts``, to be written into ``folder``. Keys of the schedule with default values are
    left out. In another folder than that of ``source`` paths are absolute.

    Raises:
        ConfigError: the result is no configuration.
    """
    values_by_section = apply_overrides(read_mapping(source).value, settings)
    for name, keys in parts.items():
        values_by_section[name] = _merged(values_by_section.get(name), keys)
    home = source.absolute().parent
    config = parse_config(values_by_section, source=str(source), folder=home)
    if folder.resolve() != home.resolve():
        absolute = with_absolute_paths(config).model_dump(mode="json")
        for section, _, key in (path.partition(".") for path in _PATHS):
            given, places = values_by_section.get(section) or {}, absolute[section] or {}
            if places.get(key) is not None and key in given:
                given[key] = places[key]
        if config.has_own_modules:
            values_by_section["model"]["import_path"] = absolute["model"]["import_path"]
    return edited(read_text(source, MAX_BYTES), values_by_section)


def _merged(section: Any, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a section with other values of some keys; ``scheme`` alone may stand for it."""
    values = {"scheme": section} if isinstance(section, str) else dict(section or {})
    defaults = ScheduleConfig().model_dump(mode="json")
    for key, value in keys.items():
        values[key] = value
        if key in defaults and key != "scheme" and value == defaults[key]:
            del values[key]
    return values
