"""The control segment: committed version, versions in the weight slots, and the sweep in progress.

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
          +352 digest of the base (32) memoryd             all; 0: no base (format 4)

A partner's replica (:func:`penstock.shm.layout.replica_layout`) has a control segment of the same
layout, which only its mirrord writes and reads. INVALID state versions mark blocks without state in
the replica. Weight slots are unused. The sequence of a contribution is the attempt of the gradients
in that copy.

A sequence only grows, over skips and restores too. It is odd from before the first byte of an array
is written until after the last. A reader that sees an even number, then reads the array, then sees
the same number has read the array of one moment (:mod:`penstock.protocol.wire.onesided`). A version
or a ready word may have the same value twice, for other bytes.

The tokens are random, one for each segment, in the order of :class:`SegmentKind`. Every other
segment repeats its own token in the page after its arrays. The journal has all tokens. A token, not
a name, shows that a segment is of this memory (:mod:`penstock.shm.segment`).

A state version may be committed + 1 where blocks step in place. The record of that version then
holds the terms of the step. It is no commit
(:mod:`penstock.daemons.optimizer.machine.arithmetic`). memoryd writes versions and records only
during a restore, when optimizerd is drained. A pin delays stores that would overwrite the state of
the pinned version (:mod:`penstock.daemons.memory.pinning`). A record is eight payload words and
their CRC-32. A record that a kill has cut short fails its checksum and counts as absent.

Words are stored with release and loaded with acquire order. A reader of a version, a ready word or
the incarnation also sees the bytes that were written before it.
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
FORMAT_VERSION = 4
READABLE_FORMATS = (3, 4)
"""Memory of format 3 has frozen weights in a segment of its own."""
INVALID_VERSION = 2**64 - 1

_FORMAT, _RUN_ID, _DIGEST, _NUM_BLOCKS, _UNDO_BYTES = 8, 16, 32, 64, 72
_INCARNATION, _OWNER_PID, _OWNER_START, _OWNER_BOOT = 80, 88, 96, 104
_EPOCH, _COMMITTED, _GENERATION, _LOST_ATTEMPT, _RECORDS, _SWEEP = 120, 128, 136, 144, 256, 512
_TOKENS = 152
_RECORD_BYTES, _PIN, _READY = 128, 24, 32
BLOCK_BYTES = 384
"""Bytes of the words of one block."""
_FORMAT_WITH_BASES = 4
_BASE, _BASE_BYTES = 352, 32
_SLOT_SEQUENCES, _FROZEN_SEQUENCE, _GRADIENT_SEQUENCES = 128, 144, 160


class Decision(IntEnum):
    """Result of an attempt. ``RESTORE`` marks the record of a loaded state."""

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
        """Returns 64 payload bytes and the checksum word."""
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
"""Names of a record's fields, and the types of their values. Their order is the order of the words
in the control segment; messages and the journal use the names.
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
    """Returns the offset of the words of a block."""
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
        bases: Iterable[tuple[int, bytes]] = (),
    ) -> ControlView:
        """Writes the header of a fresh, zeroed segment. ``bases``: block and digest of each base.

        The magic number is stored last, so that a half-written header has none.
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
        view.set_bases(bases)
        store_u64(buffer, 0, MAGIC)
        return view

    @classmethod
    def open(
        cls, buffer: memoryview, *, run_id: str, digest: bytes | None, size: int | None = None
    ) -> ControlView:
        """Checks the header before any other word is trusted. ``digest`` None: any digest is
        accepted. ``size``: size of the segment, if ``buffer`` holds only the first page.

        Raises:
            ShortSegmentError: the segment is smaller than a header, or than its header promises.
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
        if version not in READABLE_FORMATS:
            readable = " and ".join(map(str, READABLE_FORMATS))
            raise VersionMismatchError(
                f"control segment has format {version}, this Penstock reads {readable}: end the run"
                " with the Penstock that made it, which saves its state, or drop the memory"
                " (penstock doctor --clean --force)"
            )
        stored_id = bytes(buffer[_RUN_ID : _RUN_ID + 16]).rstrip(b"\0").decode("ascii", "replace")
        if stored_id != run_id:
            raise ForeignOwnerError(f"control segment belongs to run {stored_id!r}, not {run_id!r}")
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
        """Number of times that the memory was filled; 0 before the first restore."""
        return self._load(_INCARNATION)

    def set_incarnation(self, incarnation: int) -> None:
        """Stores the number. A restore stores 0 before it overwrites anything, and the new number
        last.
        """
        self._store(_INCARNATION, incarnation)

    @property
    def generation(self) -> int:
        """Number of times that the memory was filled from a partner in this incarnation."""
        return self._load(_GENERATION)

    def set_generation(self, generation: int) -> None:
        """Stores the number. The incarnation, stored later, marks the memory as complete."""
        self._store(_GENERATION, generation)

    @property
    def lost_attempt(self) -> int:
        """Attempt of the commit with which a partner filled the memory; 0: no partner did.
        Gradients of this attempt and of older attempts are missing here, even if their ready words
        name them.
        """
        return self._load(_LOST_ATTEMPT)

    def set_lost_attempt(self, attempt: int) -> None:
        """Stores the attempt. The incarnation, stored later, marks the memory as complete."""
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
    def bases(self) -> tuple[tuple[int, bytes], ...]:
        """Blocks with frozen weights in a base, with the digest of the base."""
        if self._load(_FORMAT) < _FORMAT_WITH_BASES:
            return ()
        places = ((block, self._block(block) + _BASE) for block in range(self.num_blocks))
        named = ((b, bytes(self._buffer[at : at + _BASE_BYTES])) for b, at in places)
        return tuple((block, digest) for block, digest in named if any(digest))

    def set_bases(self, bases: Iterable[tuple[int, bytes]]) -> None:
        """Names bases, before a process opens them. The memory holds no model."""
        for block, digest in bases:
            start = self._block(block) + _BASE
            self._buffer[start : start + _BASE_BYTES] = digest

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
        """Commits a version: this one word selects the slot that readers use. The record of
        ``version`` must be written before, so that a reader of the version also finds its record.
        """
        self._store(_COMMITTED, version)

    def write_record(self, record: CommitRecord) -> None:
        """Stores the record of ``record.version`` over the record of two versions before."""
        start = _RECORDS + (record.version % 2) * _RECORD_BYTES
        # Not one store: a kill in between leaves a wrong checksum, and the record is absent.
        data = record.pack()
        self._buffer[start : start + len(data)] = data

    def record(self, version: int) -> CommitRecord | None:
        """Returns the record of ``version`` if it is among the two kept."""
        start = _RECORDS + (version % 2) * _RECORD_BYTES
        record = CommitRecord.unpack(bytes(self._buffer[start : start + _RECORD_BYTES]))
        return record if record is not None and record.version == version else None

    def clear_history(self) -> None:
        """Clears records, ready words and the interrupted sweep, before a restore.

        The undo area's first word is cleared first; zero bytes mean that no sweep was in progress.
        """
        store_u64(self.undo_area, 0, 0)
        self.end_sweep()
        self.undo_area[:] = bytes(self.undo_bytes)
        self._buffer[_RECORDS:_SWEEP] = bytes(_SWEEP - _RECORDS)
        for block in range(self.num_blocks):
            for contribution in range(MAX_CONTRIBUTIONS):
                self.set_ready(block, contribution, epoch=0, attempt=0)

    def begin_sweep(self, intent: SweepIntent) -> None:
        """Announces a sweep that overwrites state; the active word is stored last."""
        self._store(_SWEEP + 8, intent.block)
        self._store(_SWEEP + 16, intent.state_version)
        self._store(_SWEEP, 1)

    def end_sweep(self) -> None:
        """Ends the announced sweep, after its state version was written."""
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
        """Returns the number of steps in master and state of the block: commits, or one more."""
        return self._load(self._block(block))

    def set_state_version(self, block: int, version: int) -> None:
        """Stores the version, after a sweep wrote the last element of the block's state."""
        self._store(self._block(block), version)

    def pin(self, block: int) -> int | None:
        """Returns the version of the block's state that is not to be overwritten; None: any is."""
        word = self._load(self._block(block) + _PIN)
        return word - 1 if word else None

    def set_pin(self, block: int, version: int | None) -> None:
        """Pins the state of ``version``; None removes the pin."""
        self._store(self._block(block) + _PIN, 0 if version is None else version + 1)

    def slot_version(self, block: int, slot: int) -> int:
        """Returns the version of the weights in the slot, or :data:`INVALID_VERSION`."""
        return self._load(self._block(block) + 8 + 8 * slot)

    def set_slot_version(self, block: int, slot: int, version: int) -> None:
        """Stores the version of a slot: INVALID before the first write into the slot, the version
        after the last.
        """
        word, sequence = self._block(block) + 8 + 8 * slot, self._slot_sequence(block, slot)
        # The version changes while the sequence is odd. A reader that sees the same even number
        # twice has read the version of the bytes in between.
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
        """Makes sequences even that a kill has left odd next to a valid version. Then either no
        byte of the slot was written yet, or all were. No process may write meanwhile.
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
        """Makes the sequence odd, before the first write into the frozen weights."""
        self._begin(self._block(block) + _FROZEN_SEQUENCE)

    def end_frozen(self, block: int) -> None:
        """Makes the sequence even, after the last write into the frozen weights."""
        self._end(self._block(block) + _FROZEN_SEQUENCE)

    def readable(self, block: int, version: int) -> bool:
        """Returns whether the block's weights of ``version`` are complete and committed."""
        return self.committed >= version and self.slot_version(block, version % 2) == version

    def ready(self, block: int, contribution: int) -> tuple[int, int]:
        """Returns (epoch, attempt) of the complete gradients in the contribution's range."""
        word = self._load(self._block(block) + _READY + 8 * contribution)
        return word >> 32, word & 0xFFFF_FFFF

    def gradient_sequence(self, block: int, copy: int, contribution: int) -> int:
        """Returns the sequence of a contribution's range; odd while it may be written."""
        return self._load(self._gradient_sequence(block, copy, contribution))

    def begin_gradients(self, block: int, copy: int, contribution: int) -> None:
        """Makes the sequence odd, before the first write into a contribution's range."""
        self._begin(self._gradient_sequence(block, copy, contribution))

    def end_gradients(self, block: int, copy: int, contribution: int) -> None:
        """Makes the sequence even, after the last write and before the ready word."""
        self._end(self._gradient_sequence(block, copy, contribution))

    def held(self, block: int, copy: int, contribution: int) -> int:
        """Returns the attempt of the complete gradients in this copy of a replica; 0 for none."""
        return self._load(self._gradient_sequence(block, copy, contribution))

    def set_held(self, block: int, copy: int, contribution: int, attempt: int) -> None:
        """Stores the attempt: 0 before the first write into the copy, the attempt after the
        last.
        """
        self._store(self._gradient_sequence(block, copy, contribution), attempt)

    def set_ready(self, block: int, contribution: int, *, epoch: int, attempt: int) -> None:
        """Marks the contribution as complete, after its writer wrote the last byte."""
        self._store(
            self._block(block) + _READY + 8 * contribution, (epoch << 32) | (attempt & 0xFFFF_FFFF)
        )

    def validate(self, blocks: Iterable[int]) -> None:
        """Checks that no commit was applied twice and none lost, for the blocks a node owns. A step
        in place, ahead of the commit, has a record.

        Raises:
            ValueError: names the block and its versions.
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
        """Stores the next odd number. On x86-64 other processes see stores in their order: no
        process sees a later byte together with an older number.
        """
        number = self._load(sequence)
        self._store(sequence, (number + 1 + number % 2) % 2**64)

    def _end(self, sequence: int) -> None:
        """Stores the next even number."""
        number = self._load(sequence)
        self._store(sequence, (number + 2 - number % 2) % 2**64)

    def _load(self, offset: int) -> int:
        return load_u64(self._buffer, offset)

    def _store(self, offset: int, value: int) -> None:
        store_u64(self._buffer, offset, value)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
