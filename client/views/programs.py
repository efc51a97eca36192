"""Displays for callers of :func:`penstock.train`: a progress bar, and a callback for each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.client.views.console import Console
from penstock.client.views.display import Display
from penstock.client.views.run_view import RunView, numbers
from penstock.host.errors import ConfigError, ExitCode
from penstock.protocol.run.data_size import epochs

OnStep = Callable[[dict[str, Any]], object]
"""A callback of the user. Its argument is a line of metrics.jsonl; True as a result stops the
run.
"""


class Bar:
    """Shows a bar with steps, loss and tokens per second; messages stay above the bar."""

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
        """Stops the bar; its last state stays visible."""
        self._progress.stop()


class Stepping:
    """Passes each committed step to the user's callback, and the run to another display.

    ``stop`` asks the run to save and stop. ``stopped`` is True after the callback returned True.
    ``error`` is the exception of the callback, which also stops the run.
    """

    def __init__(self, display: Display, on_step: OnStep, stop: Callable[[], None]) -> None:
        self.wants_past = display.wants_past
        self.stopped = False
        self.error: BaseException | None = None
        self._display, self._on_step, self._stop = display, on_step, stop

    def say(self, message: str) -> None:
        """Shows one permanent line."""
        self._display.say(message)

    def show(self, view: RunView) -> None:
        """Shows the run, and calls the callback for each new step."""
        self._display.show(view)
        for entry in view.fresh:
            if entry["phase"] == "train" and self.error is None and not self.stopped:
                self._call(dict(entry))

    def _call(self, entry: dict[str, Any]) -> None:
        try:
            self.stopped = self._on_step(entry) is True
        except Exception as error:  # raised in code_of, after the run has saved
            self.error = error
        if self.stopped or self.error is not None:
            self._stop()

    def code_of(self, code: int) -> int:
        """Returns the exit code of a run that ended with ``code``; a stop by the callback gives 5.

        Raises:
            Exception: the exception of the callback.
        """
        if self.error is not None:
            raise self.error
        interrupted = self.stopped and code == ExitCode.INTERRUPTED
        return int(ExitCode.STOPPED) if interrupted else code

    def wait(self, seconds: float) -> bool:
        """Waits up to ``seconds``."""
        return self._display.wait(seconds)

    def close(self) -> None:
        """Ends the display."""
        self._display.close()


def check_function(on_step: object) -> None:
    """Checks that ``on_step`` is callable.

    Raises:
        ConfigError: the value is not callable.
    """
    if not callable(on_step):
        raise ConfigError(
            f"on_step = {on_step!r}: expected a function with one argument, a mapping of metrics"
        )
