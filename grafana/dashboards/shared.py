"""Panels and expressions that stand on more than one dashboard."""

from __future__ import annotations

from grafana_foundation_sdk.builders import bargauge, timeseries

from penstock.grafana.dashboards.colors import CAUSES, RESOURCES
from penstock.grafana.dashboards.panels import bars, lines, stacked
from penstock.grafana.dashboards.queries import NODES, RUN, each, highest, last, rate, total

Size = tuple[int, int]


def utilization() -> str:
    """Returns the share of the devices' peak that the model's own computation takes."""
    done = rate("penstock_device_model_flops_total", NODES)
    return f"{done} / {total('penstock_device_peak_flops_per_second', NODES)}"


def device_seconds(by: str) -> str:
    """Returns the devices' seconds per second, computing and waiting, as ``devices`` that exist."""
    busy = rate("penstock_device_busy_seconds_total", NODES, by)
    idle = rate("penstock_device_idle_seconds_total", NODES, by)
    return f"{busy} + {idle}"


def gradient_norm(size: Size) -> timeseries.Panel:
    """Returns the gradients' norm and its limit."""
    return lines(
        "Gradient norm",
        "Length of the gradient of all weights together. Above the limit the step is amended:"
        " weights are computed again with gradients scaled down to the limit. Rising for long, or"
        " jumping, it announces divergence: lower the learning rate, look at the data.",
        each(highest("penstock_gradient_norm", RUN), "gradient norm"),
        each(highest("penstock_clip_limit", RUN), "limit"),
        unit="none",
        limits_named=("limit",),
        limits=(0, None),
        size=size,
    )


def critical_seconds(size: Size) -> timeseries.Panel:
    """Returns the seconds of a step on its critical path, by resource."""
    seconds = rate("penstock_critical_seconds_total", RUN, "resource")
    steps = rate("penstock_analysed_attempts_total", RUN)
    return stacked(
        "Where a step's seconds go",
        "Every second of a step belongs to the one resource that the step waited for just then, so"
        " the areas add up to the step. Only some steps are analysed"
        " (observability.sample_every), and lines join them. The widest area is where to begin; how"
        " much it would help is in 'A step would be shorter by'.",
        each(f"{seconds} / on () group_left () ({steps} > 0)", "{{resource}}"),
        unit="s",
        gaps=False,
        colors=RESOURCES,
        size=size,
        empty="no step analysed in this time",
    )


def savings(size: Size) -> bargauge.Panel:
    """Returns by how much a step would be shorter without each resource."""
    return bars(
        "A step would be shorter by",
        "What the simulation says of the newest analysed step: seconds that it would be shorter if"
        " this resource took no time. Resources that are critical together do not add up: 'all"
        " together' can be more than the sum, or less.",
        last(f"{highest('penstock_savings_seconds', RUN, 'resource')} > 0", "{{resource}}"),
        last(highest("penstock_savings_together_seconds", RUN), "all together"),
        unit="s",
        colors=RESOURCES,
        size=size,
        empty="no step analysed yet",
    )


def waiting_by_cause(size: Size) -> timeseries.Panel:
    """Returns the share of the devices' time that they wait, by cause."""
    idle = rate("penstock_device_idle_seconds_total", NODES, "cause")
    return stacked(
        "What devices wait for",
        "Share of all devices' time without computation, by what they waited for. Weights: copies"
        " to the device. Activations: from the device before. Peers: other devices still compute"
        " (the pipeline's bubble). Optimizer: its tail after the last gradient. Overhead: the"
        " host's own work between instructions.",
        each(f"{idle} / on () group_left () ({device_seconds('')})", "{{cause}}"),
        unit="percentunit",
        limits=(0, 1),
        colors=CAUSES,
        size=size,
    )
