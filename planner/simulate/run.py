"""The run of a simulation: lowers a plan to tasks, calls the event core, explains stuck tasks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from penstock.host.errors import ConfigError
from penstock.planner.cost.cluster import ADVANCE, Cluster, OptimizerModel
from penstock.planner.cost.costs import Costs
from penstock.planner.memory.footprint import DevicePeak
from penstock.planner.simulate.compute import add_compute, add_swaps
from penstock.planner.simulate.context import Context
from penstock.planner.simulate.gradients import add_offloads, add_reductions
from penstock.planner.simulate.graph import Tasks, Times, run_tasks
from penstock.planner.simulate.optimizer import add_optimizer
from penstock.planner.simulate.results import Labels, Simulation
from penstock.planner.simulate.transfers import add_transfers
from penstock.planner.simulate.weights import add_weights
from penstock.protocol.plan.plan import Plan


def simulate(
    plan: Plan,
    costs: Costs,
    cluster: Cluster,
    *,
    optimizer: OptimizerModel = ADVANCE,
    stops_early: bool = False,
    peaks: tuple[DevicePeak, ...] | None = None,
) -> Simulation:
    """Runs one attempt of a valid plan.

    ``stops_early``: as our workers do it. A forward of the last stage with ``keep=input`` ends at
    the last checkpoint that it leaves. Weights that another node owns come from its memory.
    Gradients are published (and blocks updated) one by one. Otherwise, as in the papers, a forward
    computes the whole stage, and every node has all weights. A stage's gradients are one copy and
    one update. ``peaks``: of the devices' memory, if they are known already.

    Raises:
        ConfigError: the plan makes no sense: a send without receive, or instructions that wait for
            each other (which are named).
    """
    context = Context.of(plan, costs, cluster)
    add_compute(context, stops_early=stops_early)
    add_transfers(context)
    add_weights(context, from_owners=stops_early)
    add_swaps(context)
    reduced = add_reductions(context)
    offloads = add_offloads(context, reduced, by_block=stops_early)
    add_optimizer(context, offloads, optimizer)
    tasks = context.builder.build()
    times = run_tasks(tasks, context.network)
    if np.isnan(times.ends).any():
        raise ConfigError(f"plan: it cannot finish; {_circle(context, tasks, times)}")
    return Simulation(
        plan=plan,
        costs=costs,
        cluster=cluster,
        columns=context.columns,
        tasks=tasks,
        times=times,
        known_peaks=peaks,
    )


def _circle(context: Context, tasks: Tasks, times: Times) -> str:
    """Follows the needs of a stuck task until a task comes again."""
    stuck = np.isnan(times.ends)
    needs: dict[int, int] = {}
    for task, needed in zip(tasks.edge_tasks.tolist(), tasks.edge_needs.tolist(), strict=True):
        if stuck[task] and stuck[needed]:
            needs.setdefault(task, needed)
    ordered = np.flatnonzero(stuck & (tasks.unordered == 0))
    ordered = ordered[np.lexsort((tasks.origins[ordered], tasks.queues[ordered]))]
    for before, task in pairwise(ordered.tolist()):
        if tasks.queues[before] == tasks.queues[task]:
            needs.setdefault(task, before)
    path = [min(needs)]
    while needs[path[-1]] not in path:
        path.append(needs[path[-1]])
    circle = [*path[path.index(needs[path[-1]]) :], needs[path[-1]]]
    labels = Labels(context.columns)
    return " waits for ".join(
        f"{labels.of(tasks.labels[task], tasks.origins[task])} of"
        f" {'device' if tasks.labels[task] < 2 else 'node'} {tasks.places[task]}"
        for task in circle
    )
