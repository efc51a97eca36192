"""What ``cluster.device`` and ``cluster.transport`` can name, and what each of them can do.

A platform, and a transport, is described once, here. Configuration, planner, daemons and clients
ask for a capability and never for a name, and import nothing of a platform but this. The
description says nothing of *how*: the costs of modelled platforms are in
:mod:`penstock.planner.cost.emulation`, what a worker runs is found under the same name in
:mod:`penstock.workers.platforms.registry`, and a transport in the module that its row names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Literal


class CoreUse(Enum):
    """What the workers of a platform need the host's cores for."""

    COMPUTE = "compute"
    """They compute on them, the optimizer's cores too: it has most to do when they wait."""

    FEED = "feed"
    """They issue work to devices at any moment, so they keep off the optimizer's cores."""

    WAIT = "wait"
    """They mostly sleep."""


TransportName = Literal["zmq", "gloo", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportTraits:
    """A way for tensors from worker to worker, as far as others than its module must know it.

    ``group_module``: the module that makes the wire of the epoch's process group
    (:class:`penstock.workers.channels.opening.GroupModule`). ``None``: tensors travel as messages,
    which need no group.
    ``automatic``: ``auto`` takes the last transport of a platform that is automatic and works.
    ``own_device``: each worker of a node needs a device that it shares with nobody.
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
"""By name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A kind of device, as far as others than its workers must know it.

    ``parameter``: what follows the name and a colon in ``cluster.device``, in words for people;
    ``None``: nothing does. ``loader``: the module that is run to write initial weights.
    ``transports``: those of ``cluster.transport`` that work, besides ``auto``.

    ``own_memory``: devices have memory apart from the host's, weights are copied there, and they
    compute in the type that weights are stored in. Without it they read the host's and compute in
    fp32.
    ``pins_host_memory``: workers lock the shared memory that they map.
    ``own_update_kernels``: UPDATE runs kernels of the device, which not every optimizer has.
    ``builtin_model``: block table and initial weights follow from ``cluster.device``; there is no
    model to read or to export.
    ``simulated_clock``: seconds, bandwidths and memory are those of a modelled cluster, whose nodes
    share one machine and its clock; nothing can be measured, and results are marked.
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
"""By name."""

DEVICE_PATTERN = "^({})$".format(
    "|".join(
        re.escape(platform.name) + (":.+" if platform.parameter else "")
        for platform in PLATFORMS.values()
    )
)
"""What ``cluster.device`` looks like."""

DEVICE_CHOICES = ", ".join(
    f"{platform.name}:{platform.parameter}" if platform.parameter else platform.name
    for platform in PLATFORMS.values()
)
"""The same for people."""


def platform_of(device: str) -> Platform:
    """The platform that a value of ``cluster.device`` names; the value was checked."""
    return PLATFORMS[device.partition(":")[0]]


def parameter_of(device: str) -> str | None:
    """What follows the platform's name and a colon in a value of ``cluster.device``, if anything
    does.
    """
    return device.partition(":")[2] or None
