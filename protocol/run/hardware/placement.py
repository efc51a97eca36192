"""Assignment of a machine's cores, and of NUMA nodes to the pieces of a block.

Pure: a function of the configuration, the machine's topology and the CPUs that the process may use.
Every process of a node computes the same result. The optimizer's threads are pinned, one to a CPU.
The first CPU of every physical core comes before any second one. Threads are spread evenly over
NUMA nodes, because each has its own memory channels. Thread i of a sweep works on the i-th piece of
each block (``cut_span`` in ``native/sweeps.cpp``), so threads are in the order of the NUMA nodes. A
node's threads share a contiguous part of every array, and that part is kept on the node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.config.platforms import CoreUse
from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.host.limits.cgroup import cpu_limit
from penstock.host.topology import Core, Topology, format_cpus
from penstock.protocol.run.names import nodes_beside
from penstock.protocol.run.rundir import MAX_OPTIMIZER_THREADS
from penstock.shm.layout import NodeLayout, SegmentKind
from penstock.shm.pages import NodeRange
from penstock.shm.table import BlockTable

CHUNK_ELEMENTS = 4096
"""``kChunk`` of ``native/kernels.h``: pieces end at multiples of it."""
_PLACED = (SegmentKind.WEIGHTS, SegmentKind.STATE, SegmentKind.GRADS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """``optimizer[i]``: the CPU of the optimizer's thread i; ``nodes[i]``: its NUMA node.

    ``workers``: the CPUs that each of the node's workers may use. ``several``: the machine has
    several NUMA nodes.
    """

    optimizer: tuple[int, ...]
    nodes: tuple[int, ...]
    workers: tuple[int, ...]
    several: bool

    def to_dict(self) -> dict[str, str]:
        """Returns the placement in the words of ``penstock doctor`` and of the metrics' labels."""
        return {
            "optimizer": format_cpus(self.optimizer),
            "numa_nodes": format_cpus(set(self.nodes)),
            "workers": format_cpus(self.workers),
        }


def place(
    config: Config,
    node: int,
    *,
    topology: Topology | None = None,
    allowed: Collection[int] | None = None,
    quota: int | None = None,
) -> Placement:
    """Returns the cores of the ``node``-th node of the cluster, by default on this machine.

    ``optimizer.cores: auto``: each of the nodes on this machine has its part of the physical cores,
    if there are two or more for each, else all. Of its part it leaves ``optimizer.leave_cores`` to
    the workers. ``leave_cores: auto`` leaves a core to each GPU worker, but at most half. It leaves
    none if workers compute on the cores: then the optimizer works mostly while workers wait for it.
    Workers on GPUs avoid the optimizer's cores if others are free.

    ``quota`` is the quota of CPU time, in CPUs. If it is less than the cores, the optimizer gets
    only as many threads. More threads would be stopped in the middle of a sweep.

    Raises:
        ConfigError: ``optimizer.cores`` names a core that does not exist or must not be used.
    """
    topology = Topology.read() if topology is None else topology
    if allowed is None:
        limit = cpu_limit()
        allowed, quota = limit.allowed, limit.count
    cores = topology.cores(allowed)
    granted = sorted(_evenly(cores)[:quota], key=cores.index)
    setting = config.optimizer.cores
    if setting == "auto":
        chosen = {i: _choose(config, share) for i, share in _shares(config, node, granted).items()}
        optimizer, taken = chosen[node], {cpu for cpus in chosen.values() for cpu in cpus}
    else:
        _check_there(setting, topology, allowed)
        optimizer, taken = setting, set(setting)
    optimizer = tuple(sorted(optimizer, key=lambda cpu: topology.node_of[cpu]))
    workers = tuple(sorted(cpu for core in cores for cpu in core.cpus))
    if config.cluster.platform.cores is CoreUse.FEED:
        free = [cpu for core in cores if not taken & set(core.cpus) for cpu in core.cpus]
        workers = tuple(sorted(free)) or workers
    return Placement(
        optimizer=optimizer,
        nodes=tuple(topology.node_of[cpu] for cpu in optimizer),
        workers=workers,
        several=len(topology.nodes) > 1,
    )


def check_cores(config: Config) -> None:
    """Refuses cores that no node can have, before anything of a run is written. All nodes are
    assumed to be on this machine.

    Raises:
        ConfigError: see :func:`place`.
    """
    place(config, 0)


