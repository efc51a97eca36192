"""Makes the channel that ``cluster.transport`` names, for one epoch."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import Literal

import torch
from torch import distributed

from penstock.protocol.config.schema import Config
from penstock.protocol.errors import ConfigError
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.names import node_of_device
from penstock.workers.channels import gloo, nccl
from penstock.workers.channels.base import Channel, MessageChannel
from penstock.workers.channels.group import GroupChannel, Wire
from penstock.workers.channels.order import TransferOrder
from penstock.workers.channels.rendezvous import Assembly, Meeting, patiently
from penstock.workers.channels.transport import Transport
from penstock.workers.platforms.base import Device
from penstock.workers.platforms.emulated.channel import EmulatedChannel
from penstock.workers.platforms.emulated.device import EmulatedDevice
from penstock.workers.waiting import Abort

_log = logging.getLogger(__name__)

Means = Literal["zmq", "gloo", "nccl"]


def means_of(config: Config, num_gpus: int, *, nccl_built: bool) -> Means:
    """What ``cluster.transport`` comes to on a node with so many GPUs.

    Raises:
        ConfigError: nccl without NCCL, or without a GPU for each worker.
    """
    cluster = config.cluster
    shared = num_gpus < cluster.workers
    if cluster.transport == "nccl" and (shared or not nccl_built):
        lacks = f"there are {num_gpus}" if shared else "this torch is built without NCCL"
        raise ConfigError(
            f"cluster.transport nccl: each of the node's {cluster.workers} workers needs a GPU of"
            f" its own, and torch NCCL; {lacks}. Use auto, gloo or zmq"
        )
    if cluster.transport != "auto":
        return cluster.transport
    return "nccl" if "nccl" in cluster.platform.transports and nccl_built and not shared else "zmq"


def means_here(config: Config) -> Means:
    """The same, on this machine."""
    return means_of(config, torch.cuda.device_count(), nccl_built=distributed.is_nccl_available())


def group_members(plan: Plan, means: Means) -> tuple[int, ...]:
    """Devices that meet in a process group: none, or at least two.

    Raises:
        ConfigError: the plan's sends and receives do not match.
    """
    return () if means == "zmq" else TransferOrder.of(plan).members


def told_by(device: int, members: Sequence[int]) -> frozenset[int]:
    """Whom a device tells where the group meets."""
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
    means: Means,
    abort: Abort,
    timeout_s: float,
) -> Channel:
    """Meet the other members; ``transport`` is connected to them and open for the epoch.

    Raises:
        Interrupted: aborted. LostMemberError: somebody did not come. ConfigError: the plan's sends
        and receives do not match.
    """
    kind = EmulatedChannel if isinstance(device, EmulatedDevice) else MessageChannel
    messages = kind(run_id=run_id, epoch=epoch, device=device, transport=transport)
    members = group_members(plan, means)
    if device_index not in members:
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
    wire = _wire(meeting, order, device, means, abort, timeout_s)
    _log.info("epoch %d: %s process group of %d workers", epoch, means, len(members))
    return GroupChannel(
        run_id=run_id,
        epoch=epoch,
        device_index=device_index,
        order=order,
        wire=wire,
        transport=transport,
        others=messages,
    )


def _wire(
    meeting: Meeting,
    order: TransferOrder,
    device: Device,
    means: Means,
    abort: Abort,
    timeout_s: float,
) -> Wire:
    assembly = Assembly(meeting)
    members: Sequence[int] = meeting.members
    if means == "nccl":
        ways = {(members.index(at.sender), members.index(at.receiver)) for at in order.lines}
        groups = patiently(
            lambda: nccl.make_groups(
                assembly.store(abort, timeout_s),
                meeting.rank,
                len(members),
                device.torch_device,
                ways,
            ),
            assembly,
            abort,
            timeout_s,
        )
        return nccl.NcclWire(groups, members, device.torch_device, abort, timeout_s)
    group = patiently(
        lambda: gloo.make_group(
            assembly.store(abort, timeout_s),
            meeting.rank,
            len(members),
            meeting.addresses[meeting.own],
        ),
        assembly,
        abort,
        timeout_s,
    )
    return gloo.GlooWire(group, members, device)
