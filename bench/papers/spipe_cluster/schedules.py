"""SPipe's schedules: in units (figures 2 and 8), and feature by feature (figures 15 and 16)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from bench.papers.page import PaperTable
from bench.papers.spipe_cluster.measured import Workload
from bench.papers.spipe_cluster.systems import SYSTEMS, System, simulate_system
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.timing import order_times
from penstock.protocol.plan.instructions import RecomputeAfter

SIZES = ((2, 2, 4, 8), (4, 4, 8, 16), (4, 8, 8, 16), (8, 8, 16, 32), (8, 16, 16, 32))
"""Devices, micro-batches, forward stages and SPipe's backward stages of the first table."""


def pipeline_units(
    scheme: str, devices: int, micro_batches: int, forward_stages: int, backward_stages: int
) -> float:
    """Returns the length of a schedule whose forward stages take 1 each for forward, recomputation,
    backward.

    Finer backward stages take their share. Recomputation runs inside the backward, as drawn.
    """
    share = forward_stages / backward_stages
    request = ScheduleRequest(
        scheme=scheme,
        num_devices=devices,
        num_microbatches=micro_batches,
        forward_stages=forward_stages,
        backward_stages=backward_stages,
        recompute="full",
        recompute_after=RecomputeAfter.GRADIENT,
    )
    block = BlockCost(
        forward_s=share,
        recompute_s=share,
        backward_input_s=share / 2,
        backward_weight_s=share / 2,
    )
    schedule = build_schedule(request, [1.0] * backward_stages)
    costs = Costs(blocks=(block,) * backward_stages)
    return order_times(schedule.layout, schedule.orders, costs).makespan_s


def units() -> PaperTable:
    """Compares SPipe with Mobius without costs of a machine."""
    rows: list[tuple[str, ...]] = []
    for devices, micro_batches, forward, backward in SIZES:
        mobius = pipeline_units("mobius", devices, micro_batches, forward, forward)
        spipe = pipeline_units("spipe", devices, micro_batches, forward, backward)
        work = 3 * micro_batches * forward / devices
        rows.append(
            (
                str(devices),
                str(micro_batches),
                f"{forward} / {backward}",
                f"{mobius:g}",
                f"{spipe:g}",
                f"{work:g}",
                f"{mobius / spipe:.3f}",
            )
        )
    return PaperTable(
        title="SPipe: the GPU pipelines of figures 2 and 8, in units",
        text=(
            "Forward, recomputation and backward of a forward stage's blocks take 1 each; transfers"
            " and the optimizer take no time. Mobius needs k m (f + r + b) + (p - 1) (f + r + b),"
            " SPipe only (p - 1) f more than the work: at 4 devices, 4 micro-batches and 8 forward"
            " stages 27 instead of 33."
        ),
        columns=(
            "devices",
            "micro-batches",
            "forward / backward stages",
            "Mobius",
            "SPipe",
            "work of a device",
            "speed-up",
        ),
        rows=tuple(rows),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """A configuration of figure 15 with what the paper measured: seconds of the GPUs, and of the
    CPU step after them (``None`` where the text has none).
    """

    name: str
    system: System
    gpu_s: float
    tail_s: float | None


def _spipe(backward_each: int, *, by_stage: bool) -> System:
    return System(
        name="SPipe",
        scheme="spipe",
        forward_each=2,
        backward_each=backward_each,
        optimizer_by_stage=by_stage,
    )


ABLATIONS = (
    Ablation(name="CFG1: parameter prefetching", system=SYSTEMS["Mobius"], gpu_s=6.28, tail_s=9.77),
    Ablation(
        name="CFG2: decoupled passes",
        system=_spipe(2, by_stage=False),
        gpu_s=6.55,
        tail_s=9.77,
    ),
    Ablation(
        name="CFG4: fine-grained backward stages, asynchronous checkpoints",
        system=_spipe(6, by_stage=False),
        gpu_s=5.50,
        tail_s=9.77,
    ),
    Ablation(
        name="CFG5: asynchronous CPU optimizer",
        system=_spipe(6, by_stage=True),
        gpu_s=5.65,
        tail_s=7.07,
    ),
)

ABLATED = Workload(billions=19, sequence=1024, nodes=1, micro_batch=2, mini_batch=8)
"""Figure 15's mini-batch is not printed; its GPU times are those of half of figure 9's."""


@lru_cache(maxsize=1)
def ablations() -> tuple[tuple[float, float], ...]:
    """Returns simulated seconds of the GPUs, and of the CPU step after them, by ablation."""
    made = (simulate_system(one.system, ABLATED) for one in ABLATIONS)
    return tuple((one.offloaded_s, one.makespan_s - one.offloaded_s) for one in made)


def ablation_table() -> PaperTable:
    """Returns figure 15."""
    return PaperTable(
        title="SPipe: feature by feature, figure 15",
        text=(
            "Seconds of 19B on four V100, sequence 1024, 8 sequences (the size is not printed: half"
            " of figure 9's gives the paper's GPU times). CFG0, without prefetching, takes 7.75 s"
            " there; the simulator always prefetches. It has no CFG3 either: checkpoints never"
            " wait in line with activations."
        ),
        columns=("", "GPU, paper", "simulated", "CPU step after it, paper", "simulated"),
        rows=tuple(
            (
                one.name,
                f"{one.gpu_s:.2f}",
                f"{gpu_s:.2f}",
                "" if one.tail_s is None else f"{one.tail_s:.2f}",
                f"{tail_s:.2f}",
            )
            for one, (gpu_s, tail_s) in zip(ABLATIONS, ablations(), strict=True)
        ),
    )


@lru_cache(maxsize=1)
def stage_counts() -> tuple[tuple[int, int, float, float], ...]:
    """Returns figure 16's sizes and sequences of a step, and the simulated seconds with 2 and with
    6 backward stages per device.
    """
    cases = [(19, 1, mini) for mini in (8, 32)] + [(40, 2, mini) for mini in (16, 64)]
    found = []
    for billions, nodes, mini in cases:
        workload = Workload(
            billions=billions, sequence=1024, nodes=nodes, micro_batch=2, mini_batch=mini
        )
        few, many = (
            simulate_system(_spipe(each, by_stage=True), workload).makespan_s for each in (2, 6)
        )
        found.append((billions, mini, few, many))
    return tuple(found)
