"""The control segment: what is committed, what lies in each weight slot, which sweep was under way.

Layout (little-endian; every word 8 bytes, 8-byte aligned)::

    offset  word(s)                writer                  readers
    ------  ---------------------  ----------------------  -------------------------------
         0  magic "PNSTOCK1"       memoryd (last, once)    all
         8  format version         memoryd                 all
        16  run id (16 ASCII)      memoryd                 all
        32  digest (32)            memoryd                 all
        64  number of blocks       memoryd                 all
        72  undo bytes             memoryd                 optimizerd
        80  incarnation            memoryd (restore)       all; 0: the segments hold no model yet
        88  owner pid              memoryd                 memoryd, doctor
        96  owner start ticks      memoryd                 memoryd, doctor
       104  owner boot id (16)     memoryd                 memoryd, doctor
       120  epoch                  optimizerd (Begin)      all
       128  committed version      optimizerd, memoryd     workers, memoryd
       136  generation             memoryd (restore)       memoryd
       144  lost attempt           memoryd (restore)       memoryd, fetchd
       152  tokens (5 of 16 bytes) memoryd (once)          all; 0: memory of an older Penstock
       256  record of even version optimizerd, memoryd     optimizerd, memoryd
       384  record of odd version  optimizerd, memoryd     optimizerd, memoryd
       512  sweep: active          optimizerd              optimizerd (recovery)
       520  sweep: block           optimizerd              optimizerd (recovery)
       528  sweep: state version it leads to, likewise
      4096  undo area of the native sweeps (see native/undo.h), page-aligned
         …  block words, 384 bytes a block:
            +0 state version       optimizerd, memoryd     optimizerd, memoryd, workers (UPDATE)
            +8 version in slot 0   optimizerd, memoryd     workers, memoryd, fetchd
           +16 version in slot 1   optimizerd, memoryd     workers, memoryd, fetchd
           +24 pinned version + 1 memoryd                 optimizerd; 0: none
           +32 ready words, one per contribution (at most 12): (epoch << 32) | attempt
                                   the worker that computes it; optimizerd, fetchd read
          +128 sequence of slot 0  as its version          fetchd
          +136 sequence of slot 1  as its version          fetchd
          +144 sequence of frozen  memoryd                 fetchd
          +152 unused
          +160 sequences of gradients, copy 0: one per contribution
          +256 sequences of gradients, copy 1: the same
                                   the worker that computes it; fetchd reads

A partner's replica (:func:`penstock.shm.layout.replica_layout`) has a control segment of the same
layout, which its mirrord alone writes and reads: INVALID state versions are those of blocks that it
has no state of, weight slots are unused, and the sequence of a contribution is the attempt whose
gradients that copy holds.

A sequence only ever grows, over skips and restores too: odd from before the first byte of an array
is written until after the last. So whoever reads it even, then the array, then the same number has
read what was there at one time (:mod:`penstock.protocol.wire.onesided`); a version or a ready word
may say the same twice about other bytes.

The tokens are random, one for each segment, in the order of :class:`SegmentKind`. Every other
segment repeats its own in the page after its arrays, and the journal has all: a segment is this
memory's if it bears the token, not because of its name (:mod:`penstock.shm.segment`).

A state version may be committed + 1 where blocks step in place; the record of that version is then
what they stepped with, not a commit (:mod:`penstock.daemons.optimizer.machine.arithmetic`). memoryd
writes versions and records only during a restore, when optimizerd is drained. A pin holds back
whatever would overwrite the state of the pinned version (:mod:`penstock.daemons.memory.pinning`).
A record is eight payload words and their CRC-32; one cut short by a kill fails its checksum and
counts as absent.

Words are stored with release and loaded with acquire order: whoever reads a version, a ready word
or the incarnation also sees the bytes that were written before it.
"""

from __future__ import annotations

import struct
import uuid
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from penstock._native import load_u64, store_u64
from penstock.host.process_identity import ProcessIdentity
from penstock.shm.layout import PAGE_BYTES, WEIGHT_SLOTS, SegmentKind
from penstock.shm.segment import (
    TOKEN_BYTES,
    BadHeaderError,
    ForeignOwnerError,
    ShortSegmentError,
    VersionMismatchError,
)
from penstock.shm.table import MAX_CONTRIBUTIONS

MAGIC = int.from_bytes(b"PNSTOCK1", "little")
FORMAT_VERSION = 3
INVALID_VERSION = 2**64 - 1

