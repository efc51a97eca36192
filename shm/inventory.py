"""Names like Penstock's in /dev/shm on this machine, by run and node.

``penstock doctor --clean`` shows these names before it frees them. This module only reads. The
caller decides on removal, and never removes the memory of another run's memoryd. Every user may
take any name there. So only files of this user are opened, and only their first page is read. Every
other name is listed by its status in the kernel.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.host.process_identity import ProcessIdentity
from penstock.host.trust import kind_of, printable
from penstock.shm.bases import parse_name
from penstock.shm.control import ControlView
from penstock.shm.layout import PAGE_BYTES, SegmentKind
from penstock.shm.segment import (
    SHM_ROOT,
    SegmentError,
    SegmentMissingError,
    StrangeSegmentError,
    is_own,
    list_segments,
    open_segment,
    path_of,
    status_of,
)

_NODE = "[a-z0-9][a-z0-9-]{0,15}"
_NAME = re.compile(
    rf"/penstock-(?P<run>[0-9a-f]{{1,16}})-(?P<node>{_NODE}(?:\.{_NODE})?)"
    rf"-(?P<kind>{'|'.join(SegmentKind)})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSegments:
    """The segments that one user has of one node of one run.

    ``uid``: the user. ``owner`` is None when there is no readable control segment: creation was cut
    short, or the user is another one. ``committed``: steps that the model in the memory contains,
    None when it holds no model. ``objection``: why the control segment is not read although it is
    this user's. ``in_use``: the owner lives, or a process of this user has a segment mapped.
    """

    run_id: str
    node_name: str
    uid: int
    names: tuple[str, ...]
    num_bytes: int
    owner: ProcessIdentity | None
    in_use: bool
    committed: int | None = None
    objection: str = ""

    @property
    def keeper(self) -> str:
        """Returns the node that holds the segments: the node itself, or the node that keeps a
        replica of its state.
        """
        return self.node_name.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Junk:
    """A name in /dev/shm that starts like Penstock's and is no segment and no base: of another
    type, or not named as they are. ``path`` is fit to be printed; ``kind``: file, folder, socket
    and so on.
    """

    path: str
    kind: str
    uid: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmNames:
    """All names in /dev/shm that start like Penstock's: segments of every user, and junk."""

    segments: tuple[NodeSegments, ...]
    junk: tuple[Junk, ...]


def inventory() -> tuple[NodeSegments, ...]:
    """Returns this user's segments with names like ours, grouped, in order of their names."""
    user = os.geteuid()
    return tuple(entry for entry in shm_names().segments if entry.uid == user)


def shm_names() -> ShmNames:
    """Returns everything with a name like ours; of files of other users nothing is opened."""
    groups: dict[tuple[str, str, int], dict[str, int]] = {}
    junk: list[Junk] = []
    for name in list_segments():
        status, match = status_of(name), _NAME.fullmatch(name)
        if status is None or parse_name(name, status) is not None:
            continue  # removed since it was listed, or a base (penstock.shm.base_users)
        kind = kind_of(status)
        if match is None or kind != "file":
            path, size = printable(path_of(name)), status.st_size
            junk.append(Junk(path=path, kind=kind, uid=status.st_uid, num_bytes=size))
            continue
        group = groups.setdefault((match["run"], match["node"], status.st_uid), {})
        group[name] = status.st_size
    mapped = _mapped_names() if groups else frozenset()
    segments = tuple(_describe(*key, sizes, mapped) for key, sizes in groups.items())
    return ShmNames(segments=segments, junk=tuple(junk))


def control_names() -> list[tuple[str, str]]:
    """Returns the run and the name of each control segment of this user, without opening them."""
    names = []
    for name in list_segments():
        match = _NAME.fullmatch(name)
        if match is not None and match["kind"] == SegmentKind.CONTROL and is_own(status_of(name)):
            names.append((match["run"], name))
    return names


def held_bytes(run_id: str) -> int:
    """Returns the size of all segments that this user has of a run on this machine."""
    return sum(entry.num_bytes for entry in inventory() if entry.run_id == run_id)


def _describe(
    run_id: str, node: str, uid: int, sizes: dict[str, int], mapped: frozenset[str]
) -> NodeSegments:
    owner, committed, objection = None, None, ""
    if uid == os.geteuid():
        try:
            view = _header(run_id, node)
            owner, committed = view.owner, view.committed if view.incarnation else None
        except SegmentMissingError:
            pass  # reported as segments without owner
        except StrangeSegmentError as error:
            objection = str(error)
        except SegmentError:
            pass  # half-written: reported as segments without owner
    return NodeSegments(
        run_id=run_id,
        node_name=node,
        uid=uid,
        names=tuple(sizes),
        num_bytes=sum(sizes.values()),
        owner=owner,
        in_use=(owner is not None and owner.alive()) or not mapped.isdisjoint(sizes),
        committed=committed,
        objection=objection,
    )


def _header(run_id: str, node: str) -> ControlView:
    """Returns a view of a copy of the first page of a control segment.

    Raises:
        SegmentError: there is none, or it is no control segment of this run.
    """
    descriptor = open_segment(f"/penstock-{run_id}-{node}-{SegmentKind.CONTROL}", os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        page = bytearray(os.pread(descriptor, PAGE_BYTES, 0))
    finally:
        os.close(descriptor)
    return ControlView.open(memoryview(page), run_id=run_id, digest=None, size=size)


def _mapped_names() -> frozenset[str]:
    """Returns the names of our segments that other processes have mapped, as far as this user may
    read /proc.
    """
    names: set[str] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "maps").read_text(encoding="utf-8", errors="replace")
        except OSError:  # ended meanwhile, or another user's
            continue
        names.update(re.findall(rf"{SHM_ROOT}(/penstock-\S+)", text))
    return frozenset(names)
