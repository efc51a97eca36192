"""The meeting of an epoch's workers, which makes its process group.

The member with the lowest device number, the leader, hosts a store. It sends the store's port to
the other members over ZeroMQ, repeatedly until they have joined, because they may open the epoch
later. The group is made after all have joined. So an error names a missing member, instead of a
time-out inside a library.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Generic, TypeVar

from penstock.models.torch_internals import PrefixStore, Store, TCPStore
from penstock.protocol.run.names import worker_name
from penstock.protocol.wire.frames import GroupAddress
from penstock.workers.channels.transport import Transport
from penstock.workers.waiting import POLL_S, Abort, Interrupted, WaitBudget

_STORE_TIMEOUT = timedelta(seconds=30)
_COMPLETE = "complete"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """``members``: devices of the group, ascending, with the addresses of their hosts; ``own`` is
    one of them.
    """

    run_id: str
    epoch: int
    members: Sequence[int]
    own: int
    addresses: Mapping[int, str]
    transport: Transport = field(repr=False)

    @property
    def leader(self) -> int:
        """The member that hosts the store: the one with the lowest device number."""
        return self.members[0]

    @property
    def rank(self) -> int:
        """The rank of ``own`` in the group."""
        return self.members.index(self.own)


class Assembly:
    """Connects a member to the group's store. ``str()`` lists the members still missing."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._missing: Sequence[int] = [m for m in meeting.members if m != meeting.own]

    def __str__(self) -> str:
        named = ", ".join(map(worker_name, self._missing))
        return f"{named} to join the process group of membership {self._meeting.epoch}"

    def store(self, abort: Abort, timeout_s: float) -> Store:
        """Waits until all members have come; returns a store that they share.

        Raises:
            Interrupted: the work was aborted.
            LostMemberError: no message with the store's port came in ``timeout_s`` seconds.
            RuntimeError: the leader ended.
        """
        meeting = self._meeting
        leads = meeting.own == meeting.leader
        tcp = self._host() if leads else self._visit(abort, timeout_s)
        store = PrefixStore(f"penstock-{meeting.run_id}-{meeting.epoch}", tcp)
        store.set(f"joined-{meeting.own}", "1")
        if leads:
            self._gather(tcp.port, store, abort, timeout_s)
            store.set(_COMPLETE, "1")
        # Without a deadline of its own: patiently() has one for all of this.
        while not store.check([_COMPLETE]):
            abort.check()
            time.sleep(POLL_S / 10)
        return store

    def _host(self) -> TCPStore:
        """Opens the store, on the host's own address only; the system chooses the port."""
        address = self._meeting.addresses[self._meeting.own]
        # Bound before the handover, so that no other process can take the port in between.
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        return TCPStore(
            address,
            port,
            is_master=True,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def _visit(self, abort: Abort, timeout_s: float) -> TCPStore:
        meeting = self._meeting
        self._missing = [meeting.leader]
        port = meeting.transport.notices.wait_port(str(self), abort, timeout_s)
        address = meeting.addresses[meeting.leader]
        return TCPStore(address, port, timeout=_STORE_TIMEOUT, wait_for_workers=False)

    def _gather(self, port: int, store: Store, abort: Abort, timeout_s: float) -> None:
        """Sends the store's port to missing members, repeatedly, until all have joined."""
        meeting = self._meeting
        where = GroupAddress(run_id=meeting.run_id, epoch=meeting.epoch, port=port)
        told_at = -POLL_S
        while True:
            self._missing = [m for m in self._missing if not store.check([f"joined-{m}"])]
            if not self._missing:
                return
            if time.monotonic() - told_at >= POLL_S:
                told_at = time.monotonic()
                for member in self._missing:
                    meeting.transport.tell(member, where, abort, timeout_s)
            abort.check()
            time.sleep(POLL_S / 10)


class _Outcome(Generic[T]):
    """The outcome of work on a thread. ``ended`` is set after result and error, which are then
    final.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self.result: T | None = None
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # raised again on the thread that waits
            self.error = error
        self.ended.set()


def patiently(work: Callable[[], T], what: object, abort: Abort, timeout_s: float) -> T:
    """Calls a blocking library function on a thread, and returns its result. An abort abandons the
    thread.

    A ``RuntimeError`` of the library means that a peer ended. The rest of the time is left to the
    scheduler, which notices too and aborts.

    Raises:
        Interrupted: the work was aborted.
        LostMemberError: the deadline passed; ``str(what)`` was awaited.
    """
    outcome = _Outcome(work)
    # A daemon: after an abort it ends when the library times out, or with the process.
    threading.Thread(target=outcome.run, name="worker-group", daemon=True).start()
    budget = WaitBudget(timeout_s)
    while True:
        ended = outcome.ended.wait(POLL_S)
        if ended and outcome.result is not None:
            return outcome.result
        if ended and not isinstance(outcome.error, (RuntimeError, Interrupted)):
            assert outcome.error is not None
            raise outcome.error
        abort.check()
        budget.spend(f"{what} ({outcome.error})" if outcome.error else str(what))
        if ended:  # a peer is gone; the scheduler's abort, or the deadline, ends the wait
            time.sleep(POLL_S)
