"""A section of the page for each part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from bench.gpu.measures.attention import CANDIDATES, MASKS
from bench.gpu.measures.kernels import SHARES
from bench.gpu.page.tables import (
    GIB,
    NOTHING_YET,
    Column,
    Figures,
    note_of,
    number,
    table,
    text,
    wrapped,
)
from bench.gpu.parts import PARTS
from bench.gpu.results import Outcome, PartResults, Status
from bench.gpu.shapes import SHAPES

Lines = Iterator[str]
_RESOURCES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSection:
    """``about``: lines before the figures; ``show`` makes the rest."""

    title: str
    about: str
    show: Callable[[PartResults | None], Lines]


def names_of(part: str) -> Sequence[str]:
    """Returns the part's measurements, in their order."""
    return [one.name for one in PARTS[part].measurements]


def _probe(results: PartResults | None) -> Lines:
    if results is None:
        yield NOTHING_YET
        return
    yield "| what | found |"
    yield "| --- | --- |"
    for outcome in results.measurements.values():
        for key, value in outcome.figures.items():
            if key not in ("packages", "lost"):
                yield f"| {key.replace('_', ' ')} | {_shown(key, value)} |"
    yield ""
    for name, outcome in results.measurements.items():
        if note := note_of(outcome):
            yield from wrapped(f"* {name}: {note}", "  ")
        for line in outcome.figures.get("lost", ()):
            yield from wrapped(f"* lost: {line}", "  ")


def _shown(key: str, value: Any) -> str:
    if key.endswith("bytes") and isinstance(value, int | float):
        return f"{value / GIB:.1f} GiB"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):  # where programs are
        value = [name for name, place in value.items() if place]
    words = "; ".join(map(str, value)) if isinstance(value, list) else str(value)
    return words.replace("|", "/")[:110]


def _correctness(results: PartResults | None) -> Lines:
    columns = [
        Column(title=key, show=text(key))
        for key in ("passed", "failed", "skipped", "interrupted", "test_seconds")
    ]
    yield from table("tests", names_of("correctness"), columns, results)
    for name, outcome in () if results is None else results.measurements.items():
        for test, message in outcome.figures.get("failures", {}).items():
            yield from wrapped(f"* {name}: `{test}`: {message}", "  ")


def _copies(results: PartResults | None) -> Lines:
    known = {} if results is None else results.measurements
    if "alone" not in known:
        yield NOTHING_YET
        return
    ways = ("to device", "to host", "both")
    yield "| host memory, GB/s | to the device | to the host | both ways at once, sum |"
    yield "| --- | --- | --- | --- |"
    for kind, rates in known["alone"].figures.items():
        if isinstance(rates, Mapping):
            yield f"| {kind} | " + " | ".join(f"{rates[way]:.1f}" for way in ways) + " |"
    yield ""
    for name, outcome in known.items():
        if note := note_of(outcome):
            yield from wrapped(f"* {name}: {note}", "  ")
    if "sizes" in known and "gb_per_s" in known["sizes"].figures:
        rates = known["sizes"].figures["gb_per_s"]
        shown = ", ".join(f"{size} {rate:.1f}" for size, rate in rates.items())
        yield from wrapped(f"* By size of a copy to the device, GB/s: {shown}.", "  ")
    if "beside compute" in known and known["beside compute"].figures:
        f = known["beside compute"].figures
        yield from wrapped(
            f"* Copies both ways ({f['copy_s'] * 1e3:.1f} ms alone) beside matrix products"
            f" ({f['compute_s'] * 1e3:.1f} ms alone, {f['tflops_alone']:.3g} TFLOP/s):"
            f" {f['together_s'] * 1e3:.1f} ms together, so {f['hidden']:.0%} of the shorter is"
            " hidden.",
            "  ",
        )


def _layers(name: str, figures: Figures, best: float | None) -> Lines:
    """``best``: TFLOP/s of a large product."""
    yield f"| {name}, 8 K tokens | forward TFLOP/s | backward TFLOP/s | of the product's |"
    yield "| --- | --- | --- | --- |"
    for model, found in figures.items():
        if isinstance(found, Mapping):
            rates = [found["forward_tflops"], found["backward_tflops"]]
            shares = " and ".join(f"{rate / best:.0%}" for rate in rates) if best else ""
            yield f"| {model} | {rates[0]:.4g} | {rates[1]:.4g} | {shares} |"
    yield ""


