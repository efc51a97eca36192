"""Opens the channel that ``cluster.transport`` names, for one epoch.

A transport is a row of :data:`penstock.config.platforms.TRANSPORTS`, and the module that the row
names (:class:`GroupModule`). This module depends on no single transport.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Protocol, cast

import torch

from penstock.config.platforms import TRANSPORTS, TransportName
from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.names import node_of_device
from penstock.workers.channels.base import Channel, MessageChannel
from penstock.workers.channels.group import GroupChannel, Wire
from penstock.workers.channels.order import TransferOrder
from penstock.workers.channels.rendezvous import Meeting
from penstock.workers.channels.transport import Transport
from penstock.workers.device import Device
from penstock.workers.waiting import Abort

_log = logging.getLogger(__name__)


class GroupModule(Protocol):
    """The module of a transport that needs a process group."""

    def is_built(self) -> bool:
        """Returns whether this torch has the library."""

    def join(
        self,
        meeting: Meeting,
        order: TransferOrder,
        device: Device,
        abort: Abort,
        timeout_s: float,
    ) -> Wire:
        """Meets the other members, which join too, and connects to them.

        Raises:
            Interrupted: the epoch was aborted.
            LostMemberError: a member did not come.
        """


def group_module(name: TransportName) -> GroupModule | None:
    """Returns the module of a transport, ``None`` for messages, which need no group."""
    module = TRANSPORTS[name].group_module
    return None if module is None else cast(GroupModule, import_module(module))


def transport_of(
    config: Config, num_gpus: int, is_built: Callable[[TransportName], bool]
) -> TransportName:
    """Returns the transport that ``cluster.transport`` selects on a node with ``num_gpus`` GPUs.

    Raises:
        ConfigError: the requested transport lacks its library, or a GPU for each worker.
    """
    cluster = config.cluster

    def lacks(name: TransportName) -> str:
        if TRANSPORTS[name].own_device and num_gpus < cluster.workers:
            return f"there are {num_gpus}"
        return "" if is_built(name) else f"this torch is built without {name.upper()}"

    if cluster.transport == "auto":
        automatic = (n for n in cluster.platform.transports if TRANSPORTS[n].automatic)
        return [n for n in automatic if cluster.may_use(n) and not lacks(n)][-1]
    transport = cluster.transport
    if lack := lacks(transport):
        others = sorted({*cluster.platform.transports} - {transport})
        raise ConfigError(
            f"cluster.transport {transport}: each of the node's {cluster.workers} workers needs a"
            f" GPU of its own, and torch {transport.upper()}; {lack}. Use auto,"
            f" {' or '.join(others)}"
            if TRANSPORTS[transport].own_device
            else f"cluster.transport {transport}: {lack}. Use auto, {' or '.join(others)}"
        )
    return transport


def transport_here(config: Config) -> TransportName:
    """Returns the transport that ``cluster.transport`` comes to on this machine; raises like
    :func:`transport_of`.
    """

    def is_built(name: TransportName) -> bool:
        module = group_module(name)
        return module is None or module.is_built()

    return transport_of(config, torch.cuda.device_count(), is_built)


def group_members(plan: Plan, name: TransportName) -> tuple[int, ...]:
    """Returns the devices that meet in a process group: none, or at least two.

    Raises:
        ConfigError: the plan's sends and receives do not match.
    """
    return () if TRANSPORTS[name].group_module is None else TransferOrder.of(plan).members


def told_by(device: int, members: Sequence[int]) -> frozenset[int]:
    """Returns the devices to which ``device`` sends the group's address: the leader sends it to all
    others.
    """
    return frozenset(members[1:] if device in members[:1] else ())


def open_channel(
    *,
    config: Config,
    plan: Plan,
    run_id: str,
    epoch: int,
    device_index: int,
    device: Device,
    transport: Transport,
    name: TransportName,
    abort: Abort,
    timeout_s: float,
) -> Channel:
    """Meets the other members and returns the channel of the epoch.

    ``transport`` is connected to the members and open for the epoch.

    Raises:
        Interrupted: the epoch was aborted.
        LostMemberError: a member did not come.
        ConfigError: the plan's sends and receives do not match.
    """
    messages = MessageChannel(run_id=run_id, epoch=epoch, device=device, transport=transport)
    module, members = group_module(name), group_members(plan, name)
    if module is None or device_index not in members:
        return messages
    nodes = config.cluster.nodes
    meeting = Meeting(
        run_id=run_id,
        epoch=epoch,
        members=members,
        own=device_index,
        addresses={m: socket.gethostbyname(nodes[node_of_device(config, m)].host) for m in members},
        transport=transport,
    )
    order = TransferOrder.of(plan)
    wire = module.join(meeting, order, device, abort, timeout_s)
    _log.info("membership %d: %s process group of %d workers", epoch, name, len(members))
    return GroupChannel(
        run_id=run_id,
        epoch=epoch,
        device_index=device_index,
        order=order,
        wire=wire,
        transport=transport,
        others=messages,
    )
