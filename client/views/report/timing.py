"""Sections about the time of the typical step, from a trace or from the metrics.

The typical step has the time nearest to the median
(:func:`~penstock.client.views.trace.trace_report.typical_of`). Bars, critical path, table and
picture all show this step.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from penstock.client.views.report.blocks import (
    Block,
    Chapter,
    Folded,
    Picture,
    Table,
    Unknown,
    Words,
)
from penstock.client.views.report.charts import Bar, bars
from penstock.client.views.report.facts import RunFacts
from penstock.client.views.trace.comparison import panels
from penstock.client.views.trace.trace_report import TraceReport
from penstock.host.files import is_number
from penstock.planner.render import SECONDS
from penstock.planner.render.as_files import compared_svg
from penstock.planner.render.chart import NARROW, WIDE
from penstock.planner.traces.dependency_graph import Resource

MAX_PICTURE_BYTES = 3 << 20
"""Largest picture on a page; larger ones are slow to open."""


def where_time_went(facts: RunFacts) -> Chapter:
    """Returns the section with bubbles, optimizer tail and critical path of the typical step."""
    traced = facts.traced
    if isinstance(traced, str):
        by_instruction = Unknown("Times of instructions need a trace; see the next section.")
        blocks = [*_untraced(facts), by_instruction]
    else:
        blocks = [*_traced(traced, facts), *_critical(traced), *_instructions(traced)]
    return Chapter(name="time", heading="Where the time went", blocks=blocks)


def simulated(facts: RunFacts) -> Chapter:
    """Returns the section that compares the typical step with its simulation."""
    traced = facts.traced
    heading = "Simulated and measured"
    if isinstance(traced, str):
        return Chapter(name="simulated", heading=heading, blocks=[Unknown(traced)])
    return Chapter(
        name="simulated", heading=heading, blocks=[*_figures(traced), *_picture(traced, facts)]
    )


_BUBBLES = (
    "Bubbles are the devices' time between the first instruction and the last in which they"
    " computed nothing"
)


def _traced(traced: TraceReport, facts: RunFacts) -> list[Block]:
    """Returns shares of the typical step of a trace."""
    step = traced.typical
    shares = (
        ("devices compute", step.pipeline_s * (1.0 - step.bubble_ratio)),
        ("devices wait (bubbles)", step.pipeline_s * step.bubble_ratio),
        ("optimizer's tail", step.optimizer_tail_s),
        ("between attempts", traced.typical_between_s),
    )
    words = (
        f"Of {len(traced.chosen)} traced steps, the typical step has the time nearest to the"
        f" median: attempt {step.number}. The step takes {_time(traced.typical_step_s)}."
        f" {_BUBBLES}; the tail runs from the last computation to the last sweep or copy. Between"
        " attempts are messages, decision, journal and the next batch."
    )
    if facts.config.cluster.platform.simulated_clock:
        words += " Seconds are those of the emulated cluster."
    return [_share_bars(shares, traced.typical_step_s, words)]


def _untraced(facts: RunFacts) -> list[Block]:
    """Returns shares of the typical step from its line of metrics."""
    line = facts.readings.typical
    if line is None:
        return [Unknown("No step is complete yet.")]
    seconds = float(line["seconds"])
    tail, bubble = (
        line[key] if is_number(line.get(key)) else 0.0
        for key in ("optimizer_tail_seconds", "bubble_ratio")
    )
    computing = max(0.0, seconds - tail)
    shares = (
        ("devices compute", computing * (1.0 - bubble)),
        ("devices wait (bubbles)", computing * bubble),
        ("optimizer's tail", min(tail, seconds)),
    )
    words = (
        "The typical step has the time nearest to the median of all steps: step"
        f" {line['step']}. The step takes {_time(seconds)}. {_BUBBLES}; the tail runs from the last"
        " gradient to the commit."
    )
    if facts.config.cluster.platform.simulated_clock:
        scale = facts.config.emulation.time_scale
        words += f" Seconds are the clock's; one of the emulated cluster takes {scale:g} of them."
    return [_share_bars(shares, seconds, words)]


def _share_bars(shares: Sequence[tuple[str, float]], whole_s: float, caption: str) -> Picture:
    """Returns bars of parts of a step, with seconds and shares."""
    rows = [
        Bar(name=name, value=value, text=f"{_time(value)}, {value / whole_s if whole_s else 0:.0%}")
        for name, value in shares
    ]
    return Picture(image=bars(rows), caption=caption)


def _time(seconds: float) -> str:
    return SECONDS.format(seconds, digits=3)


def _critical(traced: TraceReport) -> list[Block]:
    """Returns the critical path of the typical step by resource, and savings without each."""
    path, saved = traced.step.path, traced.step.saved
    parts = sorted(path.seconds.items(), key=lambda item: -item[1])
    parts = [(resource, seconds) for resource, seconds in parts if seconds > 0.0]
    caption = (
        "Each second of the typical step belongs to the resource that the step waited for. These"
        f" parts of the critical path add up to {_time(path.step_s)}."
    )
    drawn = _share_bars([(_RESOURCES[r], s) for r, s in parts], path.step_s, caption)
    rows = [(_RESOURCES[r], _time(saved.seconds[r])) for r, _ in parts]
    if len(saved.critical) > 1:
        names = ", ".join(_RESOURCES[resource] for resource in saved.critical)
        rows.append((f"{names}: together", _time(saved.together_s)))
    headings = ("if this took no time", "the typical step would be shorter by (simulated)")
    words = (
        "Savings do not add up: another chain of work may be nearly as long as the critical path."
    )
    table = Table(headings=headings, rows=rows, numbers=1)
    return [drawn, Folded(title="What would be saved", blocks=[table, Words(words)])]


_RESOURCES = {
    Resource.COMPUTE: "computing",
    Resource.H2D: "copies to devices",
    Resource.D2H: "copies from devices",
    Resource.PEER_LINKS: "between devices",
    Resource.NETWORK: "between nodes",
    Resource.OPTIMIZER: "optimizer",
    Resource.DATA: "reading data",
    Resource.SCHEDULER: "scheduler",
    Resource.OVERHEAD: "overhead",
}


def _instructions(traced: TraceReport) -> list[Block]:
    rows = [
        (
            times.opcode.name.lower().replace("_", " "),
            f"{times.count:,}",
            _time(times.seconds),
            _time(times.waited_s),
        )
        for times in traced.opcodes
    ]
    headings = ("instruction", "in an attempt", "median", "of it waited for input")
    table = Table(headings=headings, rows=rows, numbers=1)
    return [Folded(title=f"By instruction, in {len(traced.chosen)} traced steps", blocks=[table])]


def _figures(traced: TraceReport) -> list[Block]:
    measured, simulation = traced.typical_figures, traced.simulated
    pairs = (
        ("step", traced.typical_step_s, traced.simulated_typical_s),
        ("attempt", measured.makespan_s, simulation.makespan_s),
        ("until the last computation", measured.pipeline_s, simulation.pipeline_s),
        ("optimizer's tail", measured.optimizer_tail_s, simulation.optimizer_tail_s),
    )
    rows = [(name, *(SECONDS.format(value) for value in both)) for name, *both in pairs]
    shares = (
        ("bubbles", measured.bubble_ratio, simulation.bubble_ratio),
        ("copies hidden behind computation", measured.copies_hidden, simulation.copies_hidden),
        (
            "sweeps hidden behind computation",
            measured.optimizer_hidden,
            simulation.optimizer_hidden,
        ),
    )
    rows += [(name, *(map(_share, both))) for name, *both in shares]
    idle = zip(measured.device_bubbles, simulation.device_bubbles, strict=True)
    devices = [(f"device {d}", *map(_share, both)) for d, both in enumerate(idle)]
    costs = traced.costs or "costs that are fitted to this trace"
    return [
        Words(
            f"With {costs} the simulated attempt takes {SECONDS.format(simulation.makespan_s)},"
            f" {abs(traced.typical_error):.1%}"
            f" {'more' if traced.typical_error > 0.0 else 'less'} than the measured one of the"
            f" typical step, which takes {SECONDS.format(measured.makespan_s)}."
        ),
        Table(headings=("", "measured", "simulated"), rows=rows, numbers=1),
        Folded(
            title="Idle share of each device",
            blocks=[
                Table(headings=("", "measured", "simulated"), rows=devices, numbers=1),
                Unknown(
                    "Prometheus has the waiting times of each device in all steps by cause"
                    " (penstock_device_idle_seconds_total)."
                ),
            ],
        ),
    ]


def _picture(traced: TraceReport, facts: RunFacts) -> list[Block]:
    image, narrow = (compared_svg(*panels(traced), columns) for columns in (WIDE, NARROW))
    if len(image) > MAX_PICTURE_BYTES:
        command = f"penstock trace {facts.run.path} --svg picture.svg"
        return [Unknown(f"The picture of the typical step is too large for this page: {command}")]
    caption = (
        "The typical step above its simulation. Point at a box for its name. Rows are devices; thin"
        " rows are copies and sends. The optimizer follows."
    )
    return [Picture(image=Markup(image), narrow=Markup(narrow), caption=caption, paper=True)]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
