"""Fetches contributions that other nodes compute.

One thread, one pull at a time: a cancelled pull has stopped writing into its buffer before the next
one begins. What a cancelled pull leaves in the buffer is never used, because the state machine
knows which attempt each buffer holds.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from penstock.daemons.kit.events import EffectFailed
from penstock.daemons.optimizer.machine.events import Pull, Pulled
from penstock.host import world
from penstock.host.errors import LostMemberError, PenstockError
from penstock.protocol.wire.blocks import BlockClient, FetchCancelledError
from penstock.protocol.wire.fetching import Fetcher, OpenFetcher
from penstock.protocol.wire.frames import BlockRequest
from penstock.protocol.wire.sockets import OPEN, SocketAccess
from penstock.shm.memory import Array

ATTEMPT_TIMEOUT_S = 30.0
"""Seconds after which the log names the awaited contribution; the scheduler decides on lost
members.
"""

_log = logging.getLogger(__name__)

Report = Callable[[Pulled | EffectFailed, int], None]
"""Called with the event and the number of bytes fetched."""


class Room(Protocol):
    """Buffers for contributions: :class:`~penstock.daemons.optimizer.kernels.RemoteGradients`."""

    def array(self, block: int, contribution: int, copy: int) -> Array:
        """Returns the buffer of one contribution: (elements,), in the type of gradients."""


class Puller:
    """Carries out Pull orders on a thread of its own, from :meth:`start` to :meth:`close`."""

    def __init__(
        self,
        *,
        run_id: str,
        remote: Room,
        source: Mapping[tuple[int, int], str],
        report: Report,
        open_fetcher: OpenFetcher = BlockClient,
        access: SocketAccess = OPEN,
    ) -> None:
        """Starts the thread of the pulls. ``source``: (block, contribution) -> member name of the
        memoryd that holds it. ``access``: maps an address to its owner's keys.
        """
        self._open_fetcher = open_fetcher
        self._access = access
        self._run_id = run_id
        self._remote = remote
        self._source = source
        self._report = report
        self._orders: queue.SimpleQueue[tuple[int, str, Pull] | None] = world.queue()
        self._generation = 0  # written by the owner's thread only; a pull of an older one is off
        self._addresses: dict[str, str] = {}
        self._thread = world.thread(target=self._run, name="puller")

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def sources(self) -> list[str]:
        """Names of the memoryds that contributions come from."""
        return sorted(set(self._source.values()))

    def blocks_from(self, memoryds: Collection[str]) -> frozenset[int]:
        """Returns the blocks of which one of ``memoryds`` has a contribution."""
        return frozenset(block for (block, _), name in self._source.items() if name in memoryds)

    def set_addresses(self, addresses: Mapping[str, str]) -> None:
        """Records the addresses of the memoryds in this epoch: member name -> address."""
        self._addresses = dict(addresses)

    def order(self, pull: Pull) -> None:
        """Queues a pull."""
        address = self._addresses.get(self._source[(pull.block, pull.contribution)], "")
        self._orders.put((self._generation, address, pull))

    def cancel(self) -> None:
        """Cancels all pulls ordered so far."""
        self._generation += 1

    def close(self) -> None:
        """Cancels the current pull and ends the thread."""
        self.cancel()
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        with world.sockets() as context:
            client = self._open_fetcher(context)
            try:
                while (order := self._orders.get()) is not None:
                    self._carry_out(client, *order)
            finally:
                client.close()

    def _carry_out(self, client: Fetcher, generation: int, address: str, pull: Pull) -> None:
        try:
            out = self._remote.array(pull.block, pull.contribution, pull.version % 2)
            source = self._source[(pull.block, pull.contribution)]
            if not address:
                raise LostMemberError(f"Begin named no address of {source}")
            self._access.check(address, source.partition(".")[2])
            request = BlockRequest(
                run_id=self._run_id,
                epoch=pull.since_epoch,
                attempt=pull.attempt,
                array="grads",
                block=pull.block,
                version=pull.version,
                contribution=pull.contribution,
            )
            if self._fetch(client, address, request, out, generation):
                event = Pulled(
                    epoch=pull.epoch,
                    attempt=pull.attempt,
                    version=pull.version,
                    block=pull.block,
                    contribution=pull.contribution,
                )
                self._report(event, out.nbytes)
        except PenstockError as error:
            self._report(EffectFailed(error=str(error)), 0)

    def _fetch(
        self, client: Fetcher, address: str, request: BlockRequest, out: Any, generation: int
    ) -> bool:
        """Fills ``out``; returns False if the pull was cancelled, and ``out`` holds anything."""
        while generation == self._generation:
            try:
                client.fetch(
                    address,
                    request,
                    out,
                    timeout_s=ATTEMPT_TIMEOUT_S,
                    cancelled=lambda: generation != self._generation,
                )
                return True
            except FetchCancelledError:
                return False
            except LostMemberError as error:
                _log.warning("still waiting: %s", error)
        return False
