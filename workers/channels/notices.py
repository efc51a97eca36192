"""Small messages of peers that are kept for the rest of the epoch: where its process group meets,
and what transfers through it hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.protocol.errors import ProtocolError
from penstock.protocol.wire.frames import GroupAddress, TransferShape
from penstock.workers.channels.tensors import Packing
from penstock.workers.waiting import POLL_S, Abort, WaitBudget

ShapeKey = tuple[int, str, str, int]
"""Sender, phase, kind and stage."""

_MAX_PORT = 65535
_MAX_SHAPES = 1 << 14


class Notices:
    """Filled by the communication thread, read by the interpreter's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._epoch: tuple[str, int] = ("", -1)
        self._port: int | None = None
        self._packings: dict[ShapeKey, Packing] = {}

    def open(self, *, run_id: str, epoch: int) -> None:
        """Forget everything and accept what belongs to ``epoch`` from now on."""
        with self._changed:
            self._epoch = run_id, epoch
            self._port = None
            self._packings.clear()

    def close(self) -> None:
        """Forget everything and accept nothing."""
        self.open(run_id="", epoch=-1)

    def put(self, notice: GroupAddress | TransferShape) -> str | None:
        """Keep a notice; why it is not wanted, or ``None``.

        Raises:
            ProtocolError: no port, no tensors of this kind.
        """
        with self._changed:
            if (notice.run_id, notice.epoch) != self._epoch:
                # An address comes again until its receiver has joined.
                return None if isinstance(notice, GroupAddress) else "stale"
            if isinstance(notice, GroupAddress):
                if not 0 < notice.port <= _MAX_PORT:
                    raise ProtocolError(f"GroupAddress.port: {notice.port}")
                self._port = notice.port
            elif len(self._packings) >= _MAX_SHAPES:
                return "full"
            else:
                key = (notice.sender, notice.phase, notice.kind, notice.stage)
                if key in self._packings:
                    return "doubled"
                self._packings[key] = Packing(notice.tensors)
            self._changed.notify_all()
        return None

    def wait_port(self, what: str, abort: Abort, timeout_s: float) -> int:
        """Where the process group meets.

        Raises:
            Interrupted: aborted. LostMemberError: nobody said so in time.
        """
        self._wait(lambda: self._port is not None, what, abort, timeout_s)
        assert self._port is not None
        return self._port

    def wait_packing(self, key: ShapeKey, what: str, abort: Abort, timeout_s: float) -> Packing:
        """What transfers hold; raises like :meth:`wait_port`."""
        self._wait(lambda: key in self._packings, what, abort, timeout_s)
        return self._packings[key]

    def packing(self, key: ShapeKey) -> Packing | None:
        """What transfers hold, if it is known."""
        with self._changed:
            return self._packings.get(key)

    def _wait(
        self, condition: Callable[[], bool], what: str, abort: Abort, timeout_s: float
    ) -> None:
        budget = WaitBudget(timeout_s)
        with self._changed:
            while not condition():
                abort.check()
                budget.spend(what)
                self._changed.wait(POLL_S)
