"""Workers' implementations of the platforms of :mod:`penstock.config.platforms`, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from penstock.protocol.plan.instructions import Opcode
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.hardware.bandwidth_log import NodeReads
from penstock.shm.memory import NodeMemory
from penstock.workers.attempt import Attempt
from penstock.workers.device import Device, Runtime, WorkerSite
from penstock.workers.handlers import Handler
from penstock.workers.platforms.cpu.platform import CpuPlatform
from penstock.workers.platforms.cuda.platform import CudaPlatform
from penstock.workers.platforms.emulated.platform import EmulatedPlatform
from penstock.workers.state.updates import Previewer
from penstock.workers.telemetry.usage import Meter


class WorkerPlatform(Protocol):
    """All that differs between workers of different platforms. One object per process."""

    @property
    def device(self) -> Device:
        """The device: holds weights and moves tensors."""

    @property
    def meter(self) -> Meter[Attempt]:
        """The meter of the device's memory."""

    @property
    def handlers(self) -> Mapping[Opcode, Handler]:
        """The handler of each instruction."""

    @property
    def reads(self) -> NodeReads | None:
        """The modelled time of reads from other nodes; ``None``: reads take their real time."""

    @property
    def peak_flops(self) -> float | None:
        """Operations per second of the device's clock, if known."""

    def set_up_process(self) -> None:
        """Applies the settings of the whole process, before any computation."""

    def runtime(self) -> Runtime:
        """Makes the runtime that computes blocks; called once.

        Raises:
            ConfigError: the model is impossible.
        """

    def previewer(self, memory: NodeMemory, plan: Plan) -> Previewer:
        """Makes the previewer for UPDATEs of the device's program."""


IMPLEMENTATIONS: Mapping[str, Callable[[WorkerSite], WorkerPlatform]] = MappingProxyType(
    {"cpu": CpuPlatform, "cuda": CudaPlatform, "emulated": EmulatedPlatform}
)


def open_platform(site: WorkerSite) -> WorkerPlatform:
    """Returns the platform that ``cluster.device`` names, for this process.

    Raises:
        ConfigError: there is no such device.
    """
    return IMPLEMENTATIONS[site.config.cluster.platform.name](site)
