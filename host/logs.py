"""Log files and standard streams that never end a run.

On a full disk a line of a log is dropped and counted (``penstock_log_dropped_total``). The log
mentions dropped lines as soon as it can be written again. Standard output and error are often files
on the same disk, or pipes without a reader: a write that fails there is dropped, too. Warnings
about strangers are logged at most once a second (:class:`Complaints`), because strangers can send
without end.
"""

from __future__ import annotations

import io
import logging
import os
import select
import stat
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from penstock.host.errors import StateError
from penstock.host.files import append_whole, cannot_write, is_no_room, make_directory

_LINE_BYTES = 4096
"""Room that a first line takes: a block of the disk."""


READER_S = 1.0
"""Seconds to wait for the reader of a full pipe."""


class LogFile(logging.Handler):
    """Appends records to a file, which is opened with the first of them; see the module."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.dropped = 0
        """Records that were not written, in all."""
        self.cause = ""
        """The failure that the process recovers from: its records have it, as a field."""
        self._path = path
        self._descriptor: int | None = None
        self._unmentioned = 0
        self._reason = ""
        try:
            self._open()
        except OSError as error:
            if not is_no_room(error):
                raise cannot_write(path, error, _LINE_BYTES) from error

    def emit(self, record: logging.LogRecord) -> None:
        """Appends one line; before it, the number of dropped lines, if any."""
        if self.cause:
            vars(record).setdefault("cause", self.cause)
        lines = self.format(record) + "\n"
        if self._unmentioned:
            lines = self.format(self._mention()) + "\n" + lines
        try:
            append_whole(self._open(), lines.encode(errors="backslashreplace"))
        except OSError as error:
            self.dropped += 1
            self._unmentioned += 1
            self._reason = error.strerror or repr(error)
        else:
            self._unmentioned = 0

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        super().close()

    def _open(self) -> int:
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o644)
        return self._descriptor

    def _mention(self) -> logging.LogRecord:
        return logging.makeLogRecord(
            {
                "name": __name__,
                "levelno": logging.WARNING,
                "levelname": "WARNING",
                "msg": "%d lines of this log were dropped (%s)",
                "args": (self._unmentioned, self._reason),
                "created": time.time(),
                "dropped": self._unmentioned,
            }
        )


def open_log(path: Path) -> LogFile:
    """Returns the log file at ``path``; its folder is made. A full disk is no error.

    Raises:
        StateError: a file is where the folder is due, or a directory where the log is.
        ConfigError: they cannot be written for another reason.
    """
    if path.is_dir():
        raise StateError(f"{path}: a directory is where a log is due; move it away")
    make_directory(path.parent)
    return LogFile(path)


def recover_from(cause: str) -> None:
    """Assigns records of this process to ``cause`` until it is empty: the logs of all processes
    name the failure that they recover from.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogFile):
            handler.cause = cause


def dropped_lines() -> int:
    """Returns the number of lines that the log files of this process dropped so far."""
    handlers = logging.getLogger().handlers
    return sum(handler.dropped for handler in handlers if isinstance(handler, LogFile))


class _Forgiving(io.FileIO):
    """A descriptor to which every write succeeds soon. Bytes that the system rejects are dropped.

    A full pipe, socket or terminal gets :data:`READER_S` seconds, once. Until it accepts bytes
    again, writes drop theirs without a wait.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._dropped = 0
        self._target = descriptor
        self._may_fill = not stat.S_ISREG(os.fstat(descriptor).st_mode)
        if self._may_fill:
            # Other processes share the description behind this descriptor: O_NONBLOCK would be
            # theirs, too, and they may fill it between a poll and a write. Sockets and pipes of
            # other users cannot be opened once more: these are polled only.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            with suppress(OSError):
                self._target = os.open(f"/proc/self/fd/{descriptor}", flags)

    def write(self, content: Any) -> int:
        """Returns the number of bytes, of which some may have been dropped."""
        data = memoryview(content).cast("B")
        if self._dropped and self._put(b"\n(%d bytes could not be written here)\n" % self._dropped):
            self._dropped = 0
        for start in range(0, len(data), select.PIPE_BUF):
            # Up to PIPE_BUF bytes go into a pipe whole, or not at all.
            if self._dropped or not self._put(data[start : start + select.PIPE_BUF]):
                self._dropped += len(data) - start
                break
        return len(data)

    def _put(self, data: bytes | memoryview) -> bool:
        """Writes, and returns whether all of it was taken."""
        try:
            while data:
                if self._may_fill and not self._takes():
                    return False
                data = data[os.write(self._target, data) :]
        except OSError:
            return False
        return True

    def _takes(self) -> bool:
        poll = select.poll()
        poll.register(self._target, select.POLLOUT)
        return bool(poll.poll(0 if self._dropped else READER_S * 1000))


def forgive_streams() -> None:
    """Drops bytes that cannot be written to standard output or error, from this call on.

    The end of a process such as the scheduler would end a run. Its streams may be files on a full
    disk, a pipe without a reader, or a terminal that accepts nothing (Ctrl-S).
    """
    sys.stdout = _forgiving(sys.stdout)
    sys.stderr = _forgiving(sys.stderr)


def _forgiving(stream: TextIO) -> TextIO:
    if type(stream) is not io.TextIOWrapper:
        return stream  # the program has put another stream there, or there is none
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        return stream  # bytes in memory
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Forgiving(descriptor)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


COMPLAINT_INTERVAL_S = 1.0


class Complaints:
    """Warnings, at most one a second; any thread may complain."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()  # for the time and the count below
        self._said_s, self._unsaid = float("-inf"), 0

    def say(self, text: str) -> None:
        """Logs a warning, or counts it for the next one."""
        with self._lock:
            now_s, unsaid = time.monotonic(), self._unsaid
            if now_s - self._said_s < COMPLAINT_INTERVAL_S:
                self._unsaid += 1
                return
            self._said_s, self._unsaid = now_s, 0
        self._log.warning("%s%s", text, f" ({unsaid} more such before)" if unsaid else "")
