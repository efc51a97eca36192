"""What dead processes left in shared memory, and what of it is worth nothing."""

from __future__ import annotations

from collections.abc import Callable

from penstock.shm.control import ControlView
from penstock.shm.errors import SegmentError
from penstock.shm.inventory import NodeSegments, inventory
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import segment_name
from penstock.shm.segment import Segment, unlink


def committed_version(entry: NodeSegments) -> int | None:
    """Steps that the model in a node's memory contains; None when it holds no model."""
    name = segment_name(entry.run_id, entry.node_name, SegmentKind.CONTROL)
    try:
        segment = Segment.attach(name)
    except SegmentError:
        return None  # no control segment, or one cut short: creation was interrupted
    try:
        view = ControlView.open(segment.buffer, run_id=entry.run_id, digest=None)
        return view.committed if view.incarnation else None
    except SegmentError:
        return None
    finally:
        segment.close()


def held_version(run_id: str) -> int | None:
    """Steps that the models in a run's memory on this machine contain; None when it holds none."""
    versions = [committed_version(entry) for entry in inventory() if entry.run_id == run_id]
    return max((version for version in versions if version is not None), default=None)


def remove_empty_memory(run_id: str, node_name: str) -> bool:
    """Remove a dead node's segments if no model was ever in them; whether there were such.

    For the supervisor, when its children are dead: memoryd does this itself when it ends well.
    """
    return _remove(run_id, node_name, lambda entry: committed_version(entry) is None)


def remove_memory(run_id: str, node_name: str) -> bool:
    """Remove a dead node's segments, whatever is in them: the run has ended, and all is saved;
    whether there were any.
    """
    return _remove(run_id, node_name, lambda entry: True)


def _remove(run_id: str, node_name: str, worthless: Callable[[NodeSegments], bool]) -> bool:
    found = False
    for entry in inventory():
        ours = (entry.run_id, entry.node_name) == (run_id, node_name)
        if ours and not entry.in_use and worthless(entry):
            found = True
            for name in entry.names:
                unlink(name)
    return found
