"""Reads the state of blocks out of another node's memory, or out of a replica of it.

Clients of the block servers of memoryds and mirrords (:mod:`penstock.protocol.wire.blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from penstock.protocol.wire.blocks import BlockClient
from penstock.protocol.wire.frames import STATE_WORDS_BYTES, BlockRequest, StateWords
from penstock.shm.memory import Array, Halves

TIMEOUT_S = 30.0
"""Seconds for small arrays; a large array has the time of :data:`SLOWEST_BYTES_PER_S`, too."""
SLOWEST_BYTES_PER_S = 10e6


class StateReader:
    """Reads a block's state, of one version; of one thread, as its client is."""

    def __init__(self, client: BlockClient, run_id: str, *, split: bool) -> None:
        """Creates a reader. ``split``: True if masters are halves in the memory that it reads."""
        self._client = client
        self._run_id = run_id
        self._split = split

    def words(self, address: str, block: int, cancelled: Callable[[], bool]) -> StateWords:
        """Returns which state the block has.

        Raises:
            FetchCancelledError, LostMemberError, ProtocolError: as a fetch.
        """
        data = bytearray(STATE_WORDS_BYTES)
        self._fetch(address, block, 0, "", data, len(data), cancelled)
        return StateWords.unpack(data)

    def arrays(
        self,
        address: str,
        block: int,
        version: int,
        master: Array,
        arrays: Mapping[str, Array],
        cancelled: Callable[[], bool],
    ) -> int:
        """Fills ``master`` and the optimizer's ``arrays``, fp32 each; returns the bytes read.

        Raises:
            FetchCancelledError, LostMemberError, ProtocolError: as in a fetch; the last also when
            the state is not at ``version`` any more.
        """
        remaining, halves = dict(arrays), dict[str, Array]()
        if self._split:
            halves = {half: np.empty(len(master), np.uint16) for half in ("low", "high")}
        else:
            remaining["master"] = master
        for name, array in (*remaining.items(), *halves.items()):
            self._fetch(address, block, version, name, array, array.nbytes, cancelled)
        if self._split:
            master[:] = Halves(**halves).load()
        return sum(array.nbytes for array in (*remaining.values(), *halves.values()))

    def _fetch(
        self,
        address: str,
        block: int,
        version: int,
        name: str,
        out: Any,
        num_bytes: int,
        cancelled: Callable[[], bool],
    ) -> None:
        request = BlockRequest(
            run_id=self._run_id,
            epoch=0,
            attempt=0,
            array="state" if name else "words",
            block=block,
            version=version,
            contribution=0,
            name=name,
        )
        timeout_s = TIMEOUT_S + num_bytes / SLOWEST_BYTES_PER_S
        self._client.fetch(address, request, out, timeout_s=timeout_s, cancelled=cancelled)
