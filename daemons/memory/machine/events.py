"""Events and effects of a memoryd: plain values.

Events and effects that other daemons share are in :mod:`penstock.daemons.kit.events`.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.daemons.kit.events import (
    BeginAsked,
    DrainAsked,
    Exit,
    LogLine,
    RefusedByScheduler,
    SendDrained,
    SendFailed,
    SendReady,
    ShutdownAsked,
    StopAsked,
)
from penstock.shm.control import CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file of a saved state, as the manifest lists it. ``base``: a file of the run's base, with
    frozen tensors. ``reused``: an earlier save has written the file.
    """

    name: str
    num_bytes: int
    sha256: str
    base: bool = False
    reused: bool = False


# ---- events ----


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSource:
    """A partner's replica: where its mirrord listens, the commit that it is at, and the generation
    that the memory begins with it.
    """

    address: str
    record: CommitRecord
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreAsked:
    """Fill the memory. ``source``: directory of a saved state, empty for initial weights.
    ``replica``: a partner has what is committed.
    """

    epoch: int
    incarnation: int
    source: str
    version: int
    replica: ReplicaSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAsked:
    """Write the state of the node's blocks at ``version`` into ``directory``, while training goes
    on. ``number`` tells the saves of a scheduler apart. ``weights_only``: without the optimizer's
    arrays.
    """

    epoch: int
    number: int
    version: int
    directory: str
    weights_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The restore is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """All files are on disk. ``seconds``: without what it waited for blocks to be settled."""

    files: tuple[WrittenFile, ...]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDamaged:
    """The saved state that was to be restored is not what was written; memory was not touched."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailed:
    """The restore or save failed; ``exit_code`` is what the error would end a process with."""

    error: str
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelled:
    """Reports that the restore or save stopped on request."""


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
    | SourceDamaged
    | JobFailed
    | JobCancelled
)


# ---- effects ----


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRestored:
    """The memory holds the incarnation, or the saved state is ``damaged``."""

    epoch: int
    incarnation: int
    damaged: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPinned:
    """Announces that the pins are set: state is not overwritten before the save has read it."""

    epoch: int
    number: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSaved:
    """Answer a save: the files, or why there are none."""

    epoch: int
    number: int
    version: int
    files: tuple[WrittenFile, ...]
    error: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRestore:
    """Run the restore; answered by :class:`Restored`, :class:`SourceDamaged`, :class:`JobFailed` or
    :class:`JobCancelled`.
    """

    incarnation: int
    source: str
    version: int
    replica: ReplicaSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSave:
    """Pin the version and run the save; answered by :class:`Saved`, :class:`JobFailed` or
    :class:`JobCancelled`. ``weights_only`` as of :class:`SaveAsked`.
    """

    version: int
    directory: str
    weights_only: bool = False


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
    | SendPinned
    | SendSaved
    | SendFailed
    | StartRestore
    | StartSave
    | CancelJob
    | UnlinkMemory
    | LogLine
    | Exit
)
