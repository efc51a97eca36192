"""What every process does at birth: JSON-line logs, parent-death signal, metrics, exit codes.

Stop signals are in :mod:`penstock.protocol.stopping`.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server

from penstock.protocol.errors import ConfigError, PenstockError

_PR_SET_PDEATHSIG = 1
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, process, logger, message, and ``extra`` fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
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
    """Send all log records to ``RUN_DIR/logs/<process>.jsonl`` (appended)."""
    path = run_dir / "logs" / f"{process}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(JsonFormatter(process))
    root = logging.getLogger()
    for previous in root.handlers:
        previous.close()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to SIGKILL this process when its parent dies; exit if that happened already.

    The signal follows the *thread* that started this process: a supervisor starts its children on
    a thread that outlives them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """A running Prometheus endpoint on ``port``."""

    port: int
    close: Callable[[], None]


def serve_metrics(registry: CollectorRegistry, port: int, host: str = "127.0.0.1") -> MetricsServer:
    """Serve ``registry`` over HTTP; port 0 lets the system choose.

    Raises:
        ConfigError: the port is in use.
    """
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"observability.metrics_port = {port}: cannot listen on {host}:{port}: {error}"
        ) from error

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5.0)

    return MetricsServer(port=server.server_port, close=close)


def run_main(main: Callable[[], int | None]) -> int:
    """Run a process's main function and return its exit code, 0 for None.

    Errors for the user go to stderr and the log, and become the exit code; any other exception is
    logged and propagates.
    """
    try:
        return int(main() or 0)
    except PenstockError as error:
        logging.getLogger("penstock").error("stopping: %s", error)
        sys.stderr.write(f"penstock: {error}\n")
        return int(error.exit_code)
    except Exception:
        logging.getLogger("penstock").exception("stopping")
        raise


def monotonic_s() -> float:
    """The clock that deadlines use."""
    return time.monotonic()
