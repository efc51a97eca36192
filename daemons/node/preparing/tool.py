"""Runs the short-lived processes that need torch, and raises their failures as our errors."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from penstock.config.schema import Config
from penstock.daemons.node.machine.machine import describe_exit
from penstock.daemons.node.run_lock import RunLock
from penstock.daemons.preload.client import ChildProcess
from penstock.daemons.preload.starting import Spawning, Starter
from penstock.host.errors import (
    CapacityError,
    ConfigError,
    ExitCode,
    LostMemberError,
    PenstockError,
)
from penstock.host.files import make_directory, writing
from penstock.host.requirements import check_torch
from penstock.host.stopping import StoppedDetector

Progress = Callable[[str], None]
"""Takes a line about the work in progress, or its result."""

TIMEOUT_S = 3600.0
"""Seconds without a line from a process after which it hangs. Long work says how far it is."""
SILENCE_S = 10.0
"""Seconds that a process may be stopped where no configuration names ``heartbeat_timeout_s``."""
LOOK_S = 0.1


def run_tool(
    module: str,
    *arguments: str,
    log: Path | None = None,
    progress: Progress = lambda line: None,
    keeps: tuple[int, ...] = (),
    starter: Starter | None = None,
    silence_s: float = SILENCE_S,
) -> None:
    """Runs ``python -m module arguments`` to its end; ``progress`` gets the lines of its stdout.

    The process dies with this one. ``keeps``: descriptors of locks that stay open for its lifetime.
    ``starter``: a faster way to start it, if there is one. A process that a signal stops for
    ``silence_s`` is killed and started again.

    Raises:
        ConfigError: no usable torch is installed.
        ConfigError, CapacityError: its last ``penstock: …`` line on stderr, by its exit code.
        LostMemberError: it did not end in time.
        PenstockError: any other failure; ``log``, if given, holds its stderr.
    """
    check_torch()
    words = (*arguments, "--parent-pid", str(os.getpid()))
    chosen = starter or Spawning()
    code, stderr = _run(
        lambda streams: chosen.start(module, words, streams, keeps), progress, silence_s
    )
    if code is None:
        raise LostMemberError(f"{module}: no line after {TIMEOUT_S:g} s")
    if code == 0:
        return
    # A process writes its complaint last; one before a traceback was about another end.
    end = stderr.rpartition("Traceback (most recent call last)")[2]
    complaints = [line for line in end.splitlines() if line.startswith("penstock: ")]
    if complaints:
        kind = CapacityError if code == ExitCode.NO_MEMORY else ConfigError
        raise kind(complaints[-1].removeprefix("penstock: "))
    last = stderr.splitlines()[-1] if stderr else "it wrote nothing to stderr"
    failure = f"{module} {describe_exit(code)}: {last}"
    if log is None:
        raise PenstockError(failure)
    make_directory(log.parent)
    with writing(log, len(stderr)):
        log.write_text(stderr + "\n", encoding="utf-8")
    raise PenstockError(f"{failure} (see {log})")


def _run(
    start: Callable[[Sequence[int]], ChildProcess],
    progress: Callable[[str], None],
    silence_s: float,
) -> tuple[int | None, str]:
    """Returns the exit code and stderr; the code is None if the process was silent for
    :data:`TIMEOUT_S`. A process that a signal stops for ``silence_s`` is killed and started again.

    stderr goes to a file in memory: a pipe would fill up while only stdout is being read, and a
    full disk cannot truncate it.
    """
    with (
        open(os.memfd_create("stderr"), "w+", encoding="utf-8", errors="replace") as errors,
        open(os.devnull, "rb") as nothing,
    ):
        while True:
            reading, writing_end = os.pipe()
            with open(reading, encoding="utf-8", errors="replace") as lines:
                try:
                    process = start((nothing.fileno(), writing_end, errors.fileno()))
                finally:
                    os.close(writing_end)
                watchdog = _Watchdog(process, silence_s)
                code = _code_of(process, lines, progress, watchdog)
            if not watchdog.stopped:
                break
            progress(f"a process was stopped for {silence_s:g} s: it is killed and started again")
        errors.seek(0)
        return (None if watchdog.late else code), errors.read().strip()


def _code_of(
    process: ChildProcess,
    lines: Iterable[str],
    progress: Callable[[str], None],
    watchdog: _Watchdog,
) -> int:
    """Passes on the lines of a process, and returns its exit code."""
    try:
        watchdog.start()  # an interrupt may arrive when the thread runs already
        for line in lines:
            watchdog.extend()
            progress(line.rstrip())
        while not process.ended(LOOK_S):
            continue
    except BaseException:
        process.signal(signal.SIGKILL)
        raise
    finally:
        watchdog.end()  # before the process is reaped, which closes its descriptor
        code = process.reap()
    return code


class _Watchdog(threading.Thread):
    """Kills a process :data:`TIMEOUT_S` after its last line (``late``), or when a signal has
    stopped it for ``silence_s`` (``stopped``).
    """

    def __init__(self, process: ChildProcess, silence_s: float) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.late = False
        self.stopped = False
        self._process = process
        self._deadline_s = time.monotonic() + TIMEOUT_S
        self._stopped_detector = StoppedDetector(silence_s)
        self._over = threading.Event()

    def run(self) -> None:
        """Checks the process until its end, or kills it."""
        while not (self.late or self.stopped or self._over.wait(LOOK_S)):
            now_s = time.monotonic()
            names = frozenset({"process"}) if self._process.stopped else frozenset()
            self.stopped = bool(self._stopped_detector.look(names, now_s))
            self.late = now_s >= self._deadline_s
        if self.late or self.stopped:
            self._process.signal(signal.SIGKILL)

    def extend(self) -> None:
        """Restarts the deadline after a line of the process."""
        self._deadline_s = time.monotonic() + TIMEOUT_S

    def end(self) -> None:
        """Returns when the thread has ended, if it was started."""
        self._over.set()
        if self.is_alive():
            self.join()


def run_models_prepare(
    config: Config,
    run_dir: Path,
    *arguments: str,
    progress: Progress = lambda message: None,
    lock: RunLock | None = None,
    starter: Starter | None = None,
    module: str = "penstock.models.prepare",
) -> None:
    """Makes block table and data of a run directory in a separate process. The process reports its
    progress and holds ``lock`` until it ends. ``module`` is the tool.

    Raises:
        PenstockError: the process failed; see
            :func:`penstock.daemons.node.preparing.tool.run_tool`.
    """
    log = run_dir / "logs" / "prepare.txt"
    run_tool(
        module,
        str(run_dir),
        *arguments,
        log=log,
        progress=progress,
        keeps=() if lock is None else (lock.descriptor,),
        starter=starter,
        silence_s=config.cluster.heartbeat_timeout_s,
    )
