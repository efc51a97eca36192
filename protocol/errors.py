"""The error tree. Exit codes are part of the command-line contract.

Users see only subclasses of :class:`PenstockError`; its message names the field or resource, the
value, and what would do.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every ``penstock`` command."""

    DONE = 0
    BAD_CONFIG = 2
    NO_MEMORY = 3
    LOST_MEMBERS = 4
    INTERRUPTED = 130


class PenstockError(Exception):
    """Base of all errors that carry a message for the user."""

    exit_code: ExitCode = ExitCode.LOST_MEMBERS


class ConfigError(PenstockError):
    """Bad input: configuration, file, argument. Exit code 2."""

    exit_code = ExitCode.BAD_CONFIG


class CapacityError(PenstockError):
    """Not enough memory or space. Exit code 3."""

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