def _kernels(results: PartResults | None) -> Lines:
    known = {} if results is None else results.measurements
    if not known:
        yield NOTHING_YET
        return
    products = known["products"].figures if "products" in known else {}
    best, sheet = products.get("tflops"), products.get("data_sheet_tflops")
    if best is not None:
        peak = f", {best / sheet:.0%} of the data sheet's {sheet:.0f}" if sheet else ""
        yield f"A product of two 8192 x 8192 bf16 matrices: {best:.4g} TFLOP/s{peak}."
        yield ""
    for name in ("layers", "layers that repeat their bits"):
        if name in known and known[name].figures:
            yield from _layers(name, known[name].figures, best)
    if "update" in known and "billions_per_s" in known["update"].figures:
        rates = known["update"].figures["billions_per_s"]
        parts = [f"{share} %" for share in SHARES if f"{share} %" in rates]
        yield "| updates on the GPU | " + " | ".join(parts) + " |"
        yield "| --- " * (len(parts) + 1) + "|"
        cells = " | ".join(f"{rates[share]:.3g}" for share in parts)
        yield f"| billions of parameters a second | {cells} |"
        yield ""
    if "attention" in known:
        yield from _attention(known["attention"].figures)
    for name, outcome in known.items():
        if note := note_of(outcome):
            yield from wrapped(f"* {name}: {note}", "  ")


def _attention(figures: Figures) -> Lines:
    """Yields a table for each mask; a cell has forward, backward, and repetitions of equal bits."""
    known = {name: figures[name] for name in CANDIDATES if name in figures}
    for mask in MASKS:
        keys = dict.fromkeys(key for rows in known.values() for key in rows if key.startswith(mask))
        if keys:
            lengths = " | ".join(f"{key.split()[1]} tokens" for key in keys)
            yield f"| attention, {mask}: forward, backward TFLOP/s, equal bits | {lengths} |"
            yield "| --- " * (len(keys) + 1) + "|"
            for name, rows in known.items():
                if any("error" not in rows.get(key, {"error": ""}) for key in keys):
                    yield f"| {name} | " + " | ".join(_cell(rows.get(key)) for key in keys) + " |"
            yield ""


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None or "error" in row:
        return "none"
    rates = f"{row['forward_tflops']:.4g}, {row['backward_tflops']:.4g}"
    return f"{rates}, {row['equal']} of {row['repeats']}"


SPEED = (
    Column(title="tokens/s", show=number("tokens_per_s", ".0f")),
    Column(title="model TFLOP/s", show=number("model_tflops", ".1f")),
    Column(title="recomputation's", show=number("recompute_tflops", ".1f")),
    Column(title="step s", show=number("step_s")),
    Column(title="steps", show=text("steps")),
    Column(title="GPU GiB", show=number("device_bytes", ".1f", 1 / GIB)),
)


def _models(results: PartResults | None) -> Lines:
    columns = (
        *SPEED,
        Column(title="host GiB", show=number("host_bytes", ".0f", 1 / GIB)),
        Column(title="start s", show=number("start_s", ".0f")),
    )
    yield from table("run", names_of("models"), columns, results)
    if results is None or not any(o.figures for o in results.measurements.values()):
        return
    yield ""
    yield "Where a typical step went, along its critical path, and what was hidden behind compute:"
    yield ""
    where = (
        Column(title="critical path", show=_critical),
        Column(title="copies hidden", show=number("copies_hidden", ".0%")),
        Column(title="optimizer hidden", show=number("optimizer_hidden", ".0%")),
        Column(title="tail s", show=number("tail_s")),
        Column(title="decisions", show=_decisions),
    )
    named = [name for name in names_of("models") if name in results.measurements]
    with_figures = [name for name in named if results.measurements[name].figures]
    yield from table("run", with_figures, where, results)
    yield from _others("run", "models", results)


