"""Figures 9, 10 and 11 of SPipe: every run beside its prediction, the other cluster, memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

from bench.papers.page import PaperTable
from bench.papers.spipe_cluster import zero3
from bench.papers.spipe_cluster.command import Compared, compare, mean_errors, predicted
from bench.papers.spipe_cluster.measured import (
    Workload,
    by_workload,
    figure_9,
    figure_12,
    measured,
)
from bench.papers.spipe_cluster.systems import SYSTEMS
from bench.papers.spipe_cluster.testbed import TEST_BEDS, V100

NAMES = (*SYSTEMS, zero3.NAME)


@lru_cache(maxsize=2)
def compared(figure: int) -> tuple[Compared, ...]:
    """Returns the rows of figure 9, or those at hand of figure 12, beside their predictions."""
    return compare(figure_9() if figure == 9 else figure_12())


def mean_error(system: str, what: str = "error", figure: int = 9) -> float:
    """Returns the mean absolute error of ``error`` (iterations), ``gpu_error`` or ``tail_error``
    of a system, relative to measured seconds.
    """
    return mean_errors([one for one in compared(figure) if one.row.system == system])[what]


def measured_speedup(over: str) -> float:
    """Returns the average of SPipe's measured speed-ups over another system."""
    runs = by_workload(iter(figure_9()))
    return fmean(
        systems[over].iteration_s / systems["SPipe"].iteration_s
        for systems in runs.values()
        if over in systems
    )


@lru_cache(maxsize=16)
def simulated_speedup(over: str, cluster: str = "v100", *, needs: bool = False) -> float:
    """Returns the average of SPipe's simulated speed-ups on a cluster.

    ``needs``: only of workloads that both have memory for; otherwise of those whose run of the
    other system was measured on Cluster V100.
    """
    bed = TEST_BEDS[cluster]
    ran = by_workload(iter(figure_9()))
    speedups = []
    for workload in measured():
        theirs, ours = (predicted(name, workload, bed) for name in (over, "SPipe"))
        wanted = theirs.fits and ours.fits if needs else over in ran[workload]
        if wanted:
            speedups.append(theirs.iteration_s / ours.iteration_s)
    return fmean(speedups)


def figure_9_table() -> PaperTable:
    """Returns every measured iteration beside its prediction."""
    by: dict[Workload, dict[str, Compared]] = {}
    for one in compared(9):
        by.setdefault(one.row.workload, {})[one.row.system] = one
    rows = []
    for workload, systems in by.items():
        cells: list[str] = []
        for name in NAMES:
            one = systems[name]
            run = one.row.run
            cells += [
                f"{run.iteration_s:.1f}" if run else one.row.failure,
                f"{one.prediction.iteration_s:.1f}" + ("" if one.prediction.fits else " OOM"),
                "" if one.error is None else f"{100 * one.error:+.0f} %",
            ]
        rows.append(
            (f"{workload.billions}B", str(workload.sequence), str(workload.num_devices), *cells)
        )
    columns = [f"{name} {what}" for name in NAMES for what in ("measured", "simulated", "error")]
    return PaperTable(
        title="SPipe: iteration times of figure 9",
        text=(
            "Seconds per iteration on Cluster V100, measured (the artifact's expected results) and"
            " simulated with one set of constants, eight of which are fitted to these runs and to"
            " 15 of figure 12 together (bench/papers/data/spipe_constants.json); all others are"
            " data sheets' or the artifact's configuration. The CPU step is limited by what its"
            " processes are bound to (a quarter of the node's memory channels each) and, in SPipe,"
            " by the two threads of a stage. DeepSpeed gathers every layer three times for each"
            " micro-batch; with 32 GPUs its collectives are slower, for a reason that we do not"
            " know (a constant of its own)."
        ),
        columns=("model", "sequence", "GPUs", *columns),
        rows=tuple(rows),
    )


