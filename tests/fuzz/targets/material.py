"""What seeds are made of: a small run, prepared as Penstock prepares it."""

from __future__ import annotations

from pathlib import Path

from penstock._native import undo_bytes
from penstock.config.schema import Config
from penstock.host.files import write_atomically
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.layout import NodeLayout, Ownership, SegmentKind
from penstock.shm.memory import MemorySpec
from penstock.shm.segment import unlink
from penstock.shm.table import BlockTable
from tests.memory.conftest import make_plan
from tests.scheduler.conftest import RUN_ID, make_config
from tests.shm.conftest import make_table

SPEC_NODE = "a"


def table() -> BlockTable:
    """Two blocks, the second of which borrows from the first."""
    return make_table()


def plan() -> Plan:
    """One device a node, three blocks."""
    return make_plan(2)


def config() -> Config:
    """One node with two workers."""
    return make_config()


def memory_spec() -> MemorySpec:
    """The memory of a node that owns both blocks."""
    owners = Ownership.from_backward_nodes(table(), [0, 0])
    return MemorySpec(
        run_id=RUN_ID,
        node_name=SPEC_NODE,
        table=table(),
        layout=NodeLayout.compute(table(), owners, 0),
        undo_bytes=undo_bytes(1),
    )


def forget(spec: MemorySpec) -> None:
    """Remove the segments of a node."""
    for kind in SegmentKind:
        unlink(spec.name(kind))


def run_directory(folder: Path) -> RunDirectory:
    """A prepared run directory in ``folder``, without seal."""
    run = RunDirectory.create(folder)
    write_atomically(folder / "resolved.yaml", config().to_yaml())
    write_atomically(folder / "table.json", table().to_json())
    write_atomically(folder / "plan.json", plan().to_json())
    return run
