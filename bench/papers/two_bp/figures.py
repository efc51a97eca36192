"""Tables of 2BP's figures 3, 4, 6 and 7 and of its table 3, and of our own runs beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.papers.page import PaperTable
from bench.papers.two_bp.simulated import MODELS, SCHEDULES, figure_3, fits, rate, scaled
from penstock.planner.cost.frameworks import EAGER, IDEAL

DATA = Path(__file__).parents[1] / "data"

STATED_GAINS: Mapping[tuple[str, str], float] = MappingProxyType(
    {
        ("Transformer-7b", "1F1B-1"): 1.70,
        ("BERT-Large", "1F1B-1"): 1.26,
        ("ResNet152", "1F1B-1"): 1.10,
    }
)
"""Of figure 3's sixteen bars the text states these."""
STATED_GROWTHS: Mapping[tuple[str, str], float] = MappingProxyType(
    {("Mamba-1.4b", "1F1B-2"): 2.67, ("Transformer-7b", "1F1B-1"): 1.02}
)
"""The same of figure 4's."""
FIGURE_6: Mapping[tuple[int, str], float] = MappingProxyType(
    {
        (4, "1F1B-1"): 1.21,
        (8, "1F1B-1"): 1.20,
        (16, "1F1B-1"): 1.18,
        (4, "1F1B-2"): 1.15,
        (8, "1F1B-2"): 1.14,
        (16, "1F1B-2"): 1.11,
    }
)
FIGURE_7: Mapping[tuple[int, str], float | None] = MappingProxyType(
    {
        (4, "1F1B-1"): 1.28,
        (8, "1F1B-1"): 1.24,
        (16, "1F1B-1"): 1.23,
        (4, "1F1B-2"): 1.13,
        (8, "1F1B-2"): 1.10,
        (16, "1F1B-2"): None,
    }
)
"""None: out of memory."""
TABLE_3: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "Transformer-7b": (7120.88, 7100.69),
        "BERT-Large": (40427.41, 40387.41),
        "Mamba-1.4b": (12437.91, 12431.13),
        "ResNet152": (194.93, 193.10),
    }
)
"""Throughput with and without concatenation."""
WAYS = ("unsplit", "split")
KINDS: Mapping[str, str] = MappingProxyType(
    {"llama": "LLaMA-like", "bert": "BERT", "mamba": "Mamba", "resnet": "ResNet"}
)


def figures_3_and_4() -> PaperTable:
    """Returns gains and memory of four models under four schedules."""
    rows = []
    for model in MODELS:
        for schedule in SCHEDULES:
            pair, place = figure_3(model.name, schedule), (model.name, schedule)
            eager = figure_3(model.name, schedule, EAGER)
            gain, growth = STATED_GAINS.get(place), STATED_GROWTHS.get(place)
            plain, split = pair.peaks
            rows.append(
                (
                    model.name,
                    schedule,
                    "" if gain is None else f"{gain:.2f}",
                    f"{pair.gain:.2f}",
                    f"{eager.gain:.2f}",
                    "" if growth is None else f"{growth:.2f}",
                    f"{pair.growth:.2f}",
                    f"{plain:.1f}",
                    f"{split:.1f}",
                )
            )
    return PaperTable(
        title="2BP: throughput and memory of four models (figures 3 and 4)",
        text=(
            "Simulated on 4 A100s with costs from data sheets, the optimizer included, nothing"
            " fitted; *eager*: kernels as PyTorch launches them, in whole tiles"
            " (`planner/cost/frameworks.py`), as the paper's are; memory is that of the fullest"
            " GPU, with ideal kernels. Of the 32 bars the text states five; the"
            " schedule of BERT-Large's 1.26 is not said, 1F1B-1 is assumed. Transformer-7b is taken"
            " to be LLaMA2-7B without flash attention, Mamba to use the fused kernels of its"
            " authors; sequences of 1,024 tokens, BERT 512; Adam's moments in fp16; ResNet-152 with"
            " pictures of 224 x 224, in TF32, cut 10, 14, 14, 12. 2BP is the paper's: p2 in idle"
            " time, the rest concatenated at the end."
        ),
        columns=(
            "model",
            "schedule",
            "gain, paper",
            "ideal kernels",
            "eager",
            "memory, paper",
            "ours",
            "GB without",
            "with",
        ),
        rows=tuple(rows),
    )


def figures_6_and_7() -> PaperTable:
    """Returns gains of the BERT-like model on more GPUs."""
    rows = []
    for where, stated in (("figure 6", FIGURE_6), ("figure 7", FIGURE_7)):
        for (devices, schedule), gain in stated.items():
            layers = 32 if where == "figure 6" else 8 * devices
            pair, eager = (scaled(devices, schedule, layers, f) for f in (IDEAL, EAGER))
            there = "" if all(fits(pair)) else ", out of memory"
            rows.append(
                (
                    where,
                    str(devices),
                    str(layers),
                    schedule,
                    "out of memory" if gain is None else f"{gain:.2f}",
                    f"{pair.gain:.2f}{there}",
                    f"{eager.gain:.2f}",
                    f"{pair.peaks[1]:.1f}",
                )
            )
    return PaperTable(
        title="2BP: scaling (figures 6 and 7)",
        text=(
            "The BERT-like model, 32 blocks in all or 8 a GPU, micro-batches of 2 with 512 tokens,"
            " on nodes of 4 V100s with 16 GB. Simulated as above; between nodes FDR InfiniBand,"
            " 6.8 GB/s a node, is assumed. GB: the fullest GPU with 2BP."
        ),
        columns=("source", "GPUs", "blocks", "schedule", "paper", "ideal kernels", "eager", "GB"),
        rows=tuple(rows),
    )


