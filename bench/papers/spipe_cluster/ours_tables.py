"""Figure 9's workloads with our plans: what each part brings, and both sides with a fused step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from types import MappingProxyType

from bench.papers.page import PaperTable
from bench.papers.spipe_cluster.measured import Workload, measured
from bench.papers.spipe_cluster.ours import (
    CANDIDATES,
    FULL,
    Found,
    analytic_ours,
    full_plan,
    iteration_s,
    recorded,
)
from bench.papers.spipe_cluster.systems import SYSTEMS, predict
from bench.papers.spipe_cluster.testbed import V100, analytic, constants, with_blocking_transfers
from penstock.planner.cost.cluster import IN_PLACE, PREVIEW_SETTLE, Cluster, OptimizerModel


def ours_tables() -> tuple[PaperTable, ...]:
    """Returns all tables of ours."""
    return parts_table(), same_step_table(blocking=True), same_step_table(blocking=False)


@lru_cache(maxsize=1)
def parts() -> Mapping[str, Mapping[Workload, float]]:
    """Returns simulated seconds of every workload by what is added to SPipe; transfers block."""
    paper = SYSTEMS["SPipe"].optimizer()

    def spipe(workload: Workload) -> float:
        return predict(SYSTEMS["SPipe"], workload).iteration_s

    def ours(
        optimizer: OptimizerModel, cluster: Callable[[Workload], Cluster]
    ) -> Callable[[Workload], float]:
        def seconds(workload: Workload) -> float:
            costs = with_blocking_transfers(analytic_ours(workload).costs)
            return iteration_s(full_plan(workload), costs, cluster(workload), optimizer)

        return seconds

    def bound_cluster(workload: Workload) -> Cluster:
        return analytic(workload, V100).cluster

    def free_cluster(workload: Workload) -> Cluster:
        return analytic_ours(workload).cluster

    fused = replace(paper, tail_bytes=IN_PLACE.tail_bytes)
    rows: dict[str, Callable[[Workload], float]] = {
        "SPipe": spipe,
        "our schedule, the paper's optimizer": ours(paper, bound_cluster),
        "the same, fused in place": ours(fused, bound_cluster),
        "the same, by all cores of the node": ours(IN_PLACE, free_cluster),
        "exact: preview, settle": ours(PREVIEW_SETTLE, free_cluster),
    }
    return MappingProxyType(
        {name: {workload: at(workload) for workload in measured()} for name, at in rows.items()}
    )


def mean_part(name: str) -> float:
    """Returns the mean speed-up over Mobius as it is, of all 16 workloads."""
    return fmean(
        predict(SYSTEMS["Mobius"], workload).iteration_s / seconds
        for workload, seconds in parts()[name].items()
    )


def parts_table() -> PaperTable:
    """Returns what each part brings with full recomputation."""
    example = next(w for w in measured() if (w.billions, w.sequence) == (19, 1024))
    rows = [
        (
            name,
            f"{seconds[example]:.2f}",
            f"{mean_part(name):.3f}",
            f"{fmean(parts()['SPipe'][w] / s for w, s in seconds.items()):.3f}",
        )
        for name, seconds in parts().items()
    ]
    kernels = {w: _kernels_s(w) for w in measured()}
    bound = fmean(predict(SYSTEMS["Mobius"], w).iteration_s / s for w, s in kernels.items())
    rows.append(
        (
            "bound: kernels alone, shared out equally",
            f"{kernels[example]:.2f}",
            f"{bound:.3f}",
            f"{fmean(parts()['SPipe'][w] / s for w, s in kernels.items()):.3f}",
        )
    )
    return PaperTable(
        title="SPipe: what our parts bring, everything recomputed",
        text=(
            "Simulated with the constants above, the paper's blocking transfers on all sides;"
            " seconds are 19B's at sequence 1024, speed-ups averages over all 16 workloads. *Over"
            " Mobius* is over Mobius as it is, with the paper's step after the last gradient. *Our"
            f" schedule*: SPipe's scheme with {', '.join(FULL)}. The paper's step moves"
            f" {constants().step_bytes:g} bytes a parameter, fused in place"
            f" {IN_PLACE.tail_bytes:g}; exact are a preview ({PREVIEW_SETTLE.tail_bytes:g}) and,"
            f" during the next forward, a settle ({PREVIEW_SETTLE.settle_bytes:g}). Its processes"
            " are bound to a quarter of a node each; our optimizer has all cores and channels."
        ),
        columns=("", "seconds", "over Mobius", "over SPipe"),
        rows=tuple(rows),
    )


def _kernels_s(workload: Workload) -> float:
    blocks = analytic_ours(workload).costs.blocks
    each = workload.num_microbatches / workload.num_devices
    return each * sum(b.forward_s + b.recompute_s + b.backward_s for b in blocks)


def found(*, blocking: bool) -> tuple[Found, ...]:
    """Returns the recorded plans of all workloads."""
    return tuple(one for one in recorded() if one.blocking is blocking)


def mean_best(*, blocking: bool) -> float:
    """Returns our mean speed-up over Mobius at its best, both with a fused step."""
    return fmean(one.mobius_s / one.best_s for one in found(blocking=blocking))


def mean_full_of_bound(*, blocking: bool) -> float:
    """Returns how near we come to kernels alone where everything is recomputed."""
    return fmean(one.kernels_full_s / one.full_s for one in found(blocking=blocking))


def mean_bound(what: str, *, blocking: bool) -> float:
    """Returns the mean of Mobius's seconds over a bound's, by the name of its field."""
    return fmean(one.mobius_s / getattr(one, what) for one in found(blocking=blocking))


def same_step_table(*, blocking: bool) -> PaperTable:
    """Returns all workloads with the same fused step and the same transfers on both sides."""
    rows = [_same_step_row(one) for one in found(blocking=blocking)]
    of = found(blocking=blocking)
    rows.append(
        (
            "mean",
            "",
            "",
            f"{fmean(one.mobius_s / one.spipe_s for one in of):.3f}",
            f"{fmean(one.mobius_s / one.full_s for one in of):.3f}",
            f"**{mean_best(blocking=blocking):.3f}**",
            "",
            f"{100 * fmean(one.recomputed for one in of):.0f} %",
            f"{100 * fmean(_again_share(one) for one in of):.0f} %",
            f"{100 * fmean(_idle_share(one) for one in of):.0f} %",
            "",
            "",
            f"{mean_bound('kernels_full_s', blocking=blocking):.3f}",
            f"{mean_bound('kernels_none_s', blocking=blocking):.3f}",
        )
    )
    kind = "blocking transfers" if blocking else "transfers that do not block"
    return PaperTable(
        title=f"SPipe: ours and theirs with the same fused step, {kind}",
        text=(
            "Speed-ups over Mobius at its best (two to four stages a device, cut by cost), all 16"
            " workloads, all simulated. Mobius and SPipe have a fused step in place, ours preview"
            f" and settle; on both sides {kind}"
            + ("" if blocking else ", and half a millisecond for each instruction")
            + f". *Full*: everything recomputed. *Best*: the fastest of {len(CANDIDATES)} plans"
            " with keep-or-swap within what a V100 32GB has for tensors (29.4 GB), and of"
            " *full*; *again* is the share of the forwards that it makes again, *host* what the"
            " fullest device has swapped there. Two parts of a step separate *best* from the bound"
            " without recomputation: seconds of the forwards made again, because the model's state"
            " leaves the node no memory for more, and *idle*, seconds in which a device"
            " waits for the pipeline or for a copy, or launches. The bounds are kernels alone,"
            " shared out equally, with everything recomputed and with nothing. Recorded by `python"
            " -m bench.papers.spipe_cluster.search`."
        ),
        columns=(
            "model",
            "sequence",
            "Mobius, s",
            "SPipe",
            "full",
            "best",
            "plan",
            "again",
            "made again, of the step",
            "idle, of the step",
            "host, GB",
            "peak, GB",
            "bound, full",
            "bound, none",
        ),
        rows=tuple(rows),
    )


def _again_share(one: Found) -> float:
    """Returns the share of the best plan's step that goes into forwards made again."""
    return one.recomputed * (one.kernels_full_s - one.kernels_none_s) / one.best_s


def _idle_share(one: Found) -> float:
    """Returns the share of the best plan's step in which a device runs no kernels."""
    return 1.0 - one.kernels_none_s / one.best_s - _again_share(one)


def _same_step_row(one: Found) -> tuple[str, ...]:
    return (
        f"{one.billions}B",
        str(one.sequence),
        f"{one.mobius_s:.1f}",
        f"{one.mobius_s / one.spipe_s:.3f}",
        f"{one.mobius_s / one.full_s:.3f}",
        f"{one.mobius_s / one.best_s:.3f}",
        one.best,
        f"{100 * one.recomputed:.0f} %",
        f"{100 * _again_share(one):.0f} %",
        f"{100 * _idle_share(one):.0f} %",
        f"{one.swapped_bytes / 1e9:.0f}",
        f"{one.peak_bytes / 1e9:.1f}",
        f"{one.mobius_s / one.kernels_full_s:.3f}",
        f"{one.mobius_s / one.kernels_none_s:.3f}",
    )
