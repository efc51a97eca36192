"""The wire over NCCL: from GPU to GPU, without the global process group.

NCCL matches by order and runs work between two devices one after the other. So each direction has
communicators of its own, in two groups: receives posted early never block sends. Waits are the
stream's, not the host's: a received tensor is used on the compute stream, behind the transfer. A
thread checks the abort and the deadline, because the host may be inside a synchronisation that only
the end of a transfer ends.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
from torch import distributed

from penstock.host.errors import LostMemberError
from penstock.workers.channels.group import PointToPoint, PrefixStore, Store, Work
from penstock.workers.channels.inbox import TransferKey
from penstock.workers.channels.order import TransferOrder
from penstock.workers.channels.rendezvous import Assembly, Meeting, patiently
from penstock.workers.device import Device
from penstock.workers.waiting import POLL_S, Abort, Interrupted, WaitBudget

_NO_DEADLINE = timedelta(days=30)
_JOIN_S = 5.0

Groups = tuple[PointToPoint, PointToPoint]
"""The group for transfers to higher ranks, and that for transfers to lower ones."""


def make_groups(
    store: Store, rank: int, size: int, device: torch.device, ways: Iterable[tuple[int, int]]
) -> Groups:
    """Makes the groups, and communicators for ``ways``, the (sender, receiver) ranks in use.

    Communicators are made at the first transfer and block the host until the peer makes them too.
    Inside a step, three workers could wait for each other in a circle. One order for all workers
    prevents that.
    """
    # Otherwise the library ends this process when a peer dies; here the next Drain ends the group.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    groups = _group(store, "up", rank, size), _group(store, "down", rank, size)
    with torch.cuda.device(device):
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        for sender, receiver in sorted(ways):
            group = groups[0 if sender < receiver else 1]
            if rank == sender:
                group.send([byte], receiver, 0).wait()
            elif rank == receiver:
                group.recv([byte], sender, 0).wait()
        # The first transfer makes the communicator: no step may start before it has ended.
        torch.cuda.synchronize(device)
    return groups


def _group(store: Store, direction: str, rank: int, size: int) -> PointToPoint:
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = _NO_DEADLINE
    group: Any = distributed.ProcessGroupNCCL(PrefixStore(direction, store), rank, size, options)
    return cast(PointToPoint, group)


def is_built() -> bool:
    """Returns whether this torch has NCCL."""
    return distributed.is_nccl_available()


def join(
    meeting: Meeting, order: TransferOrder, device: Device, abort: Abort, timeout_s: float
) -> NcclWire:
    """Meets the other members and connects to them by NCCL.

    Raises:
        Interrupted, LostMemberError: as :class:`penstock.workers.channels.opening.GroupModule`
        says.
    """
    assembly, members = Assembly(meeting), meeting.members
    ways = {(members.index(at.sender), members.index(at.receiver)) for at in order.transfers}
    groups = patiently(
        lambda: make_groups(
            assembly.store(abort, timeout_s),
            meeting.rank,
            len(members),
            device.torch_device,
            ways,
        ),
        assembly,
        abort,
        timeout_s,
    )
    return NcclWire(groups, members, device.torch_device, abort, timeout_s)


class NcclWire:
    """The :class:`penstock.workers.channels.group.Wire` over NCCL; made and used with the device
    current.

    The lock guards the waits of the interpreter's thread, which the watching thread checks.
    """

    def __init__(
        self,
        groups: Groups,
        members: Sequence[int],
        device: torch.device,
        abort: Abort,
        timeout_s: float,
    ) -> None:
        """Wraps the groups and starts the watching thread. ``members``: devices by rank."""
        self._groups: Groups | None = groups
        self._rank = groups[0].rank()
        self._ranks = {member: rank for rank, member in enumerate(members)}
        self._device = device
        self._abort = abort
        self._timeout_s = timeout_s
        self._sends: deque[tuple[Work, torch.Tensor]] = deque()
        self._posted: dict[TransferKey, Work] = {}
        self._lock = threading.Lock()
        self._awaited: deque[tuple[TransferKey, Work]] = deque()
        self._overdue = ""
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._watching, name="worker-nccl", daemon=True)
        self._watch.start()

    def outgoing(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors, of any shape, where they are: on the GPU."""
        return dict(tensors)

    def incoming(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors, of any shape, where they are: on the GPU."""
        return dict(tensors)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Returns GPU memory of (num_bytes,) uint8, from the compute stream's share of the
        allocator.
        """
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def send(self, peer: int, buffer: torch.Tensor, tag: int) -> None:
        """Sends flat uint8 bytes of the GPU behind the work issued so far.

        Buffers of finished sends are released.
        """
        self._reap()
        rank = self._ranks[peer]
        if self._groups is not None:
            group = self._groups[0 if rank > self._rank else 1]
            # The buffer stays until the transfer is over: NCCL reads it on a stream of its own.
            self._sends.append((group.send([buffer], rank, 0), buffer))

    def receive(self, peer: int, buffer: torch.Tensor, tag: int, key: TransferKey) -> None:
        """Receives into a flat uint8 buffer, on a stream of its own; NCCL ignores tags."""
        rank = self._ranks[peer]
        if self._groups is not None:
            group = self._groups[0 if rank < self._rank else 1]
            self._posted[key] = group.recv([buffer], rank, 0)

    def wait(self, key: TransferKey, abort: Abort, timeout_s: float) -> None:
        """Makes the compute stream wait; the host continues, and the watching thread has the
        deadline.

        Raises:
            Interrupted: the epoch was aborted.
            LostMemberError: a wait before this one did not end in time.
        """
        self._reap()
        abort.check()
        self.check()
        work = self._posted.pop(key)
        work.wait()
        with self._lock:
            self._awaited.append((key, work))

    def arrival_s(self, key: TransferKey) -> float | None:
        """Returns None: only the GPU knows."""
        return None

    def check(self) -> None:
        """Raises if the deadline of a wait passed; all work since then is worthless.

        Raises:
            LostMemberError: a deadline passed.
        """
        if self._overdue:
            raise LostMemberError(self._overdue)

    def close(self) -> None:
        """Ends the kernels of current transfers."""
        # The watching thread ends first: it breaks the same groups.
        self._closed.set()
        self._watch.join(_JOIN_S)
        self._break()
        self._groups = None
        self._sends.clear()
        self._posted.clear()
        self._awaited.clear()

    def _reap(self) -> None:
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()

    def _break(self) -> None:
        for group in self._groups or ():
            group.abort()

    def _watching(self) -> None:
        budget, seen = WaitBudget(self._timeout_s), None
        while not self._closed.wait(POLL_S):
            with self._lock:
                while self._awaited and self._awaited[0][1].is_completed():
                    self._awaited.popleft()
                first = self._awaited[0] if self._awaited else None
            if first is None or first is not seen:
                budget, seen = WaitBudget(self._timeout_s), first
            try:
                self._abort.check()
                if first is not None:
                    budget.spend(f"{first[0]}")
            except (Interrupted, LostMemberError) as reason:
                if isinstance(reason, LostMemberError):
                    self._overdue = str(reason)
                self._break()
                return
