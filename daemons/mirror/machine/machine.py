"""A mirrord's state machine: turns events into effects, which the caller carries out in order.

::

    IDLE -- Begin --> LIVE            pulls, settles, reads what is missing from the owner
     ^                  |
     +----- Drain ------+
    IDLE -- Settle --> PRESENTING -- all at the committed version --> IDLE
    any -- stop asked --> STOPPING -- the running sweep has ended --> STOPPED

An attempt is *mirrored* when every block in the replica has its gradients and lacks no earlier
step. The gradients of a commit stay at their source until the replica has them, since the attempt
that overwrites them begins only after a commit that waited for the replica. A block read from its
owner may join at the committed version at any time. It may join one step behind only while the
current attempt is not mirrored: only then do the gradients of that step stay long enough. It may
not if some of them were lost with a machine: its owner, which has them, takes that step first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, ClassVar

from penstock.daemons.kit.events import (
    DrainAsked,
    EffectFailed,
    Exit,
    LogLine,
    RefusedByScheduler,
    SendReady,
    ShutdownAsked,
    StopAsked,
)
from penstock.daemons.mirror.machine.events import (
    CancelSeeds,
    Effect,
    Event,
    FollowAsked,
    MirroredBlock,
    PresentAsked,
    ReplicaFacts,
    Seed,
    Seeded,
    SendMirrored,
    SendReplica,
    UnlinkReplica,
)
from penstock.daemons.mirror.machine.replica import Replica
from penstock.daemons.optimizer.machine.events import (
    AttemptAsked,
    BeginSweep,
    CancelPulls,
    CommitAsked,
    EndSweep,
    Pull,
    Pulled,
    RunSweep,
    SendSettled,
    SkipAsked,
    SweepDone,
)
from penstock.daemons.optimizer.machine.sweeps import FinishSettle, Settle
from penstock.host.errors import ExitCode
from penstock.protocol.plan.step import OptimizerStep

BEGINS_ANEW = "the journal does not know this replica: it is removed, and a new one is begun"


class MirrorPhase(Enum):
    """Phases of a mirrord's life; see the module's picture."""

    IDLE = auto()
    LIVE = auto()
    PRESENTING = auto()
    STOPPING = auto()
    STOPPED = auto()


class ContradictionError(Exception):
    """The scheduler's messages and the replica cannot both be right."""


