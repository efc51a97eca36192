"""The shared facts of all steps that lower a plan to tasks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.schedule.layout import StageLayout
from penstock.planner.simulate.columns import Columns, Ints
from penstock.planner.simulate.graph import GraphBuilder, Queues
from penstock.planner.simulate.network import Network
from penstock.protocol.plan.instructions import Forward, Keep
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.reduction import Reduction
from penstock.protocol.plan.resources import PlanFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Holds one plan on one cluster.

    ``facts``: without what is skipped, which nothing here needs. ``places``: of a micro-batch among
    those of its route, so that tables by stage and place have no gaps.
    """

    plan: Plan
    layout: StageLayout
    reduction: Reduction
    costs: Costs
    cluster: Cluster
    columns: Columns
    queues: Queues
    network: Network
    builder: GraphBuilder
    facts: PlanFacts
    places: Ints

    @classmethod
    def of(cls, plan: Plan, costs: Costs, cluster: Cluster) -> Context:
        """Returns a context in which nothing is lowered yet."""
        columns, layout = Columns.of(plan.programs), StageLayout.of(plan)
        num_optimizers = cluster.domain_of(plan.num_devices - 1) + 1 + len(layout.backward)
        return cls(
            plan=plan,
            layout=layout,
            reduction=Reduction.of(plan),
            costs=costs,
            cluster=cluster,
            columns=columns,
            queues=Queues(num_devices=plan.num_devices, num_optimizers=num_optimizers),
            network=Network(cluster),
            builder=GraphBuilder(),
            facts=PlanFacts(layout=layout, drops=_drops(columns)),
            places=_places(layout),
        )

    @property
    def num_pairs(self) -> int:
        """A number above all that :meth:`pairs` gives."""
        num_stages = max(len(self.layout.forward), len(self.layout.backward)) + 2
        return num_stages * (int(self.places.max()) + 1)

    def pairs(self, rows: Ints, *, step: int = 0) -> Ints:
        """Returns a number for (stage + step, micro-batch) of each row; ``step`` is -1, 0 or 1."""
        stages = self.columns.stages[rows] + (step + 1)
        places = self.places[self.columns.micro_batches[rows]]
        pairs: Ints = stages * (int(self.places.max()) + 1) + places
        return pairs

    def forward(self, stage: int) -> BlockCost:
        """Returns the costs of a forward stage."""
        return self.costs.of(self.layout.forward[stage].blocks)

    def backward(self, stage: int) -> BlockCost:
        """Returns the costs of a backward stage."""
        return self.costs.of(self.layout.backward[stage].blocks)

    def issue(self, tasks: Ints, rows: Ints) -> None:
        """Lets tasks start when the compute instructions before their rows have ended."""
        self.builder.need(tasks, self.columns.issued_after(rows))

    def barrier(self, needs: Ints, row: int) -> int:
        """Adds a task that ends when all ``needs`` have; returns its number."""
        barrier = self.builder.add(
            1, lane=None, queues=self.queues.barriers, origins=row, places=0, unordered=True
        )
        self.builder.need(barrier, needs)
        return int(barrier[0])


def _places(layout: StageLayout) -> Ints:
    places = np.empty(layout.num_microbatches, dtype=np.int64)
    for members in layout.microbatches_of_route:
        places[list(members)] = np.arange(len(members))
    return places


def _drops(columns: Columns) -> dict[tuple[int, int], tuple[str, ...]]:
    rows = columns.rows(Forward)
    selective = columns.map(rows, lambda forward: forward.keep is Keep.SELECTIVE) > 0
    return {(f.stage, f.micro_batch): f.drop for f in columns.at(rows[selective])}


def lookup(keys: Ints, values: Ints, wanted: Ints, size: int) -> Ints:
    """Returns the value of each wanted key, or -1. Keys are unique, and below ``size``."""
    table = np.full(size, -1)
    table[keys] = values
    looked_up: Ints = table[wanted]
    return looked_up
