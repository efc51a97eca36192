"""``penstock trace``: what a run did when, beside what a simulation of its plan says.

The simulation takes its costs from the trace itself (:mod:`penstock.planner.traces.fitted`), so
that it is the schedule that is judged, or from a profile. Runs on emulated devices are simulated
with the costs that they ran on, and shown in the cluster's seconds (``emulation.time_scale``). How
traces are made: :mod:`penstock.protocol.run.trace`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from penstock.client.planning.outputs import heading, write_file
from penstock.client.watching.chrome_trace import Range, chrome_trace
from penstock.client.watching.trace_memory import DeviceMemory, compare_memory, memory_lines
from penstock.planner.configured import config_prices, optimizer_of
from penstock.planner.render import SECONDS, Caption
from penstock.planner.render.as_files import compared_png, compared_svg
from penstock.planner.render.lanes import Picturable
from penstock.planner.simulate import Simulation, simulate
from penstock.planner.traces.fitted import Fit
from penstock.planner.traces.measured import MeasuredAttempt, Measurement, measure
from penstock.planner.traces.overlap import copies_behind_compute, optimizer_behind_compute
from penstock.planner.traces.traced import TracedRun
from penstock.protocol.errors import ConfigError
from penstock.protocol.plan.instructions import Opcode
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.trace import RunTrace, read_traces

WARM_UP = 3
"""Figures leave out so many attempts at the start of a trace: they fault pages in and fill
caches.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is compared, in seconds and shares. Overlaps are ``None`` where there is nothing to
    hide.

    ``copies_hidden``: of the devices' copies and sends, the share while the device computes.
    ``optimizer_hidden``: of the optimizer's sweeps, the share while a device of the node computes.
    """

    makespan_s: float
    pipeline_s: float
    optimizer_tail_s: float
    bubble_ratio: float
    device_bubbles: tuple[float, ...]
    copies_hidden: float | None
    optimizer_hidden: float | None

    @classmethod
    def of(cls, timeline: Picturable, devices_per_node: int) -> Figures:
        """Returns the figures of one attempt, measured or simulated."""
        pipeline_s = timeline.pipeline_s
        return cls(
            makespan_s=timeline.makespan_s,
            pipeline_s=pipeline_s,
            optimizer_tail_s=timeline.optimizer_tail_s,
            bubble_ratio=timeline.bubble_ratio,
            device_bubbles=tuple(device.idle_s / pipeline_s for device in timeline.devices),
            copies_hidden=copies_behind_compute(timeline.spans).share,
            optimizer_hidden=optimizer_behind_compute(timeline.spans, devices_per_node).share,
        )

    @classmethod
    def median_of(cls, figures: Sequence[Figures]) -> Figures:
        """Returns the median of each figure by itself."""
        return cls(
            makespan_s=median(f.makespan_s for f in figures),
            pipeline_s=median(f.pipeline_s for f in figures),
            optimizer_tail_s=median(f.optimizer_tail_s for f in figures),
            bubble_ratio=median(f.bubble_ratio for f in figures),
            device_bubbles=tuple(
                map(median, zip(*(f.device_bubbles for f in figures), strict=True))
            ),
            copies_hidden=_median_of_known(f.copies_hidden for f in figures),
            optimizer_hidden=_median_of_known(f.optimizer_hidden for f in figures),
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures for ``--json``."""
        return {
            "makespan_seconds": self.makespan_s,
            "pipeline_seconds": self.pipeline_s,
            "optimizer_tail_seconds": self.optimizer_tail_s,
            "bubble_ratio": self.bubble_ratio,
            "device_bubble_ratio": list(self.device_bubbles),
            "copies_hidden": self.copies_hidden,
            "optimizer_hidden": self.optimizer_hidden,
        }


def _median_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpcodeTimes:
    """One opcode: how often it runs in an attempt, its seconds and the seconds that it waits
    (medians).
    """

    opcode: Opcode
    count: int
    seconds: float
    waited_s: float


