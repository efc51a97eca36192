"""``penstock trace``: compares a traced run with a simulation of its plan.

The simulation takes its costs from the trace (:mod:`penstock.planner.traces.fitted`), so that the
comparison judges the schedule, or from a profile. Runs on emulated devices are simulated with the
emulated costs, and shown in seconds of the cluster (``emulation.time_scale``).
:mod:`penstock.protocol.run.trace` writes traces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from penstock.client.planning.outputs import heading, write_file
from penstock.client.views.trace.chrome_trace import Range, chrome_trace
from penstock.client.views.trace.step_report import StepReport
from penstock.client.views.trace.trace_report import TraceReport, compare_memory, typical_of
from penstock.host.errors import ConfigError
from penstock.planner.planning.pricing import config_prices, optimizer_of
from penstock.planner.render import Caption
from penstock.planner.render.as_files import compared_png, compared_svg
from penstock.planner.render.chart import Panel
from penstock.planner.simulate import Simulation, simulate
from penstock.planner.traces.fitted import Fit
from penstock.planner.traces.measured import MeasuredAttempt, Measurement, measure
from penstock.planner.traces.traced import TracedRun
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.trace_reading import read_traces

WARM_UP = 3
"""Number of first attempts that figures leave out, since they fault pages in and fill caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOutputs:
    """Files to write, or None."""

    chrome: Path | None = None
    svg: Path | None = None
    png: Path | None = None


def parse_attempts(attempt: int | None, attempts: str | None) -> Range | None:
    """Returns the range of ``--attempt`` or ``--attempts A:B``. Either end may be missing.

    Raises:
        ConfigError: both options are given, or the value is no range.
    """
    if attempt is not None and attempts is not None:
        raise ConfigError("--attempt and --attempts: give only one of the two")
    if attempt is not None:
        return Range(first=attempt, last=attempt)
    if attempts is None:
        return None
    match = re.fullmatch(r"(\d{0,18}):(\d{0,18})", attempts, re.ASCII)
    if match is None:
        raise ConfigError(f"--attempts {attempts}: expected A:B, such as 10:20, 10: or :20")
    first, last = match.groups()
    chosen = Range(first=int(first or 0), last=int(last) if last else 2**62)
    if chosen.last < chosen.first:
        raise ConfigError(f"--attempts {attempts}: the end is before the start")
    return chosen


def make_trace_report(
    run_dir: Path, wanted: Range | None, profile: Path | None, outputs: TraceOutputs
) -> TraceReport:
    """Reads the traces of a run, writes the files in ``outputs``, and returns the comparison.

    Writes the Chrome trace first, since it needs no complete attempt.

    Raises:
        ConfigError: the path is no run directory, or has no trace. Or no wanted attempt is traced
            and complete, or a file cannot be read or written.
    """
    run, trace = RunDirectory(run_dir), read_traces(run_dir)
    if run.config.cluster.platform.simulated_clock:
        trace = trace.slowed(1.0 / run.config.emulation.time_scale)
    names = tuple(node.name for node in run.config.cluster.nodes)
    traced = TracedRun.of(trace, names)
    _check_wanted(traced, wanted, run.config.observability.traced_every)
    if outputs.chrome is not None:
        write_file(outputs.chrome, chrome_trace(traced, names, wanted, run.plan).encode())
    measurement = measure(traced, run.plan, copies=run.config.cluster.platform.own_memory)
    chosen = _choose(measurement, wanted, run.config.observability.traced_every)
    fit = Fit.of(chosen, run.config.cluster.workers)
    report = TraceReport(
        run_dir=run_dir,
        trace=trace,
        measurement=measurement,
        chosen=chosen,
        fit=fit,
        simulation=_simulate(run, fit, profile),
        costs=str(profile) if profile is not None else run.config.cluster.device_parameter,
        memory=compare_memory(run, chosen, profile),
        step=StepReport.of(run, typical_of(chosen)),
    )
    _draw(report, outputs)
    return report


def _check_wanted(traced: TracedRun, wanted: Range | None, every: int) -> None:
    numbers = sorted(number for phase, number in traced.attempts if phase == "train")
    if wanted is None or any(number in wanted for number in numbers):
        return
    text = f"{wanted.first}" if wanted.first == wanted.last else f"{wanted.first}:{wanted.last}"
    traced_ones = f"traced are attempts {numbers[0]} to {numbers[-1]}" if numbers else "none is"
    raise ConfigError(f"attempt {text} is not in the trace: {traced_ones}{_rarely(every)}")


def _rarely(every: int) -> str:
    """Returns the setting that traces more attempts; empty if all are traced."""
    if every == 1:
        return ""
    rate = f"one of {every} (observability.sample_every)" if every else "sample_every is 0"
    return f", {rate}; --set observability.trace=true traces all, on a new run or a resume"


def _choose(
    measurement: Measurement, wanted: Range | None, every: int
) -> tuple[MeasuredAttempt, ...]:
    """Returns the attempts in the range. Without a range, leaves out the first ones if enough
    attempts remain.
    """
    if wanted is not None:
        chosen = tuple(a for a in measurement.attempts if a.number in wanted)
    else:
        warm_up = min(WARM_UP, max(0, len(measurement.attempts) - 1) // 2)
        chosen = measurement.attempts[warm_up:]
    if not chosen:
        reasons = ", ".join(f"{n} {reason}" for reason, n in measurement.left_out.items())
        raise ConfigError(
            "no complete attempt of the plan in plan.json to compare"
            f" ({reasons or f'none is traced{_rarely(every)}'}); --out writes what there is"
        )
    return chosen


def _simulate(run: RunDirectory, fit: Fit, profile: Path | None) -> Simulation:
    if profile is None and not run.config.cluster.platform.simulated_clock:
        return simulate(fit.plan, fit.costs, fit.cluster, stops_early=True)
    prices = config_prices(run.config.with_profile(profile), run.table)
    optimizer = optimizer_of(run.config)
    return simulate(fit.plan, prices.costs, prices.cluster, optimizer=optimizer, stops_early=True)


def panels(report: TraceReport) -> tuple[Panel, Panel]:
    """Returns the two panels of the picture: the typical step and its simulation."""
    name = f"measured, {report.typical_name}: {heading(report.fit.plan)}"
    costs = report.costs or "its own costs"
    return (
        (report.typical, Caption(heading=name)),
        (report.simulation, Caption(heading=f"simulated with {costs}")),
    )


def _draw(report: TraceReport, outputs: TraceOutputs) -> None:
    if outputs.svg is not None:
        write_file(outputs.svg, compared_svg(*panels(report)).encode())
    if outputs.png is not None:
        write_file(outputs.png, compared_png(*panels(report)))
