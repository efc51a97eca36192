"""The interface of a tracker, and the values it receives for each line of ``metrics.jsonl``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.config.evaluation import EVAL
from penstock.config.execution import ObservabilityConfig
from penstock.config.old_keys import DEFAULT_PROJECT
from penstock.config.schema import Config
from penstock.host.files import is_number

_TRAIN = {
    "data_epoch": "train/epoch",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/learning_rate",
    "loss_scale": "train/loss_scale",
    "pair_accuracy": "train/pair_accuracy",
    "margin": "train/margin",
    "tokens_per_second": "perf/tokens_per_second",
    "seconds": "perf/step_seconds",
    "bubble_ratio": "perf/bubble_ratio",
    "optimizer_tail_seconds": "perf/optimizer_tail_seconds",
    "peak_device_bytes": "perf/peak_device_bytes",
}
_EVALUATION = {
    "loss": "eval/loss",
    "perplexity": "eval/perplexity",
    "token_accuracy": "eval/token_accuracy",
    "pair_accuracy": "eval/pair_accuracy",
    "margin": "eval/margin",
    "seconds": "perf/evaluation_seconds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The run that is tracked. ``settings``: its configuration, flat: hyperparameters."""

    run_id: str
    name: str
    directory: Path
    config: Config
    settings: Mapping[str, str | int | float | bool]


def project_of(observability: ObservabilityConfig, variable: str) -> str:
    """Returns the project or experiment that a tracker logs to: that of the old key
    ``tracker_project``, else of an environment variable, else ``penstock``.
    """
    return observability.tracker_project or os.environ.get(variable) or DEFAULT_PROJECT


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A line of ``metrics.jsonl``: its step, and finite values by the names that people expect.

    ``at_s``: when it was decided, in seconds since 1970; of lines of older versions, which do not
    say that, when they were read.
    """

    step: int
    values: Mapping[str, float]
    line: Mapping[str, Any]
    at_s: float

    @classmethod
    def of(cls, line: object, read_s: float) -> Reading | None:
        """Returns what a line says that was there at ``read_s``; None where it is no line of
        metrics.
        """
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            return None
        names = _EVALUATION if line.get("phase") == "eval" else _TRAIN
        set_name = line.get("set")
        if names is _EVALUATION and isinstance(set_name, str) and set_name != EVAL:
            names = {key: name.replace("/", f"/{set_name}/", 1) for key, name in names.items()}
        values = {name: float(line[key]) for key, name in names.items() if is_number(line.get(key))}
        if names is _TRAIN:
            values["train/amended"] = float(line.get("decision") == "amend")
            values["train/skipped"] = float(line.get("decision") == "skip")
        at_s = float(line["time"]) if is_number(line.get("time")) else read_s
        return cls(step=line["step"], values=values, line=line, at_s=at_s)


class Sink(Protocol):
    """Receiver of readings. It may be slow, wait for a network, or raise any exception."""

    def log(self, readings: Sequence[Reading]) -> None:
        """Takes readings in the order of the file; when this returns they survive a kill, as far as
        the tracker can promise it.
        """

    def close(self) -> None:
        """Sends what is left, and ends."""


OpenSink = Callable[[Subject], Sink]
"""Opens a run in a tracker, or goes on with the one that was opened before."""


def settings_of(config: Config) -> dict[str, str | int | float | bool]:
    """Returns the keys of a configuration that are set, with dots in their names; lists as text."""
    settings: dict[str, str | int | float | bool] = {}
    pending: list[tuple[str, Any]] = [("", config.model_dump(mode="json"))]
    while pending:
        key, value = pending.pop(0)
        if isinstance(value, dict):
            prefix = f"{key}." if key else ""
            pending += [(f"{prefix}{name}", inner) for name, inner in value.items()]
        elif value is not None:
            settings[key] = value if isinstance(value, (str, int, float)) else str(value)
    return settings
