"""The machines that a plan runs on: links and their speed, devices that share a link, and the CPU
optimizer of a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from penstock.config.optimizers import OPTIMIZERS, OptimizerName


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of equal devices. Bandwidths in bytes/s, ``inf`` for no limit.

    ``fetch_bandwidth`` and ``offload_bandwidth``: host to device and back, of one device's copy
    engines. ``devices_per_switch`` devices share a PCIe switch of ``switch_bandwidth`` each way
    towards the host. ``peer_bandwidth``: between two devices of a node, each way;
    ``peer_through_host``: such transfers cross the switches and DRAM (no NVLink).
    ``nic_bandwidth``: of a node, each way, for all transfers to other nodes. ``read_bandwidth``, if
    given, replaces it for reads of another node's memory (weights, gradients); each read has all of
    it. ``dram_bandwidth``: of a node, shared by copies, transfers through the host, and the
    optimizer's threads. ``latency_s`` of a message.

    ``numa_domains``: parts into which a node's memory channels and cores are split (NPS of an EPYC,
    sockets), if processes are bound to them. Gradients of a device, and the optimizer's work on
    them, then stay in the device's domain. A domain has an equal share of ``dram_bandwidth`` and
    ``optimizer_rate``.

    ``optimizer_rate``: parameters/s that all optimizer cores of a node can process if DRAM is no
    limit. ``preview_speed``, ``settle_speed``: speed of a preview, or of settling, relative to one
    sweep that does both. ``device_optimizer_rate``: parameters/s of an UPDATE on a device, without
    its copies. ``update_fetch_bytes`` and ``update_offload_bytes``: bytes that an UPDATE copies per
    parameter, the state to the device and the weight back.

    ``replicas``: copies of the whole plan that train together (data parallelism beyond the plan's
    own routes). REDUCE_GRADIENTS sums over them, from each device to its replica at
    ``replica_bandwidth``, through the NICs if ``replicas_on_other_nodes``.

    ``device_memory_bytes``, ``host_memory_bytes``: of one device, of one node.

    ``shares_cores``: devices compute on the cores that widen weights and run the optimizer, as CPU
    workers do. Fetches then run between the instructions of a device, and sweeps after its last.
    """

    devices_per_node: int
    fetch_bandwidth: float = inf
    offload_bandwidth: float = inf
    devices_per_switch: int = 1
    switch_bandwidth: float = inf
    peer_bandwidth: float = inf
    peer_through_host: bool = False
    nic_bandwidth: float = inf
    read_bandwidth: float | None = None
    dram_bandwidth: float = inf
    latency_s: float = 0.0
    numa_domains: int = 1
    optimizer_rate: float = inf
    preview_speed: float = 1.0
    settle_speed: float = 1.0
    device_optimizer_rate: float = inf
    update_fetch_bytes: float = 12.0
    update_offload_bytes: float = 2.0
    replicas: int = 1
    replica_bandwidth: float = inf
    replicas_on_other_nodes: bool = True
    device_memory_bytes: float = inf
    host_memory_bytes: float = inf
    shares_cores: bool = False

    def node_of(self, device: int) -> int:
        """Returns the node that a device is in."""
        return device // self.devices_per_node

    def domain_of(self, device: int) -> int:
        """Returns the NUMA domain that a device is bound to, numbered over all nodes."""
        inside = device % self.devices_per_node * self.numa_domains // self.devices_per_node
        return self.node_of(device) * self.numa_domains + inside

    def switch_of(self, device: int) -> int:
        """Returns the PCIe switch that a device is on, numbered over all nodes."""
        per_node = -(-self.devices_per_node // self.devices_per_switch)
        inside = device % self.devices_per_node // self.devices_per_switch
        return self.node_of(device) * per_node + inside

    def update_bytes_out(self, *, flush: bool) -> float:
        """Returns the bytes per parameter that an UPDATE sends to the host: the weight; with
        ``flush`` also the state, as many bytes as came.
        """
        return self.update_offload_bytes + (self.update_fetch_bytes if flush else 0.0)


class OptimizerStart(StrEnum):
    """When optimizer work may begin."""

    OFFLOAD = "offload"
    """Updates start as soon as a stage's gradients are in host memory, as in this system and in
    SPipe.
    """
    FLUSH = "flush"
    """When all gradients of all devices are: the synchronous optimizer of Mobius and Megatron."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerModel:
    """The optimizer sweep of a node's CPU cores.

    ``tail_bytes``: DRAM traffic per parameter of the sweep that must end before the step can
    commit; ``settle_bytes``: of a second sweep that runs during the next attempt's forward (0:
    none). A sweep runs at ``Cluster.optimizer_rate``, or slower where its share of DRAM bandwidth
    is less.

    ``stage_rate``: parameters/s that the threads of one stage's step reach, where every stage has
    its own and steps run side by side (SPipe, section 4); ``inf``: a domain's cores work on one
    unit after the other.

    ``early``: how the blocks in ``Plan.settled_early`` are done; ``None``: like all others.

    ``mirrored``: each node's partner, the next one, reads all gradients of its blocks, too, and the
    step ends when it has them (``memory.mirror``).
    """

    start: OptimizerStart = OptimizerStart.OFFLOAD
    tail_bytes: float = 30.0
    settle_bytes: float = 0.0
    stage_rate: float = inf
    early: OptimizerModel | None = None
    mirrored: bool = False


MOMENTS_BYTES = OPTIMIZERS[OptimizerName.ADAMW].state_bytes
"""Bytes of the moments per parameter, if no optimizer is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepBytes:
    """DRAM traffic of the optimizer's sweeps, in bytes per parameter, with 16-bit gradients and
    weights.
    """

    preview: float
    settle: float
    advance: float
    hold: float

    @classmethod
    def of(cls, state_bytes: float = MOMENTS_BYTES, *, split: bool = False) -> SweepBytes:
        """Returns the way of an optimizer with state arrays of ``state_bytes`` per parameter.

        A sweep that writes the state of a split master writes its lower halves only. The preview
        has written the upper halves into a slot of the weights (``native/storage.h``). The sweep
        reads both halves, as many bytes as a whole master.
        """
        grads, weights = 2.0, 2.0
        read = 4.0 + state_bytes
        written = (2.0 if split else 4.0) + state_bytes
        return cls(
            preview=read + grads + weights,
            settle=read + grads + written,
            advance=read + 2.0 * grads + written + weights,
            hold=read + grads + written + weights,
        )

    @property
    def advancing(self) -> OptimizerModel:
        """Settle and preview in one sweep, but for blocks that are settled early."""
        return OptimizerModel(tail_bytes=self.advance, early=self.preview_settle)

    @property
    def preview_settle(self) -> OptimizerModel:
        """Preview in the tail, settle during the next forward."""
        return OptimizerModel(tail_bytes=self.preview, settle_bytes=self.settle)


PREVIEW_SETTLE = SweepBytes.of().preview_settle
"""Preview in the tail, settle during the next forward."""

ADVANCE = SweepBytes.of().advancing
"""Settle and preview in one sweep, per backward stage, but as the plan says it: what this system
does.
"""

IN_PLACE = OptimizerModel(tail_bytes=SweepBytes.of().hold)
"""SPipe's asynchronous in-place step."""

SYNCHRONOUS = OptimizerModel(start=OptimizerStart.FLUSH, tail_bytes=SweepBytes.of().hold)
"""The step of Mobius and Megatron-offload: in place, after the last gradient."""
