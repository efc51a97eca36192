"""The systems of the SPipe paper (section 5.1) on its test-beds: plans, time and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from bench.papers.spipe_cluster.measured import Workload
from bench.papers.spipe_cluster.testbed import (
    V100,
    Constants,
    TestBed,
    analytic,
    constants,
    with_blocking_transfers,
)
from penstock.planner.cost.cluster import OptimizerModel, OptimizerStart
from penstock.planner.cost.costs import Costs
from penstock.planner.memory.footprint import Footprint, footprints
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.simulate import Simulation, simulate
from penstock.protocol.plan.instructions import RecomputeAfter
from penstock.protocol.plan.plan import Plan

USABLE_SHARE = 0.857
"""Share of a GPU's memory that tensors fill before it runs out: the rest is CUDA's context,
buffers of the transfers, and what the caching allocator cannot join. Between the largest run that
fits (Megatron, 40B at 2048 tokens: 29.2 GB) and the smallest that does not (Mobius, 69B with 8
sequences a micro-batch: 29.7 GB; section 5.3).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system of the paper: scheme, stages per device, optimizer.

    ``recomputes_head``: the head's forward is repeated, too. Megatron-LM's recomputation spans
    transformer layers; its 1F1B turns round at the head with one micro-batch, whose logits it can
    keep, which all forwards first (Mobius, SPipe) cannot.

    ``optimizer_by_stage``: every backward stage has threads of its own (section 4); otherwise a
    process updates what it has with all its cores, after the last gradient.
    """

    name: str
    scheme: str
    forward_each: int
    backward_each: int
    optimizer_by_stage: bool
    recomputes_head: bool = True

    def optimizer(self, known: Constants | None = None) -> OptimizerModel:
        """Returns how its CPU step runs."""
        known = known or constants()
        if self.optimizer_by_stage:
            return OptimizerModel(tail_bytes=known.step_bytes, stage_rate=known.stage_rate)
        return OptimizerModel(start=OptimizerStart.FLUSH, tail_bytes=known.step_bytes)


SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        system.name: system
        for system in (
            System(
                name="Mobius",
                scheme="mobius",
                forward_each=2,
                backward_each=2,
                optimizer_by_stage=False,
            ),
            System(
                name="Megatron",
                scheme="megatron-offload",
                forward_each=2,
                backward_each=2,
                optimizer_by_stage=False,
                recomputes_head=False,
            ),
            System(
                name="SPipe",
                scheme="spipe",
                forward_each=2,
                backward_each=6,
                optimizer_by_stage=True,
            ),
        )
    }
)
"""Two stages per GPU; SPipe has two forward and six backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A simulated iteration: seconds in all, till the GPUs are done, and after that; the memory
    that the fullest GPU takes from its driver, in GB of 1e9 bytes; whether it fits.
    """

    iteration_s: float
    gpu_s: float
    tail_s: float
    peak_gb: float
    fits: bool


def costs_of(
    system: System, workload: Workload, bed: TestBed = V100, known: Constants | None = None
) -> Costs:
    """Returns what blocks take in a system of the paper."""
    costs = with_blocking_transfers(analytic(workload, bed, known).costs, bed, known)
    if system.recomputes_head:
        return costs
    head = replace(costs.blocks[-1], recompute_s=0.0)
    return replace(costs, blocks=(*costs.blocks[:-1], head))


@lru_cache(maxsize=64)
def plan_of(system: System, num_layers: int, num_devices: int, num_microbatches: int) -> Plan:
    """Returns the plan of a system of the paper, cut into equal numbers of layers."""
    return lower(schedule_of(system, num_layers, num_devices, num_microbatches))


def schedule_of(
    system: System, num_layers: int, num_devices: int, num_microbatches: int
) -> Schedule:
    """Returns the schedule of :func:`plan_of`, before lowering.

    Raises:
        ConfigError: the scheme does not take so many micro-batches, or so few layers.
    """
    request = ScheduleRequest(
        scheme=system.scheme,
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        forward_stages=system.forward_each * num_devices,
        backward_stages=system.backward_each * num_devices,
        recompute="full",
        recompute_after=RecomputeAfter.GRADIENT,
    )
    return build_schedule(request, [0.0, *(1.0 for _ in range(num_layers)), 0.0])


def simulate_system(
    system: System, workload: Workload, bed: TestBed = V100, known: Constants | None = None
) -> Simulation:
    """Simulates an iteration of a system of the paper."""
    made = analytic(workload, bed, known)
    plan = plan_of(system, made.model.num_layers, workload.num_devices, workload.num_microbatches)
    costs = costs_of(system, workload, bed, known)
    return simulate(plan, costs, made.cluster, optimizer=system.optimizer(known))


@lru_cache(maxsize=256)
def predict(system: System, workload: Workload, bed: TestBed = V100) -> Prediction:
    """Predicts an iteration from the committed constants.

    Memory: the artifact's fetches have a CUDA stream of their own, and PyTorch's allocator does not
    give what one stream has freed to another. So a GPU takes from its driver the most that weights
    ever need, and the most that all else ever needs (:attr:`Prediction.peak_gb`, which figure 11
    shows). It runs out where what is alive at once exceeds :data:`USABLE_SHARE`: before it gives
    up, the allocator hands back what no stream uses.
    """
    simulation = simulate_system(system, workload, bed)
    devices = footprints(simulation.plan, simulation.costs)
    alive = max(device.peak.total_bytes for device in devices)
    return Prediction(
        iteration_s=simulation.makespan_s,
        gpu_s=simulation.offloaded_s,
        tail_s=simulation.makespan_s - simulation.offloaded_s,
        peak_gb=max(map(taken_bytes, devices)) / 1e9,
        fits=alive <= USABLE_SHARE * bed.device_bytes,
    )


def taken_bytes(device: Footprint) -> float:
    """Returns what a device takes from its driver: a pool for weights, and one for all else."""
    others = zip(
        device.gradient_bytes, device.activation_bytes, device.workspace_bytes, strict=True
    )
    rest = max((sum(now) for now in others), default=0.0)
    return max(device.weight_bytes, default=0.0) + rest + device.static_bytes
