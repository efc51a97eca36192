"""Our plans for figure 9's workloads, on the same machines and kernels as the paper's systems.

All plans are made by passes that ``--passes`` can name, within what a V100 holds before it runs out
(:data:`~bench.papers.spipe_cluster.systems.USABLE_SHARE`), with gradients accumulated in fp32:

- **full**: SPipe's scheme, everything recomputed, and ``match-stages``, ``overlap-recompute``,
  ``skip-dead-forward``. Its plan is made from costs at the shorter sequence length.
- **best**: the fastest of :data:`CANDIDATES`, which keep, recompute by operator, or swap to the
  host (``keep-or-swap``), by simulation. The search takes minutes; its results are recorded.

Our optimizer: preview in one sweep over memory (16 bytes a parameter), settled during the next
forward (26), by all cores of a node, which are not bound to parts of it. Fused, in place: 28.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from bench.papers.spipe_cluster.measured import DATA, DEVICES_PER_NODE, Workload, write_rows
from bench.papers.spipe_cluster.systems import SYSTEMS, USABLE_SHARE, plan_of
from bench.papers.spipe_cluster.testbed import V100, analytic, efficiency, with_blocking_transfers
from penstock.host.errors import ConfigError
from penstock.planner.cost.analytic import AnalyticCosts, Host, analytic_costs
from penstock.planner.cost.cluster import PREVIEW_SETTLE, SYNCHRONOUS, Cluster, OptimizerModel
from penstock.planner.cost.costs import Costs
from penstock.planner.memory.footprint import footprints
from penstock.planner.passes import PASSES, PassContext
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.simulate import simulate
from penstock.protocol.plan.instructions import Forward, Keep, RecomputeAfter
from penstock.protocol.plan.plan import Plan

RECORD = DATA / "spipe_ours.json"

LIMIT_BYTES = USABLE_SHARE * V100.device_bytes

OUR_INSTRUCTION_S = 5e-4
"""An instruction takes so long where sends and receives do not block (:mod:`penstock.workers`): the
launches in front of its first kernel. Assumed, not measured on this machine.
"""

FULL = ("match-stages", "overlap-recompute", "skip-dead-forward")
SHORT_SEQUENCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan to try: ``stages_each`` per device (``None``: the scheme's own number)."""

    scheme: str
    stages_each: int | None
    passes: tuple[str, ...]

    def __str__(self) -> str:
        stages = "" if self.stages_each is None else f" {self.stages_each}"
        return f"{self.scheme}{stages}"


_SPLIT = ("split-backward", "keep-or-swap")

