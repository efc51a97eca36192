"""Shows a training: a live picture on a terminal, plain lines elsewhere, nothing for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import IO, Protocol

from rich.console import Console
from rich.live import Live

from penstock.client.watching.picture import Smoothed, describe, render
from penstock.client.watching.snapshots import Metrics, RunView

PLAIN_INTERVAL_S = 5.0
PLAIN_STEPS = 10

QUIET_PHASES = frozenset(
    "running deciding amending settling draining beginning saving done starting ending"
    " no_answer".split()
)
"""Phases that come and go with every step, save or epoch; plain output does not mention them."""


class Display(Protocol):
    """Where a training is shown."""

    def say(self, message: str) -> None:
        """One line that stays."""

    def show(self, view: RunView) -> None:
        """The run as it is now."""

    def close(self) -> None:
        """No more."""


class Silent:
    """Shows nothing: for programs."""

    def say(self, message: str) -> None:
        """Nothing."""

    def show(self, view: RunView) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Plain:
    """Lines on a stream: first and last step, between them one every few seconds or ten steps."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._next_s = clock()
        self._phase = "starting"
        self._message = ""
        self._last: Metrics | None = None
        self._shown: Metrics | None = None
        self._view: RunView | None = None

    def say(self, message: str) -> None:
        """One line."""
        self._stream.write(message + "\n")
        self._stream.flush()

    def show(self, view: RunView) -> None:
        """Lines that are due."""
        self._view = view
        if view.phase != self._phase:
            self._phase = view.phase
            if view.phase not in QUIET_PHASES:
                message = view.status.message if view.status is not None else ""
                self.say(f"[{view.phase}]{': ' if message else ''}{message}")
        if view.phase == "running" and view.status is not None:
            if view.status.message not in ("", self._message):  # a save failed, for example
                self.say(f"warning: {view.status.message}")
            self._message = view.status.message
        for entry in view.fresh:
            if entry["phase"] == "eval":
                self.say(describe(entry, view))
                continue
            self._last = entry
            if entry["step"] % PLAIN_STEPS == 0 or self._clock() >= self._next_s:
                self._line(entry, view)

    def close(self) -> None:
        """The last step, if it was not shown."""
        if self._last is not None and self._view is not None and self._last is not self._shown:
            self._line(self._last, self._view)

    def _line(self, entry: Metrics, view: RunView) -> None:
        self.say(describe(entry, view))
        self._shown = entry
        self._next_s = self._clock() + PLAIN_INTERVAL_S


class Interactive:
    """A picture on a terminal that is drawn again with every view."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._last: Metrics | None = None
        self._loss = Smoothed()
        self._started = False

    def say(self, message: str) -> None:
        """One line above the picture."""
        self._console.print(message, markup=False, highlight=False)

    def show(self, view: RunView) -> None:
        """Draw."""
        if not self._started:
            self._live.start()
            self._started = True
        for entry in view.fresh:
            if entry["phase"] == "eval":
                self.say(describe(entry, view))
            else:
                self._last = entry
                self._loss.add(entry.get("loss"))
        self._live.update(render(view, self._last, self._loss.value), refresh=True)

    def close(self) -> None:
        """Remove the picture; what was said stays."""
        if self._started:
            self._live.stop()
            self._started = False
        if self._last is not None:
            self.say(describe(self._last, None))


def choose_display() -> Display:
    """A picture if the output is a terminal, else lines."""
    console = Console()
    return Interactive(console) if console.is_terminal else Plain(sys.stdout)