class MirrorMachine:
    """mirrord of one node, which keeps a replica of ``blocks`` of another one."""

    def __init__(self, blocks: Sequence[MirroredBlock], facts: ReplicaFacts) -> None:
        self.phase = MirrorPhase.IDLE
        self.epoch = 0
        """The epoch of the last Begin or Drain; events of older epochs are ignored."""
        self.attempt = 0
        """The attempt under way; 0 if there is none."""
        self._out: list[Effect] = []
        self.replica = Replica(blocks, facts, self._out)
        self._mirrored = False  # the scheduler knows that the attempt's gradients are here
        self._running: Settle | FinishSettle | None = None
        self._cut_short: int | None = None
        self._seeding: int | None = None
        # blocks that lost the commit's gradients everywhere
        self._bereft: frozenset[int] = frozenset()
        self._farewell: Callable[[], Effect] | None = None  # due when no sweep runs

    # ---- queries ----

    @property
    def busy(self) -> bool:
        """True while a sweep runs."""
        return self._running is not None

    @property
    def waits(self) -> bool:
        """True if only other members' progress can lead to further work."""
        return self._running is None and self._seeding is None

    def validate(self) -> None:
        """Checks the replica.

        Raises:
            ValueError: naming what contradicts what.
        """
        self.replica.validate()

    # ---- the one entrance ----

    def handle(self, event: Event, now_s: float = 0.0) -> list[Effect]:
        """Returns the effects of ``event``. No decision of a mirrord depends on time."""
        if self.phase is MirrorPhase.STOPPED:
            return []
        try:
            self._HANDLERS[type(event)](self, event)
            self._proceed()
        except ContradictionError as error:
            self._leave_at_once(str(error))
        out = list(self._out)
        self._out.clear()  # in place: the replica appends to the same list
        return out

    def _proceed(self) -> None:
        """Starts the next sweep, reports finished work, and reads missing state."""
        active = self.phase in (MirrorPhase.LIVE, MirrorPhase.PRESENTING)
        if active and self._running is None:
            self._start_sweep()
        if self.phase is MirrorPhase.LIVE:
            self._report_mirrored()
            self._seed()
        if self.phase is MirrorPhase.PRESENTING and not self.replica.pending():
            self.phase = MirrorPhase.IDLE
            self._out.append(SendSettled(epoch=self.epoch, version=self.replica.committed))
        if self._farewell is not None and self._running is None:
            farewell, self._farewell = self._farewell(), None
            self._out.append(farewell)
            if isinstance(farewell, Exit):
                self.phase = MirrorPhase.STOPPED

    def _start_sweep(self) -> None:
        replica, record = self.replica, self.replica.record
        if record is None:
            return
        update, block = OptimizerStep.of(record), self._cut_short
        if block is not None:  # its intent stands
            self._cut_short, self._running = None, FinishSettle(block=block, update=update)
        elif (block := replica.due()) is not None:
            self._running = Settle(block=block, update=update)
            self._out.append(BeginSweep(block=block, state_version=update.version))
        if self._running is not None:
            self._out.append(RunSweep(work=self._running))

    def _report_mirrored(self) -> None:
        replica = self.replica
        if not self.attempt or self._mirrored or replica.pending():
            return
        version = replica.committed + 1
        if all(replica.holds(block, version, self.attempt) for block in replica.present):
            self._mirrored = True
            self._out.append(
                SendMirrored(
                    epoch=self.epoch, attempt=self.attempt, blocks_missing=len(replica.missing)
                )
            )

    def _seed(self) -> None:
        if self._seeding is None and self.replica.missing:
            self._seeding = self.replica.missing[0]
            self._out.append(Seed(epoch=self.epoch, block=self._seeding))

    # ---- from epoch to epoch ----

    def _on_drain(self, event: DrainAsked) -> None:
        if self.phase is MirrorPhase.STOPPING or event.epoch < self.epoch:
            return
        self.epoch, self.phase = event.epoch, MirrorPhase.IDLE
        self._abandon(self._drained)

    def _drained(self) -> Effect:
        replica = self.replica
        return SendReplica(
            epoch=self.epoch,
            incarnation=replica.incarnation,
            committed=replica.committed,
            attempt=replica.attempt_beyond,
            complete=replica.complete,
        )

    def _on_begin(self, event: FollowAsked) -> None:
        if self._too_old(event.epoch):
            return
        if event.is_strange:  # as where an old machine is back in the place of a spare one
            self._out.append(UnlinkReplica())
            self._leave_at_once(BEGINS_ANEW)
            return
        self._enter(event, MirrorPhase.LIVE)
        self._bereft = event.bereft
        self._out.append(SendReady(epoch=event.epoch))

    def _on_present(self, event: PresentAsked) -> None:
        if self._too_old(event.epoch):
            return
        self._enter(event, MirrorPhase.PRESENTING)
        if self.replica.missing:
            raise ContradictionError(
                f"a node is to be filled at version {event.record.version}, but blocks"
                f" {list(self.replica.missing)} are not here"
            )

    def _too_old(self, epoch: int) -> bool:
        return self.phase is not MirrorPhase.IDLE or epoch < self.epoch

    def _enter(self, event: FollowAsked | PresentAsked, phase: MirrorPhase) -> None:
        if self._running is not None:
            raise ContradictionError(f"epoch {event.epoch} begins before the old one has drained")
        self.epoch, self.phase = event.epoch, phase
        before = self.replica.present
        cut_short = self.replica.follow(event.record)
        self._cut_short = self._cut_short if cut_short is None else cut_short
        lost = len(before) - len(self.replica.present)
        if lost:
            text = f"{lost} of {len(self.replica.blocks)} blocks do not fit the journal: read again"
            self._out.append(LogLine(text=text, warning=True))

    def _abandon(self, farewell: Callable[[], Effect]) -> None:
        """Discards all work except the running sweep; ``farewell`` is sent after the sweep."""
        self.attempt, self._mirrored, self._seeding = 0, False, None
        self._out += [CancelPulls(), CancelSeeds()]
        self._farewell = farewell

    # ---- attempts ----

    def _is_live(self, epoch: int) -> bool:
        return self.phase is MirrorPhase.LIVE and epoch == self.epoch

    def _on_attempt(self, event: AttemptAsked) -> None:
        if not self._is_live(event.epoch):
            return
        if event.base_version != self.replica.committed or self.attempt:
            raise ContradictionError(
                f"attempt {event.attempt} is based on version {event.base_version}, but"
                f" {self.replica.committed} is committed and attempt {self.attempt} under way"
            )
        self.attempt, self._mirrored = event.attempt, False
        self._pull(self.replica.present, event.base_version + 1, event.attempt, self.epoch)

    def _pull(self, blocks: Iterable[int], version: int, attempt: int, since_epoch: int) -> None:
        """Pulls missing contributions; the last blocks first, in the order of backward passes."""
        for block in sorted(blocks, reverse=True):
            lacking = self.replica.lacking(block, version, attempt)
            self.replica.expect(block, version, lacking)
            self._out += [
                Pull(
                    epoch=self.epoch,
                    since_epoch=since_epoch,
                    attempt=attempt,
                    version=version,
                    block=block,
                    contribution=k,
                )
                for k in lacking
            ]

    def _on_pulled(self, event: Pulled) -> None:
        record = self.replica.record
        attempts = (self.attempt, 0 if record is None else record.attempt)
        if self._is_live(event.epoch) and event.attempt in attempts:
            self.replica.arrived(event.block, event.version, event.contribution, event.attempt)

    def _on_commit(self, event: CommitAsked) -> None:
        record = event.record
        if not self._is_live(event.epoch) or record.version == self.replica.committed:
            return
        expected = (self.attempt, self.replica.committed + 1)
        if (record.attempt, record.version) != expected or not self._mirrored:
            raise ContradictionError(
                f"attempt {record.attempt} is committed as version {record.version}; attempt"
                f" {self.attempt} is under way towards {self.replica.committed + 1}"
                f"{'' if self._mirrored else ', and not mirrored'}"
            )
        self.attempt, self._mirrored, self._bereft = 0, False, frozenset()
        self.replica.commit(record)

    def _on_skip(self, event: SkipAsked) -> None:
        if not self._is_live(event.epoch) or event.attempt != self.attempt:
            return
        self.attempt, self._mirrored = 0, False
        self._out.append(CancelPulls())
        self._pull_pending(self.replica.pending())  # their pulls were cancelled, too

    def _pull_pending(self, blocks: Iterable[int]) -> None:
        """Pulls the committed gradients that blocks lack; they may be of an older epoch."""
        record = self.replica.record
        if record is not None:
            self._pull(blocks, record.version, record.attempt, 0)

    def _on_sweep_done(self, event: SweepDone) -> None:
        assert self._running is not None, "a sweep ended that was never started"
        done, self._running = self._running, None
        self.replica.set_state(done.block, done.update.version)
        self._out.append(EndSweep())

    # ---- reading from the owner ----

    def _on_seeded(self, event: Seeded) -> None:
        if not self._is_live(event.epoch) or event.block != self._seeding:
            return
        self._seeding = None
        replica, block = self.replica, event.block
        behind = replica.committed - event.version
        # One step behind: its gradients stay until a commit that waits for this block, too.
        stay = not self._mirrored and block not in self._bereft
        joins = behind == 0 or (behind == 1 and stay)
        if event.incarnation != replica.incarnation or not joins:
            return  # it is read again
        replica.set_state(block, event.version)
        if behind:
            self._pull_pending((block,))
        if self.attempt:
            self._pull((block,), replica.committed + 1, self.attempt, self.epoch)
        if not replica.missing:
            self._out.append(LogLine(text=f"all {len(replica.blocks)} blocks are mirrored"))

    # ---- the end ----

    def _on_stop(self, event: StopAsked) -> None:
        self._stop(Exit(code=ExitCode.INTERRUPTED, reason="asked to stop; the replica is kept"))

    def _on_shutdown(self, event: ShutdownAsked) -> None:
        if not event.keep_memory:
            self._out.append(UnlinkReplica())
        self._stop(Exit(code=ExitCode.DONE, reason=event.reason))

    def _stop(self, end: Exit) -> None:
        self.phase = MirrorPhase.STOPPING
        self._abandon(lambda: end)

    def _on_refused(self, event: RefusedByScheduler) -> None:
        self._leave_at_once(f"the scheduler refuses this mirrord: {event.reason}")

    def _on_failed(self, event: EffectFailed) -> None:
        self._leave_at_once(event.error)

    def _leave_at_once(self, reason: str) -> None:
        """Leaves at once, while the run continues: a restarted mirrord adopts the state that fits
        the journal.
        """
        self.phase = MirrorPhase.STOPPED
        self._out.append(Exit(code=ExitCode.LOST_MEMBERS, reason=reason))

    _HANDLERS: ClassVar[Mapping[type[Any], Callable[[MirrorMachine, Any], None]]] = {
        DrainAsked: _on_drain,
        FollowAsked: _on_begin,
        PresentAsked: _on_present,
        AttemptAsked: _on_attempt,
        Pulled: _on_pulled,
        SweepDone: _on_sweep_done,
        CommitAsked: _on_commit,
        SkipAsked: _on_skip,
        Seeded: _on_seeded,
        StopAsked: _on_stop,
        ShutdownAsked: _on_shutdown,
        RefusedByScheduler: _on_refused,
        EffectFailed: _on_failed,
    }
