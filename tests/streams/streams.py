"""Streams of a device that is not there: work is queued, and runs when something waits for it.

The compute stream runs what it is given at once, in the order of issue. Every other stream is late:
its work runs when a wait demands it, or at random moments before. Both are orders that a GPU may
choose.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.streams.clocks import Known

if TYPE_CHECKING:
    from tests.streams.checker import Checker


@dataclass(slots=True)
class Work:
    """``run`` is called once, or ``behind`` is run first: a point in another stream."""

    run: Callable[[], None] | None = None
    behind: tuple[CheckedStream, int] | None = None


class CheckedStream:
    """One stream: what it knows (:mod:`.clocks`) is under its name."""

    def __init__(self, checker: Checker, name: str, *, eager: bool = False) -> None:
        self.name = name
        self.eager = eager
        self.issued = 0
        self.done = 0
        self._checker = checker
        self._queue: deque[Work] = deque()
        self._running = False

    def issue(self, work: Work) -> None:
        """Queue it; holds the lock."""
        self.issued += 1
        self._queue.append(work)
        self.catch_up()

    def catch_up(self) -> None:
        """Run everything, if that is how the stream works; holds the lock."""
        if self.eager and not self._running:  # work may issue work
            self.run_until(self.issued)

    def run_until(self, position: int) -> None:
        """Run what was issued up to there; holds the lock."""
        while self.done < position:
            self.run_one()

    def run_one(self) -> None:
        """Run the next work, and before it what it is behind."""
        assert not self._running, f"work of {self.name} waits for itself"
        self._running = True
        work = self._queue.popleft()
        try:
            if work.behind is not None:
                stream, position = work.behind
                stream.run_until(position)
            if work.run is not None:
                work.run()
        finally:
            self.done += 1
            self._running = False

    def drop(self) -> int:
        """Forget what was not run; returns how much that was."""
        lost = len(self._queue)
        self._queue.clear()
        self.done = self.issued
        return lost

    # ---- what device code calls ----

    def wait_event(self, event: CheckedEvent) -> None:
        """Of this and all later work."""
        with self._checker.lock:
            self._checker.issues(self)
            if event.at is not None:
                self._checker.clocks.learns(self.name, event.known)
                self.issue(Work(behind=event.at))

    def wait_stream(self, stream: CheckedStream) -> None:
        """As with an event that is recorded now."""
        with self._checker.lock:
            self._checker.issues(self)
            self._checker.clocks.learns(self.name, self._checker.clocks.knows(stream.name))
            self.issue(Work(behind=(stream, stream.issued)))

    def synchronize(self) -> None:
        """The calling thread waits."""
        self._checker.host_waits(self)


@dataclass(slots=True)
class CheckedEvent:
    """A point in a stream; passed as long as it is not recorded."""

    checker: Checker
    at: tuple[CheckedStream, int] | None = None
    known: Known = field(default_factory=dict)
    passed_s: dict[int, float] = field(default_factory=dict)

    def record(self, stream: CheckedStream) -> None:
        """Anew; who waited for it before waits for what it was then."""
        checker = self.checker
        with checker.lock:
            checker.issues(stream)
            checker.clocks.tick(stream.name)
            self.known = dict(checker.clocks.knows(stream.name))
            self.passed_s = passed_s = {}
            stream.issue(Work(run=lambda: passed_s.update({0: time.perf_counter()})))
            self.at = stream, stream.issued

    def synchronize(self) -> None:
        """The calling thread waits."""
        with self.checker.lock:
            if self.at is not None:
                stream, position = self.at
                stream.run_until(position)
                self.checker.host_learns(self.known)

    def query(self) -> bool:
        """Each call may bring the stream on by one work, so that nobody asks for ever."""
        with self.checker.lock:
            if self.at is None:
                return True
            stream, position = self.at
            if stream.done < position:
                stream.run_one()
            if stream.done < position:
                return False
            self.checker.host_learns(self.known)
            return True

    def elapsed_time(self, end_event: CheckedEvent) -> float:
        """Milliseconds between two that are passed; none where they were dropped with the rest."""
        if self.checker.dropped:
            return 0.0
        assert self.passed_s and end_event.passed_s, "an event is read before it is passed"
        return (end_event.passed_s[0] - self.passed_s[0]) * 1e3
