"""Mario's passes on unit costs: figure 2 and other shapes, activation memory of table 1."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from bench.papers.page import PaperTable
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.orders.search import Effort, gap
from penstock.planner.passes import PASSES, PassContext
from penstock.planner.passes.dispatch import makespan_s
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.memory_order import peak_bytes
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.simulate import simulate

_STEPS = ("apply-checkpoint", "overlap-recompute", "remove-redundancy", "prepose-forward")


def _unit_context(schedule: Schedule, backward: float = 2.0) -> PassContext:
    """Returns unit costs: a device's share of the model takes 1 in FORWARD and RECOMPUTE, and keeps
    1 byte.
    """
    share = schedule.layout.num_devices / schedule.layout.num_blocks
    block = BlockCost(
        forward_s=share,
        recompute_s=share,
        backward_input_s=share * backward / 2,
        backward_weight_s=share * backward / 2,
        activation_bytes=share,
    )
    return PassContext(
        costs=Costs(blocks=(block,) * schedule.layout.num_blocks),
        cluster=Cluster(devices_per_node=schedule.layout.num_devices),
    )


def _unit_schedule(scheme: str, devices: int, micro_batches: int) -> Schedule:
    request = ScheduleRequest(
        scheme=scheme, num_devices=devices, num_microbatches=micro_batches, recompute="none"
    )
    return build_schedule(request, [1.0] * (4 * devices))


def _after_each_step(schedule: Schedule, context: PassContext) -> list[Schedule]:
    steps = [schedule]
    for name in _STEPS:
        steps.append(PASSES[name].run(steps[-1], context))
    return steps


def _units(value: float) -> str:
    return f"{value:.4g}"


def figure_2() -> PaperTable:
    """Returns the four steps, simulated, beside the best order of the same instructions."""
    schedule = _unit_schedule("1f1b", 4, 4)
    context = _unit_context(schedule)
    cells: list[tuple[str, ...]] = []
    names = ("no checkpointing", *_STEPS)
    for name, paper, step in zip(
        names, (21, 28, 25, 23, 22), _after_each_step(schedule, context), strict=True
    ):
        simulated = simulate(lower(step), context.costs, context.cluster).pipeline_s
        best = gap(step, context.costs, effort=Effort(max_states=2000, time_limit_s=2.0)).best
        proof = _units(best.makespan_s) if best.optimal else f">= {best.lower_bound_s:.4g}"
        cells.append((name, str(paper), _units(simulated), proof))
    return PaperTable(
        title="Mario: the four steps of figure 2",
        text=(
            "1F1B, 4 stages, 4 micro-batches; units of a forward, backward 2, recomputation 1. In"
            " step 1 a recomputation waits for the gradient of its backward; from step 2 on it does"
            " not. *Best order*: the least that any order of the same instructions on the same"
            " devices takes, by search (micro-batches of a stage stay in order). The search may let"
            " a device hold several recomputed micro-batches; the passes hold one."
        ),
        columns=("after", "paper", "ours (simulated)", "best order"),
        rows=tuple(cells),
    )


def other_schemes() -> PaperTable:
    """Returns the four steps on schemes of every shape, and together with 2BP."""
    rows: list[tuple[str, ...]] = []
    for scheme in ("gpipe", "1f1b", "interleaved", "chimera", "hanayo", "zb-h1", "zb-v"):
        for backward in (2.0, 1.6):
            schedule = _unit_schedule(scheme, 8, 8)
            context = _unit_context(schedule, backward)
            seconds = [makespan_s(s, context) for s in _after_each_step(schedule, context)]
            both = PASSES["mario"].run(PASSES["2bp"].run(schedule, context), context)
            cells = map(_units, (*seconds, makespan_s(both, context)))
            rows.append((scheme, f"{backward:g}", *cells))
    return PaperTable(
        title="Mario: the four steps on other shapes",
        text=(
            "8 devices, 8 micro-batches, in units of a device's forward; backward 2, and 1.6, the"
            " ratio that section 3.2 quotes. *With 2BP*: backwards split first, then checkpointed:"
            " what the paper leaves to future work. Weight gradients and recomputations then share"
            " the bubbles; checkpointed training can be faster than unsplit training without."
        ),
        columns=("scheme", "backward", "base", "1", "2", "3", "4", "with 2BP"),
        rows=tuple(rows),
    )


_TABLE_1: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "gpipe": ("N", "1"),
        "1f1b": ("[1, D]", "1"),
        "interleaved": ("[D + 1, 3 D - 2] / 2", "1/2"),
        "chimera": ("[D / 2 + 1, D]", "1"),
        "hanayo": ("[(D + 1) / 2, D]", "1/2"),
    }
)


def table_1() -> PaperTable:
    """Returns the activation memory, without and with Mario."""
    rows: list[tuple[str, ...]] = []
    for scheme, (base, with_mario) in _TABLE_1.items():
        for devices in (4, 8):
            schedule = _unit_schedule(scheme, devices, 2 * devices)
            context = _unit_context(schedule)
            checkpointed = PASSES["apply-checkpoint"].run(schedule, context)
            overlapped = PASSES["mario"].run(schedule, context)
            ours = [_range(one, context) for one in (schedule, checkpointed, overlapped)]
            rows.append((scheme, str(devices), base, ours[0], with_mario, ours[1], ours[2]))
    return PaperTable(
        title="Mario: activation memory of table 1",
        text=(
            "Least and most of all devices, in units of the activations of one micro-batch on one"
            " device (M_theta), D devices and N = 2 D micro-batches. Input checkpoints are left"
            " out, as in the paper. Interleaved 1F1B holds half a unit more than the paper's"
            " maximum: the forward that follows the warm-up is alive when the first backward"
            " starts."
        ),
        columns=("scheme", "D", "paper", "ours", "paper, Mario", "ours, pass 1", "ours, all"),
        rows=tuple(rows),
    )


def _range(schedule: Schedule, context: PassContext) -> str:
    peaks = peak_bytes(schedule.layout, schedule.residency, context.costs, schedule.orders)
    least, most = min(peaks), max(peaks)
    return _units(least) if least == most else f"[{least:g}, {most:g}]"


def figure_5() -> str:
    """Returns the bubbles of the three shapes without checkpointing, in words."""
    shares: list[str] = []
    for shape, scheme in (("V", "1f1b"), ("X", "chimera"), ("W", "interleaved")):
        schedule = _unit_schedule(scheme, 4, 8)
        context = _unit_context(schedule)
        ratio = simulate(lower(schedule), context.costs, context.cluster).bubble_ratio
        shares.append(f"{shape} {ratio:.0%}")
    return f"bubbles of 4 devices and 8 micro-batches: {', '.join(shares)}; `--png` draws them"
