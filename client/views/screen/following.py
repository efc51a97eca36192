"""``penstock watch``: shows a run that another process started, until the run ends."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from penstock.client.views.display import Display
from penstock.client.views.ended import summary_of
from penstock.client.views.run_view import (
    ABSENCE_S,
    ENDED_PHASES,
    MetricsTail,
    RunView,
    saved_states,
)
from penstock.client.views.screen.events import Limits
from penstock.client.views.screen.model import Facts
from penstock.config.schema import Config, load_config
from penstock.host.errors import ExitCode, LostMemberError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.wire.control import ControlClient, is_stale

WATCH_INTERVAL_S = 1.0
"""Seconds between two requests; a status takes the scheduler some milliseconds."""
WATCH_PATIENCE_S = 30.0
"""Seconds to wait for an answer: a replaced scheduler answers earlier."""


def facts_of(config: Config, run_dir: Path, *, leaves: bool) -> Facts:
    """Returns the facts of a run on this machine for the screen."""
    limits = Limits(
        clip=config.train.clip_grad_norm, arithmetic=config.optimizer.rollback == "arithmetic"
    )
    return Facts(run_dir=run_dir, limits=limits, leaves=leaves)


def facts_for(run_dir: Path | None) -> Facts:
    """Returns the facts of a watched run. ``run_dir`` is None for a run on another machine.

    Raises:
        PenstockError: the configuration of the run cannot be read.
    """
    if run_dir is None:
        return Facts(run_dir=None)
    return facts_of(load_config(run_dir / "resolved.yaml"), run_dir, leaves=True)


def watch(client: ControlClient, display: Display, run_dir: Path | None) -> int:
    """Shows the status until the run ends, then the figures of the run.

    Returns 0 for a finished run, or if the user leaves. Returns 5 for a run stopped before its last
    step, and 4 for a failed run. With ``run_dir``, the endpoint file distinguishes the end of a run
    from a replaced scheduler, and all metrics are shown.

    Raises:
        LostMemberError: the scheduler gave no answer for :data:`WATCH_PATIENCE_S`.
    """
    code, has_ended = _followed(client, display, run_dir)
    for line in summary_of(run_dir) if has_ended else ():
        display.say(line)
    return code


def _followed(client: ControlClient, display: Display, run_dir: Path | None) -> tuple[int, bool]:
    """Returns the exit code of :func:`watch`, and whether the run has ended."""
    follower = _Follower(client, run_dir, past=display.wants_past)
    try:
        with _terminations_raised():
            while True:
                view = follower.look()
                if view is None:
                    display.say("the run has ended")
                    return _end_code(follower.status, run_dir), True
                display.show(view)
                if follower.status.phase in ("done", "failed"):
                    return _end_code(follower.status, run_dir), True
                if display.wait(WATCH_INTERVAL_S):
                    return int(ExitCode.DONE), False
    finally:
        display.close()


class _Follower:
    """Polls a run over an open connection. ``status`` is the last status."""

    def __init__(self, client: ControlClient, run_dir: Path | None, *, past: bool) -> None:
        self._client = client
        self._run_dir = run_dir
        self._tail = None if run_dir is None else MetricsTail.at_end(run_dir / "metrics.jsonl")
        self._past = self._tail.before() if self._tail is not None and past else ()
        self._last_json = ""
        self._heard_s = time.monotonic()
        self.status = pb.StatusReply()

    def look(self) -> RunView | None:
        """Returns the current view of the run, or None after the end.

        Raises:
            LostMemberError: the scheduler gave no answer for :data:`WATCH_PATIENCE_S`.
        """
        answer: pb.StatusReply | None = None
        try:
            answer = self.status = self._client.status()
            self._heard_s = time.monotonic()
        except LostMemberError:
            if self.status.phase in ENDED_PHASES or _has_ended(self._run_dir):
                return None
            if time.monotonic() - self._heard_s > WATCH_PATIENCE_S:
                raise
        silent_s = time.monotonic() - self._heard_s
        past, self._past = self._past, ()
        return RunView(
            steps=self.status.steps,
            status=answer,
            fresh=self._fresh(),
            absent_phase="no_answer" if silent_s > ABSENCE_S else self.status.phase or "starting",
            silent_s=silent_s,
            past=past,
        )

    def _fresh(self) -> tuple[dict[str, object], ...]:
        """Returns new lines of metrics; without the file, at most the last line."""
        if self._tail is not None:
            return self._tail.read()
        line = self.status.last_metrics_json
        new = line not in ("", self._last_json)
        self._last_json = line
        return (json.loads(line),) if new else ()


@contextmanager
def _terminations_raised() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit inside the block, so that the terminal is restored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_code(last: pb.StatusReply, run_dir: Path | None) -> int:
    """Returns the exit code from the last status, and from states saved after that status."""
    if last.phase == "failed":
        return int(ExitCode.LOST_MEMBERS)
    saved = [state.version for state in saved_states(run_dir)] if run_dir is not None else []
    reached = last.saved_version if last.phase == "done" else max([last.version, *saved])
    return int(ExitCode.DONE if reached >= last.steps else ExitCode.STOPPED)


def _has_ended(run_dir: Path | None) -> bool:
    if run_dir is None:
        return False
    return not (run_dir / "endpoint.json").exists() or is_stale(run_dir)
