"""2BP's numbers beside ours (Rae, Lee, Richings 2024).

The bubble ratios of table 1, measured gains that the text states, figure 5, and what 2BP gives on
schemes that the paper does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from bench.papers.page import PaperTable
from penstock.planner.build import ScheduleRequest, build_schedule
from penstock.planner.cost.analytic import analytic_costs
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.memory.orders import peak_bytes
from penstock.planner.orders.timing import seconds_of
from penstock.planner.passes import PASSES, PassContext
from penstock.planner.passes.dispatch import makespan_s
from penstock.planner.schedule import Schedule, lower
from penstock.planner.schemes import RecomputeMode
from penstock.planner.simulate import simulate
from penstock.protocol.plan.resources import PlanFacts

_PLAIN_2BP = ("split-backward", "fill-bubbles", "concatenate")


def tables() -> tuple[PaperTable, ...]:
    """Returns table 1, measured gains, figure 5 and other schemes."""
    return (table_1(), measured_gains(), figure_5(), other_schemes())


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


def _schedule(
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


def _run(names: tuple[str, ...], schedule: Schedule, context: PassContext) -> Schedule:
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
            schedule = _schedule(formula.scheme, n, formula.micro_batches(n), [1.0] * n)
            context = _unit_context(schedule)
            split = _run(_PLAIN_2BP, schedule, context)
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


def _bubble(schedule: Schedule, context: PassContext) -> Fraction:
    seconds = seconds_of(PlanFacts.of(schedule.layout, schedule.orders), context.costs)
    busy = sum(Fraction(seconds(i)) for order in schedule.orders for i in order)
    return 1 - busy / (schedule.layout.num_devices * Fraction(makespan_s(schedule, context)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gain:
    """A measured gain that the text states."""

    where: str
    gpu: str
    model: str
    devices: int
    scheme: str
    paper: float
    sequence_length: int
    micro_batch: int

    @property
    def micro_batches(self) -> int:
        """How many micro-batches the gain was measured with: N, or 2N."""
        return self.devices * (2 if self.scheme == "1f1b-2" else 1)


def _bert(devices: int, scheme: str, paper: float) -> _Gain:
    return _Gain(
        where="figure 6",
        gpu="V100-16",
        model="bert-large",
        devices=devices,
        scheme=scheme,
        paper=paper,
        sequence_length=512,
        micro_batch=2,
    )


_GAINS = (
    _Gain(
        where="figure 3",
        gpu="A100-40",
        model="llama2-7b",
        devices=4,
        scheme="1f1b",
        paper=1.70,
        sequence_length=1024,
        micro_batch=1,
    ),
    _Gain(
        where="figure 3",
        gpu="A100-40",
        model="bert-large",
        devices=4,
        scheme="1f1b",
        paper=1.26,
        sequence_length=512,
        micro_batch=2,
    ),
    _bert(4, "1f1b", 1.21),
    _bert(8, "1f1b", 1.20),
    _bert(16, "1f1b", 1.18),
    _bert(4, "1f1b-2", 1.15),
    _bert(8, "1f1b-2", 1.14),
    _bert(16, "1f1b-2", 1.11),
)


def measured_gains() -> PaperTable:
    """Returns measured gains beside simulated ones."""
    formulas: Mapping[str, _Formula] = MappingProxyType({f.scheme: f for f in _FORMULAS})
    rows: list[tuple[str, ...]] = []
    for gain in _GAINS:
        analytic = analytic_costs(
            gain.gpu,
            gain.model,
            sequence_length=gain.sequence_length,
            micro_batch=gain.micro_batch,
            offloaded=False,
            flash=False,
            devices_per_node=4,
        )
        costs, cluster = analytic.costs, analytic.cluster
        work = [block.forward_s for block in costs.blocks]
        schedule = _schedule(gain.scheme, gain.devices, gain.micro_batches, work)
        hop_s = max(b.output_bytes for b in costs.blocks) / cluster.peer_bandwidth
        context = PassContext(costs=costs, cluster=cluster, hop_s=hop_s + cluster.latency_s)
        split = _run(_PLAIN_2BP, schedule, context)
        seconds = [simulate(lower(s), costs, cluster).pipeline_s for s in (schedule, split)]
        formula = formulas[gain.scheme]
        n = gain.devices
        ideal = (1 - formula.split_bubble(n)) / (1 - formula.bubble(n))
        rows.append(
            (
                f"{gain.model}, {gain.gpu}",
                gain.where,
                str(n),
                formula.name,
                f"{gain.paper:.2f}",
                f"{float(ideal):.2f}",
                f"{seconds[0] / seconds[1]:.2f}",
            )
        )
    return PaperTable(
        title="2BP: measured gains",
        text=(
            "Throughput with 2BP over throughput without. *Table 1*: the paper's own theory."
            " *Ours*: simulated with analytic costs, nothing fitted; Transformer-7b is taken to be"
            " LLaMA2-7B, the BERT-like model of figure 6 to be BERT-Large (24 layers instead of"
            " 32), 512 tokens. With 4 equal stages, as many micro-batches and free transfers, no p1"
            " and p2 can gain more than 7 (f + p1 + p2) / (4 (f + p1 + p2) + 3 f), which is 1.40"
            " with a backward of two forwards. A gain of 1.70 would take a backward of 24 forwards:"
            " it is no effect of the schedule alone, and is not reached here. The text does not"
            " say which schedule the 1.26 of BERT-Large belongs to; 1F1B-1 is assumed."
        ),
        columns=("model", "source", "N", "schedule", "paper", "table 1", "ours"),
        rows=tuple(rows),
    )


_DEFERRED = 0.5


def figure_5() -> PaperTable:
    """Returns what 2BP takes of memory, and three ways to take it back."""
    schedule = _schedule("1f1b-2", 4, 8, [1.0] * 4)
    context = _unit_context(schedule, deferred=_DEFERRED)
    limited = _unit_context(schedule, deferred=_DEFERRED, memory=4.0)
    plain = _run(_PLAIN_2BP, schedule, context)
    ways = (
        ("unsplit", schedule),
        ("2BP of the paper", plain),
        ("flush half-way (figure 5)", _run(("flush-half",), plain, context)),
        ("limit-deferred, 4 activations", _run(("limit-deferred",), plain, limited)),
        ("2bp", _run(("2bp",), schedule, context)),
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
            schedule = _schedule(scheme, 8, 16, [1.0] * 48, mode)
            context = _unit_context(schedule)
            before_s = makespan_s(schedule, context)
            after_s = makespan_s(_run(("2bp",), schedule, context), context)
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
