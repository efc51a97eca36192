"""Displays of a training: plain lines for logs, nothing for programs. Also formats figures of runs.

:mod:`penstock.client.views.screen` is the display on a terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, Protocol

from rich.table import Table
from rich.text import Text

from penstock.client.views.output import KEPT
from penstock.client.views.run_view import Metrics, RunView, numbers
from penstock.config.evaluation import EVAL
from penstock.host.trust import printable
from penstock.protocol.run.data_size import epochs
from penstock.protocol.run.names import SCHEDULERD

PLAIN_FIRST_STEPS = 3
"""Number of steps at the start of a log with a line each."""
PLAIN_INTERVAL_S = (5.0, 60.0)
"""Shortest and longest time in seconds between two plain lines of steps."""
PLAIN_SHARE = 1 / 60
"""Time between two plain lines of steps as a share of the log's age, within
:data:`PLAIN_INTERVAL_S`.
"""
PLAIN_SILENCE_S = 60.0
"""Seconds without a line after which a line reports the duration of the current step."""
QUIET_PHASES = frozenset(
    "running deciding amending mirroring settling draining beginning saving evaluating done"
    " starting ending no_answer".split()
)
"""Phases of each step, save, evaluation or membership. Plain output mentions a phase only after
:data:`PLAIN_SILENCE_S`.
"""
_STEP_PHASES = frozenset("running deciding amending mirroring".split())
_STATE_STYLE = {"ready": "green", "joining": "yellow", "missing": "red", "fencing": "red"}
_DECISIONS = {
    "amend": "clipped",
    "skip": "skipped: gradients are not finite",
}
"""Descriptions of decisions other than a commit."""
_KEPT = 0.95
"""Share of the old mean in a smoothed loss after one more step: a memory of about 20 steps."""


class Display(Protocol):
    """A display of a training. ``wants_past``: True to get metrics from before the first view."""

    wants_past: bool

    def say(self, message: str) -> None:
        """Shows one permanent line."""

    def show(self, view: RunView) -> None:
        """Shows the current state of the run."""

    def wait(self, seconds: float) -> bool:
        """Waits up to ``seconds``; returns True if the user leaves the display."""

    def close(self) -> None:
        """Ends the display."""


class Silent:
    """A display that shows nothing, for programs."""

    wants_past = False

    def say(self, message: str) -> None:
        """Does nothing."""

    def show(self, view: RunView) -> None:
        """Does nothing."""

    def wait(self, seconds: float) -> bool:
        """Waits."""
        time.sleep(seconds)
        return False

    def close(self) -> None:
        """Does nothing."""


class Plain:
    """Writes lines on a stream: the first steps, the last step, and steps at intervals.

    The interval grows from seconds to a minute (:data:`PLAIN_INTERVAL_S`). Evaluations have a
    separate interval. A step that takes minutes gets a line every minute.
    """

    wants_past = False

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._steps = _Rhythm(clock, PLAIN_FIRST_STEPS)
        self._evaluations = _Rhythm(clock, 1)
        self._written_s = self._decided_s = clock()
        self._phase = "starting"
        self._message = ""
        self._view: RunView | None = None

    @property
    def stream(self) -> IO[str]:
        """The stream of the lines."""
        return self._stream

    def say(self, message: str) -> None:
        """Writes one line."""
        self._stream.write(f"{printable(message, KEPT)}\n")
        self._stream.flush()
        self._written_s = self._clock()

    def show(self, view: RunView) -> None:
        """Writes the due lines."""
        self._view = view
        if view.phase != self._phase:
            if not {view.phase, self._phase} <= _STEP_PHASES:
                self._decided_s = self._clock()
            self._phase = view.phase
            if view.phase not in QUIET_PHASES:
                message = view.status.message if view.status is not None else ""
                self.say(f"[{view.phase}]{': ' if message else ''}{message}")
        if view.phase == "running" and view.status is not None:
            if view.status.message not in ("", self._message):  # a save failed, for example
                self.say(f"warning: {view.status.message}")
            self._message = view.status.message
        for entry in view.fresh:
            self._decided_s = self._clock()
            rhythm = self._evaluations if entry["phase"] == "eval" else self._steps
            if rhythm.takes(entry):
                self._write_left()
                self.say(describe(entry, view))
        if view.phase != "paused" and self._clock() - self._written_s >= PLAIN_SILENCE_S:
            self.say(self._patience(view))

    def wait(self, seconds: float) -> bool:
        """Waits."""
        time.sleep(seconds)
        return False

    def close(self) -> None:
        """Writes the last step and the last evaluation, unless shown already."""
        self._write_left()
        if self._evaluations.left is not None:
            self.say(describe(self._evaluations.left, self._view))
            self._evaluations.left = None

    def _write_left(self) -> None:
        """Writes the newest step unless shown already: an evaluation follows its step."""
        if self._steps.left is not None:
            self.say(describe(self._steps.left, self._view))
            self._steps.left = None

    def _patience(self, view: RunView) -> str:
        """Returns the current step or phase with its duration so far."""
        lasts = duration(self._clock() - self._decided_s)
        step = view.status.version + 1 if view.status is not None else 0
        if view.phase in _STEP_PHASES and 0 < step <= view.steps:
            return f"step {step}/{view.steps} has been running for {lasts}"
        return f"[{view.phase}] for {lasts} so far"


class _Rhythm:
    """Chooses lines: the first ``at_once`` lines, then one line after each interval.

    ``left`` is the newest line that was not chosen, or None.
    """

    def __init__(self, clock: Callable[[], float], at_once: int) -> None:
        self.left: Metrics | None = None
        self._clock = clock
        self._at_once = at_once
        self._began_s = self._last_s = clock()

    def takes(self, entry: Metrics) -> bool:
        """Returns whether to write this line now."""
        now_s = self._clock()
        shortest_s, longest_s = PLAIN_INTERVAL_S
        interval_s = min(longest_s, max(shortest_s, PLAIN_SHARE * (now_s - self._began_s)))
        if self._at_once <= 0 and now_s - self._last_s < interval_s:
            self.left = entry
            return False
        self.left = None
        self._at_once -= 1
        self._last_s = now_s
        return True


@dataclass(slots=True)
class Smoothed:
    """An exponential moving average with Adam's bias correction."""

    _sum: float = 0.0
    _weight: float = 0.0

    def add(self, value: object) -> None:
        """Adds a value. Ignores None (a skipped step) and values that are no finite number."""
        for number in numbers([value]):
            self._sum = _KEPT * self._sum + (1.0 - _KEPT) * number
            self._weight = _KEPT * self._weight + (1.0 - _KEPT)

    @property
    def value(self) -> float | None:
        """The mean, or None before the first value."""
        return self._sum / self._weight if self._weight else None