def table_3_rates() -> PaperTable:
    """Returns absolute rates of 1F1B-1 with 2BP."""
    rows = []
    for model in MODELS:
        stated, ours = TABLE_3[model.name][0], rate(model.name)
        eager = rate(model.name, EAGER)
        cells = (f"{stated:,.0f}", f"{ours:,.0f}", f"{eager:,.0f}", f"{eager / stated:.1f}")
        rows.append((model.name, model.unit, *cells))
    return PaperTable(
        title="2BP: rates of 1F1B-1 with 2BP (table 3)",
        text=(
            "The paper measured operators written by hand in PyTorch, launched one by one, on"
            " micro-batches of one or two sequences (or eight pictures). A data sheet's roofline is"
            " far above that, with kernels launched as eager PyTorch does, too: what else its"
            " operators lose is not in the paper."
        ),
        columns=("model", "unit", "paper", "ideal kernels", "eager", "eager over paper"),
        rows=tuple(rows),
    )


def stages() -> Mapping[str, Mapping[str, float]]:
    """Returns what ``bench/split_backward.py`` recorded, by kind."""
    found: Mapping[str, Mapping[str, float]] = json.loads(
        (DATA / "two_bp_stages.json").read_text()
    )["kinds"]
    return found


def stages_table() -> PaperTable:
    """Returns measured halves of backwards, what stays between them, and table 3's question."""
    rows = []
    for kind, one in stages().items():
        both = one["p1_ms"] + one["p2_ms"]
        rows.append(
            (
                KINDS[kind],
                f"{one['p1_ms'] / one['forward_ms']:.2f}",
                f"{one['p2_ms'] / one['forward_ms']:.2f}",
                f"{both / one['backward_ms']:.2f}",
                f"{one['kept_mib'] / one['forward_mib']:.2f}",
                f"{one['looped_ms'] / one['concatenated_ms']:.2f}",
            )
        )
    return PaperTable(
        title="2BP: halves of a backward, measured",
        text=(
            "A small stage of each kind (about 500 wide, 3 layers; ResNet: 7 bottlenecks, 96 x 96"
            " pixels), processor time of one CPU thread: p1 and p2 in forwards; both over the"
            " unsplit backward; memory between p1 and p2 over what a forward keeps; p2 of four"
            " micro-batches one after the other over concatenated (Linear layers; convolutions are"
            " not concatenated). Recorded by `python -m bench.split_backward --record"
            " bench/papers/data/two_bp_stages.json`."
        ),
        columns=("model", "p1", "p2", "split / whole", "kept", "looped / concatenated"),
        rows=tuple(rows),
    )


def runs() -> Mapping[str, Any]:
    """Returns what ``bench/papers/two_bp/runs.py`` recorded, by kind."""
    found: Mapping[str, Any] = json.loads((DATA / "two_bp_runs.json").read_text())["kinds"]
    return found


def run_gain(found: Any) -> float:
    """Returns seconds of an unsplit step over those of a split one: the fastest of each, which
    other work on the machine has disturbed least.
    """
    unsplit, split = (min(s for one in found[way] for s in one["seconds"]) for way in WAYS)
    return float(unsplit / split)


def growth(found: Any, key: str) -> float:
    """Returns the largest split peak over the largest unsplit one."""
    unsplit, split = (max(one[key] for one in found[way]) for way in WAYS)
    return float(split / unsplit)


def runs_table() -> PaperTable:
    """Returns real runs of the four kinds beside their simulations."""
    rows = []
    for kind, schedules in runs().items():
        for schedule in ("1F1B-1", "1F1B-2"):
            found = schedules[schedule]
            unsplit, split = found["unsplit"], found["split"]
            loads = [one["load"] for way in (unsplit, split) for one in way]
            same = [a["losses"] == b["losses"] for a, b in zip(unsplit, split, strict=True)]
            rows.append(
                (
                    KINDS[kind],
                    f"{schedules['parameters'] / 1e6:.1f} M",
                    schedule,
                    f"{run_gain(found):.2f}",
                    f"{unsplit[0]['simulated_s'] / split[0]['simulated_s']:.2f}",
                    f"{growth(found, 'peak_bytes'):.2f}",
                    f"{growth(found, 'simulated_peak_bytes'):.2f}",
                    "same" if all(same) else "differ",
                    f"{min(loads):.0f}-{max(loads):.0f}",
                )
            )
    return PaperTable(
        title="2BP: our workers with the four kinds of models",
        text=(
            "`penstock train` with real text, masked text for BERT, and scikit-learn's pictures of"
            " digits for ResNet (the depth of ResNet-152), two workers of one CPU thread each, so N"
            " = 2, where table 1 allows 1.29 and 1.15. Seconds of unsplit over split steps, the"
            " fastest of each, of runs that took turns; peaks of the worker that held most;"
            " simulations with `penstock profile`. The two cores were shared: *load* is that of the"
            " whole machine, so workers often did not run side by side, and single ratios are"
            " rough. ResNet is cut by its parameters, which lie where pictures are small, so one"
            " worker has most of the work and little waits; its many small operators make a split"
            " forward slower. Losses of all steps are compared bit by bit. Recorded"
            " by `python -m bench.papers.two_bp.runs`."
        ),
        columns=(
            "model",
            "parameters",
            "schedule",
            "gain, measured",
            "simulated",
            "memory, measured",
            "simulated",
            "losses",
            "load",
        ),
        rows=tuple(rows),
    )
