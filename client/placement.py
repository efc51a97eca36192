"""The placement section of ``penstock doctor``: cores, huge pages and NUMA nodes.

Also shows the cores of a configuration's processes, and settings that would make the machine
faster.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.schema import Config
from penstock.config.values import human_bytes
from penstock.host.errors import ConfigError
from penstock.host.limits.cgroup import cpu_limit
from penstock.host.topology import Topology, format_cpus
from penstock.protocol.run.hardware.placement import place
from penstock.shm.layout import PAGE_BYTES
from penstock.shm.pages import HugePages, NodeRange, allowed_huge_pages, prefer_nodes
from penstock.shm.segment import SHM_ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFacts:
    """Facts of a machine that placement depends on.

    ``memlock``: bytes that a process may lock, or None for unlimited. ``huge_bytes``: bytes of
    shared memory in huge pages, of all programs. ``binds``: True if pages can be bound to NUMA
    nodes. ``quota``: threads that a quota of CPU time permits at a time, or None.
    """

    topology: Topology
    allowed: frozenset[int]
    huge_pages: HugePages
    huge_bytes: int
    memlock: int | None
    num_gpus: int
    numa_balancing: bool
    binds: bool
    quota: int | None = None

    @classmethod
    def probe(cls) -> PlacementFacts:
        """Returns the facts of this machine for this process."""
        topology = Topology.read()
        memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        cpus = cpu_limit()
        return cls(
            topology=topology,
            allowed=cpus.allowed,
            quota=cpus.count if cpus.count < len(cpus.allowed) else None,
            huge_pages=allowed_huge_pages(SHM_ROOT),
            huge_bytes=_huge_shared_bytes(),
            memlock=None if memlock == resource.RLIM_INFINITY else memlock,
            num_gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
            numa_balancing=_reads_one(Path("/proc/sys/kernel/numa_balancing")),
            binds=_binds(min(topology.node_of.values())),
        )

    @property
    def several_nodes(self) -> bool:
        """True if the machine has several NUMA nodes."""
        return len(self.topology.nodes) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementReport:
    """A report on placement. ``cluster`` holds the cores of each node's processes, or a refusal."""

    machine: PlacementFacts
    cluster: dict[str, dict[str, str]]

    @classmethod
    def of(cls, machine: PlacementFacts, config: Config | None) -> PlacementReport:
        """Returns the report, for all nodes of ``config`` on this machine."""
        if config is None:
            return cls(machine=machine, cluster={})
        nodes = enumerate(config.cluster.nodes)
        return cls(
            machine=machine,
            cluster={node.name: _placed(config, index, machine) for index, node in nodes},
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
        machine = self.machine
        return {
            "numa_nodes": {str(node): cpus for node, cpus in self._numa_nodes()},
            "physical_cores": len(machine.topology.cores(machine.allowed)),
            "allowed_cpus": format_cpus(machine.allowed),
            "cpu_quota": machine.quota,
            "huge_pages": machine.huge_pages.value,
            "huge_bytes": machine.huge_bytes,
            "memlock_bytes": machine.memlock,
            "cluster": self.cluster,
            "advice": list(self.advice()),
        }

    def to_lines(self) -> Iterator[str]:
        """Yields the lines of the report."""
        machine = self.machine
        yield "placement"
        for node, cpus in self._numa_nodes():
            yield f"  NUMA node {node}: {f'CPUs {cpus}' if cpus else 'memory only'}"
        cores = len(machine.topology.cores(machine.allowed))
        quota = "" if machine.quota is None else f"; quota: {machine.quota} threads at a time"
        yield f"  usable: CPUs {format_cpus(machine.allowed)} on {cores} physical cores{quota}"
        yield (
            f"  huge pages behind /dev/shm: {machine.huge_pages.value}; shared memory in huge pages"
            f" now: {human_bytes(machine.huge_bytes)}"
        )
        for name, cores_of in self.cluster.items():
            yield f"  node {name}: " + ", ".join(
                f"{process.replace('_', ' ')} {cpus}" for process, cpus in cores_of.items()
            )
        for advice in self.advice():
            yield f"  advice: {advice}"

    def advice(self) -> Iterator[str]:
        """Yields a line for each setting to change."""
        machine = self.machine
        if machine.huge_pages is HugePages.NEVER:
            yield (
                "model state gets no huge pages; as root: mount -o remount,huge=advise /dev/shm"
                " (and shmem_enabled in /sys/kernel/mm/transparent_hugepage not deny)"
            )
        if machine.num_gpus and machine.memlock is not None:
            yield (
                f"the memlock limit is {human_bytes(machine.memlock)}, but GPU workers lock shared"
                " memory: ulimit -l unlimited, or LimitMEMLOCK=infinity"
            )
        if machine.several_nodes and not machine.binds:
            yield (
                "pages cannot be bound to NUMA nodes (mbind is refused): run the container with"
                " CAP_SYS_NICE"
            )
        if machine.several_nodes and machine.numa_balancing:
            yield (
                "the kernel moves pages between NUMA nodes, although they already are on the node"
                " of their threads; as root: sysctl kernel.numa_balancing=0"
            )

    def _numa_nodes(self) -> Iterator[tuple[int, str]]:
        topology = self.machine.topology
        for node in topology.nodes:
            yield node, format_cpus(c for c, where in topology.node_of.items() if where == node)


def _placed(config: Config, node: int, machine: PlacementFacts) -> dict[str, str]:
    try:
        placement = place(
            config, node, topology=machine.topology, allowed=machine.allowed, quota=machine.quota
        )
    except ConfigError as error:
        return {"refused": str(error)}
    return placement.to_dict()


def _huge_shared_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("ShmemHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


def _reads_one(path: Path) -> bool:
    return path.exists() and path.read_text(encoding="ascii").strip() == "1"


def _binds(node: int) -> bool:
    with mmap.mmap(-1, PAGE_BYTES) as page:
        try:
            prefer_nodes(page, [NodeRange(offset=0, num_bytes=PAGE_BYTES, node=node)])
        except OSError:
            return False
    return True
