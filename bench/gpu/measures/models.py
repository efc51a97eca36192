"""Penstock's own runs: tokens/s, model TFLOP/s, memory, and where the step went.

``streamed``: the model passes through two buffers of the device, stage by stage. ``resident``: all
weights are on the device; the CPU updates them all the same, so they come once a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bench.gpu.measures.trained import Recipe, Trained, train
from bench.gpu.running import Measurement, Task
from bench.gpu.shapes import Shape, shape
from penstock.client.views.trace.comparison import TraceOutputs, make_trace_report
from penstock.planner.traces.measured import measure
from penstock.planner.traces.traced import TracedRun
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.trace_reading import read_traces

RESIDENT = {"scheme": "1f1b", "recompute": "full"}
SMALL_HOST = {"master": "split", "settle": "early"}
"""16 instead of 20 bytes of host memory a parameter: 7 B within 128 GiB."""


def streamed(stages: int) -> dict[str, Any]:
    """Returns a schedule of SPipe with twice as many backward stages as forward stages."""
    return {"scheme": "spipe", "forward_stages": stages, "backward_stages": 2 * stages}


def filled(stages: int) -> dict[str, Any]:
    """Returns a schedule of Mobius that keeps the activations that fit in memory."""
    return {
        "scheme": "mobius",
        "forward_stages": stages,
        "recompute": "full",
        "passes": ["keep-graphs"],
    }


def run(task: Task, *, name: str, steps: int, **settings: Any) -> None:
    """Trains a model, and reports its times and memory."""
    one = shape(name, tiny=task.tiny)
    schedule = settings.pop("schedule")
    if task.tiny and schedule is not None and schedule["scheme"] in _TINY:
        schedule = _TINY[schedule["scheme"]](2)
    recipe = Recipe(shape=one, device=task.device, steps=steps, schedule=schedule, **settings)
    trained = train(task, recipe)
    task.say(**figures(one, trained))
    task.say(**traced(trained))


_TINY: Mapping[str, Callable[[int], dict[str, Any]]] = {"spipe": streamed, "mobius": filled}
"""Schedules of streamed rows, for models of few layers."""


def figures(one: Shape, trained: Trained) -> dict[str, Any]:
    """Returns the figures of the measured steps."""
    rate = trained.tokens_per_s
    return {
        "parameters": one.parameters,
        "step_tokens": one.step_tokens,
        "micro_batch_tokens": one.micro_batch * one.sequence,
        "steps": len(trained.steps),
        "step_s": one.step_tokens / rate,
        "tokens_per_s": rate,
        "model_tflops": rate * one.model_flops / 1e12,
        "recompute_tflops": rate * one.recompute_flops / 1e12,
        "decisions": dict(Counter(step["decision"] for step in trained.steps)),
        "losses": [round(step["loss"], 4) for step in trained.steps],
        "tail_s": _mean(step.get("optimizer_tail_seconds") for step in trained.steps),
        "start_s": trained.start_s,
        "host_bytes": trained.host_bytes,
    }


def traced(trained: Trained) -> dict[str, Any]:
    """Returns the critical path of a typical step, hidden copies and sweeps, and device memory."""
    report = make_trace_report(trained.run_dir, None, None, TraceOutputs()).to_dict()
    measured, step = report["measured"], report["where_the_step_went"]
    run = RunDirectory(trained.run_dir)
    members = TracedRun.of(read_traces(run.path), [node.name for node in run.config.cluster.nodes])
    attempts = measure(members, run.plan, copies=run.config.cluster.platform.own_memory).attempts
    peaks = [
        device.peak.num_bytes
        for attempt in attempts
        for device in attempt.trace.devices.values()
        if device.peak is not None
    ]
    return {
        "critical_s": step["critical_seconds"],
        "savings_s": step["savings_seconds"],
        "copies_hidden": measured["copies_hidden"],
        "optimizer_hidden": measured["optimizer_hidden"],
        "bubble_ratio": measured["bubble_ratio"],
        "simulated_step_s": report["simulated_step_seconds"],
        "device_bytes": max(peaks, default=None),
    }


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _row(title: str, deadline_s: float, of: str, steps: int, **settings: Any) -> Measurement:
    return Measurement(
        name=title,
        deadline_s=deadline_s,
        run=partial(run, name=of, steps=steps, **settings),
    )


HALF_ON_GPU = {"passes": ["interleave-updates"], "update_stride": 2}
PLAIN = {"compile": False}
ADAPTERS = {"r": 16, "alpha": 32}
MEASUREMENTS = (
    _row("4 B streamed", 120, "4 B", 4, schedule=streamed(6)),
    _row("4 B default", 120, "4 B", 4, schedule=None),
    _row("4 B streamed, filled", 120, "4 B", 4, schedule=filled(17)),
    _row("4 B streamed, adapters", 90, "4 B", 4, schedule=streamed(6), adapter=ADAPTERS),
    _row("4 B streamed, not compiled", 105, "4 B", 4, schedule=streamed(6), model=PLAIN),
    _row(
        "4 B streamed, not compiled nor deterministic",
        100,
        "4 B",
        3,
        schedule=streamed(6),
        model={**PLAIN, "deterministic": False},
    ),
    _row("7 B streamed", 170, "7 B", 3, schedule=streamed(8), optimizer=SMALL_HOST),
    _row("1.2 B streamed", 60, "1.2 B", 6, schedule=streamed(4)),
    _row("1.2 B streamed, not compiled", 50, "1.2 B", 6, schedule=streamed(4), model=PLAIN),
    _row("4 B resident", 100, "4 B", 4, schedule=RESIDENT),
    _row("1.2 B resident", 50, "1.2 B", 6, schedule=RESIDENT),
    _row("4 B streamed, all steps clipped", 100, "4 B", 3, schedule=streamed(6), clip=1e-3),
    _row(
        "4 B streamed, half updated on the GPU",
        100,
        "4 B",
        3,
        schedule={**streamed(6), **HALF_ON_GPU},
    ),
    _row("7 B resident", 160, "7 B", 3, schedule=RESIDENT, optimizer=SMALL_HOST),
)
