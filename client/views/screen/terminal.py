"""Takes the terminal for the screen, and restores it in every case.

Meanwhile keys arrive one by one without echo, and the cursor is hidden. The alternate screen buffer
is active, so that the old content returns afterwards. Ctrl-C and Ctrl-Z work as usual: a stop by
Ctrl-Z restores the terminal, too.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_ENTER = b"\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""Alternate buffer, hidden cursor, no wrapping at the last column, clear."""
_LEAVE = b"\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
LOCK_TIMEOUT_S = 0.5
"""Seconds to wait for a draw in progress before the terminal is restored."""


def usable() -> bool:
    """Returns whether this process can draw on its terminal.

    Output and input must be terminals, the terminal must not be dumb, and the process must be in
    the foreground.
    """
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return False
    try:
        output = sys.stdout.fileno()
        return os.isatty(output) and os.isatty(0) and os.tcgetpgrp(output) == os.getpgrp()
    except (OSError, ValueError):
        return False


def speaks_unicode() -> bool:
    """Returns whether the terminal shows blocks and braille, judging by the locale. Fonts of the
    Linux console lack these characters.
    """
    chosen = next((v for name in ("LC_ALL", "LC_CTYPE", "LANG") if (v := os.environ.get(name))), "")
    known = "utf" in chosen.lower() or not chosen
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower()
    return known and encoding.startswith("utf") and os.environ.get("TERM") != "linux"


class Terminal:
    """The terminal of this process: ``output`` for drawing, descriptor 0 for keys.

    ``wake`` is called after a resize, and when the terminal is taken again.
    """

    def __init__(self, output: int, wake: Callable[[], None]) -> None:
        self._output = output
        self._wake = wake
        self._modes: list[Any] | None = None
        self._lent = False
        self._barred = False  # True while this process is stopped
        self._lock = threading.Lock()  # held during a write to the terminal
        self.resumed = False
        """True if another program wrote on the terminal, so that all lines must be drawn."""

    @property
    def lent(self) -> bool:
        """True while the screen may draw."""
        return self._lent

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal."""
        try:
            columns, lines = os.get_terminal_size(self._output)
        except OSError:
            return 80, 24
        return columns or 80, lines or 24

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Handles stop, continue and resize signals inside the block, in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {
            signal.SIGTSTP: self._on_stop,
            signal.SIGCONT: self._on_continue,
            signal.SIGWINCH: lambda number, frame: self._wake(),
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def take(self) -> None:
        """Takes the terminal if this process is in the foreground. Otherwise a later call tries
        again.
        """
        with self._locked():
            if self._lent or self._barred:
                return
            try:
                if os.tcgetpgrp(self._output) != os.getpgrp():
                    return
                modes = termios.tcgetattr(0)
                tty.setcbreak(0, termios.TCSANOW)
                os.write(self._output, _ENTER)
            except (OSError, termios.error):
                return
            self._modes, self._lent, self.resumed = modes, True, True

    def give_back(self) -> None:
        """Restores the terminal."""
        with self._locked():
            if not self._lent:
                return
            self._lent = False
            with suppress(OSError):
                # Does not wait for a terminal that accepts no output (Ctrl-S, a hung connection).
                if select.select([], [self._output], [], LOCK_TIMEOUT_S)[1]:
                    os.write(self._output, _LEAVE)
            with suppress(OSError, termios.error):
                termios.tcsetattr(0, termios.TCSANOW, self._modes or termios.tcgetattr(0))

    def write(self, data: bytes) -> None:
        """Writes output to the terminal.

        Raises:
            OSError: the terminal is gone.
        """
        with self._lock:
            while data and self._lent:
                data = data[os.write(self._output, data[:4096]) :]

    def keys(self) -> str:
        """Returns the typed keys, without escape sequences such as arrows.

        Raises:
            OSError: the terminal is gone.
        """
        typed = os.read(0, 256)
        if not typed:
            raise OSError("the terminal is gone")
        if typed.startswith(b"\x1b") and len(typed) > 1:
            return ""
        return typed.decode(errors="replace")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock, or continues without the lock after a timeout."""
        held = self._lock.acquire(timeout=LOCK_TIMEOUT_S)
        try:
            yield
        finally:
            if held:
                self._lock.release()

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._barred = True
        self.give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)

    def _on_continue(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTSTP, self._on_stop)
        self._barred = False
        self.take()
        self._wake()
