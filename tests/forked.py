"""Processes forked by a preloader, for tests that would start the same program many times."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import TextIO

from penstock.daemons.preload.client import ChildProcess
from penstock.daemons.preload.preloaders import TORCH
from penstock.daemons.preload.starting import Preloading

READ_AT_START = ("PYTHON", "LD_")
"""Beginnings of the names of variables that act while a process starts and imports. The others are
read later, and a forked process has those of its test.
"""


class Forked:
    """A child with the members of ``subprocess.Popen`` that tests use. Its output is one pipe."""

    def __init__(self, child: ChildProcess, stdout: TextIO) -> None:
        self.pid = child.pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._child = child

    def poll(self) -> int | None:
        """Returns the exit code (negative: signal) if the process has ended, else None."""
        if self.returncode is None and self._child.ended():
            self.returncode = self._child.reap()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Returns the exit code.

        Raises:
            subprocess.TimeoutExpired: the process runs for longer.
        """
        if self.returncode is None and not self._child.ended(timeout):
            raise subprocess.TimeoutExpired("a forked process", timeout)
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Returns the remaining output when the process has ended; stderr is in it."""
        read: list[str] = []
        reader = threading.Thread(target=lambda: read.append(self.stdout.read()), daemon=True)
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired("a forked process", timeout)
        self.stdout.close()
        self.wait(timeout)
        return read[0], None

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            self._child.signal(number)


class Forking:
    """Forks processes like those that ``subprocess.Popen`` would start, in an equal environment."""

    def __init__(self, preloading: Preloading) -> None:
        self._preloading = preloading
        self._environment = _fixed(os.environ)

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Returns whether a process with this environment has the imports of the preloader."""
        return _fixed(environment) == self._environment

    def start(self, module: str, words: Sequence[str]) -> Forked:
        """Starts ``python -m module words``, which inherits a preloader of its own."""
        reading, writing = os.pipe()
        try:
            with open(os.devnull, "rb") as nothing:
                streams = (nothing.fileno(), writing, writing)
                child = self._preloading.start(module, words, streams, inherits=(TORCH,))
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return Forked(child, open(reading, encoding="utf-8"))


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: value for k, value in environment.items() if k.startswith(READ_AT_START)}
