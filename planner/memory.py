"""What a plan needs: shared memory of each node by array, memory of each device by use.

Only needs are computed here; what is there, and whether it suffices, is the client's business.
Devices' memory by instruction: :mod:`penstock.planner.footprint`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil

from penstock.planner.costs import BlockCost, Costs
from penstock.planner.emulation import Emulation
from penstock.planner.footprint import DevicePeak, Footprint, device_peaks, footprints
from penstock.planner.profile import Guess, block_costs
from penstock.protocol.config import Config
from penstock.protocol.names import ownership, storage
from penstock.protocol.plan import Plan
from penstock.protocol.profile import Profile
from penstock.shm.layout import GRADIENT_COPIES, NodeLayout, Ownership
from penstock.shm.table import BlockTable

__all__ = [
    "DevicePeak",
    "MemoryRow",
    "Resource",
    "TableCosts",
    "device_costs",
    "device_peaks",
    "device_rows",
    "memory_table",
    "node_rows",
    "table_costs",
]

_GRADIENT_ITEMSIZE = 4
"""Gradients accumulate in fp32 on the device, whatever they are published in."""


class Resource(StrEnum):
    """What kind of memory a row counts."""

    SHM = "shm"
    """/dev/shm of a node (part of its RAM; locked when devices are GPUs)."""
    HOST = "host"
    """Private RAM of a CPU worker; of any worker, what it swaps out; of an optimizer, what it
    pulls.
    """
    DEVICE = "device"
    """Memory of a GPU."""
    EMULATED = "emulated"
    """Host memory that the nodes of an emulated cluster would need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """``num_bytes`` of ``resource`` needed at ``place`` (``node a``, ``device 0``) for ``use``."""

    place: str
    resource: Resource
    use: str
    num_bytes: int


def memory_table(config: Config, table: BlockTable, plan: Plan) -> tuple[MemoryRow, ...]:
    """Rows of all nodes, then of all devices."""
    costs = device_costs(config, table)
    return (*node_rows(config, table, plan), *device_rows(config, plan, costs))


def node_rows(config: Config, table: BlockTable, plan: Plan) -> tuple[MemoryRow, ...]:
    """Shared memory of all nodes, and what their optimizers pull from other nodes."""
    owners = ownership(config, table, plan)
    rows: list[MemoryRow] = []
    for node, node_config in enumerate(config.cluster.nodes):
        place = f"node {node_config.name}"
        layout = NodeLayout.compute(table, owners, node, storage(config, plan))
        rows += _node_rows(place, layout, plan)
        pulled = _pulled_bytes(table, owners, node)
        if pulled:
            rows.append(
                MemoryRow(
                    place=place,
                    resource=Resource.HOST,
                    use="gradients of other nodes",
                    num_bytes=pulled,
                )
            )
    return tuple(rows)


def _pulled_bytes(table: BlockTable, owners: Ownership, node: int) -> int:
    """Private copies of what other nodes contribute to the gradients of a node's blocks."""
    return sum(
        GRADIENT_COPIES * table.blocks[b].trainable_elements * table.grad_dtype.itemsize
        for b, owner in enumerate(owners.owner)
        if owner == node
        for place in owners.computed_on[b]
        if place != node
    )


def device_rows(config: Config, plan: Plan, costs: Costs) -> tuple[MemoryRow, ...]:
    """Memory of all devices, and of hosts for what they swap out."""
    all_footprints = footprints(plan, costs)
    rows = list(_swap_rows(config, all_footprints))
    resource = Resource.HOST if config.cluster.device == "cpu" else Resource.DEVICE
    for device, footprint in enumerate(all_footprints):
        rows += _device_rows(f"device {device}", resource, footprint.peak)
    return tuple(rows)


