"""Progress of work that takes longer than a second, before a run has a display.

A terminal shows one line in place with the work and its duration. Other outputs get a line after
:data:`PLAIN_S` seconds without one.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, Protocol, runtime_checkable

from penstock.client.views.output import behind
from penstock.host.trust import printable

FIRST_S = 1.0
"""Seconds before work gets a line."""
PLAIN_S = 15.0
"""Seconds between two lines where the output is no terminal."""
_DRAWN_S = 0.25
_ERASE = "\r\x1b[2K"
_COLUMNS = 80
"""Columns of a terminal with an unknown width."""

Say = Callable[[str], None]


class Working:
    """A context manager that shows what is being done, and since when; call it with lines that
    stay.
    """

    def __init__(
        self,
        doing: str,
        stream: IO[str] | None,
        say: Say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins the work. ``stream`` shows it, or nothing does; ``say`` writes lines that stay."""
        self._stream = None if stream is None else behind(stream)
        self._say, self._clock = say, clock
        self._in_place = self._stream is not None and self._stream.isatty()
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._doing = doing
        self._since_s = self._said_s = clock()
        self._is_drawn = False
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Working:
        if self._stream is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __call__(self, line: str) -> None:
        """Writes a line that stays."""
        with self._lock:
            self._erase()
            self._say(line)
            self._said_s = self._clock()

    def doing(self, work: str) -> None:
        """Begins other work, and its duration."""
        with self._lock:
            self._doing, self._since_s = work, self._clock()
            if self._is_drawn:
                self.draw()

    def describe(self, work: str) -> None:
        """Describes the same work in other words; its duration goes on."""
        with self._lock:
            self._doing = work

    def draw(self) -> None:
        """Shows the work, if a line is due."""
        with self._lock:
            now_s = self._clock()
            lasts_s = now_s - self._since_s
            if self._stream is None or self._over.is_set():
                return
            if self._in_place and (lasts_s >= FIRST_S or self._is_drawn):
                columns = shutil.get_terminal_size((_COLUMNS, 24)).columns
                text = f"{printable(self._doing)} {_duration(lasts_s)}"
                self._stream.write(f"{_ERASE}{text[: columns - 1]}")
                self._stream.flush()
                self._is_drawn = True
            elif not self._in_place and now_s - self._said_s >= PLAIN_S:
                self(f"{self._doing}: {_duration(lasts_s)} so far")

    def close(self) -> None:
        """Removes the line, and shows no other one."""
        with self._lock:
            self._over.set()
            self._erase()
        if self._thread.is_alive():
            self._thread.join()

    def _erase(self) -> None:
        if self._is_drawn and self._stream is not None:
            self._stream.write(_ERASE)
            self._stream.flush()
            self._is_drawn = False

    def _run(self) -> None:
        while not self._over.wait(_DRAWN_S):
            self.draw()


@runtime_checkable
class Streaming(Protocol):
    """A display that writes to a stream before its first view."""

    @property
    def stream(self) -> IO[str]:
        """The stream."""


class Saying(Protocol):
    """A display that shows permanent lines."""

    def say(self, message: str) -> None:
        """Shows one permanent line."""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def working(doing: str, display: Saying) -> Working:
    """Returns the progress of work in front of a display. A display without a stream shows only the
    lines that stay.
    """
    return Working(doing, display.stream if isinstance(display, Streaming) else None, display.say)
