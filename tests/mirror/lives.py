"""A mirrord's machine among a scheduler, owners and a network that a test moves step by step.

State and gradients are names: a block's state is the tuple of attempts that it contains, so whoever
applies one twice, late, or from a copy that was overwritten ends with another tuple. All messages
to the mirrord wait in a queue of their own; pulls, seeds and sweeps advance when the test says so,
and a kill leaves what the effects had written by then.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from penstock.daemons.kit.events import DrainAsked, Exit, SendReady
from penstock.daemons.mirror.machine.events import (
    CancelSeeds,
    Effect,
    FollowAsked,
    MirroredBlock,
    PresentAsked,
    ReplicaFacts,
    Seed,
    Seeded,
    SendMirrored,
    SendReplica,
    SetHeld,
    SetIncarnation,
    VoidBlock,
    VoidReplica,
)
from penstock.daemons.mirror.machine.machine import MirrorMachine
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
from penstock.daemons.optimizer.machine.sweeps import FinishSettle, Settle, sweep_tag
from penstock.daemons.scheduler.machine.node_loss import Holdings
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.shm.control import CommitRecord, Decision, SweepIntent
from tests.scheduler.test_partner import partner_rules

RULES = partner_rules()
State = tuple[int, ...]
TORN: State = (-1,)
NO_UNDO = UndoWords(armed=False, tag=0, completed=0)
INCARNATION = 7


def record_of(version: int, attempt: int, incarnation: int = INCARNATION) -> CommitRecord:
    if not attempt:
        return CommitRecord.of_restore(version, incarnation)
    return CommitRecord(
        version=version,
        attempt=attempt,
        decision=Decision.COMMIT,
        coefficient=1.0,
        inverse_loss_scale=1.0,
        learning_rate=0.1,
        bias_step=version,
        incarnation=incarnation,
    )


@dataclass
class Segments:
    """The replica in shared memory: it outlives the process."""

    incarnation: int = 0
    committed: int = 0
    records: dict[int, CommitRecord] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=dict)
    content: dict[int, State] = field(default_factory=dict)
    held: dict[tuple[int, int, int], int] = field(default_factory=dict)
    gradients: dict[tuple[int, int, int], int] = field(default_factory=dict)
    intent: SweepIntent | None = None
    undo: UndoWords = NO_UNDO
    before: State = ()

    def facts(self) -> ReplicaFacts:
        known = bool(self.incarnation)
        return ReplicaFacts(
            incarnation=self.incarnation,
            committed=self.committed,
            record=self.records.get(self.committed),
            interrupted=self.intent,
            undo=self.undo,
            states=dict(self.states) if known else {},
            held={key: a for key, a in self.held.items() if a} if known else {},
        )


class Life:
    """One replica of ``blocks`` of another node, and everything around it."""

    def __init__(self, seed: int, blocks: int = 3) -> None:
        self.random = random.Random(seed)
        self.blocks = [MirroredBlock(index=b, contributions=1 + b % 2) for b in range(blocks)]
        self.pairs = [(b.index, k) for b in self.blocks for k in range(b.contributions)]
        self.segments = Segments()
        # what the scheduler and the owners know
        self.history: list[int] = []  # attempt of each version from 1 on
        self.epoch = 0
        self.attempt = 0
        self.numbered = 0
        self.published: set[tuple[int, int]] = set()
        self.copies: dict[tuple[int, int, int], int] = {}
        self.owner = {b.index: 0 for b in self.blocks}  # version of the owner's state
        self.bereft: set[int] = set()  # blocks whose commit lost gradients with a machine
        self.mirrored = self.overflows = False
        self.live = False
        self.told: deque[Any] = deque()
        self.counts = dict.fromkeys(
            ("commits", "skips", "kills", "losses", "kept", "fallbacks", "wiped", "bereft"), 0
        )
        self.start()

    # ---- the process ----

    def start(self) -> None:
        self.machine = MirrorMachine(self.blocks, self.segments.facts())
        self.told.clear()
        self.pulls: deque[Pull] = deque()
        self.seed: Seed | None = None
        self.read: tuple[int, State] | None = None
        self.sweep: tuple[Settle | FinishSettle, int] | None = None
        self.answers: list[Effect] = []

    def feed(self, event: Any, keep: int | None = None) -> None:
        """Hand an event over; ``keep``: it is killed behind so many of the effects."""
        effects = self.machine.handle(event)
        if effects:
            self.machine.validate()
        for effect in effects[:keep]:
            self._carry_out(effect)

    def _carry_out(self, effect: Any) -> None:
        s = self.segments
        match effect:
            case VoidReplica():
                s.incarnation, s.intent = 0, None
                s.undo = NO_UNDO
                s.records.clear()
                s.states.clear()
                s.held.clear()
            case VoidBlock(block=block):
                s.states.pop(block, None)
                s.held = {key: a for key, a in s.held.items() if key[0] != block}
            case SetIncarnation(incarnation=incarnation):
                s.incarnation = incarnation
            case SetHeld():
                s.held[effect.block, effect.copy, effect.contribution] = effect.attempt
            case SetState(block=block, version=version):
                s.states[block] = version
            case WriteRecord(record=record):
                s.records[record.version] = record
            case FlipCommitted(version=version):
                s.committed = version
            case BeginSweep(block=block, state_version=version):
                s.intent = SweepIntent(block=block, state_version=version)
            case EndSweep():
                s.intent = None
            case RunSweep(work=work):
                assert self.sweep is None
                self.sweep = (work, 0)
            case Pull():
                self.pulls.append(effect)
            case CancelPulls():
                self.pulls.clear()
            case Seed():
                self.seed, self.read = effect, None
            case CancelSeeds():
                self.seed = self.read = None
            case SendMirrored():
                if self.live and effect.attempt == self.attempt:
                    self.mirrored = True
            case SendReplica() | SendReady() | SendSettled() | Exit():
                self.answers.append(effect)

    def kill(self) -> None:
        """SIGKILL; the epoch breaks, a new process is drained and begins."""
        self.counts["kills"] += 1
        self.start()
        self.begin_anew()

    def lose_replica(self) -> None:
        """The mirrord's own node is lost: what it kept is read again."""
        self.counts["wiped"] += 1
        self.segments = Segments()
        self.start()
        self.begin_anew()

    # ---- what the mirrord's threads do ----

    def advance_pull(self, *, killed: bool = False) -> None:
        if not self.pulls:
            return
        pull = self.pulls[0]
        found = self.copies.get((pull.block, pull.contribution, pull.version % 2), 0)
        word = max(
            (
                a
                for (b, k, _), a in self.copies.items()
                if (b, k) == (pull.block, pull.contribution)
            ),
            default=0,
        )
        if word < pull.attempt:
            return  # memoryd answers "wait"
        self.segments.gradients[pull.block, pull.version % 2, pull.contribution] = found
        if killed:
            return
        self.pulls.popleft()
        self.feed(
            Pulled(
                epoch=pull.epoch,
                attempt=pull.attempt,
                version=pull.version,
                block=pull.block,
                contribution=pull.contribution,
            )
        )

    def advance_seed(self) -> None:
        """Words and bytes, then the words again: in between the owner may sweep."""
        if self.seed is None:
            return
        block, version = self.seed.block, self.owner[self.seed.block]
        if self.read is None:
            self.read = version, tuple(self.history[:version])
            self.segments.content[block] = TORN
            return
        (before, state), self.read = self.read, None
        if before == version:
            seed, self.seed = self.seed, None
            self.segments.content[block] = state
            self.feed(
                Seeded(epoch=seed.epoch, block=block, version=version, incarnation=INCARNATION)
            )

    def advance_sweep(self) -> None:
        """Armed, then complete, then told."""
        if self.sweep is None:
            return
        (work, at), s = self.sweep, self.segments
        block, version = work.block, work.update.version
        tag = sweep_tag(block, version)
        if at == 0:
            if isinstance(work, FinishSettle):
                assert s.undo.armed and s.undo.tag == tag
            else:
                assert not s.undo.armed
                s.before = s.content[block]
            s.undo = UndoWords(armed=True, tag=tag, completed=s.undo.completed)
            s.content[block] = TORN
        elif at == 1:
            grads = {
                s.gradients.get((block, version % 2, k), 0)
                for k in range(self.blocks[block].contributions)
            }
            s.content[block] = (*s.before, *sorted(grads))
            s.undo = UndoWords(armed=False, tag=tag, completed=tag)
        else:
            self.sweep = None
            self.feed(SweepDone(status=None, seconds=0.0))
            return
        self.sweep = (work, at + 1)

    # ---- what the others do ----

    @property
    def committed(self) -> int:
        return len(self.history)

    @property
    def record(self) -> CommitRecord:
        return record_of(self.committed, self.history[-1] if self.history else 0)

    def begin_attempt(self) -> None:
        if not self.live or self.attempt:
            return
        self.numbered += 1
        self.attempt, self.mirrored = self.numbered, False
        self.overflows = self.random.random() < 0.2
        self.published.clear()
        self.told.append(
            AttemptAsked(
                epoch=self.epoch,
                attempt=self.attempt,
                base_version=self.committed,
                loss_scale=1.0,
                learning_rate=0.1,
                hold=False,
            )
        )

    def publish(self) -> None:
        left = [pair for pair in self.pairs if pair not in self.published]
        if not self.attempt or not left:
            return
        block, k = self.random.choice(left)
        self.published.add((block, k))
        self.copies[block, k, (self.committed + 1) % 2] = self.attempt

    def settle_owner(self) -> None:
        lagging = [b for b, version in self.owner.items() if version < self.committed]
        if lagging:
            block = self.random.choice(lagging)
            self.owner[block] += 1

    def decide(self) -> None:
        """COMMIT waits for the mirror and for the owners' sweeps; SKIP for gradients only."""
        if not self.attempt or len(self.published) < len(self.pairs):
            return
        if self.overflows:
            self.counts["skips"] += 1
            self.told.append(SkipAsked(epoch=self.epoch, attempt=self.attempt))
            self.attempt = 0
            return
        if not self.mirrored or any(v < self.committed for v in self.owner.values()):
            return
        self.counts["commits"] += 1
        self.bereft.clear()
        self.history.append(self.attempt)
        self.attempt = 0
        self.told.append(CommitAsked(epoch=self.epoch, record=self.record))

    def deliver(self) -> None:
        if self.told:
            self.feed(self.told.popleft())

    def drain(self) -> SendReplica:
        """A new epoch: what was under way is dropped. Returns what the mirrord says it has."""
        self.live, self.attempt, self.mirrored = False, 0, False
        self.epoch += 1
        self.told.append(DrainAsked(epoch=self.epoch))
        while not any(isinstance(a, SendReplica) and a.epoch == self.epoch for a in self.answers):
            assert self.told or self.sweep, "the mirrord does not drain"
            self.deliver()
            self.advance_sweep()
        found = self.answers[-1]
        assert isinstance(found, SendReplica)
        return found

    def begin_anew(self) -> None:
        self.drain()
        self.begin()

    def begin(self) -> None:
        self.live = True
        bereft = frozenset(self.bereft)
        self.told.append(FollowAsked(epoch=self.epoch, record=self.record, bereft=bereft))

    def usable(self, replica: SendReplica) -> bool:
        """Asks the scheduler's own rule."""
        said = pb.ReplicaState(
            incarnation=replica.incarnation,
            committed=replica.committed,
            attempt=replica.attempt,
            complete=replica.complete,
        )
        holdings = Holdings(memory={"memoryd.a": pb.MemoryState()}, replicas={"mirrord.b": said})
        unfit = holdings.unfit(RULES, self.record, {})
        return bool(holdings.refills(RULES, self.record, unfit))

    def lose_owner(self) -> None:
        """The owner's memory is gone, with the gradients that its workers computed."""
        self.counts["losses"] += 1
        replica = self.drain()
        for key in [key for key in self.copies if self.random.random() < 0.5]:
            del self.copies[key]
        if not self.usable(replica):
            self.counts["fallbacks"] += 1  # the test goes on as if it had not happened
            self.owner = dict.fromkeys(self.owner, self.committed)
            self.begin()
            return
        self.counts["kept"] += 1
        self.told.append(PresentAsked(epoch=self.epoch, record=self.record))
        while not isinstance(self.answers[-1], SendSettled):
            assert self.told or self.sweep, "the mirrord does not present"
            assert not isinstance(self.answers[-1], Exit), self.answers
            self.deliver()
            self.advance_sweep()
        for block in self.owner:
            assert self.segments.content[block] == tuple(self.history), block
            self.owner[block] = self.committed
        self.begin()

    def lose_contributor(self) -> None:
        """A machine that computes for the owner is lost, and filled again; the owner pulled what
        its commit needs before.
        """
        self.counts["bereft"] += 1
        self.drain()
        lost = {pair for pair in self.pairs if self.random.random() < 0.5}
        self.copies = {key: a for key, a in self.copies.items() if key[:2] not in lost}
        self.bereft |= {block for block, _ in lost}
        self.begin()

    def calm_down(self) -> None:
        """When nothing is killed any more the run goes on, and everything is mirrored again."""
        commits, everything = (
            self.committed,
            (
                *(self.begin_attempt, self.publish, self.settle_owner, self.decide, self.deliver),
                *(self.advance_pull, self.advance_seed, self.advance_sweep),
            ),
        )
        for _ in range(150):
            for act in everything:
                act()
            self.check()
        assert self.committed > commits + 3, "the run stands still"
        assert not self.machine.replica.missing, "blocks are not read again"

    def check(self) -> None:
        """What is settled is what was committed."""
        moving = self.sweep[0].block if self.sweep else None
        if self.segments.intent is not None:
            moving = self.segments.intent.block
        for block, version in self.segments.states.items():
            if block != moving and self.segments.incarnation:
                assert self.segments.content[block] == tuple(self.history[:version]), block
        assert not any(isinstance(a, Exit) for a in self.answers), self.answers
