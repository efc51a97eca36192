"""optimizerd's copy of the control words it writes, and the orders that change them.

From ``Begin`` on no other process writes these words, so the copy is exact. Every change is
recorded as an effect, in the order in which it must reach shared memory.

Order of the words around a sweep, and what a SIGKILL at each point leaves (recovery is in
:mod:`penstock.daemons.optimizer.machine.recovery`)::

    Advance of block b: state c-1 -> c, weights t = c+1 into slot t % 2

    SetSlot(b, t % 2, INVALID)    killed before: nothing has happened
    BeginSweep(b, c)               killed before: the slot is invalid, nothing else has happened
      undo area armed             killed before: intent, undo idle, its completed tag another:
                                  the state was not touched, the intent is dropped
      vectors written             killed here: undo armed: repaired, then settled to the end
      undo area idle, completed   killed before: like the line above
    SetState(b, c)                killed before: undo idle, completed tag is this sweep: the state
                                  is complete, only this word is missing
    EndSweep                       killed before: the same, the word is merely written again
    SetSlot(b, t % 2, t)          killed before: the weights stay invalid and are made again
    BlockStatus is sent           so no decision can rest on a sweep with missing words

The undo area is armed only between BeginSweep and EndSweep, so an armed area always comes with an
intent that names the same sweep. A preview writes nothing but its slot, which is invalid meanwhile.
A hold writes state c and its weights, and their slot is invalid meanwhile. The invalid slot
distinguishes a hold cut short from other sweeps; another hold finishes it. After a kill before the
slot's word, the weights are cast from the master.

A split master keeps the upper halves of state version s in slot s % 2 (:mod:`penstock.shm.layout`),
as the bytes of the weights of s. They are in place when the state reaches s, and stay until it
leaves s. The slot's word does not matter; s is c or c - 1::

    s reached by settle, advance   slot c % 2 holds c: else the commit has queued a hold, and no
                                   settle gets in before it
    s reached by hold, restore     it wrote them; only the word may be missing, and a cast is then
                                   nothing but that word
    s = c                          previews, amended ones too, write slot (c+1) % 2, another one
    s = c - 1                      slot (c+1) % 2 = s % 2 is the state's. Only an advance writes
                                   it, and reads each vector before it overwrites it: plain
                                   previews are chosen at s = c only. An advance cut short has the
                                   old halves of the vectors that it had not settled; those in
                                   flight are in the undo area, and the rest needs none
    forget, vacate, invalidate     change words, not bytes

Blocks that step in place (:mod:`penstock.daemons.optimizer.machine.arithmetic`) advance ahead of
the commit: by a hold to state c + 1 when their gradients have arrived, and by an inverse back to c
if the step does not count. They step with the record of c + 1, which is written while no block is
ahead, so a block with state version c + 1 contains exactly that step::

    WriteRecord(c + 1)            killed before or amid: no block is ahead
    Hold of block b               state c -> c + 1, drawn above; between the two an intent of c + 1
                                  at state c is a hold cut short
    Invert of block b             state c + 1 -> c, the same way, its slot invalidated before: an
                                  intent of c at state c + 1 is an inverse cut short
    WriteRecord, FlipCommitted    the commit: the same step, so nothing is left to do. A commit cut
                                  short leaves blocks ahead without a record of c + 1: they contain
                                  the scheduler's commit

A block that a worker's UPDATE previews is settled by a sweep of its own, and its slot is vacated
when the attempt begins; the worker waits for both words. The worker writes no word: a kill of
either process finds the slot invalid until the worker has reported that its last byte is written::

    SetSlot(b, t % 2, INVALID)    at the attempt's start
    Settle of b, if one is due    as above
      the worker writes weights   killed here, either of both: the slot is invalid
    SetSlot(b, t % 2, t)          when its message comes; BlockStatus follows

A block that the worker also flushes has two copies of its state (:mod:`penstock.shm.layout`).
Version v is in copy v % 2, so the state version identifies the valid copy; the other is spare::

      the worker writes copy t % 2, and the weights
                                  killed here: the state version is c, copy c % 2 is whole
    SetSlot(b, t % 2, t)          as above
    WriteRecord, FlipCommitted    killed before: without a commit in the journal it never counts;
                                  with one the block lags, as any block that is not settled: its
                                  gradients are there, and the CPU settles it
    SetState(b, t)                of blocks that were flushed with the very step of the record;
                                  killed before: like the line above. The next attempt's flush
                                  writes copy c % 2, and waits for this word

A save pins version p of a block's state until memoryd has read it. p is the committed version when
the pin is set, and no attempt is running then; so only the sweep that leads to p may still come. A
sweep that leads elsewhere waits, and all later work on its block waits with it. Of a block with two
copies, p + 1 goes to the other copy, and the worker of p + 2 writes p's: its slot is vacated late.

If the CPU advances such a block's state (holds, amends, remains of a kill), the sweep works in the
spare copy. The state is copied there first, after BeginSweep: a kill before the undo area is armed
changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.daemons.optimizer.machine.events import (
    BeginSweep,
    Effect,
    EndSweep,
    FlipCommitted,
    MemoryFacts,
    SetSlot,
    SetState,
    WriteRecord,
)
from penstock.daemons.optimizer.machine.sweeps import (
    Advance,
    CastWeights,
    FinishHold,
    FinishInvert,
    FinishSettle,
    Hold,
    Invert,
    Preview,
    Settle,
    Sweep,
)
from penstock.protocol.plan.step import OptimizerStep
from penstock.shm.control import INVALID_VERSION, CommitRecord


@dataclass(slots=True)
class _Words:
    state_version: int
    slots: list[int]


class WordsMirror:
    """Holds the words as they will be once :attr:`effects` have been carried out."""

    def __init__(self, facts: MemoryFacts, effects: list[Effect]) -> None:
        self.effects = effects
        self.changed: set[int] = set()  # blocks with words that were set since the last check
        self.committed = facts.committed
        self.record = facts.record
        self.next_record = facts.next_record
        self.pins = dict(facts.pins)
        """Memoryd's words: set while no attempt is under way, and taken away at any time."""
        self._blocks = {
            block: _Words(words.state_version, list(words.slots))
            for block, words in facts.blocks.items()
        }

    def state_version(self, block: int) -> int:
        """Returns how many steps the block's state contains: all commits, one less or more."""
        return self._blocks[block].state_version

    def pending(self, block: int) -> OptimizerStep | None:
        """Returns the committed step that the block's state still lacks, or None."""
        if self.state_version(block) >= self.committed:
            return None
        assert self.record is not None, "a pending step without a record passed the checks"
        return OptimizerStep.of(self.record)

    def ahead(self, block: int) -> OptimizerStep | None:
        """Returns the step that the block's state contains and that is not committed, or None."""
        if self.state_version(block) <= self.committed:
            return None
        return self.announced

    @property
    def announced(self) -> OptimizerStep:
        """The step that blocks take in place, ahead of the commit."""
        assert self.next_record is not None, "blocks step ahead only after an announcement"
        return OptimizerStep.of(self.next_record)

    def announce(self, record: CommitRecord) -> None:
        """Keeps the record of the step that blocks are about to take ahead, while no block is
        ahead.
        """
        if record != self.next_record:
            self.effects.append(WriteRecord(record=record))
            self.next_record = record

    def holds(self, block: int, version: int) -> bool:
        """Returns whether the slot of ``version`` says that it holds this version."""
        return self._blocks[block].slots[version % 2] == version

    def newest_slot(self, block: int) -> int:
        """Returns the highest version in the block's slots, 0 if both are invalid."""
        return max((v for v in self._blocks[block].slots if v != INVALID_VERSION), default=0)

    def commit(self, record: CommitRecord) -> None:
        """Keeps the record, then flips: a settle after the flip never needs the scheduler."""
        if record != self.record:
            self.effects.append(WriteRecord(record=record))
            self.record = record
        if record.version != self.committed:
            self.effects.append(FlipCommitted(version=record.version))
            self.committed = record.version
            self.next_record = None

    def set_state(self, block: int, version: int) -> None:
        """Sets a block's state version."""
        if self.state_version(block) != version:
            self._blocks[block].state_version = version
            self.changed.add(block)
            self.effects.append(SetState(block=block, version=version))

    def set_slot(self, block: int, version: int) -> None:
        """Marks the slot of ``version`` as valid: its last byte is written."""
        if not self.holds(block, version):
            self._write_slot(block, version % 2, version)

    def forget(self, block: int, version: int) -> None:
        """Invalidates the slot of ``version`` if it holds that version; its bytes stay."""
        if self.holds(block, version):
            self._write_slot(block, version % 2, INVALID_VERSION)

    def vacate(self, block: int, version: int) -> None:
        """Invalidates the slot of ``version`` with any content, before it is written."""
        if self._blocks[block].slots[version % 2] != INVALID_VERSION:
            self._write_slot(block, version % 2, INVALID_VERSION)

    def follow_commit(self, blocks: Iterable[int]) -> None:
        """Advances blocks without trainable elements, which are always complete."""
        for block in blocks:
            self.set_state(block, self.committed)
            self.set_slot(block, self.committed)

    def is_pinned(self, work: Sweep) -> bool:
        """Returns whether a sweep would lead a block's state away from a version that is read, or
        is going to be.
        """
        pin, settled = self.pins.get(work.block), _settled_version(work)
        return pin is not None and settled is not None and settled != pin

    def open_sweep(self, work: Sweep) -> None:
        """Writes the words that must stand before a sweep starts."""
        written = _weights_version(work)
        if written is not None:
            self._write_slot(work.block, written % 2, INVALID_VERSION)
        if isinstance(work, Invert):
            self.forget(work.block, work.update.version)
        # What finishes a sweep works under its intent.
        if isinstance(work, Settle | Advance | Hold | Invert):
            settled = _settled_version(work)
            assert settled is not None
            self.effects.append(BeginSweep(block=work.block, state_version=settled))

    def close_sweep(self, work: Sweep, *, keep_weights: bool) -> None:
        """Writes the words that declare a sweep complete; its weights only if they are wanted."""
        settled, written = _settled_version(work), _weights_version(work)
        if settled is not None:
            self.set_state(work.block, settled)
            self.effects.append(EndSweep())
        if written is not None and keep_weights:
            self.set_slot(work.block, written)

    def validate_slots(self, block: int) -> None:
        """Checks that each slot holds a version of its parity, at most one step ahead.

        Raises:
            ValueError: naming the block and its versions.
        """
        for slot, version in enumerate(self._blocks[block].slots):
            if version == INVALID_VERSION:
                continue
            if version % 2 != slot or version > self.committed + 1:
                raise ValueError(
                    f"block {block}: slot {slot} holds {version}, committed {self.committed}"
                )

    def _write_slot(self, block: int, slot: int, version: int) -> None:
        self._blocks[block].slots[slot] = version
        self.changed.add(block)
        self.effects.append(SetSlot(block=block, slot=slot, version=version))


def _settled_version(work: Sweep) -> int | None:
    """Returns the version of the state that a sweep leads to; None if it writes no state."""
    if isinstance(work, Advance):
        return work.pending.version
    if isinstance(work, Invert | FinishInvert):
        return work.update.version - 1
    if isinstance(work, Settle | FinishSettle | Hold | FinishHold):
        return work.update.version
    return None


def _weights_version(work: Sweep) -> int | None:
    if isinstance(work, Preview | Advance | Hold | FinishHold):
        return work.update.version
    return work.version if isinstance(work, CastWeights) else None
