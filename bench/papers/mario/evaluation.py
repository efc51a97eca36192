"""Tables of Mario's section 6: rates, memory, largest models and longest sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from bench.papers.mario.paper import ESTIMATED, FIGURE_6, TABLE_5
from bench.papers.mario.testbed import CONTEXT_BYTES, KINDS, SHAPES
from bench.papers.page import PaperTable

FRAMEWORKS = ("ideal", "megatron-deepspeed", "fitted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was recorded of rates: samples/s by framework, model, shape, GPUs and kind."""

    recorded: Mapping[str, Any]

    def row(self, framework: str, model: str, shape: str, devices: int, kind: str) -> Any:
        """Returns one recorded row."""
        wanted = (framework, model, shape, devices, kind)
        names = ("framework", "model", "shape", "devices", "kind")
        return next(
            row
            for row in self.recorded["rates"]["rows"]
            if tuple(row[name] for name in names) == wanted
        )

    def of(self, framework: str, model: str, shape: str, devices: int) -> tuple[float, ...]:
        """Returns the rates of base, ckpt, ovlp and lmbs."""
        return tuple(self.row(framework, model, shape, devices, kind)["rate"] for kind in KINDS)

    def gain(self, framework: str, devices: int, above: str, below: str) -> float:
        """Returns the mean of a kind's rates over those of another, over all models and shapes of
        so many GPUs.
        """
        cases = TABLE_5 if devices == 32 else FIGURE_6
        return fmean(
            self.row(framework, *case, devices, above)["rate"]
            / self.row(framework, *case, devices, below)["rate"]
            for case in cases
        )

    def mean_error(self, framework: str) -> float:
        """Returns the mean of |ours / paper - 1| over the measured rows of table 5."""
        errors = [
            abs(ours / paper - 1.0)
            for case, rows in TABLE_5.items()
            for kind, ours, (_, _, paper) in zip(
                KINDS, self.of(framework, *case, 32), rows, strict=True
            )
            if (*case, kind) not in ESTIMATED
        ]
        return fmean(errors)

    def memory_error(self) -> float:
        """Returns the mean of |ours / paper - 1| of the fullest device, over the same rows."""
        errors = [
            abs(self.most_gb(*case, 32, kind) / paper - 1.0)
            for case, rows in TABLE_5.items()
            for kind, (_, paper, _) in zip(KINDS, rows, strict=True)
            if (*case, kind) not in ESTIMATED
        ]
        return fmean(errors)

    def most_gb(self, model: str, shape: str, devices: int, kind: str) -> float:
        """Returns GB of the fullest device, with those of the framework."""
        row = self.row("megatron-deepspeed", model, shape, devices, kind)
        return float(row["memory_gb"][1]) + CONTEXT_BYTES / 1e9

    def least_gb(self, model: str, shape: str, devices: int, kind: str) -> float:
        """Returns GB of the emptiest device, with those of the framework."""
        row = self.row("megatron-deepspeed", model, shape, devices, kind)
        return float(row["memory_gb"][0]) + CONTEXT_BYTES / 1e9


def _short(model: str) -> str:
    return model.removeprefix("mario-")


def _marked(case: tuple[str, str], kind: str) -> str:
    return "*" if (*case, kind) in ESTIMATED else ""


def table_5_rates(recorded: Mapping[str, Any]) -> PaperTable:
    """Returns samples/s of table 5 beside ours, in three ways."""
    rates = Rates(recorded=recorded)
    cells: list[tuple[str, ...]] = []
    for case, paper in TABLE_5.items():
        ours = [rates.of(framework, *case, 32) for framework in FRAMEWORKS]
        for index, kind in enumerate(KINDS):
            rate = paper[index][2]
            cells.append(
                (
                    *(_short(case[0]), f"{case[1]}-{kind}"),
                    f"{rate:.2f}{_marked(case, kind)}",
                    *(f"{one[index]:.2f} ({one[index] / rate - 1:+.0%})" for one in ours),
                )
            )
    means = [f"{rates.mean_error(framework):.0%}" for framework in FRAMEWORKS]
    cells.append(("mean error", "measured rows", "", *means))
    return PaperTable(
        title="Mario: table 5, samples/s",
        text=(
            "13B models on 32 A100-40G, global batch 128, simulated by orders with one latency per"
            " hop; lmbs is ovlp with twice the micro-batch. *Roofline*: data sheets alone. *As"
            " frameworks run*: whole waves of tiles, a rotary embedding of ten kernels"
            " (LLaMA; norms are fused, else V-base would not fit), gradients added by kernels of"
            " their own, blocking sends, 10 µs of the host a kernel; nothing fitted."
            f" *Fitted host*: the host takes {recorded['rates']['launch_us']} µs a kernel, so"
            " that V-base of LLaMA2-13B is right;"
            " a block takes as long as its kernels or as their launches, whichever is longer. All"
            " other rows follow. That is several times what x86 hosts take: it stands for all that"
            " Python, Megatron, DeepSpeed and Mario's interpreter do on Kunpeng cores, and for"
            " kernels that are not counted. What it explains is why a doubled micro-batch costs"
            " little there (W most of all, whose chunks are the smallest), which no roofline does."
            " Left over: GPT3-13B is too fast (heads of 75 numbers, which tensor cores do not"
            " like), its network is not printed (25 GB/s assumed), and the optimizer's step and"
            " Chimera's sum of gradients are left out (about 1 %). * estimated by the paper's own"
            " simulator, since out of memory."
        ),
        columns=("model", "run", "paper", "roofline", "as frameworks run", "fitted host"),
        rows=tuple(cells),
    )


