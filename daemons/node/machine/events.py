"""Events and effects of a node's supervisor: plain values.

Events and effects that other daemons share are in :mod:`penstock.daemons.kit.events`.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.daemons.kit.events import (
    DrainAsked,
    Exit,
    LogLine,
    RefusedByScheduler,
    SendDrained,
    SendFailed,
    SendReady,
    ShutdownAsked,
    StopAsked,
    Tick,
)
from penstock.protocol.run.run_result import RunEnd

# ---- events ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A child runs."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """A preloader has imported everything: from now on it forks children."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A child is dead and reaped. ``code``: exit code, or minus the signal that killed it."""

    name: str
    pid: int
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceAsked:
    """The scheduler wants this very process dead, reaped and replaced."""

    member: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberMissing:
    """Reports that no member of that name has joined the scheduler."""

    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBegins:
    """The scheduler asks the node to enter ``epoch``; ``version`` steps are committed."""

    epoch: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopUnheard:
    """The scheduler could not be asked to stop the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Observations of the node's children and the scheduler, at least once a second.

    ``stopped``: children that a signal has stopped. ``heard_s``: time of the scheduler's last
    message; None without a link to it. ``ended``: the run's end, from the note that a scheduler
    leaves.
    """

    stopped: frozenset[str] = frozenset()
    heard_s: float | None = None
    ended: RunEnd | None = None


Event = (
    Started
    | Warmed
    | Exited
    | FenceAsked
    | MemberMissing
    | DrainAsked
    | EpochBegins
    | ShutdownAsked
    | RefusedByScheduler
    | StopAsked
    | StopUnheard
    | Watched
    | Tick
)


# ---- effects ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a child; answered by :class:`Started`, or by :class:`Exited` if that failed."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """Order a child to stop."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Send SIGKILL to a child."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFenced:
    """Tell the scheduler that the process is dead and reaped. ``death``: how it died of its own
    accord.
    """

    member: str
    pid: int
    death: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskSchedulerToStop:
    """Asks for a clean stop of the whole run: the scheduler saves, then shuts all members down.

    ``within_s``: seconds that the stop may take. If a remote scheduler is unreachable,
    :class:`StopUnheard` follows.
    """

    within_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveWord:
    """Leaves the note of the run's end for nodes that wait for it, when the scheduler's node fails
    and the scheduler is dead. Memory is kept.
    """

    error: str
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseLink:
    """End the stream to the scheduler: it waits for its members to hang up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLink:
    """Connect to the scheduler (again)."""


Effect = (
    Start
    | Terminate
    | Kill
    | SendFenced
    | SendDrained
    | SendReady
    | SendFailed
    | AskSchedulerToStop
    | LeaveWord
    | CloseLink
    | OpenLink
    | LogLine
    | Exit
)


def is_routine(event: Event) -> bool:
    """Returns whether an event that leads to nothing says nothing: it only tells the time."""
    return isinstance(event, (Tick, Watched))
