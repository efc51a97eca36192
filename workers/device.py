"""The interfaces between a worker and its device; each platform implements them.

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
"""A point in a device's time: a reading of ``time.perf_counter``, or an object that only the device
can convert to one (:meth:`Device.seconds`).
"""


def as_tensor(array: HostArray, dtype: DType) -> torch.Tensor:
    """Returns the array as a flat tensor of its storage type, over the same memory."""
    return torch.from_numpy(array.view(np.uint8)).view(TORCH_DTYPES[dtype])


def storage_dtype(dtype: DType) -> torch.dtype:
    """Returns the torch type of a storage type."""
    return TORCH_DTYPES[dtype]


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy between host and device: bytes, start and end."""

    num_bytes: float
    start: Stamp
    end: Stamp


class StageBuffer(Protocol):
    """Weights of one stage on the device.

    ``tensors`` has one flat tensor, in the device's compute type, per array given to
    :meth:`Device.load`. ``copied_bytes``: 0 if the device reads them in place.
    """

    copied_bytes: float

    tensors: tuple[torch.Tensor, ...]
    loaded: tuple[Stamp, Stamp]
    """Start and end of the copy, or of another way to load the weights."""

    def acquire(self) -> None:
        """Orders work issued from now on after the load: it sees the complete weights."""

    def release(self) -> None:
        """Releases the memory for reuse after all work issued so far."""


class Device(Protocol):
    """One compute device of one worker. Only :meth:`load` is called from another thread."""

    torch_device: torch.device
    compute_dtype: torch.dtype
    prefetches: bool
    """True if :meth:`load` should run early, on a background thread, because it copies
    asynchronously.
    """

    def attach(self, memory: NodeMemory, stage_bytes: int, num_buffers: int) -> None:
        """Prepares for the node's memory, and for ``num_buffers`` stages' weights at a time.
        ``stage_bytes`` is the size of the largest.
        """

    def detach(self) -> None:
        """Releases everything that :meth:`attach` prepared."""

    def start_clock(self) -> None:
        """Starts an attempt's clock on this thread; its stamps are valid until the next call."""

    def stamp(self) -> Stamp:
        """Returns a stamp after all work computed or issued so far; does not wait."""

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        """Returns the times at which stamps were passed, on the clock of ``time.perf_counter``.
        Waits until they are passed; each stamp is valid for one call.
        """

    def passed(self, stamp: Stamp) -> bool:
        """Returns whether a stamp is passed."""

    def load(self, arrays: Sequence[HostArray]) -> StageBuffer:
        """Loads weights; host arrays stay unchanged until the buffer is released."""

    def gradients(self, target: HostArray) -> torch.Tensor:
        """Returns a flat fp32 tensor of zeros; a later :meth:`offload` writes it to ``target``."""

    def offload(
        self, gradients: torch.Tensor, target: HostArray, complete: Callable[[], None]
    ) -> Copied | None:
        """Writes final gradients to ``target``, then calls ``complete``; may return before that.
        Returns the copy, None if they were summed in place.
        """

    def await_offloads(self, at_most: int) -> None:
        """Orders work issued from now on after all offloads but the latest ``at_most``."""

    def finish(self) -> None:
        """Waits until every offload has written its last byte and called ``complete``; raises the
        error of a failed one.
        """

    def drop(self) -> None:
        """Waits like :meth:`finish`, without further calls of ``complete``; errors are ignored."""

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns copies of the tensors in host memory, complete at the return."""

    def from_host(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors on the device."""

    def swap_streams(self, distance: int | None) -> SwapStreams:
        """Returns the streams that swap activations to the host, or to a peer. The peer is the
        node's device with this one's number plus ``distance``. Every call returns the same streams.
        """

    def arrival_s(self, complete_s: float | None) -> float | None:
        """Returns the arrival time of the message last given to :meth:`from_host`. It was complete
        in host memory at ``complete_s`` (``time.perf_counter``). ``None``: unknown.
        """


class Runtime(Protocol):
    """Computes blocks. :class:`penstock.models.runtime.ModelRuntime` explains the methods; a
    platform may have another implementation. A bound block is opaque outside the runtime that bound
    it. So are additions to a :class:`StageOutput` outside the runtime that made it.
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
        """Makes later gradients of the block add up in these flat arrays."""

    def called_with(self, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        """Returns the constants that layers take on such a micro-batch."""

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
        """Runs consecutive blocks on one micro-batch. ``output_read``: False if the caller needs
        the graph, but no values of the output.
        """

    def backward(
        self, output: Any, gradients: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Adds to the bound gradients; returns those of the stage's inputs by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSite:
    """The place of a platform: the worker with number ``device_index`` of a run. ``table`` is that
    of the shared memory.
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
        from penstock.models.surgery.hf import load_run_adapter, load_run_config, without_dropout

        hf_config, model = load_run_config(self.run_dir), self.config.model
        adapter = load_run_adapter(self.run_dir)
        if self.config.trains_on_pairs:
            # Both log-probabilities of a ratio are those of the whole network, as in TRL.
            hf_config = without_dropout(hf_config)
            adapter = None if adapter is None else adapter.model_copy(update={"dropout": 0.0})
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
            label_smoothing=self.config.train.label_smoothing,
            adapter=adapter,
        )


class BufferPool:
    """Flat host tensors by type and length, reused because large host memory is slow at first
    touch. The pool keeps as many as were in use at once. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = world.lock()
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}

    def take(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialized tensor."""
        with self._lock:
            free = self._free.get((dtype, num_elements))
            if free:
                return free.pop()
        return torch.empty(num_elements, dtype=dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Takes back a tensor that has no users any more."""
        with self._lock:
            self._free.setdefault((tensor.dtype, tensor.numel()), []).append(tensor)

    def clear(self) -> None:
        """Frees unused tensors."""
        with self._lock:
            self._free.clear()