def figure_6(recorded: Mapping[str, Any]) -> PaperTable:
    """Returns figure 6: rates over base on 8 GPUs."""
    rates = Rates(recorded=recorded)
    cells: list[tuple[str, ...]] = []
    for case, paper in FIGURE_6.items():
        row = [_short(case[0]), case[1], f"{paper:.2f}"]
        for framework in FRAMEWORKS:
            base, *others = rates.of(framework, *case, 8)
            row.append(" / ".join(f"{one / base:.2f}" for one in others))
        cells.append(tuple(row))
    return PaperTable(
        title="Mario: figure 6, rates over base on 8 GPUs",
        text=(
            "ckpt / ovlp / lmbs, each over base; the text prints lmbs only. The figure's order of"
            " models is assumed. The host's seconds are those fitted above, to another model on 32"
            " GPUs."
        ),
        columns=("model", "shape", "lmbs, paper", "roofline", "as frameworks run", "fitted host"),
        rows=tuple(cells),
    )


def table_5_memory(recorded: Mapping[str, Any]) -> PaperTable:
    """Returns least and most memory of table 5 and figure 7."""
    rates = Rates(recorded=recorded)
    cells: list[tuple[str, ...]] = []
    for case, paper in TABLE_5.items():
        for kind, (least, most, _) in zip(KINDS, paper, strict=True):
            ours = rates.least_gb(*case, 32, kind), rates.most_gb(*case, 32, kind)
            cells.append(
                (
                    *(_short(case[0]), f"{case[1]}-{kind}"),
                    f"[{least:.1f}, {most:.1f}]{_marked(case, kind)}",
                    f"[{ours[0]:.1f}, {ours[1]:.1f}]",
                    f"{ours[1] / most - 1:+.0%}",
                )
            )
    for model, shape in FIGURE_6:
        for kind in KINDS:
            ours = rates.least_gb(model, shape, 8, kind), rates.most_gb(model, shape, 8, kind)
            cells.append(
                (
                    *(_short(model), f"{shape}-{kind}, 8 GPUs", "picture only"),
                    f"[{ours[0]:.1f}, {ours[1]:.1f}]",
                    "",
                )
            )
    return PaperTable(
        title="Mario: memory of table 5 and figure 7",
        text=(
            "Least and most GB of all devices: 16 bytes of state a parameter, activations, and 2 GB"
            " of the framework (section 6.6). No fused attention, as everywhere here. * estimated"
            " there."
        ),
        columns=("model", "run", "paper", "ours", "most, ours"),
        rows=tuple(cells),
    )


def figures_8_and_9(recorded: Mapping[str, Any]) -> PaperTable:
    """Returns the largest models and the longest sequences that fit."""
    cells: list[tuple[str, ...]] = []
    sizes, lengths = recorded["parameters"], recorded["sequences"]
    paper_sizes = {"V": ("3.0", "16", "16"), "X": ("-", "7", "7"), "W": ("-", "20 x base", "-")}
    for shape in SHAPES:
        ours = [sizes[f"{shape}-{kind}"] for kind in ("base", "ovlp", "lmbs")]
        row = (f"figure 8, {shape}: billions of parameters", " / ".join(paper_sizes[shape]))
        shown = " / ".join(f"{one:.1f}" for one in ours)
        cells.append((*row, f"{shown} ({ours[1] / ours[0]:.1f} x)"))
    for shape in SHAPES:
        ours = [lengths[f"{shape} {name}"] for name in SEQUENCE_RUNS]
        row = (f"figure 9, {shape}: tokens", "not printed")
        cells.append((*row, " / ".join(map(str, ours))))
    return PaperTable(
        title="Mario: figures 8 and 9, what fits 40 GB",
        text=(
            "Figure 8: base / ovlp / lmbs, 64 layers on 16 GPUs, hidden sizes in steps of 256;"
            " micro-batches as in table 5 (not printed for it). Figure 9: GPT3-1.6B, micro-batch 1,"
            " PP 8 / PP 8 with TP 2 / the same with Mario, in steps of 64 tokens; scores are"
            " stored. Tensor parallelism is ours to simulate, not to run."
        ),
        columns=("what", "paper", "ours"),
        rows=tuple(cells),
    )


SEQUENCE_RUNS = ("PP8 TP1", "PP8 TP2", "PP8 TP2 Mario")


def longer(recorded: Mapping[str, Any], than: str) -> float:
    """Returns how many times as long sequences are with Mario, on average over the shapes."""
    lengths = recorded["sequences"]
    return fmean(lengths[f"{shape} PP8 TP2 Mario"] / lengths[f"{shape} {than}"] for shape in SHAPES)


def ranges(values: Iterable[float]) -> str:
    """Returns the least and the most of some ratios, in words."""
    known = list(values)
    return f"{min(known):.2f} to {max(known):.2f}"
