"""The trackers that there are: which package each needs, and what opens it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import cast

from penstock.config.schema import Config
from penstock.daemons.monitor.trackers.sink import OpenSink
from penstock.host.errors import ConfigError

OPENTELEMETRY = "opentelemetry"
_HERE = "penstock.daemons.monitor.trackers"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerKind:
    """``packages``: modules that must be there. ``extra``: what of ours brings them."""

    packages: tuple[str, ...]
    extra: str
    module: str
    sink: str

    def opener(self) -> OpenSink:
        """Returns what opens it; this imports the package."""
        return cast(OpenSink, getattr(importlib.import_module(self.module), self.sink))

    @property
    def missing(self) -> str:
        """The first package that is not there; empty where all are."""
        return next((name for name in self.packages if not _is_there(name)), "")


TRACKERS: Mapping[str, TrackerKind] = MappingProxyType(
    {
        "tensorboard": TrackerKind(
            packages=("tensorboard",),
            extra="tensorboard",
            module=f"{_HERE}.tensorboard",
            sink="TensorBoardSink",
        ),
        "wandb": TrackerKind(
            packages=("wandb",), extra="wandb", module=f"{_HERE}.wandb", sink="WandbSink"
        ),
        "mlflow": TrackerKind(
            packages=("mlflow",), extra="mlflow", module=f"{_HERE}.mlflow", sink="MlflowSink"
        ),
        "trackio": TrackerKind(
            packages=("trackio",), extra="trackio", module=f"{_HERE}.trackio", sink="TrackioSink"
        ),
        OPENTELEMETRY: TrackerKind(
            packages=("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
            extra="opentelemetry",
            module=f"{_HERE}.spans",
            sink="SpanSink",
        ),
    }
)


def wanted_trackers(config: Config) -> tuple[str, ...]:
    """Returns the names of the trackers that a run has."""
    observability = config.observability
    spans = (OPENTELEMETRY,) if observability.opentelemetry else ()
    return (*observability.trackers, *spans)


def check_trackers(config: Config) -> None:
    """Refuses trackers with missing packages before any process starts.

    Raises:
        ConfigError: says what to install, or to set.
    """
    for name in wanted_trackers(config):
        kind = TRACKERS[name]
        if kind.missing:
            key = "opentelemetry" if name == OPENTELEMETRY else f"trackers: {name}"
            raise ConfigError(
                f"observability.{key}: the package {kind.missing} is not installed; pip install"
                f" 'penstock[{kind.extra}]'"
            )
    uri = config.observability.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if "mlflow" in config.observability.trackers and not uri:
        raise ConfigError(
            "observability.trackers: mlflow needs an address; set MLFLOW_TRACKING_URI in the"
            " environment, such as http://host:5000, sqlite:////data/mlflow.db or"
            " file:///data/mlruns"
        )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False  # not even the package that it is in
