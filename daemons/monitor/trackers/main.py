"""``tracker``: the process of one tracker, which reads lines, sends them, and records its position.

An exception of the tracker ends the process with a line in the log; observerd restarts it. Lines
that failed :data:`TRIES` times in a row are sent one by one, and lines that still fail are dropped
and counted.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.daemons.monitor.trackers.following import Bookmark, bookmark_path, read_batch
from penstock.daemons.monitor.trackers.registry import TRACKERS
from penstock.daemons.monitor.trackers.sink import Reading, Sink, Subject, settings_of
from penstock.host.errors import ExitCode
from penstock.host.files import make_directory
from penstock.host.stopping import StopSignal
from penstock.protocol.run.process import RunProcess, run_process

LOOK_S = 1.0
"""Seconds between checks for new lines."""
TRIES = 3

_log = logging.getLogger(__name__)


def main(run_dir: Path, tracker: str, parent_pid: int | None) -> int:
    """Tracks the run in ``run_dir`` until stopped; returns the exit code."""
    return run_process(run_dir, f"tracker.{tracker}", partial(track, tracker), parent_pid)


def track(tracker: str, process: RunProcess) -> int:
    """Follows the run's metrics until the process is asked to stop; returns the exit code."""
    run = process.run
    subject = Subject(
        run_id=run.run_id,
        name=run.config.run.name,
        directory=run.path,
        config=run.config,
        settings=settings_of(run.config),
    )
    make_directory(bookmark_path(run.path, tracker).parent)
    try:
        sink = TRACKERS[tracker].opener()(subject)
        follow(sink, run.path, tracker, process.stop)
    except Exception as error:  # libraries raise what they like
        _log.exception("%s failed: %s", tracker, error)
        return int(ExitCode.LOST_MEMBERS)
    return int(ExitCode.DONE)


def follow(sink: Sink, run_dir: Path, tracker: str, stop: StopSignal) -> None:
    """Sends lines until ``stop`` is set, then the remaining ones.

    Raises:
        Exception: any error of the tracker; the position is recorded.
    """
    notes = bookmark_path(run_dir, tracker)
    place = Bookmark.read(notes)
    while True:
        last = stop.is_set  # before reading: what was written until then is read
        readings, offset = read_batch(run_dir / "metrics.jsonl", place.offset, time.time())
        if offset != place.offset:
            dropped = _hand_on(sink, readings, place, notes)
            lines = place.lines + len(readings) - dropped
            place = Bookmark(offset=offset, lines=lines, dropped=place.dropped + dropped)
            place.write(notes)
        elif last:
            break
        else:
            stop.wait(LOOK_S)
    sink.close()


def _hand_on(sink: Sink, readings: list[Reading], place: Bookmark, notes: Path) -> int:
    """Returns how many readings the tracker will never take."""
    if place.failures < TRIES:
        try:
            sink.log(readings)
        except (ConnectionError, TimeoutError):
            raise  # a lost connection is no fault of these lines: they wait for the next one
        except Exception:
            replace(place, failures=place.failures + 1).write(notes)
            raise
        return 0
    dropped = 0
    for reading in readings:
        try:
            sink.log([reading])
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            dropped += 1
            _log.warning("step %d is dropped: %r", reading.step, error)
    return dropped
