"""Every figure, table and numbered claim of Mario's text, and what we get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from bench.papers.mario.evaluation import Rates, longer, ranges
from bench.papers.mario.paper import FIGURE_6, TABLE_5
from bench.papers.mario.steps import figure_5
from bench.papers.mario.testbed import FITTED_TO, SHAPES, Run
from bench.papers.mario.tuner import label, unfinished
from bench.papers.page import Claim, Evidence, PaperTable, claims_table
from penstock.planner.cost.catalogue import MODELS
from penstock.planner.cost.frameworks import IDEAL


def claims(recorded: Mapping[str, Any], steps: PaperTable, memory: PaperTable) -> PaperTable:
    """Returns the table of all of them, in the order of the text."""
    rates = Rates(recorded=recorded)
    rows = [
        *_headlines(rates),
        *_motivation(steps, memory),
        *_models(),
        *_small_models(rates),
        *_large_models(rates),
        *_scaling(recorded),
        *_simulator(rates),
        *_tuner(recorded),
        *_discussion(recorded),
    ]
    return claims_table(
        "Mario",
        rows,
        text=(
            "*Fitted*: with one constant, the host's seconds for each kernel, chosen so that one"
            f" row ({FITTED_TO[0].removeprefix('mario-')}, {FITTED_TO[1]}-base, {FITTED_TO[2]}"
            " samples/s) is right; without it gains of larger micro-batches are not explained."
        ),
    )


def _claim(where: str, says: str, get: str, evidence: Evidence) -> Claim:
    return Claim(where=where, says=says, get=get, evidence=evidence)


def _both(rates: Rates, framework: str, above: str, below: str) -> float:
    """Returns the mean gain over all twelve cases of table 5 and figure 6."""
    return fmean(rates.gain(framework, devices, above, below) for devices in (32, 8))


def _headlines(rates: Rates) -> Iterator[Claim]:
    for below, says, what in (
        ("base", "1.16", "without"),
        ("ckpt", "1.57", "with"),
    ):
        fitted, plain = (
            _both(rates, framework, "lmbs", below) for framework in ("fitted", "megatron-deepspeed")
        )
        yield _claim(
            "abstract",
            f"{says} x over schemes {what} checkpointing, on average",
            f"{fitted:.2f} x; {plain:.2f} x with a host of 10 µs a kernel",
            Evidence.FITTED,
        )


def _backward_ratios() -> Iterator[float]:
    for model in sorted({model for model, _ in (*TABLE_5, *FIGURE_6)}):
        layer = Run(model=model, shape="V", kind="base", framework=IDEAL).analytic.costs.blocks[1]
        yield layer.backward_s / layer.forward_s


def _motivation(steps: PaperTable, memory: PaperTable) -> Iterator[Claim]:
    ours = ", ".join(row[2] for row in steps.rows)
    yield _claim(
        "figure 1", "history of schemes", "a drawing: nothing to reproduce", Evidence.MISSING
    )
    agree = sum(row[4] == row[6] for row in memory.rows)
    yield _claim(
        "table 1",
        "activations of each scheme, and one micro-batch's with Mario",
        f"{agree} of {len(memory.rows)} rows with Mario as printed; differences in the table below",
        Evidence.COMPUTED,
    )
    yield _claim(
        "tables 2, 3", "symbols and instructions", "docs/EXECUTION.md has ours", Evidence.COMPUTED
    )
    yield _claim(
        "section 1, 2.2",
        "GPipe reports 23 % for recomputation",
        "its own measure",
        Evidence.MISSING,
    )
    yield _claim("figure 2", "21, 28, 25, 23, 22 units", ours, Evidence.SIMULATED)
    overhead = float(steps.rows[-1][2]) / float(steps.rows[0][2]) - 1.0
    yield _claim(
        "section 3.1", "22 units are near zero-cost: 4.8 %", f"{overhead:.1%}", Evidence.SIMULATED
    )
    yield _claim(
        "section 3.1",
        "the four steps on 4 A100-40G",
        "no such machine; the runtime trains schedules after each of the passes (gate)",
        Evidence.TESTED,
    )
    yield _claim(
        "section 3.2",
        "backward over forward 1.6 in a layer (from Ref. 22)",
        f"by our rooflines {ranges(_backward_ratios())} for the four models; both ratios are in the"
        " table of other shapes",
        Evidence.SIMULATED,
    )
    yield _claim(
        "figures 3, 4, listing 1, algorithm 1",
        "design",
        "passes, simulator and tuner are ours to use: `penstock plan`, `penstock tune`",
        Evidence.TESTED,
    )
    yield _claim("figure 5", "pictures of V, X and W", figure_5(), Evidence.SIMULATED)


def _models() -> Iterator[Claim]:
    """Yields table 4: sizes that follow from the printed widths and layers."""
    ours = ", ".join(
        f"{MODELS[f'mario-{name}'].num_parameters / 1e9:.1f}"
        for name in ("gpt3-1.6b", "gpt3-13b", "llama2-3b", "llama2-13b")
    )
    yield _claim("table 4", "models of 1.6B, 13B, 3B, 13B", f"{ours} billion", Evidence.COMPUTED)


def _small_models(rates: Rates) -> Iterator[Claim]:
    yield _claim(
        "figure 6",
        "lmbs over base 1.16, 1.00 (V), 1.23, 1.17 (X), 1.52, 1.40 (W)",
        ", ".join(
            f"{rates.of('fitted', *case, 8)[3] / rates.of('fitted', *case, 8)[0]:.2f}"
            for case in FIGURE_6
        ),
        Evidence.FITTED,
    )
    yield _claim(
        "section 6.1",
        "lmbs 1.25 x over base on average",
        f"{rates.gain('fitted', 8, 'lmbs', 'base'):.2f} x;"
        f" {rates.gain('megatron-deepspeed', 8, 'lmbs', 'base'):.2f} x unfitted",
        Evidence.FITTED,
    )
    yield _claim(
        "section 6.1",
        "ovlp 29.22 % slower than base on average",
        f"{1 - rates.gain('fitted', 8, 'ovlp', 'base'):.1%};"
        f" {1 - rates.gain('megatron-deepspeed', 8, 'ovlp', 'base'):.1%} unfitted",
        Evidence.FITTED,
    )
    reduced = (
        rates.most_gb(*case, 8, "ovlp") / rates.most_gb(*case, 8, "base") for case in FIGURE_6
    )
    yield _claim(
        "section 6.1",
        "peak memory 1/2 to 1/3 of base",
        f"{ranges(reduced)} of base",
        Evidence.SIMULATED,
    )


def _large_models(rates: Rates) -> Iterator[Claim]:
    errors = {name: f"{rates.mean_error(name):.0%}" for name in ("ideal", "megatron-deepspeed")}
    yield _claim(
        "table 5",
        "samples/s of 24 runs",
        f"mean error of the measured ones {errors['ideal']} by the roofline,"
        f" {errors['megatron-deepspeed']} as frameworks run,"
        f" {rates.mean_error('fitted'):.0%} with one fitted constant",
        Evidence.FITTED,
    )
    model, shape, rate = FITTED_TO
    ours = [rates.of(name, model, shape, 32)[0] for name in ("ideal", "megatron-deepspeed")]
    yield _claim(
        "table 5",
        f"V-base of LLaMA2-13B {rate} samples/s",
        f"{ours[0]:.1f} by the roofline ({ours[0] / rate - 1:+.0%}), {ours[1]:.1f} as frameworks"
        f" run ({ours[1] / rate - 1:+.0%}); the rest is what the host's seconds are fitted to",
        Evidence.SIMULATED,
    )
    for above, says in (("ovlp", "1.13"), ("lmbs", "1.36")):
        yield _claim(
            "section 6.2",
            f"{above} {says} x over ckpt",
            f"{rates.gain('fitted', 32, above, 'ckpt'):.2f} x;"
            f" {rates.gain('megatron-deepspeed', 32, above, 'ckpt'):.2f} x unfitted",
            Evidence.FITTED,
        )
    base, _, overlapped, _ = rates.of("fitted", "mario-llama2-13b", "V", 32)
    plain = rates.of("megatron-deepspeed", "mario-llama2-13b", "V", 32)
    yield _claim(
        "section 6.2",
        "LLaMA2-13B: V-ovlp has 94.7 % (by table 5 98.7 %) of V-base",
        f"{overlapped / base:.1%}; {plain[2] / plain[0]:.1%} unfitted",
        Evidence.FITTED,
    )
    spread = {
        kind: fmean(
            rates.most_gb(*case, 32, kind) / rates.least_gb(*case, 32, kind) for case in TABLE_5
        )
        for kind in ("base", "ovlp", "lmbs")
    }
    yield _claim(
        "figure 7",
        "checkpointing lowers and balances memory; ovlp adds none to ckpt, lmbs some",
        f"most over least GB {spread['base']:.1f} for base, {spread['ovlp']:.1f} for ovlp,"
        f" {spread['lmbs']:.1f} for lmbs on average; most GB of table 5 off by"
        f" {rates.memory_error():.0%} on average",
        Evidence.SIMULATED,
    )


def _scaling(recorded: Mapping[str, Any]) -> Iterator[Claim]:
    sizes = recorded["parameters"]
    paper = {"V": "5.3 x (3B to 16B)", "X": "2.3 x (to 7B)", "W": "about 20 x"}
    for shape in SHAPES:
        base, overlapped = sizes[f"{shape}-base"], sizes[f"{shape}-ovlp"]
        yield _claim(
            "figure 8, section 6.4",
            f"{shape}: largest model {paper[shape]}",
            f"{overlapped / base:.1f} x ({base:.1f}B to {overlapped:.1f}B)",
            Evidence.SIMULATED,
        )
    for than, says in (("PP8 TP2", "1.49"), ("PP8 TP1", "2.80")):
        yield _claim(
            "figure 9, section 6.5",
            f"sequences {says} x as long as with {than}, on average",
            f"{longer(recorded, than):.2f} x",
            Evidence.SIMULATED,
        )


def _simulator(rates: Rates) -> Iterator[Claim]:
    yield _claim(
        "figure 10, section 6.6",
        "its simulator, from profiles: memory off by 5.1 %, throughput by 9.4 % on average",
        "the rows are not printed; ours, from data sheets, on measured rows of table 5:"
        f" {rates.memory_error():.1%} and {rates.mean_error('fitted'):.1%}",
        Evidence.FITTED,
    )
    yield _claim(
        "section 6.6",
        "frameworks take 2 GB",
        "taken over, added to all memory here",
        Evidence.COMPUTED,
    )
    yield _claim(
        "section 5.2",
        "profiling LLaMA2-13B takes 142 s; 2,048 GPUs take 1,047 s to initialise (Ref. 18)",
        "no such machine",
        Evidence.MISSING,
    )
    yield _claim(
        "section 5.2",
        "y = a n + b in the number of blocks",
        "so `penstock profile` does (its instruction overhead is b)",
        Evidence.TESTED,
    )


def _tuner(recorded: Mapping[str, Any]) -> Iterator[Claim]:
    found = recorded["tuner"]
    best = {name: found[name]["best"][0] for name in ("paper", "ours")}
    pipeline = next(one for one in found["ours"]["best"] if not one["scheme"].startswith("zero"))
    yield _claim(
        "figure 11, section 6.7",
        "best: V-64-16, X-64-16, W-64-32, all with Mario",
        f"16 GPUs only: in that space {label(best['paper'])}"
        f" ({', '.join(best['paper']['passes']) or 'without Mario'}), DP {best['paper']['dp']}",
        Evidence.FITTED,
    )
    yield _claim(
        "section 6.7",
        "the best found is the best tuned by hand",
        f"of all schemes and passes {label(best['ours'])}"
        f" ({', '.join(best['ours']['passes']) or best['ours']['recompute']}):"
        f" {best['ours']['rate'] / best['paper']['rate']:.2f} x the best of the paper's space;"
        f" of pipelines {label(pipeline)}: {pipeline['rate'] / best['paper']['rate']:.2f} x",
        Evidence.FITTED,
    )
    yield _claim(
        "section 6.7",
        "tuning takes 210 s (64 GPUs)",
        f"not shown; on 16 GPUs {found['paper']['process_s']:.0f} s for that space,"
        f" {found['ours']['process_s']:.0f} s for all schemes and passes, of one core;"
        f" {unfinished(recorded)}",
        Evidence.CPU,
    )
    yield _claim(
        "section 5.2",
        "0.7 s to simulate GPT3-13B with 64 micro-batches on 32 GPUs (Chimera)",
        f"{found['simulation_s']:.2f} s ({found['plan_s']:.2f} s with schedule, plan and checks)",
        Evidence.CPU,
    )
    yield _claim(
        "section 6.7",
        "1,024 GPUs: 1.06 s an iteration, 240 configurations",
        f"{found['large_s']:.2f} s for an order of 64 micro-batches on 1,024 devices and its times",
        Evidence.CPU,
    )


def _discussion(recorded: Mapping[str, Any]) -> Iterator[Claim]:
    without, with_mario = recorded["cuts"]["base"], recorded["cuts"]["ovlp"]
    yield _claim(
        "section 7.1",
        "k = -1 layers from stage to stage: 3 % faster without, 2 to 3 % slower with checkpointing",
        f"{without['-1'] - 1:+.1%} and {with_mario['-1'] - 1:+.1%}; k = +1"
        f" {without['1'] - 1:+.1%} and {with_mario['1'] - 1:+.1%}",
        Evidence.SIMULATED,
    )
    yield _claim(
        "sections 7.2, 7.3",
        "fragmentation, larger systems",
        "no numbers of its own",
        Evidence.MISSING,
    )
