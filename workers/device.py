"""What a worker needs of a device and of what computes on it, and what platforms make theirs of.

A device holds weights, sums gradients, and moves tensors to and from the host. Host arrays are flat
NumPy views of shared memory or of fetched copies, in storage types (bf16 as uint16 bits). A whole
platform is :class:`penstock.workers.platforms.registry.WorkerPlatform`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock.config.schema import Config
from penstock.host import world
from penstock.models.binding import TORCH_DTYPES, Borrowed
from penstock.models.data.batch import MicroBatch
from penstock.models.forward_storage import ForwardStorage
from penstock.models.runtime import ModelRuntime, StageOutput
from penstock.models.torch_device import SwapStreams
from penstock.shm.memory import NodeMemory
from penstock.shm.table import BlockTable, DType

ALIGNMENT_BYTES = 256
"""Arrays of a stage start at multiples of it in the memory of a device."""

HostArray = npt.NDArray[Any]

Stamp = Any
"""A point in a device's time: a reading of ``time.perf_counter``, or something that only the device
can turn into one (:meth:`Device.seconds`).
"""


def as_tensor(array: HostArray, dtype: DType) -> torch.Tensor:
    """The array as a flat tensor of its storage type, over the same memory."""
    return torch.from_numpy(array.view(np.uint8)).view(TORCH_DTYPES[dtype])


def storage_dtype(dtype: DType) -> torch.dtype:
    """The torch type of a storage type."""
    return TORCH_DTYPES[dtype]


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy between host and device: bytes, and when it began and ended."""

    num_bytes: float
    start: Stamp
    end: Stamp


class StageBuffer(Protocol):
    """Weights of one stage on the device.

    ``tensors`` has one flat tensor, in the device's compute type, per array given to
    :meth:`Device.load`. ``copied_bytes``: 0 where they are used in place.
    """

    copied_bytes: float

    tensors: tuple[torch.Tensor, ...]
    loaded: tuple[Stamp, Stamp]
    """When the copy, or whatever brought them here, began and ended."""

    def acquire(self) -> None:
        """Work issued from now on sees the complete weights."""

    def release(self) -> None:
        """The memory may be used again once all work issued so far is done."""


class Device(Protocol):
    """One compute device of one worker. Only :meth:`load` is called from another thread."""

    torch_device: torch.device
    compute_dtype: torch.dtype
    prefetches: bool
    """Whether :meth:`load` should run early, on a background thread, because it copies on its own.
    """

    def attach(self, memory: NodeMemory, stage_bytes: int, num_buffers: int) -> None:
        """Prepare for the node's memory, and for ``num_buffers`` stages' weights at a time;
        ``stage_bytes`` is the size of the largest.
        """

    def detach(self) -> None:
        """Let go of everything :meth:`attach` prepared."""

    def start_clock(self) -> None:
        """An attempt starts on this thread; stamps mean something until the next one does."""

    def stamp(self) -> Stamp:
        """The point behind everything that was computed, or issued to be, so far; does not wait."""

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        """When stamps were passed, on the clock of ``time.perf_counter``. Waits until they are;
        each stamp is good for one call.
        """

    def passed(self, stamp: Stamp) -> bool:
        """Returns whether a stamp is passed."""

    def load(self, arrays: Sequence[HostArray]) -> StageBuffer:
        """Bring weights in; host arrays stay unchanged until the buffer is released."""

    def gradients(self, target: HostArray) -> torch.Tensor:
        """A flat fp32 tensor of zeros that will be offloaded to ``target``."""

    def offload(
        self, gradients: torch.Tensor, target: HostArray, complete: Callable[[], None]
    ) -> Copied | None:
        """Write final gradients to ``target``, then call ``complete``; may return before that.
        Returns the copy, None where they were summed in place.
        """

    def await_offloads(self, at_most: int) -> None:
        """Work issued from now on finds no more than the latest ``at_most`` offloads under way."""

    def finish(self) -> None:
        """Wait until every offload has written its last byte and called ``complete``; raise what
        went wrong.
        """

    def drop(self) -> None:
        """Like :meth:`finish`, but ``complete`` is not called any more; what went wrong is
        forgotten.
        """

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors in host memory, complete when this returns."""

    def from_host(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors on the device."""

    def swap_streams(self, distance: int | None) -> SwapStreams:
        """Returns what copies activations to the host and back, or to the device of the node whose
        number is this one's plus ``distance``; the same ones each time.
        """

    def arrival_s(self, complete_s: float | None) -> float | None:
        """Returns when the message that was last given to :meth:`from_host` had arrived; it was
        complete in host memory at ``complete_s`` (``time.perf_counter``). ``None``: nobody knows.
        """


