"""Claims of Obscura's evaluation (section 9), simulated, and of real runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from bench.papers.obscura.quantities import case, gain, gains, gigabytes, small, stages
from bench.papers.obscura.runs import measured_peak, recorded, same_order
from bench.papers.obscura.testbed import (
    MEMORY_BYTES,
    PaperCase,
    SimulatedRun,
    ablation,
    bpipe,
    bpipe_that_fits,
    dapple,
    dapple_plus,
    ohp_cmb,
    our_obscura,
    ours,
    paper_obscura,
    strawman,
)
from bench.papers.page import Claim, Evidence
from penstock.planner.passes.obscura.shape import adjusted_stages
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schedule.timing import order_times
from penstock.protocol.plan.instructions import Backward, Forward, Recompute


def evaluation_claims() -> Iterator[Claim]:
    """Yields the claims of figures 12 to 16."""
    yield from _figure_12()
    yield from _figure_13()
    yield from _figure_14()
    yield from _figures_15_and_16()


def _figure_12() -> Iterator[Claim]:
    batches = (32, 64)
    stated = {
        "llama2": ("29-31 %", "22-27 %", "22 %"),
        "gpt3": ("32-33 %", "30-32 %", "30 %"),
    }
    for family, (middle, large, extreme) in stated.items():
        both = [case(family, size, b) for size in ("18B", "23B") for b in batches]
        for what, says, cases in (
            ("18B and 23B", middle, both),
            ("28B", large, [case(family, "28B", b) for b in batches]),
            ("28B, batch 64", extreme, [case(family, "28B", 64)]),
        ):
            yield Claim(
                where=f"Figure 12, {family} {what}",
                says=f"Obscura {says} over DAPPLE+",
                get=f"{gains(cases, paper_obscura)}; here {gains(cases, our_obscura)}; ours"
                f" {gains(cases, ours)}",
                evidence=Evidence.FITTED,
            )
    largest = [case("llama2", size) for size in ("23B", "28B")]
    yield Claim(
        where="Figure 12",
        says="BPipe +17 % for 23B and 28B, with MLP recomputation",
        get=f"{gains(largest, bpipe_that_fits)}"
        f" ({'fits' if bpipe_that_fits(largest[1]).fits else '28B does not fit: the head'})",
        evidence=Evidence.FITTED,
    )
    sizes = [case("llama2", size) for size in ("18B", "23B", "28B")]
    yield Claim(
        where="Figure 12",
        says="OHP-CMB trains 13B and 18B, not more; the strawman gains less with size and batch",
        get="OHP-CMB fits "
        + _fitting(ohp_cmb, sizes)
        + "; strawman "
        + ", ".join(gains([one], strawman) for one in sizes),
        evidence=Evidence.FITTED,
    )
    small_one = case("llama2", "13B")
    yield Claim(
        where="Figure 12",
        says="13B: DAPPLE fits, and is significantly faster than DAPPLE+",
        get=f"{'fits' if dapple(small_one).fits else 'does not fit'},"
        f" {gain(dapple(small_one), dapple_plus(small_one)):+.1f} %",
        evidence=Evidence.FITTED,
    )


def _fitting(system: Callable[[PaperCase], SimulatedRun], cases: Sequence[PaperCase]) -> str:
    names = [
        name for name, one in zip(("18B", "23B", "28B"), cases, strict=True) if system(one).fits
    ]
    return ", ".join(names) or "none"


def _figure_13() -> Iterator[Claim]:
    one = case("llama2", "28B")
    peaks = gigabytes(dapple(one))
    fits = [s for s, peak in enumerate(peaks) if peak <= MEMORY_BYTES / 1e9]
    yield Claim(
        where="Figure 13, DAPPLE",
        says="only stages 6 and 7 fit; stage 0 has about 2.0 x stage 7",
        get=f"stages {stages(fits)} fit; {peaks[0] / peaks[7]:.1f} x",
        evidence=Evidence.FITTED,
    )
    plus, cmb, mlp = (
        gigabytes(found)
        for found in (dapple_plus(one), ohp_cmb(one), bpipe(one, one.operators("mlp")))
    )
    yield Claim(
        where="Figure 13, baselines",
        says="DAPPLE+ leaves about 20 GB unused; OHP-CMB does not fit; BPipe 106 GB, 76 GB with MLP"
        " recomputation; the strawman adjusts stages 0-5",
        get=f"{80 - max(plus):.0f} to {80 - min(plus):.0f} GB; {max(cmb):.0f} GB;"
        f" {sorted(gigabytes(bpipe(one)))[-2]:.0f} (fitted), {sorted(mlp)[-2]:.0f} GB without the"
        f" head's stage; {stages(adjusted_stages(strawman(one).schedule))}",
        evidence=Evidence.FITTED,
    )
    obscura = paper_obscura(one)
    found = gigabytes(obscura)
    yield Claim(
        where="Figure 13, Obscura",
        says="stages 0-4 adjusted, 5 with CMB; close to the limit",
        get=f"stages {stages(adjusted_stages(obscura.schedule))};"
        f" {min(found[:6]):.0f} to {max(found[:6]):.0f} GB in stages 0-5",
        evidence=Evidence.FITTED,
    )


def busy_s(one: PaperCase, schedule: Schedule) -> float:
    """Returns the seconds that stage 0 computes."""
    times = order_times(schedule.layout, schedule.orders, one.costs)
    return sum(
        end - start
        for work, start, end in zip(schedule.orders[0], times.starts[0], times.ends[0], strict=True)
        if isinstance(work, Forward | Recompute | Backward)
    )


def _figure_14() -> Iterator[Claim]:
    one = case("llama2", "23B")
    plain, obscura = dapple(one), paper_obscura(one)
    for name, says, run in (
        ("DAPPLE+", "a third more computation and time than DAPPLE", dapple_plus(one)),
        ("Strawman", "stages 0-3 adjusted, a third more computation there", strawman(one)),
        ("Obscura", "stages 0-2 adjusted, 13 % more computation, time close to DAPPLE", obscura),
    ):
        more = busy_s(one, run.schedule) / busy_s(one, plain.schedule) - 1.0
        yield Claim(
            where=f"Figure 14, {name}",
            says=says,
            get=f"stages {stages(adjusted_stages(run.schedule))}, {100 * more:+.1f} % computation,"
            f" {100 * (run.seconds / plain.seconds - 1):+.1f} % time",
            evidence=Evidence.FITTED,
        )
    before, after = (_idle_s(one, run.schedule) for run in (plain, obscura))
    yield Claim(
        where="Figure 14",
        says="Obscura's adjusted stages have 1.7 s less bubble time than DAPPLE",
        get=f"stage 0: {before - after:.1f} s less",
        evidence=Evidence.FITTED,
    )


def _idle_s(one: PaperCase, schedule: Schedule) -> float:
    times = order_times(schedule.layout, schedule.orders, one.costs)
    return times.ends[0][-1] - times.starts[0][0] - busy_s(one, schedule)


def _figures_15_and_16() -> Iterator[Claim]:
    for family, below in (("llama2", 11), ("gpt3", 17)):
        base = small(family, 32)
        yield Claim(
            where=f"Figure 15, {family} 10.4B",
            says=f"BPipe {below} % below DAPPLE",
            get=f"{gain(bpipe_that_fits(base), dapple(base)):+.1f} %: its transfers stay hidden at"
            " 25 GB/s; the paper does not give the bandwidth between its GPUs",
            evidence=Evidence.FITTED,
        )
    larger = [small(family, layers) for family in ("llama2", "gpt3") for layers in (40, 44)]
    yield Claim(
        where="Figure 15",
        says="Obscura 27-31 % over DAPPLE+ for larger models",
        get=f"{gains(larger, paper_obscura)} (40 and 44 layers; the paper does not say which)",
        evidence=Evidence.FITTED,
    )
    speed = {b: _ablation(b) for b in (16, 32, 64, 128)}
    yield Claim(
        where="Figure 16",
        says="all gain at 16; DR degrades at 32 and 64; DR+SAR stays high and drops at 128, where"
        " CB helps",
        get="; ".join(
            f"{batch}: {' '.join(f'{value:.2f}' for value in values)}"
            for batch, values in speed.items()
        )
        + " (DR, DR+SAR, DR+SAR+CB)",
        evidence=Evidence.FITTED,
    )


def _ablation(batch: int) -> tuple[float, float, float]:
    one = case("llama2", "23B", batch)
    reference = dapple_plus(one).seconds
    relaxed, swapping, _, balanced = ablation(one, last=2)
    return (
        reference / relaxed.seconds,
        reference / swapping.seconds,
        reference / balanced.seconds,
    )


def real_run_claims() -> Iterator[Claim]:
    """Yields what recorded runs say of limits."""
    models = recorded()["models"]
    rows = [row for found in models.values() for row in found["rows"] if row["runs"]]
    if not rows:
        return
    errors = [100.0 * (row["planned"] / measured_peak(row) - 1.0) for row in rows]
    above = sum(measured_peak(row) > row["limit"] for row in rows)
    ordered = [name for name, found in models.items() if same_order(found["rows"])]
    yield Claim(
        where="Section 9 as a whole",
        says="runs within the memory limit, by relaxing, dropping and swapping",
        get=f"{len(rows)} runs of {len(models)} small models: {above} above their limit, planned"
        f" peaks {min(errors):+.2f} to {max(errors):+.2f} % of measured ones; the simulated order"
        f" of speed in {len(ordered)} of {len(models)} models",
        evidence=Evidence.CPU,
    )
