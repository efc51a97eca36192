"""Where the time of a run went: what metrics say of every step, and what a trace says of a few."""

from __future__ import annotations

from markupsafe import Markup

from penstock.client.reporting.blocks import Block, Chapter, Folded, Picture, Table, Unknown, Words
from penstock.client.reporting.charts import Bar, bars
from penstock.client.reporting.facts import RunFacts
from penstock.client.watching.trace import panels
from penstock.client.watching.trace_report import TraceReport
from penstock.planner.configured import config_prices, optimizer_of
from penstock.planner.render import SECONDS
from penstock.planner.render.as_files import compared_svg
from penstock.planner.traces.causes import Resource
from penstock.planner.traces.critical import critical_path
from penstock.planner.traces.fitted import Fit
from penstock.planner.traces.savings import CostSource, Pricing, savings

MAX_PICTURE_BYTES = 3 << 20
"""Pages with larger pictures are slow to open."""


def where_time_went(facts: RunFacts) -> Chapter:
    """Bubbles and the optimizer's tail of all steps, then a step of the trace."""
    blocks = [*_of_all_steps(facts)]
    traced = facts.traced
    if isinstance(traced, str):
        blocks.append(Unknown("By instruction: a trace says it; see the next section."))
    else:
        blocks += _critical(traced, facts)
        blocks += _instructions(traced)
    return Chapter(name="time", heading="Where the time went", blocks=blocks)


def simulated(facts: RunFacts) -> Chapter:
    """The measured step beside the simulated one, in figures and as a picture."""
    traced = facts.traced
    heading = "Simulated beside measured"
    if isinstance(traced, str):
        return Chapter(name="simulated", heading=heading, blocks=[Unknown(traced)])
    return Chapter(
        name="simulated", heading=heading, blocks=[*_figures(traced), *_picture(traced, facts)]
    )


def _of_all_steps(facts: RunFacts) -> list[Block]:
    readings = facts.readings
    seconds = readings.typical("seconds")
    if not seconds:
        return [Unknown("No step is decided yet.")]
    tail = readings.typical("optimizer_tail_seconds") or 0.0
    bubble = readings.typical("bubble_ratio") or 0.0
    computing = max(0.0, seconds - tail)
    shares = (
        ("devices compute", computing * (1.0 - bubble)),
        ("devices wait (bubbles)", computing * bubble),
        ("optimizer's tail", min(tail, seconds)),
    )
    rows = [
        Bar(
            name=name, value=value, text=f"{SECONDS.format(value, digits=3)}, {value / seconds:.0%}"
        )
        for name, value in shares
    ]
    words = (
        f"Of a median step of {SECONDS.format(seconds, digits=3)}. Bubbles are the devices' time"
        " between the first instruction and the last in which they computed nothing; the tail runs"
        " from the last gradient to the commit."
    )
    if facts.config.cluster.platform.models_time:
        scale = facts.config.emulation.time_scale
        words += f" Seconds are the clock's; one of the emulated cluster takes {scale:g} of them."
    return [Picture(image=bars(rows), caption=words)]


def _critical(traced: TraceReport, facts: RunFacts) -> list[Block]:
    """Every second of a typical step on one resource, and what the step would be without it."""
    attempt, config = traced.typical, facts.config
    fit = Fit.of([attempt], config.cluster.workers)
    path = critical_path(attempt, fit)
    pricing = Pricing.of_fit(fit)
    if config.cluster.platform.models_time:
        prices = config_prices(config, facts.run.table)
        pricing = Pricing(
            costs=prices.costs,
            cluster=prices.cluster,
            optimizer=optimizer_of(config),
            source=CostSource.EMULATED,
        )
    saved = savings(fit.plan, pricing, path)
    found = sorted(path.seconds.items(), key=lambda item: -item[1])
    found = [(resource, seconds) for resource, seconds in found if seconds > 0.0]
    drawn = [
        Bar(
            name=_RESOURCES[resource],
            value=seconds,
            text=f"{SECONDS.format(seconds, digits=3)}, {seconds / path.step_s:.0%}",
        )
        for resource, seconds in found
    ]
    caption = (
        f"Attempt {attempt.number}, a typical one, took {SECONDS.format(path.step_s, digits=3)}."
        " Each second of it belongs to what held it up in the end: the critical path, whose parts"
        " add up to the step."
    )
    rows = [(_RESOURCES[r], SECONDS.format(saved.seconds[r], digits=3)) for r, _ in found]
    if len(saved.critical) > 1:
        names = ", ".join(_RESOURCES[resource] for resource in saved.critical)
        rows.append((f"{names}: together", SECONDS.format(saved.together_s, digits=3)))
    headings = ("if this took no time", "a step would be shorter by (simulated)")
    words = (
        "These do not add up: another chain of work may be nearly as long as the one that is taken"
        " away."
    )
    table = Table(headings=headings, rows=rows, numbers=1)
    return [
        Picture(image=bars(drawn), caption=caption),
        Folded(title="What would be saved", blocks=[table, Words(words)]),
    ]


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
            SECONDS.format(times.seconds, digits=3),
            SECONDS.format(times.waited_s, digits=3),
        )
        for times in traced.opcodes
    ]
    headings = ("instruction", "in an attempt", "median", "of it waited for input")
    table = Table(headings=headings, rows=rows, numbers=1)
    return [Folded(title=f"By instruction, in {len(traced.chosen)} traced steps", blocks=[table])]


def _figures(traced: TraceReport) -> list[Block]:
    measured, simulation = traced.measured, traced.simulated
    pairs = (
        ("step", traced.step_s, traced.simulated_step_s),
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
            f"With {costs} the simulated step is {abs(traced.error):.1%}"
            f" {'longer' if traced.error > 0.0 else 'shorter'} than the measured one."
        ),
        Table(headings=("", "measured", "simulated"), rows=rows, numbers=1),
        Folded(
            title="Idle share of each device",
            blocks=[
                Table(headings=("", "measured", "simulated"), rows=devices, numbers=1),
                Unknown(
                    "What each device waited for in all steps is counted for Prometheus"
                    " (penstock_device_idle_seconds_total, by cause)."
                ),
            ],
        ),
    ]


def _picture(traced: TraceReport, facts: RunFacts) -> list[Block]:
    image = compared_svg(*panels(traced))
    if len(image) > MAX_PICTURE_BYTES:
        command = f"penstock trace {facts.run.path} --svg picture.svg"
        return [Unknown(f"The picture of a step is too large for this page: {command}")]
    caption = (
        "A typical step as it was, above its simulation. Point at a box to see what it is. Rows are"
        " devices, thin ones their copies and sends; the optimizer follows."
    )
    return [Picture(image=Markup(image), caption=caption, paper=True)]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
