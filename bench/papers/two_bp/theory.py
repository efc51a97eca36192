"""2BP's numbers beside ours (Rae, Lee, Richings 2024).

The bubble ratios of table 1, measured gains that the text states, figure 5, and what 2BP gives on
schemes that the paper does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from bench.papers.page import PaperTable
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.passes import PASSES, PassContext
from penstock.planner.passes.dispatch import makespan_s
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.memory_order import peak_bytes
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schedule.timing import seconds_of
from penstock.planner.schemes import RecomputeMode
from penstock.protocol.plan.resources import PlanFacts

PLAIN_2BP = ("split-backward", "fill-bubbles", "concatenate")


def _unit_context(
    schedule: Schedule, *, deferred: float = 0.0, memory: float | None = None
) -> PassContext:
    """Returns unit costs: a device's share of the model takes 1 in each of forward, p1 and p2, and
    keeps 1 byte.
    """
    share = schedule.layout.num_devices / schedule.layout.num_blocks
    block = BlockCost(
        forward_s=share,
        recompute_s=share,
        backward_input_s=share,
        backward_weight_s=share,
        activation_bytes=share,
        deferred_bytes=share * deferred,
    )
    return PassContext(
        costs=Costs(blocks=(block,) * schedule.layout.num_blocks),
        cluster=Cluster(devices_per_node=schedule.layout.num_devices),
        memory_limit_bytes=memory,
    )


def make_schedule(
    scheme: str,
    devices: int,
    micro_batches: int,
    block_work: list[float],
    recompute: RecomputeMode = "none",
) -> Schedule:
    request = ScheduleRequest(
        scheme=scheme, num_devices=devices, num_microbatches=micro_batches, recompute=recompute
    )
    return build_schedule(request, block_work)


def run_passes(names: tuple[str, ...], schedule: Schedule, context: PassContext) -> Schedule:
    for name in names:
        schedule = PASSES[name].run(schedule, context)
    return schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class _Formula:
    """A row of table 1, for n devices."""

    name: str
    scheme: str
    micro_batches: Callable[[int], int]
    bubble: Callable[[int], Fraction]
    split_bubble: Callable[[int], Fraction]


_FORMULAS = (
    _Formula(
        name="Naive",
        scheme="naive",
        micro_batches=lambda n: 1,
        bubble=lambda n: Fraction(n - 1, n),
        split_bubble=lambda n: Fraction(2 * (n - 1), 2 * n + 1),
    ),
    _Formula(
        name="GPipe",
        scheme="gpipe",
        micro_batches=lambda n: n,
        bubble=lambda n: Fraction(n - 1, 2 * n - 1),
        split_bubble=lambda n: Fraction(2 * (n - 1), 2 * (n - 1) + 3 * n),
    ),
    _Formula(
        name="1F1B-1",
        scheme="1f1b",
        micro_batches=lambda n: n,
        bubble=lambda n: Fraction(n - 1, 2 * n - 1),
        split_bubble=lambda n: Fraction(n - 1, n - 1 + 3 * n),
    ),
    _Formula(
        name="1F1B-2",
        scheme="1f1b-2",
        micro_batches=lambda n: 2 * n,
        bubble=lambda n: Fraction(n - 1, 3 * n - 1),
        split_bubble=lambda n: Fraction(n - 1, n - 1 + 6 * n),
    ),
)


def table_1() -> PaperTable:
    """Returns bubble ratios and theoretical gains."""
    rows: list[tuple[str, ...]] = []
    for formula in _FORMULAS:
        for n in (2, 4, 8, 16):
            schedule = make_schedule(formula.scheme, n, formula.micro_batches(n), [1.0] * n)
            context = _unit_context(schedule)
            split = run_passes(PLAIN_2BP, schedule, context)
            bubbles = (
                formula.bubble(n),
                _bubble(schedule, context),
                formula.split_bubble(n),
                _bubble(split, context),
            )
            gains = ((1 - bubbles[2]) / (1 - bubbles[0]), (1 - bubbles[3]) / (1 - bubbles[1]))
            cells = (*map(str, bubbles), *(f"{float(gain):.3f}" for gain in gains))
            rows.append((formula.name, str(n), *cells))
    return PaperTable(
        title="2BP: bubble ratios of table 1",
        text=(
            "N devices; forward, p1 and p2 take equal times; idle time of all devices over their"
            " total time, as exact fractions. The tests compare all N from 2 to 16."
        ),
        columns=("schedule", "N", "paper", "ours", "2BP, paper", "ours", "gain, paper", "ours"),
        rows=tuple(rows),
    )


def exact_rows() -> tuple[int, int]:
    """Returns how many rows of table 1 are exactly ours, and how many there are."""
    rows = table_1().rows
    return sum(row[2] == row[3] and row[4] == row[5] for row in rows), len(rows)


def _bubble(schedule: Schedule, context: PassContext) -> Fraction:
    seconds = seconds_of(PlanFacts.of(schedule.layout, schedule.orders), context.costs)
    busy = sum(Fraction(seconds(i)) for order in schedule.orders for i in order)
    return 1 - busy / (schedule.layout.num_devices * Fraction(makespan_s(schedule, context)))


_DEFERRED = 0.5


def figure_5() -> PaperTable:
    """Returns what 2BP takes of memory, and three ways to take it back."""
    schedule = make_schedule("1f1b-2", 4, 8, [1.0] * 4)
    context = _unit_context(schedule, deferred=_DEFERRED)
    limited = _unit_context(schedule, deferred=_DEFERRED, memory=4.0)
    plain = run_passes(PLAIN_2BP, schedule, context)
    ways = (
        ("unsplit", schedule),
        ("2BP of the paper", plain),
        ("flush half-way (figure 5)", run_passes(("flush-half",), plain, context)),
        ("limit-deferred, 4 activations", run_passes(("limit-deferred",), plain, limited)),
        ("2bp", run_passes(("2bp",), schedule, context)),
    )
    rows: list[tuple[str, ...]] = []
    for name, way in ways:
        peaks = peak_bytes(way.layout, way.residency, context.costs, way.orders)
        rows.append((name, f"{makespan_s(way, context):g}", *(f"{peak:g}" for peak in peaks)))
    return PaperTable(
        title="2BP: memory of 1F1B-2, and what takes it back (figure 5)",
        text=(
            "4 devices, 8 micro-batches, f = p1 = p2 = 1; memory of each device in activations of a"
            " micro-batch. Assumed: what stays between p1 and p2 is half of them. Half-way, a"
            " device takes all p2 that are left after half of its p1. limit-deferred takes them as"
            " late as memory allows, or earlier where the device waits; 2bp does the same within"
            " the memory of the unsplit schedule where that takes no longer."
        ),
        columns=("schedule", "makespan", "device 0", "1", "2", "3"),
        rows=tuple(rows),
    )


def figure_5_peaks() -> dict[str, float]:
    """Returns the activations that the fullest device holds, by the way of :func:`figure_5`."""
    return {row[0]: max(map(float, row[2:])) for row in figure_5().rows}


def other_schemes() -> PaperTable:
    """Returns 2BP on schemes beyond the paper."""
    rows: list[tuple[str, ...]] = []
    for scheme in (
        "interleaved",
        "chimera",
        "hanayo",
        "zb-h1",
        "zb-v",
        "bpipe",
        "mobius",
        "megatron-offload",
        "spipe",
    ):
        modes: tuple[RecomputeMode, ...] = ("full",) if scheme == "spipe" else ("none", "full")
        for mode in modes if scheme != "bpipe" else ("none",):
            schedule = make_schedule(scheme, 8, 16, [1.0] * 48, mode)
            context = _unit_context(schedule)
            before_s = makespan_s(schedule, context)
            after_s = makespan_s(run_passes(("2bp",), schedule, context), context)
            gain = before_s / after_s
            rows.append((scheme, mode, f"{before_s:.4g}", f"{after_s:.4g}", f"{gain:.3f}"))
    return PaperTable(
        title="2BP on other schemes",
        text=(
            "8 devices, 16 micro-batches, in units of a device's forward (p1 and p2 as long, and"
            " recomputation where it is full); compute only. Schemes that split backwards"
            " themselves are compared with their own order. With streamed weights (Mobius,"
            " Megatron-offload, SPipe) p2 may run after the weights are gone."
        ),
        columns=("scheme", "recompute", "unsplit", "2bp", "gain"),
        rows=tuple(rows),
    )
