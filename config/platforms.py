"""Values of ``cluster.device`` and ``cluster.transport``, and the capabilities of each.

Each platform and transport is described once, here. Configuration, planner, daemons and clients
check a capability and never a name, and import nothing else of a platform. The description says
nothing of implementations. Costs of modelled platforms are in
:mod:`penstock.planner.cost.emulation`. Code of a worker is registered under the same name in
:mod:`penstock.workers.platforms.registry`. A transport is in the module that its row names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Literal


class CoreUse(Enum):
    """Use of the host's cores by the workers of a platform."""

    COMPUTE = "compute"
    """They compute on them, the optimizer's cores too: it has most to do when they wait."""

    FEED = "feed"
    """They issue work to devices at any moment, so they keep off the optimizer's cores."""

    WAIT = "wait"
    """They mostly sleep."""


TransportName = Literal["zmq", "gloo", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportTraits:
    """A transport of tensors between workers, as described to modules other than its own.

    ``own_device``: each worker of a node needs a device that no other worker uses.
    """

    group_module: str | None
    automatic: bool = False
    own_device: bool = False


TRANSPORTS: Mapping[TransportName, TransportTraits] = MappingProxyType(
    {
        "zmq": TransportTraits(group_module=None, automatic=True),
        "gloo": TransportTraits(group_module="penstock.workers.channels.gloo"),
        "nccl": TransportTraits(
            group_module="penstock.workers.channels.nccl", automatic=True, own_device=True
        ),
    }
)
"""Transports by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A kind of device, as described to modules other than its workers.

    ``parameter``: meaning of the text after the name and a colon in ``cluster.device``, in words
    for people; ``None``: the name has no parameter. ``loader``: the module that writes initial
    weights. ``transports``: values of ``cluster.transport`` that work, in addition to ``auto``.

    ``own_memory``: devices have separate memory, weights are copied there, and devices compute in
    the storage type of the weights. Otherwise devices read the host's memory and compute in fp32.

    ``pins_host_memory``: workers lock the shared memory that they map. ``own_update_kernels``:
    UPDATE runs kernels of the device, which only some optimizers have. ``builtin_model``: block
    table and initial weights follow from ``cluster.device``; there is no model to read or to
    export.

    ``simulated_clock``: seconds, bandwidths and memory are those of a modelled cluster. Its nodes
    share one machine and its clock. Nothing can be measured, and results are marked.
    """

    name: str
    cores: CoreUse
    transports: tuple[TransportName, ...]
    own_memory: bool
    parameter: str | None = None
    loader: str = "penstock.models.checkpoints.loader"
    pins_host_memory: bool = False
    own_update_kernels: bool = False
    builtin_model: bool = False
    simulated_clock: bool = False


CPU = Platform(name="cpu", cores=CoreUse.COMPUTE, transports=("zmq", "gloo"), own_memory=False)

CUDA = Platform(
    name="cuda",
    cores=CoreUse.FEED,
    transports=("zmq", "gloo", "nccl"),
    own_memory=True,
    pins_host_memory=True,
    own_update_kernels=True,
)

EMULATED = Platform(
    name="emulated",
    parameter="analytic:GPU:MODEL or emulated:PROFILE.json",
    loader="penstock.workers.platforms.emulated.loader",
    cores=CoreUse.WAIT,
    transports=("zmq",),
    own_memory=True,
    builtin_model=True,
    simulated_clock=True,
)

PLATFORMS: Mapping[str, Platform] = MappingProxyType(
    {platform.name: platform for platform in (CPU, CUDA, EMULATED)}
)
"""Platforms by name."""

DEVICE_PATTERN = "^({})$".format(
    "|".join(
        re.escape(platform.name) + (":.+" if platform.parameter else "")
        for platform in PLATFORMS.values()
    )
)
"""Pattern of ``cluster.device``."""

DEVICE_CHOICES = ", ".join(
    f"{platform.name}:{platform.parameter}" if platform.parameter else platform.name
    for platform in PLATFORMS.values()
)
"""The same for people."""


def platform_of(device: str) -> Platform:
    """Returns the platform that a checked value of ``cluster.device`` names."""
    return PLATFORMS[device.partition(":")[0]]


def parameter_of(device: str) -> str | None:
    """Returns the text after the platform's name and a colon in a value of ``cluster.device``; None
    without a colon.
    """
    return device.partition(":")[2] or None
