"""Validity of bytes that were read from another node's memory without its processes.

A read is three transfers, each begun when the previous one is complete: the control words of the
block, the bytes, the control words again. :func:`judge` compares the words. Its argument:

* An array's sequence is odd from before its first byte is written until after the last, and never
  repeats. If it is even before, and the same after, no process wrote in between: all bytes are of
  one moment. Version and ready words change only while the sequence is odd, so they are of that
  moment.
* Versions repeat after a skip (other bytes, same number) and a restore. The sequence does not, and
  the incarnation changes with a restore. The epoch is that of the request or a later one. So memory
  that was replaced, and is mapped only by an old process, does not count.
* Weights count when their version is committed, in both copies of the words.

The argument needs this order. Stores of a writer become visible in their order (x86-64). A transfer
that is begun after another was complete reads memory after it. InfiniBand and RoCE execute read
requests of one connection in order. The completion of a read means that its bytes have arrived.
Within one transfer no order is needed. This follows from the rules of that hardware and was not
tested on it.
"""

from __future__ import annotations

from enum import Enum

from penstock.protocol.wire.frames import BlockRequest
from penstock.shm.words import CopiedWords


class Verdict(Enum):
    """Result of a read."""

    OK = "ok"
    WAIT = "wait"
    """The array is not complete yet."""
    TORN = "torn"
    """A process wrote meanwhile: the bytes are invalid."""


def sequence(words: CopiedWords, request: BlockRequest) -> int:
    """Returns the sequence of the requested array."""
    if request.array == "weights":
        return words.slot_sequences[request.version % 2]
    if request.array == "grads":
        return words.gradient_sequences[request.version % 2][request.contribution]
    return words.frozen_sequence


def is_complete(words: CopiedWords, request: BlockRequest) -> bool:
    """Returns whether the array is complete, and no process writes it."""
    if not words.incarnation or words.epoch < request.epoch or sequence(words, request) % 2:
        return False
    if request.array == "weights":
        has_version = words.slot_versions[request.version % 2] == request.version
        return has_version and words.committed >= request.version
    if request.array == "grads":  # or a later attempt's, as memoryd answers
        epoch, attempt = words.ready[request.contribution]
        kept = request.attempt > words.lost_attempt
        return kept and epoch >= request.epoch and attempt >= request.attempt
    return True


def judge(before: CopiedWords, after: CopiedWords, request: BlockRequest) -> Verdict:
    """Returns the verdict on the bytes that were read between the two copies of the words."""
    if not is_complete(before, request):
        return Verdict.WAIT
    same = (before.incarnation, sequence(before, request)) == (
        after.incarnation,
        sequence(after, request),
    )
    return Verdict.OK if same and is_complete(after, request) else Verdict.TORN
