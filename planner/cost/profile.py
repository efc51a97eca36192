"""Costs of a configured model on this machine: measured, or guessed.

A block table and either a :class:`~penstock.protocol.plan.profile.Profile` or a :class:`Guess` give
:class:`~penstock.planner.cost.costs.Costs` and a :class:`~penstock.planner.cost.cluster.Cluster`.
Costs of named GPUs and models without a configuration: :mod:`penstock.planner.cost.analytic`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from penstock.config.platforms import Platform
from penstock.host.errors import ConfigError
from penstock.planner.cost.block_maker import BANDWIDTH_SHARE
from penstock.planner.cost.catalogue import gpu_called, gpu_named
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import (
    BlockCost,
    Costs,
    OperatorCost,
    RecomputeSource,
    Workspaces,
)
from penstock.protocol.plan.profile import KindProfile, MachineProfile, Profile
from penstock.shm.table import BlockSpec, BlockTable, DType

_GRADIENT_ITEMSIZE = 4
"""Bytes of a gradient on the device: gradients accumulate in fp32 and are published in any type."""

_COMPUTE_ITEMSIZE_OF_CPUS = 4
_SINGLE_BYTES = 4096 + 5056
"""Bytes of losses and other single numbers, kept until the end of an attempt. Recomputed chunks of
the loss also keep the state of a CPU's random generator.
"""

_UPDATE_BYTES = 30.0
"""Bytes of device memory that UPDATE moves for a parameter: reads 16, writes 14."""

_GPU_MACHINE = MachineProfile(
    instruction_s=2.0e-5,
    fetch_bandwidth=2.0e10,
    offload_bandwidth=2.0e10,
    peer_bandwidth=1.0e10,
    latency_s=2.0e-5,
    advance_rate=1.5e9,
    preview_rate=1.8e9,
    settle_rate=1.9e9,
    in_place_rate=1.7e9,
    device_update_rate=5.0e9,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """Guessed rates of a machine, and the block table's own estimates.

    ``device_flops`` per second in FORWARD; ``backward_ratio``: BACKWARD relative to FORWARD where
    all is trained, half of it p1. A frozen matrix has no weight product.
    """

    machine: MachineProfile = _GPU_MACHINE
    device_flops: float = 6.0e13
    backward_ratio: float = 2.0


GPU_GUESS = Guess()
"""A mid-range GPU on PCIe 4.0 x16 and a 32-core host."""

CPU_GUESS = Guess(
    device_flops=3.0e10,
    machine=MachineProfile(
        instruction_s=2.0e-4,
        fetch_bandwidth=8.0e9,
        offload_bandwidth=8.0e9,
        peer_bandwidth=2.0e9,
        latency_s=2.0e-4,
        advance_rate=4.0e8,
        preview_rate=5.0e8,
        settle_rate=5.0e8,
        in_place_rate=4.5e8,
        device_update_rate=5.0e8,
    ),
)
"""One CPU core per worker."""


def guess_of_gpu(name: str, dtype: DType) -> Guess:
    """Returns the rates of a GPU of the catalogue on the host of :data:`GPU_GUESS`. ``dtype``: the
    type of the weights, in which the GPU computes.

    Raises:
        ConfigError: unknown GPU; suggests those that are alike.
    """
    gpu = gpu_named(name)
    peak = gpu.vector_flops if dtype is DType.FP32 else gpu.peak_flops
    machine = replace(
        GPU_GUESS.machine,
        fetch_bandwidth=gpu.pcie_bandwidth,
        offload_bandwidth=gpu.pcie_bandwidth,
        peer_bandwidth=gpu.nvlink_bandwidth or gpu.pcie_bandwidth,
        device_update_rate=gpu.memory_bandwidth * BANDWIDTH_SHARE / _UPDATE_BYTES,
        device_memory_bytes=gpu.memory_bytes,
    )
    return Guess(machine=machine, device_flops=peak * gpu.efficiency)


def guess_of_device(name: str, memory_bytes: float, dtype: DType) -> Guess:
    """Returns the rates of the GPU with a driver's ``name`` and ``memory_bytes``: those of
    :func:`guess_of_gpu`. A GPU that the catalogue lacks has :data:`GPU_GUESS`.
    """
    gpu = gpu_called(name)
    guess = GPU_GUESS if gpu is None else guess_of_gpu(gpu.name, dtype)
    return replace(guess, machine=replace(guess.machine, device_memory_bytes=memory_bytes))


def guess_of(platform: Platform) -> Guess:
    """Returns what to assume of a platform until a profile says better."""
    return GPU_GUESS if platform.own_memory else CPU_GUESS


def block_costs(table: BlockTable, source: Profile | Guess, *, tokens: int) -> Costs:
    """Returns the costs of a table's blocks for micro-batches of ``tokens`` tokens.

    Raises:
        ConfigError: a kind of block is not in the profile.
    """
    if isinstance(source, Profile):
        _check_kinds(table, source)
        blocks = tuple(_measured(b, table, source.kinds[b.kind], tokens) for b in table.blocks)
    else:
        blocks = tuple(_guessed(block, table, source, tokens) for block in table.blocks)
    return Costs(blocks=blocks, instruction_s=source.machine.instruction_s)


def cluster_of(source: Profile | Guess, *, devices_per_node: int) -> Cluster:
    """Returns nodes like the machine. The optimizer's rates include what DRAM allows."""
    machine = source.machine
    return Cluster(
        devices_per_node=devices_per_node,
        fetch_bandwidth=machine.fetch_bandwidth,
        offload_bandwidth=machine.offload_bandwidth,
        peer_bandwidth=machine.peer_bandwidth,
        nic_bandwidth=machine.peer_bandwidth,
        latency_s=machine.latency_s,
        optimizer_rate=machine.advance_rate,
        preview_speed=machine.preview_rate / machine.advance_rate,
        settle_speed=machine.settle_rate / machine.advance_rate,
        device_optimizer_rate=machine.device_update_rate,
        device_memory_bytes=machine.device_memory_bytes,
        host_memory_bytes=machine.host_memory_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class TableCosts(Costs):
    """A table's costs. A stage that borrows a tensor of another block holds the tensor's whole
    array, and sums its gradients in an array of that size.

    ``widening``: size of weights on the device relative to their stored size.
    """

    table: BlockTable
    widening: float = 1.0

    def of(self, blocks: range) -> BlockCost:
        """Returns a stage of consecutive blocks."""
        key = (blocks.start, blocks.stop)
        if key not in self._with_borrowed:
            self._with_borrowed[key] = self._borrowing(super().of(blocks), blocks)
        return self._with_borrowed[key]

    @cached_property
    def _with_borrowed(self) -> dict[tuple[int, int], BlockCost]:
        return {}

    def _borrowing(self, cost: BlockCost, blocks: range) -> BlockCost:
        table = self.table
        lent = [borrowed for index in blocks for borrowed in table.blocks[index].borrows]
        arrays = {(b.owner, bool(b.contribution)) for b in lent if b.owner not in blocks}
        weights = sum(
            table.blocks[owner].trainable_elements
            if trainable
            else table.blocks[owner].frozen_elements
            for owner, trainable in arrays
        )
        sums = sum(table.blocks[b.owner].trainable_elements for b in lent if b.contribution)
        weight_bytes = cost.weight_bytes + weights * table.weight_dtype.itemsize
        return replace(
            cost,
            weight_bytes=weight_bytes * self.widening,
            device_gradient_bytes=cost.device_gradient_bytes + sums * _GRADIENT_ITEMSIZE,
            gradient_bytes=cost.gradient_bytes + sums * table.grad_dtype.itemsize,
        )


def table_costs(
    table: BlockTable, source: Profile | Guess, *, tokens: int, own_memory: bool
) -> TableCosts:
    """Returns the costs of a table's blocks. Devices with ``own_memory`` compute in the type of the
    weights, all others in fp32 and in the host's memory. Passes, checks, searches and tables all
    use this one model of the memory of devices.

    Raises:
        ConfigError: a kind of block is not in the profile.
    """
    plain = block_costs(table, source, tokens=tokens)
    return TableCosts(
        blocks=plain.blocks,
        instruction_s=plain.instruction_s,
        separate_memory=own_memory,
        table=table,
        widening=1.0 if own_memory else _COMPUTE_ITEMSIZE_OF_CPUS / table.weight_dtype.itemsize,
    )


def _check_kinds(table: BlockTable, profile: Profile) -> None:
    for block in table.blocks:
        if block.kind not in profile.kinds:
            raise ConfigError(
                f"profile: block {block.name!r} is of kind {block.kind!r}, measured were"
                f" {', '.join(profile.kinds)}; run penstock profile with this configuration"
            )


def _guessed(block: BlockSpec, table: BlockTable, guess: Guess, tokens: int) -> BlockCost:
    forward_s = block.forward_flops * tokens / guess.device_flops
    half_backward_s = forward_s * guess.backward_ratio / 2
    trained, products = _trained_share(block, table)
    return replace(
        _state(block, table),
        forward_s=forward_s,
        recompute_s=forward_s,
        backward_input_s=half_backward_s * (1.0 + (1.0 - trained) * (1.0 - products)),
        backward_weight_s=half_backward_s * trained,
        output_bytes=block.output_bytes * tokens,
        activation_bytes=block.activation_bytes * tokens,
        deferred_bytes=block.activation_bytes * tokens,
        workspace_bytes=_loss_bytes(table, tokens) if block is table.blocks[-1] else 0.0,
    )


def _trained_share(block: BlockSpec, table: BlockTable) -> tuple[float, float]:
    """Returns the trained share of a block's matrices, and their share of its forward.

    A matrix costs a product forward and one for its input's gradient; a trained one costs another
    for its own. The rest of a forward, attention, costs twice as much backward. The even split of a
    trained block's backward counts half of that as weights; a frozen block's is all input.
    """
    borrowed = {(tied.owner, tied.name) for tied in block.borrows}
    tied = (t for owner, name in borrowed for t in table.blocks[owner].tensors if t.name == name)
    tensors = [*block.tensors, *tied]
    matrices = [tensor for tensor in tensors if len(tensor.shape) >= 2]
    elements = sum(tensor.num_elements for tensor in matrices)
    if elements == 0:
        return float(any(tensor.trainable for tensor in tensors)), 1.0
    trained = sum(tensor.num_elements for tensor in matrices if tensor.trainable)
    return trained / elements, min(1.0, 2.0 * elements / max(block.forward_flops, 1.0))


def _loss_bytes(table: BlockTable, tokens: int) -> float:
    """Returns the bytes that a chunk of the loss needs besides the graph: logits and their
    gradients in fp32. A loss of one chunk keeps its logits in the graph.
    """
    rows = table.rows_of_loss
    return 0.0 if tokens <= rows else 8.0 * rows * table.vocab_size


def _measured(block: BlockSpec, table: BlockTable, kind: KindProfile, tokens: int) -> BlockCost:
    workspaces = Workspaces(
        forward=kind.forward_workspace_bytes.at(tokens),
        graph=kind.graph_workspace_bytes.at(tokens),
        backward=kind.backward_workspace_bytes.at(tokens),
        backward_input=kind.backward_input_workspace_bytes.at(tokens),
        backward_weight=kind.backward_weight_workspace_bytes.at(tokens),
    )
    return replace(
        _state(block, table),
        forward_s=kind.forward_s.at(tokens),
        recompute_s=kind.recompute_s.at(tokens),
        backward_input_s=kind.backward_input_s.at(tokens),
        backward_weight_s=kind.backward_weight_s.at(tokens),
        output_bytes=kind.output_bytes.at(tokens),
        activation_bytes=kind.activation_bytes.at(tokens),
        deferred_bytes=kind.deferred_bytes.at(tokens),
        constant_bytes=kind.constant_bytes.at(tokens) + _SINGLE_BYTES,
        workspace_bytes=workspaces.greatest,
        workspaces=workspaces,
        operators=tuple(
            OperatorCost(
                name=operator.name,
                forward_s=operator.forward_s.at(tokens),
                activation_bytes=operator.activation_bytes.at(tokens),
            )
            for operator in kind.operators
        ),
        sources=tuple(
            RecomputeSource(
                operator=source.operator,
                needed_by=source.needed_by,
                num_bytes=source.num_bytes.at(tokens),
            )
            for source in kind.sources
        ),
    )


def _state(block: BlockSpec, table: BlockTable) -> BlockCost:
    """Returns what follows from the table alone."""
    weight, gradient = table.weight_dtype.itemsize, table.grad_dtype.itemsize
    return BlockCost(
        parameters=block.trainable_elements,
        weight_bytes=(block.trainable_elements + block.frozen_elements) * weight,
        device_gradient_bytes=block.trainable_elements * _GRADIENT_ITEMSIZE,
        gradient_bytes=block.trainable_elements * gradient,
    )
