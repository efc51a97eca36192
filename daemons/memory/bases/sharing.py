"""Fills, adopts and keeps the bases of a node's memory: frozen weights that runs share.

One memoryd fills a base, others wait for it and adopt it. A filler that is killed gives its lock
back, and another memoryd begins again. A filler that is alive and makes no progress loses its claim
after :data:`STALLED_S`; then two fill, and the first to finish wins.

A name that another user has taken stops no run: the block gets a base with a random digest, which
other runs do not find.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from penstock.daemons.memory.tensorfile import CancelledError
from penstock.host import world
from penstock.host.errors import CapacityError, StateError
from penstock.protocol.run.bases.base_identity import (
    bases_of,
    current_source,
    private_source,
    record_source,
    recorded_source,
)
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.base_users import remove_unusable
from penstock.shm.bases import (
    DIGEST_BYTES,
    FILLING,
    REMEDY,
    UNUSABLE,
    Base,
    BusyBaseError,
    base_name,
    being_filled,
    take_claim,
)
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import NodeMemory
from penstock.shm.segment import NoSpaceError, SegmentError

STALLED_S = 60.0
"""Seconds without progress after which another run's filler is not waited for any more."""
_BEAT_S = 1.0
_POLL_S = 0.02
_KEEP_S = 10.0
"""Seconds in which memory that holds a model gets the locks of its bases."""
_COMPARED_BYTES = 64 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """A run and the node with the memory that shares bases."""

    run: RunDirectory
    node: str

    def source(self, as_of_s: float, *, initial: bool) -> str:
        """Returns the source of frozen weights from the model, or of those in saved states.
        ``as_of_s``: see :func:`penstock.host.stamps.stamps_of`.
        """
        run, node = self.run, self.node
        known = current_source(run, run.config, as_of_s) if initial else recorded_source(run, node)
        return private_source(run, node) if known is None else known


@contextmanager
def filling_bases(
    memory: NodeMemory, sharing: Sharing | None, cancelled: Callable[[], bool], *, initial: bool
) -> Iterator[Callable[[], bool]]:
    """Makes all bases of the memory complete, or adopts them; the caller writes the arrays of those
    that :meth:`NodeMemory.has_complete_base` denies. Yields ``cancelled``, to be called while the
    caller works. ``initial``: the arrays come from the model, not from a saved state. ``sharing``
    is None for memory without bases.

    Raises:
        CapacityError: there is no room. StateError: a name in /dev/shm cannot be used, or files
            of the model changed while they were read.
    """
    if not memory.spec.bases:
        yield cancelled
        return
    assert sharing is not None, "the memory has bases"
    now_s = world.wall()
    source = sharing.source(now_s, initial=initial)
    memory.rename_bases(bases_of(memory.spec, source))
    try:
        _obtain(memory, cancelled)
        yield _beating(memory, cancelled)
        if initial and sharing.source(now_s, initial=True) != source:
            raise StateError(
                f"model.path = {str(sharing.run.config.model.path)!r}: files with weights changed"
                " while they were read; start again once no program writes them"
            )
        _complete(memory, cancelled)
    except SegmentError as error:
        kind = CapacityError if isinstance(error, NoSpaceError) else StateError
        remedy = f"; {REMEDY}" if isinstance(error, UNUSABLE) else ""
        raise kind(f"memory of node {sharing.node}: {error}{remedy}") from error
    finally:
        for block in [b for b, base in memory.held.items() if not base.complete]:
            memory.release(block)
    record_source(sharing.run, sharing.node, source)


@contextmanager
def verified(memory: NodeMemory, block: int) -> Iterator[None]:
    """Gives the caller room for a block's frozen weights. Those of a complete base are compared
    with the base afterwards.

    Raises:
        StateError: they differ.
    """
    if not memory.has_complete_base(block):
        yield
        return
    base = memory.held[block]
    with memory.scratch(block):
        yield
        given = memory.frozen(block).view(np.uint8)
        with mmap.mmap(base.descriptor, base.num_bytes, prot=mmap.PROT_READ) as mapping:
            kept = np.frombuffer(mapping, dtype=np.uint8)
            starts = range(0, base.num_bytes, _COMPARED_BYTES)
            same = all(
                np.array_equal(given[at : at + _COMPARED_BYTES], kept[at : at + _COMPARED_BYTES])
                for at in starts
            )
            del kept
        del given
    if not same:
        raise StateError(
            f"frozen weights of {memory.spec.table.blocks[block].name} in the saved state are not"
            f" those of {base.name} in /dev/shm, which this run and others had: a saved file or the"
            " memory was changed. Train with memory.share_base: never, or restore the saved state"
        )


