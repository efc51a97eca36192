"""Events and effects of a mirrord's machine: plain values.

Events and effects that optimizerd's machine shares are in
:mod:`penstock.daemons.optimizer.machine.events`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.daemons.kit.events import (
    DrainAsked,
    EffectFailed,
    Exit,
    LogLine,
    RefusedByScheduler,
    SendDrained,
    SendReady,
    ShutdownAsked,
    StopAsked,
)
from penstock.daemons.optimizer.machine.events import (
    AttemptAsked,
    BeginSweep,
    CancelPulls,
    CommitAsked,
    EndSweep,
    FlipCommitted,
    Pull,
    Pulled,
    RunSweep,
    SendSettled,
    SetState,
    SkipAsked,
    SweepDone,
    UndoWords,
    WriteRecord,
)
from penstock.shm.control import CommitRecord, SweepIntent

Held = Mapping[tuple[int, int, int], int]
"""(block, copy, contribution) -> the attempt of the gradients in the copy; absent: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredBlock:
    """A block of the other node that has something to train; ``contributions`` to its gradients."""

    index: int
    contributions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """Words in the control segment at a mirrord's start. ``states``: versions of the blocks with
    state. ``record``: the record of ``committed``.
    """

    incarnation: int
    committed: int
    record: CommitRecord | None
    interrupted: SweepIntent | None
    undo: UndoWords
    states: Mapping[int, int]
    held: Held


# ---- events ----


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowAsked:
    """The scheduler's Begin: enter ``epoch`` with the commit of ``record``.

    ``bereft``: blocks that lost gradients of that commit with a machine. ``is_strange``: the
    journal does not know this replica, so it must not fill a memory.
    """

    epoch: int
    record: CommitRecord
    bereft: frozenset[int] = frozenset()
    is_strange: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentAsked:
    """A node is to be filled from the replica: bring all of it to the commit of ``record``."""

    epoch: int
    record: CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeded:
    """Reports that a block's state of ``version`` was read from its owner, with a memory of
    ``incarnation``.
    """

    epoch: int
    block: int
    version: int
    incarnation: int


Event = (
    DrainAsked
    | FollowAsked
    | PresentAsked
    | AttemptAsked
    | Pulled
    | Seeded
    | SweepDone
    | CommitAsked
    | SkipAsked
    | ShutdownAsked
    | RefusedByScheduler
    | StopAsked
    | EffectFailed
)


# ---- effects ----


@dataclass(frozen=True, slots=True)
class VoidReplica:
    """Say that there is nothing in the replica: no block, no gradients, no sweep cut short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoidBlock:
    """Say that there is no state of a block, and none of its gradients."""

    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetIncarnation:
    """Say which filling of the run's memory the replica follows; record and version are written."""

    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetHeld:
    """Records the attempt of the gradients in a copy; 0 before the copy is written."""

    block: int
    copy: int
    contribution: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """Read a block's state from its owner; Seeded follows, unless CancelSeeds comes first."""

    epoch: int
    block: int


@dataclass(frozen=True, slots=True)
class CancelSeeds:
    """Forget the seed under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMirrored:
    """Reports that the attempt's gradients have arrived for all blocks with state."""

    epoch: int
    attempt: int
    blocks_missing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReplica:
    """Reports to the scheduler that no older epoch runs here, and what the replica contains.

    ``attempt``: the attempt beyond the committed one with complete gradients for all blocks; 0 for
    none.
    """

    epoch: int
    incarnation: int
    committed: int
    attempt: int
    complete: bool


@dataclass(frozen=True, slots=True)
class UnlinkReplica:
    """Remove the names of the replica's segments."""


Effect = (
    VoidReplica
    | VoidBlock
    | SetIncarnation
    | SetHeld
    | SetState
    | WriteRecord
    | FlipCommitted
    | BeginSweep
    | EndSweep
    | RunSweep
    | Pull
    | CancelPulls
    | Seed
    | CancelSeeds
    | SendMirrored
    | SendReplica
    | SendDrained
    | SendReady
    | SendSettled
    | UnlinkReplica
    | LogLine
    | Exit
)
