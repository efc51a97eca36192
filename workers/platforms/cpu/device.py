"""CPU device: computes in fp32.

Arrays in fp32 are never copied: weights are read in place in shared memory, and gradients are
summed where the optimizer reads them. Weights in 16 bits are widened per stage. Gradients in 16
bits are summed in fp32 and rounded once, at their publication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from penstock.host import world
from penstock.models.torch_device import SwapStreams, host_memory, torch_device
from penstock.shm.memory import NodeMemory
from penstock.shm.table import DType
from penstock.workers.device import BufferPool, Copied, HostArray, Stamp, as_tensor


class CpuStageBuffer:
    """Views of shared memory, or widened copies that go back to the pool."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        pool: BufferPool | None,
        start_s: float,
        copied_bytes: float = 0.0,
    ) -> None:
        self.tensors = tuple(tensors)
        self.copied_bytes = copied_bytes
        self.loaded = start_s, world.perf_counter()
        self._pool = pool

    def acquire(self) -> None:
        """Does nothing: the weights are complete from the start."""

    def release(self) -> None:
        """Gives copies back at once: no work that reads them is in progress on a CPU."""
        if self._pool is not None:
            for tensor in self.tensors:
                self._pool.give(tensor)
        self.tensors = ()


class CpuDevice:
    """See :class:`penstock.workers.device.Device`."""

    torch_device = torch.device("cpu")
    compute_dtype = torch.float32
    prefetches = False

    def __init__(self, *, weight_dtype: DType, grad_dtype: DType) -> None:
        self._weight_dtype = weight_dtype
        self._grad_dtype = grad_dtype
        self._pool = BufferPool()

    def attach(self, memory: NodeMemory, stage_bytes: int, num_buffers: int) -> None:
        """Does nothing: a CPU needs no preparation."""

    def detach(self) -> None:
        """Frees the pooled buffers."""
        self._pool.clear()

    def start_clock(self) -> None:
        """Does nothing: ``world.perf_counter`` runs."""

    def stamp(self) -> float:
        """Returns the current time: work on a CPU is done when it returns."""
        return world.perf_counter()

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        """Returns the stamps, which are seconds."""
        return list(stamps)

    def passed(self, stamp: Stamp) -> bool:
        """Returns True, see :meth:`stamp`."""
        return True

    def load(self, arrays: Sequence[HostArray]) -> CpuStageBuffer:
        """Returns flat fp32 tensors: views of the arrays, or copies that the compute threads of the
        calling thread widen.
        """
        start_s = world.perf_counter()
        stored = [as_tensor(array, self._weight_dtype) for array in arrays]
        if self._weight_dtype is DType.FP32:
            return CpuStageBuffer(stored, None, start_s)
        widened = [self._pool.take(t.numel(), torch.float32).copy_(t) for t in stored]
        copied_bytes = sum(array.nbytes for array in arrays)
        return CpuStageBuffer(widened, self._pool, start_s, copied_bytes)

    def gradients(self, target: HostArray) -> torch.Tensor:
        """Returns zeros, fp32, of the length of ``target``: ``target`` itself if it is fp32, or a
        private sum, so that a 16-bit gradient is rounded once and not with every micro-batch.
        """
        if self._grad_dtype is DType.FP32:
            return as_tensor(target, DType.FP32).zero_()
        return self._pool.take(target.size, torch.float32).zero_()

    def offload(
        self, gradients: torch.Tensor, target: HostArray, complete: Callable[[], None]
    ) -> Copied | None:
        """Rounds to 16 bits if gradients are stored so; fp32 sums are in place already."""
        start_s, in_place = world.perf_counter(), self._grad_dtype is DType.FP32
        if not in_place:
            as_tensor(target, self._grad_dtype).copy_(gradients)
            self._pool.give(gradients)
        complete()
        return None if in_place else Copied(target.nbytes, start_s, world.perf_counter())

    def await_offloads(self, at_most: int) -> None:
        """Does nothing: no offload is in progress."""

    def finish(self) -> None:
        """Does nothing: no offload is in progress."""

    def drop(self) -> None:
        """Does nothing: no offload is in progress."""

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns copies in host memory, so that unsent messages do not count as device memory."""
        return {name: _host_copy(tensor) for name, tensor in tensors.items()}

    def from_host(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors: the device computes in host memory."""
        return dict(tensors)

    def swap_streams(self, distance: int | None) -> SwapStreams:
        """Returns copies within host memory."""
        return torch_device(self.torch_device).swap_streams(distance)

    def arrival_s(self, complete_s: float | None) -> float | None:
        """Returns when the message was complete."""
        return complete_s


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    source = tensor.detach()
    copy = host_memory(source.numel() * source.itemsize).view(source.dtype).view(source.shape)
    return copy.copy_(source)