PAPER_SPEEDUPS = {
    ("v100", "DeepSpeed"): 4.13,
    ("v100", "Megatron"): 1.26,
    ("v100", "Mobius"): 1.31,
    ("3090", "DeepSpeed"): 4.26,
    ("3090", "Megatron"): 1.20,
    ("3090", "Mobius"): 1.22,
}
"""Averages of section 5.2, with Megatron's and Mobius's the other way round than its text has them:
the artifact's file says so for V100, and figures 9 and 10 are about speed-ups over Mobius.
"""


def averages_table() -> PaperTable:
    """Returns errors, and average speed-ups on both clusters."""
    rows = []
    for name in NAMES:
        errors = [f"{100 * mean_error(name):.1f} %"]
        for what in ("gpu_error", "tail_error"):
            errors.append("" if name == zero3.NAME else f"{100 * mean_error(name, what):.1f} %")
        speedups = [""] * 5
        if name != "SPipe":
            speedups = [
                f"{PAPER_SPEEDUPS['v100', name]:.2f}",
                f"{measured_speedup(name):.3f}",
                f"{simulated_speedup(name):.3f}",
                f"{PAPER_SPEEDUPS['3090', name]:.2f}",
                f"{simulated_speedup(name, '3090'):.3f}",
            ]
        rows.append((name, *errors, *speedups))
    return PaperTable(
        title="SPipe: how far figures 9 and 10 are met",
        text=(
            "Mean absolute errors over figure 9's workloads, of the iteration, of the GPUs' part"
            " and of the CPU step after it, and averages of SPipe's speed-ups. Cluster RTX 3090 is"
            " predicted from its data sheet, from a public measurement of matrix products and from"
            " the constants of V100; nothing is fitted to it. The text's averages over Mobius and"
            " Megatron are the other way round in the artifact's file, and here."
        ),
        columns=(
            "system",
            "error",
            "GPU error",
            "CPU step error",
            "speed-up, V100, paper",
            "its file",
            "simulated",
            "RTX 3090, paper",
            "simulated",
        ),
        rows=tuple(rows),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Figure 11 of one system: end of the GPUs, seconds; peak memory, share of a GPU's."""

    gpu_s: float
    peak_share: float


FIGURE_11 = {
    "SPipe": Usage(gpu_s=7.97, peak_share=0.52),
    "Mobius": Usage(gpu_s=9.54, peak_share=0.61),
    "Megatron": Usage(gpu_s=11.07, peak_share=0.58),
}
FIGURE_11_WORKLOAD = Workload(billions=19, sequence=1024, nodes=1, micro_batch=2, mini_batch=16)


def peak_share(system: str) -> float:
    """Returns the share of its memory that the fullest GPU takes in figure 11, simulated."""
    made = predicted(system, FIGURE_11_WORKLOAD, V100)
    return made.peak_gb * 1e9 / V100.device_bytes


def memory_table() -> PaperTable:
    """Returns figure 11's peaks of memory."""
    rows = []
    for name, usage in FIGURE_11.items():
        made = predicted(name, FIGURE_11_WORKLOAD, V100)
        rows.append(
            (
                name,
                f"{100 * usage.peak_share:.0f} %",
                f"{100 * peak_share(name):.0f} %",
                f"{usage.gpu_s:.2f}",
                f"{made.gpu_s:.2f}",
            )
        )
    return PaperTable(
        title="SPipe: memory of figure 11",
        text=(
            "19B, sequence 1024, on a V100 with 32 GiB. Peaks are what a GPU takes from its driver:"
            " the artifact fetches weights in a stream of their own, and what PyTorch's allocator"
            " has given to one stream no other gets. Weights and gradients have 16 bits. CUDA's"
            " context and the transport's buffers are not counted. Of the four Megatron rows of"
            " figure 9 that an earlier model called out of memory none is now; Mobius is from 40B"
            " with 8 sequences a micro-batch, as in the paper. The paper's seconds of its figure 11"
            " are not those of its figure 9."
        ),
        columns=("system", "peak, paper", "here", "GPUs done, paper, s", "here"),
        rows=tuple(rows),
    )
