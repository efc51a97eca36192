"""Adopts the segments that the run left on its node, or creates new ones.

Only segments of the same run and node are touched. Their control segment is created last, and its
magic number is written last. So if it is unreadable, creation was cut short, and none of the
segments counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.daemons.memory.bases.sharing import keep_bases
from penstock.daemons.memory.pinning import let_go_of_all
from penstock.host import world
from penstock.host.errors import CapacityError, StateError
from penstock.host.limits.cgroup import MemoryLimit
from penstock.host.process_identity import ProcessIdentity
from penstock.shm.base_users import missing_bytes, sweep
from penstock.shm.inventory import NodeSegments, inventory
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import ANYWHERE, MemorySpec, NodeMemory
from penstock.shm.pages import NodeRange
from penstock.shm.segment import (
    NoSpaceError,
    Segment,
    SegmentError,
    SegmentMissingError,
    ShortSegmentError,
    StrangeSegmentError,
    exists,
    refuse_stranger,
    room,
    unlink,
)


def acquire(
    spec: MemorySpec, places: Mapping[SegmentKind, Sequence[NodeRange]] = ANYWHERE
) -> NodeMemory:
    """Returns the node's memory, owned by the calling process. Fresh memory has incarnation 0, and
    lies on the NUMA nodes that ``places`` says, as far as the kernel grants them.

    The caller holds the run's local socket, so no second memoryd does the same at once.

    Raises:
        StateError: the segments belong to a living memoryd or to another user, or do not fit the
            run's model and plan; nothing was touched.
        CapacityError: there is no room for new ones; nothing stays behind.
    """
    _refuse_strangers(spec)
    if _cut_short(spec):
        reclaim(spec)
    memory = _adopt(spec) if exists(spec.name(SegmentKind.CONTROL)) else None
    if memory is not None and _shares_otherwise(memory, spec):
        memory.close()
        reclaim(spec)
        memory = None
    if memory is None:
        memory = _create(spec, places)
    sweep()  # of runs that were killed while they left; the bases of this memory are named by now
    return memory


def _adopt(spec: MemorySpec) -> NodeMemory:
    try:
        memory = NodeMemory.attach(spec, adopt=True)
    except SegmentMissingError as error:
        gone = [spec.name(kind) for kind in SegmentKind if not exists(spec.name(kind))]
        raise StateError(
            f"memory of node {spec.node_name}: {', '.join(gone)} was removed from /dev/shm, and the"
            " rest is useless without it. Remove the rest (penstock doctor --clean --force"
            " DIR); then the same command resumes from the newest saved state"
        ) from error
    except SegmentError as error:
        raise StateError(f"memory of node {spec.node_name}: {error}") from error
    owner, myself = memory.control.owner, ProcessIdentity.current()
    if owner != myself and owner.alive():
        memory.close()
        raise StateError(
            f"memory of node {spec.node_name} belongs to another memoryd of this run, process"
            f" {owner.pid}, which is alive: stop that run first"
        )
    try:
        if memory.control.incarnation:
            keep_bases(memory)
    except SegmentError as error:
        memory.close()
        raise StateError(f"memory of node {spec.node_name}: {error}") from error
    if not any(memory.control.tokens):  # of an older Penstock: owner and mode are this user's
        _mark(memory)
    memory.control.set_owner(myself)
    let_go_of_all(memory)
    return memory


def _shares_otherwise(memory: NodeMemory, spec: MemorySpec) -> bool:
    """Returns whether memory without a model shares frozen weights, and new memory would not, or
    the other way round.
    """
    return not memory.control.incarnation and bool(memory.spec.bases) is not bool(spec.bases)


def _mark(memory: NodeMemory) -> None:
    try:
        memory.mark(_draw)
    except SegmentError as error:
        memory.close()
        kind = CapacityError if isinstance(error, NoSpaceError) else StateError
        raise kind(f"memory of node {memory.spec.node_name}: {error}") from error


def _refuse_strangers(spec: MemorySpec) -> None:
    """Refuses names of this memory that something else has than private files of this user."""
    for name in spec.sizes():
        try:
            refuse_stranger(name)
        except StrangeSegmentError as error:
            raise StateError(
                f"memory of node {spec.node_name}: {error}, and this run needs that name: remove it"
                " (its user or root may), then repeat the command"
            ) from error


def reclaim(spec: MemorySpec) -> None:
    """Removes all segments of this run and node, and bases that no other memory uses."""
    for kind in (SegmentKind.CONTROL, *SegmentKind):
        unlink(spec.name(kind))
    sweep()


def _cut_short(spec: MemorySpec) -> bool:
    """Returns whether there are segments with an unfinished creation."""
    name = spec.name(SegmentKind.CONTROL)
    if not exists(name):
        return any(exists(spec.name(kind)) for kind in SegmentKind)
    try:
        segment = Segment.attach(name)
    except ShortSegmentError:
        return True
    try:
        return not any(segment.buffer[:8])
    finally:
        segment.close()


def _create(spec: MemorySpec, places: Mapping[SegmentKind, Sequence[NodeRange]]) -> NodeMemory:
    needed = sum(spec.sizes().values()) + missing_bytes(spec.base_sizes())
    free = room()
    if needed > free.available:
        raise _too_small(spec, needed, free)
    try:
        return NodeMemory.create(spec, places, _draw)
    except NoSpaceError as error:
        raise _too_small(spec, needed, room()) from error
    except SegmentError as error:
        raise StateError(f"memory of node {spec.node_name}: {error}") from error


def _draw(count: int) -> bytes:
    return world.random_bits(8 * count).to_bytes(count, "little")


def _too_small(spec: MemorySpec, needed: int, there: MemoryLimit) -> CapacityError:
    dead = [group for group in inventory() if not group.in_use and group.run_id != spec.run_id]
    hint = f"; raise the limit of {there.owner}, or train a smaller model"
    if dead:
        hint = "; penstock doctor --clean would remove " + ", ".join(map(_describe, dead)) + hint
    return CapacityError(
        f"the segments of node {spec.node_name} need {_gib(needed)}, {there.owner} has"
        f" {_gib(there.available)} free{hint}"
    )


def _describe(group: NodeSegments) -> str:
    return f"{_gib(group.num_bytes)} of dead run {group.run_id} (node {group.node_name})"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
