"""What the reports of a configuration's plan and of a schedule by name have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.planner.trial import Trial
from penstock.protocol.plan import Plan, StageRange


def figures(trial: Trial) -> dict[str, Any]:
    """The figures that every ``--json`` of a plan has, times in seconds (or units)."""
    plan, simulation = trial.plan, trial.simulation
    return {
        "scheme": plan.scheme,
        "devices": plan.num_devices,
        "micro_batches": plan.num_microbatches,
        "makespan": simulation.makespan_s,
        "bubble_ratio": simulation.bubble_ratio,
        "device_busy": [device.busy_s for device in simulation.devices],
        "device_bubble_ratio": idle_shares(trial),
        "optimizer_tail": simulation.optimizer_tail_s,
        "peak_memory_bytes": list(trial.peak_bytes),
        "lower_bound": trial.lower_bound_s,
        "num_instructions": sum(map(len, plan.programs)),
    }


def stages_text(ranges: Sequence[StageRange]) -> str:
    """Blocks and devices of stages on one line; of many the first and the last."""
    shown = [f"{s.start}-{s.stop - 1}@{s.device}" for s in ranges]
    if len(shown) > 16:
        shown = [*shown[:12], "…", *shown[-2:]]
    return "  ".join(shown) + "   (blocks@device)"


def heading(plan: Plan, passes: Sequence[str] = ()) -> str:
    """A schedule in one line."""
    through = f" + {', '.join(passes)}" if passes else ""
    cut = (len(plan.forward_stages), len(plan.backward_stages))
    same = cut[0] == cut[1]
    stages = f"{cut[0]} stages" if same else f"{cut[0]} forward, {cut[1]} backward stages"
    return (
        f"{plan.scheme}{through}: {plan.num_devices} devices, {plan.num_microbatches}"
        f" micro-batches, {stages}"
    )


def idle_shares(trial: Trial) -> list[float]:
    """Per device the share of the pipeline's time in which it does not compute."""
    period = trial.simulation.pipeline_s
    return [d.idle_s / period if period > 0.0 else 0.0 for d in trial.simulation.devices]