_FORMAT, _RUN_ID, _DIGEST, _NUM_BLOCKS, _UNDO_BYTES = 8, 16, 32, 64, 72
_INCARNATION, _OWNER_PID, _OWNER_START, _OWNER_BOOT = 80, 88, 96, 104
_EPOCH, _COMMITTED, _GENERATION, _LOST_ATTEMPT, _RECORDS, _SWEEP = 120, 128, 136, 144, 256, 512
_TOKENS = 152
_RECORD_BYTES, _PIN, _READY = 128, 24, 32
BLOCK_BYTES = 384
"""Of the words of one block."""
_SLOT_SEQUENCES, _FROZEN_SEQUENCE, _GRADIENT_SEQUENCES = 128, 144, 160


class Decision(IntEnum):
    """How an attempt ended. ``RESTORE`` marks the record of a loaded state."""

    COMMIT = 1
    AMEND = 2
    SKIP = 3
    RESTORE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """Everything a later settle needs to repeat the update of ``version`` bit for bit."""

    version: int
    attempt: int
    decision: Decision
    coefficient: float
    inverse_loss_scale: float
    learning_rate: float
    bias_step: int
    incarnation: int

    @classmethod
    def of(cls, values: Iterable[Any]) -> CommitRecord:
        """Returns the record with these values, in the order of :data:`RECORD_FIELDS`.

        Raises:
            ValueError: there are not as many, or one is no decision.
        """
        fields = dict(zip(RECORD_FIELDS, values, strict=True))
        return cls(**{**fields, "decision": Decision(fields["decision"])})

    @classmethod
    def of_restore(cls, version: int, incarnation: int, attempt: int = 0) -> CommitRecord:
        """Returns the record of memory that was filled with ``version``, not updated to it."""
        return cls(
            version=version,
            attempt=attempt,
            decision=Decision.RESTORE,
            coefficient=1.0,
            inverse_loss_scale=1.0,
            learning_rate=0.0,
            bias_step=version,
            incarnation=incarnation,
        )

    @property
    def values(self) -> tuple[int | float, ...]:
        """All values, in the order of :data:`RECORD_FIELDS`; a decision is its number."""
        return tuple(getattr(self, name) for name in RECORD_FIELDS)

    def pack(self) -> bytes:
        """64 payload bytes and the checksum word."""
        payload = _RECORD.pack(*self.values)
        return payload + struct.pack("<Q", zlib.crc32(payload))

    @classmethod
    def unpack(cls, data: bytes) -> CommitRecord | None:
        """Returns the record, or None when the bytes hold none (never written, or cut short)."""
        payload, (checksum,) = data[: _RECORD.size], struct.unpack_from("<Q", data, _RECORD.size)
        if checksum != zlib.crc32(payload):
            return None
        try:
            return cls.of(_RECORD.unpack(payload))
        except ValueError:  # a sound checksum over no decision
            return None


