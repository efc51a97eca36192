"""CUDA device: copies weights in and gradients out on separate streams, concurrent with the
computation.

Four streams: compute (the current stream), weights in, gradients out, and messages of peers in.
Weight buffers have the size of a stage. Their number is that of the plan's concurrent fetches.
Streamed weights have one buffer in use and one arriving; resident weights have one per stage.

Gradients are summed in fp32 on the device and converted there, on their way out (Deep Optimizer
States, section 4.1). So fewer bytes cross the bus, and no CPU thread converts. :mod:`.pinned`
manages the host's memory, :mod:`.clock` the time.

The host waits for the device in four places only:

* where a message leaves through host memory;
* on the thread that announces gradients;
* at the end of an attempt;
* in the first backward of a stage, for sums that were to leave two stages ago.

CUDA keeps a current device per thread. Each thread sets it on entry, because torch would otherwise
make a second context on GPU 0.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.host.errors import CapacityError, ConfigError, LostMemberError
from penstock.models.gpu import CudaGpu, Event, Gpu, Stream
from penstock.models.torch_device import GpuDevice, SwapStreams
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import NodeMemory
from penstock.shm.table import DType
from penstock.workers.device import (
    ALIGNMENT_BYTES,
    Copied,
    HostArray,
    Stamp,
    as_tensor,
    storage_dtype,
)
from penstock.workers.platforms.cuda.clock import EventClock
from penstock.workers.platforms.cuda.pinned import Registrations, StagingPool

_TIMEOUT_S = 600.0
_REGISTERED = (SegmentKind.WEIGHTS, SegmentKind.FROZEN, SegmentKind.GRADS, SegmentKind.STATE)
"""Segments that the worker maps; state only if it updates blocks."""

_log = logging.getLogger(__name__)


def aligned(num_bytes: int) -> int:
    """Returns the size rounded up to the next possible start of an array."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(slots=True)
class _WeightBuffer:
    """Device memory of one stage; ``free`` is recorded behind the last work that reads it."""

    memory: torch.Tensor
    free: Event


class CudaStageBuffer:
    """A stage's weights in one of the buffers."""

    def __init__(
        self,
        gpu: Gpu,
        tensors: Sequence[torch.Tensor],
        arrived: Event,
        loaded: tuple[Stamp, Stamp],
        give: Callable[[], None],
    ) -> None:
        self._gpu = gpu
        self.tensors = tuple(tensors)
        self.copied_bytes: float = sum(tensor.nbytes for tensor in self.tensors)
        self.loaded = loaded
        self._arrived = arrived
        self._give = give

    def acquire(self) -> None:
        """Makes the compute stream wait for the copies."""
        self._gpu.current_stream().wait_event(self._arrived)

    def release(self) -> None:
        """Makes the next copies into this buffer wait for the work issued so far."""
        self.tensors = ()
        self._give()


@dataclass(frozen=True, slots=True)
class _Offload:
    """Gradients on their way to the host; ``source`` must stay until ``copied``."""

    copied: Event
    source: torch.Tensor
    complete: Callable[[], None]


class _OffloadThread:
    """Calls ``complete`` after the bytes have arrived, in the order of the offloads."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._queue: queue.SimpleQueue[_Offload | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending = 0
        self._discard = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="worker-offload", daemon=True)
        self._thread.start()

    def put(self, offload: _Offload) -> None:
        with self._changed:
            self._pending += 1
        self._queue.put(offload)

    def wait(self, *, discard: bool) -> None:
        """Waits until no copy is pending. ``discard``: without calls of ``complete``, and without
        errors.
        """
        with self._changed:
            self._discard = discard
            self.wait_for_all_but(0)
            error, self._error, self._discard = self._error, None, False
        if error is not None and not discard:
            raise error

    def wait_for_all_but(self, at_most: int) -> None:
        """Waits until at most ``at_most`` copies are pending."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._pending <= at_most, _TIMEOUT_S):
                raise LostMemberError(
                    f"waited {_TIMEOUT_S:g} s for {self._pending - at_most} copies of gradients to"
                    " the host: the GPU hangs, or is used by others"
                )

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        self._gpu.make_current()
        while (offload := self._queue.get()) is not None:
            try:
                offload.copied.synchronize()
                if not self._discard and self._error is None:
                    offload.complete()
            except Exception as error:  # kept for the interpreter, which raises it in finish()
                self._error = self._error or error
            del offload  # its gradients would stay until the next one
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()


