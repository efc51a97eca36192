"""Where the costs of a configured model come from: measured (:class:`Profile`) or guessed
(:class:`Guess`).

Both turn a block table into :class:`~penstock.planner.costs.Costs` and rates into a
:class:`~penstock.planner.cluster.Cluster`. A profile is made by ``penstock profile``
(:mod:`penstock.models.profile`); its file form is :mod:`penstock.planner.profile_json`. Costs of
named GPUs and models without a configuration: :mod:`penstock.planner.analytic`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from penstock.planner.cluster import Cluster
from penstock.planner.costs import BlockCost, Costs, OperatorCost
from penstock.protocol.errors import ConfigError
from penstock.shm.table import BlockSpec, BlockTable

_GRADIENT_ITEMSIZE = 4
"""Gradients accumulate in fp32 on the device, whatever they are published in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearFit:
    """``slope`` x tokens + ``intercept``: what Mario fits (its section 5.2: y = a n + b)."""

    slope: float
    intercept: float = 0.0

    def at(self, tokens: float) -> float:
        """The value for so many tokens, not below 0."""
        return max(0.0, self.slope * tokens + self.intercept)

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> LinearFit:
        """Least squares over (tokens, value); one point gives a line through the origin."""
        if len({x for x, _ in points}) < 2:
            return cls(slope=sum(y for _, y in points) / sum(x for x, _ in points))
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        covariance = sum((x - mean_x) * (y - mean_y) for x, y in points)
        slope = covariance / sum((x - mean_x) ** 2 for x, _ in points)
        return cls(slope=slope, intercept=mean_y - slope * mean_x)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProfile:
    """One operator of a kind of block: its forward, and what it leaves for the backward."""

    name: str
    forward_s: LinearFit
    activation_bytes: LinearFit


