"""What reaches a memoryd (events) and what it does about it (effects): plain values.

Those that other daemons know, too, are in :mod:`penstock.daemons.kit.events`.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.daemons.kit.events import (
    BeginAsked,
    DrainAsked,
    Exit,
    RefusedByScheduler,
    Say,
    SendDrained,
    SendFailed,
    SendReady,
    ShutdownAsked,
    StopAsked,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file of a saved state, as the manifest lists it."""

    name: str
    num_bytes: int
    sha256: str


# ---- events ----


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreAsked:
    """Fill the memory. ``source``: directory of a saved state, empty for initial weights."""

    epoch: int
    incarnation: int
    source: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAsked:
    """Write the committed state of the node's blocks into ``directory``."""

    epoch: int
    version: int
    directory: str


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
    DrainAsked
    | RestoreAsked
    | BeginAsked
    | SaveAsked
    | ShutdownAsked
    | RefusedByScheduler
    | StopAsked
    | Restored
    | Saved
    | JobFailed
    | JobCancelled
)


# ---- effects ----


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRestored:
    """The memory holds the incarnation."""

    epoch: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSaved:
    """Answer a save: the files, or why there are none."""

    epoch: int
    version: int
    files: tuple[WrittenFile, ...]
    error: str


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
    | Say
    | Exit
)
