"""Processes of a run: one runner for start, logs, stop signals, metrics, end and exit code.

A daemon and a worker give :func:`run_process` a function that builds their parts and works. Stop
signals are in :mod:`penstock.host.stopping`.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry

from penstock.config.schema import Config
from penstock.host import world
from penstock.host.errors import ExitCode, PenstockError
from penstock.host.files import is_no_room, unforeseen
from penstock.host.logs import open_log
from penstock.host.stopping import StopSignal
from penstock.host.trust import printable
from penstock.protocol.run.metrics_socket import serve_metrics
from penstock.protocol.run.rundir import RunDirectory

_LINE_END = "\n"
_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, process, logger, message, and ``extra`` fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Renders one record."""
        fields: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {k: v for k, v in vars(record).items() if k not in _STANDARD_FIELDS}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def configure_logging(process: str, run_dir: Path, level: str) -> None:
    """Sends all log records to ``RUN_DIR/logs/<process>.jsonl`` (appended).

    Raises:
        PenstockError: see :func:`penstock.host.logs.open_log`.
    """
    handler = open_log(run_dir / "logs" / f"{process}.jsonl")
    handler.setFormatter(JsonFormatter(process))
    root = logging.getLogger()
    for previous in root.handlers:
        previous.close()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to SIGKILL this process when its parent dies; exits if the parent died
    already.

    The signal follows the *thread* that started this process. So a supervisor starts its children
    on a thread that outlives them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(1)


def parent_to_die_with() -> int | None:
    """Returns the pid of the parent, if its death ends this process; else None."""
    number = ctypes.c_int(0)
    if ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number)) != 0 or not number.value:
        return None
    return os.getppid()


class Closable(Protocol):
    """A part of a process that is closed at its end."""

    def close(self) -> Any:
        """Ends the part."""


Part = TypeVar("Part", bound=Closable)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcess:
    """A process of a run, while it builds its parts and works.

    ``member``: its name in logs and metrics. ``stop``: set when the process is asked to stop.
    ``stack``: closes the parts at the end, in the opposite order of their making.
    """

    run: RunDirectory
    member: str
    stop: StopSignal
    stack: ExitStack

    @property
    def config(self) -> Config:
        """The run's configuration."""
        return self.run.config

    def keep(self, part: Part) -> Part:
        """Returns the part, which the end of the process closes."""
        self.stack.callback(part.close)
        return part

    def serve(self, registry: CollectorRegistry) -> None:
        """Serves metrics to metricsd of the node, on a thread that inherits this one's cores."""
        self.keep(serve_metrics(registry, self.run, self.member))


Work = Callable[[RunProcess], int | None]


def run_process(run_dir: Path, member: str, work: Work, parent_pid: int | None) -> int:
    """Runs ``work`` as the process ``member`` of a run; returns the exit code, 0 for None.

    The process obeys stop signals, and dies with its parent if ``parent_pid`` is given.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    stop = StopSignal().install(parent_pid)
    run = RunDirectory(run_dir.absolute())
    return run_main(lambda: work_in_run(run, member, work, stop), run.path)


def work_in_run(run: RunDirectory, member: str, work: Work, stop: StopSignal) -> int | None:
    """Opens the log of a process, runs ``work``, and closes its parts; returns the exit code."""
    configure_logging(member, run.path, run.config.observability.log_level)
    with ExitStack() as stack:
        return work(RunProcess(run=run, member=member, stop=stop, stack=stack))


def run_main(main: Callable[[], int | None], run_dir: Path) -> int:
    """Runs the main function of a process of the run in ``run_dir``; returns its exit code, 0 for
    None.

    Errors for the user, and a full disk, go to stderr and the log, and become the exit code. Any
    other exception is logged and propagates.
    """
    try:
        return int(main() or 0)
    except PenstockError as error:
        return _stop(error)
    except OSError as error:
        logging.getLogger("penstock").exception("stopping")
        if not is_no_room(error):
            raise
        return _stop(unforeseen(error, run_dir))
    except Exception:
        logging.getLogger("penstock").exception("stopping")
        raise


def _stop(error: PenstockError) -> int:
    logging.getLogger("penstock").error("stopping: %s", error)
    sys.stderr.write(f"penstock: {printable(str(error), _LINE_END)}\n")
    return int(error.exit_code)


def tool_main(work: Callable[[], None], place: Path, parent_pid: int | None) -> int:
    """Runs ``work``, about the files in ``place``, as the main function of a process that a command
    starts and waits for. The process dies with its parent. Returns the exit code; the last line on
    stderr explains a code other than 0.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    try:
        work()
    except PenstockError as error:
        complaint = error
    except OSError as error:
        complaint = unforeseen(error, place)
    else:
        return ExitCode.DONE
    # On one line: the parent takes the last line, and names of strangers may have line ends.
    sys.stderr.write(f"penstock: {printable(str(complaint))}\n")
    return int(complaint.exit_code)


def monotonic_s() -> float:
    """Returns the time in seconds, by the clock that deadlines use."""
    return world.monotonic()
