"""The emulated device: weights and gradients as stored, transfers with the time they would take."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch

from penstock.host import world
from penstock.models.torch_device import SwapStreams, torch_device
from penstock.planner.cost.emulation import Emulation
from penstock.protocol.plan.resources import PlanFacts
from penstock.protocol.run.hardware.bandwidth_log import Copy
from penstock.protocol.run.hardware.peer_memory import PeerMemory
from penstock.shm.memory import NodeMemory
from penstock.shm.table import BlockTable
from penstock.workers.device import (
    BufferPool,
    Copied,
    HostArray,
    Stamp,
    as_tensor,
    storage_dtype,
)
from penstock.workers.platforms.emulated.clock import Durations, EmulatedStream, sleep_until
from penstock.workers.platforms.emulated.collectives import Rings, link_bandwidth
from penstock.workers.platforms.emulated.runtime import Deferred
from penstock.workers.telemetry.account import IdleCause
from penstock.workers.waiting import Abort

ARRIVAL = "arrival"
"""Name of the tensor with a transfer's arrival time on the clock. Its int64 values are the bits of
an fp64, and zeros up to the stored size of the transfer.
"""

_YIELD_S = 1e-3
"""Seconds that the next instruction may be late after the end of one, because of Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """The transfer that an instruction starts: the receiver, and the bytes at full size. ``node``:
    the peer's node, if it is another.
    """

    peer: int
    num_bytes: float
    bandwidth: float
    node: int | None = None


class Leave(Protocol):
    """The signature of ``NicReservations.occupy`` for transfers from a device's own node."""

    def __call__(self, ready_at: float, seconds: float, *, target: int) -> tuple[float, float]: ...


@dataclass(frozen=True, slots=True)
class _Way:
    """A path to another node."""

    leave: Leave
    node: int

    def occupy(self, ready_at: float, seconds: float) -> tuple[float, float]:
        """Reserves the path, like :meth:`EmulatedStream.occupy`."""
        return self.leave(ready_at, seconds, target=self.node)


class SwapKey(NamedTuple):
    """The common fields of a SWAP_OUT and its SWAP_IN."""

    stage: int
    micro_batch: int
    fraction: float
    peer: int | None


