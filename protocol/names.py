"""Names and addresses that every process derives from the configuration alone."""

from __future__ import annotations

from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError
from penstock.protocol.plan import Plan
from penstock.shm.layout import Ownership
from penstock.shm.table import BlockTable


def memoryd_name(node: str) -> str:
    """Member name of a node's memoryd."""
    return f"memoryd.{node}"


def optimizerd_name(node: str) -> str:
    """Member name of a node's optimizerd."""
    return f"optimizerd.{node}"


def node_member_name(node: str) -> str:
    """Member name of a node's supervisor."""
    return f"node.{node}"


def worker_name(device: int) -> str:
    """Member name of the worker of a device; devices count over all nodes, node-major."""
    return f"worker.{device}"


def node_of_device(config: Config, device: int) -> int:
    """Index of the node a device is on."""
    return device // config.cluster.workers


def devices_of_node(config: Config, node: int) -> range:
    """Devices on a node."""
    return range(node * config.cluster.workers, (node + 1) * config.cluster.workers)


def node_index(config: Config, node_name: str) -> int:
    """Index of a node by name.

    Raises:
        ConfigError: ``cluster.nodes`` has no such node.
    """
    names = [node.name for node in config.cluster.nodes]
    if node_name not in names:
        raise ConfigError(f"--node {node_name}: cluster.nodes has {', '.join(names)}")
    return names.index(node_name)


def expected_members(config: Config) -> tuple[str, ...]:
    """All members an epoch needs."""
    members = []
    for index, node in enumerate(config.cluster.nodes):
        members += [
            node_member_name(node.name),
            memoryd_name(node.name),
            optimizerd_name(node.name),
        ]
        members += [worker_name(device) for device in devices_of_node(config, index)]
    return tuple(members)


def metrics_port(config: Config, member: str) -> int:
    """Where a process serves its metrics; 0: the system chooses.

    When ``observability.metrics_port`` is set, it is the scheduler's, and members follow in the
    order of :func:`expected_members`, so that processes of one machine do not collide.
    """
    first = config.observability.metrics_port
    members = ("schedulerd", *expected_members(config))
    return first + members.index(member) if first else 0


def ipc_address(run_id: str, node: str, name: str) -> str:
    """Address of a daemon's local socket, in the abstract namespace: no file is left behind."""
    return f"ipc://@penstock-{run_id}-{node}-{name}"


def ownership(config: Config, table: BlockTable, plan: Plan) -> Ownership:
    """Who owns each block: the node of the device that runs its backward."""
    return Ownership.from_backward_nodes(
        table,
        [node_of_device(config, plan.owner_device(block.index)) for block in table.blocks],
    )
