"""The CPU platform of a worker: computes on shared memory in place, and counts storages if
configured.
"""

from __future__ import annotations

from penstock.models.attention import choose_attention
from penstock.models.runtime import ModelRuntime
from penstock.models.torch_device import repeat_bits
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.resources import residents_of
from penstock.shm.memory import NodeMemory
from penstock.workers.device import WorkerSite
from penstock.workers.handlers import HANDLERS
from penstock.workers.platforms.cpu.device import CpuDevice
from penstock.workers.platforms.meters import NoMeter, StorageMeter
from penstock.workers.state.updates import NativePreviewer, own_cores


class CpuPlatform:
    """See :class:`penstock.workers.platforms.registry.WorkerPlatform`."""

    handlers = HANDLERS
    reads = None
    peak_flops: float | None = None

    def __init__(self, site: WorkerSite) -> None:
        self._site = site
        table = site.table
        self.device = CpuDevice(weight_dtype=table.weight_dtype, grad_dtype=table.grad_dtype)
        # Every operator is watched while storages are counted, so it is done on request only.
        self.meter = StorageMeter() if site.config.observability.memory else NoMeter()

    def set_up_process(self) -> None:
        """Chooses deterministic kernels, with which a repeated attempt gives the same bits, and the
        attention of the run.
        """
        if self._site.config.model.deterministic:
            repeat_bits()
        choose_attention(self._site.config.model.attention)

    def runtime(self) -> ModelRuntime:
        """Returns the run's model."""
        return self._site.model_runtime(self.device)

    def previewer(self, memory: NodeMemory, plan: Plan) -> NativePreviewer:
        """Returns the previewer that updates blocks with optimizerd's kernel, on a share of the
        cores.
        """
        site = self._site
        residents = residents_of(plan.programs[site.device_index])
        return NativePreviewer(
            memory, site.config.optimizer, own_cores(site.local_index), residents, plan.flushed
        )
