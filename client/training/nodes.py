"""The supervisor processes of an embedded run, and the signals meant for it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from penstock.daemons.node.main import LAUNCHER
from penstock.protocol.run.files import make_directory, reserve, writing
from penstock.protocol.run.stopping import STOP_SIGNALS, Demand, Insistence, stop_signals_blocked
from penstock.shm.process import is_stopped

CONSOLE_BYTES = 64 << 10
"""Of the console that a full disk does not take."""


def console_path(run_dir: Path) -> Path:
    """What the run's processes said on stdout and stderr since its last start."""
    return run_dir / "logs" / "console.txt"


def empty_console(run_dir: Path) -> None:
    """Begin a console anew, with room for what processes say when the disk is full.

    Raises:
        PenstockError: it cannot be written, or has no such room.
    """
    path = console_path(run_dir)
    make_directory(path.parent)
    with writing(path, CONSOLE_BYTES), path.open("wb") as file:
        reserve(file.fileno(), CONSOLE_BYTES)


class NodeProcess:
    """One supervisor process; replaced when it is killed."""

    def __init__(self, run_dir: Path, name: str, max_restarts: int) -> None:
        self.name = name
        self._run_dir = run_dir
        self._restarts_left = max_restarts
        self._stopping = False
        self._process = self._spawn()

    @property
    def pid(self) -> int:
        """Of the present process."""
        return self._process.pid

    def poll(self, *, replace: bool) -> int | None:
        """Exit code, or None while it runs. One that was killed is started anew if ``replace``."""
        code = self._process.poll()
        if code is not None and code < 0 and replace and self._restarts_left:
            self._restarts_left -= 1
            self._process = self._spawn()
            if self._stopping:
                self.signal(signal.SIGTERM)  # waits until the new process listens
            return None
        return code

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return is_stopped(self._process.pid)

    def stop(self) -> None:
        """Ask for a clean stop of the run, now and of every process that replaces this one."""
        if not self._stopping:  # a second signal would insist
            self._stopping = True
            self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if it still runs."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL and reap; its children die with it."""
        self._process.kill()
        self._process.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with console_path(self._run_dir).open("ab") as console, stop_signals_blocked():
            return subprocess.Popen(
                [
                    *LAUNCHER,
                    "node",
                    *("--config", str(self._run_dir / "resolved.yaml")),
                    *("--node", self.name, "--parent-pid", str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                process_group=0,  # Ctrl-C reaches only this process, which asks for a clean stop
            )


class Interruptions:
    """Hears SIGINT and SIGTERM while it is installed (in the main thread; elsewhere none come).

    ``asked_s``: when a stop was asked for first (monotonic seconds). ``insisted``: somebody does
    not want to wait for it.
    """

    def __init__(self) -> None:
        self.asked_s: float | None = None
        self.insisted = False
        self._insistence = Insistence()

    @property
    def state(self) -> tuple[bool, bool]:
        """Whether a stop was asked for, and insisted on."""
        return self.asked_s is not None, self.insisted

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        demand = self._insistence.heard(number, now_s)
        if demand is Demand.STOP:
            self.asked_s = now_s
        elif demand is Demand.NOW:
            self.insisted = True

    @contextmanager
    def installed(self, *, process_ends: bool) -> Iterator[Interruptions]:
        """Handle the signals inside the block. With ``process_ends`` those after it are ignored:
        latecomers of a round of signals must not change how the process ends.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if process_ends else handler)
