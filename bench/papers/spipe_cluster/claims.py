"""Every figure, table and numbered claim of the SPipe paper, and what we get."""

from __future__ import annotations

from bench.papers import rollback
from bench.papers.page import Claim, Evidence
from bench.papers.spipe_cluster.batches import PAPER, average
from bench.papers.spipe_cluster.figures import (
    FIGURE_11,
    PAPER_SPEEDUPS,
    mean_error,
    peak_share,
    simulated_speedup,
)
from bench.papers.spipe_cluster.schedules import (
    ABLATIONS,
    ablations,
    pipeline_units,
    stage_counts,
)
from bench.papers.spipe_cluster.testbed import TEST_BEDS
from penstock.planner.cost.catalogue import MODELS

_UNITS = (4, 4, 8)
"""Devices, micro-batches and forward stages of figures 2 and 8."""


def claims() -> tuple[Claim, ...]:
    """Returns all of them, in the order of the paper."""
    return (*_design(), *_setting(), *_comparison(), *_batches(), *_features())


def _design() -> tuple[Claim, ...]:
    mobius = pipeline_units("mobius", *_UNITS, 8)
    spipe = pipeline_units("spipe", *_UNITS, 16)
    return (
        Claim(
            where="figure 1",
            says="GPipe and 1F1B, 4 GPUs, 4 micro-batches (drawn)",
            get="both schemes; their lengths in the table of schemes below",
            evidence=Evidence.COMPUTED,
        ),
        Claim(
            where="figures 2, 8",
            says="Mobius and SPipe, 4 GPUs, 8 stages, 4 micro-batches (drawn): 33 and 27 units",
            get=f"{mobius:g} and {spipe:g}",
            evidence=Evidence.COMPUTED,
        ),
        Claim(
            where="figure 3",
            says="the step of mixed precision, line by line",
            get="memory traffic of its lines; our step is one sweep (next tables)",
            evidence=Evidence.FITTED,
        ),
        Claim(
            where="figure 4",
            says="CPU and GPU time of Mobius, by function (drawn, no numbers in the text)",
            get="the two parts of every run below; by function not reproduced",
            evidence=Evidence.FITTED,
        ),
        Claim(
            where="figures 5, 6, 7; section 3",
            says="decoupled passes, fine backward stages, early checkpoints, CPU steps by stage",
            get="scheme spipe, passes decouple-backward and refine-backward; all run with exact"
            " results",
            evidence=Evidence.TESTED,
        ),
        Claim(
            where="section 2.3",
            says="optimizer states are 8 times the parameters",
            get="12 bytes beside 16-bit weights of 2, or 8 without the master copy",
            evidence=Evidence.COMPUTED,
        ),
    )


def _setting() -> tuple[Claim, ...]:
    sizes = ", ".join(
        f"{model.num_parameters / 1e9:.1f}"
        for name, model in MODELS.items()
        if name.startswith("spipe-")
    )
    beds = "; ".join(
        f"{bed.gpu}: {bed.dram_bandwidth / 1e9:.0f} GB/s of DRAM in {bed.numa_domains} domains"
        for bed in TEST_BEDS.values()
    )
    return (
        Claim(
            where="table 1",
            says="two clusters of eight nodes",
            get=f"as clusters of the simulator ({beds})",
            evidence=Evidence.COMPUTED,
        ),
        Claim(
            where="table 2",
            says="models of 10, 19, 30, 40, 52, 69, 88 and 110 billion parameters",
            get=f"{sizes}",
            evidence=Evidence.COMPUTED,
        ),
    )


