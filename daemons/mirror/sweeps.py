"""The replica's memory as the machine sees it, and its settles: native sweeps, as the owner's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock import _native
from penstock.config.training import OptimizerConfig
from penstock.daemons.mirror.machine.events import MirroredBlock, ReplicaFacts
from penstock.daemons.mirror.machine.replica import COPIES
from penstock.daemons.optimizer.machine.events import UndoWords
from penstock.daemons.optimizer.machine.sweeps import FinishSettle, Settle, Sweep, sweep_tag
from penstock.host.errors import StateError
from penstock.protocol.plan.groups import StepRange, step_ranges
from penstock.protocol.plan.step import SweepStatus
from penstock.shm.control import INVALID_VERSION
from penstock.shm.memory import Array, NodeMemory


def mirrored_blocks(replica: NodeMemory) -> tuple[MirroredBlock, ...]:
    """Returns the blocks of which a replica has room for state."""
    masters = sorted(
        {block for block, name, _, _ in replica.spec.layout.arrays if name == "master"}
    )
    return tuple(
        MirroredBlock(index=block, contributions=replica.spec.layout.contributions[block])
        for block in masters
        if replica.spec.table.blocks[block].trainable_elements
    )


def read_replica(replica: NodeMemory) -> ReplicaFacts:
    """Returns what the control segment of a replica says; that of a new one is empty.

    Raises:
        StateError: the undo area is none.
    """
    control, blocks = replica.control, mirrored_blocks(replica)
    try:
        undo = _native.undo_state(control.undo_area)
    except ValueError as error:
        raise StateError(f"the control segment of a replica is damaged: {error}") from error
    states, held = dict[int, int](), dict[tuple[int, int, int], int]()
    if control.incarnation:  # else nothing was ever put there, or not to the end
        states = {b.index: control.state_version(b.index) for b in blocks}
        held = {
            (b.index, copy, k): control.held(b.index, copy, k)
            for b in blocks
            for copy in range(COPIES)
            for k in range(b.contributions)
        }
    return ReplicaFacts(
        incarnation=control.incarnation,
        committed=control.committed,
        record=control.record(control.committed),
        interrupted=control.interrupted_sweep,
        undo=UndoWords(armed=undo.armed, tag=undo.tag, completed=undo.completed),
        states={b: v for b, v in states.items() if v != INVALID_VERSION},
        held={key: attempt for key, attempt in held.items() if attempt},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockState:
    """Views of one block, flat: state in place, gradients by copy and contribution."""

    master: Array
    arrays: list[Array]
    grads: tuple[list[Array], ...]
    ranges: list[StepRange]

    @property
    def state(self) -> dict[str, Any]:
        return {"master": self.master, "arrays": self.arrays}


class ReplicaSweeps:
    """Settles blocks of a replica, one at a time, on the threads of ``pool``."""

    def __init__(self, pool: _native.Pool, replica: NodeMemory, config: OptimizerConfig) -> None:
        self._pool = pool
        self._config = config
        self._undo = replica.control.undo_area
        self._blocks = {
            block.index: _views(replica, block, config) for block in mirrored_blocks(replica)
        }

    def run(self, work: Sweep) -> SweepStatus | None:
        """Runs one settle to its end.

        Raises:
            ValueError, RuntimeError: from the native module: arrays, hyper-parameters or the undo
                area are not what the sweep needs. Nothing was written.
        """
        assert isinstance(work, Settle | FinishSettle), "a replica is only ever settled"
        block, version = self._blocks[work.block], work.update.version
        spans = None
        if isinstance(work, FinishSettle):
            spans = _native.repair(self._undo, **block.state)
        _native.settle(
            self._pool,
            **block.state,
            grads=block.grads[version % COPIES],
            hyper=work.update.hyper(self._config),
            ranges=block.ranges,
            undo=self._undo,
            spans=spans,
            tag=sweep_tag(work.block, version),
        )
        return None

    def moved_by(self, work: Sweep) -> tuple[float, float]:
        """Returns the parameters that a settle goes through, and the bytes of DRAM that it reads
        and writes.
        """
        block = self._blocks[work.block]
        state = 2 * sum(array.nbytes for array in (block.master, *block.arrays))
        return len(block.master), state + sum(grads.nbytes for grads in block.grads[0])

    def close(self) -> None:
        """Releases all views of the replica, which cannot be unmapped while a view exists."""
        self._blocks.clear()
        self._undo.release()


def _views(replica: NodeMemory, block: MirroredBlock, config: OptimizerConfig) -> _BlockState:
    table, index = replica.spec.table, block.index
    return _BlockState(
        master=replica.state(index, "master"),
        arrays=[replica.state(index, name) for name in table.state_arrays],
        grads=tuple(
            [replica.grads(index, copy, k) for k in range(block.contributions)]
            for copy in range(COPIES)
        ),
        ranges=step_ranges(config, table, index),
    )


class GradientRoom:
    """Buffers for pulled contributions."""

    def __init__(self, replica: NodeMemory) -> None:
        self._replica = replica

    def array(self, block: int, contribution: int, copy: int) -> Array:
        """Returns the room of one contribution: (elements,), in the type of gradients."""
        return self._replica.grads(block, copy, contribution)
