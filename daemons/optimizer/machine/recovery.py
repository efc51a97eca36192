"""Recovers from the memory that a ``Begin`` finds: checks it, classifies a cut sweep, lists missing
work.

The questions are pure functions over
:class:`~penstock.daemons.optimizer.machine.events.MemoryFacts`; :func:`begin_recovery` then
corrects the words. :mod:`penstock.daemons.optimizer.machine.epoch` runs the missing sweeps. A
SIGKILL may cut each step short; the next recovery finds it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from penstock.daemons.optimizer.machine.contributions import OwnedBlocks, Pulls
from penstock.daemons.optimizer.machine.events import (
    EndSweep,
    MemoryFacts,
    OwnedBlock,
    RecoveryAsked,
    UpdatePolicy,
)
from penstock.daemons.optimizer.machine.sweeps import sweep_tag
from penstock.daemons.optimizer.machine.words import WordsMirror
from penstock.daemons.optimizer.machine.work import QueuedWork, WorkKind
from penstock.protocol.plan.step import OptimizerStep
from penstock.shm.control import CommitRecord, Decision


class ImpossibleError(Exception):
    """Memory, scheduler and state machine contradict each other: going on would lose bytes."""


class SweepFate(Enum):
    """Fates of the sweep that the intent names."""

    NONE = auto()
    NOT_STARTED = auto()
    CUT_SHORT = auto()
    COMPLETE = auto()


def interrupted_sweep(facts: MemoryFacts) -> SweepFate:
    """Returns which of the cases holds that :mod:`penstock.daemons.optimizer.machine.words` draws.

    Raises:
        ImpossibleError: the undo area is armed for a sweep that was never announced.
    """
    intent, undo = facts.interrupted, facts.undo
    tag = 0 if intent is None else sweep_tag(intent.block, intent.state_version)
    if undo.armed and undo.tag != tag:
        raise ImpossibleError(
            f"the undo area is armed for sweep {undo.tag:#x}, but the sweep under way was"
            f" {tag:#x}: the control segment is damaged"
        )
    if intent is None:
        return SweepFate.NONE
    if undo.armed:
        return SweepFate.CUT_SHORT
    return SweepFate.COMPLETE if undo.completed == tag else SweepFate.NOT_STARTED


def check_begin(begin: RecoveryAsked, blocks: Iterable[OwnedBlock]) -> None:
    """Checks that the scheduler's commit and the memory belong together.

    Raises:
        ImpossibleError: naming what contradicts what.
    """
    facts, record = begin.facts, begin.record
    if record.incarnation != facts.incarnation:
        raise ImpossibleError(
            f"memory holds incarnation {facts.incarnation}, the scheduler's commit"
            f" {record.version} is of incarnation {record.incarnation}"
        )
    if record.version not in (facts.committed, facts.committed + 1):
        raise ImpossibleError(
            f"memory is at version {facts.committed}, the scheduler at {record.version}:"
            " at most one commit can be outstanding"
        )
    behind = record.version - 1
    for block in blocks:
        state = facts.blocks[block.index].state_version
        if not block.contributions or state == record.version == facts.committed:
            continue
        if block.policy is UpdatePolicy.IN_PLACE and _stepped_ahead(begin, state):
            continue
        if state != behind:
            raise ImpossibleError(
                f"block {block.index}: state version {state}, the scheduler is at {record.version}"
            )
        if record.decision not in (Decision.COMMIT, Decision.AMEND):
            raise ImpossibleError(
                f"block {block.index}: state version {state} lacks version {record.version}, which"
                f" is a {record.decision.name} and has no gradients"
            )
    _check_intent(begin)


def _stepped_ahead(begin: RecoveryAsked, state: int) -> bool:
    """Returns whether a block took a step in place, and it is known which one."""
    facts, record = begin.facts, begin.record
    if state != facts.committed + 1:
        return False
    if state > record.version:
        return facts.next_record is not None
    # Journaled meanwhile. Writing that record may have been cut short, nothing else can.
    step = OptimizerStep.of(record)
    return facts.next_record is None or OptimizerStep.of(facts.next_record) == step


def _check_intent(begin: RecoveryAsked) -> None:
    facts, intent = begin.facts, begin.facts.interrupted
    if interrupted_sweep(facts) is SweepFate.NONE or intent is None:
        return
    words = facts.blocks.get(intent.block)
    # A sweep leads to the committed version, and no later commit is possible before it has ended;
    # a step in place leads to the version after it, its inverse back.
    stepping = facts.next_record is not None and facts.committed == begin.record.version
    highest = begin.record.version + stepping
    if (
        words is None
        or not begin.record.version <= intent.state_version <= highest
        or not begin.record.version - 1 <= words.state_version <= highest
        or abs(intent.state_version - words.state_version) > 1
    ):
        version = None if words is None else words.state_version
        raise ImpossibleError(
            f"a sweep led block {intent.block} to state version {intent.state_version}, but it is"
            f" at {version} and the scheduler at {begin.record.version}"
        )


@dataclass(slots=True, kw_only=True)
class Recovery:
    """Work that is missing before Ready.

    ``awaited``: contributions (block, contribution) being pulled; no byte is written before they
    arrive. ``left``: the work after that, in order. It begins with the sweep that was cut short.
    Blocks ahead of the commit follow, then blocks without their committed weights.
    """

    awaited: set[tuple[int, int]]
    left: dict[QueuedWork, None]

    @property
    def done(self) -> bool:
        """True if nothing is missing."""
        return not self.awaited and not self.left


def begin_recovery(
    begin: RecoveryAsked, words: WordsMirror, blocks: OwnedBlocks, pulls: Pulls
) -> Recovery:
    """Applies the commit of a checked ``Begin``; returns the missing work."""
    record = begin.record
    work = _resolve_intent(begin.facts, words)
    # A sweep that was cut short leads to the committed version, so then this changes nothing
    # that finishing it needs; it only makes sure of the record.
    words.commit(record)
    for block in blocks.active:
        words.forget(block, record.version + 1)
    words.follow_commit(blocks.empty)
    # Later settles need them at hand; a new optimizerd has lost what it had pulled.
    lagging = [block for block in blocks.active if words.pending(block) is not None]
    awaited = _pull_again(begin.epoch, record, lagging, pulls)
    ahead = _ahead(begin, words, blocks.active)
    if ahead and words.next_record is not None:
        awaited += _pull_again(begin.epoch, words.next_record, ahead, pulls)
    work += [QueuedWork(kind=WorkKind.REVERT, block=block) for block in ahead]
    # To finish a hold writes weights, too: nothing is left to do for its block then.
    incomplete = [block for block in blocks.active if not words.holds(block, record.version)]
    work += [QueuedWork(kind=WorkKind.COMPLETE, block=block) for block in incomplete]
    return Recovery(awaited=set(awaited), left=dict.fromkeys(work))


def _pull_again(
    epoch: int, record: CommitRecord, blocks: Iterable[int], pulls: Pulls
) -> list[tuple[int, int]]:
    """Pulls, and returns, the contributions to a record's attempt that are not at hand."""
    version, attempt = record.version, record.attempt
    awaited = [
        pair for block in blocks for pair in pulls.missing(block, version=version, attempt=attempt)
    ]
    pulls.order(awaited, epoch=epoch, since_epoch=0, attempt=attempt, version=version)
    return awaited


def _ahead(begin: RecoveryAsked, words: WordsMirror, active: Iterable[int]) -> list[int]:
    """Returns the blocks with a step to invert, including that of a sweep cut short."""
    intent, facts = begin.facts.interrupted, begin.facts
    stepping = None
    if intent is not None and interrupted_sweep(facts) is SweepFate.CUT_SHORT:
        stepping = intent.block if intent.state_version > words.committed else None
    return [b for b in active if b == stepping or words.ahead(b) is not None]


def _resolve_intent(facts: MemoryFacts, words: WordsMirror) -> list[QueuedWork]:
    """Clears the intent of a sweep that needs no repair; else returns the work that repairs it."""
    intent, fate = facts.interrupted, interrupted_sweep(facts)
    if intent is None:
        return []
    if fate is SweepFate.CUT_SHORT:
        back = intent.state_version < words.state_version(intent.block)
        return [
            QueuedWork(kind=WorkKind.FINISH_REVERT if back else WorkKind.FINISH, block=intent.block)
        ]
    if fate is SweepFate.COMPLETE:
        words.set_state(intent.block, intent.state_version)
    words.effects.append(EndSweep())
    return []
