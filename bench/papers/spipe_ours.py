"""Figure 9's workloads with our passes and our optimizer, on the same machines and kernels.

Two kinds of plans, made by passes that ``--passes`` can name:

- **decoupled**: SPipe's scheme, full recomputation, ``match-stages``, ``overlap-recompute``,
  ``device-update``, ``skip-dead-forward``. One plan per model, made from its costs at the shorter
  sequence length.
- **coupled**: Mobius's scheme with finer stages and ``keep-what-fits``: selective recomputation,
  stage by stage, up to 32 GB of device memory.

Our optimizer is a preview in one sweep over memory, settled during the next forward
(:data:`penstock.planner.cost.cluster.PREVIEW_SETTLE`: 16 and 26 bytes a parameter where the paper's
step moves 64; the node's 32 cores are taken to saturate its memory, so bytes count. On two cores,
which are limited by reads, a preview was measured to take 0.93 of a sweep in place, a settle 0.89).
Everything else stays as in the paper's systems: their blocking transfers, and
:data:`~bench.papers.spipe_testbed.STEP_S`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from bench.papers.spipe_testbed import STEP_S, Workload, analytic, with_blocking_transfers
from penstock.planner.build import ScheduleRequest, build_schedule
from penstock.planner.cost.cluster import PREVIEW_SETTLE, Cluster, OptimizerModel
from penstock.planner.cost.costs import Costs
from penstock.planner.memory.footprint import device_peaks
from penstock.planner.passes import PASSES, PassContext
from penstock.planner.schedule import Schedule, lower
from penstock.planner.simulate import simulate
from penstock.protocol.plan.instructions import Forward, Keep
from penstock.protocol.plan.plan import Plan

MEMORY_LIMIT_BYTES = 32e9
"""Limit of one V100 32GB, which has 34.4e9: the rest is left to CUDA and fragmentation."""

OUR_INSTRUCTION_S = 5e-4
"""An instruction takes so long where sends and receives do not block (:mod:`penstock.workers`): the
launches in front of its first kernel. Assumed, not measured on this machine.
"""

DECOUPLED = ("match-stages", "overlap-recompute", "device-update", "skip-dead-forward")
COUPLED = ("keep-what-fits",)
SHORT_SEQUENCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """An iteration of ours: seconds with blocking transfers and without, bytes of the fullest
    device, share of the forwards that is recomputed.
    """

    blocking_s: float
    overlapped_s: float
    peak_bytes: float
    recomputed: float


def decoupled(workload: Workload) -> Ours:
    """Simulates SPipe's scheme with our passes."""
    short = replace(workload, sequence=SHORT_SEQUENCE)
    return _result(_decoupled_plan(short), workload, recomputed=1.0)


def coupled(workload: Workload) -> Ours:
    """Simulates Mobius's scheme with finer stages, keeping what fits.

    Raises:
        ConfigError: nothing fits.
    """
    costs = with_blocking_transfers(analytic(workload).costs)
    blocks_each = len(costs.blocks) // workload.num_devices
    request = ScheduleRequest(
        scheme="mobius",
        num_devices=workload.num_devices,
        num_microbatches=workload.num_microbatches,
        stages_per_device=6 if blocks_each >= 12 else 4,
        recompute="full",
    )
    work = [block.forward_s + block.backward_s for block in costs.blocks]
    schedule = apply_passes(
        build_schedule(request, work), COUPLED, costs, analytic(workload).cluster
    )
    share = _recomputed_share(schedule, costs)
    return _result(lower(schedule), workload, recomputed=share)


def apply_passes(
    schedule: Schedule, names: tuple[str, ...], costs: Costs, cluster: Cluster
) -> Schedule:
    """Returns the schedule after passes, by name, under :data:`MEMORY_LIMIT_BYTES`."""
    context = PassContext(costs=costs, cluster=cluster, memory_limit_bytes=MEMORY_LIMIT_BYTES)
    for name in names:
        schedule = PASSES[name].run(schedule, context)
    return schedule


def iteration_s(
    plan: Plan, costs: Costs, workload: Workload, optimizer: OptimizerModel = PREVIEW_SETTLE
) -> float:
    """Returns the simulated seconds of an iteration on the test-bed."""
    cluster = analytic(workload).cluster
    return simulate(plan, costs, cluster, optimizer=optimizer).makespan_s + STEP_S


def decoupled_schedule(
    workload: Workload, names: tuple[str, ...] = DECOUPLED, *, cluster: Cluster | None = None
) -> Schedule:
    """Returns SPipe's scheme with the passes ``names``, from the workload's costs; on the test-bed
    unless told otherwise.
    """
    costs = with_blocking_transfers(analytic(workload).costs)
    request = ScheduleRequest(
        scheme="spipe",
        num_devices=workload.num_devices,
        num_microbatches=workload.num_microbatches,
        recompute="full",
    )
    schedule = build_schedule(request, [block.forward_s for block in costs.blocks])
    return apply_passes(schedule, names, costs, cluster or analytic(workload).cluster)


@lru_cache(maxsize=8)
def _decoupled_plan(workload: Workload) -> Plan:
    return lower(decoupled_schedule(workload))


def _result(plan: Plan, workload: Workload, *, recomputed: float) -> Ours:
    costs = analytic(workload).costs
    blocking = with_blocking_transfers(costs)
    overlapped = Costs(blocks=costs.blocks, instruction_s=OUR_INSTRUCTION_S)
    return Ours(
        blocking_s=iteration_s(plan, blocking, workload),
        overlapped_s=iteration_s(plan, overlapped, workload),
        peak_bytes=max(peak.total_bytes for peak in device_peaks(plan, costs)),
        recomputed=recomputed,
    )


def _recomputed_share(schedule: Schedule, costs: Costs) -> float:
    """Returns the seconds of recomputation for each second of forward, over one micro-batch."""
    drops = {
        instruction.stage: instruction.drop
        for order in schedule.orders
        for instruction in order
        if isinstance(instruction, Forward) and instruction.keep is Keep.SELECTIVE
    }
    again = sum(
        costs.of(schedule.layout.forward[stage].blocks).drop_seconds(drop)
        for stage, drop in drops.items()
    )
    return again / costs.of(range(schedule.layout.num_blocks)).forward_s
