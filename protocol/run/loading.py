"""Code that processes share that write initial weights: memory to fill, and a command line.

memoryd starts them during a restore. Their own code is in
:mod:`penstock.models.checkpoints.loader`, and for emulated runs in
:mod:`penstock.workers.platforms.emulated.loader`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from penstock.host.errors import StateError
from penstock.protocol.run.names import node_index
from penstock.protocol.run.process import tool_main
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import NodeMemory
from penstock.shm.segment import SegmentError

INITIAL_VERSION = 0
"""Version of new weights."""

_FILLED = (SegmentKind.STATE, SegmentKind.WEIGHTS, SegmentKind.FROZEN)


@contextmanager
def memory_to_fill(files: RunDirectory, node_name: str) -> Iterator[NodeMemory]:
    """Returns state, weights (with the upper halves of a split master) and frozen arrays of a node
    that holds no model yet.

    Raises:
        ConfigError: no such node. StateError: its memory cannot be attached, or holds a model.
    """
    spec = files.memory_spec(node_index(files.config, node_name))
    try:
        memory = NodeMemory.attach(spec, _FILLED, fill=True)
    except SegmentError as error:
        raise StateError(f"memory of node {node_name}: {error}") from error
    try:
        if memory.control.incarnation:
            raise StateError(
                f"memory of node {node_name} holds incarnation {memory.control.incarnation} of a"
                " model; only a restore by memoryd may replace it"
            )
        yield memory
    finally:
        memory.close()


def run_loader(
    load_node: Callable[[Path, str], None],
    *,
    prog: str,
    description: str | None,
    arguments: Sequence[str] | None,
) -> int:
    """Runs a loader, ``load_node(run_dir, node_name)``, as a command; returns the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--config", type=Path, required=True, help="RUN_DIR/resolved.yaml")
    parser.add_argument("--node", required=True, help="name of the node in cluster.nodes")
    parser.add_argument("--parent-pid", type=int, help="die when this process dies")
    options = parser.parse_args(arguments)
    run_dir = options.config.parent
    return tool_main(lambda: load_node(run_dir, options.node), run_dir, options.parent_pid)
