"""The critical path of one step, for ``penstock trace``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.planner.planning.pricing import given_pricing, judge_step
from penstock.planner.render import SECONDS
from penstock.planner.traces.critical_path import CriticalPath
from penstock.planner.traces.dependency_graph import Resource
from penstock.planner.traces.measured import MeasuredAttempt
from penstock.planner.traces.what_if import Savings
from penstock.protocol.run.rundir import RunDirectory

_WORST_PLACES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The step of one attempt: critical path, and savings without each resource."""

    attempt: int
    path: CriticalPath
    saved: Savings

    @classmethod
    def of(cls, run: RunDirectory, attempt: MeasuredAttempt) -> StepReport:
        """Returns the report of an attempt.

        Raises:
            ConfigError: a configured profile cannot be read.
        """
        path, saved = judge_step(run.config, given_pricing(run), attempt)
        return cls(attempt=attempt.number, path=path, saved=saved)

    def lines(self) -> Iterator[str]:
        """Yields the rows of a table: resources on the path, or with large savings."""
        yield f"{f'where step {self.attempt} went':<22}{'critical':>12}{'share':>8}{'saved':>12}"
        seconds = self.path.seconds
        for resource in sorted(Resource, key=lambda r: -seconds[r]):
            saved_s = self.saved.seconds[resource]
            if seconds[resource] < 5e-4 * self.path.step_s and resource not in self.saved.critical:
                continue
            yield (
                f"{'  ' + resource.value.replace('_', ' '):<22}"
                f"{SECONDS.format(seconds[resource], digits=3):>12}"
                f"{seconds[resource] / self.path.step_s:>8.1%}"
                f"{SECONDS.format(saved_s, digits=3):>12}   {self._places(resource)}".rstrip()
            )
        resources = ", ".join(r.value.replace("_", " ") for r in self.saved.critical) or "nothing"
        yield (
            f"{'  all of it':<22}{SECONDS.format(self.path.step_s, digits=3):>12}{1:>8.1%}"
            f"{SECONDS.format(self.saved.together_s, digits=3):>12}   without {resources}, together"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
        return {
            "attempt": self.attempt,
            "step_seconds": self.path.step_s,
            "critical_seconds": {r.value: s for r, s in self.path.seconds.items()},
            "savings_seconds": {r.value: s for r, s in self.saved.seconds.items()},
            "savings_together_seconds": self.saved.together_s,
            "critical": [resource.value for resource in self.saved.critical],
            "places": {
                f"{resource.value} {place}": seconds
                for (resource, place), seconds in self.path.places.items()
            },
        }

    def _places(self, resource: Resource) -> str:
        """Returns the places with the most critical seconds of a resource."""
        places = sorted(
            ((s, place) for (r, place), s in self.path.places.items() if r is resource),
            reverse=True,
        )
        if not places or places[0][1] == resource.value:
            return ""
        return ", ".join(
            f"{place} {SECONDS.format(seconds, digits=3)}"
            for seconds, place in places[:_WORST_PLACES]
        )