def named_set(entry: Metrics) -> str:
    """Returns `` of NAME`` for the line of a named evaluation set; empty for that of
    ``train.eval_every``.
    """
    name = entry.get("set")
    return f" of {name}" if isinstance(name, str) and name != EVAL else ""


def accuracy_words(entry: Metrics) -> str:
    """Returns the accuracies of the line of an evaluation as text; empty without one."""
    kinds = ("token", "pair")
    shares = ((kind, numbers([entry.get(f"{kind}_accuracy")])) for kind in kinds)
    return "".join(f"  {kind} accuracy {a:.1%}" for kind, values in shares for a in values)


def _over(entry: Metrics) -> str:
    """Returns the number of tokens or pairs in the means of an evaluation; empty if unknown."""
    for name in ("pairs", "tokens"):
        for count in numbers([entry.get(name)]):
            return f"  over {count:,} {name}"
    return ""


def describe(entry: Metrics, view: RunView | None) -> str:
    """Returns a line of metrics as text."""
    if entry["phase"] == "eval":
        return (
            f"step {entry['step']}  evaluation{named_set(entry)} loss"
            f" {_number(entry.get('loss'), '.4f')}{accuracy_words(entry)}{_over(entry)}"
        )
    steps = f"/{view.steps}" if view is not None else ""
    parts = [
        f"step {entry['step']}{steps}",
        *(f"epoch {epochs(passes)}" for passes in numbers([entry.get("data_epoch")])),
        f"loss {_number(entry.get('loss'), '.4f')}",
        *(f"lr {rate:.3g}" for rate in numbers([entry.get("lr")])),
        *(f"norm {norm:.3g}" for norm in numbers([entry.get("grad_norm")])),
        f"{_number(entry.get('tokens_per_second'), ',.0f')} tokens/s",
        f"bubble {_number(entry.get('bubble_ratio'), '.0%')}",
        f"optimizer tail {_milliseconds(entry.get('optimizer_tail_seconds'))}",
    ]
    parts += _decision(entry)
    if view is not None and view.status is not None and view.status.eta_seconds >= 0:
        parts.append(f"ETA {duration(view.status.eta_seconds)}")
    return "  ".join(parts)


def member_table(status: Any) -> Table:
    """Returns a table with a row for each process: state, pid, restarts, silence."""
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for title in ("process", "state", "pid", "restarts", "silent"):
        table.add_column(title, style=None, header_style="dim")
    for member in status.members:
        table.add_row(
            member.member,
            Text(member.state, style=_STATE_STYLE.get(member.state, "")),
            str(member.pid or "-"),
            "-" if member.member == SCHEDULERD else str(member.restarts),  # its node counts them
            f"{member.silent_seconds:.1f} s",
        )
    return table


def absences(status: Any) -> list[str]:
    """Returns a line for each missing process: duration, reason, next action."""
    return [
        f"{member.member} has been gone for {duration(member.gone_seconds)}: {member.why}; next:"
        f" {member.next}"
        for member in status.members
        if member.next
    ]


def incomplete_replicas(status: Any) -> list[str]:
    """Returns a line for each incomplete replica: the loss of its node now would cost steps."""
    return [
        f"{member.member} has not read {member.blocks_missing} blocks of its replica yet: if the"
        " node of the blocks were lost now, the run would go back to its newest saved state"
        for member in status.members
        if member.blocks_missing
    ]


def epochs_of_run(status: Any) -> str:
    """Returns the passes made and planned as ``0.37 of 8.50``; empty if unknown or without data."""
    if not status.data_epochs:
        return ""
    return f"{epochs(status.data_epoch)} of {epochs(status.data_epochs)}"


def duration(seconds: float) -> str:
    """Returns a duration as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) else "-"


def _milliseconds(value: Any) -> str:
    return f"{1000 * value:.0f} ms" if isinstance(value, (int, float)) else "-"


def _decision(entry: Metrics) -> list[str]:
    """Returns the decision about the step, unless it was a commit."""
    decision = entry.get("decision")
    return [] if decision in (None, "commit") else [_DECISIONS.get(str(decision), str(decision))]
