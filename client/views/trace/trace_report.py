"""The report of ``penstock trace``: figures of a traced run and of its simulation.

The report also compares the measured peaks of device memory with those of the plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from penstock.client.planning.outputs import heading
from penstock.client.views.trace.step_report import StepReport
from penstock.config.values import human_bytes
from penstock.planner.memory.footprint import device_peaks
from penstock.planner.planning.pricing import config_prices
from penstock.planner.render import SECONDS
from penstock.planner.render.lanes import Picturable
from penstock.planner.simulate import Simulation
from penstock.planner.traces.fitted import Fit
from penstock.planner.traces.measured import MeasuredAttempt, Measurement
from penstock.planner.traces.overlap import copies_behind_compute, optimizer_behind_compute
from penstock.planner.traces.traced import Peak
from penstock.protocol.plan.instructions import Opcode
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.trace_reading import RunTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of an attempt, in seconds and shares.

    ``copies_hidden`` is the share of the devices' copies and sends during computation.
    ``optimizer_hidden`` is the share of the optimizer's sweeps during computation of a device of
    the node. A share is None without copies or sweeps.
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
        """Returns the median of each figure."""
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


def typical_of(attempts: Sequence[MeasuredAttempt]) -> MeasuredAttempt:
    """Returns the typical step: the attempt with the step time nearest to the median.

    A step runs from its announcement to the next announcement. Attempts without a next one, for
    example before a save, count only if no attempt has one. Their makespans are compared then.
    """
    followed = [attempt for attempt in attempts if attempt.step_s is not None]
    seconds = {
        attempt.number: attempt.makespan_s if attempt.step_s is None else attempt.step_s
        for attempt in followed or attempts
    }
    usual_s = median(seconds.values())
    return min(followed or attempts, key=lambda attempt: abs(seconds[attempt.number] - usual_s))


def _median_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpcodeTimes:
    """Times of an opcode: count in an attempt, and medians of its seconds and waiting seconds."""

    opcode: Opcode
    count: int
    seconds: float
    waited_s: float


@dataclass(frozen=True, kw_only=True)
class TraceReport:
    """A comparison of a traced run with a simulation.

    ``between_s`` is the part of a step outside the plan: messages, decision, journal, next batch.
    The measured value counts in both steps. ``costs`` names the costs of the simulation; None means
    costs fitted to the trace.
    """

    run_dir: Path
    trace: RunTrace
    measurement: Measurement
    chosen: tuple[MeasuredAttempt, ...]
    fit: Fit
    simulation: Simulation
    costs: str | None
    memory: tuple[DeviceMemory, ...]
    step: StepReport

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
        """Median over attempts with an immediate successor, or 0."""
        values = [a.between_s for a in self.chosen if a.between_s is not None]
        return median(values) if values else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of the measured attempt and of the time between two attempts.

        The sum of both medians is never less than the attempt. A median over attempts with a
        successor could be.
        """
        return self.measured.makespan_s + self.between_s

    @property
    def simulated_step_s(self) -> float:
        """Seconds of the simulated attempt and of the time between two attempts."""
        return self.simulated.makespan_s + self.between_s

    @property
    def error(self) -> float:
        """The simulated step relative to the measured one, minus 1."""
        return self.simulated_step_s / self.step_s - 1.0

    @cached_property
    def typical(self) -> MeasuredAttempt:
        """The typical step (:func:`typical_of`), drawn above the simulation."""
        return typical_of(self.chosen)

    @cached_property
    def typical_figures(self) -> Figures:
        """The figures of the typical step alone."""
        return Figures.of(self.typical, self.fit.devices_per_node)

    @property
    def typical_name(self) -> str:
        """The name of the typical step in texts."""
        among = f", the typical one of {len(self.chosen)}" if len(self.chosen) > 1 else ""
        return f"attempt {self.typical.number}{among}"

    @property
    def typical_step_s(self) -> float:
        """Seconds of the typical step along its critical path, from its announcement on."""
        return self.step.path.step_s

    @property
    def typical_between_s(self) -> float:
        """Seconds of the typical step outside the plan."""
        return self.typical_step_s - self.typical.makespan_s

    @property
    def simulated_typical_s(self) -> float:
        """Seconds of the simulated attempt, and of the time after the typical step."""
        return self.simulation.makespan_s + self.typical_between_s

    @property
    def typical_error(self) -> float:
        """The simulated attempt relative to the typical measured one, minus 1."""
        return self.simulation.makespan_s / self.typical.makespan_s - 1.0

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
            "typical_attempt": self.typical.number,
            "typical_error": self.typical_error,
            "measured": self.measured.to_dict(),
            "simulated": self.simulated.to_dict(),
            "where_the_step_went": self.step.to_dict(),
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
        """Returns the report as text."""
        memory, opcodes = memory_lines(self.memory), self._opcode_lines()
        tables = self._header(), self._table(), self.step.lines(), memory, opcodes
        return "\n\n".join(text for table in tables if (text := "\n".join(table)))

    def _header(self) -> list[str]:
        numbers = [attempt.number for attempt in self.chosen]
        kinds = Counter(attempt.decision for attempt in self.chosen)
        decisions = ", ".join(f"{count} {name}" for name, count in kinds.items())
        lines = [
            f"{self.run_dir}: {heading(self.fit.plan)}",
            f"attempts {min(numbers)} to {max(numbers)}: {len(numbers)} ({decisions}); medians",
            f"pictures: {self.typical_name}, takes {SECONDS.format(self.typical.makespan_s)};"
            f" simulated {SECONDS.format(self.simulation.makespan_s)}, {self.typical_error:+.1%}",
        ]
        out = [f"{count} {reason}" for reason, count in self.measurement.left_out.items()]
        if self.trace.skipped_lines:
            out.append(f"{self.trace.skipped_lines} damaged lines")
        if out:
            lines.append("left out: " + "; ".join(out))
        if self.trace.machines > 1:
            lines.append(
                f"written on {self.trace.machines} machines: times of different machines are only"
                " as exact as their clocks"
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
class DeviceMemory:
    """The largest measured peak of a device and the planned peak, in bytes."""

    device: int
    measured: Peak
    planned_bytes: float

    @property
    def error(self) -> float:
        """The planned peak relative to the measured one, minus 1."""
        return self.planned_bytes / self.measured.num_bytes - 1.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the peaks for ``--json``."""
        return {
            "device": self.device,
            "measured_bytes": self.measured.num_bytes,
            "during": self.measured.during or None,
            "planned_bytes": self.planned_bytes,
            "error": self.error,
        }


def compare_memory(
    run: RunDirectory, attempts: Sequence[MeasuredAttempt], profile: Path | None
) -> tuple[DeviceMemory, ...]:
    """Returns the peaks of the devices with measured memory.

    Raises:
        ConfigError: the profile is of another model.
    """
    plan = attempts[0].plan
    measured = {device: _greatest(attempts, device) for device in range(plan.num_devices)}
    if not any(measured.values()):
        return ()
    costs = config_prices(run.config.with_profile(profile), run.table).costs
    planned = device_peaks(plan, costs)
    return tuple(
        DeviceMemory(device=device, measured=peak, planned_bytes=planned[device].total_bytes)
        for device, peak in measured.items()
        if peak is not None
    )


def _greatest(attempts: Sequence[MeasuredAttempt], device: int) -> Peak | None:
    peaks = (attempt.trace.devices[device].peak for attempt in attempts)
    measured = [peak for peak in peaks if peak is not None and peak.num_bytes]
    return max(measured, key=lambda peak: peak.num_bytes, default=None)


def memory_lines(devices: Sequence[DeviceMemory]) -> Iterator[str]:
    """Yields the rows of a table; nothing without measurements."""
    if not devices:
        return
    yield f"{'peak of memory':<22}{'measured':>12}{'planned':>12}"
    for memory in devices:
        texts = map(human_bytes, (memory.measured.num_bytes, memory.planned_bytes))
        during = f"   ({memory.measured.during})" if memory.measured.during else ""
        yield (
            f"{f'  device {memory.device}':<22}"
            + "".join(f"{text:>12}" for text in texts)
            + f"   error {memory.error:+.1%}{during}"
        )
