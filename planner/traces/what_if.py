"""The gain of a step without a resource, from a simulation with that resource infinitely fast.

The plan is simulated with costs, and again with one resource's times at zero, all else as it was.
The difference of the makespans is the saving. Announcements, decision, the batch and hand-overs are
in no simulation. They come one after the other, so a step without them is shorter by their part of
the critical path.

Savings of several resources do not add up. If two chains of work are about equally long, neither
resource alone saves much, and both together do. If they follow each other, savings add up. Nothing
saves more than the step. So the common saving of all critical resources is reported, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf

from penstock.host.sums import added
from penstock.planner.cost.cluster import ADVANCE, Cluster, OptimizerModel, OptimizerStart
from penstock.planner.cost.costs import Costs
from penstock.planner.simulate import Simulation, simulate
from penstock.planner.traces.critical_path import CriticalPath
from penstock.planner.traces.dependency_graph import Resource
from penstock.planner.traces.fitted import Fit
from penstock.protocol.plan.plan import Plan

CRITICAL_SHARE = 0.01
"""A resource is critical if a step without it is shorter by this share at least."""

_SERIAL = (Resource.DATA, Resource.SCHEDULER, Resource.OVERHEAD)


class CostSource(StrEnum):
    """The origin of costs."""

    EMULATED = "emulated"
    """They are those that an emulated cluster runs on."""
    PROFILE = "profile"
    """They were measured before the run."""
    FITTED = "fitted"
    """They were fitted to attempts of the run itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """The costs that a plan is simulated with."""

    costs: Costs
    cluster: Cluster
    optimizer: OptimizerModel
    source: CostSource

    @classmethod
    def of_fit(cls, fit: Fit, start: OptimizerStart = OptimizerStart.OFFLOAD) -> Pricing:
        """Returns costs that were fitted to attempts; the optimizer's ``start`` is configured."""
        optimizer = replace(ADVANCE, start=start)
        return cls(
            costs=fit.costs, cluster=fit.cluster, optimizer=optimizer, source=CostSource.FITTED
        )

    def simulate(self, plan: Plan) -> Simulation:
        """Simulates a plan as our workers execute it."""
        return simulate(plan, self.costs, self.cluster, optimizer=self.optimizer, stops_early=True)

    def without(self, resources: Collection[Resource]) -> Pricing:
        """Returns the same with some resources infinitely fast."""
        costs, optimizer = self.costs, self.optimizer
        changes: dict[str, object] = {}
        for resource in resources:
            changes |= _INFINITE.get(resource, {})
        if Resource.COMPUTE in resources:
            instruction_s = self.costs.instruction_s if self.source is CostSource.FITTED else 0.0
            costs = replace(costs.faster(inf), instruction_s=instruction_s)
        if Resource.OVERHEAD in resources:
            costs = replace(costs, instruction_s=0.0)
        if Resource.OPTIMIZER in resources:
            optimizer = _without_traffic(optimizer)
        if {Resource.PEER_LINKS, Resource.NETWORK} <= set(resources):
            changes["latency_s"] = 0.0
        cluster = replace(self.cluster, **changes)  # type: ignore[arg-type]  # its own fields
        return replace(self, costs=costs, cluster=cluster, optimizer=optimizer)


_INFINITE: Mapping[Resource, Mapping[str, object]] = {
    Resource.H2D: {"fetch_bandwidth": inf, "switch_bandwidth": inf},
    Resource.D2H: {"offload_bandwidth": inf, "switch_bandwidth": inf},
    Resource.PEER_LINKS: {"peer_bandwidth": inf, "peer_through_host": False},
    Resource.NETWORK: {"nic_bandwidth": inf, "read_bandwidth": None, "replica_bandwidth": inf},
    Resource.OPTIMIZER: {
        "optimizer_rate": inf,
        "device_optimizer_rate": inf,
        "update_fetch_bytes": 0.0,
        "update_offload_bytes": 0.0,
    },
}
"""Fields of the cluster."""


def _without_traffic(optimizer: OptimizerModel) -> OptimizerModel:
    early = None if optimizer.early is None else _without_traffic(optimizer.early)
    return replace(optimizer, tail_bytes=0.0, settle_bytes=0.0, early=early)


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """Seconds by which a step would be shorter. ``seconds``: without one resource; ``together_s``:
    without all that are ``critical``. ``simulated_s``: the makespan with all of them.
    """

    seconds: Mapping[Resource, float]
    critical: tuple[Resource, ...]
    together_s: float
    simulated_s: float


def savings(plan: Plan, pricing: Pricing, path: CriticalPath) -> Savings:
    """Returns what a step on ``path`` would save. The path's seconds and those of ``pricing`` are
    on one clock.
    """
    base_s = pricing.simulate(plan).makespan_s

    def saved_s(resources: Collection[Resource]) -> float:
        serial = [r for r in _SERIAL if r in resources and not _simulated(r, pricing)]
        seconds = added(path.seconds[resource] for resource in serial)
        if len(serial) < len(resources):
            seconds += base_s - pricing.without(resources).simulate(plan).makespan_s
        return min(path.step_s, max(0.0, seconds))  # a simulation may take a little longer

    # Work on no path may be left out: it can only end sooner.
    saved = {resource: saved_s((resource,)) for resource in Resource}
    critical = tuple(r for r, s in saved.items() if s >= CRITICAL_SHARE * path.step_s)
    return Savings(
        seconds=saved,
        critical=critical,
        together_s=saved_s(critical) if critical else 0.0,
        simulated_s=base_s,
    )


def _simulated(resource: Resource, pricing: Pricing) -> bool:
    """Returns fitted costs with the overhead of instructions and of the optimizer's hand-overs."""
    return resource not in _SERIAL or (
        resource is Resource.OVERHEAD and pricing.source is CostSource.FITTED
    )
