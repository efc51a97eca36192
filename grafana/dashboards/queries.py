"""Pieces of PromQL: whose series are meant, rates, ratios, quantiles.

Metrics of the whole run (schedulerd, observerd) are selected by run alone, so that they stay when
somebody looks at one node. Sums drop the address that was scraped, which changes when a process or
a node comes back.
"""

from __future__ import annotations

from dataclasses import dataclass

RUN = 'run="$run"'
NODES = 'run="$run", node=~"$node"'
WINDOW = "$window"
"""Rates are averages over this; a variable, since steps take from milliseconds to minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """``legend`` names a series by its labels, ``{{device}}``; without one, Grafana shows them all.

    An ``instant`` query is asked for the end of the time shown only.
    """

    expr: str
    legend: str = ""
    instant: bool = False
    heatmap: bool = False


def each(expr: str, legend: str = "") -> Query:
    """Returns a query for the time shown."""
    return Query(expr=expr, legend=legend)


def last(expr: str, legend: str = "") -> Query:
    """Returns a query for the end of the time shown."""
    return Query(expr=expr, legend=legend, instant=True)


def rate(metric: str, where: str, by: str = "", window: str = WINDOW) -> str:
    """Returns a counter's growth per second, summed over all labels but those in ``by``."""
    return f"{_sum(by)}(rate({metric}{{{where}}}[{window}]))"


def increase(metric: str, where: str, by: str = "", window: str = "$__range") -> str:
    """Returns a counter's growth in the time shown, summed over all labels but those in ``by``."""
    return f"{_sum(by)}(increase({metric}{{{where}}}[{window}]))"


def highest(metric: str, where: str, by: str = "") -> str:
    """Returns a gauge, one series for each value of the labels in ``by``."""
    return f"max by ({by}) ({metric}{{{where}}})" if by else f"max({metric}{{{where}}})"


def total(metric: str, where: str, by: str = "") -> str:
    """Returns a gauge summed over all labels but those in ``by``."""
    return f"{_sum(by)}({metric}{{{where}}})"


def quantile(share: float, histogram: str, where: str, by: str = "", window: str = WINDOW) -> str:
    """Returns a quantile of what a histogram has counted within the window."""
    labels = ", ".join(filter(None, (by, "le")))
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', where, labels, window)})"


def mean(histogram: str, where: str, by: str = "", window: str = WINDOW) -> str:
    """Returns the mean of what a histogram has counted within the window; nothing if it is none."""
    seconds = rate(f"{histogram}_sum", where, by, window)
    return f"{seconds} / ({rate(f'{histogram}_count', where, by, window)} > 0)"


def _sum(by: str) -> str:
    return f"sum by ({by}) " if by else "sum"
