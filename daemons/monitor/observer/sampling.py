"""The consumer that has sampled attempts analysed, and says what came of it."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from penstock.daemons.monitor.observer.analysed import Analysed
from penstock.daemons.monitor.observer.samples import Samples
from penstock.host.errors import PenstockError
from penstock.host.process_identity import start_ticks
from penstock.host.stopping import StopSignal
from penstock.protocol.metrics.observer import OBSERVER
from penstock.protocol.metrics.registry import MetricRegistry
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.trace import now_s
from penstock.protocol.run.trace_reading import RunTrace

if TYPE_CHECKING:
    from penstock.daemons.monitor.observer.analysis import Analysis, Analyst

LOOK_S = 2.0
"""Seconds between reads of the traces."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Sampling:
    """Analyses samples until the run ends. What goes wrong with one is counted and logged."""

    run_directory: RunDirectory
    page: MetricRegistry
    name: str = "sampling"
    _analyst: Analyst | None = None
    _lost: int = 0
    _expects: bool = False

    def run(self, stop: StopSignal) -> None:
        """Reads the traces every :data:`LOOK_S`, and once more at the end."""
        config = self.run_directory.config
        every = config.observability.sample_every
        with suppress(OSError):
            Analysed.forget(self.run_directory.path)
        samples = Samples(self.run_directory.path, every, _born_s())
        self._lost = 0
        while not stop.wait(LOOK_S):
            self._look(samples)
        self._look(samples, ending=True)

    def _look(self, samples: Samples, *, ending: bool = False) -> None:
        for attempt, trace in samples.look(ending=ending):
            self._analyse(attempt, trace)
        if samples.lost > self._lost:
            self.page.add("penstock_analysis_failures", samples.lost - self._lost, "incomplete")
            self._lost = samples.lost

    def _analyse(self, attempt: int, trace: RunTrace) -> None:
        # Loaded with the first sample: the planner takes half a second of a core.
        from penstock.daemons.monitor.observer.analysis import Analyst, IncompleteError

        try:
            if self._analyst is None:
                self._analyst = Analyst(self.run_directory)
            self._tell(self._analyst, self._analyst.analyse(trace))
        except IncompleteError as error:
            self.page.add("penstock_analysis_failures", 1, error.reason)
            _log.warning("attempt %d is not analysed: %s", attempt, error)
        except Exception:
            self.page.add("penstock_analysis_failures", 1, "error")
            _log.exception("attempt %d is not analysed", attempt)

    def _tell(self, analyst: Analyst, found: Analysis) -> None:
        self._leave(found)
        page = self.page
        page.add("penstock_analysed_attempts", 1)
        page.add("penstock_analysed_step_seconds", found.step_s)
        for resource, seconds in found.seconds.items():
            page.add("penstock_critical_seconds", seconds, resource)
        for resource, seconds in found.saved.items():
            page.set("penstock_savings_seconds", seconds, resource)
        page.set("penstock_savings_together_seconds", found.together_s)
        expected = None if self._expects else analyst.expected()
        if expected is not None:
            self._expects = True
            page.set("penstock_simulated_step_seconds", expected.step_s)
            page.set("penstock_simulated_step_info", 1, expected.costs)
            for device, seconds in enumerate(expected.busy_s):
                page.set("penstock_expected_busy_seconds", seconds, str(device))

    def _leave(self, found: Analysis) -> None:
        """Writes down what was found, for the screen."""
        analysed = Analysed(
            attempt=found.attempt,
            step_s=found.step_s,
            critical_s=found.seconds,
            savings_s=found.saved,
        )
        try:
            analysed.write(self.run_directory.path)
        except PenstockError as error:
            _log.warning("attempt %d: cannot be written: %s", found.attempt, error)


def _born_s() -> float:
    """Returns when this process was started, by the clock of traces: at the lowest priority its
    first instructions may come much later.
    """
    since_boot_s = (start_ticks(os.getpid()) or 0) / os.sysconf("SC_CLK_TCK")
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s
    return now_s() - age_s


def make_sampling(run: RunDirectory, registry: CollectorRegistry) -> Sampling:
    """Returns the consumer of a run."""
    return Sampling(run, MetricRegistry(OBSERVER, registry))
