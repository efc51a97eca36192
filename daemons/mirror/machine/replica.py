"""The replica's words as they will be after the effects, and the decisions that follow from them.

The replica has no state of a block, or state of the committed version ``c``, or state of ``c - 1``.
State of ``c - 1`` comes with the gradients of commit ``c``, or with running pulls of them.
Gradients that lead to version ``v`` are in copy ``v % 2``. A kill leaves::

    state word c-1, intent, undo armed     the settle was cut short: it is finished
    state word c-1, intent, undo complete  the word is all that is missing
    state word c-1, intent, neither        no byte was written
    a copy's word is 0                     a pull was under way: no gradients are there

A block with missing gradients is void: its state is read from the owner again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.daemons.mirror.machine.events import (
    Effect,
    MirroredBlock,
    ReplicaFacts,
    SetHeld,
    SetIncarnation,
    VoidBlock,
    VoidReplica,
)
from penstock.daemons.optimizer.machine.events import (
    EndSweep,
    FlipCommitted,
    SetState,
    WriteRecord,
)
from penstock.daemons.optimizer.machine.sweeps import sweep_tag
from penstock.shm.control import CommitRecord, Decision

COPIES = 2


class Replica:
    """The words of one replica of ``blocks``; effects are appended to ``effects``."""

    def __init__(
        self, blocks: Sequence[MirroredBlock], facts: ReplicaFacts, effects: list[Effect]
    ) -> None:
        self.blocks = tuple(sorted(blocks, key=lambda b: b.index))
        self.incarnation = facts.incarnation
        self.committed = facts.committed
        self.record = facts.record
        self._states = dict(facts.states)
        self._held = dict(facts.held)
        self._contributions = {b.index: range(b.contributions) for b in blocks}
        self._facts: ReplicaFacts | None = facts  # until the sweep cut short is accounted for
        self._effects = effects

    # ---- queries ----

    @property
    def missing(self) -> tuple[int, ...]:
        """Blocks without state, in order."""
        return tuple(b.index for b in self.blocks if b.index not in self._states)

    @property
    def present(self) -> tuple[int, ...]:
        """Blocks with state, in order."""
        return tuple(b.index for b in self.blocks if b.index in self._states)

    def pending(self) -> tuple[int, ...]:
        """Returns the blocks that lack the committed step."""
        return tuple(b for b in self.present if self._states[b] < self.committed)

    def due(self) -> int | None:
        """Returns the first block that lacks the committed step and has all gradients of it."""
        if self.record is None:
            return None
        attempt, version = self.record.attempt, self.committed
        return next((b for b in self.pending() if self.holds(b, version, attempt)), None)

    def holds(self, block: int, version: int, attempt: int) -> bool:
        """Returns whether all gradients of an attempt, towards ``version``, are here."""
        return not self.lacking(block, version, attempt)

    def lacking(self, block: int, version: int, attempt: int) -> tuple[int, ...]:
        """Returns the contributions to an attempt, towards ``version``, that are not here."""
        held = self._held
        return tuple(
            k
            for k in self._contributions[block]
            if held.get((block, version % COPIES, k)) != attempt
        )

    @property
    def attempt_beyond(self) -> int:
        """The attempt towards the next version with complete gradients; 0: none."""
        version = self.committed + 1
        attempts = {
            self._held.get((b.index, version % COPIES, k), 0)
            for b in self.blocks
            for k in range(b.contributions)
        }
        return attempts.pop() if len(attempts) == 1 and not self.pending() else 0

    @property
    def complete(self) -> bool:
        """True if all blocks are at the committed version, or can reach it."""
        if self.missing or self.record is None or not self.incarnation:
            return False
        attempt = self.record.attempt
        return all(self.holds(block, self.committed, attempt) for block in self.pending())

    def validate(self) -> None:
        """Checks that each block is at the committed version or one step behind.

        Raises:
            ValueError: naming block and versions.
        """
        for block, version in self._states.items():
            if version not in (self.committed, self.committed - 1):
                raise ValueError(f"block {block}: state {version}, committed {self.committed}")

    # ---- what changes ----

    def follow(self, record: CommitRecord) -> int | None:
        """Takes over the scheduler's commit, and drops state that does not fit it. Returns the
        block with a settle to finish, if one was cut short.
        """
        step = record.version - self.committed
        fits = record.incarnation == self.incarnation and self.record is not None
        if not fits or step not in (0, 1) or (not step and record != self.record):
            self._adopt(record)
            return None
        cut_short = self._account_for_sweep(record)
        if cut_short is not None and not self.holds(cut_short, record.version, record.attempt):
            self._adopt(record)
            return None
        if step:
            for block in self.present:
                at = self._states[block] == self.committed
                if not at or not self.holds(block, record.version, record.attempt):
                    self.void(block)
            self.commit(record)
        for block in self.pending():
            whole = self.holds(block, record.version, record.attempt)
            if not whole or record.decision not in (Decision.COMMIT, Decision.AMEND):
                self.void(block)
        return cut_short

    def _account_for_sweep(self, record: CommitRecord) -> int | None:
        facts, self._facts = self._facts, None
        if facts is None or facts.interrupted is None:
            return None
        intent, undo = facts.interrupted, facts.undo
        tag = sweep_tag(intent.block, intent.state_version)
        expected = intent.state_version == self.committed and intent.block in self._states
        if not expected or (undo.armed and (undo.tag != tag or record.version != self.committed)):
            self._adopt(record)  # a sweep that could not have been: nothing here is believed
            return None
        if undo.armed:
            return intent.block
        if undo.completed == tag:
            self.set_state(intent.block, intent.state_version)
        self._effects.append(EndSweep())
        return None

    def _adopt(self, record: CommitRecord) -> None:
        """Begins without state, at the scheduler's commit."""
        self._facts = None
        self._states.clear()
        self._held.clear()
        self.record, self.committed = record, record.version
        self.incarnation = record.incarnation
        self._effects += [
            VoidReplica(),
            WriteRecord(record=record),
            FlipCommitted(version=record.version),
            SetIncarnation(incarnation=record.incarnation),
        ]

    def commit(self, record: CommitRecord) -> None:
        """Keeps the record, then flips: a later settle needs no other process."""
        self._effects += [WriteRecord(record=record), FlipCommitted(version=record.version)]
        self.record, self.committed = record, record.version

    def void(self, block: int) -> None:
        """Forgets a block."""
        self._states.pop(block, None)
        self._held = {key: attempt for key, attempt in self._held.items() if key[0] != block}
        self._effects.append(VoidBlock(block=block))

    def set_state(self, block: int, version: int) -> None:
        """Records the version of a block's state."""
        if self._states.get(block) != version:
            self._states[block] = version
            self._effects.append(SetState(block=block, version=version))

    def expect(self, block: int, version: int, contributions: Iterable[int]) -> None:
        """Clears these contributions' copies, which are empty until they are written."""
        for k in contributions:
            self._hold(block, version, k, 0)

    def arrived(self, block: int, version: int, contribution: int, attempt: int) -> None:
        """Records that a contribution has arrived."""
        self._hold(block, version, contribution, attempt)

    def _hold(self, block: int, version: int, contribution: int, attempt: int) -> None:
        key = (block, version % COPIES, contribution)
        if self._held.get(key, 0) == attempt:
            return
        self._held[key] = attempt
        self._effects.append(
            SetHeld(block=block, copy=key[1], contribution=contribution, attempt=attempt)
        )
