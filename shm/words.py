"""Control words of one block as another node has them: copied bytes, not mapped memory.

Where they lie is drawn in :mod:`penstock.shm.control`. The words of one copy may be of different
moments, a few microseconds apart; each is whole, since it is aligned.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from penstock.shm.control import BLOCK_BYTES, block_words_offset
from penstock.shm.layout import GRADIENT_COPIES, WEIGHT_SLOTS
from penstock.shm.table import MAX_CONTRIBUTIONS

HEADER_WORDS = range(80, 152)
"""Bytes of the control segment from the incarnation to the lost attempt."""

_HEADER = struct.Struct("<Q32xQQ8xQ")
_BLOCK = struct.Struct(
    f"<8x{WEIGHT_SLOTS}Q8x{MAX_CONTRIBUTIONS}Q{WEIGHT_SLOTS}QQ8x"
    f"{GRADIENT_COPIES * MAX_CONTRIBUTIONS}Q32x"
)


def block_words(undo_bytes: int, block: int) -> range:
    """Returns the bytes of the control segment that are the words of a block."""
    start = block_words_offset(undo_bytes, block)
    return range(start, start + BLOCK_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedWords:
    """``ready[k]``: (epoch, attempt) of contribution k; ``gradient_sequences[copy][k]``."""

    incarnation: int
    epoch: int
    committed: int
    lost_attempt: int
    slot_versions: tuple[int, ...]
    ready: tuple[tuple[int, int], ...]
    slot_sequences: tuple[int, ...]
    frozen_sequence: int
    gradient_sequences: tuple[tuple[int, ...], ...]

    @classmethod
    def unpack(cls, header: bytes, block: bytes) -> CopiedWords:
        """Returns the words from the bytes of :data:`HEADER_WORDS` and :func:`block_words`."""
        incarnation, epoch, committed, lost_attempt = _HEADER.unpack(header)
        words = iter(_BLOCK.unpack(block))

        def some(count: int) -> tuple[int, ...]:
            return tuple(next(words) for _ in range(count))

        slot_versions, ready = some(WEIGHT_SLOTS), some(MAX_CONTRIBUTIONS)
        return cls(
            incarnation=incarnation,
            epoch=epoch,
            committed=committed,
            lost_attempt=lost_attempt,
            slot_versions=slot_versions,
            ready=tuple((word >> 32, word & 0xFFFF_FFFF) for word in ready),
            slot_sequences=some(WEIGHT_SLOTS),
            frozen_sequence=next(words),
            gradient_sequences=tuple(some(MAX_CONTRIBUTIONS) for _ in range(GRADIENT_COPIES)),
        )
