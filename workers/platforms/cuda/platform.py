"""The CUDA platform of a worker: a GPU, its allocator's statistics, updates by its own kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from penstock.models.attention import choose_attention
from penstock.models.gpu import Gpu
from penstock.models.runtime import ModelRuntime
from penstock.models.torch_device import repeat_bits
from penstock.planner.cost.catalogue import peak_flops_of
from penstock.protocol.plan.instructions import Instruction
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.resources import residents_of
from penstock.shm.memory import NodeMemory
from penstock.workers.attempt import Attempt
from penstock.workers.device import WorkerSite
from penstock.workers.handlers import HANDLERS
from penstock.workers.platforms.cuda.device import CudaDevice, gpu_of
from penstock.workers.platforms.cuda.update import CudaPreviewer
from penstock.workers.platforms.meters import usage_of_named
from penstock.workers.telemetry.usage import MemoryPeak, Usage, Use


class CudaMeter:
    """The allocator's statistics. An instruction's own peak would need a synchronisation."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.limit_bytes: float | None = gpu.memory_bytes
        self.peak: MemoryPeak | None = None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Resets the statistics of the peak."""
        self._gpu.restart_peak()
        self.peak = None
        yield
        most = self._gpu.peak_bytes
        self.peak = MemoryPeak(num_bytes=most, usage=Usage({Use.ACTIVATIONS: most}))

    def received(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Does nothing: the allocator counts received tensors with all others."""

    def executed(self, instruction: Instruction, attempt: Attempt) -> None:
        """Does nothing: the allocator counts."""

    def usage(self, attempt: Attempt) -> Usage:
        """Returns the bytes of named tensors, and the rest of the allocated bytes as
        activations.
        """
        named = usage_of_named(attempt, self._gpu.device)
        rest = self._gpu.allocated_bytes - sum(named.values())
        return Usage({**named, Use.ACTIVATIONS: max(0.0, rest)})


class CudaPlatform:
    """See :class:`penstock.workers.platforms.registry.WorkerPlatform`."""

    handlers = HANDLERS
    reads = None

    @property
    def peak_flops(self) -> float | None:
        """Operations per second, by the driver's name of the GPU."""
        return peak_flops_of(self._gpu.name)

    def __init__(self, site: WorkerSite, gpu: Gpu | None = None) -> None:
        """Prepares the platform. ``gpu``: by default the worker's; GPUs are counted per node.

        Raises:
            ConfigError: there is no such GPU.
        """
        self._site = site
        table = site.table
        self._gpu = gpu_of(site.local_index) if gpu is None else gpu
        self.device = CudaDevice(
            self._gpu,
            weight_dtype=table.weight_dtype,
            grad_dtype=table.grad_dtype,
            pins=site.config.cluster.pin_memory,
        )
        self.meter = CudaMeter(self._gpu)

    def set_up_process(self) -> None:
        """Chooses deterministic kernels, which add in one order, and the attention of the run."""
        if self._site.config.model.deterministic:
            repeat_bits()
        choose_attention(self._site.config.model.attention)

    def runtime(self) -> ModelRuntime:
        """Returns the run's model."""
        return self._site.model_runtime(self.device)

    def previewer(self, memory: NodeMemory, plan: Plan) -> CudaPreviewer:
        """Returns the previewer of the blocks with an UPDATE in the device's program."""
        index = self._site.device_index
        return CudaPreviewer(
            self._gpu,
            memory,
            self._site.config.optimizer,
            [block for block, device in plan.updates.items() if device == index],
            residents_of(plan.programs[index]),
            plan.flushed,
        )
