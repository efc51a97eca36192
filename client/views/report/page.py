"""The page of a run: tiles and sections, rendered as HTML."""

from __future__ import annotations

import time
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

import penstock
from penstock.client.views.report import sections, timing
from penstock.client.views.report.blocks import Page, Tile
from penstock.client.views.report.charts import short
from penstock.client.views.report.facts import RunFacts
from penstock.client.views.report.incidents import IncidentKind


def page_of(facts: RunFacts) -> Page:
    """Returns the page of one run."""
    config = facts.config
    until = f": {facts.ending}" if facts.ending else ""
    return Page(
        title=facts.name,
        subtitle=f"Run {facts.run.run_id}, made {facts.created}; {facts.state}{until}",
        state=facts.state.value,
        tiles=_tiles(facts),
        sections=[
            sections.result(facts),
            sections.speed(facts),
            timing.where_time_went(facts),
            sections.trained(facts),
            timing.simulated(facts),
            sections.memory(facts),
            sections.faults(facts),
            sections.configuration(facts),
            sections.reproduction(facts),
        ],
        made=made(f"of {config.run.name}, from {facts.run.path}"),
    )


def _tiles(facts: RunFacts) -> list[Tile]:
    readings, steps = facts.readings, facts.config.train.steps
    tiles = [Tile(name="steps", value=f"{readings.step:,}", note=f"of {steps:,}")]
    if facts.epochs:
        passes, _, planned = facts.epochs.partition(" ")
        tiles.append(Tile(name="epochs", value=passes, note=planned))
    loss, held_out = readings.last("loss"), readings.last("loss", evaluations=True)
    if loss is not None:
        note = "made up: emulated devices" if readings.emulated else ""
        tiles.append(Tile(name="loss", value=f"{loss:.4f}", note=note))
    if held_out is not None:
        perplexity = readings.last("perplexity", evaluations=True)
        note = "" if perplexity is None else f"perplexity {perplexity:,.2f}"
        tiles.append(Tile(name="held-out loss", value=f"{held_out:.4f}", note=note))
    rate = readings.median("tokens_per_second")
    if rate is not None:
        tiles.append(Tile(name="tokens a second", value=f"{rate:,.0f}", note="median of all steps"))
    tokens = f"{'' if readings.exact else '≈ '}{short(readings.total('tokens'))}"
    tiles.append(Tile(name="tokens", value=tokens))
    if facts.history.first_s is not None and facts.history.last_s is not None:
        seconds = facts.history.last_s - facts.history.first_s
        tiles.append(Tile(name="from first to last", value=_duration(seconds)))
    faults = facts.history.count(IncidentKind.FAULT)
    on = f"training continued {len(facts.history.recoveries):,} times" if faults else ""
    tiles.append(Tile(name="processes lost", value=f"{faults:,}", note=on))
    return tiles


def render(page: Page) -> str:
    """Returns the page as an HTML document that loads no other file. All texts are escaped."""
    folder = files("penstock.client.views.report") / "templates"
    template = (folder / "page.html.j2").read_text(encoding="utf-8")
    style = (folder / "page.css").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(template).render(page=page, style=Markup(style))


def made(of: str) -> str:
    """Returns the line at the end of a page."""
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"Report {of}, made {now} by Penstock {penstock.__version__}."


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