def _swap_rows(config: Config, all_footprints: Sequence[Footprint]) -> Iterable[MemoryRow]:
    """Host memory for swapped activations: what the devices of a node need at most, together."""
    workers = config.cluster.workers
    for node, node_config in enumerate(config.cluster.nodes):
        swapped = sum(
            max(footprint.host_bytes, default=0.0)
            for footprint in all_footprints[node * workers : (node + 1) * workers]
        )
        if swapped:
            yield MemoryRow(
                place=f"node {node_config.name}",
                resource=Resource.HOST,
                use="swapped activations",
                num_bytes=ceil(swapped),
            )


def _device_rows(place: str, resource: Resource, peak: DevicePeak) -> Iterable[MemoryRow]:
    uses = {
        "weight buffers": peak.weight_bytes,
        "gradients": peak.gradient_bytes,
        "activations": peak.activation_bytes,
    }
    if peak.workspace_bytes:
        uses["workspace"] = peak.workspace_bytes
    for use, num_bytes in uses.items():
        yield MemoryRow(place=place, resource=resource, use=use, num_bytes=ceil(num_bytes))


@dataclass(frozen=True, kw_only=True)
class TableCosts(Costs):
    """A table's costs; a stage that borrows a tensor of another holds it and its gradient, too.

    ``widening``: how much larger weights are on the device than where they are stored.
    """

    table: BlockTable
    widening: float = 1.0

    def of(self, blocks: range) -> BlockCost:
        """A stage of consecutive blocks."""
        cost, borrowed = super().of(blocks), self._borrowed(blocks)
        weight_bytes = cost.weight_bytes + borrowed * self.table.weight_dtype.itemsize
        return replace(
            cost,
            weight_bytes=weight_bytes * self.widening,
            device_gradient_bytes=cost.device_gradient_bytes + borrowed * _GRADIENT_ITEMSIZE,
            gradient_bytes=cost.gradient_bytes + borrowed * self.table.grad_dtype.itemsize,
        )

    def _borrowed(self, blocks: range) -> int:
        return sum(
            tensor.num_elements
            for index in blocks
            for borrowed in self.table.blocks[index].borrows
            if borrowed.owner not in blocks
            for tensor in self.table.blocks[borrowed.owner].tensors
            if tensor.name == borrowed.name
        )


def device_costs(config: Config, table: BlockTable, profile: Profile | None = None) -> Costs:
    """What the memory of a configuration's devices is reckoned with: what was measured, what an
    emulated device brings, or the table's own estimates.

    Raises:
        ConfigError: the profile is of another model.
    """
    if profile is None and config.cluster.emulated is not None:
        return Emulation.of(config).costs
    tokens = config.train.micro_batch * config.data.sequence_length
    blocks = block_costs(table, profile or Guess(), tokens=tokens).blocks
    on_cpu = config.cluster.device == "cpu"
    # CPUs compute in fp32, whatever weights are stored in.
    widening = 4 / table.weight_dtype.itemsize if on_cpu else 1.0
    return TableCosts(blocks=blocks, table=table, widening=widening, separate_memory=not on_cpu)


def table_costs(table: BlockTable, *, tokens: int) -> TableCosts:
    """Bytes of a table's blocks for micro-batches of ``tokens`` tokens (seconds are guessed)."""
    return TableCosts(blocks=block_costs(table, Guess(), tokens=tokens).blocks, table=table)


def _node_rows(place: str, layout: NodeLayout, plan: Plan) -> Iterable[MemoryRow]:
    """By array; gradients also by when their blocks are settled, where plans tell blocks apart."""
    early = {*plan.settled_early, *plan.updates} if plan.settled_early else None
    uses: dict[str, int] = {}
    for (block, name, _, _), array in layout.arrays.items():
        if name == "grads" and early is not None:
            name = "grads, early" if block in early else "grads, advance"
        uses[name] = uses.get(name, 0) + array.num_bytes
    padding = sum(layout.sizes.values()) - sum(uses.values())
    if padding:
        uses["page padding"] = padding
    for use, num_bytes in uses.items():
        yield MemoryRow(place=place, resource=Resource.SHM, use=use, num_bytes=num_bytes)
