"""Collectives of emulated devices that shard weights, with the simulator's times.

FETCH_WEIGHTS first brings each device its share over PCIe. Then all devices pass their shares
around a ring (an all-gather). REDUCE_GRADIENTS passes sums around it (a reduce-scatter), see
:mod:`penstock.planner.simulate.transfers`. A ring starts when the last device has entered it, so
each device sends its time of entry to all others. All enter the same collectives in the same order
(the validator checks this), so all compute the same times. The numbers themselves are read from
shared memory, or come with the messages of the reduction.
"""

from __future__ import annotations

import torch

from penstock.host import world
from penstock.planner.cost.cluster import Cluster
from penstock.protocol.wire.frames import Transfer
from penstock.workers.channels.inbox import TransferKey
from penstock.workers.epoch import EpochContext, Job
from penstock.workers.platforms.emulated.clock import EmulatedStream
from penstock.workers.telemetry.account import IdleCause
from penstock.workers.waiting import POLL_S, WaitBudget

_ENTERED = "entered"
"""Name of the tensor with the time at which a device entered: (1,), the bits of an fp64 as
int64.
"""


def link_bandwidth(cluster: Cluster, source: int, target: int) -> float:
    """Returns the bytes/s from one device to another on an unshared path."""
    here = cluster.node_of(source) == cluster.node_of(target)
    way = cluster.peer_bandwidth if here else cluster.nic_bandwidth
    if not cluster.peer_through_host:
        return way
    return min(way, cluster.offload_bandwidth, cluster.fetch_bandwidth, cluster.switch_bandwidth)


class Rings:
    """The collectives of one attempt, or evaluation batch, as one device sees them."""

    def __init__(
        self, context: EpochContext, job: Job, cluster: Cluster, time_scale: float
    ) -> None:
        self._context = context
        self._job = job
        self._latency_s = time_scale * cluster.latency_s
        num_devices = context.plan.num_devices
        self._links = [
            (
                EmulatedStream(),
                time_scale / link_bandwidth(cluster, device, (device + 1) % num_devices),
            )
            for device in range(num_devices)
        ]
        self._changed = world.condition()
        self._entered_at: list[float | None] = []
        self._amounts: list[float] = []
        self._ends: list[float] = []

    @property
    def num_devices(self) -> int:
        """Number of devices that take part."""
        return len(self._links)

    def reserve(self, num_bytes: float) -> int:
        """Returns the number of the next collective, over ``num_bytes`` in all."""
        with self._changed:
            self._entered_at.append(None)
            self._amounts.append(num_bytes * (1.0 - 1.0 / len(self._links)))
            return len(self._amounts) - 1

    def enter(self, number: int, at: float) -> None:
        """Enters a collective at ``at``, when this device has its part; notifies the other devices.
        Any thread may call it.

        Raises:
            Interrupted: aborted. LostMemberError: a peer's queue stayed full.
        """
        context = self._context
        with self._changed:
            self._entered_at[number] = at
            self._changed.notify_all()
        entered = {_ENTERED: torch.tensor([at], dtype=torch.float64).view(torch.int64)}
        header = Transfer(
            run_id=context.run_id,
            epoch=context.epoch,
            phase=self._job.phase,
            attempt=self._job.number,
            kind="entry",
            stage=number,
            micro_batch=context.device_index,
            tensors=(),
        )
        for peer in range(len(self._links)):
            if peer != context.device_index:
                context.transport.send(peer, header, entered, context.abort, context.timeout_s)

    def end(self, number: int) -> float:
        """Returns the end of a collective that this device has entered; waits until the other
        devices have entered it.

        Raises:
            Interrupted: aborted. LostMemberError: a device did not enter in time.
        """
        while len(self._ends) <= number:
            self._ends.append(self._run(len(self._ends)))
        return self._ends[number]

    def _run(self, number: int) -> float:
        start = max(self._entry(number, device) for device in range(len(self._links)))
        amount = self._amounts[number]
        ends = [link.occupy(start, amount * per_byte_s)[1] for link, per_byte_s in self._links]
        return max(ends) + self._latency_s

    def _entry(self, number: int, device: int) -> float:
        context = self._context
        if device == context.device_index:
            return self._own_entry(number)
        key = TransferKey(
            phase=self._job.phase,
            attempt=self._job.number,
            kind="entry",
            stage=number,
            micro_batch=device,
        )
        with context.progress.awaiting(key, IdleCause.PEERS):
            tensors = context.transport.inbox.take(key, context.abort, context.timeout_s)
        context.transport.inbox.arrival_s(key)
        return float(tensors[_ENTERED].view(torch.float64)[0])

    def _own_entry(self, number: int) -> float:
        """Waits for this device's own entry: weights are loaded on another thread, which may be
        late.
        """
        context, budget = self._context, WaitBudget(self._context.timeout_s)
        with self._changed:
            while (entered_at := self._entered_at[number]) is None:
                context.abort.check()
                budget.spend(f"this device to enter collective {number}")
                self._changed.wait(POLL_S)
            return entered_at
