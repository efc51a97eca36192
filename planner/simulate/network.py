"""Routes: the shared resources that bytes cross on their way, as numbers for the event core.

Resources are the PCIe link of a device, the PCIe switch, the NIC of a node, and its DRAM. Each has
its own capacity towards and from the host. The PCIe link is a resource only if transfers between
devices use it too. Otherwise nothing shares it, and its bandwidth is a limit of the route.

- Fetches and offloads cross PCIe link, switch and DRAM.
- Between devices of a node nothing is shared, or with ``peer_through_host`` both links and
  switches, and DRAM twice: written and read.
- Between nodes both NICs; with ``peer_through_host`` also links, switches, and the DRAM of each
  node twice.
- The optimizer's threads use DRAM, that of their NUMA domain if a node has several.

Unlimited resources cost nothing and do not appear.
"""

from __future__ import annotations

from math import inf, isinf
from typing import Any

import numpy as np

from penstock.planner.cost.cluster import Cluster


class Network:
    """Numbers routes as they are asked for."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._capacities: list[float] = []
        self._resources: dict[tuple[str, int], tuple[int, ...]] = {}
        self._routes: dict[tuple[float, tuple[int, ...]], int] = {}

    def fetch(self, device: int) -> int:
        """Returns the route from host to device."""
        down = self._from_host(device)
        return self._route(self._cluster.fetch_bandwidth, (*self._dram(device), *down))

    def offload(self, device: int) -> int:
        """Returns the route from device to host."""
        up = self._to_host(device)
        return self._route(self._cluster.offload_bandwidth, (*up, *self._dram(device)))

    def link(self, source: int, target: int) -> int:
        """Returns the route from one device to another."""
        cluster = self._cluster
        nodes = cluster.node_of(source), cluster.node_of(target)
        ends: tuple[int, ...] = ()
        if cluster.peer_through_host:
            ends = (*self._to_host(source), *self._from_host(target), *self._dram(source) * 2)
        if nodes[0] == nodes[1]:
            return self._route(cluster.peer_bandwidth, ends)
        if cluster.peer_through_host:
            ends = (*ends, *self._dram(target) * 2)
        return self._route(inf, (*ends, *self._nics(*nodes)))

    def replicas(self, device: int) -> int:
        """Returns the route from a device to its replica, while another replica sends to it."""
        cluster = self._cluster
        node = cluster.node_of(device)
        nics = self._nics(node, node) if cluster.replicas_on_other_nodes else ()
        return self._route(cluster.replica_bandwidth, nics)

    def nodes(self, source: int, target: int) -> int:
        """Returns the route from the memory of one node to that of another."""
        cluster = self._cluster
        dram = tuple(
            resource
            for node in (source, target)
            for resource in self._resource("dram", node, cluster.dram_bandwidth)
        )
        if self._cluster.read_bandwidth is not None:
            return self._route(self._cluster.read_bandwidth, dram)
        return self._route(inf, (*dram, *self._nics(source, target)))

    def optimizer(self, domain: int, bytes_per_second: float) -> int:
        """Returns the route of the optimizer of a NUMA domain through its DRAM; its threads alone
        would reach ``bytes_per_second``.
        """
        cluster, parts = self._cluster, self._cluster.numa_domains
        dram = self._resource("dram", domain // parts, cluster.dram_bandwidth)
        if parts > 1:
            dram = (*dram, *self._resource("channels", domain, cluster.dram_bandwidth / parts))
        return self._route(bytes_per_second, dram)

    def arrays(self) -> dict[str, Any]:
        """Returns the arguments of the event core."""
        crossed = [resources for _, resources in self._routes]
        lengths = [len(resources) for resources in crossed]
        return {
            "route_limits": np.array([limit for limit, _ in self._routes], dtype=np.float64),
            "route_offsets": np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
            "route_resources": np.array([r for rs in crossed for r in rs], dtype=np.int32),
            "capacities": np.array(self._capacities, dtype=np.float64),
        }

    def _route(self, limit: float, resources: tuple[int, ...]) -> int:
        return self._routes.setdefault((limit, resources), len(self._routes))

    def _resource(self, kind: str, place: int, capacity: float) -> tuple[int, ...]:
        """Returns the number of a resource, or nothing if it is unlimited."""
        if isinf(capacity):
            return ()
        if (kind, place) not in self._resources:
            self._resources[kind, place] = (len(self._capacities),)
            self._capacities.append(capacity)
        return self._resources[kind, place]

    def _dram(self, device: int) -> tuple[int, ...]:
        node = self._cluster.node_of(device)
        return self._resource("dram", node, self._cluster.dram_bandwidth)

    def _to_host(self, device: int) -> tuple[int, ...]:
        return self._pcie("up", device, self._cluster.offload_bandwidth)

    def _from_host(self, device: int) -> tuple[int, ...]:
        return self._pcie("down", device, self._cluster.fetch_bandwidth)

    def _pcie(self, direction: str, device: int, bandwidth: float) -> tuple[int, ...]:
        cluster = self._cluster
        switch = self._resource(
            f"switch {direction}", cluster.switch_of(device), cluster.switch_bandwidth
        )
        if not cluster.peer_through_host:
            return switch
        return (*self._resource(f"link {direction}", device, bandwidth), *switch)

    def _nics(self, source: int, target: int) -> tuple[int, ...]:
        bandwidth = self._cluster.nic_bandwidth
        return (
            *self._resource("nic out", source, bandwidth),
            *self._resource("nic in", target, bandwidth),
        )
