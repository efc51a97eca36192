"""What reaches a memoryd (events) and what it does about it (effects): plain values."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.daemons.memory.tensorfile import WrittenFile

# ---- events ----


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOrdered:
    """Leave the old epoch."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOrdered:
    """Fill the memory. ``source``: directory of a saved state, empty for initial weights."""

    epoch: int
    incarnation: int
    source: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginOrdered:
    """Enter a new epoch."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrdered:
    """Write the committed state of the node's blocks into ``directory``."""

    epoch: int
    version: int
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownOrdered:
    """The run ends."""

    keep_memory: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedByScheduler:
    """The scheduler does not accept this process."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """SIGTERM or SIGINT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The restore is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """All files are on disk."""

    files: tuple[WrittenFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailed:
    """The restore or save failed; ``exit_code`` is what the error would end a process with."""

    error: str
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelled:
    """The restore or save stopped because it was told to."""


Event = (
    DrainOrdered
    | RestoreOrdered
    | BeginOrdered
    | SaveOrdered
    | ShutdownOrdered
    | RefusedByScheduler
    | StopAsked
    | Restored
    | Saved
    | JobFailed
    | JobCancelled
)


# ---- effects ----


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDrained:
    """Acknowledge a drain, with what the control segment says."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRestored:
    """The memory holds the incarnation."""

    epoch: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReady:
    """Acknowledge an epoch."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSaved:
    """Answer a save: the files, or why there are none."""

    epoch: int
    version: int
    files: tuple[WrittenFile, ...]
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFailed:
    """The run cannot go on."""

    epoch: int
    error: str
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRestore:
    """Run the restore; answered by :class:`Restored`, :class:`JobFailed`, :class:`JobCancelled`."""

    incarnation: int
    source: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSave:
    """Run the save; answered by :class:`Saved`, :class:`JobFailed` or :class:`JobCancelled`."""

    version: int
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelJob:
    """Tell the running job to stop soon; it still answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlinkMemory:
    """Remove the names of the segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignore:
    """An event that is out of date or out of order; logged."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The process ends."""

    exit_code: int
    reason: str


Effect = (
    SendDrained
    | SendRestored
    | SendReady
    | SendSaved
    | SendFailed
    | StartRestore
    | StartSave
    | CancelJob
    | UnlinkMemory
    | Ignore
    | Exit
)
