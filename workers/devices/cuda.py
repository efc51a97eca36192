"""CUDA device: copies weights in and gradients out on streams of their own, beside the computation.

Three streams: host-to-device, compute (the current stream), device-to-host. Stage-sized weight
buffers, as many as the plan fetches at a time: one in use and one arriving where weights are
streamed, one for each stage where they are resident. Gradients are summed in fp32 on the device and
converted on their way out. The node's segments are registered with the driver when they are
attached, so that copies run at full speed: in pieces of at most 64 GiB, because one registration of
more fails on common drivers.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.protocol.errors import CapacityError, ConfigError, LostMemberError
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import NodeMemory
from penstock.shm.table import DType
from penstock.workers.devices.base import HostArray, as_tensor, storage_dtype

REGISTER_BYTES = 64 << 30
ALIGNMENT_BYTES = 256
_BUFFER_TIMEOUT_S = 300.0
_REGISTERED = (SegmentKind.WEIGHTS, SegmentKind.FROZEN, SegmentKind.GRADS)

_log = logging.getLogger(__name__)


def aligned(num_bytes: int) -> int:
    """Round up to where the next array may start."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(slots=True)
class _WeightBuffer:
    """Device memory of one stage; ``free`` is recorded behind the last work that reads it."""

    memory: torch.Tensor
    free: torch.cuda.Event


class CudaStageBuffer:
    """A stage's weights in one of the buffers."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], arrived: torch.cuda.Event, give: Callable[[], None]
    ) -> None:
        self.tensors = tuple(tensors)
        self._arrived = arrived
        self._give = give

    def acquire(self) -> None:
        """The compute stream waits for the copies."""
        torch.cuda.current_stream().wait_event(self._arrived)

    def release(self) -> None:
        """The next copies into this buffer wait for the work issued so far."""
        self.tensors = ()
        self._give()


class _Registration:
    """Host memory known to the driver."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._addresses: list[int] = []
        try:
            for buffer in buffers:
                self._register(buffer)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unregister everything."""
        while self._addresses:
            self._runtime.cudaHostUnregister(self._addresses.pop())

    def _register(self, buffer: memoryview) -> None:
        start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        for offset in range(0, len(buffer), REGISTER_BYTES):
            size = min(REGISTER_BYTES, len(buffer) - offset)
            status = self._runtime.cudaHostRegister(start + offset, size, 0)
            if int(status) != 0:
                raise CapacityError(
                    f"cudaHostRegister of {size} bytes of shared memory failed (error"
                    f" {int(status)}); raise the locked-memory limit (ulimit -l)"
                )
            self._addresses.append(start + offset)


@dataclass(frozen=True, slots=True)
class _Offload:
    """Gradients on their way to the host; ``source`` must stay until ``copied``."""

    copied: torch.cuda.Event
    source: tuple[torch.Tensor, ...]
    complete: Callable[[], None]


class _OffloadThread:
    """Calls ``complete`` once the bytes are there, in the order of the offloads."""

    def __init__(self) -> None:
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
        """Until nothing is pending. ``discard``: without ``complete``, and forget errors."""
        with self._changed:
            self._discard = discard
            self._changed.wait_for(lambda: not self._pending)
            error, self._error, self._discard = self._error, None, False
        if error is not None and not discard:
            raise error

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (offload := self._queue.get()) is not None:
            try:
                offload.copied.synchronize()
                if not self._discard and self._error is None:
                    offload.complete()
            except Exception as error:  # kept for the interpreter, which raises it in finish()
                self._error = self._error or error
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()


class CudaDevice:
    """See :class:`penstock.workers.devices.base.Device`. Computes in the weights' storage type."""

    prefetches = True

    def __init__(self, index: int, *, weight_dtype: DType, grad_dtype: DType) -> None:
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise ConfigError(
                f"cluster.device cuda: worker {index} of this node needs GPU {index}, there are"
                f" {torch.cuda.device_count()}; lower cluster.workers or use cluster.device: cpu"
            )
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.compute_dtype = storage_dtype(weight_dtype)
        self._weight_dtype = weight_dtype
        self._grad_dtype = grad_dtype
        self._in = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._buffers: queue.SimpleQueue[_WeightBuffer] = queue.SimpleQueue()
        self._num_buffers = 0
        self._free_sums: dict[int, list[torch.Tensor]] = {}
        self._registration: _Registration | None = None
        self._offloads = _OffloadThread()

    def attach(self, memory: NodeMemory, stage_bytes: int, num_buffers: int) -> None:
        """Register the segments and allocate the weight buffers."""
        self.detach()
        found = [memory.segment_buffer(kind) for kind in _REGISTERED]
        self._registration = _Registration([buffer for buffer in found if buffer is not None])
        self._num_buffers = num_buffers
        for _ in range(num_buffers):
            device_bytes = torch.empty(stage_bytes, dtype=torch.uint8, device=self.torch_device)
            free = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._buffers.put(_WeightBuffer(device_bytes, free))

    def detach(self) -> None:
        """Unregister, and free the buffers."""
        torch.cuda.synchronize(self.torch_device)
        while not self._buffers.empty():
            self._buffers.get()
        self._free_sums.clear()
        if self._registration is not None:
            self._registration.close()
            self._registration = None

    def load(self, arrays: Sequence[HostArray]) -> CudaStageBuffer:
        """Start the copies of a stage into the free buffer."""
        try:
            buffer = self._buffers.get(timeout=_BUFFER_TIMEOUT_S)
        except queue.Empty as error:
            raise LostMemberError(
                f"waited {_BUFFER_TIMEOUT_S:g} s for a free weight buffer of {self._num_buffers}:"
                " the plan fetches a stage before it releases another"
            ) from error
        tensors, offset = [], 0
        with torch.cuda.stream(self._in):
            self._in.wait_event(buffer.free)
            for array in arrays:
                host = as_tensor(array, self._weight_dtype)
                place = buffer.memory[offset : offset + array.nbytes].view(host.dtype)
                tensors.append(place.copy_(host, non_blocking=True))
                offset += aligned(array.nbytes)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._in)

        def give() -> None:
            buffer.free.record(torch.cuda.current_stream(self.torch_device))
            self._buffers.put(buffer)

        return CudaStageBuffer(tensors, arrived, give)

    def gradients(self, target: HostArray) -> torch.Tensor:
        """An fp32 sum on the device."""
        free = self._free_sums.get(target.size)
        if free:
            return free.pop().zero_()
        return torch.zeros(target.size, dtype=torch.float32, device=self.torch_device)

    def offload(
        self, gradients: torch.Tensor, target: HostArray, complete: Callable[[], None]
    ) -> None:
        """Convert and copy on the outgoing stream; ``complete`` is called on the offload thread."""
        self._out.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._out):
            converted = gradients.to(storage_dtype(self._grad_dtype))
            as_tensor(target, self._grad_dtype).copy_(converted, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._out)

        def finished() -> None:
            self._free_sums.setdefault(gradients.numel(), []).append(gradients)
            complete()

        self._offloads.put(_Offload(copied, (gradients, converted), finished))

    def finish(self) -> None:
        """Wait for the offload thread."""
        self._offloads.wait(discard=False)

    def drop(self) -> None:
        """Let copies end without saying so."""
        self._offloads.wait(discard=True)

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Blocking copies."""
        return {name: tensor.to("cpu") for name, tensor in tensors.items()}

    def from_host(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies on the compute stream."""
        return {name: tensor.to(self.torch_device) for name, tensor in tensors.items()}
