"""Fetching of arrays from other nodes, by the transport in ``cluster.fetch``.

``zmq``: the peer's memoryd sends them (:mod:`penstock.protocol.wire.blocks`). ``nixl``, ``auto``:
fetchd of this node reads them out of the peer's memory (:mod:`penstock.protocol.wire.staged`). If
fetchd is missing on either node, memoryd sends the array, and fetchd is tried again later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from penstock.config.schema import Config
from penstock.host import world
from penstock.protocol.wire.blocks import BlockClient, Pace
from penstock.protocol.wire.frames import BlockRequest
from penstock.protocol.wire.sockets import OPEN, SocketAccess
from penstock.protocol.wire.staged import AwayError, StagedClient, socket_address

RETRY_S = 1.0
"""Seconds after a failed one-sided read until fetchd is tried again."""

_log = logging.getLogger(__name__)

Fetched = Callable[[str, int, float], None]
"""Called with ``nixl`` or ``zmq``, the bytes that came that way, and the seconds that they took."""


class Fetcher(Protocol):
    """Copies arrays of blocks from other nodes into the caller's buffers."""

    def fetch(
        self,
        address: str,
        request: BlockRequest,
        out: Any,
        *,
        timeout_s: float,
        cancelled: Callable[[], bool] = ...,
    ) -> None:
        """Fetches an array: see :meth:`penstock.protocol.wire.blocks.BlockClient.fetch`."""

    def close(self) -> None:
        """Closes all connections."""


OpenFetcher = Callable[[zmq.Context[Any]], Fetcher]
"""Called on the thread that is going to fetch."""


def fetchers(
    config: Config,
    run_id: str,
    node: int,
    pace: Pace | None,
    fetched: Fetched = lambda way, num_bytes, seconds: None,
    access: SocketAccess = OPEN,
) -> OpenFetcher:
    """Returns a factory of the fetchers of a process of ``node``; ``access``: credentials for
    memoryds on TCP.
    """
    name = config.cluster.nodes[node].name

    def open_fetcher(context: zmq.Context[Any]) -> Fetcher:
        blocks = BlockClient(context, pace, access)
        if not config.cluster.fetches_one_sidedly:
            return CountedFetcher(blocks, fetched)
        staged = StagedClient(socket_address(run_id, name))
        return OneSidedFetcher(staged, blocks, pace, fetched)

    return open_fetcher


class CountedFetcher:
    """Asks memoryds, and counts."""

    def __init__(self, blocks: BlockClient, fetched: Fetched) -> None:
        self._blocks = blocks
        self._fetched = fetched

    def fetch(
        self,
        address: str,
        request: BlockRequest,
        out: Any,
        *,
        timeout_s: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        start_s = world.monotonic()
        self._blocks.fetch(address, request, out, timeout_s=timeout_s, cancelled=cancelled)
        self._fetched("zmq", memoryview(out).nbytes, world.monotonic() - start_s)

    def close(self) -> None:
        self._blocks.close()


class OneSidedFetcher:
    """Reads by fetchd where it can; asks memoryds where it cannot, and says when that changes."""

    def __init__(
        self, staged: StagedClient, blocks: BlockClient, pace: Pace | None, fetched: Fetched
    ) -> None:
        self._staged = staged
        self._blocks = blocks
        self._pace = pace
        self._fetched = fetched
        self._again_s: dict[str, float] = {}
        self._ways: dict[str, str] = {}

    def fetch(
        self,
        address: str,
        request: BlockRequest,
        out: Any,
        *,
        timeout_s: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        view = memoryview(out)
        if not view.nbytes:
            return
        start_s = world.monotonic()
        if start_s >= self._again_s.get(address, 0.0):
            try:
                self._staged.fetch(
                    address, request, view.cast("B"), timeout_s=timeout_s, cancelled=cancelled
                )
            except AwayError as error:
                self._again_s[address] = world.monotonic() + RETRY_S
                self._say(address, "zmq", f"memoryd is asked, by ZeroMQ: {error}")
            else:
                self._say(address, "nixl", "read from its memory, by NIXL")
                if self._pace is not None:
                    self._pace(view.nbytes, cancelled)
                self._fetched("nixl", view.nbytes, world.monotonic() - start_s)
                return
        left_s = max(0.1, timeout_s - (world.monotonic() - start_s))
        self._blocks.fetch(address, request, out, timeout_s=left_s, cancelled=cancelled)
        self._fetched("zmq", view.nbytes, world.monotonic() - start_s)

    def close(self) -> None:
        self._staged.close()
        self._blocks.close()

    def _say(self, address: str, way: str, how: str) -> None:
        if self._ways.get(address) != way:
            self._ways[address] = way
            _log.warning("blocks of the node at %s: %s", address, how)
