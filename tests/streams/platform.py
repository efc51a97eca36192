"""The CUDA platform on devices that are checked, and what others do with memory around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch

from penstock.protocol.plan.instructions import Instruction, Opcode
from penstock.protocol.plan.plan import Plan
from penstock.shm.memory import NodeMemory
from penstock.shm.table import DType
from penstock.workers.attempt import Attempt
from penstock.workers.device import Copied, HostArray, WorkerSite, as_tensor
from penstock.workers.handlers import HANDLERS, Handler
from penstock.workers.platforms import registry
from penstock.workers.platforms.cuda.device import CudaDevice
from penstock.workers.platforms.cuda.platform import CudaPlatform
from penstock.workers.state.updates import PreviewedBlock, Previewer, UpdateScope
from tests.streams.checker import Checker
from tests.streams.gpu import CheckedGpu, gpu_of
from tests.streams.threads import watching

ANNOUNCING_S = 0.005
"""The thread that announces gradients is late, too."""

STATE = ("master", "exp_avg", "exp_avg_sq")

Before = Callable[[int, int], None]
"""Called with a device and the number of the instruction that it is about to execute."""


class CheckedDevice(CudaDevice):
    """Others read gradients once they are announced, and messages once they are there."""

    def __init__(
        self, gpu: CheckedGpu, *, weight_dtype: DType, grad_dtype: DType, pins: bool
    ) -> None:
        super().__init__(gpu, weight_dtype=weight_dtype, grad_dtype=grad_dtype, pins=pins)
        self._checker = gpu.checker
        self._checked = gpu
        self._stored = grad_dtype

    def start_clock(self) -> None:
        """An interpreter's thread."""
        self._checker.computes(self._checked)
        super().start_clock()

    def offload(
        self, gradients: torch.Tensor, target: HostArray, complete: Callable[[], None]
    ) -> Copied:
        """``complete`` tells the optimizer."""

        def announced() -> None:
            time.sleep(ANNOUNCING_S)
            read = as_tensor(target, self._stored)
            self._checker.host_access(read, writes=False, what="the optimizer's sweep")
            self._checker.announces(read)
            complete()

        return super().offload(gradients, target, announced)

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """They are sent next."""
        found = super().to_host(tensors)
        for tensor in found.values():
            self._checker.host_access(tensor, writes=False, what="a message that is sent")
        return found


class CheckedPreviewer:
    """Behind an update the optimizer reads the weights, and may settle the block itself."""

    def __init__(self, checker: Checker, previewer: Previewer, memory: NodeMemory) -> None:
        self._checker = checker
        self._previewer = previewer
        self._memory = memory

    def issue(self, block: int) -> None:
        """As it is."""
        self._previewer.issue(block)

    def fetch(self, block: int, scope: UpdateScope) -> None:
        """As it is."""
        self._previewer.fetch(block, scope)

    def preview(self, block: int, scope: UpdateScope) -> PreviewedBlock:
        """All gradients are announced; then it is said that the block is previewed."""
        version = scope.step.version
        for array in self._arrays(block, ("grads",), version):
            self._checker.was_announced(array)
        try:
            return self._previewer.preview(block, scope)
        finally:
            for array in self._arrays(block, ("weights", *STATE), version):
                self._checker.host_access(array, writes=True, what="a sweep behind the update")

    def _arrays(self, block: int, names: Sequence[str], version: int) -> list[torch.Tensor]:
        """Those of a block with one of these names that a step to this version is about."""
        return [
            torch.frombuffer(self._memory.raw(key), dtype=torch.uint8)
            for key in self._memory.spec.layout.arrays
            if key[0] == block and key[1] in names and (key[1] in STATE or key[2] == version % 2)
        ]

    def close(self) -> None:
        """As it is."""
        self._previewer.close()


class CheckedPlatform(CudaPlatform):
    """One worker's."""

    def __init__(self, checker: Checker, site: WorkerSite, before: Before | None) -> None:
        gpu = gpu_of(checker, site.device_index)
        super().__init__(site, gpu)
        table = site.table
        self.device = CheckedDevice(
            gpu,
            weight_dtype=table.weight_dtype,
            grad_dtype=table.grad_dtype,
            pins=site.config.cluster.pin_memory,
        )
        self._checker = checker
        if before is not None:
            self.handlers = _counted(site.device_index, before)

    def previewer(self, memory: NodeMemory, plan: Plan) -> Previewer:  # type: ignore[override]
        """Returns what updates, checked."""
        return CheckedPreviewer(self._checker, super().previewer(memory, plan), memory)


def _counted(device: int, before: Before) -> Mapping[Opcode, Handler]:
    executed = [0]

    def counted(handler: Handler) -> Handler:
        def run(instruction: Instruction, attempt: Attempt) -> None:
            before(device, executed[0])
            executed[0] += 1
            handler(instruction, attempt)

        return run

    return {opcode: counted(handler) for opcode, handler in HANDLERS.items()}


@contextmanager
def checked(checker: Checker, before: Before | None = None) -> Iterator[Checker]:
    """Workers with ``cluster.device: cuda`` that are made inside compute on checked devices."""

    def make(site: WorkerSite) -> CheckedPlatform:
        return CheckedPlatform(checker, site, before)

    with (
        patch.object(registry, "IMPLEMENTATIONS", {**registry.IMPLEMENTATIONS, "cuda": make}),
        watching(checker),
    ):
        yield checker