def _comparison() -> tuple[Claim, ...]:
    errors = ", ".join(
        f"{name} {100 * mean_error(name):.1f} %"
        for name in ("Mobius", "Megatron", "SPipe", "DeepSpeed")
    )
    tails = ", ".join(
        f"{name} {100 * mean_error(name, 'tail_error'):.1f} %"
        for name in ("Mobius", "Megatron", "SPipe")
    )
    rows = [
        Claim(
            where="figure 9",
            says="56 iteration times on Cluster V100 (the artifact's file)",
            get=f"mean errors: {errors}; of the CPU step alone: {tails}",
            evidence=Evidence.FITTED,
        ),
    ]
    for (cluster, over), printed in PAPER_SPEEDUPS.items():
        rows.append(
            Claim(
                where=f"abstract, section 5.2, figure {9 if cluster == 'v100' else 10}",
                says=f"{printed:.2f} over {over}, {'V100' if cluster == 'v100' else 'RTX 3090'}",
                get=f"{simulated_speedup(over, cluster):.2f}",
                evidence=Evidence.FITTED if cluster == "v100" else Evidence.SIMULATED,
            )
        )
    peaks = ", ".join(f"{100 * usage.peak_share:.0f} %" for usage in FIGURE_11.values())
    rows.append(
        Claim(
            where="figure 11",
            says=f"peak memory of SPipe, Mobius, Megatron: {peaks}",
            get=", ".join(f"{100 * peak_share(name):.0f} %" for name in FIGURE_11),
            evidence=Evidence.SIMULATED,
        )
    )
    return tuple(rows)


def _batches() -> tuple[Claim, ...]:
    rows = []
    names = {12: "section 5.3, figures 12, 13", 14: "section 5.3, figure 14"}
    kinds = {"total": "speed-up", "gpu": "GPU speed-up", "cpu": "CPU step's speed-up"}
    for figure, sizes in PAPER.items():
        for index, (what, kind) in enumerate(kinds.items()):
            rows.append(
                Claim(
                    where=names[figure],
                    says=f"{kind} over Mobius: "
                    + ", ".join(f"{values[index]:.2f}" for values in sizes.values()),
                    get=", ".join(f"{average(figure, size, what):.2f}" for size in sizes),
                    evidence=Evidence.FITTED if figure == 12 else Evidence.SIMULATED,
                )
            )
    return tuple(rows)


def _features() -> tuple[Claim, ...]:
    gpu = ", ".join(f"{gpu_s:.2f}" for gpu_s, _ in ablations())
    stages = "; ".join(
        f"{billions}B, {mini} sequences: {few:.1f} s with 2, {many:.1f} s with 6"
        for billions, mini, few, many in stage_counts()
    )
    return (
        Claim(
            where="section 5.4, figure 15",
            says="GPU time by feature: " + ", ".join(f"{one.gpu_s:.2f}" for one in ABLATIONS),
            get=gpu,
            evidence=Evidence.SIMULATED,
        ),
        Claim(
            where="section 5.5, figure 16",
            says="more backward stages help with small batches, fewer with large ones (drawn)",
            get=stages,
            evidence=Evidence.SIMULATED,
        ),
        Claim(
            where="section 5.6, figure 17",
            says="2.10, 1.66 and 1.20 times slower than systems that keep all, up to 7.8B",
            get="the shapes of these four models are not printed",
            evidence=Evidence.MISSING,
        ),
        Claim(
            where="section 5.7, figure 18",
            says="a rollback costs 8 to 53 % of an iteration, by batch",
            get=_rollbacks(),
            evidence=Evidence.CPU,
        ),
        Claim(
            where="section 5.7",
            says="20 rollbacks in 4,500 iterations of 10B from a scale of 2^32, in the first 11",
            get=f"{_skipped()} of a small model's first {len(rollback.recorded()['fp16'])} attempts"
            " from the same scale",
            evidence=Evidence.CPU,
        ),
    )


def _rollbacks() -> str:
    """Returns the overheads of skipped attempts, of both ways."""
    found = []
    for row in rollback.recorded()["rows"]:
        share = rollback.overheads(row).get("skip")
        if share is not None:
            name = rollback.WAYS[row["way"]]
            found.append(f"{name}, {row['micro_batches']} micro-batches: {100 * share:.1f} %")
    return "; ".join(found)


def _skipped() -> int:
    return sum(decision == "skip" for decision in rollback.recorded()["fp16"])