class CudaDevice:
    """A :class:`penstock.workers.device.Device` that computes in the weights' type."""

    prefetches = True

    def __init__(
        self, gpu: Gpu, *, weight_dtype: DType, grad_dtype: DType, pins: bool = True
    ) -> None:
        """Prepares a GPU.

        ``gpu``: :func:`gpu_of`. ``pins``: True if the driver is to pin the host's memory.
        """
        self.torch_device = gpu.device
        self._gpu = gpu
        gpu.make_current()
        self.compute_dtype = storage_dtype(weight_dtype)
        self._weight_dtype = weight_dtype
        self._grad_dtype = grad_dtype
        self._in, self._out, self._received = (gpu.stream() for _ in range(3))
        self._buffers: queue.SimpleQueue[_WeightBuffer] = queue.SimpleQueue()
        self._num_buffers = 0
        self._free_sums: dict[int, queue.SimpleQueue[torch.Tensor]] = {}
        self._narrow = torch.empty(0)
        self._registrations = Registrations(gpu.register, gpu.unregister, pins=pins)
        self._staging = StagingPool(self._registrations)
        self._clock = EventClock(gpu)
        self._swaps = GpuDevice(gpu)
        self._offloads: _OffloadThread | None = None

    def attach(self, memory: NodeMemory, stage_bytes: int, num_buffers: int) -> None:
        """Registers the segments and allocates the weight buffers.

        Raises:
            CapacityError: the driver refuses the host's memory, or the device has too little.
        """
        self.detach()
        start = time.perf_counter()
        for kind in _REGISTERED:
            buffer = memory.segment_buffer(kind)
            if buffer is None:
                continue
            if kind is SegmentKind.FROZEN and memory.spec.bases:
                self._registrations.add_read_only("bases", buffer, memory.spec.frozen_ranges())
                continue
            ranges = memory.spec.layout.arrays.values()
            starts = [place.offset for place in ranges if place.segment is kind]
            self._registrations.add(f"segment {kind.value}", buffer, starts)
        _log.info(
            "%d bytes of shared memory registered in %.1f s",
            self._registrations.num_bytes,
            time.perf_counter() - start,
        )
        self._num_buffers = num_buffers
        try:
            for _ in range(num_buffers):
                place = torch.empty(stage_bytes, dtype=torch.uint8, device=self.torch_device)
                self._buffers.put(_WeightBuffer(place, self._gpu.event()))
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"GPU {self.torch_device.index} has no room for {num_buffers} weight buffers of"
                f" {stage_bytes} bytes; use more stages, a scheme that streams weights"
                " (schedule.scheme: spipe or mobius), or a smaller share of the GPU for others"
            ) from error

    def detach(self) -> None:
        """Ends all work, unregisters memory, and frees the buffers."""
        try:
            self._gpu.synchronize()
        finally:
            if self._offloads is not None:
                self._offloads.close()
                self._offloads = None
            while not self._buffers.empty():
                self._buffers.get()
            self._free_sums.clear()
            self._narrow = torch.empty(0)
            # Messages on their way may lie in memory of the old pool, which is never handed out
            # again.
            self._staging = StagingPool(self._registrations)
            self._registrations.close()

    def start_clock(self) -> None:
        """Waits for the work of an earlier attempt on the device."""
        self._gpu.make_current()
        self._clock.start(self._gpu.current_stream())

    def stamp(self) -> Stamp:
        """Returns an event on the compute stream."""
        return self._clock.stamp(self._gpu.current_stream())

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        """Returns the times of events on any stream."""
        return self._clock.seconds(stamps)

    def passed(self, stamp: Stamp) -> bool:
        """Returns whether the device has come to an event; does not wait."""
        return isinstance(stamp, float) or bool(stamp.query())

    def load(self, arrays: Sequence[HostArray]) -> CudaStageBuffer:
        """Starts the copies of a stage into the free buffer."""
        self._gpu.make_current()
        buffer = self._free_buffer()
        tensors, offset = [], 0
        with self._gpu.on(self._in):
            # Work issued before the buffer's release may still read it.
            self._in.wait_event(buffer.free)
            begun = self._clock.stamp(self._in)
            for array in arrays:
                host = as_tensor(array, self._weight_dtype)
                place = buffer.memory[offset : offset + array.nbytes].view(host.dtype)
                # Asynchronous where the memory is registered. Copies fetched from other nodes are
                # pageable: the driver has taken their bytes when this returns.
                tensors.append(place.copy_(host, non_blocking=True))
                offset += aligned(array.nbytes)
            loaded = begun, self._clock.stamp(self._in)
            arrived = self._gpu.event()
            arrived.record(self._in)

        def give() -> None:
            buffer.free.record(self._gpu.current_stream())
            self._buffers.put(buffer)

        return CudaStageBuffer(self._gpu, tensors, arrived, loaded, give)

    def _free_buffer(self) -> _WeightBuffer:
        try:
            return self._buffers.get(timeout=_TIMEOUT_S)
        except queue.Empty as error:
            raise LostMemberError(
                f"waited {_TIMEOUT_S:g} s for a free weight buffer of {self._num_buffers}:"
                " the plan fetches a stage before it releases another"
            ) from error

    def gradients(self, target: HostArray) -> torch.Tensor:
        """Returns an fp32 sum of zeros on the device."""
        try:
            return self._free(target.size).get_nowait().zero_()
        except queue.Empty:
            return torch.zeros(target.size, dtype=torch.float32, device=self.torch_device)

    def _free(self, num_elements: int) -> queue.SimpleQueue[torch.Tensor]:
        """Returns the sums that have left; the offload thread puts them back."""
        return self._free_sums.setdefault(num_elements, queue.SimpleQueue())

    def offload(
        self, gradients: torch.Tensor, target: HostArray, complete: Callable[[], None]
    ) -> Copied:
        """Converts and copies on the outgoing stream; the offload thread calls ``complete``."""
        # The backwards that add to the sum run on the compute stream.
        self._out.wait_stream(self._gpu.current_stream())
        with self._gpu.on(self._out):
            begun = self._clock.stamp(self._out)
            converted = self._converted(gradients)
            as_tensor(target, self._grad_dtype).copy_(converted, non_blocking=True)
            ended = self._clock.stamp(self._out)
            copied = self._gpu.event(blocking=True)
            copied.record(self._out)

        def finished() -> None:
            # The copy has read the sum: only now may another stage add to its memory.
            self._free(gradients.numel()).put(gradients)
            complete()

        if self._offloads is None:
            self._offloads = _OffloadThread(self._gpu)
        self._offloads.put(_Offload(copied, gradients, finished))
        return Copied(target.nbytes, begun, ended)

    def _converted(self, gradients: torch.Tensor) -> torch.Tensor:
        """Returns the gradients in the published type, on the outgoing stream.

        One buffer serves all: the stream converts, copies, and only then converts the next. When it
        grows, the allocator reuses the smaller one behind the copies of this stream.
        """
        dtype = storage_dtype(self._grad_dtype)
        if dtype is gradients.dtype:
            return gradients
        if self._narrow.numel() < gradients.numel():
            self._narrow = torch.empty(gradients.numel(), dtype=dtype, device=self.torch_device)
        return self._narrow[: gradients.numel()].copy_(gradients)

    def await_offloads(self, at_most: int) -> None:
        """Blocks the host: the memory of sums that have left is reused."""
        if self._offloads is not None:
            self._offloads.wait_for_all_but(at_most)

    def finish(self) -> None:
        """Waits for the offload thread."""
        if self._offloads is not None:
            self._offloads.wait(discard=False)

    def drop(self) -> None:
        """Lets copies end without an announcement."""
        if self._offloads is not None:
            self._offloads.wait(discard=True)

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies to registered memory; waits for the copies, and so for the computation of the
        tensors.
        """
        copies: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            staged = self._staging.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            copies[name] = staged.copy_(tensor, non_blocking=True)
        self._wait_for(self._gpu.current_stream())
        return copies

    def from_host(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies on a separate stream, so that the copies need not wait for the computation.

        The tensors are pageable: the driver has taken their bytes when this returns.
        """
        compute = self._gpu.current_stream()
        with self._gpu.on(self._received):
            arriving = {
                name: tensor.to(self.torch_device, non_blocking=True)
                for name, tensor in tensors.items()
            }
        # Work issued from now on reads the received tensors.
        compute.wait_stream(self._received)
        for tensor in arriving.values():
            # Allocated for the other stream: the allocator must not reuse the memory while this one
            # reads it.
            self._gpu.keep_for(tensor, compute)
        return arriving

    def swap_streams(self, distance: int | None) -> SwapStreams:
        """Returns streams of their own, see :meth:`GpuDevice.swap_streams`."""
        return self._swaps.swap_streams(distance)

    def arrival_s(self, complete_s: float | None) -> float | None:
        """Returns when the message was complete in host memory."""
        return complete_s

    def _wait_for(self, stream: Stream) -> None:
        reached = self._gpu.event(blocking=True)
        reached.record(stream)
        reached.synchronize()


def gpu_of(worker: int) -> CudaGpu:
    """Returns the GPU of a worker, by its number on the node; with more workers than GPUs some
    share one.

    Raises:
        ConfigError: there is no GPU; names the reason.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus == 0:
        why = (
            f"torch {torch.__version__} is a build for CPUs; install one for CUDA"
            if torch.version.cuda is None
            else "torch finds none (driver, CUDA_VISIBLE_DEVICES)"
        )
        raise ConfigError(
            f"cluster.device cuda: worker {worker} of this node needs a GPU, there are 0: {why}, or"
            " use cluster.device: cpu"
        )
    if worker >= num_gpus:
        _log.warning("worker %d shares GPU %d of %d", worker, worker % num_gpus, num_gpus)
    return CudaGpu(torch.device("cuda", worker % num_gpus))