def _others(first: str, part: str, results: PartResults | None) -> Lines:
    """Yields a table of earlier measurements and of other cards, if any are kept."""
    rows = [
        (name, other)
        for name in names_of(part)
        for other in _known(results, name).others
        if "tokens_per_s" in other.figures
    ]
    if not rows:
        return
    yield ""
    yield "Earlier measurements, and other cards:"
    yield ""
    titles = ("card", "date", "commit", *(column.title for column in SPEED))
    yield f"| {first} | " + " | ".join(titles) + " |"
    yield "| --- " * (len(titles) + 1) + "|"
    for name, other in rows:
        cells = [other.gpu or "", other.at[:10], other.commit]
        cells += [column.cell(other.figures) for column in SPEED]
        yield f"| {name} | " + " | ".join(cells) + " |"


def _known(results: PartResults | None, name: str) -> Outcome:
    """Returns a measurement's outcome; one without figures where there is none."""
    nothing = Outcome(status=Status.SKIPPED)
    return nothing if results is None else results.measurements.get(name, nothing)


def _critical(figures: Figures) -> str:
    seconds = figures["critical_s"]
    total = sum(seconds.values())
    most = sorted(seconds, key=lambda name: -seconds[name])[:_RESOURCES]
    return ", ".join(f"{n.replace('_', ' ')} {seconds[n] / total:.0%}" for n in most if seconds[n])


def _decisions(figures: Figures) -> str:
    return ", ".join(f"{count} {name}" for name, count in figures["decisions"].items())


def _baselines(results: PartResults | None) -> Lines:
    yield from table("loop", names_of("baselines"), SPEED, results)
    yield from _others("loop", "baselines", results)


def _faults(results: PartResults | None) -> Lines:
    columns = (
        Column(title="steps, each once", show=lambda f: _yes(f["killed_each_once"])),
        Column(title="same bytes", show=lambda f: _yes(f["same_bytes"])),
        Column(title="largest difference", show=number("largest_difference")),
        Column(title="kill to next commit, s", show=lambda f: _listed(f["killed_pauses_s"])),
    )
    yield from table("run", names_of("faults"), columns, results)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def _sizes() -> str:
    return "; ".join(
        f"{name}: {one.parameters / 1e9:.2f} billion, {one.layers} layers of width {one.hidden},"
        f" {one.model_flops / 1e9:.1f} GFLOP a token, {one.recompute_flops / 1e9:.1f} recomputed"
        for name, one in SHAPES.items()
    )


SECTIONS: Mapping[str, PartSection] = MappingProxyType(
    {
        "probe": PartSection(
            title="The machine",
            about="What it refuses the rest goes on without, where that is possible.",
            show=_probe,
        ),
        "correctness": PartSection(
            title="Correctness",
            about="The tests marked `gpu`: as they are, under torch's sanitizer of streams, without"
            " the caching allocator, and with copies that come late at random.",
            show=_correctness,
        ),
        "copies": PartSection(
            title="Copies",
            about="Registered shared memory is what Penstock copies from and to.",
            show=_copies,
        ),
        "kernels": PartSection(
            title="Kernels and updates",
            about="Updates are figure 16 of Deep Optimizer States, for one model of 1.2 billion"
            " parameters: the CPU advances its blocks while the GPU previews its own. In the paper"
            " half on the GPU is fastest.",
            show=_kernels,
        ),
        "models": PartSection(
            title="Models",
            about="LLaMA-shaped, 32,000 tokens, sequences of 2,048, 8 K tokens a micro-batch, 64 K"
            " a step, bf16 weights, fp32 masters on the CPU, AdamW, clipping, full recomputation."
            f" {_sizes()}. Model TFLOP/s are tokens/s times `6 P + 6 L h s`: P parameters"
            " but the embedding's, L layers of width h, s tokens of a sequence, the causal half of"
            " attention. Recomputation, `2 P' + 2 L h s` with P' those of the layers, is counted"
            " apart. Runs of 7 B have a split master and settle early.",
            show=_models,
        ),
        "baselines": PartSection(
            title="Others, on the same models",
            about="The plain loop has everything on the GPU: bf16 weights, fp32 sums of gradients,"
            " fp32 masters, fused AdamW. FSDP2 offloads to pinned memory, fused AdamW on the CPU;"
            " *gradients once a step* keeps their sums on the GPU until the last micro-batch.",
            show=_baselines,
        ),
        "faults": PartSection(
            title="Kills",
            about="A run whose first worker is killed (SIGKILL), beside one that nobody disturbs.",
            show=_faults,
        ),
    }
)