@dataclass(frozen=True, slots=True, kw_only=True)
class KindProfile:
    """One kind of block, per micro-batch as functions of its tokens.

    Fields as in :class:`~penstock.planner.costs.BlockCost`. ``operators``: those that were told
    apart, in the order in which they run; they need not make up the whole block.
    """

    forward_s: LinearFit
    recompute_s: LinearFit
    backward_input_s: LinearFit
    backward_weight_s: LinearFit
    activation_bytes: LinearFit
    output_bytes: LinearFit
    operators: tuple[OperatorProfile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates of one machine: bytes/s, seconds, parameters/s of all optimizer cores of a node.

    ``instruction_s``: overhead of each compute instruction. Bandwidths are ``inf`` where nothing
    has to move. The four rates are those of the optimizer's passes (``native/passes.h``).
    """

    instruction_s: float
    fetch_bandwidth: float
    offload_bandwidth: float
    peer_bandwidth: float
    latency_s: float
    advance_rate: float
    preview_rate: float
    settle_rate: float
    in_place_rate: float
    device_memory_bytes: float = inf
    host_memory_bytes: float = inf

    def cluster(self, *, devices_per_node: int) -> Cluster:
        """Nodes like this machine. The optimizer advances: its rate includes DRAM's limit."""
        return Cluster(
            devices_per_node=devices_per_node,
            fetch_bandwidth=self.fetch_bandwidth,
            offload_bandwidth=self.offload_bandwidth,
            peer_bandwidth=self.peer_bandwidth,
            nic_bandwidth=self.peer_bandwidth,
            latency_s=self.latency_s,
            optimizer_rate=self.advance_rate,
            device_memory_bytes=self.device_memory_bytes,
            host_memory_bytes=self.host_memory_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was measured: a machine, and the kinds of blocks of the model of ``table`` on it.

    ``device`` says in words what computed; ``sequence_length``: of the micro-batches that were
    measured (attention is quadratic in it, so another length needs another profile);
    ``micro_batch``: the configured one.
    """

    device: str
    sequence_length: int
    micro_batch: int
    machine: Machine
    kinds: Mapping[str, KindProfile] = field(hash=False)
    table: BlockTable

    @property
    def tokens(self) -> int:
        """Tokens of a configured micro-batch."""
        return self.sequence_length * self.micro_batch

    def costs(self, table: BlockTable, *, tokens: int) -> Costs:
        """Costs of a table's blocks for micro-batches of ``tokens`` tokens.

        Raises:
            ConfigError: a kind of block was not measured.
        """
        for block in table.blocks:
            if block.kind not in self.kinds:
                raise ConfigError(
                    f"profile: block {block.name!r} is of kind {block.kind!r}, measured were"
                    f" {', '.join(self.kinds)}; run penstock profile with this configuration"
                )
        blocks = tuple(_measured(b, table, self.kinds[b.kind], tokens) for b in table.blocks)
        return Costs(blocks=blocks, instruction_s=self.machine.instruction_s)

    def cluster(self, *, devices_per_node: int) -> Cluster:
        """Nodes like the machine that was measured."""
        return self.machine.cluster(devices_per_node=devices_per_node)


_GPU_MACHINE = Machine(
    instruction_s=2.0e-5,
    fetch_bandwidth=2.0e10,
    offload_bandwidth=2.0e10,
    peer_bandwidth=1.0e10,
    latency_s=2.0e-5,
    advance_rate=1.5e9,
    preview_rate=1.8e9,
    settle_rate=1.9e9,
    in_place_rate=1.7e9,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """Rates of a machine nobody measured, and the block table's own estimates.

    ``device_flops`` per second in FORWARD; ``backward_ratio``: BACKWARD relative to FORWARD, half
    of it p1.
    """

    machine: Machine = _GPU_MACHINE
    device_flops: float = 6.0e13
    backward_ratio: float = 2.0

    def costs(self, table: BlockTable, *, tokens: int) -> Costs:
        """Costs of a table's blocks for micro-batches of ``tokens`` tokens."""
        blocks = []
        for block in table.blocks:
            forward_s = block.forward_flops * tokens / self.device_flops
            half_backward_s = forward_s * self.backward_ratio / 2
            blocks.append(
                replace(
                    _state(block, table),
                    forward_s=forward_s,
                    recompute_s=forward_s,
                    backward_input_s=half_backward_s,
                    backward_weight_s=half_backward_s,
                    output_bytes=block.output_bytes * tokens,
                    activation_bytes=block.activation_bytes * tokens,
                    deferred_bytes=block.activation_bytes * tokens,
                )
            )
        return Costs(blocks=tuple(blocks), instruction_s=self.machine.instruction_s)

    def cluster(self, *, devices_per_node: int) -> Cluster:
        """Nodes like this machine."""
        return self.machine.cluster(devices_per_node=devices_per_node)


GPU_GUESS = Guess()
"""A mid-range GPU on PCIe 4.0 x16 and a 32-core host."""

CPU_GUESS = Guess(
    device_flops=3.0e10,
    machine=Machine(
        instruction_s=2.0e-4,
        fetch_bandwidth=8.0e9,
        offload_bandwidth=8.0e9,
        peer_bandwidth=2.0e9,
        latency_s=2.0e-4,
        advance_rate=4.0e8,
        preview_rate=5.0e8,
        settle_rate=5.0e8,
        in_place_rate=4.5e8,
    ),
)
"""One CPU core per worker."""


def guess_of(device: str) -> Guess:
    """What to assume of ``cluster.device`` until a profile says better."""
    return CPU_GUESS if device == "cpu" else GPU_GUESS


def _measured(block: BlockSpec, table: BlockTable, kind: KindProfile, tokens: int) -> BlockCost:
    """Between BACKWARD_INPUT and BACKWARD_WEIGHT everything stays: autograd's graph does."""
    activation_bytes = kind.activation_bytes.at(tokens)
    return replace(
        _state(block, table),
        forward_s=kind.forward_s.at(tokens),
        recompute_s=kind.recompute_s.at(tokens),
        backward_input_s=kind.backward_input_s.at(tokens),
        backward_weight_s=kind.backward_weight_s.at(tokens),
        output_bytes=kind.output_bytes.at(tokens),
        activation_bytes=activation_bytes,
        deferred_bytes=activation_bytes,
        operators=tuple(
            OperatorCost(
                name=operator.name,
                forward_s=operator.forward_s.at(tokens),
                activation_bytes=operator.activation_bytes.at(tokens),
            )
            for operator in kind.operators
        ),
    )


def _state(block: BlockSpec, table: BlockTable) -> BlockCost:
    """What follows from the table alone."""
    weight, gradient = table.weight_dtype.itemsize, table.grad_dtype.itemsize
    return BlockCost(
        parameters=block.trainable_elements,
        weight_bytes=(block.trainable_elements + block.frozen_elements) * weight,
        device_gradient_bytes=block.trainable_elements * _GRADIENT_ITEMSIZE,
        gradient_bytes=block.trainable_elements * gradient,
    )


CostModel = Guess
CPU_COSTS = CPU_GUESS


def block_costs(table: BlockTable, model: Guess | Profile, *, tokens: int) -> Costs:
    """Costs of a table's blocks for micro-batches of ``tokens`` tokens."""
    return model.costs(table, tokens=tokens)


def cluster_of(model: Guess | Profile, *, devices_per_node: int) -> Cluster:
    """The cluster that a model's rates describe."""
    return model.cluster(devices_per_node=devices_per_node)