class Runtime(Protocol):
    """Computes blocks: :class:`penstock.models.runtime.ModelRuntime`, where the methods are
    explained, or what a platform has in its place. Only the runtime that bound a block looks into
    it, and only the runtime that made an output into what it adds to a :class:`StageOutput`.
    """

    def bind(
        self,
        block: int,
        *,
        weights: torch.Tensor | None,
        frozen: torch.Tensor | None = None,
        grads: torch.Tensor | None = None,
        borrowed: Mapping[str, Borrowed] | None = None,
        sums: torch.dtype | None = None,
    ) -> Any:
        """Returns a block over flat arrays, which are not copied."""

    def bind_gradients(
        self, bound: Any, *, grads: torch.Tensor | None, borrowed: Mapping[str, torch.Tensor]
    ) -> None:
        """From now on gradients of the block add up in these flat arrays."""

    def called_with(self, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        """Returns the constants that layers are called with on such a micro-batch."""

    def forward(
        self,
        bound: Sequence[Any],
        inputs: Mapping[str, torch.Tensor],
        batch: MicroBatch,
        *,
        data_position: int,
        micro_batch_index: int,
        training: bool,
        loss_weight: float,
        checkpoints_at: Collection[int] = (),
        autograd: bool | None = None,
        storage: ForwardStorage | None = None,
        output_read: bool = True,
    ) -> StageOutput:
        """Run consecutive blocks on one micro-batch. ``output_read``: False where the caller wants
        the graph, and no values of the output.
        """

    def backward(
        self, output: Any, gradients: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Add to the bound gradients; returns those of the stage's inputs by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSite:
    """Where a platform is to run: the worker with number ``device_index`` of a run. ``table`` is
    that of the shared memory.
    """

    config: Config
    table: BlockTable
    run_dir: Path
    device_index: int

    @property
    def local_index(self) -> int:
        """The worker's number on its node."""
        return self.device_index % self.config.cluster.workers

    def model_runtime(self, device: Device) -> ModelRuntime:
        """Returns the run's model without weights, to compute on a device. Takes seconds.

        Raises:
            ConfigError: the model is impossible.
        """
        # Imported here: with transformers it takes seconds, and not every platform needs it.
        from penstock.models.attention import graphs_folder
        from penstock.models.checkpoints.constants import read_constants
        from penstock.models.compiled import Compiler
        from penstock.models.surgery.hf import load_run_config

        hf_config, model = load_run_config(self.run_dir), self.config.model
        cache = graphs_folder(self.run_dir, model.attention)
        compiler = Compiler(deterministic=model.deterministic, cache=cache)
        return ModelRuntime(
            hf_config,
            self.table,
            device=device.torch_device,
            compute_dtype=device.compute_dtype,
            seed=self.config.run.seed,
            compiler=compiler if model.compile is True else None,
            constants=read_constants(self.run_dir),
        )


class BufferPool:
    """Flat host tensors by type and length, used again because large host memory is slow at first
    touch; as many as were ever in use at once. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = world.lock()
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}

    def take(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor."""
        with self._lock:
            free = self._free.get((dtype, num_elements))
            if free:
                return free.pop()
        return torch.empty(num_elements, dtype=dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Return a tensor taken before; nobody uses it any more."""
        with self._lock:
            self._free.setdefault((tensor.dtype, tensor.numel()), []).append(tensor)

    def clear(self) -> None:
        """Frees the unused ones."""
        with self._lock:
            self._free.clear()
