"""The page ``docs/evidence/PAPERS.md``: tables as Markdown, schemes side by side, pictures.

What the tables say is computed by the modules of the papers; here is only how they are written.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from penstock.host.errors import ConfigError
from penstock.planner.cost.sources import UnitCosts
from penstock.planner.planning.build import ScheduleRequest, with_stages
from penstock.planner.planning.pipeline import PlanContext, price, try_out
from penstock.planner.render import ABSTRACT, Caption, svg
from penstock.planner.schemes import SCHEMES
from penstock.planner.simulate import Simulation
from penstock.protocol.plan.instructions import RecomputeAfter


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperTable:
    """A table of the page: ``rows`` of formatted cells under ``columns``.

    ``text`` says what is compared and how: it names the paper's section, table or figure, the
    assumptions, and the constants that the paper leaves out.
    """

    title: str
    text: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Evidence(StrEnum):
    """How we know a number of ours. "Measured" is only what a clock saw on real work."""

    SIMULATED = "simulated"
    """The planner's simulator, with costs from data sheets."""
    FITTED = "simulated, fitted"
    """As before, with a constant that was fitted to rows of the same figure or table."""
    EMULATED = "emulated"
    """Real daemons and messages around waits of the simulator's costs: no second source of time."""
    CPU = "real run, CPUs"
    GPU = "real run, GPU"
    COMPUTED = "computed"
    """A formula, a count or a proof; no time in it."""
    TESTED = "tested"
    """A property that tests of the running system assert."""
    MISSING = "not reproduced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One figure, table or numbered claim of a paper.

    ``where`` it stands, what the paper ``says``, what we ``get`` (computed when the page is made,
    or read from a recorded run), and ``evidence``. Where nothing is reproduced, ``get`` says why.
    """

    where: str
    says: str
    get: str
    evidence: Evidence


def claims_table(paper: str, claims: Sequence[Claim], text: str = "") -> PaperTable:
    """Returns the first table of a paper: every figure, table and numbered claim, none left out."""
    return PaperTable(
        title=f"{paper}: every figure, table and claim",
        text=text or "Details are in the tables below.",
        columns=("where", "the paper", "here", "how we know"),
        rows=tuple((one.where, one.says, one.get, one.evidence.value) for one in claims),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """A paper: ``name`` for short, and what stands on its first page."""

    name: str
    title: str


PAPERS: Mapping[str, Paper] = MappingProxyType(
    {
        "mario": Paper(
            name="Mario",
            title="Mario: Near Zero-cost Activation Checkpointing in Pipeline Parallelism",
        ),
        "two_bp": Paper(name="2BP", title="2BP: 2-Stage Backpropagation"),
        "spipe": Paper(
            name="SPipe",
            title="SPipe: Hybrid GPU and CPU Pipeline for Training LLMs under Memory Pressure",
        ),
        "obscura": Paper(
            name="Obscura",
            title="Obscura: Concealing Recomputation Overhead in Training of Large Language Models"
            " with Bubble-filling Pipeline Transformation",
        ),
        "deep_optimizer_states": Paper(
            name="Deep Optimizer States",
            title="Deep Optimizer States: Towards Scalable Training of Transformer Models Using"
            " Interleaved Offloading",
        ),
    }
)
"""By the modules of this folder that have their tables, in the order of the page."""

_TEXT_WIDTH = 100
_DEVICES = 4
_MICRO_BATCHES = 8
_ANY = (None, None)

_HEAD = """\
# The papers' numbers beside ours

