"""What Penstock left or keeps in /dev/shm on this machine, by run and node.

Used to tell a user what ``penstock doctor --clean`` would free. It only looks: removing is the
caller's decision, and never that of another run's memoryd.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.shm.control import ControlView
from penstock.shm.layout import SegmentKind
from penstock.shm.process import ProcessIdentity
from penstock.shm.segment import SHM_ROOT, Segment, SegmentError, list_segments

_NAME = re.compile(
    rf"/penstock-(?P<run>[0-9a-f]{{1,16}})-(?P<node>.+)-(?:{'|'.join(SegmentKind)})$", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSegments:
    """The segments of one node of one run.

    ``owner`` is None when there is no readable control segment: creation was cut short. ``in_use``:
    the owner lives, or a process of this user has a segment mapped.
    """

    run_id: str
    node_name: str
    names: tuple[str, ...]
    num_bytes: int
    owner: ProcessIdentity | None
    in_use: bool

    @property
    def keeper(self) -> str:
        """Returns the node that has them: itself, or who keeps a replica of its state."""
        return self.node_name.partition(".")[0]


def inventory() -> tuple[NodeSegments, ...]:
    """Returns all segments with names like ours, grouped, in order of their names."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in list_segments():
        match = _NAME.fullmatch(name)
        if match is not None:
            groups.setdefault((match["run"], match["node"]), []).append(name)
    if not groups:
        return ()
    mapped = _mapped_names()
    return tuple(_describe(run, node, names, mapped) for (run, node), names in groups.items())


def held_bytes(run_id: str) -> int:
    """Returns the size of all segments of a run on this machine."""
    return sum(_size(name) for name in list_segments(f"/penstock-{run_id}-"))


def _describe(run_id: str, node: str, names: list[str], mapped: frozenset[str]) -> NodeSegments:
    owner = _owner(run_id, node)
    return NodeSegments(
        run_id=run_id,
        node_name=node,
        names=tuple(names),
        num_bytes=sum(_size(name) for name in names),
        owner=owner,
        in_use=(owner is not None and owner.alive()) or not mapped.isdisjoint(names),
    )


def _owner(run_id: str, node: str) -> ProcessIdentity | None:
    try:
        segment = Segment.attach(f"/penstock-{run_id}-{node}-{SegmentKind.CONTROL}")
    except SegmentError:
        return None  # reported as a segment without owner
    try:
        return ControlView.open(segment.buffer, run_id=run_id, digest=None).owner
    except SegmentError:
        return None  # reported as a segment without owner
    finally:
        segment.close()


def _size(name: str) -> int:
    try:
        return (SHM_ROOT / name.lstrip("/")).stat().st_size
    except FileNotFoundError:  # removed since it was listed
        return 0


def _mapped_names() -> frozenset[str]:
    """Returns the names of our segments that other processes have mapped, as far as this user may
    look.
    """
    found: set[str] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "maps").read_text(encoding="utf-8", errors="replace")
        except OSError:  # ended meanwhile, or another user's
            continue
        found.update(re.findall(rf"{SHM_ROOT}(/penstock-\S+)", text))
    return frozenset(found)
