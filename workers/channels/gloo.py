"""The wire over Gloo: TCP between host buffers, without the global process group.

Gloo moves bytes in the background. Its p2p work objects cannot be polled, only waited for, and a
wait that times out breaks every connection of the group. So one thread per sending peer, and one
for all sends, wait without a deadline of their own. The interpreter waits for these threads, with
its deadline. :meth:`GlooWire.close` uses the same property to end them all at once.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import cast

import torch
from torch import distributed

from penstock.models.torch_internals import PrefixStore, Store, Work, gloo_group
from penstock.workers.channels.group import PointToPoint
from penstock.workers.channels.inbox import TransferKey
from penstock.workers.channels.order import RESERVED_TAG, TransferOrder
from penstock.workers.channels.rendezvous import Assembly, Meeting, patiently
from penstock.workers.device import Device
from penstock.workers.waiting import POLL_S, Abort, WaitBudget

_CONNECT_TIMEOUT = timedelta(seconds=60)
_NO_DEADLINE = timedelta(days=30)
_JOIN_S = 5.0

_log = logging.getLogger(__name__)


def make_group(store: Store, rank: int, size: int, address: str) -> PointToPoint:
    """Connects all members with each other, over the interface of ``address``. Blocks until the
    other members call it, too.

    Raises:
        RuntimeError: another member did not call, or ended.
    """
    group = gloo_group(PrefixStore("gloo", store), rank, size, address, _CONNECT_TIMEOUT)
    return cast(PointToPoint, group)


def is_built() -> bool:
    """Returns whether this torch has Gloo."""
    return distributed.is_gloo_available()


def join(
    meeting: Meeting, order: TransferOrder, device: Device, abort: Abort, timeout_s: float
) -> GlooWire:
    """Meets the other members and connects to them by Gloo.

    Raises:
        Interrupted, LostMemberError: as :class:`penstock.workers.channels.opening.GroupModule`
        says.
    """
    del order  # Gloo matches by tag: no connection is particular to a direction
    assembly = Assembly(meeting)
    group = patiently(
        lambda: make_group(
            assembly.store(abort, timeout_s),
            meeting.rank,
            len(meeting.members),
            meeting.addresses[meeting.own],
        ),
        assembly,
        abort,
        timeout_s,
    )
    return GlooWire(group, meeting.members, device)


class _Waiter:
    """Waits for work on a thread of its own, in the order in which the work was started."""

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self._queue: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None] = queue.SimpleQueue()
        self._failed = failed
        self._thread = threading.Thread(target=self._wait, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Work, done: Callable[[], None]) -> None:
        self._queue.put((work, done))

    def close(self) -> None:
        """Ends the thread; all work has ended or been broken."""
        self._queue.put(None)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _log.warning("%s: a transfer does not end", self._thread.name)

    def _wait(self) -> None:
        while (item := self._queue.get()) is not None:
            work, done = item
            try:
                work.wait(_NO_DEADLINE)
            except RuntimeError as error:  # broken here, or the peer is gone
                self._failed(error)
            else:
                done()
            del item, work, done  # not until the next item: buffers are large


class GlooWire:
    """The :class:`penstock.workers.channels.group.Wire` over Gloo; tensors of GPUs go through the
    host.

    The condition guards arrivals and the first failure, which threads write and the interpreter's
    thread reads; all else is the interpreter's alone.
    """

    def __init__(self, group: PointToPoint, members: Sequence[int], device: Device) -> None:
        """Wraps a group. ``members``: devices by rank."""
        self._group: PointToPoint | None = group
        self._ranks = {member: rank for rank, member in enumerate(members)}
        self._device = device
        self._changed = threading.Condition()
        self._arrivals: dict[TransferKey, float] = {}
        self._broken: str = ""
        self._sends = _Waiter("worker-sends", self._fail)
        self._receives: dict[int, _Waiter] = {}

    def outgoing(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors, of any shape, on the host."""
        return self._device.to_host(tensors)

    def incoming(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors, of any shape, brought from the host to the device."""
        return self._device.from_host(tensors)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Returns host memory of (num_bytes,) uint8, aligned as torch allocates: kernels repeat
        their bits for equal alignment only.
        """
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, peer: int, buffer: torch.Tensor, tag: int) -> None:
        """Starts to send flat uint8 bytes; never blocks. A send to a peer that is gone is dropped,
        like a message to a dead process: the scheduler reports the loss.
        """
        if self._group is None:
            return
        try:
            work = self._group.send([buffer], self._ranks[peer], tag)
        except RuntimeError as error:
            self._fail(error)
        else:
            # The closure keeps the buffer until Gloo has read it.
            self._sends.put(work, lambda kept=buffer: None)  # type: ignore[misc]

    def receive(self, peer: int, buffer: torch.Tensor, tag: int, key: TransferKey) -> None:
        """Starts to receive into a flat uint8 buffer; never blocks. The caller keeps the buffer."""
        if self._group is None:
            return
        if peer not in self._receives:
            self._receives[peer] = _Waiter(f"worker-receives-{peer}", self._fail)
        try:
            work = self._group.recv([buffer], self._ranks[peer], tag)
        except RuntimeError as error:
            self._fail(error)
        else:
            self._receives[peer].put(work, lambda: self._arrived(key))

    def wait(self, key: TransferKey, abort: Abort, timeout_s: float) -> None:
        """Waits until the sender's thread reports the bytes; see the protocol."""
        budget = WaitBudget(timeout_s)
        with self._changed:
            while key not in self._arrivals:
                abort.check()
                broken = f" (a connection broke: {self._broken})" if self._broken else ""
                budget.spend(f"{key}{broken}")
                self._changed.wait(POLL_S)

    def arrival_s(self, key: TransferKey) -> float | None:
        """Returns when Gloo had all bytes of a transfer."""
        with self._changed:
            return self._arrivals.pop(key, None)

    def check(self) -> None:
        """Does nothing: each wait ended with its bytes."""

    def close(self) -> None:
        """Lets one wait time out, which breaks the group. No reference to the group, its sockets or
        its store may remain afterwards.
        """
        # First, so that no transfer starts any more; the last reference goes at the return.
        group, self._group = self._group, None
        if group is None:
            return
        scratch = torch.empty(1, dtype=torch.uint8)
        for rank in set(range(group.size())) - {group.rank()}:
            with suppress(RuntimeError):
                group.recv([scratch], rank, RESERVED_TAG).wait(timedelta(milliseconds=1))
        for waiter in (self._sends, *self._receives.values()):
            waiter.close()
        self._receives.clear()

    def _arrived(self, key: TransferKey) -> None:
        with self._changed:
            self._arrivals[key] = time.perf_counter()
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._broken = self._broken or str(error)[:200]
