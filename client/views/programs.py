"""Displays for programs that call :func:`penstock.train`: a progress bar, and a function that gets
each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.client.views.display import Display
from penstock.client.views.run_view import RunView, numbers
from penstock.host.errors import ConfigError, ExitCode
from penstock.protocol.run.data_size import epochs

OnStep = Callable[[dict[str, Any]], object]
"""A function of the user's: it gets one line of metrics.jsonl, and returns True to stop."""


class Bar:
    """Shows a bar with steps, loss and tokens a second; lines that matter stay above the bar."""

    wants_past = False

    def __init__(self, stream: IO[str]) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream, highlight=False),
        )
        self._task = self._progress.add_task("starting", total=None)

    def say(self, message: str) -> None:
        """Writes one line above the bar."""
        self._progress.console.print(message, markup=False, soft_wrap=True)

    def show(self, view: RunView) -> None:
        """Moves the bar to the newest step."""
        self._progress.start()
        steps = [entry for entry in view.fresh if entry["phase"] == "train"]
        if not steps:
            return
        words = [f"loss {steps[-1]['loss']:.4f}"] if steps[-1].get("loss") is not None else []
        words += [f"epoch {epochs(passes)}" for passes in numbers([steps[-1].get("data_epoch")])]
        rate = steps[-1].get("tokens_per_second")
        words += [f"{rate:,.0f} tokens/s"] if rate else []
        self._progress.update(
            self._task,
            total=view.steps,
            completed=steps[-1]["step"],
            description="  ".join(words) or "training",
        )

    def wait(self, seconds: float) -> bool:
        """Waits."""
        time.sleep(seconds)
        return False

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._progress.stop()


class Stepping:
    """Hands each committed step to a function of the user's, and shows the run on another display.

    ``stop`` asks the run to save and stop. ``stopped``: the function returned True. ``error``: what
    the function raised, which stops the run, too.
    """

    def __init__(self, display: Display, on_step: OnStep, stop: Callable[[], None]) -> None:
        self.wants_past = display.wants_past
        self.stopped = False
        self.error: BaseException | None = None
        self._display, self._on_step, self._stop = display, on_step, stop

    def say(self, message: str) -> None:
        """Shows one line that stays."""
        self._display.say(message)

    def show(self, view: RunView) -> None:
        """Shows the run, and calls the function for each step that is new."""
        self._display.show(view)
        for entry in view.fresh:
            if entry["phase"] == "train" and self.error is None and not self.stopped:
                self._call(dict(entry))

    def _call(self, entry: dict[str, Any]) -> None:
        try:
            self.stopped = self._on_step(entry) is True
        except Exception as error:  # the run saves first; the caller gets the error then
            self.error = error
        if self.stopped or self.error is not None:
            self._stop()

    def code_of(self, code: int) -> int:
        """Returns the exit code of a run that ended with ``code``: a stop by the function is a stop
        on request.

        Raises:
            Exception: the error of the function, once the run has stopped.
        """
        if self.error is not None:
            raise self.error
        interrupted = self.stopped and code == ExitCode.INTERRUPTED
        return int(ExitCode.STOPPED) if interrupted else code

    def wait(self, seconds: float) -> bool:
        """Waits, or shorter."""
        return self._display.wait(seconds)

    def close(self) -> None:
        """Shows no more."""
        self._display.close()


def check_function(on_step: object) -> None:
    """Refuse what cannot be called.

    Raises:
        ConfigError: names the value.
    """
    if not callable(on_step):
        raise ConfigError(
            f"on_step = {on_step!r}: expected a function of one mapping, a line of metrics.jsonl"
        )