Written by `make papers`; every number of ours is computed when the page is made. What a table
compares, its assumptions, and the constants that a paper leaves out, stand above it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSection:
    """The tables of one paper."""

    paper: Paper
    tables: tuple[PaperTable, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One schedule in units: ``name`` of its file, without ending; ``request`` and costs."""

    name: str
    caption: str
    request: ScheduleRequest
    costs: UnitCosts

    def simulate(self) -> Simulation:
        """Returns the schedule's time line."""
        prices = price(self.costs, self.request)
        return try_out(self.request, PlanContext(prices=prices))

    def svg(self) -> str:
        """Returns the schedule's picture."""
        return svg(self.simulate(), Caption(heading=self.caption, unit=ABSTRACT))


def page(sections: Sequence[PaperSection], schemes: PaperTable, pictures: Sequence[Picture]) -> str:
    """Returns the whole page; pictures are expected in ``pictures/papers/`` beside it."""
    parts = [_HEAD, _contents(sections), *map(section_text, sections)]
    parts.append(f"## Schemes\n\n{table(schemes)}")
    if pictures:
        images = "\n\n".join(f"![{p.caption}](pictures/papers/{p.name}.svg)" for p in pictures)
        parts.append(f"## Pictures\n\n{images}\n")
    return "\n".join(parts)


def _contents(sections: Sequence[PaperSection]) -> str:
    titles = [*(section.paper.name for section in sections), "Schemes", "Pictures"]
    return "".join(f"* [{title}](#{_anchor(title)})\n" for title in titles)


def _anchor(title: str) -> str:
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -")
    return kept.replace(" ", "-")


def section_text(section: PaperSection) -> str:
    """Returns a paper's part of the page."""
    tables = "\n".join(table(one) for one in section.tables)
    return f"## {section.paper.name}\n\n*{section.paper.title}*\n\n{tables}"


def table(one: PaperTable) -> str:
    """Returns a table as Markdown: heading, text, and aligned columns."""
    rows = [one.columns, *one.rows]
    cells = [[_escape(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(one.columns))]
    lines = [_line(row, widths) for row in cells]
    lines.insert(1, _line(["-" * width for width in widths], widths))
    text = textwrap.fill(one.text, _TEXT_WIDTH, break_long_words=False, break_on_hyphens=False)
    return f"### {one.title}\n\n{text}\n\n" + "\n".join(lines) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def schemes_table() -> PaperTable:
    """Compares every scheme at one size, on a model of equal work: times, bubbles, what devices
    keep.
    """
    return PaperTable(
        title=f"{_DEVICES} devices, {_MICRO_BATCHES} micro-batches",
        text=(
            "One model for all: a quarter of it takes 1 forward, 1 for each half of its backward"
            " (p1 and p2), and 1 to recompute; transfers and the optimizer take nothing. A scheme"
            " with more stages has smaller ones. *Bound*: no order of the same instructions on the"
            " same devices is faster (`planner/schedule/bounds.py`). *Kept*: activations of a"
            " device at its peak, in units of a quarter of the model and one micro-batch. Schemes"
            " that stream weights recompute fully by default; their checkpoints count as nothing"
            " here."
        ),
        columns=("scheme", "stages", "recompute", "time", "bound", "bubbles", "kept"),
        rows=tuple(_scheme_row(name) for name in SCHEMES),
    )


def _scheme_row(name: str) -> tuple[str, ...]:
    request = ScheduleRequest(
        scheme=name,
        num_devices=_DEVICES,
        num_microbatches=_MICRO_BATCHES,
        recompute=SCHEMES[name].recompute_modes[0],
        recompute_after=RecomputeAfter.GRADIENT,
    )
    try:
        settled = with_stages(request)
        assert settled.forward_stages is not None
        share = _DEVICES / settled.forward_stages
        costs = UnitCosts(
            forward=share, backward_input=share, backward_weight=share, recompute=share
        )
        simulation = try_out(settled, PlanContext(prices=price(costs, settled)))
    except ConfigError as error:
        return (name, str(error), *([""] * 5))
    stages = dict.fromkeys((settled.forward_stages, settled.backward_stages))
    kept = max(peak.total_bytes for peak in simulation.peaks) * share
    return (
        name,
        "/".join(map(str, stages)),
        request.recompute or "",
        f"{simulation.makespan_s:.4g}",
        f"{simulation.lower_bound_s:.4g}",
        f"{simulation.bubble_ratio:.1%}",
        f"{kept:.3g}",
    )


def _request(
    scheme: str, *passes: str, micro_batches: int = 4, stages: tuple[int | None, int | None] = _ANY
) -> ScheduleRequest:
    """Returns a schedule on four devices. ``stages``: forward and backward."""
    return ScheduleRequest(
        scheme=scheme,
        num_devices=4,
        num_microbatches=micro_batches,
        forward_stages=stages[0],
        backward_stages=stages[1],
        recompute_after=RecomputeAfter.GRADIENT,
        passes=passes,
    )


_UNITS = UnitCosts()
_PAPER_UNITS = UnitCosts(backward_input=0.5, backward_weight=0.5)
"""SPipe, figures 2 and 8: forward, recomputation and backward of a forward stage take 1 each."""

PICTURES: tuple[Picture, ...] = (
    Picture(name="1f1b", caption="1F1B", request=_request("1f1b"), costs=_UNITS),
    Picture(
        name="mario",
        caption="1F1B, Mario's four passes",
        request=_request("1f1b", "mario"),
        costs=_UNITS,
    ),
    Picture(name="2bp", caption="1F1B with 2BP", request=_request("1f1b", "2bp"), costs=_UNITS),
    Picture(name="chimera", caption="Chimera", request=_request("chimera"), costs=_UNITS),
    Picture(name="zb-v", caption="ZB-V", request=_request("zb-v", micro_batches=8), costs=_UNITS),
    Picture(
        name="mobius",
        caption="Mobius, 8 stages",
        request=_request("mobius", stages=(8, 8)),
        costs=_PAPER_UNITS,
    ),
    Picture(
        name="spipe",
        caption="SPipe, 8 forward and 16 backward stages",
        request=_request("spipe", stages=(8, 16)),
        costs=_PAPER_UNITS,
    ),
)
"""The pictures that the page shows."""
