"""Writes ``RUN_DIR/numerics.json``, the recipe that all bits of a run follow from.

Preparation knows plan, shapes and configuration. Facts that need torch come from
``model/kernels.json``, which a tool process writes before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.config.schema import Config
from penstock.config.values import AUTO, SDPA
from penstock.daemons.node.preparing.layers import leaves_layers
from penstock.daemons.node.preparing.software import Software
from penstock.host.errors import StateError
from penstock.host.files import holds_text, write_atomically
from penstock.host.limits.cgroup import usable_cpus
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.reduction import Reduction
from penstock.protocol.run.data_size import TrainingData
from penstock.protocol.run.hardware.cpus import threads_per_worker
from penstock.protocol.run.numerics import (
    KERNELS,
    NUMERICS,
    Attention,
    Batch,
    Kernels,
    Layer,
    Numerics,
    Sums,
)
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import BlockTable, DType

_UNSEEN = Attention(forward="unknown", backward="unknown", evaluation="unknown")


def knows_kernels(config: Config, run_dir: Path, software: Software) -> bool:
    """Returns whether ``model/kernels.json`` matches the configured attention and the current
    software. The recipe of the last start names the software.
    """
    if config.cluster.platform.builtin_model:
        return True
    try:
        before = RunDirectory(run_dir).numerics
        kernels = _kernels(run_dir)
    except (OSError, StateError):
        return False
    if config.model.attention not in (kernels.asked, kernels.choice):
        return False
    return before is None or before.software == _rounding(config, software)


def chosen_attention(config: Config, run_dir: Path) -> str:
    """Returns the value of ``model.attention`` that the kernels of a prepared run are of. Devices
    that bring their model have no kernels.

    Raises:
        StateError: ``model/kernels.json`` is damaged.
    """
    if config.cluster.platform.builtin_model:
        return SDPA if config.model.attention == AUTO else config.model.attention
    return _kernels(run_dir).choice


def write_numerics(
    directory: RunDirectory, config: Config, plan: Plan, software: Software
) -> Numerics:
    """Writes the numerics recipe of a run after its plan. An unchanged file is left alone.

    Raises:
        StateError: ``model/kernels.json`` is damaged.
    """
    kernels = None if config.cluster.platform.builtin_model else _kernels(directory.path)
    compiled = config.model.compile is True and kernels is not None
    data = TrainingData.of(directory.path, config)
    apart = config.data.document_masks or (data is not None and data.restarts_positions)
    numerics = Numerics(
        plan=directory.plan_digest,
        batch=Batch(
            micro_batch=config.train.micro_batch,
            sequence_length=config.data.sequence_length,
            objective=config.data.objective,
            attention_mask="documents" if apart else "plain",
        ),
        layers=_layers(
            directory.table,
            {} if kernels is None else kernels.attention,
            training=compiled and not leaves_layers(plan),
            evaluation=compiled and bool(config.evaluation_sets),
        ),
        compiler=kernels.compiler if compiled and kernels is not None else None,
        sums=_sums(config, plan, directory.table),
        arithmetic=None if kernels is None else kernels.arithmetic,
        threads=threads_per_worker(config, 0, usable_cpus()),
        software=_rounding(config, software),
    )
    text = numerics.to_json()
    if not holds_text(directory.path / NUMERICS, text):
        directory.remove_checksums()
        write_atomically(directory.path / NUMERICS, text)
    return numerics


def _rounding(config: Config, software: Software) -> Mapping[str, str]:
    return software.rounding(counts_cpus=not config.cluster.threads_per_worker)


def _kernels(run_dir: Path) -> Kernels:
    path = run_dir / KERNELS
    return Kernels.from_json(path.read_bytes(), str(path))


def _layers(
    table: BlockTable, attention: Mapping[str, Attention], *, training: bool, evaluation: bool
) -> tuple[Layer, ...]:
    """Returns the kinds of layers in the order of the model."""
    kinds = dict.fromkeys(block.kind for block in table.blocks if block.layer_index is not None)
    return tuple(
        Layer(
            kind=kind,
            compiled_in_training=training,
            compiled_in_evaluation=evaluation,
            attention=attention.get(kind, _UNSEEN),
        )
        for kind in kinds
    )


def _sums(config: Config, plan: Plan, table: BlockTable) -> Sums:
    grads = config.optimizer.grad_dtype
    reduction = Reduction.of(plan)
    place = "devices" if reduction.reduces else "optimizer"
    routes = reduction.layout.num_routes
    mixed = config.cluster.platform.own_memory and config.model.dtype is not DType.FP32
    return Sums(
        micro_batches="fp32, one mixed kernel" if mixed else "fp32, in place",
        stored=grads.value,
        replicas="none" if routes == 1 else f"{place}, in the order of {routes} routes",
        loss_rows=table.rows_of_loss,
    )