def keep_bases(memory: NodeMemory) -> None:
    """Takes the locks of the bases of memory that holds a model.

    Raises:
        StateError: a base is gone, or cannot be used.
    """
    places = memory.spec.frozen_places()
    deadline_s = world.monotonic() + _KEEP_S
    for block, digest in memory.spec.bases:
        base = None
        while base is None:
            try:
                base = Base.adopt(digest, places[block].num_bytes)
            except BusyBaseError:
                if world.monotonic() < deadline_s:
                    world.sleep(_POLL_S)
                    continue
                raise
            except UNUSABLE as error:
                raise SegmentError(f"{error}; {REMEDY}") from error
            if base is None:
                name = memory.spec.table.blocks[block].name
                raise SegmentError(
                    f"the base of {name} was removed from /dev/shm, and the rest is useless without"
                    " it. Remove the rest (penstock doctor --clean --force DIR); then the"
                    " same command resumes from the newest saved state"
                )
        memory.hold(block, base)


def _obtain(memory: NodeMemory, cancelled: Callable[[], bool]) -> None:
    places = memory.spec.frozen_places()
    # All runs claim in one order, so no two of them wait for each other.
    for block, digest in sorted(memory.spec.bases, key=lambda entry: entry[1]):
        held = memory.held.get(block)
        if held is None or (held.digest, held.complete) != (digest, True):
            memory.release(block)
            num_bytes = places[block].num_bytes
            try:
                base = _claimed(memory, digest, num_bytes, cancelled)
            except UNUSABLE as error:
                base = _claimed(memory, _draw_digest(memory, block, error), num_bytes, cancelled)
            memory.hold(block, base)


def _complete(memory: NodeMemory, cancelled: Callable[[], bool]) -> None:
    for block, base in [(b, base) for b, base in memory.held.items() if not base.complete]:
        while not base.seal():
            # Another process has made the base meanwhile, or a stranger has taken its name.
            if cancelled():
                raise CancelledError
            try:
                other = _found(memory, base.digest, base.num_bytes)
            except UNUSABLE as error:
                base.change_digest(_draw_digest(memory, block, error))
                continue
            if other is not None:
                memory.release(block)
                memory.hold(block, other)
                break
            if not base.has_name:
                raise StateError(f"{base.name} in /dev/shm was removed at its completion")
            world.sleep(_POLL_S)
        else:
            memory.protect(block)


def _claimed(
    memory: NodeMemory, digest: bytes, num_bytes: int, cancelled: Callable[[], bool]
) -> Base:
    """Returns the base, complete or claimed by this memory.

    Raises:
        SegmentError: the base's name leads to a file that has to stay.
    """
    progress, since_s = being_filled(digest), world.monotonic()
    while True:
        if cancelled():
            raise CancelledError
        base = _found(memory, digest, num_bytes, claims=True)
        if base is not None:
            return base
        last, progress = progress, being_filled(digest)
        if progress != last:
            since_s = world.monotonic()
        elif world.monotonic() - since_s > STALLED_S:
            take_claim(digest)
            since_s = world.monotonic()
        world.sleep(_POLL_S)


def _found(
    memory: NodeMemory, digest: bytes, num_bytes: int, *, claims: bool = False
) -> Base | None:
    """Returns the complete base, or (with ``claims``) one to be filled; None: there is none yet. A
    file that is unusable and has no users is removed.

    Raises:
        SegmentError: the base's name leads to a file that has to stay.
    """
    name = base_name(digest)
    try:
        base = Base.adopt(digest, num_bytes, compares=True)
        if base is not None or not claims:
            return base
        name += FILLING
        return Base.claim(digest, num_bytes, memory.spec.filler)
    except BusyBaseError:
        return None
    except UNUSABLE as error:
        if not remove_unusable(name, memory.spec.name(SegmentKind.CONTROL)):
            raise
        _log.warning("%s; it is removed, and the frozen weights are read again", error)
        return None


def _draw_digest(memory: NodeMemory, block: int, error: SegmentError) -> bytes:
    """Names a base of this run alone for a block; returns the new digest. ``error``: the reason."""
    drawn = world.random_bits(8 * DIGEST_BYTES).to_bytes(DIGEST_BYTES, "little")
    memory.rename_bases(tuple((b, drawn if b == block else d) for b, d in memory.spec.bases))
    _log.warning(
        "%s; the run takes memory of its own for the frozen weights of %s, which other runs do not"
        " share (memory.share_base)",
        error,
        memory.spec.table.blocks[block].name,
    )
    return drawn


def _beating(memory: NodeMemory, cancelled: Callable[[], bool]) -> Callable[[], bool]:
    next_s = world.monotonic()

    def beating() -> bool:
        nonlocal next_s
        if world.monotonic() >= next_s:
            next_s = world.monotonic() + _BEAT_S
            for base in memory.held.values():
                if not base.complete:
                    base.beat()
        return cancelled()

    return beating
