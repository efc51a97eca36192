"""A terminal in a test's hands: what a program writes on it is interpreted, keys are typed."""

from __future__ import annotations

import copy
import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyte

ENVIRONMENT = {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "PS1": "$ "}


class Screens(pyte.Screen):
    """pyte's screen, which also knows the second buffer and who is in front."""

    def __init__(self, columns: int, lines: int) -> None:
        super().__init__(columns, lines)
        self.alternate = False
        self.hidden_cursor = False

    def set_mode(self, *modes: int, **keywords: bool) -> None:
        self._note(modes, True, **keywords)
        super().set_mode(*modes, **keywords)

    def reset_mode(self, *modes: int, **keywords: bool) -> None:
        self._note(modes, False, **keywords)
        super().reset_mode(*modes, **keywords)

    def _note(self, modes: tuple[int, ...], on: bool, private: bool = False) -> None:
        if private and 1049 in modes and on != self.alternate:
            self.alternate = on
            if on:
                self._kept = copy.deepcopy(self.buffer), copy.copy(self.cursor)
                self.erase_in_display(2)
            else:
                self.buffer, self.cursor = self._kept
        if private and 25 in modes:
            self.hidden_cursor = not on


class TerminalRun:
    """A command on a terminal of its own, whose session it leads."""

    def __init__(
        self, process: subprocess.Popen[bytes], master: int, size: tuple[int, int]
    ) -> None:
        self.process = process
        self.master = master
        self.screen = Screens(*size)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""

    def read(self, seconds: float = 0.1) -> None:
        """Interpret what comes within that time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self.master], [], [], left)[0]:
                return
            try:
                data = os.read(self.master, 65536)
            except OSError:  # nobody has the other end any more
                return
            if not data:
                return
            self.raw += data
            self._stream.feed(data)

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def until(self, what: Callable[[], bool] | str, timeout_s: float = 600.0) -> None:
        """Read until a text is on the screen, or something is true."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.read()
            if what in self.text if isinstance(what, str) else what():
                return
        raise AssertionError(f"not on the screen in {timeout_s} s: {what!r}\n{self.text}")

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self.master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Change the window's size."""
        set_size(self.master, columns, lines)
        self.screen.resize(lines, columns)

    @property
    def cooked(self) -> bool:
        """Whether the terminal shows what is typed, and gives lines."""
        flags = termios.tcgetattr(self.master)[3]
        return bool(flags & termios.ECHO and flags & termios.ICANON)

    def hang_up(self) -> None:
        """Close the terminal, as a lost connection does."""
        os.close(self.master)
        self.master = -1

    def end(self, timeout_s: float = 30.0) -> int:
        """Wait for the command's end; its exit code."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read()
        self.read(0.3)
        return self.process.wait(timeout=0.1)


def set_size(descriptor: int, columns: int, lines: int) -> None:
    """Tell a terminal how large its window is."""
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@contextmanager
def on_terminal(
    command: Sequence[str | Path],
    columns: int = 80,
    lines: int = 24,
    env: dict[str, str] | None = None,
) -> Iterator[TerminalRun]:
    """Start a command on a terminal; it and its session are killed at the end."""
    master, slave = os.openpty()
    set_size(slave, columns, lines)
    process = subprocess.Popen(
        # Ctrl-C works on a terminal, whatever started the tests in the background.
        ["env", "--default-signal=INT", "setsid", "--ctty", *map(str, command)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, **ENVIRONMENT, **(env or {})},
    )
    os.close(slave)
    run = TerminalRun(process, master, (columns, lines))
    try:
        yield run
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(timeout=500)
        if run.master >= 0:
            os.close(run.master)