RECORD_FIELDS: Mapping[str, type[int] | type[float]] = MappingProxyType(
    {f.name: float if f.type == "float" else int for f in fields(CommitRecord)}
)
"""Names of a record's fields and how their values are stored: in this order as words of the control
segment, under these names in messages and in the journal.
"""
_RECORD = struct.Struct(
    "<" + "".join("d" if kind is float else "Q" for kind in RECORD_FIELDS.values())
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepIntent:
    """A settle or advance that was under way: of which block, and the state version it leads to."""

    block: int
    state_version: int


def block_words_offset(undo_bytes: int, block: int) -> int:
    """Returns where the words of a block begin."""
    return PAGE_BYTES + _round_up(undo_bytes) + block * BLOCK_BYTES


def control_bytes(num_blocks: int, undo_bytes: int) -> int:
    """Returns the size of the control segment."""
    return PAGE_BYTES + _round_up(undo_bytes) + _round_up(num_blocks * BLOCK_BYTES)


class ControlView:
    """Typed access to the words of a mapped control segment, named as above."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.num_blocks = load_u64(buffer, _NUM_BLOCKS)
        self.undo_bytes = load_u64(buffer, _UNDO_BYTES)

    @classmethod
    def initialize(
        cls,
        buffer: memoryview,
        *,
        run_id: str,
        digest: bytes,
        num_blocks: int,
        undo_bytes: int,
        tokens: bytes = b"",
    ) -> ControlView:
        """Write the header of a fresh, zeroed segment.

        The magic number goes last, so that a half-written header has none.
        """
        store_u64(buffer, _FORMAT, FORMAT_VERSION)
        buffer[_RUN_ID : _RUN_ID + 16] = run_id.encode().ljust(16, b"\0")
        buffer[_DIGEST : _DIGEST + 32] = digest
        store_u64(buffer, _NUM_BLOCKS, num_blocks)
        store_u64(buffer, _UNDO_BYTES, undo_bytes)
        view = cls(buffer)
        view.set_owner(ProcessIdentity.current())
        view.set_tokens(tokens)
        for block in range(num_blocks):
            view.set_slot_version(block, 0, INVALID_VERSION)
            view.set_slot_version(block, 1, INVALID_VERSION)
        store_u64(buffer, 0, MAGIC)
        return view

    @classmethod
    def open(
        cls, buffer: memoryview, *, run_id: str, digest: bytes | None, size: int | None = None
    ) -> ControlView:
        """Check the header before anything is believed; ``digest`` None: whatever it is. ``size``:
        of the segment, where ``buffer`` holds only the first page.

        Raises:
            ShortSegmentError: smaller than a header, or than what its header promises.
            BadHeaderError: no magic number: half-written, or not ours.
            VersionMismatchError: another format version.
            ForeignOwnerError: another run, or made for another model, cluster or optimizer.
        """
        if len(buffer) < PAGE_BYTES:
            raise ShortSegmentError(
                f"control segment has {len(buffer)} bytes, a header needs {PAGE_BYTES}"
            )
        if load_u64(buffer, 0) != MAGIC:
            raise BadHeaderError(
                "control segment has no Penstock header (half-written, or not ours)"
            )
        version = load_u64(buffer, _FORMAT)
        if version != FORMAT_VERSION:
            raise VersionMismatchError(
                f"control segment has format {version}, this Penstock reads {FORMAT_VERSION}: end"
                " the run with the Penstock that made it, which saves its state, or drop the memory"
                " (penstock doctor --clean --force)"
            )
        found = bytes(buffer[_RUN_ID : _RUN_ID + 16]).rstrip(b"\0").decode("ascii", "replace")
        if found != run_id:
            raise ForeignOwnerError(f"control segment belongs to run {found!r}, not {run_id!r}")
        if digest is not None and bytes(buffer[_DIGEST : _DIGEST + 32]) != digest:
            raise ForeignOwnerError(
                "segments in /dev/shm were made for another model, cluster, schedule or optimizer"
                " setting of this run: resume with the settings they were made with and save, or"
                " drop them with penstock doctor --clean"
            )
        view = cls(buffer)
        needed = control_bytes(view.num_blocks, view.undo_bytes)
        size = len(buffer) if size is None else size
        if size < needed:
            raise ShortSegmentError(f"control segment has {size} bytes, its layout needs {needed}")
        return view

    @property
    def owner(self) -> ProcessIdentity:
        """The memoryd that created or last adopted the segments."""
        return ProcessIdentity(
            pid=self._load(_OWNER_PID),
            start_ticks=self._load(_OWNER_START),
            boot=uuid.UUID(bytes=bytes(self._buffer[_OWNER_BOOT : _OWNER_BOOT + 16])),
        )

    def set_owner(self, identity: ProcessIdentity) -> None:
        """Records the memoryd that owns the segments now."""
        self._store(_OWNER_PID, identity.pid)
        self._store(_OWNER_START, identity.start_ticks)
        self._buffer[_OWNER_BOOT : _OWNER_BOOT + 16] = identity.boot.bytes

    @property
    def run_id(self) -> str:
        """The run the segments belong to."""
        return bytes(self._buffer[_RUN_ID : _RUN_ID + 16]).rstrip(b"\0").decode("ascii", "replace")

    @property
    def incarnation(self) -> int:
        """Which filling of the memory this is; 0 before the first restore."""
        return self._load(_INCARNATION)

    def set_incarnation(self, incarnation: int) -> None:
        """0 first, before anything is overwritten; the new number last."""
        self._store(_INCARNATION, incarnation)

    @property
    def generation(self) -> int:
        """How often the memory was filled from a partner in this incarnation."""
        return self._load(_GENERATION)

    def set_generation(self, generation: int) -> None:
        """Before the incarnation, which says that all is there."""
        self._store(_GENERATION, generation)

    @property
    def lost_attempt(self) -> int:
        """The memory was filled from a partner with the commit of this attempt: its gradients, and
        older ones, are not here, whatever ready words say later. 0: it was not.
        """
        return self._load(_LOST_ATTEMPT)

    def set_lost_attempt(self, attempt: int) -> None:
        """Before the incarnation, which says that all is there."""
        self._store(_LOST_ATTEMPT, attempt)

    @property
    def tokens(self) -> bytes:
        """The tokens of all segments, concatenated; zeros in memory of an older Penstock."""
        return bytes(self._buffer[_TOKENS : _TOKENS + len(SegmentKind) * TOKEN_BYTES])

    def token(self, kind: SegmentKind) -> bytes:
        """Returns the token of one segment."""
        start = tuple(SegmentKind).index(kind) * TOKEN_BYTES
        return self.tokens[start : start + TOKEN_BYTES]

    def set_tokens(self, tokens: bytes) -> None:
        """Gives the memory its tokens, once the segments themselves repeat them."""
        self._buffer[_TOKENS : _TOKENS + len(tokens)] = tokens

    @property
    def epoch(self) -> int:
        """Epoch of the last Begin."""
        return self._load(_EPOCH)

    def set_epoch(self, epoch: int) -> None:
        """Enters an epoch."""
        self._store(_EPOCH, epoch)

    @property
    def committed(self) -> int:
        """The committed version: weights are read from slot ``committed % 2``."""
        return self._load(_COMMITTED)

    def set_committed(self, version: int) -> None:
        """Flip: one word decides which slot is read. The record of ``version`` must be written
        before, so that whoever finds the version finds what it was made with.
        """
        self._store(_COMMITTED, version)

    def write_record(self, record: CommitRecord) -> None:
        """Keep the record of ``record.version``, replacing that of two versions before."""
        start = _RECORDS + (record.version % 2) * _RECORD_BYTES
        # Not one store: a kill in between leaves a wrong checksum, and the record is absent.
        data = record.pack()
        self._buffer[start : start + len(data)] = data

    def record(self, version: int) -> CommitRecord | None:
        """Returns the record of ``version`` if it is among the two kept."""
        start = _RECORDS + (version % 2) * _RECORD_BYTES
        found = CommitRecord.unpack(bytes(self._buffer[start : start + _RECORD_BYTES]))
        return found if found is not None and found.version == version else None

    def clear_history(self) -> None:
        """Forget records, ready words and the interrupted sweep, before a restore.

        The undo area's first word goes first; zero bytes mean that no sweep was under way.
        """
        store_u64(self.undo_area, 0, 0)
        self.end_sweep()
        self.undo_area[:] = bytes(self.undo_bytes)
        self._buffer[_RECORDS:_SWEEP] = bytes(_SWEEP - _RECORDS)
        for block in range(self.num_blocks):
            for contribution in range(MAX_CONTRIBUTIONS):
                self.set_ready(block, contribution, epoch=0, attempt=0)

    def begin_sweep(self, intent: SweepIntent) -> None:
        """Announce a sweep that overwrites state; the active word goes last."""
        self._store(_SWEEP + 8, intent.block)
        self._store(_SWEEP + 16, intent.state_version)
        self._store(_SWEEP, 1)

    def end_sweep(self) -> None:
        """The announced sweep is complete and its state version written."""
        self._store(_SWEEP, 0)

    @property
    def interrupted_sweep(self) -> SweepIntent | None:
        """The sweep that was under way when its optimizerd died, if any."""
        if not self._load(_SWEEP):
            return None
        return SweepIntent(block=self._load(_SWEEP + 8), state_version=self._load(_SWEEP + 16))

    @property
    def undo_area(self) -> memoryview:
        """Writable bytes for the native sweeps' undo slots."""
        return self._buffer[PAGE_BYTES : PAGE_BYTES + self.undo_bytes]

    def state_version(self, block: int) -> int:
        """Returns how many steps master and state of the block contain: commits, or one more."""
        return self._load(self._block(block))

    def set_state_version(self, block: int, version: int) -> None:
        """After a sweep wrote the last element of the block's state."""
        self._store(self._block(block), version)

    def pin(self, block: int) -> int | None:
        """Returns the version of the block's state that is not to be overwritten; None: any is."""
        word = self._load(self._block(block) + _PIN)
        return word - 1 if word else None

    def set_pin(self, block: int, version: int | None) -> None:
        """Pin the state of ``version``; None: let it go."""
        self._store(self._block(block) + _PIN, 0 if version is None else version + 1)

    def slot_version(self, block: int, slot: int) -> int:
        """Returns the version whose weights the slot holds, or :data:`INVALID_VERSION`."""
        return self._load(self._block(block) + 8 + 8 * slot)

    def set_slot_version(self, block: int, slot: int, version: int) -> None:
        """INVALID before the first write into the slot, the version after the last."""
        word, sequence = self._block(block) + 8 + 8 * slot, self._slot_sequence(block, slot)
        # The version changes while the sequence is odd: who sees one even number twice has seen
        # the version of those bytes in between.
        if version == INVALID_VERSION:
            self._begin(sequence)
            self._store(word, version)
        else:
            self._store(word, version)
            self._end(sequence)

    def slot_sequence(self, block: int, slot: int) -> int:
        """Returns the sequence of a weight slot; odd while it may be written."""
        return self._load(self._slot_sequence(block, slot))

    def mend_sequences(self, blocks: Iterable[int]) -> None:
        """Make even what a kill has left odd beside a valid version: either no byte of the slot was
        touched yet, or the last one was. Nobody may write meanwhile.
        """
        for block in blocks:
            for slot in range(WEIGHT_SLOTS):
                valid = self.slot_version(block, slot) != INVALID_VERSION
                if valid and self.slot_sequence(block, slot) % 2:
                    self._end(self._slot_sequence(block, slot))

    def frozen_sequence(self, block: int) -> int:
        """Returns the sequence of the block's frozen weights; odd while they may be written."""
        return self._load(self._block(block) + _FROZEN_SEQUENCE)

    def begin_frozen(self, block: int) -> None:
        """Before the first write into the frozen weights."""
        self._begin(self._block(block) + _FROZEN_SEQUENCE)

    def end_frozen(self, block: int) -> None:
        """After the last write into the frozen weights."""
        self._end(self._block(block) + _FROZEN_SEQUENCE)

    def readable(self, block: int, version: int) -> bool:
        """Returns whether the block's weights of ``version`` are complete and committed."""
        return self.committed >= version and self.slot_version(block, version % 2) == version

    def ready(self, block: int, contribution: int) -> tuple[int, int]:
        """(epoch, attempt) of the complete gradients in the contribution's range."""
        word = self._load(self._block(block) + _READY + 8 * contribution)
        return word >> 32, word & 0xFFFF_FFFF

    def gradient_sequence(self, block: int, copy: int, contribution: int) -> int:
        """Returns the sequence of a contribution's range; odd while it may be written."""
        return self._load(self._gradient_sequence(block, copy, contribution))

    def begin_gradients(self, block: int, copy: int, contribution: int) -> None:
        """Before the first write into a contribution's range."""
        self._begin(self._gradient_sequence(block, copy, contribution))

    def end_gradients(self, block: int, copy: int, contribution: int) -> None:
        """After the last write, before the ready word."""
        self._end(self._gradient_sequence(block, copy, contribution))

    def held(self, block: int, copy: int, contribution: int) -> int:
        """Returns, of a replica, the attempt whose gradients are whole in this copy; 0 for none."""
        return self._load(self._gradient_sequence(block, copy, contribution))

    def set_held(self, block: int, copy: int, contribution: int, attempt: int) -> None:
        """0 before the first write into the copy, the attempt after the last."""
        self._store(self._gradient_sequence(block, copy, contribution), attempt)

    def set_ready(self, block: int, contribution: int, *, epoch: int, attempt: int) -> None:
        """The writer of the contribution has written its last byte."""
        self._store(
            self._block(block) + _READY + 8 * contribution, (epoch << 32) | (attempt & 0xFFFF_FFFF)
        )

    def validate(self, blocks: Iterable[int]) -> None:
        """Check that no commit was applied twice and none lost, for the blocks a node owns. A step
        in place, ahead of the commit, has a record.

        Raises:
            ValueError: naming the block and its versions.
        """
        committed = self.committed
        possible = {committed, committed - 1}
        if self.record(committed + 1) is not None:
            possible.add(committed + 1)
        for block in blocks:
            version = self.state_version(block)
            if version not in possible:
                raise ValueError(f"block {block}: state version {version}, committed {committed}")

    def _block(self, block: int) -> int:
        return block_words_offset(self.undo_bytes, block)

    def _slot_sequence(self, block: int, slot: int) -> int:
        return self._block(block) + _SLOT_SEQUENCES + 8 * slot

    def _gradient_sequence(self, block: int, copy: int, contribution: int) -> int:
        place = copy * MAX_CONTRIBUTIONS + contribution
        return self._block(block) + _GRADIENT_SEQUENCES + 8 * place

    def _begin(self, sequence: int) -> None:
        """To the next odd number. On x86-64 other processes see stores in their order, so nobody
        sees a byte that is written from now on beside an older number.
        """
        number = self._load(sequence)
        self._store(sequence, (number + 1 + number % 2) % 2**64)

    def _end(self, sequence: int) -> None:
        """To the next even number."""
        number = self._load(sequence)
        self._store(sequence, (number + 2 - number % 2) % 2**64)

    def _load(self, offset: int) -> int:
        return load_u64(self._buffer, offset)

    def _store(self, offset: int, value: int) -> None:
        store_u64(self._buffer, offset, value)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
