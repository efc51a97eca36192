"""What all steps of lowering a plan to tasks work with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.planner.cluster import Cluster
from penstock.planner.costs import BlockCost, Costs
from penstock.planner.layout import StageLayout
from penstock.planner.simulate.columns import Columns, Ints
from penstock.planner.simulate.graph import GraphBuilder, Queues
from penstock.planner.simulate.network import Network
from penstock.protocol.instructions import Forward, Keep
from penstock.protocol.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One plan on one cluster; ``drops``: operators dropped by (stage, micro-batch)."""

    plan: Plan
    layout: StageLayout
    costs: Costs
    cluster: Cluster
    columns: Columns
    queues: Queues
    network: Network
    builder: GraphBuilder
    drops: dict[tuple[int, int], tuple[str, ...]]

    @classmethod
    def of(cls, plan: Plan, costs: Costs, cluster: Cluster) -> Context:
        """Nothing is lowered yet."""
        columns = Columns.of(plan.programs)
        num_nodes = cluster.node_of(plan.num_devices - 1) + 1
        return cls(
            plan=plan,
            layout=StageLayout.of(plan),
            costs=costs,
            cluster=cluster,
            columns=columns,
            queues=Queues(num_devices=plan.num_devices, num_nodes=num_nodes),
            network=Network(cluster),
            builder=GraphBuilder(),
            drops=_drops(columns),
        )

    def forward(self, stage: int) -> BlockCost:
        """Costs of a forward stage."""
        return self.costs.of(self.layout.forward[stage].blocks)

    def backward(self, stage: int) -> BlockCost:
        """Costs of a backward stage."""
        return self.costs.of(self.layout.backward[stage].blocks)

    def issue(self, tasks: Ints, rows: Ints) -> None:
        """Tasks start after the compute instructions before their rows have ended."""
        self.builder.need(tasks, self.columns.issued_after(rows))

    def barrier(self, needs: Ints, row: int) -> int:
        """A task that ends when all others have."""
        barrier = self.builder.add(
            1, lane=None, queues=self.queues.barriers, origins=row, places=0, unordered=True
        )
        self.builder.need(barrier, needs)
        return int(barrier[0])


def _drops(columns: Columns) -> dict[tuple[int, int], tuple[str, ...]]:
    rows = columns.rows(Forward)
    selective = columns.map(rows, lambda forward: forward.keep is Keep.SELECTIVE) > 0
    return {(f.stage, f.micro_batch): f.drop for f in columns.at(rows[selective])}


def lookup(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    """Value of each wanted key, -1 where there is none. Keys are unique."""
    if not len(keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(keys)
    place = np.searchsorted(keys, wanted, sorter=order)
    found = order[np.minimum(place, len(keys) - 1)]
    return np.where(keys[found] == wanted, values[found], -1)
