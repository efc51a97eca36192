"""Metrics that do not change during a metricsd's life: versions, and the run's description."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

import penstock
from penstock.config.schema import Config
from penstock.daemons.monitor.metrics.exposition import Exposition
from penstock.protocol.metrics.node import BUILD, RUN
from penstock.protocol.run.rundir import RunDirectory


def put_facts(exposition: Exposition, run: RunDirectory) -> None:
    """Writes ``penstock_build_info`` and ``penstock_run_info``."""
    config = run.config
    exposition.put(
        BUILD.name,
        1,
        version=penstock.__version__,
        python=platform.python_version(),
        torch=_version("torch"),
        native=_vectors(),
    )
    exposition.put(
        RUN.name,
        1,
        run_id=run.run_id,
        scheme=run.plan.scheme,
        model=model_name(config),
        devices=str(len(config.cluster.nodes) * config.cluster.workers),
        nodes=str(len(config.cluster.nodes)),
        micro_batches=str(config.train.num_microbatches),
        optimizer=config.optimizer.name,
        platform=config.cluster.platform.name,
    )


def model_name(config: Config) -> str:
    """Returns the name of the model's folder, or its type; for a platform that brings the model,
    what ``cluster.device`` says.
    """
    if config.model.path is not None:
        return config.model.path.name
    if config.model.hf is not None:
        return str(config.model.hf["model_type"])
    return config.cluster.device_parameter or ""


def _version(package: str) -> str:
    """Returns that of a package, which is not imported; empty: it is not installed."""
    installed = importlib.util.find_spec(package) is not None
    return importlib.metadata.version(package) if installed else ""


def _vectors() -> str:
    """Returns which vector instructions the optimizer's kernels use."""
    from penstock import _native

    return _native.vector_path()
