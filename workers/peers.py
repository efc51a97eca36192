"""The peers of a worker by the plan. Its Hello requests their addresses.

In a large cluster a worker has few peers, and every member gets a Begin with addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.platforms import TransportName
from penstock.config.schema import Config
from penstock.protocol.plan.instructions import SendActivation, SendCheckpoint, SendGradient
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.names import (
    memoryd_name,
    node_of_device,
    optimizerd_name,
    ownership,
    worker_name,
)
from penstock.shm.table import BlockTable
from penstock.workers.channels.opening import group_members, told_by
from penstock.workers.state.routing import TensorRouting, collective_peers
from penstock.workers.state.weights import arrays_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The peers of a worker.

    ``workers``: devices that it sends to. ``owners``: other nodes (indices) that own blocks which
    it reads; it also notifies their optimizerds of gradients.
    """

    workers: frozenset[int]
    owners: frozenset[int]

    @classmethod
    def of(
        cls, config: Config, table: BlockTable, plan: Plan, device: int, transport: TransportName
    ) -> Peers:
        """Returns the peers of the worker of ``device``.

        Raises:
            ConfigError: the plan's sends and receives do not match.
        """
        sends = (SendActivation, SendGradient, SendCheckpoint)
        programs = (*plan.programs[device], *plan.evaluation[device])
        routing, modelled = TensorRouting.of(plan), config.cluster.platform.simulated_clock
        workers = {i.peer for i in programs if isinstance(i, sends)}
        workers |= collective_peers(plan, routing, device, modelled=modelled)
        workers |= told_by(device, group_members(plan, transport))
        owners = _owners(config, table, plan, device) - {node_of_device(config, device)}
        return cls(workers=frozenset(workers), owners=frozenset(owners))

    def members(self, config: Config) -> list[str]:
        """Returns the names of the members at needed addresses."""
        nodes = [config.cluster.nodes[index].name for index in sorted(self.owners)]
        return [
            *(worker_name(device) for device in sorted(self.workers)),
            *(memoryd_name(node) for node in nodes),
            *(optimizerd_name(node) for node in nodes),
        ]


def _owners(config: Config, table: BlockTable, plan: Plan, device: int) -> set[int]:
    """Returns the nodes that own a block which the device reads or updates."""
    owner = ownership(config, table, plan).owner
    if plan.shards_weights:
        return set(owner)
    blocks = {block for block, by in plan.updates.items() if by == device}
    for stage in (*plan.forward_stages, *plan.backward_stages):
        if stage.device == device:
            blocks |= {array.block for array in arrays_of(table, stage.blocks)}
    return {owner[block] for block in blocks}
