"""Sampled attempts of a run, complete, as their traces are written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock.protocol.run.names import SCHEDULERD
from penstock.protocol.run.trace import TraceEvent, TraceOrigin
from penstock.protocol.run.trace_reading import LifeTrace, RunTrace, TraceFollower

MAX_WAITING = 4
"""Samples that may lack something; older ones are given up."""
DECISIONS = ("commit", "amend", "skip")


@dataclass(slots=True)
class _Sample:
    """Events of one attempt, by the life of the process that reported them."""

    lives: dict[TraceOrigin, list[TraceEvent]] = field(default_factory=lambda: defaultdict(list))
    scheduled: list[TraceEvent] = field(default_factory=list)

    @property
    def is_decided(self) -> bool:
        return any(event.text in DECISIONS for event in self.scheduled)

    @property
    def is_over(self) -> bool:
        """True after an event that follows the decision: the step has ended."""
        return self.is_decided and self.scheduled[-1].text not in DECISIONS

    @property
    def is_broken(self) -> bool:
        return any(event.text == "broken" for event in self.scheduled)


@dataclass(slots=True)
class Samples:
    """Collects attempts with a multiple of ``every`` as number, announced after ``since_s`` of the
    scheduler's clock. ``lost``: samples that were dropped because they were aborted or never
    complete.
    """

    run_dir: Path
    every: int
    since_s: float
    lost: int = 0
    _newest_old: int = 0
    _follower: TraceFollower = field(init=False)
    _waiting: dict[int, _Sample] = field(default_factory=dict)
    _scheduler: TraceOrigin | None = None
    _last: int | None = None
    """The sample that the scheduler told of last, as long as something may follow."""

    def __post_init__(self) -> None:
        self._follower = TraceFollower(self.run_dir, self._is_wanted)

    def look(self, *, ending: bool = False) -> Iterator[tuple[int, RunTrace]]:
        """Yields samples that are complete now, by attempt; at the end of the run those as well
        that nothing follows.
        """
        for life in self._follower.look():
            if life.origin.member == SCHEDULERD:
                self._of_scheduler(life)
            else:
                for event in life.events:
                    sample = self._waiting.setdefault(event.attempt, _Sample())
                    sample.lives[life.origin].append(event)
        for attempt in sorted(self._waiting):
            sample = self._waiting[attempt]
            if attempt <= self._newest_old:
                del self._waiting[attempt]
            elif sample.is_broken:
                self._give_up(attempt)
            elif sample.is_over or (ending and sample.is_decided):
                del self._waiting[attempt]
                yield attempt, self._trace(sample)
        while len(self._waiting) > MAX_WAITING:
            self._give_up(min(self._waiting))

    def _is_wanted(self, member: str, attempt: int) -> bool:
        return member == SCHEDULERD or attempt % self.every == 0

    def _of_scheduler(self, life: LifeTrace) -> None:
        if self._scheduler != life.origin:
            self._scheduler, self._last = life.origin, None
        for event in life.events:
            if self._last is not None:
                sample = self._waiting.get(self._last)
                if sample is not None:
                    sample.scheduled.append(event)
                if event.attempt != self._last:
                    self._last = None
            if event.start_s < self.since_s:
                self._newest_old = max(self._newest_old, event.attempt)
            elif event.attempt > 0 and event.attempt % self.every == 0 and self._last is None:
                self._last = event.attempt
                self._waiting.setdefault(event.attempt, _Sample()).scheduled.append(event)

    def _give_up(self, attempt: int) -> None:
        del self._waiting[attempt]
        self.lost += 1

    def _trace(self, sample: _Sample) -> RunTrace:
        assert self._scheduler is not None, "its events are what makes a sample complete"
        lives = [
            LifeTrace(origin=self._scheduler, events=tuple(sample.scheduled)),
            *(LifeTrace(origin=o, events=tuple(events)) for o, events in sample.lives.items()),
        ]
        return RunTrace.of(lives, skipped_lines=0)
