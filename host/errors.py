"""The error tree. Exit codes are part of the command-line contract.

Users see only subclasses of :class:`PenstockError`. The message names the field or resource, the
value, and accepted values or a remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of every ``penstock`` command."""

    DONE = 0
    BAD_CONFIG = 2
    NO_MEMORY = 3
    LOST_MEMBERS = 4
    STOPPED = 5
    """Stopped on request before the last step, and saved: the run is not finished."""
    INTERRUPTED = 130


FAILURES = frozenset((ExitCode.BAD_CONFIG, ExitCode.NO_MEMORY, ExitCode.LOST_MEMBERS))
"""Codes of runs and processes that failed. All other codes mean success or a stop on request."""


def failure_code(claimed: int) -> ExitCode:
    """Returns the exit code of a failure that another process reports as ``claimed``.

    Other numbers become LOST_MEMBERS: 0, 1, 130, minus a signal, numbers
    that the system cuts down to a byte. A failure never passes for success or an interruption.
    """
    return ExitCode(claimed) if claimed in FAILURES else ExitCode.LOST_MEMBERS


def ending_code(claimed: int) -> ExitCode:
    """Returns the exit code of a run that ended as ``claimed``; LOST_MEMBERS for unknown codes."""
    return ExitCode(claimed) if claimed in tuple(ExitCode) else ExitCode.LOST_MEMBERS


class PenstockError(Exception):
    """Base of all errors that carry a message for the user. ``report``: the result so far, for
    commands with ``--json``.
    """

    exit_code: ExitCode = ExitCode.LOST_MEMBERS
    report: Mapping[str, Any] = MappingProxyType({})


class ConfigError(PenstockError):
    """Bad input: configuration, file, argument. Exit code 2."""

    exit_code = ExitCode.BAD_CONFIG


class CapacityError(PenstockError):
    """Not enough memory, space or CPUs. Exit code 3."""

    exit_code = ExitCode.NO_MEMORY


class StateError(PenstockError):
    """Saved or shared state is damaged, foreign, or of another version; nothing was touched.

    Exit code 2.
    """

    exit_code = ExitCode.BAD_CONFIG


class ProtocolError(PenstockError):
    """A peer sent something that is not a valid message."""


class LostMemberError(PenstockError):
    """A member is gone for good, or a deadline passed. Exit code 4."""


class RefusedError(PenstockError):
    """The scheduler refuses this member (old epoch, wrong run); the process must exit."""


def reason(error: Exception, limit: int = 300) -> str:
    """Returns the reason of an error on one line of at most ``limit`` characters, for a message
    that already names file or key.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split()).rstrip(".")
    text = text if len(text) <= limit else f"{text[:limit].rstrip()} …"
    return text or "no reason is given"
