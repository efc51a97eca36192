"""Pictures of a simulation: text for terminals, SVG for browsers, PNG for everything else.

The instructions themselves, side by side, are :mod:`penstock.planner.validate.check`'s.
"""

from __future__ import annotations

from penstock.planner.render.as_files import png, svg
from penstock.planner.render.as_text import timeline
from penstock.planner.render.chart import Caption, chart
from penstock.planner.render.units import ABSTRACT, SECONDS, TimeUnit

__all__ = [
    "ABSTRACT",
    "SECONDS",
    "Caption",
    "TimeUnit",
    "chart",
    "png",
    "svg",
    "timeline",
]