class EmulatedStageBuffer:
    """A stage's weights in place in host memory, usable from the end of ``loaded`` on, or from the
    end of the collective that gathers them.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        loaded: tuple[float, float],
        device: EmulatedDevice,
        gathered: Callable[[], float] | None = None,
        *,
        copied_bytes: float,
    ) -> None:
        self.tensors = tuple(tensors)
        self.copied_bytes = copied_bytes
        self.loaded = loaded
        self._device = device
        self._gathered = gathered

    def acquire(self) -> None:
        """Delays the current instruction until the weights are present."""
        here_at = self.loaded[1] if self._gathered is None else self._gathered()
        self._device.needs(here_at, IdleCause.WEIGHTS)

    def release(self) -> None:
        """Does nothing: no bytes were copied."""
        self.tensors = ()


@dataclass(frozen=True, slots=True)
class _Publication:
    gradients: torch.Tensor
    target: HostArray
    arrives_at: float
    complete: Callable[[], None]


class EmulatedDevice:
    """The :class:`penstock.workers.device.Device` of the emulated platform.

    ``compute`` is the compute stream. By (stage, micro-batch): ``dropped`` has forwards that
    dropped operators, ``deferred`` the results of BACKWARD_INPUT. ``rings`` are those of the
    attempt. ``fetches`` has, in the order of loads, their gathers (if any) and their earliest start
    (``None``: the time of the load). ``scatters`` has the reductions by backward stage. ``copies``
    has start and end of copies that the current instruction started. Between :meth:`begin` and
    :meth:`compute_for` an instruction collects its inputs.
    """

    torch_device = torch.device("cpu")
    compute_dtype = torch.float32
    prefetches = True

    def __init__(
        self,
        emulation: Emulation,
        table: BlockTable,
        announce: Callable[[Copy], None],
        leave: Leave,
        peer_memory: PeerMemory,
    ) -> None:
        """Prepares the device.

        ``table``: the stored one of the run. ``announce`` is called for copies through the node's
        memory; their rates are in bytes per second of the clock. ``leave``: reserves the NICs of
        this node and of another for a transfer. ``peer_memory``: swaps between devices of the node.
        """
        self.emulation = emulation
        self._announce = announce
        self._leave = leave
        self._peer_memory = peer_memory
        self._lodged: dict[SwapKey, int] = {}
        self.staging_bytes = 0.0
        """Bytes of the buffers that UPDATE works in."""
        self.state_bytes = 0.0
        """Bytes of residents' state."""
        self.compute = EmulatedStream()
        self.dropped: set[tuple[int, int]] = set()
        self.deferred: dict[tuple[int, int], Deferred] = {}
        self.sending: Sending | None = None
        self.copies: list[tuple[float, float]] = []
        self.rings: Rings | None = None
        self.fetches: deque[tuple[Rings | None, int, float | None]] = deque()
        self.scatters: dict[int, int] = {}
        cluster = emulation.cluster
        share = cluster.switch_bandwidth / cluster.devices_per_switch
        self._fetch_bandwidth = min(cluster.fetch_bandwidth, share)
        self._offload_bandwidth = min(cluster.offload_bandwidth, share)
        self._growth = emulation.table.num_parameters / table.num_parameters
        self._moved = self._growth if emulation.offloaded else 0.0
        self._weight_dtype, self._grad_dtype = table.weight_dtype, table.grad_dtype
        self._fetches, self._offloads = EmulatedStream(), EmulatedStream()
        self._links: dict[int, EmulatedStream] = {}
        self._guests: dict[tuple[int, bool], EmulatedStream] = {}
        self._swapped: dict[SwapKey, float] = {}
        self._back_at: dict[tuple[int, int], float] = {}
        self._leaving: list[tuple[int, float]] = []
        self._began = 0.0
        self._needed_at = 0.0
        self.awaited: IdleCause | None = None
        """Cause of the current instruction's last input."""
        self._receives = IdleCause.GRADIENTS
        self.arrived_at: float | None = None
        """Arrival time on the clock of the last received message, if its sender gave one."""
        self._idle = True
        self._durations: tuple[PlanFacts, Durations] | None = None
        self._pool = BufferPool()
        self._publisher: _Publisher | None = None

    def durations(self, facts: PlanFacts) -> Durations:
        """Returns the durations of the current plan."""
        if self._durations is None or self._durations[0] is not facts:
            self._durations = facts, Durations(facts, self.emulation.costs)
        return self._durations[1]

    def begin(self, receives: IdleCause = IdleCause.GRADIENTS) -> None:
        """Starts an instruction, which then collects its inputs; the first of an attempt starts
        now. ``receives``: the kind of data in its messages.
        """
        self._receives = receives
        self._needed_at, self.awaited = 0.0, None
        self.copies.clear()
        if self._idle:
            self._idle = False
            self.compute.occupy(world.monotonic(), 0.0)

    def needs(self, at: float, cause: IdleCause) -> None:
        """Delays the current instruction to ``at`` and records ``cause`` as the reason."""
        if at > self._needed_at:
            self._needed_at, self.awaited = at, cause

    def compute_for(self, seconds: float, abort: Abort) -> tuple[float, float]:
        """Spends emulated seconds on the compute stream; returns start and end on the clock.

        Raises:
            Interrupted: aborted.
        """
        start, end = self.compute.occupy(self._needed_at, self._scaled(seconds))
        self._began = start
        sleep_until(end, abort)
        return start, end

    def compute_between(self, ready_at: float, seconds: float, abort: Abort) -> tuple[float, float]:
        """Spends emulated seconds on the compute stream when the program does not use it; returns
        start and end on the clock. For work concurrent with the program, on another thread than the
        interpreter's.

        Raises:
            Interrupted: aborted.
        """
        while True:
            start = max(ready_at, self.compute.free_at)
            sleep_until(start + _YIELD_S, abort)  # the program's next instruction goes first
            if self.compute.free_at <= start:
                start, end = self.compute.occupy(start, self._scaled(seconds))
                sleep_until(end, abort)
                return start, end

    def copy_in(self, ready_at: float, num_bytes: float) -> float:
        """Returns the end of a copy of ``num_bytes`` emulated bytes from the host."""
        return self._copy(self._fetches, ready_at, num_bytes, self._fetch_bandwidth)

    def copy_out(self, ready_at: float, num_bytes: float) -> float:
        """Returns the end of a copy of ``num_bytes`` emulated bytes to the host."""
        return self._copy(self._offloads, ready_at, num_bytes, self._offload_bandwidth)

    def sends(self, source: int, target: int, num_bytes: float) -> None:
        """Sets the transfer that the current instruction starts, between devices of the cluster."""
        cluster = self.emulation.cluster
        node = cluster.node_of(target)
        self.sending = Sending(
            peer=target,
            num_bytes=num_bytes,
            bandwidth=link_bandwidth(cluster, source, target),
            node=None if cluster.node_of(source) == node else node,
        )

    def swap_out(self, key: SwapKey, num_bytes: float) -> None:
        """Starts to move a forward's activations to the host, or to a peer's memory."""
        stream, bandwidth, latency_s = self._way(key, out=True)
        begun = max(self.compute.free_at, stream.free_at)
        end = self._copy(stream, self.compute.free_at, num_bytes, bandwidth, key.peer is None)
        self.copies.append((begun, end))
        self._swapped[key] = end + self._scaled(latency_s)
        if key.peer is not None:
            self._lodged[key] = self._peer_memory.leave(key.peer, num_bytes, begun)

    def swap_in(self, key: SwapKey, num_bytes: float) -> None:
        """Starts to bring swapped activations back, once they are out."""
        stream, bandwidth, latency_s = self._way(key, out=False)
        ready_at = max(self.compute.free_at, self._swapped.pop(key))
        begun = max(ready_at, stream.free_at)
        end = self._copy(stream, ready_at, num_bytes, bandwidth, key.peer is None)
        self.copies.append((begun, end))
        if key.peer is not None:
            self._peer_memory.take_back(self._lodged.pop(key), end)
        place = key.stage, key.micro_batch
        back_at = end + self._scaled(latency_s)
        self._back_at[place] = max(self._back_at.get(place, 0.0), back_at)

    def await_swap(self, stage: int, micro_batch: int) -> None:
        """Delays the current instruction until swapped activations are back."""
        self.needs(self._back_at.get((stage, micro_batch), 0.0), IdleCause.ACTIVATIONS)

    def swapped_share(self, stage: int, micro_batch: int) -> float:
        """Returns the share of a forward's activations that has left the device by now."""
        return sum(
            key.fraction
            for key, out_at in self._swapped.items()
            if (key.stage, key.micro_batch) == (stage, micro_batch) and out_at <= self._now
        )

    @property
    def leaving_elements(self) -> float:
        """Elements of leaving gradient sums, at full size. Their copies to the host had not ended
        when the latest compute instruction began.
        """
        return sum(count for count, until in self._leaving if until > self._began) * self._growth

    @property
    def lodged_bytes(self) -> float:
        """Bytes that other devices had swapped to this one while the latest compute instruction
        ran, as far as announced.
        """
        return self._peer_memory.bytes_here(self._began, self.compute.free_at)

    @property
    def _now(self) -> float:
        """The device's present time on the clock."""
        return max(self._needed_at, self.compute.free_at)

    def _way(self, key: SwapKey, *, out: bool) -> tuple[EmulatedStream, float, float]:
        """Returns stream, bytes/s and latency of a swap."""
        cluster = self.emulation.cluster
        if key.peer is not None:
            link = self._guests.setdefault((key.peer, out), EmulatedStream())
            return link, cluster.peer_bandwidth, cluster.latency_s
        if out:
            return self._offloads, self._offload_bandwidth, 0.0
        return self._fetches, self._fetch_bandwidth, 0.0

    def attach(self, memory: NodeMemory, stage_bytes: int, num_buffers: int) -> None:
        """Starts the thread that writes gradients."""
        self._publisher = _Publisher(self._publish)

    def detach(self) -> None:
        """Ends the publishing thread, and frees the pooled buffers."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        self._pool.clear()

    def start_clock(self) -> None:
        """Does nothing: the clock is that of all processes."""

    def stamp(self) -> float:
        """Returns the time of issue; :meth:`compute_for` has the time of computation."""
        return world.monotonic()

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        """Returns the stamps, which are seconds; ``time.perf_counter`` reads the same clock on
        Linux.
        """
        return list(stamps)

    def passed(self, stamp: Stamp) -> bool:
        """Returns True: the computing thread sleeps until then."""
        return True

    def load(self, arrays: Sequence[HostArray]) -> EmulatedStageBuffer:
        """Loads weights in modelled time. The fetch starts when its weights are ready, or after the
        one before it.
        """
        num_bytes = sum(array.nbytes for array in arrays) * self._moved
        rings, number, ready_at = self.fetches.popleft() if self.fetches else (None, 0, None)
        if ready_at is None:
            ready_at = world.monotonic()
        if rings is not None:
            num_bytes /= rings.num_devices
        begun = max(ready_at, self._fetches.free_at)
        arrives_at = self._copy(self._fetches, ready_at, num_bytes, self._fetch_bandwidth)
        tensors = [as_tensor(array, self._weight_dtype) for array in arrays]
        if rings is None:
            return EmulatedStageBuffer(tensors, (begun, arrives_at), self, copied_bytes=num_bytes)
        rings.enter(number, arrives_at)
        return EmulatedStageBuffer(
            tensors,
            (begun, arrives_at),
            self,
            partial(rings.end, number),
            copied_bytes=num_bytes,
        )

    def gradients(self, target: HostArray) -> torch.Tensor:
        """Returns a private sum of zeros."""
        return self._pool.take(target.size, torch.float32).zero_()

    def offload(
        self, gradients: torch.Tensor, target: HostArray, complete: Callable[[], None]
    ) -> Copied:
        """Offloads in modelled time: writes the gradients at the end of the copy, which starts
        after the current instruction's inputs.
        """
        num_bytes = target.nbytes * self._moved
        begun = max(self._now, self._offloads.free_at)
        arrives_at = self._copy(self._offloads, self._now, num_bytes, self._offload_bandwidth)
        self.copies.append((begun, arrives_at))
        assert self._publisher is not None, "not attached"
        self._leaving.append((target.size, arrives_at))
        self._publisher.put(_Publication(gradients, target, arrives_at, complete))
        return Copied(num_bytes, begun, arrives_at)

    def await_offloads(self, at_most: int) -> None:
        """Delays the current instruction until at most ``at_most`` sums are leaving."""
        if len(self._leaving) > at_most:
            self.needs(self._leaving[-1 - at_most][1], IdleCause.GRADIENTS)

    def finish(self) -> None:
        """Waits for the last copy."""
        if self._publisher is not None:
            self._publisher.wait(discard=False)

    def drop(self) -> None:
        """Discards current offloads without writing them; the attempt is over."""
        if self._publisher is not None:
            self._publisher.wait(discard=True)
        self.compute, self._fetches, self._offloads = (
            EmulatedStream(),
            EmulatedStream(),
            EmulatedStream(),
        )
        for kept in (self._links, self._guests, self._swapped, self._back_at, self.deferred):
            kept.clear()
        self._lodged.clear()
        self._peer_memory.clear()
        self.fetches.clear()
        self.scatters.clear()
        self.rings = None
        self.dropped.clear()
        self._leaving.clear()
        self._idle = True

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns a message of the stored size with its arrival time. The messages of a collective
        are the tensors alone: its times are computed elsewhere.
        """
        sending, self.sending = self.sending, None
        if sending is None:
            return dict(tensors)
        link = self._links.setdefault(sending.peer, EmulatedStream())
        # Through the host a message is written to memory and read from it.
        crossings = 2 if self.emulation.cluster.peer_through_host else 0
        sent_at = self._copy(
            link if sending.node is None else _Way(self._leave, sending.node),
            self.compute.free_at,
            sending.num_bytes,
            sending.bandwidth,
            crossings,
        )
        arrives_at = sent_at + self._scaled(self.emulation.cluster.latency_s)
        arrival = torch.zeros(max(1, int(sending.num_bytes / self._growth / 8)), dtype=torch.int64)
        arrival[:1] = torch.tensor([arrives_at], dtype=torch.float64).view(torch.int64)
        return {**tensors, ARRIVAL: arrival}

    def from_host(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Delays the current instruction until the message arrives."""
        self.arrived_at = None
        if ARRIVAL not in tensors:
            return dict(tensors)
        self.arrived_at = float(tensors[ARRIVAL][:1].view(torch.float64)[0])
        self.needs(self.arrived_at, self._receives)
        return {name: tensor for name, tensor in tensors.items() if name != ARRIVAL}

    def swap_streams(self, distance: int | None) -> SwapStreams:
        """Returns streams that copy within host memory."""
        return torch_device(self.torch_device).swap_streams(distance)

    def arrival_s(self, complete_s: float | None) -> float | None:
        """Returns when the message arrives on the device's clock, if its sender said so."""
        return self.arrived_at

    def _copy(
        self,
        stream: EmulatedStream | _Way,
        ready_at: float,
        num_bytes: float,
        bandwidth: float,
        crossings: int = 1,
    ) -> float:
        """Returns the end of a copy that crosses the node's memory ``crossings`` times."""
        start, end = stream.occupy(ready_at, self._scaled(num_bytes / bandwidth))
        if crossings and end > start:
            self._announce(Copy(start, end, crossings * num_bytes / (end - start)))
        return end

    def _scaled(self, seconds: float) -> float:
        return seconds * self.emulation.time_scale

    def _publish(self, offload: _Publication) -> None:
        as_tensor(offload.target, self._grad_dtype).copy_(
            offload.gradients.to(storage_dtype(self._grad_dtype))
        )
        self._pool.give(offload.gradients)
        offload.complete()


class _Publisher:
    """Writes gradients at the end of their modelled copy, in order, on a separate thread."""

    def __init__(self, publish: Callable[[_Publication], None]) -> None:
        self._publish = publish
        self._queue: queue.SimpleQueue[_Publication | None] = world.queue()
        self._changed = world.condition()
        self._pending = 0
        self._discard = False
        self._error: Exception | None = None
        self._thread = world.thread(target=self._work, name="worker-offload", daemon=True)
        self._thread.start()

    def put(self, offload: _Publication) -> None:
        with self._changed:
            self._pending += 1
        self._queue.put(offload)

    def wait(self, *, discard: bool) -> None:
        """Waits until no offload is pending. ``discard``: nothing more is written, and errors are
        ignored.
        """
        with self._changed:
            self._discard = discard
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pending)
            error, self._error, self._discard = self._error, None, False
        if error is not None and not discard:
            raise error

    def close(self) -> None:
        """Ends the thread; no offload is pending."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (offload := self._queue.get()) is not None:
            try:
                if self._due(offload) and self._error is None:
                    self._publish(offload)
            except Exception as error:  # kept for the interpreter, which raises it in finish()
                self._error = self._error or error
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()

    def _due(self, offload: _Publication) -> bool:
        """Waits for the copy's end; returns False if pending offloads are discarded."""
        with self._changed:
            while not self._discard:
                left_s = offload.arrives_at - world.monotonic()
                if left_s <= 0.0:
                    return True
                self._changed.wait(left_s)
            return False
