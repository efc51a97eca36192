"""``penstock tune``: searches schedules for a configuration, or for a named model and cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import dropwhile
from math import inf
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.table import Table

from penstock.client.planning.described import HERE, Description, MachineOptions
from penstock.client.planning.editing import edited
from penstock.client.planning.outputs import rates_of, write_file
from penstock.client.planning.plan_command import options_named
from penstock.client.views.console import Console
from penstock.client.views.progress import Working
from penstock.config.execution import ScheduleConfig
from penstock.config.reading import MAX_BYTES, read_mapping
from penstock.config.schema import Config, parse_config
from penstock.config.values import AUTO, CHOSEN_LATER, human_bytes
from penstock.config.words import apply_overrides
from penstock.daemons.node.preparing.fitting.capacity import missing, shortage
from penstock.daemons.node.preparing.fitting.planned_run import (
    HostMachine,
    PlannedRun,
    RunRequest,
    plan_anyway,
    plan_run,
)
from penstock.daemons.node.preparing.fitting.reliefs import reliefs
from penstock.daemons.node.preparing.places import FILES, PLACES, with_absolute_paths
from penstock.daemons.node.preparing.tables import table_of
from penstock.host.errors import CapacityError, ConfigError
from penstock.host.inputs import read_text
from penstock.planner.planning.auto import (
    SearchTerms,
    TunedConfig,
    describe,
    settings_of,
    trainable_schemes,
)
from penstock.planner.planning.pipeline import (
    OPTIMIZER_WAYS,
)
from penstock.planner.planning.plan_search import Progress as Advance
from penstock.planner.planning.plan_search import SearchOutcome, fragment
from penstock.planner.render.units import SECONDS
from penstock.planner.schemes import SCHEMES

_HEAD = "# penstock tune: "


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """The options of ``penstock tune`` besides those that describe a model."""

    machine: MachineOptions = HERE
    schemes: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    profile: Path | None = None
    optimizer: str = "advance"
    everything: bool = False
    keep: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneReport:
    """The best candidates, and what they are candidates for. ``notes``: the winner in words, with
    its simulated speed; for a configuration its own speed, too. ``config`` has the fastest.
    """

    what: str
    config: Config
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

    def show(self, width: int) -> None:
        """Prints a table of the best in ``width`` columns, then the winner's configuration."""
        console = Console(width=width)
        console.print(f"{self.what}: {self.num_candidates} candidates", highlight=False)
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.left_out.items()))
        if reasons:
            console.print(f"left out: {reasons}", highlight=False)
        console.print(_table(self.outcomes))
        console.print("the fastest, as part of a configuration:", highlight=False)
        console.print(self.fragment_yaml(), highlight=False, markup=False, soft_wrap=True)


def tune_model(described: Description, settings: TuneOptions, advance: Advance) -> TuneReport:
    """Returns the best schedules of a described model; arguments and errors as of
    :func:`tune_config`. The fragment has all keys besides model and data.
    """
    with described.config() as config:
        what = (
            f"{described.model} on {described.workers} x {described.machine},"
            f" {config.train.global_batch} sequences of {config.data.sequence_length} tokens a step"
        )
        table = table_of(config, config_only=True)
        report = _tuned(RunRequest(config=config, table=table), settings, advance, what)
        parts = described.keys(report.config)
        return replace(report, fragment=parts)


def tune_config(config: Config, settings: TuneOptions, advance: Advance) -> TuneReport:
    """Returns the best schedules of a configuration: by default those that ``train`` can run.
    ``advance`` follows the search.

    Raises:
        ConfigError: impossible model or profile.
        CapacityError: nothing fits; has the table of memory, and what needs less.
    """
    config = settings.machine.config(config.with_profile(settings.profile))
    searched = "every scheme" if settings.everything else "what train runs (--all: everything)"
    what = (
        f"{config.run.name} on {config.num_workers} workers, {config.train.global_batch} sequences"
        f" a step, {searched}"
    )
    return _tuned(RunRequest(config=config, table=table_of(config)), settings, advance, what)


