"""The number of CPUs that a node needs, and messages about engines that grant fewer.

A launcher may silently leave a node two of sixty-four CPUs. Its optimizer then is many times
slower, and nothing fails. So a node refuses to start with fewer CPUs than both the machine has and
it needs. A machine with too few CPUs is the user's choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.config.platforms import CoreUse
from penstock.config.schema import Config
from penstock.config.values import AUTO
from penstock.host.errors import CapacityError
from penstock.host.limits.cgroup import CpuLimit
from penstock.protocol.run.hardware.launchers import engine_of
from penstock.protocol.run.names import node_of_device, nodes_beside


def cpus_needed(config: Config) -> int:
    """Returns the CPUs that each node needs: ``cluster.cpus_per_node``, or at least one for each
    thread that is configured, for each worker, and for the optimizer.

    Workers that compute on the cores share them with the optimizer, which works mostly while they
    wait. Workers that feed devices need CPUs of their own; emulated workers sleep.
    """
    if config.cluster.cpus_per_node is not None:
        return config.cluster.cpus_per_node
    cores = config.optimizer.cores
    workers = config.cluster.workers * max(1, config.cluster.threads_per_worker)
    optimizer = max(1, config.optimizer.threads) if cores == AUTO else len(cores)
    match config.cluster.platform.cores:
        case CoreUse.COMPUTE:
            return max(optimizer, workers)
        case CoreUse.FEED:
            return optimizer + workers
        case CoreUse.WAIT:
            return optimizer


def threads_per_worker(config: Config, device: int, num_cores: int) -> int:
    """Returns the compute threads of a worker: configured, or its share of the machine's cores.

    Nodes with the same host are one machine.
    """
    if config.cluster.threads_per_worker:
        return config.cluster.threads_per_worker
    nodes_here = nodes_beside(config, node_of_device(config, device))
    return max(1, num_cores // (len(nodes_here) * config.cluster.workers))


def cpu_shortage(config: Config, nodes: Sequence[int], cpus: CpuLimit) -> str:
    """Returns in words what ``nodes`` (indices, all on this machine) lack of CPUs; empty where they
    lack none.
    """
    each = cpus_needed(config)
    needed = each * len(nodes)
    if cpus.count >= needed:
        return ""
    names = ", ".join(config.cluster.nodes[node].name for node in nodes)
    what = f"node {names} needs" if len(nodes) == 1 else f"nodes {names} need {each} each, in all"
    return f"CPUs: {what} {needed}, there are {cpus}"


def check_cpus(
    config: Config, nodes: Sequence[int], cpus: CpuLimit, environ: Mapping[str, str]
) -> None:
    """Refuses to start ``nodes`` (indices) if an engine withholds CPUs that the machine has.

    Raises:
        CapacityError: names the granted CPUs, the needed CPUs, and the setting to change.
    """
    shortage = cpu_shortage(config, nodes, cpus)
    if shortage and cpus.is_cut:
        remedy = engine_of(environ).more_cpus.format(n=cpus_needed(config) * len(nodes))
        raise CapacityError(
            f"{shortage}. Threads that wait for each other would make the optimizer many times"
            f" slower. {remedy}; or say cluster.cpus_per_node: {max(1, cpus.count // len(nodes))},"
            " to train with these"
        )
