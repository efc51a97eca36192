"""A comparison of two runs: configurations, curves in one chart, figures with their ratios."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.client.views.report.blocks import (
    Block,
    Chapter,
    Page,
    Picture,
    Table,
    Tile,
    Unknown,
    Words,
)
from penstock.client.views.report.charts import Series, curves
from penstock.client.views.report.facts import RunFacts, flat_config
from penstock.client.views.report.incidents import IncidentKind
from penstock.client.views.report.page import made
from penstock.client.views.report.sections import as_text
from penstock.client.views.trace.trace_report import TraceReport

Figure = tuple[str, float | None, float | None, str]
"""A name, both values, and the format of the values."""


def comparison_of(first: RunFacts, second: RunFacts) -> Page:
    """Returns the page that compares two runs."""
    names = _names(first, second)
    return Page(
        title=f"{names[0]} and {names[1]}",
        subtitle=f"Run {first.run.run_id} ({first.state}) and run {second.run.run_id}"
        f" ({second.state})",
        state="compared",
        tiles=_tiles(first, second, names),
        sections=[
            _differences(first, second, names),
            _curves(first, second, names),
            _figures(first, second, names),
            _software(first, second, names),
        ],
        made=made(f"from {first.run.path} and {second.run.path}"),
    )


def _names(first: RunFacts, second: RunFacts) -> tuple[str, str]:
    if first.name != second.name:
        return first.name, second.name
    return f"{first.name} ({first.run.run_id})", f"{second.name} ({second.run.run_id})"


def _tiles(first: RunFacts, second: RunFacts, names: tuple[str, str]) -> list[Tile]:
    tiles = []
    for name, left, right, form in _rows(first, second):
        if left and right is not None and name in _HEADLINES:
            value = f"{right:{form}}"
            note = f"{right / left:.3g} times the {left:{form}} of {names[0]}"
            tiles.append(Tile(name=name, value=value, note=note))
    return tiles


_HEADLINES = ("tokens a second", "loss", "loss on held-out data", "seconds a step")


def _differences(first: RunFacts, second: RunFacts, names: tuple[str, str]) -> Chapter:
    left, right = flat_config(first.config), flat_config(second.config)
    rows: list[tuple[str, ...]] = [
        (key, as_text(left.get(key)), as_text(right.get(key)))
        for key in dict.fromkeys((*left, *right))
        if left.get(key) != right.get(key)
    ]
    fingerprints = [facts.data.get("fingerprint") for facts in (first, second)]
    if fingerprints[0] != fingerprints[1]:
        rows.append(("(fingerprint of the data)", *(str(f)[:12] for f in fingerprints)))
    table = Table(headings=("key", *names), rows=rows)
    return Chapter(
        name="configuration", heading="Differences of the configurations", blocks=[table]
    )


def _curves(first: RunFacts, second: RunFacts, names: tuple[str, str]) -> Chapter:
    blocks: list[Block] = []
    for key, unit, from_zero in (
        ("loss", "loss", False),
        ("tokens_per_second", "tokens/s", True),
        ("grad_norm", "gradient norm", False),
    ):
        series = [
            Series(name=name, points=facts.readings.points(key))
            for name, facts in zip(names, (first, second), strict=True)
        ]
        if key == "loss":
            series += [
                Series(
                    name=f"{name}, held-out data",
                    points=facts.readings.points(key, evaluations=True),
                    dots=True,
                )
                for name, facts in zip(names, (first, second), strict=True)
            ]
        blocks.append(Picture(image=curves(series, unit, from_zero=from_zero)))
    if not (first.readings.steps or second.readings.steps):
        blocks = [Unknown("Neither run has decided a step yet.")]
    return Chapter(name="curves", heading="Curves", blocks=blocks)


def _figures(first: RunFacts, second: RunFacts, names: tuple[str, str]) -> Chapter:
    rows = []
    for name, left, right, form in _rows(first, second):
        ratio = f"{right / left:.3f}x" if left and right is not None else "-"
        texts = ("-" if value is None else f"{value:{form}}" for value in (left, right))
        rows.append((name, *texts, ratio))
    headings = ("figure", *names, "second over first")
    return Chapter(
        name="figures",
        heading="Figures",
        blocks=[
            Words("Times, rates and bubbles are medians of all steps."),
            Table(headings=headings, rows=rows, numbers=1),
        ],
    )


def _rows(first: RunFacts, second: RunFacts) -> Iterator[Figure]:
    for (name, left, form), (_, right, _) in zip(_values(first), _values(second), strict=True):
        yield name, left, right, form


def _values(facts: RunFacts) -> Iterator[tuple[str, float | None, str]]:
    """Yields the figures of a run: medians over steps, and last values."""
    readings, history, traced = facts.readings, facts.history, facts.traced
    yield "steps", float(readings.step), ",.0f"
    yield "epochs", readings.last("data_epoch"), ".4g"
    yield "loss", readings.last("loss"), ".4f"
    yield "loss on held-out data", readings.last("loss", evaluations=True), ".4f"
    yield "tokens a second", readings.median("tokens_per_second"), ",.0f"
    yield "seconds a step", readings.median("seconds"), ".4g"
    yield "optimizer's tail, seconds", readings.median("optimizer_tail_seconds"), ".4g"
    yield "bubbles", readings.median("bubble_ratio"), ".1%"
    yield (
        "peak of device memory, bytes",
        max(readings.values("peak_device_bytes"), default=None),
        ",.0f",
    )
    yield "tokens in all", readings.total("tokens"), ",.0f"
    simulated = traced.simulated_typical_s if isinstance(traced, TraceReport) else None
    yield "simulated step, seconds", simulated, ".4g"
    yield "steps clipped", float(readings.decisions.get("amend", 0)), ",.0f"
    yield "steps skipped", float(readings.decisions.get("skip", 0)), ",.0f"
    yield "processes lost", float(history.count(IncidentKind.FAULT)), ",.0f"


def _software(first: RunFacts, second: RunFacts, names: tuple[str, str]) -> Chapter:
    heading = "Versions"
    if first.software is None or second.software is None:
        text = "Versions of one run are unknown: an older Penstock prepared the run."
        return Chapter(name="versions", heading=heading, blocks=[Unknown(text)])
    left, right = first.software, second.software
    packages = dict.fromkeys((*left.packages, *right.packages))
    rows = [(n, left.packages.get(n, "-"), right.packages.get(n, "-")) for n in packages]
    rows += [("system", left.system, right.system), ("processor", left.processor, right.processor)]
    return Chapter(
        name="versions", heading=heading, blocks=[Table(headings=("", *names), rows=rows)]
    )
