"""Supervises the process of a tracker: starts, watches and restarts it, and ends it in time."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress

from prometheus_client import CollectorRegistry

from penstock.daemons.monitor.trackers.following import Bookmark, bookmark_path
from penstock.daemons.preload.client import ChildProcess, spawn
from penstock.daemons.preload.fork_request import PYTHON_MODULE
from penstock.host.stopping import STOP_ORDER, StopSignal
from penstock.protocol.metrics.observer import TRACKERS
from penstock.protocol.metrics.registry import MetricRegistry
from penstock.protocol.run.rundir import RunDirectory

LOOK_S = 0.5
FLUSH_S = 6.0
"""Seconds for the last lines at the end of the run; less than observerd has."""
STUCK_S = 120.0
"""Seconds without progress, despite new lines, until a tracker is killed and restarted."""
LONGEST_PAUSE_S = 60.0

_log = logging.getLogger(__name__)


class TrackerConsumer:
    """A consumer of observerd with a process, because only processes can be killed: a hung tracker
    must not delay the end of a run.
    """

    def __init__(self, run: RunDirectory, tracker: str) -> None:
        self.name = tracker
        self.up = False
        """True while the process lives, and sends lines if there are any."""
        self._run = run
        self._notes = bookmark_path(run.path, tracker)
        self._process: ChildProcess | None = None
        self._place, self._moved_s = Bookmark(), 0.0
        self._starts_s, self._failed = 0.0, 0

    @property
    def place(self) -> Bookmark:
        """The tracker's position."""
        return Bookmark.read(self._notes)

    def run(self, stop: StopSignal) -> None:
        """Keeps the process alive until ``stop`` is set, then gives it :data:`FLUSH_S`.

        Raises:
            OSError: the process cannot be started.
        """
        try:
            while not stop.is_set:
                self._look(time.monotonic())
                stop.wait(LOOK_S)
            if self._process is None:
                self._start()  # it was waiting for its next try, or the run was short
            self._end()
        finally:
            self._kill()

    def _look(self, now_s: float) -> None:
        if self._process is None:
            if now_s >= self._starts_s:
                self._start()
        elif self._process.ended():
            self._died(now_s)
        else:
            self._watch(now_s)

    def _start(self) -> None:
        run, pid = self._run, str(os.getpid())
        arguments = ("--config", str(run.path / "resolved.yaml"), "--parent-pid", pid)
        launcher = (*PYTHON_MODULE, "penstock.client.launch", "tracker")
        words = (*launcher, *arguments, "--tracker", self.name)
        with open(os.devnull, "rb") as nothing:
            # In a group of its own: what the tracker starts itself is killed with it.
            self._process = spawn(words, os.environ, (nothing.fileno(), 1, 2))
        self._place, self._moved_s = self.place, time.monotonic()

    def _died(self, now_s: float) -> None:
        code = self._kill()
        if self.place.offset != self._place.offset:
            self._failed = 0
        pause_s = min(LONGEST_PAUSE_S, 2.0**self._failed)
        self._failed += 1
        self._starts_s = now_s + pause_s
        if self._failed == 1:  # and not each time that a server is still away
            _log.warning(
                "%s ended with exit code %d; it is restarted, first after %g s; the run continues:"
                " see logs/tracker.%s.jsonl",
                *(self.name, code, pause_s, self.name),
            )

    def _watch(self, now_s: float) -> None:
        place = self.place
        behind = self._size() > place.offset
        if place != self._place or not behind:
            self._place, self._moved_s = place, now_s
            self._failed = 0 if place.lines else self._failed
        silent_s = now_s - self._moved_s
        self.up = silent_s < STUCK_S / 4
        if silent_s >= STUCK_S:
            _log.warning("%s took no line for %.0f s: killing it", self.name, silent_s)
            self._kill()
            self._starts_s = now_s + LONGEST_PAUSE_S

    def _end(self) -> None:
        process = self._process
        assert process is not None
        process.signal(STOP_ORDER)
        ended = process.ended(FLUSH_S)
        left = self._size() - self.place.offset
        if not ended or left > 0:
            how = "failed" if ended else "did not end in time; it was killed"
            text = "%s %s: %d bytes of metrics.jsonl are left for a resume of the run"
            _log.warning(text, self.name, how, max(0, left))

    def _kill(self) -> int:
        """Returns the exit code of the process; 0 if there is none."""
        self.up = False
        process, self._process = self._process, None
        if process is None:
            return 0
        process.signal(signal.SIGKILL)  # also where it is so new that it has no group yet
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.reap()

    def _size(self) -> int:
        try:
            return (self._run.path / "metrics.jsonl").stat().st_size
        except OSError:
            return 0


class _Reporter:
    """Updates the metrics; counters grow by the difference of positions since the last update."""

    def __init__(self, trackers: tuple[TrackerConsumer, ...], page: MetricRegistry) -> None:
        self._page = page
        self._said = dict.fromkeys(trackers, Bookmark())
        page.refreshed_by(self._report)
        self._report()

    def _report(self) -> None:
        for tracker, former in self._said.items():
            name, place = tracker.name, tracker.place
            self._page.add("penstock_tracker_lines", max(0, place.lines - former.lines), name)
            self._page.add("penstock_tracker_dropped", max(0, place.dropped - former.dropped), name)
            self._page.set("penstock_tracker_up", float(tracker.up), name)
            self._said[tracker] = place


def make_trackers(
    run: RunDirectory, names: tuple[str, ...], registry: CollectorRegistry
) -> tuple[TrackerConsumer, ...]:
    """Returns a consumer for each tracker; their metrics go to ``registry``."""
    trackers = tuple(TrackerConsumer(run, name) for name in names)
    if trackers:
        _Reporter(trackers, MetricRegistry(TRACKERS, registry))
    return trackers