def pieces(num_elements: int, num_threads: int) -> list[tuple[int, int]]:
    """Returns the elements [start, end) that each thread of a sweep works on. Threads at the end
    have none if there are fewer chunks than threads. Equal to ``cut_span`` in
    ``native/sweeps.cpp``.
    """
    spans, start = [], 0
    for part in range(1, num_threads + 1):
        end = num_elements
        if part < num_threads:
            ideal = num_elements // num_threads * part
            end = (ideal + CHUNK_ELEMENTS // 2) // CHUNK_ELEMENTS * CHUNK_ELEMENTS
        if start < end <= num_elements:
            spans.append((start, end))
            start = end
    return spans


def page_places(
    placement: Placement, layout: NodeLayout, table: BlockTable
) -> dict[SegmentKind, list[NodeRange]]:
    """Returns the NUMA nodes of the optimizer's arrays: each thread's pieces on its node."""
    places: dict[SegmentKind, list[NodeRange]] = {kind: [] for kind in _PLACED}
    for (block, *_), array in layout.arrays.items():
        if array.segment in places and array.num_bytes:
            count = table.blocks[block].trainable_elements
            places[array.segment] += _ranges(
                placement, array.offset, array.num_bytes // count, count
            )
    return places


def array_places(placement: Placement, item_bytes: int, count: int) -> list[NodeRange]:
    """Returns the NUMA nodes of the pages of one array of a block."""
    return list(_ranges(placement, 0, item_bytes, count))


def _ranges(placement: Placement, offset: int, item_bytes: int, count: int) -> Iterator[NodeRange]:
    """Yields the ranges of one array; neighbouring pieces of the same node are one."""
    start = end = 0
    cut = pieces(count, len(placement.nodes))
    for i, (_, end) in enumerate(cut):
        node = placement.nodes[i]
        if i + 1 == len(cut) or placement.nodes[i + 1] != node:
            yield NodeRange(
                offset=offset + start * item_bytes, num_bytes=(end - start) * item_bytes, node=node
            )
            start = end


def _shares(config: Config, node: int, cores: Sequence[Core]) -> dict[int, Sequence[Core]]:
    """Returns the physical cores of each node of the cluster that has the host of ``node``: these
    are on one machine.
    """
    here = nodes_beside(config, node)
    if len(cores) < 2 * len(here):
        return dict.fromkeys(here, cores)
    bounds = [len(cores) * k // len(here) for k in range(len(here) + 1)]
    return {i: cores[bounds[k] : bounds[k + 1]] for k, i in enumerate(here)}


def _choose(config: Config, cores: Sequence[Core]) -> tuple[int, ...]:
    """Returns CPUs for the optimizer's threads, from the cores of its node."""
    threads = config.optimizer.threads
    left = set(_evenly(cores)[: _num_left(config, len(cores))])
    mine = [core for core in cores if core not in left]
    # By order of use: first CPUs of all cores, then second ones.
    ordered = [
        core.cpus[level]
        for level in range(max(len(core.cpus) for core in mine))
        for core in _evenly(mine)
        if level < len(core.cpus)
    ]
    chosen = ordered[: min(threads or len(mine), MAX_OPTIMIZER_THREADS)]
    return tuple(cpu for core in mine for cpu in core.cpus if cpu in chosen)


def _num_left(config: Config, num_cores: int) -> int:
    """Returns the number of physical cores that stay free of the optimizer; it always has one."""
    share, threads = config.optimizer.leave_cores, config.optimizer.threads
    if share != "auto":
        return min(round(share * num_cores), num_cores - 1)
    if config.cluster.platform.cores is not CoreUse.FEED:
        return 0
    # As many of the requested threads as possible have their own core.
    return min(config.cluster.workers, num_cores // 2, max(num_cores - threads, 0))


def _evenly(cores: Iterable[Core]) -> list[Core]:
    """Returns cores in the order of one of each NUMA node after the other."""
    seen: dict[int, int] = {}
    ranked = []
    for core in cores:
        rank = seen[core.node] = seen.get(core.node, -1) + 1
        ranked.append((rank, core.node, core))
    return [core for _, _, core in sorted(ranked, key=lambda entry: entry[:2])]


def _check_there(wanted: Collection[int], topology: Topology, allowed: Collection[int]) -> None:
    usable = set(allowed) & set(topology.node_of)
    if len(wanted) > MAX_OPTIMIZER_THREADS:
        raise ConfigError(
            f"optimizer.cores = {format_cpus(wanted)}: at most {MAX_OPTIMIZER_THREADS} are of use"
        )
    bad = [cpu for cpu in wanted if cpu not in usable]
    if not bad:
        return
    online = [cpu for cpu in bad if cpu in topology.node_of]
    reasons = [
        f"{format_cpus(group)} {reason}"
        for group, reason in (
            (set(bad) - set(online), "not on this machine"),
            (online, "not allowed to this process (taskset, cpuset)"),
        )
        if group
    ]
    raise ConfigError(
        f"optimizer.cores = {format_cpus(wanted)}: {'; '.join(reasons)};"
        f" usable here: {format_cpus(usable)}, or auto"
    )
