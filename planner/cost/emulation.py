"""Emulated devices: the model, GPU and costs of ``cluster.device: emulated:…``.

``emulated:analytic:GPU:MODEL[:option=…]`` is a model and a GPU by name, as ``--costs`` has them;
the configuration has the lengths of sequences and micro-batches. ``emulated:FILE.json`` is a file
of ``penstock profile``. With ``offloaded=no`` weights, gradients and the optimizer's state are in
device memory. They count there, nothing of them moves, and the optimizer's step takes no time.
Papers compare schedules of models that fit in this way. Both bring the model's block table, so the
``model`` section needs its ``dtype`` only.

An emulated run has two tables. Plans, memory and durations follow from the **full** one. The
**stored** one has the same blocks and tensors at ``emulation.scale`` of their size. Shared memory
has its bytes, optimizers update them, and peers send them. How workers spend the durations:
:mod:`penstock.workers.platforms.emulated`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf, isinf
from pathlib import Path
from typing import Any

from penstock.config.schema import Config
from penstock.config.training import OptimizerConfig
from penstock.config.values import CHOSEN_LATER
from penstock.host.errors import ConfigError
from penstock.planner.cost.analytic import AnalyticCosts, analytic_costs
from penstock.planner.cost.cluster import Cluster, OptimizerModel, OptimizerStart, SweepBytes
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.cost.frameworks import FRAMEWORKS
from penstock.planner.cost.profile import block_costs, cluster_of
from penstock.planner.cost.sources import AnalyticSource, parse_costs
from penstock.protocol.plan.profile import Profile, load_profile
from penstock.protocol.run.hardware.bandwidth_log import NicReservations, NodeReads
from penstock.shm.table import BlockSpec, BlockTable, BorrowedTensor, TensorSpec, padded

_TOKENS = "tokens"
"""The embedding's matrix, which a tied head borrows."""

_STATUS_BYTES = 2.0
_STATUS_SPEED = 5.6
"""Speed of a check of gradients relative to a preview (measured on two cores, both from memory).
The check does next to no arithmetic, so the optimizer's rate says nothing about it.
"""
_CAST_BYTES = 6.0


def optimizer_way(config: OptimizerConfig) -> OptimizerModel:
    """Returns the optimizer's way from version to version, if the plan does not name one."""
    moved = _sweep_bytes(config)
    if config.rollback == "arithmetic":
        # Gradients are checked before the step: no arithmetic brings back a value that Inf
        # destroyed.
        return OptimizerModel(tail_bytes=moved.hold + _STATUS_BYTES)
    return moved.advancing


