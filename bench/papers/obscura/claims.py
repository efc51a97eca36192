"""Every figure, table and numbered claim of Obscura's text: what it says, and what we get.

Numbers are computed when the page is made, with the constants of
:mod:`bench.papers.obscura.testbed`, or read from recorded runs (:mod:`bench.papers.obscura.runs`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench.papers.obscura.evaluation import evaluation_claims, real_run_claims
from bench.papers.obscura.quantities import case, gain, gigabytes
from bench.papers.obscura.testbed import (
    PaperCase,
    dapple,
    dapple_plus,
    ohp_cmb,
    our_obscura,
    ours,
    paper_obscura,
)
from bench.papers.obscura.units import (
    FIGURE_5,
    converted_bubbles,
    overhead,
    unit_context,
    unit_schedule,
)
from bench.papers.page import Claim, Evidence, PaperTable, claims_table
from penstock.planner.passes.obscura.shape import bubbles, stage_orders
from penstock.planner.schedule.timing import order_times

TABLE_1 = {
    "Recomp-Non": (48.01, 42.62, 36.72, 30.92),
    "Recomp-1": (34.40, 32.25),
    "Strawman-1": (46.18, 39.58),
}
"""GB by stage, as table 1 has them; of the last two the stages that differ from the first."""


def claims() -> PaperTable:
    """Returns the table of all claims."""
    found = [*_introduction(), *_motivation(), *_design(), *evaluation_claims(), *real_run_claims()]
    return claims_table(
        "Obscura",
        found,
        "Simulated rows: A100 and A800 data sheets, sequences of 4096, micro-batches of 1; one"
        " constant, the size of activations, is fitted to the 106 GB of section 9.3 and enters all"
        " rows with memory. The paper's figures show more than its text says; their bars are not"
        " read off. No GPU was used.",
    )


def _introduction() -> Iterator[Claim]:
    large = [case(family, size) for family in ("llama2", "gpt3") for size in ("18B", "23B", "28B")]
    best = max(gain(paper_obscura(one), dapple_plus(one)) for one in large)
    own = max(gain(ours(one), dapple_plus(one)) for one in large)
    yield Claim(
        where="Abstract; contributions",
        says="up to 1.33 x (1.32 x) of widely used recomputation",
        get=f"{1 + best / 100:.2f} x; with split backwards (ours) {1 + own / 100:.2f} x",
        evidence=Evidence.SIMULATED,
    )
    peaks = gigabytes(dapple(case("llama2", "13B")))
    eighteen = gigabytes(dapple(case("llama2", "18B")))
    yield Claim(
        where="Section 1; figure 3",
        says="13B on 8 stages: stage 0 has 35 GB (section 1), 24 GB (figure 3) more than stage 7;"
        " 18B exceeds 80 GB in stage 0",
        get=f"{peaks[0] - peaks[7]:.0f} GB (stage 7 has the head: {peaks[0] - peaks[6]:.0f} GB to"
        f" stage 6); 18B: {eighteen[0]:.0f} GB",
        evidence=Evidence.FITTED,
    )
    yield Claim(
        where="Section 1",
        says="13B needs about 400 GB, six A100",
        get=f"8 stages together {sum(peaks):.0f} GB with 8 micro-batches in flight",
        evidence=Evidence.FITTED,
    )
    yield Claim(
        where="Figures 1, 2, 4, 6, 8, 9",
        says="time lines of 1F1B, the strawman, Obscura; bubbles; transformations",
        get="made by the passes identify, migrate-forwards, relax-dependencies, refine-migration"
        " (tests/planner/test_obscura_migrate.py); drawn by penstock plan",
        evidence=Evidence.TESTED,
    )


def _motivation() -> Iterator[Claim]:
    context = unit_context(4)
    shares = [
        f"{name} {100 * overhead(last, 12, context, early=name[0] == 'S'):.1f}"
        for name, (_, last) in FIGURE_5.items()
    ]
    yield Claim(
        where="Figure 5 (a, b)",
        says=", ".join(f"{name} {percent}" for name, (percent, _) in FIGURE_5.items()) + " %",
        get=", ".join(shares) + " % (12 micro-batches chosen; the paper does not say)",
        evidence=Evidence.FITTED,
    )
    plain = unit_schedule(8, 32)
    times = order_times(plain.layout, plain.orders, unit_context(8).costs)
    found = [bubbles(plain, times, s) for s in range(8)]
    counted = all(
        (b.forward_s, b.backward_s) == (2.0 * (7 - s), 7.0 - s) for s, b in enumerate(found)
    )
    later = all(
        converted_bubbles(plain, unit_context(8), s) == min(31, 3 * (7 - s)) for s in range(8)
    )
    yield Claim(
        where="Sections 3.1, 5.3",
        says="stage s has 2 (p - s - 1) forward, p - s - 1 backward bubbles; after migration up to"
        " min(m - 1, 3 (p - s - 1))",
        get=f"{'the same' if counted else 'others'}; after it"
        f" {'the same' if later else 'others'}, 8 stages, 32 micro-batches",
        evidence=Evidence.COMPUTED,
    )
    yield Claim(
        where="Section 3.1",
        says="stage 0's forward bubbles are 0.50 s, its backward bubbles 0.37 s",
        get="model, batch and machine of figure 5 are not given; in units 6 and 3",
        evidence=Evidence.MISSING,
    )
    yield Claim(
        where="Figure 5 (c)",
        says="with MLP recomputation much of the backward bubbles is unused",
        get=f"r = 0.5 instead of 1: Strawman-0 leaves {_unused(0.5):.0f} instead of"
        f" {_unused(1.0):.0f} units of 12 micro-batches idle in stage 0",
        evidence=Evidence.COMPUTED,
    )
    yield _table_1()


def _unused(recompute_s: float) -> float:
    """Returns the backward bubbles of stage 0 in Strawman-0."""
    from bench.papers.obscura.units import recomputing
    from penstock.planner.passes.obscura.migrate import migrate_forwards

    context = unit_context(4, recompute_s)
    schedule = migrate_forwards(recomputing(unit_schedule(4, 12), 0), context)
    times = order_times(schedule.layout, schedule.orders, context.costs)
    return bubbles(schedule, times, 0).backward_s


def _table_1() -> Claim:
    """Fits sizes of activations to the first two pipelines, and predicts the third."""
    from bench.papers.obscura.units import recomputing
    from penstock.planner.passes.obscura.migrate import migrate_forwards

    none, some, early = TABLE_1.values()
    micro_batch = (none[0] - none[3]) / 3.0
    schedule = migrate_forwards(recomputing(unit_schedule(4, 12), 1), unit_context(4))
    cells = []
    for stage, order in enumerate(stage_orders(schedule)[:2]):
        always = none[stage] - (4 - stage) * micro_batch
        kept = (some[stage] - always) / (4 - stage)
        found = always + order.in_flight * kept
        cells.append(f"{found:.1f} ({100 * (found / early[stage] - 1):+.1f} %)")
    return Claim(
        where="Table 1",
        says=f"Strawman-1: {early[0]} and {early[1]} GB in stages 0 and 1, where Recomp-1 has"
        f" {some[0]} and {some[1]}",
        get=f"{' and '.join(cells)}, from the table's other rows and our migrated forwards",
        evidence=Evidence.FITTED,
    )


def _design() -> Iterator[Claim]:
    one = case("llama2", "28B")
    none, cmb = dapple(one), ohp_cmb(one)
    layer = one.costs.blocks[1] + one.costs.blocks[2]
    drop = one.operators("cmb").drop
    yield Claim(
        where="Section 8",
        says="CMB saves about 40 % of activations for 2-3 % more computation",
        get=f"{100 * layer.drop_bytes(drop) / layer.activation_bytes:.0f} % for"
        f" {100 * layer.drop_seconds(drop) / (layer.forward_s + layer.backward_s):.1f} %"
        f" ({100 * (cmb.seconds / none.seconds - 1):.1f} % more time)",
        evidence=Evidence.SIMULATED,
    )
    yield Claim(
        where="Figure 7; section 4",
        says="planner and runtime; the planner's overhead is negligible",
        get=f"all passes and the integer program for 28B take {_planning_s(one):.1f} s here",
        evidence=Evidence.CPU,
    )
    yield Claim(
        where="Equations 1, 4 and 6; figure 10",
        says="memory with swaps; the integer program; three phases of swapping",
        get="solved for every swap design, lambda and beta; equal to brute force in tests"
        " (tests/planner/test_obscura_recompute.py)",
        evidence=Evidence.TESTED,
    )
    yield Claim(
        where="Equations 2, 3 and 5",
        says="execution time of a pipeline with adjusted stages",
        get="equal to the simulator to the last bit where recomputation waits for the gradient and"
        " nothing is swapped (tests/planner/test_obscura_recompute.py)",
        evidence=Evidence.TESTED,
    )
    yield Claim(
        where="Algorithm 1; section 7",
        says="layers move from adjusted stages to others until times balance",
        get="as printed it takes back its last move; we also keep the fastest partition (table of"
        " figure 16)",
        evidence=Evidence.SIMULATED,
    )
    yield Claim(
        where="Figure 11",
        says="more recomputation or more swapping: a trade-off",
        get=_trade_off(one),
        evidence=Evidence.SIMULATED,
    )


def _planning_s(one: PaperCase) -> float:
    began_s = time.perf_counter()
    our_obscura.__wrapped__(one)
    return time.perf_counter() - began_s


def _trade_off(one: PaperCase) -> str:
    own, any_number = gain(our_obscura(one), dapple_plus(one)), gain(ours(one), dapple_plus(one))
    return (
        f"28B: {own:+.1f} % with 2 ... p - k - 2 blocks evicted, {any_number:+.1f} % with any"
        " number and split backwards"
    )
