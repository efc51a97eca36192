"""Filling a node's memory from the replica that its partner keeps (``memory.mirror: partner``).

The order is a restore's: no model first, everything else, the incarnation last. Weights are cast
from masters; frozen weights, which no step changes, come from the model as at a first start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.daemons.memory.restore import finish, invalidate
from penstock.daemons.memory.tensorfile import CancelledError
from penstock.host import world
from penstock.protocol.wire.blocks import BlockClient, FetchCancelledError
from penstock.protocol.wire.sockets import SocketAccess
from penstock.protocol.wire.states import StateReader
from penstock.shm.control import CommitRecord
from penstock.shm.memory import NodeMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Partner:
    """The node that keeps the replica, and how its mirrord is talked to."""

    node: str
    run_id: str
    access: SocketAccess


def refill(
    memory: NodeMemory,
    partner: Partner,
    address: str,
    record: CommitRecord,
    generation: int,
    load_initial: Callable[[Callable[[], bool]], None],
    cancelled: Callable[[], bool],
    cores: Sequence[int],
) -> None:
    """Fills the memory of all blocks the node owns with the state that is committed.

    ``record``: of that commit; ``generation``: that the memory begins; ``load_initial``,
    ``cancelled`` and ``cores`` as in :func:`penstock.daemons.memory.restore.restore`.

    Raises:
        PenstockError: the replica cannot be read; memory holds no model then.
        CancelledError: on request; memory holds no model then.
    """
    partner.access.check(address, partner.node)
    invalidate(memory)
    blocks = memory.owned_blocks()
    if any(memory.spec.table.blocks[block].frozen_elements for block in blocks):
        load_initial(cancelled)
    with world.sockets() as context:
        client = BlockClient(context, access=partner.access)
        # A replica's masters are whole, even if the owner's are split.
        reader = StateReader(client, partner.run_id, split=False)
        try:
            for block in blocks:
                _fill_block(memory, reader, address, block, record.version, cancelled)
        except FetchCancelledError as error:
            raise CancelledError from error
        finally:
            client.close()
    memory.control.set_generation(generation)
    memory.control.set_lost_attempt(record.attempt)
    finish(memory, record, cores)


def _fill_block(
    memory: NodeMemory,
    reader: StateReader,
    address: str,
    block: int,
    version: int,
    cancelled: Callable[[], bool],
) -> None:
    elements = memory.spec.table.blocks[block].trainable_elements
    if not elements:
        return
    arrays = {name: memory.state(block, name, version) for name in memory.spec.table.state_arrays}
    if not memory.split_master:
        master = memory.state(block, "master", version)
        reader.arrays(address, block, version, master, arrays, cancelled)
        return
    whole = np.empty(elements, np.float32)
    reader.arrays(address, block, version, whole, arrays, cancelled)
    memory.store_master(block, version, whole)
