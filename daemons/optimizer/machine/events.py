"""Events and effects of optimizerd's machine: plain values.

Events and effects that other daemons share are in :mod:`penstock.daemons.kit.events`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from penstock.daemons.kit.events import (
    DrainAsked,
    EffectFailed,
    Exit,
    RefusedByScheduler,
    SendDrained,
    SendFailed,
    SendReady,
    ShutdownAsked,
    StopAsked,
)
from penstock.daemons.optimizer.machine.sweeps import Sweep
from penstock.protocol.plan.step import SweepStatus
from penstock.shm.control import CommitRecord, SweepIntent


class UpdatePolicy(Enum):
    """Ways of a block from one version to the next."""

    ADVANCE = auto()
    """Settle and preview in one sweep, when the next gradients are there."""
    SETTLE_EARLY = auto()
    """Preview when the gradients are there, settle during the next forward."""
    DEVICE = auto()
    """Settle during the next forward; a worker's UPDATE previews. A holding attempt's is ours."""
    FLUSH = auto()
    """A worker's UPDATE previews, and writes the next state into the spare copy; the commit adopts
    it. Steps that are not committed as flushed (holds, amends) are settled by optimizerd.
    """
    IN_PLACE = auto()
    """Step in place when the gradients are there; arithmetic takes back what does not count. All
    blocks of a run or none (:mod:`penstock.daemons.optimizer.machine.arithmetic`).
    """

    @property
    def by_worker(self) -> bool:
        """True if a worker's UPDATE makes the block's next weights."""
        return self in (UpdatePolicy.DEVICE, UpdatePolicy.FLUSH)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedBlock:
    """A block with weights and state on this node.

    ``contributions`` is 0 for a block without trainable elements, which needs no sweep. ``remote``
    are the contributions that another node computes.
    """

    index: int
    contributions: int
    remote: frozenset[int] = frozenset()
    policy: UpdatePolicy = UpdatePolicy.ADVANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWords:
    """A block's words of the control segment: state version, and the version in each slot."""

    state_version: int
    slots: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoWords:
    """Words of the undo area; see ``native/undo.h``."""

    armed: bool
    tag: int
    completed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Words in the control segment at a ``Begin``. ``record`` belongs to ``committed``,
    ``next_record`` to the version after it. ``pins``: block -> version of its state that memoryd
    has not read yet.
    """

    incarnation: int
    committed: int
    record: CommitRecord | None
    next_record: CommitRecord | None
    interrupted: SweepIntent | None
    undo: UndoWords
    blocks: Mapping[int, BlockWords]
    pins: Mapping[int, int] = field(default_factory=dict)


# ---- events ----


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryAsked:
    """The scheduler's Begin: enter ``epoch`` with the commit that ``record`` describes. The memory
    holds what ``facts`` says.
    """

    epoch: int
    record: CommitRecord
    facts: MemoryFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptAsked:
    """Gradients of ``attempt`` will arrive, computed with the weights of ``base_version``."""

    epoch: int
    attempt: int
    base_version: int
    loss_scale: float
    learning_rate: float
    hold: bool
    """True for a synchronous step: optimizerd waits for the norm instead of speculating."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsReady:
    """A contribution computed on this node is complete; its ready word was checked."""

    epoch: int
    attempt: int
    block: int
    contribution: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUpdated:
    """A worker has previewed a block, its last byte written; ``status`` is of all contributions."""

    epoch: int
    attempt: int
    block: int
    status: SweepStatus
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A contribution computed on another node has arrived in the buffer of copy ``version % 2``."""

    epoch: int
    attempt: int
    version: int
    block: int
    contribution: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepDone:
    """The sweep that was running has written its last byte."""

    status: SweepStatus | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AmendAsked:
    """The norm was over the limit: preview every block again as ``record`` says."""

    epoch: int
    attempt: int
    record: CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitAsked:
    """The scheduler has journaled ``record``."""

    epoch: int
    record: CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipAsked:
    """The attempt does not count."""

    epoch: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleAsked:
    """Bring the state of every block to ``version``, which is the committed one."""

    epoch: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PinsSeen:
    """Block -> version of its state that memoryd has not read yet; other blocks have no pin."""

    pins: Mapping[int, int]


Event = (
    DrainAsked
    | RecoveryAsked
    | AttemptAsked
    | GradientsReady
    | DeviceUpdated
    | Pulled
    | SweepDone
    | EffectFailed
    | AmendAsked
    | CommitAsked
    | SkipAsked
    | SettleAsked
    | PinsSeen
    | ShutdownAsked
    | RefusedByScheduler
    | StopAsked
)


# ---- effects ----


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRecord:
    """Keep the record in the control segment."""

    record: CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipCommitted:
    """Set the committed version; its record was written before."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetEpoch:
    """Write the epoch word."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSlot:
    """Say which version a weight slot holds; INVALID_VERSION before the first write into it."""

    block: int
    slot: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetState:
    """Say how many steps a block's state contains."""

    block: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginSweep:
    """Announce a sweep that overwrites state."""

    block: int
    state_version: int


@dataclass(frozen=True, slots=True)
class EndSweep:
    """The announced sweep needs no repair any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSweep:
    """Start a sweep; SweepDone follows. Never two at once."""

    work: Sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Fetches another node's contribution; Pulled follows, unless CancelPulls comes first.

    The contribution must have been published in epoch ``since_epoch`` or later. Committed gradients
    may be older than the epoch that needs them again. Their attempt number identifies them:
    attempts are unique in a run, and the copy stays unchanged until it is settled.
    """

    epoch: int
    since_epoch: int
    attempt: int
    version: int
    block: int
    contribution: int


@dataclass(frozen=True, slots=True)
class CancelPulls:
    """Forget the pulls ordered so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendBlockStatus:
    """Tell the scheduler about the gradients of a block."""

    epoch: int
    attempt: int
    block: int
    status: SweepStatus
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SendHeard:
    """Tell the scheduler: all decisions before this attempt are in memory, and it trains nothing
    here of which a status could say so.
    """

    epoch: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAmended:
    """Tell the scheduler: all blocks were previewed again."""

    epoch: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSettled:
    """Tell the scheduler: state and committed version agree in all blocks."""

    epoch: int
    version: int


Effect = (
    WriteRecord
    | FlipCommitted
    | SetEpoch
    | SetSlot
    | SetState
    | BeginSweep
    | EndSweep
    | RunSweep
    | Pull
    | CancelPulls
    | SendDrained
    | SendReady
    | SendBlockStatus
    | SendHeard
    | SendAmended
    | SendSettled
    | SendFailed
    | Exit
)