CANDIDATES = (
    *(Candidate(scheme="mobius", stages_each=n, passes=_SPLIT) for n in (4, 6, 8, 12)),
    *(Candidate(scheme="megatron-offload", stages_each=n, passes=_SPLIT) for n in (3, 4, 6, 8)),
    *(Candidate(scheme="interleaved", stages_each=n, passes=_SPLIT) for n in (2, 3, 4)),
    Candidate(scheme="dualpipe-v", stages_each=None, passes=("keep-or-swap",)),
    Candidate(scheme="zb-v", stages_each=None, passes=("keep-or-swap",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The simulated seconds of one workload, both sides with a fused step and both with blocking
    transfers, or both without.

    ``mobius_s``: the fastest of Mobius's plans; ``spipe_s``; ``full_s``: ours, everything
    recomputed; ``best_s``: the fastest of ours, made by ``best``, which makes ``recomputed`` of the
    forwards again and has up to ``swapped_bytes`` of a device on its host; ``peak_bytes``: of its
    fullest device. ``kernels_full_s``, ``kernels_none_s``: kernels alone, shared out equally, with
    everything recomputed and with nothing: no plan is faster.
    """

    billions: int
    sequence: int
    blocking: bool
    mobius_s: float
    spipe_s: float
    full_s: float
    best_s: float
    best: str
    recomputed: float
    swapped_bytes: float
    peak_bytes: float
    kernels_full_s: float
    kernels_none_s: float


@lru_cache(maxsize=64)
def analytic_ours(workload: Workload) -> AnalyticCosts:
    """Returns the workload's model as our workers run it: gradients accumulate in fp32, and a
    node's cores are not bound to parts of its memory.
    """
    return analytic_costs(
        V100.gpu,
        f"spipe-{workload.billions}b",
        sequence_length=workload.sequence,
        micro_batch=workload.micro_batch,
        efficiency=efficiency(V100, workload.micro_batch * workload.sequence),
        devices_per_node=DEVICES_PER_NODE,
        host=Host(dram_bandwidth=V100.dram_bandwidth),
    )


def with_transfers(costs: Costs, *, blocking: bool) -> Costs:
    """Returns costs with the paper's blocking transfers, or with our launches alone."""
    if blocking:
        return with_blocking_transfers(costs)
    return Costs(blocks=costs.blocks, instruction_s=OUR_INSTRUCTION_S)


def iteration_s(plan: Plan, costs: Costs, cluster: Cluster, optimizer: OptimizerModel) -> float:
    """Returns the simulated seconds of an iteration."""
    return simulate(plan, costs, cluster, optimizer=optimizer).makespan_s


def full_schedule(
    workload: Workload, names: tuple[str, ...] = FULL, *, cluster: Cluster | None = None
) -> Schedule:
    """Returns SPipe's scheme with the passes ``names``, everything recomputed."""
    made = analytic_ours(workload)
    costs = with_blocking_transfers(made.costs)
    request = ScheduleRequest(
        scheme="spipe",
        num_devices=workload.num_devices,
        num_microbatches=workload.num_microbatches,
        recompute="full",
    )
    schedule = build_schedule(request, [block.forward_s for block in costs.blocks])
    return _apply(schedule, names, costs, cluster or made.cluster)


@lru_cache(maxsize=16)
def full_plan(workload: Workload) -> Plan:
    """Returns the plan that recomputes everything; one for all sequence lengths."""
    return lower(full_schedule(replace(workload, sequence=SHORT_SEQUENCE)))


def _apply(schedule: Schedule, names: tuple[str, ...], costs: Costs, cluster: Cluster) -> Schedule:
    context = PassContext(costs=costs, cluster=cluster, memory_limit_bytes=LIMIT_BYTES)
    for name in names:
        schedule = PASSES[name].run(schedule, context)
    return schedule


def mobius_s(workload: Workload, *, blocking: bool) -> float:
    """Returns the seconds of Mobius at its best: two to four stages per device, cut by cost instead
    of numbers of layers, and a fused step after the last gradient.
    """
    made = analytic(workload)
    costs = with_transfers(made.costs, blocking=blocking)
    work = [block.forward_s + block.recompute_s + block.backward_s for block in costs.blocks]

    def plans() -> Iterator[Plan]:
        for stages_each in (2, 3, 4):
            request = ScheduleRequest(
                scheme="mobius",
                num_devices=workload.num_devices,
                num_microbatches=workload.num_microbatches,
                stages_per_device=stages_each,
                recompute="full",
                recompute_after=RecomputeAfter.GRADIENT,
            )
            yield lower(build_schedule(request, work))

    return min(iteration_s(plan, costs, made.cluster, SYNCHRONOUS) for plan in plans())


def spipe_s(workload: Workload, *, blocking: bool) -> float:
    """Returns the seconds of SPipe with a fused asynchronous step for each stage."""
    made = analytic(workload)
    costs = with_transfers(made.costs, blocking=blocking)
    system = SYSTEMS["SPipe"]
    plan = plan_of(system, made.model.num_layers, workload.num_devices, workload.num_microbatches)
    fused = replace(system.optimizer(), tail_bytes=SYNCHRONOUS.tail_bytes)
    return iteration_s(plan, costs, made.cluster, fused)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    candidate: Candidate
    seconds: float
    recomputed: float
    swapped_bytes: float
    peak_bytes: float


def _try(candidate: Candidate, workload: Workload, *, blocking: bool) -> _Tried:
    """Simulates a candidate.

    Raises:
        ConfigError: it does not fit.
    """
    made = analytic_ours(workload)
    costs = with_transfers(made.costs, blocking=blocking)
    request = ScheduleRequest(
        scheme=candidate.scheme,
        num_devices=workload.num_devices,
        num_microbatches=workload.num_microbatches,
        stages_per_device=candidate.stages_each,
        recompute="full" if candidate.scheme in ("mobius", "megatron-offload") else "none",
    )
    work = [block.forward_s + block.backward_s for block in costs.blocks]
    schedule = _apply(build_schedule(request, work), candidate.passes, costs, made.cluster)
    plan = lower(schedule)
    devices = footprints(plan, costs)
    peak_bytes = max(device.peak.total_bytes for device in devices)
    if peak_bytes > LIMIT_BYTES:
        raise ConfigError(f"{candidate} needs {peak_bytes:.3g} bytes of a device")
    return _Tried(
        candidate=candidate,
        seconds=iteration_s(plan, costs, made.cluster, PREVIEW_SETTLE),
        recomputed=_recomputed_share(schedule, costs),
        swapped_bytes=max(max(device.host_bytes) for device in devices),
        peak_bytes=peak_bytes,
    )


def find(workload: Workload, *, blocking: bool) -> Found:
    """Searches the fastest plan of ours; everything by simulation."""
    tried: list[_Tried] = []
    for candidate in CANDIDATES:
        try:
            tried.append(_try(candidate, workload, blocking=blocking))
        except ConfigError:
            continue
    made = analytic_ours(workload)
    costs = with_transfers(made.costs, blocking=blocking)
    plan = full_plan(workload)
    full_s = iteration_s(plan, costs, made.cluster, PREVIEW_SETTLE)
    whole = _Tried(
        candidate=Candidate(scheme="spipe", stages_each=None, passes=FULL),
        seconds=full_s,
        recomputed=1.0,
        swapped_bytes=0.0,
        peak_bytes=max(device.peak.total_bytes for device in footprints(plan, costs)),
    )
    best = min([*tried, whole], key=lambda one: one.seconds)
    each = workload.num_microbatches / workload.num_devices
    none_s = each * sum(block.forward_s + block.backward_s for block in costs.blocks)
    return Found(
        billions=workload.billions,
        sequence=workload.sequence,
        blocking=blocking,
        mobius_s=mobius_s(workload, blocking=blocking),
        spipe_s=spipe_s(workload, blocking=blocking),
        full_s=full_s,
        best_s=best.seconds,
        best=str(best.candidate),
        recomputed=best.recomputed,
        swapped_bytes=best.swapped_bytes,
        peak_bytes=best.peak_bytes,
        kernels_full_s=none_s + each * sum(block.recompute_s for block in costs.blocks),
        kernels_none_s=none_s,
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


def record(found: Iterable[Found]) -> None:
    """Writes what was found."""
    write_rows(RECORD, map(asdict, found))


@lru_cache(maxsize=1)
def recorded() -> tuple[Found, ...]:
    """Returns what the last search found."""
    return tuple(Found(**row) for row in json.loads(RECORD.read_text(encoding="utf-8")))
