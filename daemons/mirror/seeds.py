"""Reads the state of blocks from their owner's memory while training continues.

A sweep of the owner may write the state at any time, so a block's words are read before and after.
Equal words prove that the bytes read in between are of one version; torn bytes are read again.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator

from penstock.daemons.kit.events import EffectFailed
from penstock.daemons.mirror.machine.events import Seed, Seeded
from penstock.host import world
from penstock.host.errors import LostMemberError, PenstockError, ProtocolError
from penstock.protocol.wire.blocks import BlockClient, FetchCancelledError, Pace
from penstock.protocol.wire.frames import StateWords
from penstock.protocol.wire.sockets import SocketAccess
from penstock.protocol.wire.states import StateReader
from penstock.shm.control import INVALID_VERSION
from penstock.shm.memory import NodeMemory

AGAIN_S = 0.005
"""Seconds to wait for a sweep before the words are read again."""

_log = logging.getLogger(__name__)

Report = Callable[[Seeded | EffectFailed, int], None]
"""Called with the event and the number of bytes read."""


class Seeder:
    """Carries out Seed orders on a thread of its own, from :meth:`start` to :meth:`close`."""

    def __init__(
        self,
        *,
        run_id: str,
        replica: NodeMemory,
        owner: str,
        split: bool,
        report: Report,
        pace: Pace | None,
        access: SocketAccess,
    ) -> None:
        """Starts the thread of the reads. ``owner``: the node that owns the blocks. ``split``: True
        if its masters are stored as halves.
        """
        self._run_id = run_id
        self._replica = replica
        self._owner = owner
        self._split = split
        self._report = report
        self._pace = pace
        self._access = access
        self._orders: queue.SimpleQueue[tuple[int, str, Seed] | None] = world.queue()
        self._generation = 0  # written by the owner's thread only; a seed of an older one is off
        self._address = ""
        self._thread = world.thread(target=self._run, name="seeder")

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def set_address(self, address: str) -> None:
        """Records the address of the owner's memoryd in this epoch."""
        self._address = address

    def order(self, seed: Seed) -> None:
        """Queues a seed."""
        self._orders.put((self._generation, self._address, seed))

    def cancel(self) -> None:
        """Cancels all seeds ordered so far."""
        self._generation += 1

    def close(self) -> None:
        """Cancels the current read and ends the thread."""
        self.cancel()
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        with world.sockets() as context:
            client = BlockClient(context, self._pace, self._access)
            try:
                while (order := self._orders.get()) is not None:
                    self._carry_out(client, *order)
            finally:
                client.close()

    def _carry_out(self, client: BlockClient, generation: int, address: str, seed: Seed) -> None:
        reader = StateReader(client, self._run_id, split=self._split)
        try:
            if not address:
                raise LostMemberError(f"Begin named no address of memoryd.{self._owner}")
            self._access.check(address, self._owner)
            for num_bytes, words in self._attempts(reader, generation, address, seed.block):
                if words is None:
                    world.look_again(AGAIN_S)
                    continue
                seeded = Seeded(
                    epoch=seed.epoch,
                    block=seed.block,
                    version=words.state_version,
                    incarnation=words.incarnation,
                )
                self._report(seeded, num_bytes)
                return
        except FetchCancelledError:
            return
        except PenstockError as error:
            self._report(EffectFailed(error=str(error)), 0)

    def _attempts(
        self, reader: StateReader, generation: int, address: str, block: int
    ) -> Iterator[tuple[int, StateWords | None]]:
        """Yields, for each try to read the block, bytes and words; None for words if it failed."""
        replica = self._replica
        arrays = {name: replica.state(block, name) for name in replica.spec.table.state_arrays}
        master = replica.state(block, "master")

        def cancelled() -> bool:
            return generation != self._generation

        while not cancelled():
            try:
                words = reader.words(address, block, cancelled)
                if words.state_version == INVALID_VERSION:
                    yield 0, None
                    continue
                version = words.state_version
                count = reader.arrays(address, block, version, master, arrays, cancelled)
                after = reader.words(address, block, cancelled)
            except ProtocolError as error:  # most often a sweep has led the state on
                _log.info("block %d is read again: %s", block, error)
                yield 0, None
                continue
            except LostMemberError as error:
                _log.warning("still waiting: %s", error)
                continue
            yield count, words if after == words else None