def _sweep_bytes(config: OptimizerConfig) -> SweepBytes:
    return SweepBytes.of(config.name.traits.state_bytes, split=config.master == "split")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRates:
    """The optimizer's sweeps on all cores of an emulated node, by name: parameters/s, or bytes per
    parameter. Bytes are used if a number of parameters/s is one limit and memory the other.
    """

    parameters_per_s: Mapping[str, float]
    bytes_per_parameter: Mapping[str, float]

    @classmethod
    def of_cluster(cls, cluster: Cluster, sweeps: SweepBytes) -> SweepRates:
        """Returns sweeps at the speed of the cores and of the DRAM that copies leave."""
        moved = {
            "advance": sweeps.advance,
            "preview": sweeps.preview,
            "settle": sweeps.settle,
            "hold": sweeps.hold,
            "invert": sweeps.hold,
            "gradient_status": _STATUS_BYTES,
            "cast": _CAST_BYTES,
        }
        rates = dict.fromkeys(moved, cluster.optimizer_rate)
        rates["preview"] *= cluster.preview_speed
        rates["settle"] *= cluster.settle_speed
        rates["gradient_status"] = rates["preview"] * _STATUS_SPEED
        return cls(parameters_per_s=rates, bytes_per_parameter=moved)

    @classmethod
    def measured(cls, profile: Profile) -> SweepRates:
        """Returns the sweeps of a profile; those that it does not know take a preview's time."""
        machine = profile.machine
        rates = {
            "advance": machine.advance_rate,
            "preview": machine.preview_rate,
            "settle": machine.settle_rate,
            "hold": machine.in_place_rate,
            "invert": machine.in_place_rate,
            "gradient_status": machine.preview_rate * _STATUS_SPEED,
            "cast": machine.preview_rate,
        }
        return cls(parameters_per_s=rates, bytes_per_parameter=dict.fromkeys(rates, 0.0))

    def without(self, name: str) -> SweepRates:
        """Returns sweeps that move no memory."""
        rates = {other: rate for other, rate in self.parameters_per_s.items() if other != name}
        return replace(self, parameters_per_s=rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepWork:
    """A sweep on an emulated node: the bytes that it moves. Its speed is at most ``limit`` bytes/s
    of the clock, while the memory moves ``capacity``. Without memory traffic bytes are parameters.
    """

    num_bytes: float
    limit: float
    capacity: float


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """An emulated cluster: both tables, what blocks take, and the machines. Seconds are emulated
    ones; :attr:`time_scale` makes seconds on the clock of them. ``optimizer``: what the simulator
    needs to know of the sweeps. ``offloaded``: the model's state is on the host.
    """

    name: str
    table: BlockTable
    stored: BlockTable
    costs: Costs
    cluster: Cluster
    optimizer: OptimizerModel
    sweeps: SweepRates
    time_scale: float
    offloaded: bool = True

    @classmethod
    def of(cls, config: Config) -> Emulation:
        """Returns the emulation of a configuration with an emulated device.

        Raises:
            ConfigError: no emulated device, an unknown GPU or model, a profile that does not fit.
        """
        text = config.cluster.device_parameter
        if text is None or not config.cluster.platform.simulated_clock:
            raise ConfigError(f"cluster.device = {config.cluster.device!r}: is no emulated device")
        _check_supported(config)
        if config.train.micro_batch == CHOSEN_LATER:
            config = config.with_micro_batch(1)
        settings = config.emulation
        made = _of_profile(Path(text), config) if text.endswith(".json") else _named(text, config)
        _check_model(config, made.table)
        fetched = config.optimizer.name.traits.stepped_bytes
        cluster = _changed(replace(made.cluster, update_fetch_bytes=fetched), config)
        moved, way = _sweep_bytes(config.optimizer), optimizer_way(config.optimizer)
        if settings.optimizer_bytes is not None:
            moved = replace(moved, advance=settings.optimizer_bytes)
            if way.early is not None:
                way = replace(way, tail_bytes=settings.optimizer_bytes)
        sweeps = made.sweeps or SweepRates.of_cluster(cluster, moved)
        if config.optimizer.master == "split":
            sweeps = sweeps.without("cast")  # weights are there with the state: a word is set
        costs = made.costs.faster(settings.compute_speed)
        if settings.instruction_s is not None:
            costs = replace(costs, instruction_s=settings.instruction_s)
        return cls(
            name=made.name,
            table=made.table,
            stored=stored_table(made.table, settings.scale),
            costs=costs,
            cluster=cluster,
            optimizer=replace(way, start=OptimizerStart(settings.optimizer_start)),
            sweeps=sweeps,
            time_scale=settings.time_scale,
            offloaded=made.offloaded,
        )

    def reads(self, run_dir: Path, config: Config, node: int) -> NodeReads:
        """Returns the seconds of a read of other nodes' memory by the processes of a node."""
        return NodeReads(
            board=NicReservations.of_run(run_dir, len(config.cluster.nodes)),
            node=node,
            bytes_per_s=self.reads_bytes_per_s,
        )

    @property
    def reads_bytes_per_s(self) -> float:
        """Bytes of stored state that a node reads from others in a second of the clock."""
        growth = self.table.num_parameters / self.stored.num_parameters if self.offloaded else 0.0
        return self.cluster.nic_bandwidth / max(growth, 1e-9) / self.time_scale

    def sweep_work(self, name: str, block: int) -> SweepWork | None:
        """Returns the seconds of the clock of an optimizer sweep of a block, named by its class."""
        if name not in self.sweeps.parameters_per_s:
            return None  # also a repair: its remaining part is unknown
        parameters = self.costs.blocks[block].parameters
        moved, capacity = self.sweeps.bytes_per_parameter[name], self.cluster.dram_bandwidth
        if not moved or isinf(capacity):
            moved, capacity = 1.0, inf
        limit = self.sweeps.parameters_per_s[name] * moved
        return SweepWork(
            num_bytes=parameters * moved,
            limit=limit / self.time_scale,
            capacity=capacity / self.time_scale,
        )


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The model and cluster of ``cluster.device``; ``sweeps`` only if they were measured."""

    name: str
    table: BlockTable
    costs: Costs
    cluster: Cluster
    sweeps: SweepRates | None = None
    offloaded: bool = True


def stored_table(table: BlockTable, scale: float) -> BlockTable:
    """Returns the same blocks and tensors at ``scale`` of their size, at least one vector each."""
    blocks = tuple(_stored_block(block, scale) for block in table.blocks)
    stored = replace(
        table,
        blocks=blocks,
        num_parameters=sum(t.num_elements for block in blocks for t in block.tensors),
    )
    stored.validate()
    return stored


def _stored_block(block: BlockSpec, scale: float) -> BlockSpec:
    ends = {True: 0, False: 0}
    tensors = []
    for tensor in sorted(block.tensors, key=lambda t: (t.trainable, t.offset)):
        count = padded(max(1, round(tensor.num_elements * scale)))
        tensors.append(replace(tensor, shape=(count,), offset=ends[tensor.trainable]))
        ends[tensor.trainable] += count
    return replace(
        block,
        tensors=tuple(tensors),
        trainable_elements=ends[True],
        frozen_elements=ends[False],
    )


def _check_supported(config: Config) -> None:
    for key in ("freeze", "only"):
        if patterns := getattr(config.train, key):
            raise ConfigError(
                f"train.{key} = {list(patterns)}: emulated devices train every parameter"
            )
    if config.adapter is not None:
        raise ConfigError(
            "adapter: parameters of emulated devices have no names of a model; leave it out"
        )
    if config.optimizer.groups:
        raise ConfigError(
            "optimizer.groups: parameters of emulated devices have no names of a model; leave the"
            " groups out"
        )
    if config.model.path is not None:
        raise ConfigError(
            f"model.path = {str(config.model.path)!r}: emulated devices have no weights to read;"
            " leave it out, the model follows from cluster.device"
        )


def _check_model(config: Config, table: BlockTable) -> None:
    """Checks that a Hugging Face configuration left in the file has the model's layers."""
    hf = config.model.hf or {}
    layers = hf.get("num_hidden_layers", hf.get("n_layer"))
    num_layers = len({block.layer_index for block in table.blocks} - {None})
    if layers not in (None, num_layers):
        raise ConfigError(
            f"model.hf: has {layers} layers, the model of cluster.device ="
            f" {config.cluster.device!r} has {num_layers}; leave model.hf out or"
            " name the same model"
        )


def _changed(cluster: Cluster, config: Config) -> Cluster:
    """Returns the cluster with the values of ``emulation.machine``."""
    changes: dict[str, Any] = dict(config.emulation.machine)
    fixed = ("devices_per_node", "replicas", "replica_bandwidth", "replicas_on_other_nodes")
    known = [field.name for field in fields(Cluster) if field.name not in fixed]
    for name, value in changes.items():
        if name not in known or value < 0.0:
            raise ConfigError(
                f"emulation.machine: {name} = {value}: accepted are numbers of 0 or more for"
                f" {', '.join(known)}"
            )
        kind = type(getattr(cluster, name))
        changes[name] = kind(value)
        if name != "latency_s" and not (changes[name] or kind is bool):
            raise ConfigError(f"emulation.machine: {name} = {value}: must be above 0")
    return replace(cluster, **changes)


def _of_profile(path: Path, config: Config) -> _Source:
    profile = load_profile(path)
    length = config.data.sequence_length
    if profile.sequence_length != length:
        raise ConfigError(
            f"cluster.device: {path} was measured with sequences of {profile.sequence_length}"
            f" tokens, data.sequence_length is {length}; measure again, or change it"
        )
    table = replace(
        profile.table,
        weight_dtype=config.model.dtype,
        grad_dtype=config.optimizer.grad_dtype,
        state_arrays=config.optimizer.name.traits.state_arrays,
    )
    return _Source(
        name=profile.device,
        table=table,
        costs=block_costs(table, profile, tokens=config.train.micro_batch * length),
        cluster=cluster_of(profile, devices_per_node=config.cluster.workers),
        sweeps=SweepRates.measured(profile),
    )


def _named(text: str, config: Config) -> _Source:
    refusal = f"cluster.device = {config.cluster.device!r}: "
    accepted = "accepted are emulated:analytic:GPU:MODEL[:option=…] and emulated:FILE.json"
    if not text.startswith("analytic:"):
        raise ConfigError(refusal + accepted)
    try:
        source = parse_costs(text)
    except ConfigError as error:
        # The user gave no --costs.
        raise ConfigError(refusal + str(error).removeprefix(f"--costs {text!r}: ")) from error
    assert isinstance(source, AnalyticSource)
    _check_options(text, source)
    if source.tensor_parallel > 1:
        raise ConfigError(
            f"{refusal}tensor_parallel = {source.tensor_parallel}: workers run whole layers; plans"
            " with it can be simulated only (penstock plan --costs); leave it out"
        )
    model_costs = analytic_costs(
        source.gpu,
        source.model,
        sequence_length=config.data.sequence_length,
        micro_batch=config.train.micro_batch,
        half_layers=source.half_layers,
        offloaded=source.offloaded,
        flash=source.flash,
        itemsize=config.model.dtype.itemsize,
        efficiency=source.efficiency,
        layers=source.layers,
        devices_per_node=config.cluster.workers,
        framework=FRAMEWORKS[source.framework],
    )
    table = _table(model_costs, config)
    blocks = (block.with_activations(source.activations) for block in model_costs.costs.blocks)
    kept = (
        _published(block, table) if source.offloaded else block.kept_on_device() for block in blocks
    )
    return _Source(
        name=source.gpu,
        table=table,
        costs=replace(model_costs.costs, blocks=tuple(kept)),
        cluster=model_costs.cluster,
        offloaded=source.offloaded,
    )


def _check_options(text: str, source: AnalyticSource) -> None:
    """Refuses options that repeat keys of the configuration."""
    elsewhere = {
        "sequence_length": "data.sequence_length",
        "micro_batch": "train.micro_batch",
        "devices_per_node": "cluster.workers",
    }
    for option, key in elsewhere.items():
        if f"{option}=" in text:
            raise ConfigError(f"cluster.device: {option} is set by {key}; leave it out here")


def _published(block: BlockCost, table: BlockTable) -> BlockCost:
    """Returns the costs with gradients that leave in the configured type."""
    return replace(block, gradient_bytes=block.parameters * table.grad_dtype.itemsize)


def _table(found: AnalyticCosts, config: Config) -> BlockTable:
    """Returns the block table of a named model: one tensor a block, and the one that a tied head
    borrows.

    Work is in operations that the GPU would do in the block's time, so that cuts are balanced by
    time.
    """
    names = found.block_names
    blocks = tuple(
        _block(found, index, name, cost)
        for index, (name, cost) in enumerate(zip(names, found.costs.blocks, strict=True))
    )
    table = BlockTable(
        blocks=blocks,
        weight_dtype=config.model.dtype,
        grad_dtype=config.optimizer.grad_dtype,
        state_arrays=config.optimizer.name.traits.state_arrays,
        vocab_size=found.model.vocab_size,
        num_parameters=sum(t.num_elements for block in blocks for t in block.tensors),
    )
    table.validate()
    return table


def _block(found: AnalyticCosts, index: int, name: str, cost: BlockCost) -> BlockSpec:
    tokens, tied = found.shape.tokens, found.model.tied
    first, last = index == 0, index == len(found.block_names) - 1
    tensors = _tensors(found, name.replace(" ", "."), int(cost.parameters), lends=first and tied)
    borrows = (
        BorrowedTensor(
            name=f"{found.block_names[0]}.{_TOKENS}", local_name=_TOKENS, owner=0, contribution=1
        ),
    )
    words = name.split()
    return BlockSpec(
        index=index,
        name=name.replace(" ", "."),
        kind=" ".join(word for word in words if not word.isdigit()),
        layer_index=int(words[1]) if len(words) > 1 else None,
        tensors=tensors,
        borrows=borrows if last and tied else (),
        trainable_elements=sum(padded(t.num_elements) for t in tensors),
        frozen_elements=0,
        contributions=2 if first and tied else 1,
        forward_flops=cost.forward_s * found.gpu.peak_flops * found.gpu.efficiency / tokens,
        activation_bytes=cost.activation_bytes / tokens,
        output_bytes=0.0 if last else cost.output_bytes / tokens,
    )


def _tensors(
    found: AnalyticCosts, name: str, parameters: int, *, lends: bool
) -> tuple[TensorSpec, ...]:
    matrix = found.model.vocab_size * found.model.hidden_size if lends else 0
    parts = {_TOKENS: matrix, "weight": parameters - matrix}
    tensors: list[TensorSpec] = []
    offset = 0
    for part, count in parts.items():
        if count:
            tensors.append(
                TensorSpec(
                    name=f"{name}.{part}",
                    shape=(count,),
                    trainable=True,
                    decay=True,
                    offset=offset,
                )
            )
            offset += padded(count)
    return tuple(tensors)
