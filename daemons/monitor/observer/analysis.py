"""Analyses one sampled attempt: where its step's time went, possible savings, and the expected
time.

All seconds are of the clock, even on emulated clusters, which model shorter or longer seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from penstock.host.errors import ConfigError
from penstock.planner.planning.pricing import fitted_pricing, given_pricing, judge_step
from penstock.planner.traces.critical_path import CriticalPath
from penstock.planner.traces.fitted import Fit
from penstock.planner.traces.measured import MeasuredAttempt, measure
from penstock.planner.traces.traced import TracedRun
from penstock.planner.traces.what_if import Savings
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.trace_reading import RunTrace

BASELINE = 3
"""So many analysed attempts say what to expect, where no costs are configured."""


class IncompleteError(ConfigError):
    """A sample is not all of an attempt of the plan. ``reason``: a label of the failures."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Analysis of one attempt. ``seconds`` and ``saved``: by resource. ``critical``: the resources
    with large savings. ``step_s``: measured.
    """

    attempt: int
    step_s: float
    seconds: Mapping[str, float]
    saved: Mapping[str, float]
    critical: tuple[str, ...]
    together_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Expected time of a step. ``costs``: from a profile, from an emulated cluster, or fitted."""

    costs: str
    step_s: float
    busy_s: tuple[float, ...]


class Analyst:
    """Analyses sampled attempts of a run."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        config = run.config
        self._nodes = tuple(node.name for node in config.cluster.nodes)
        self._scale = (
            config.emulation.time_scale if config.cluster.platform.simulated_clock else 1.0
        )
        self._given = given_pricing(run)
        self._first: list[MeasuredAttempt] = []

    def analyse(self, trace: RunTrace) -> Analysis:
        """Returns what a sample says.

        Raises:
            IncompleteError: something is missing, or it is of another plan.
        """
        attempt = self._measured(trace)
        path, saved = judge_step(self._run.config, self._given, attempt)
        if len(self._first) < BASELINE:
            self._first.append(attempt)
        return self._told(attempt, path, saved)

    def expected(self) -> Expectation | None:
        """Returns what a step should take; None while too few are known."""
        if not self._first or (self._given is None and len(self._first) < BASELINE):
            return None
        pricing = self._given
        if pricing is None:
            fit = Fit.of(self._first, self._run.config.cluster.workers)
            pricing = fitted_pricing(self._run.config, fit)
        simulation = pricing.simulate(self._run.plan)
        between = [a.between_s for a in self._first if a.between_s is not None]
        return Expectation(
            costs=pricing.source.value,
            step_s=self._scale * (simulation.makespan_s + (median(between) if between else 0.0)),
            busy_s=tuple(self._scale * device.busy_s for device in simulation.devices),
        )

    def _measured(self, trace: RunTrace) -> MeasuredAttempt:
        traced = TracedRun.of(trace.slowed(1.0 / self._scale), self._nodes)
        own_memory = self._run.config.cluster.platform.own_memory
        measurement = measure(traced, self._run.plan, copies=own_memory)
        if not measurement.attempts:
            why = ", ".join(measurement.left_out) or "undecided"
            reason = "other_plan" if "of another plan" in measurement.left_out else "incomplete"
            raise IncompleteError(f"the sample is {why}", reason)
        return measurement.attempts[0]

    def _told(self, attempt: MeasuredAttempt, path: CriticalPath, saved: Savings) -> Analysis:
        scale = self._scale
        return Analysis(
            attempt=attempt.number,
            step_s=scale * path.step_s,
            seconds={resource.value: scale * s for resource, s in path.seconds.items()},
            saved={resource.value: scale * s for resource, s in saved.seconds.items()},
            critical=tuple(resource.value for resource in saved.critical),
            together_s=scale * saved.together_s,
        )
