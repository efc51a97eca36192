"""Runs the short-lived processes that need torch, and turns what they say into our errors."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.daemons.node.machine.machine import describe_exit
from penstock.daemons.preload.owner import ChildProcess
from penstock.daemons.preload.starting import Spawning, Starter
from penstock.protocol.errors import (
    CapacityError,
    ConfigError,
    ExitCode,
    LostMemberError,
    PenstockError,
)
from penstock.protocol.requirements import check_torch
from penstock.protocol.run.files import make_directory, writing

TIMEOUT_S = 3600.0
"""Tokenizing a large corpus takes long; a process that hangs should still end some day."""


def run_tool(
    module: str,
    *arguments: str,
    log: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
    keeps: tuple[int, ...] = (),
    starter: Starter | None = None,
) -> None:
    """Runs ``python -m module arguments`` to its end; ``progress`` gets the lines of its stdout. It
    dies with this process, and has the descriptors of locks in ``keeps`` open as long as it lives.
    ``starter`` starts it, if there is one that does so faster.

    Raises:
        ConfigError: there is no torch that would do.
        ConfigError, CapacityError: its last ``penstock: …`` line on stderr, by its exit code.
        LostMemberError: it did not end in time.
        PenstockError: it failed otherwise; what it said is in ``log``, if there is one.
    """
    check_torch()
    words = (*arguments, "--parent-pid", str(os.getpid()))
    code, said = _run(starter or Spawning(), module, words, progress, keeps)
    if code is None:
        raise LostMemberError(f"{module}: no end after {TIMEOUT_S:g} s")
    if code == 0:
        return
    complaints = [line for line in said.splitlines() if line.startswith("penstock: ")]
    if complaints:
        kind = CapacityError if code == ExitCode.NO_MEMORY else ConfigError
        raise kind(complaints[-1].removeprefix("penstock: "))
    last = said.splitlines()[-1] if said else "it said nothing"
    failure = f"{module} {describe_exit(code)}: {last}"
    if log is None:
        raise PenstockError(failure)
    make_directory(log.parent)
    with writing(log, len(said)):
        log.write_text(said + "\n", encoding="utf-8")
    raise PenstockError(f"{failure} (see {log})")


def _run(
    starter: Starter,
    module: str,
    arguments: Sequence[str],
    progress: Callable[[str], None],
    keeps: tuple[int, ...],
) -> tuple[int | None, str]:
    """Returns the exit code, None if the process had to be killed after :data:`TIMEOUT_S`, and what
    it said on stderr.

    stderr goes to a file in memory, which no full disk cuts short: nobody reads it while the lines
    of stdout are waited for.
    """
    late = threading.Event()

    def end(process: ChildProcess) -> None:
        late.set()
        process.signal(signal.SIGKILL)

    with (
        open(os.memfd_create("stderr"), "w+", encoding="utf-8", errors="replace") as errors,
        open(os.devnull, "rb") as nothing,
    ):
        reading, writing_end = os.pipe()
        with open(reading, encoding="utf-8", errors="replace") as lines:
            try:
                streams = (nothing.fileno(), writing_end, errors.fileno())
                process = starter.start(module, arguments, streams, keeps)
            finally:
                os.close(writing_end)
            watchdog = threading.Timer(TIMEOUT_S, end, (process,))
            watchdog.start()
            code = None
            try:
                for line in lines:
                    progress(line.rstrip())
            except BaseException:
                process.signal(signal.SIGKILL)
                raise
            finally:
                code = process.reap()
                watchdog.cancel()
                watchdog.join()
        errors.seek(0)
        return (None if late.is_set() else code), errors.read().strip()