def _tuned(request: RunRequest, settings: TuneOptions, advance: Advance, what: str) -> TuneReport:
    """Returns the best schedules of a request; ``what`` names it."""
    config, runs = request.config, not settings.everything
    machine = settings.machine.machine(config)
    request = replace(request, terms=_terms(config, settings))
    with options_named(), _naming(what):
        run = _searched(request, machine, advance)
    searched = run.searched
    assert searched is not None, "the request has terms"
    tuned, best, rates = searched.tuned, searched.best, _rates(config, settings)
    return TuneReport(
        what=what,
        config=run.config,
        num_candidates=searched.search.num_tried,
        outcomes=tuple(searched.search.outcomes),
        left_out=dict(searched.search.left_out),
        fragment=_parts(tuned, best, settings),
        trainable=runs,
        notes=(
            _in_words(best, config.data.sequence_length, rates, trainable=runs),
            *_as_it_is(tuned, config),
        ),
    )


def _terms(config: Config, settings: TuneOptions) -> SearchTerms:
    """Returns the terms of the search that the options ask for."""
    known = tuple(SCHEMES) if settings.everything else trainable_schemes()
    host = settings.machine.host_bytes
    limit = config.memory.host_limit if host is None else host
    configured = settings.optimizer == "advance"
    return SearchTerms(
        schemes=_schemes(settings.schemes or known),
        optimizer=None if configured else OPTIMIZER_WAYS[settings.optimizer],
        any_plan=settings.everything,
        host_bytes=inf if limit is None else limit,
        keep=settings.keep,
        drops=settings.drop,
    )


def _searched(request: RunRequest, machine: HostMachine, advance: Advance) -> PlannedRun:
    """Returns the run with the fastest schedule.

    Raises:
        CapacityError: nothing fits; has the table of the plan that comes closest.
    """
    try:
        return plan_run(request, machine, advance)
    except CapacityError as error:
        open_ = request.config.with_micro_batch(CHOSEN_LATER)
        schedule = ScheduleConfig.model_validate({**settings_of(open_.schedule), "scheme": AUTO})
        open_ = open_.model_copy(update={"schedule": schedule})
        closest = plan_anyway(replace(request, config=open_, terms=None), machine, advance)
        if closest.fits:
            raise
        lines = shortage(closest.demands, list(map(str, reliefs(closest))))
        raise CapacityError(f"{missing(closest.demands)}\n{lines}") from error


def _rates(config: Config, settings: TuneOptions) -> str:
    """Returns the name of the rates that plans are simulated with."""
    gpu = settings.machine.gpu
    if gpu is None or config.schedule.profile is not None:
        return rates_of(config)
    return f"rates of {gpu} in the catalogue"


def _parts(tuned: TunedConfig, best: SearchOutcome, settings: TuneOptions) -> dict[str, Any]:
    """Returns the keys of the winner, and those that stand for options of the command."""
    parts = tuned.fragment_of(best.candidate)
    if settings.profile is not None and not tuned.config.cluster.platform.simulated_clock:
        parts["schedule"]["profile"] = str(settings.profile)
    if settings.machine.device_bytes is not None:
        parts["memory"] = {"device_limit": settings.machine.device_bytes}
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


def _as_it_is(tuned: TunedConfig, config: Config) -> Iterator[str]:
    """Describes the simulated speed of a configuration with the schedule that it has, if it has
    one.
    """
    if config.with_defaults().chooses:
        return
    try:
        step_s = tuned.step_s(config)
    except (ConfigError, CapacityError) as error:
        yield f"the configuration as it is cannot be trained ({str(error).splitlines()[0]})"
        return
    yield f"the configuration as it is: {SECONDS.format(step_s)} a step, simulated"


def _schemes(names: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in names if name not in SCHEMES]
    if unknown:
        raise ConfigError(
            f"--schemes: unknown scheme {unknown[0]!r}; accepted: {', '.join(SCHEMES)}"
        )
    return names


@contextmanager
def searching() -> Iterator[Advance]:
    """Shows on stderr that a model is read, then how far a search is."""
    with Working("reading the model", sys.stderr, partial(typer.echo, err=True)) as progress:
        begun = False

        def advance(done: int, total: int, best: SearchOutcome | None) -> None:
            nonlocal begun
            leader = (
                "" if best is None else f", the best takes {SECONDS.format(best.step_s)} a step"
            )
            if not begun:
                progress.doing("searching schedules")
            begun = True
            progress.describe(f"searching schedules: {done} of {total}{leader}")

        yield advance


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Puts the subject of the search in front of a lack of memory."""
    try:
        yield
    except CapacityError as error:
        raise CapacityError(f"{what}: {error}") from error


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
            human_bytes(outcome.device_bytes),
            human_bytes(outcome.host_bytes),
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