@dataclass(frozen=True, kw_only=True)
class TraceReport:
    """A traced run beside a simulation.

    ``between_s`` is what no plan knows of: messages, the decision, the journal, the next batch. It
    is measured, and counted in both steps. ``costs``: whose costs the simulation takes, ``None``
    for those fitted to the trace.
    """

    run_dir: Path
    trace: RunTrace
    measurement: Measurement
    chosen: tuple[MeasuredAttempt, ...]
    fit: Fit
    simulation: Simulation
    costs: str | None
    memory: tuple[DeviceMemory, ...]

    @cached_property
    def measured(self) -> Figures:
        """Medians over the chosen attempts."""
        per_node = self.fit.devices_per_node
        return Figures.median_of([Figures.of(attempt, per_node) for attempt in self.chosen])

    @cached_property
    def simulated(self) -> Figures:
        """The figures of the simulation."""
        return Figures.of(self.simulation, self.fit.devices_per_node)

    @cached_property
    def between_s(self) -> float:
        """Median over attempts that another follows at once, 0 without one."""
        values = [a.between_s for a in self.chosen if a.between_s is not None]
        return median(values) if values else 0.0

    @property
    def step_s(self) -> float:
        """The measured attempt, and what lies between two. It is never less than the attempt, as a
        median over the attempts that another follows could be.
        """
        return self.measured.makespan_s + self.between_s

    @property
    def simulated_step_s(self) -> float:
        """The simulated attempt, and what lies between two."""
        return self.simulated.makespan_s + self.between_s

    @property
    def error(self) -> float:
        """The simulated step relative to the measured one, minus 1."""
        return self.simulated_step_s / self.step_s - 1.0

    @cached_property
    def typical(self) -> MeasuredAttempt:
        """The attempt whose makespan is nearest to the median."""
        return min(self.chosen, key=lambda a: abs(a.makespan_s - self.measured.makespan_s))

    @cached_property
    def opcodes(self) -> tuple[OpcodeTimes, ...]:
        """Medians by opcode over all chosen attempts, in the order of the instruction set."""
        seconds: dict[Opcode, list[float]] = defaultdict(list)
        waits: dict[Opcode, list[float]] = defaultdict(list)
        for attempt in self.chosen:
            for device in attempt.trace.devices.values():
                for work in device.computed + device.issued:
                    seconds[work.instruction.opcode].append(work.seconds)
                    waits[work.instruction.opcode].append(work.event.waited_s)
        return tuple(
            OpcodeTimes(
                opcode=opcode,
                count=len(seconds[opcode]) // len(self.chosen),
                seconds=median(seconds[opcode]),
                waited_s=median(waits[opcode]),
            )
            for opcode in Opcode
            if opcode in seconds
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
        fit = self.fit
        return {
            "scheme": fit.plan.scheme,
            "devices": fit.plan.num_devices,
            "micro_batches": fit.plan.num_microbatches,
            "attempts": [attempt.number for attempt in self.chosen],
            "decisions": dict(Counter(attempt.decision for attempt in self.chosen)),
            "left_out": dict(self.measurement.left_out),
            "skipped_lines": self.trace.skipped_lines,
            "machines": self.trace.machines,
            "costs": self.costs or "trace",
            "step_seconds": self.step_s,
            "simulated_step_seconds": self.simulated_step_s,
            "error": self.error,
            "between_seconds": self.between_s,
            "measured": self.measured.to_dict(),
            "simulated": self.simulated.to_dict(),
            "memory": [device.to_dict() for device in self.memory],
            "fit": {
                "stage_seconds": {f"{op.value} {s}": v for (op, s), v in fit.stages.items()},
                "pass_seconds": {str(block): v for block, v in fit.sweeps.items()},
                "overhead_seconds": fit.overhead_s,
                "latency_seconds": fit.latency_s,
                "gradients_to_pass_seconds": fit.gradients_s,
                "pass_to_pass_seconds": fit.sweep_hop_s,
            },
            "opcodes": {
                times.opcode.name: {
                    "count": times.count,
                    "median_seconds": times.seconds,
                    "median_waited_seconds": times.waited_s,
                }
                for times in self.opcodes
            },
        }

    def to_text(self) -> str:
        """Returns the report for people."""
        tables = self._header(), self._table(), memory_lines(self.memory), self._opcode_lines()
        return "\n\n".join(text for table in tables if (text := "\n".join(table)))

    def _header(self) -> list[str]:
        numbers = [attempt.number for attempt in self.chosen]
        kinds = Counter(attempt.decision for attempt in self.chosen)
        decisions = ", ".join(f"{count} {name}" for name, count in kinds.items())
        lines = [
            f"{self.run_dir}: {heading(self.fit.plan)}",
            f"attempts {min(numbers)} to {max(numbers)}: {len(numbers)} ({decisions}); medians",
        ]
        out = [f"{count} {reason}" for reason, count in self.measurement.left_out.items()]
        if self.trace.skipped_lines:
            out.append(f"{self.trace.skipped_lines} damaged lines")
        if out:
            lines.append("left out: " + "; ".join(out))
        if self.trace.machines > 1:
            lines.append(
                f"written on {self.trace.machines} machines: times of different machines are as"
                " comparable as their clocks"
            )
        return [*lines, self._costs_line()]

    def _costs_line(self) -> str:
        if self.costs is not None:
            return f"simulated with the costs of {self.costs}"
        fit, unit = self.fit, SECONDS
        return (
            "simulated with the costs of this trace; per instruction"
            f" {unit.format(fit.overhead_s, digits=3)} of overhead, per transfer"
            f" {unit.format(fit.latency_s, digits=3)}, from gradients to a pass"
            f" {unit.format(fit.gradients_s, digits=3)}, from pass to pass"
            f" {unit.format(fit.sweep_hop_s, digits=3)}"
        )

    def _table(self) -> list[str]:
        measured, simulated = self.measured, self.simulated
        rows = [
            _row("step", self.step_s, self.simulated_step_s) + f"   error {self.error:+.1%}",
            _row("  attempt", measured.makespan_s, simulated.makespan_s),
            _row("  between attempts", self.between_s, self.between_s) + "   (measured)",
            _row("last computation", measured.pipeline_s, simulated.pipeline_s),
            _row("optimizer tail", measured.optimizer_tail_s, simulated.optimizer_tail_s),
            _shares("bubbles", measured.bubble_ratio, simulated.bubble_ratio),
        ]
        pairs = zip(measured.device_bubbles, simulated.device_bubbles, strict=True)
        rows += [_shares(f"  device {d}", *shares) for d, shares in enumerate(pairs)]
        rows += [
            _shares("copies hidden", measured.copies_hidden, simulated.copies_hidden),
            _shares("optimizer hidden", measured.optimizer_hidden, simulated.optimizer_hidden),
        ]
        return [f"{'':<22}{'measured':>12}{'simulated':>12}", *rows]

    def _opcode_lines(self) -> list[str]:
        lines = [f"{'instruction':<22}{'per attempt':>12}{'median':>12}{'waited':>12}"]
        for times in self.opcodes:
            name = times.opcode.name.lower().replace("_", " ")
            lines.append(
                f"{name:<22}{times.count:>12}{SECONDS.format(times.seconds, digits=3):>12}"
                f"{SECONDS.format(times.waited_s, digits=3):>12}"
            )
        return lines


def _row(name: str, measured_s: float, simulated_s: float) -> str:
    return f"{name:<22}{SECONDS.format(measured_s):>12}{SECONDS.format(simulated_s):>12}"


def _shares(name: str, measured: float | None, simulated: float | None) -> str:
    texts = ("-" if share is None else f"{share:.1%}" for share in (measured, simulated))
    return f"{name:<22}" + "".join(f"{text:>12}" for text in texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOutputs:
    """The files to write; ``None``: it is not written."""

    chrome: Path | None = None
    svg: Path | None = None
    png: Path | None = None


def parse_attempts(attempt: int | None, attempts: str | None) -> Range | None:
    """Returns the range of ``--attempt`` or ``--attempts A:B``, either end of which may be left
    out.

    Raises:
        ConfigError: both are given, or what is given is no range.
    """
    if attempt is not None and attempts is not None:
        raise ConfigError("--attempt and --attempts: give one of them")
    if attempt is not None:
        return Range(first=attempt, last=attempt)
    if attempts is None:
        return None
    first, colon, last = attempts.partition(":")
    if not colon or not all(part.isdigit() or not part for part in (first, last)):
        raise ConfigError(f"--attempts {attempts}: expected A:B, such as 10:20, 10: or :20")
    chosen = Range(first=int(first or 0), last=int(last) if last else 2**62)
    if chosen.last < chosen.first:
        raise ConfigError(f"--attempts {attempts}: ends before it begins")
    return chosen


def make_trace_report(
    run_dir: Path, wanted: Range | None, profile: Path | None, outputs: TraceOutputs
) -> TraceReport:
    """Reads a run's traces, writes the files that were asked for, and compares.

    The Chrome trace comes first: it needs no complete attempt.

    Raises:
        ConfigError: there is no run directory, no trace in it, no such attempt, or none that is
            complete; or a file cannot be read or written.
    """
    run, trace = RunDirectory(run_dir), read_traces(run_dir)
    if run.config.cluster.platform.models_time:
        trace = trace.slowed(1.0 / run.config.emulation.time_scale)
    names = tuple(node.name for node in run.config.cluster.nodes)
    traced = TracedRun.of(trace, names)
    _check_wanted(traced, wanted)
    if outputs.chrome is not None:
        write_file(outputs.chrome, chrome_trace(traced, names, wanted).encode())
    measurement = measure(traced, run.plan, copies=run.config.cluster.platform.own_memory)
    chosen = _choose(measurement, wanted)
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
    )
    _draw(report, outputs)
    return report


def _check_wanted(traced: TracedRun, wanted: Range | None) -> None:
    numbers = sorted(number for phase, number in traced.attempts if phase == "train")
    if wanted is None or any(number in wanted for number in numbers):
        return
    text = f"{wanted.first}" if wanted.first == wanted.last else f"{wanted.first}:{wanted.last}"
    there = f"traced are attempts {numbers[0]} to {numbers[-1]}" if numbers else "none is traced"
    raise ConfigError(f"attempt {text} is not in the trace: {there}")


def _choose(measurement: Measurement, wanted: Range | None) -> tuple[MeasuredAttempt, ...]:
    """Returns the attempts that are wanted. If all are, it leaves out the first ones where enough
    others are there.
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
            f" ({reasons or 'none was decided'}); --out writes what there is"
        )
    return chosen


def _simulate(run: RunDirectory, fit: Fit, profile: Path | None) -> Simulation:
    if profile is None and not run.config.cluster.platform.models_time:
        return simulate(fit.plan, fit.costs, fit.cluster, stops_early=True)
    prices = config_prices(run.config, run.table, profile)
    optimizer = optimizer_of(run.config)
    return simulate(fit.plan, prices.costs, prices.cluster, optimizer=optimizer, stops_early=True)


def _draw(report: TraceReport, outputs: TraceOutputs) -> None:
    name = f"measured, attempt {report.typical.number}: {heading(report.fit.plan)}"
    costs = report.costs or "its own costs"
    panels = (
        (report.typical, Caption(heading=name)),
        (report.simulation, Caption(heading=f"simulated with {costs}")),
    )
    if outputs.svg is not None:
        write_file(outputs.svg, compared_svg(*panels).encode())
    if outputs.png is not None:
        write_file(outputs.png, compared_png(*panels))
