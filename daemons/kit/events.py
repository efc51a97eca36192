"""Events and effects that the machines of several daemons know: plain values.

A machine takes one event at a time and returns a list of effects, which are carried out in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.host.errors import ExitCode

# ---- events ----


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAsked:
    """The scheduler asks this member to leave the old epoch; ``epoch`` is the next one. ``saving``:
    number of the save that goes on meanwhile, 0 if none does.
    """

    epoch: int
    saving: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginAsked:
    """The scheduler asks this member to enter ``epoch``."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownAsked:
    """The scheduler ends the run for every member. ``code``: exit code of the run."""

    reason: str
    code: int = ExitCode.DONE
    keep_memory: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedByScheduler:
    """The scheduler does not accept this process."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """A stop signal asks this process to stop. ``again``: a repeated signal insists.

    ``within_s``: seconds that the stop may take; None for no limit.
    """

    again: bool = False
    within_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectFailed:
    """An effect could not be carried out, and those after it in its list did not happen.

    ``code``: exit code for the error.
    """

    error: str
    code: ExitCode = ExitCode.LOST_MEMBERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed. Machines with deadlines receive it regularly."""


# ---- effects ----


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDrained:
    """Tell the scheduler that nothing of an older epoch runs in this process."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReady:
    """Tell the scheduler that this process takes part in ``epoch``."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFailed:
    """Tell the scheduler that the run cannot go on, and with which exit code it should end."""

    error: str
    code: int
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """Writes a line for operators to the log. ``cause``: name of the failure under recovery."""

    text: str
    warning: bool = False
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End the process with ``code``; ``reason`` is for the log, and may be empty."""

    code: int
    reason: str = ""
