"""Memory that a plan needs: shared memory of each node by array, memory of each device by use.

Only demands are computed here; the client compares them with the memory of the machine. Devices'
memory by instruction: :mod:`penstock.planner.memory.footprint`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from penstock.config.schema import Config
from penstock.host.sums import added
from penstock.planner.cost.costs import Costs
from penstock.planner.memory.footprint import DevicePeak, Footprint, footprints, inbox_peaks
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.names import mirrored_by, ownership, storage
from penstock.shm.layout import (
    GRADIENT_COPIES,
    NodeLayout,
    Ownership,
    SegmentKind,
    replica_layout,
)
from penstock.shm.table import BlockTable


class MemoryKind(StrEnum):
    """Names the kind of memory that a row counts."""

    SHM = "shm"
    """/dev/shm of a node (part of its RAM; locked when devices are GPUs)."""
    HOST = "host"
    """Private RAM of a CPU worker, and messages to it; of any worker, what it swaps out; of an
    optimizer, what it pulls.
    """
    DEVICE = "device"
    """Memory of a GPU."""
    EMULATED = "emulated"
    """Host memory that the nodes of an emulated cluster would need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """``num_bytes`` of ``resource`` needed at ``place`` (``node a``, ``device 0``) for ``use``."""

    place: str
    resource: MemoryKind
    use: str
    num_bytes: int


def memory_table(
    config: Config, table: BlockTable, plan: Plan, costs: Costs
) -> tuple[MemoryRow, ...]:
    """Returns the rows of all nodes, then of all devices; blocks cost ``costs``."""
    return (*node_rows(config, table, plan), *device_rows(config, plan, costs))


def node_rows(config: Config, table: BlockTable, plan: Plan) -> tuple[MemoryRow, ...]:
    """Returns the shared memory of all nodes, and what their optimizers pull from others."""
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
                    resource=MemoryKind.HOST,
                    use="gradients of other nodes",
                    num_bytes=pulled,
                )
            )
        if config.mirrors:
            rows.append(_replica_row(config, table, owners, node))
    return tuple(rows)


def _replica_row(config: Config, table: BlockTable, owners: Ownership, node: int) -> MemoryRow:
    """Returns what a node keeps of another one's blocks: state, and two copies of gradients."""
    owner, nodes = mirrored_by(config, node), config.cluster.nodes
    return MemoryRow(
        place=f"node {nodes[node].name}",
        resource=MemoryKind.SHM,
        use=f"replica of {nodes[owner].name}",
        num_bytes=sum(replica_layout(table, owners, owner).sizes.values()),
    )


def _pulled_bytes(table: BlockTable, owners: Ownership, node: int) -> int:
    """Returns the bytes of private copies of what other nodes contribute to a node's blocks."""
    return sum(
        GRADIENT_COPIES * table.blocks[b].trainable_elements * table.grad_dtype.itemsize
        for b, owner in enumerate(owners.owner)
        if owner == node
        for place in owners.computed_on[b]
        if place != node
    )


def device_rows(config: Config, plan: Plan, costs: Costs) -> tuple[MemoryRow, ...]:
    """Returns the memory of all devices, and of hosts for what they swap out."""
    all_footprints = footprints(plan, costs)
    rows = list(_swap_rows(config, all_footprints))
    if not config.cluster.platform.own_memory:
        rows += _inbox_rows(config, plan, costs)
    resource = MemoryKind.DEVICE if config.cluster.platform.own_memory else MemoryKind.HOST
    for device, footprint in enumerate(all_footprints):
        rows += _device_rows(f"device {device}", resource, footprint.peak)
    return tuple(rows)


def _swap_rows(config: Config, all_footprints: Sequence[Footprint]) -> Iterable[MemoryRow]:
    """Yields the host memory for swapped activations: the most of all devices of a node."""
    workers = config.cluster.workers
    for node, node_config in enumerate(config.cluster.nodes):
        swapped = added(
            max(footprint.host_bytes, default=0.0)
            for footprint in all_footprints[node * workers : (node + 1) * workers]
        )
        if swapped:
            yield MemoryRow(
                place=f"node {node_config.name}",
                resource=MemoryKind.HOST,
                use="swapped activations",
                num_bytes=ceil(swapped),
            )


def _inbox_rows(config: Config, plan: Plan, costs: Costs) -> Iterable[MemoryRow]:
    """Yields the host memory for messages that come before they are received: of all devices of a
    node.
    """
    workers, peaks = config.cluster.workers, inbox_peaks(plan, costs)
    for node, node_config in enumerate(config.cluster.nodes):
        waiting = added(peaks[node * workers : (node + 1) * workers])
        if waiting:
            yield MemoryRow(
                place=f"node {node_config.name}",
                resource=MemoryKind.HOST,
                use="early messages",
                num_bytes=ceil(waiting),
            )


def _device_rows(place: str, resource: MemoryKind, peak: DevicePeak) -> Iterable[MemoryRow]:
    uses = {
        "weight buffers": peak.weight_bytes,
        "gradients": peak.gradient_bytes,
        "activations": peak.activation_bytes,
    }
    if peak.workspace_bytes:
        uses["workspace"] = peak.workspace_bytes
    if peak.static_bytes:
        uses["what is always there"] = peak.static_bytes
    for use, num_bytes in uses.items():
        yield MemoryRow(place=place, resource=resource, use=use, num_bytes=ceil(num_bytes))


def _node_rows(place: str, layout: NodeLayout, plan: Plan) -> Iterable[MemoryRow]:
    """Yields rows by array; of gradients also by when their blocks are settled, where plans tell
    blocks apart. What state is flushed into has a row of its own.
    """
    early = {*plan.settled_early, *plan.updates} if plan.settled_early else None
    uses: dict[str, int] = {}
    for (block, name, copy, _), array in layout.arrays.items():
        if array.segment is SegmentKind.STATE and copy:
            name = "state, flushed into"
        if name == "grads" and early is not None:
            name = "grads, early" if block in early else "grads, advance"
        uses[name] = uses.get(name, 0) + array.num_bytes
    padding = sum(layout.sizes.values()) - sum(uses.values())
    if padding:
        uses["page padding"] = padding
    for use, num_bytes in uses.items():
        yield MemoryRow(place=place, resource=MemoryKind.SHM, use=use, num_bytes=num_bytes)
