"""Facts about a run for a page, each read once.

A missing fact is no error, for example a trace or a measurement of memory that was not made. The
page then shows the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from penstock.client.views.report.incidents import History, read_history
from penstock.client.views.report.readings import Readings, read_metrics
from penstock.client.views.run_view import early_end_of
from penstock.client.views.trace.comparison import TraceOutputs, make_trace_report
from penstock.client.views.trace.trace_report import TraceReport
from penstock.config.schema import Config
from penstock.config.words import section_in
from penstock.daemons.node.endpoint import read_endpoint
from penstock.daemons.node.preparing.software import Software
from penstock.host.errors import ConfigError, PenstockError
from penstock.host.files import is_number, parse_json
from penstock.host.process_identity import start_ticks
from penstock.planner.memory.table import MemoryRow, memory_table
from penstock.planner.planning.pricing import config_prices
from penstock.protocol.run.data_size import epochs
from penstock.protocol.run.run_result import RunEnd
from penstock.protocol.run.rundir import RunDirectory

MAX_TRACE_BYTES = 24 << 20
"""Largest trace to read for a page; ``penstock trace`` reads larger ones."""


class State(StrEnum):
    """States of a run, from its directory."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class RunFacts:
    """A run with its metrics and logs. Properties read further files on first use."""

    run: RunDirectory
    readings: Readings
    history: History

    @classmethod
    def of(cls, directory: Path) -> RunFacts:
        """Reads a run directory.

        Raises:
            ConfigError: the path is no run directory.
            StateError: files of the run are damaged.
        """
        if not (directory / "run.json").exists():
            raise ConfigError(f"{directory}: no run directory (it has no run.json)")
        run = RunDirectory(directory)
        if not run.run_id or not run.config:
            raise ConfigError(f"{directory}: no run directory")
        return cls(run=run, readings=read_metrics(directory), history=read_history(directory))

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.run.config

    @property
    def name(self) -> str:
        """The run's name."""
        return self.config.run.name

    @cached_property
    def state(self) -> State:
        """The state of the run. A run that trains on another machine counts as interrupted."""
        end, endpoint = RunEnd.read(self.run.path), read_endpoint(self.run.path)
        if endpoint is not None and start_ticks(endpoint.pid) is not None:
            return State.RUNNING
        if end is not None and end.failed:
            return State.FAILED
        step = self.readings.step
        if step >= self.config.train.steps or self.early_end:
            return State.FINISHED
        return State.INTERRUPTED if self.history.end is None else State.STOPPED

    @cached_property
    def early_end(self) -> str:
        """The reason of an early end by ``train.stop_early``, or an empty text."""
        return early_end_of(self.config, self.readings.evaluations, self.readings.step)

    @cached_property
    def ending(self) -> str:
        """The reason of the end, or an empty text."""
        end = RunEnd.read(self.run.path)
        return end.reason if end is not None else self.early_end or self.history.end or ""

    @cached_property
    def traced(self) -> TraceReport | str:
        """The comparison of its trace with a simulation, or the reason why it is missing."""
        size = sum(path.stat().st_size for path in (self.run.path / "trace").glob("*.jsonl"))
        if size > MAX_TRACE_BYTES:
            return (
                f"The trace has {size >> 20} MiB, too much for this page: penstock trace"
                f" {self.run.path} --svg picture.svg reads and draws it."
            )
        try:
            return make_trace_report(self.run.path, None, None, TraceOutputs())
        except PenstockError as error:
            return f"Unknown: {error}"

    @cached_property
    def planned_memory(self) -> tuple[MemoryRow, ...] | str:
        """The memory that the plan needs, by place and use, or the reason why it is unknown."""
        try:
            costs = config_prices(self.config, self.run.table).costs
            return memory_table(self.config, self.run.table, self.run.plan, costs)
        except PenstockError as error:
            return f"Unknown: {error}"

    @cached_property
    def parameters(self) -> tuple[int, int]:
        """The numbers of trained and of frozen parameters. Emulated runs store a share of them."""
        table = self.run.table
        return table.trained_parameters, table.num_parameters - table.trained_parameters

    @cached_property
    def flops_per_token(self) -> float:
        """Floating-point operations of forward and backward for a token, without recomputation."""
        return 3.0 * sum(block.forward_flops for block in self.run.table.blocks)

    @cached_property
    def software(self) -> Software | None:
        """The versions that prepared the run, or None for a run of an older Penstock."""
        return Software.read(self.run.path)

    @cached_property
    def model(self) -> Mapping[str, Any]:
        """The model's Hugging Face configuration, or an empty mapping."""
        return self._json("model/config.json")

    @cached_property
    def data(self) -> Mapping[str, Any]:
        """The content of ``data/meta.json``, or an empty mapping."""
        return self._json("data/meta.json")

    @cached_property
    def epochs(self) -> str:
        """Passes over the training data, made and planned, as ``0.37 of 8.50``.

        Empty if unknown, or without data.
        """
        train, done = self.data.get("train"), self.readings.last("data_epoch")
        tokens = train.get("num_tokens") if isinstance(train, dict) else None
        if done is None or not is_number(tokens):
            return ""
        samples = (tokens - 1) // self.config.data.sequence_length
        left = max(0, self.config.train.steps - self.readings.step) * self.config.train.global_batch
        return f"{epochs(done)} of {epochs(done + left / samples)}" if samples > 0 else epochs(done)

    @cached_property
    def created(self) -> str:
        """The creation time of the directory, in ISO 8601."""
        return str(self._json("run.json").get("created", ""))

    def _json(self, name: str) -> Mapping[str, Any]:
        try:
            content = parse_json((self.run.path / name).read_bytes())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}


def flat_config(config: Config) -> dict[str, Any]:
    """Returns all keys with their values, in the order of the configuration."""
    return dict(_values(config, ""))


def changed_keys(config: Config) -> list[str]:
    """Returns the keys that differ from their defaults or have no default."""
    defaults = dict(_defaults(Config, ""))
    nothing = object()
    return [k for k, value in flat_config(config).items() if defaults.get(k, nothing) != value]


def _values(section: BaseModel, prefix: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            pairs += _values(value, f"{prefix}{name}.")
        else:
            pairs += _leaves(f"{prefix}{name}", section.model_dump(mode="json")[name])
    return pairs


def _leaves(key: str, value: Any) -> list[tuple[str, Any]]:
    """Returns the keys below a key with a mapping, such as ``model.hf``; otherwise the key."""
    if not isinstance(value, dict) or not value:
        return [(key, value)]
    return [leaf for name, inner in value.items() for leaf in _leaves(f"{key}.{name}", inner)]


def _defaults(section: type[BaseModel], prefix: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, field in section.model_fields.items():
        kind = section_in(field.annotation)
        if kind is not None and field.default is not None:
            pairs += _defaults(kind, f"{prefix}{name}.")
        elif not field.is_required():
            value = field.get_default(call_default_factory=True)
            pairs.append((f"{prefix}{name}", _plain(value)))
    return pairs


def _plain(value: Any) -> Any:
    """Returns a default as a value of JSON."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
