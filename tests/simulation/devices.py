"""A simulated worker's platform: numbers in the place of a model, on a device that takes its time.

As on GPUs gradients may be summed in memory of the device's own, and reach the host on a thread
beside the interpreter; in other runs they are summed where they are published, as on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from penstock.host import world
from penstock.protocol.plan.instructions import Opcode
from penstock.shm.layout import WEIGHT_SLOTS
from penstock.shm.memory import NodeMemory
from penstock.shm.table import DType
from penstock.workers.device import Copied, HostArray, WorkerSite, as_tensor
from penstock.workers.handlers import HANDLERS
from penstock.workers.platforms.cpu.device import CpuDevice
from penstock.workers.platforms.meters import NoMeter
from penstock.workers.state.updates import NativePreviewer, PreviewedBlock, UpdateScope
from tests.simulation.models import SimRuntime, SmoothRuntime
from tests.simulation.quiet import writes

DEVICE_S = 1e-3
"""Longest copy of gradients to the host, and longest step of a device with one block."""
LONG, LONG_DEVICE_S = 0.04, 0.3
"""How many of them in some runs are how long: longer than a process takes to come back, so that a
Drain comes in the middle.
"""
LONGEST_S = 2.0
"""Longest step of a device, however slow its machine is: a Drain is heeded within 5 s."""
_COMPUTES = (Opcode.FORWARD, Opcode.BACKWARD, Opcode.RECOMPUTE)


def _point(name: str, longest_s: float, shortest_s: float = 0.0) -> None:
    """The process may die here, and the next step takes a while."""
    found: Any = world.here()
    process = found.process
    process.kernel.point(name)
    taken_s = (shortest_s + process.kernel.random.random() * longest_s) * process.machine.slow
    found.sleep(min(taken_s, LONGEST_S))


def _device_s() -> float:
    """Returns the longest time of what a device does now."""
    cluster = _cluster()
    long = cluster.has_long_device_work and cluster.kernel.random.random() < LONG
    return LONG_DEVICE_S if long else DEVICE_S


def _timed(handler: Any) -> Any:
    def run(instruction: Any, attempt: Any) -> None:
        _point("computes", 8e-4, 2e-4)
        handler(instruction, attempt)

    return run


class SimPlatform:
    """See :class:`penstock.workers.platforms.registry.WorkerPlatform`."""

    reads = None
    peak_flops: float | None = None
    handlers = {  # noqa: RUF012  # read only
        opcode: _timed(handler) if opcode in _COMPUTES else handler
        for opcode, handler in HANDLERS.items()
    }

    def __init__(self, site: WorkerSite) -> None:
        self._site = site
        table, cluster = site.table, _cluster()
        device = SimDevice if cluster.sums_on_devices else CpuDevice
        self.device = device(weight_dtype=table.weight_dtype, grad_dtype=table.grad_dtype)
        self.meter = NoMeter()

    def set_up_process(self) -> None:
        """Nothing to do."""

    def runtime(self) -> SimRuntime:
        site, shape = self._site, _cluster().shape
        runtime = SimRuntime if shape.keeps_bits else SmoothRuntime
        return runtime(
            site.table,
            seed=site.config.run.seed,
            overflows=shape.overflows,
            undefined=shape.undefined,
        )

    def previewer(self, memory: Any, plan: Any) -> SimPreviewer:
        config = self._site.config.optimizer
        return SimPreviewer(memory, config, [0], (), plan.flushed)


def _cluster() -> Any:
    found: Any = world.here()
    return found.cluster


class SimDevice(CpuDevice):
    """Sums elsewhere, and copies to the host later than it is asked to."""

    def __init__(self, *, weight_dtype: DType, grad_dtype: DType) -> None:
        super().__init__(weight_dtype=weight_dtype, grad_dtype=grad_dtype)
        self._copying: Any = None
        self._leaving: list[Any] = []
        self._dropped = False

    def attach(self, memory: NodeMemory, stage_bytes: int, num_buffers: int) -> None:
        """Start the thread that copies."""
        self._copying = world.executor(1, "worker-offload")

    def detach(self) -> None:
        """End it."""
        if self._copying is not None:
            self._copying.shutdown(wait=True)
            self._copying = None
        super().detach()

    def gradients(self, target: HostArray) -> torch.Tensor:
        """A private sum."""
        return self._pool.take(target.size, torch.float32).zero_()

    def offload(
        self, gradients: torch.Tensor, target: HostArray, complete: Callable[[], None]
    ) -> Copied:
        """Behind those before it."""
        copy = partial(self._copy, gradients, target, complete)
        self._leaving.append(self._copying.submit(copy))
        now_s = world.perf_counter()
        return Copied(target.nbytes, now_s, now_s)

    def await_offloads(self, at_most: int) -> None:
        """Waits for all but the latest."""
        for copy in self._leaving[: len(self._leaving) - at_most]:
            copy.result()

    def finish(self) -> None:
        """Waits for all."""
        self.await_offloads(0)
        self._leaving.clear()

    def drop(self) -> None:
        """Nothing is written any more when this returns."""
        self._dropped = True
        for copy in self._leaving:
            copy.exception()
        self._leaving.clear()
        self._dropped = False

    def _copy(
        self, gradients: torch.Tensor, target: HostArray, complete: Callable[[], None]
    ) -> None:
        """In two halves: a kill may come between them."""
        array, half = as_tensor(target, self._grad_dtype), target.size // 2
        for part in (slice(half), slice(half, None)):
            _point("copies gradients", _device_s() / 2)
            if self._dropped:
                break
            writes(world.here().process, "gradients")  # type: ignore[attr-defined]
            array[part].copy_(gradients[part])
        else:
            complete()
        self._pool.give(gradients)


class SimPreviewer(NativePreviewer):
    """A step of the device takes a while, and so does its copy of the state."""

    def fetch(self, block: int, scope: UpdateScope) -> None:
        """See :class:`NativePreviewer`."""
        _point("fetches state", _device_s())
        super().fetch(block, scope)

    def preview(self, block: int, scope: UpdateScope) -> PreviewedBlock:
        """As the real one, whose second half of the weights comes later: an abort may come between,
        and a kill.
        """
        _point("previews", _device_s())
        weights = self._memory.weights(block, scope.step.version % WEIGHT_SLOTS)
        half, before = len(weights) // 2, weights.copy()
        done = super().preview(block, scope)
        after = weights.copy()
        weights[half:] = before[half:]
        _point("half a preview", _device_s())
        writes(world.here().process, f"weights of block {block}")  # type: ignore[attr-defined]
        weights[half:] = after[half:]
        _point("previewed", _device_s() / 2)
        return done
