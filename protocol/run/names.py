"""Names and addresses that every process derives from the configuration alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.reduction import Reduction
from penstock.shm.layout import Ownership, Storage
from penstock.shm.table import MAX_CONTRIBUTIONS, BlockTable

SCHEDULERD = "schedulerd"
"""Name of the scheduler's process; it is no member of its own run."""
SOCKET_FOLDERS = Path("/dev/shm")
"""The folder in which folders of local sockets are."""
FOLDER_PREFIX = ".penstock-"
OBSERVERD = "observerd"
"""Name of the process on the first node that analyses the run; it is no member."""


def memoryd_name(node: str) -> str:
    """Returns the member name of a node's memoryd."""
    return f"memoryd.{node}"


def optimizerd_name(node: str) -> str:
    """Returns the member name of a node's optimizerd."""
    return f"optimizerd.{node}"


def mirrord_name(node: str) -> str:
    """Returns the member name of the process on a node that keeps another node's replica."""
    return f"mirrord.{node}"


def fetchd_name(node: str) -> str:
    """Returns the name of a node's fetchd. It is no member: a run continues without it."""
    return f"fetchd.{node}"


def metricsd_name(node: str) -> str:
    """Returns the name of a node's metricsd. It is no member: a run continues without it."""
    return f"metricsd.{node}"


def preloader_name(kind: str, node: str) -> str:
    """Returns the name of a node's preloader of a kind. It is no member: processes are spawned
    without it.
    """
    return f"preload-{kind}.{node}"


def node_member_name(node: str) -> str:
    """Returns the member name of a node's supervisor."""
    return f"node.{node}"


def worker_name(device: int) -> str:
    """Returns the member name of the worker of a device; devices count over all nodes,
    node-major.
    """
    return f"worker.{device}"


def node_of_device(config: Config, device: int) -> int:
    """Returns the index of the node of a device."""
    return device // config.cluster.workers


def devices_of_node(config: Config, node: int) -> range:
    """Returns the devices of a node."""
    return range(node * config.cluster.workers, (node + 1) * config.cluster.workers)


def nodes_beside(config: Config, node: int) -> tuple[int, ...]:
    """Returns the indices of the nodes with the host of ``node``, including ``node``."""
    hosts = [other.host for other in config.cluster.nodes]
    return tuple(i for i, host in enumerate(hosts) if host == hosts[node])


def node_index(config: Config, node_name: str) -> int:
    """Returns the index of a node by name.

    Raises:
        ConfigError: ``cluster.nodes`` has no such node.
    """
    names = [node.name for node in config.cluster.nodes]
    if node_name not in names:
        raise ConfigError(f"--node {node_name}: cluster.nodes has {', '.join(names)}")
    return names.index(node_name)


def partner_of(config: Config, node: int) -> int:
    """Returns the index of the node that keeps the replica of ``node``: the next one, in a ring."""
    return (node + 1) % len(config.cluster.nodes)


def mirrored_by(config: Config, node: int) -> int:
    """Returns the index of the node with its replica on ``node``."""
    return (node - 1) % len(config.cluster.nodes)


def replica_name(keeper: str, owner: str) -> str:
    """Returns the name of a replica, in the place of a node's name in names of segments. No node
    has it, since names of nodes have no dots.
    """
    return f"{keeper}.{owner}"


def expected_members(config: Config) -> tuple[str, ...]:
    """Returns all members an epoch needs."""
    members = []
    for index, node in enumerate(config.cluster.nodes):
        members += [
            node_member_name(node.name),
            memoryd_name(node.name),
            optimizerd_name(node.name),
        ]
        if config.mirrors:
            members.append(mirrord_name(node.name))
        members += [worker_name(device) for device in devices_of_node(config, index)]
    return tuple(members)


def place_of_member(config: Config, member: str) -> tuple[str, int | None]:
    """Returns the node that a process runs on, and the device of a worker."""
    nodes = config.cluster.nodes
    kind, _, where = member.partition(".")
    if member in (SCHEDULERD, OBSERVERD):
        return nodes[0].name, None
    if kind == "worker":
        return nodes[node_of_device(config, int(where))].name, int(where)
    return where, None


def metrics_port(config: Config, node: int) -> int:
    """Returns the port of a node's metricsd; 0: the system chooses.

    ``observability.metrics_port`` is the port on every machine; nodes that share one follow each
    other from there.
    """
    first = config.observability.metrics_port
    return first + nodes_beside(config, node).index(node) if first else 0


def ipc_address(run_id: str, node: str, name: str) -> str:
    """Returns the address of a daemon's local socket, in the node's folder."""
    return f"ipc://{socket_folder(run_id, node) / name}"


def socket_folder(run_id: str, node: str) -> Path:
    """Returns the folder of a node's local sockets
    (:mod:`penstock.protocol.wire.local_names`).
    """
    return SOCKET_FOLDERS / f"{FOLDER_PREFIX}{run_id}-{node}"


def ownership(config: Config, table: BlockTable, plan: Plan) -> Ownership:
    """Returns the owner of each block and the publishers of its gradients: the nodes of the devices
    that :class:`~penstock.protocol.plan.reduction.Reduction` names.

    Raises:
        ConfigError: more routes, or uses of a tied block, than a block has ready words for; or the
            reduction of routes on devices is inconsistent.
    """
    published = Reduction.of(plan).published_devices
    _check_contributions(table, len(published))
    routes = [[node_of_device(config, device) for device in route] for route in published]
    return Ownership.from_backward_nodes(table, routes[0], routes[1:])


def storage(config: Config, plan: Plan) -> Storage:
    """Returns the storage of model state, by the optimizer's options and the blocks that the plan
    settles early or flushes.
    """
    optimizer = config.optimizer
    split = optimizer.master == "split"
    single: Iterable[int] = ()
    if optimizer.rollback == "arithmetic":
        # Steps in place leave nothing for which gradients would have to stay.
        single = range(plan.num_blocks)
    elif split and not config.mirrors:  # and devices update none of the blocks: protocol.executable
        # A partner pulls gradients, and does not see the owner's words: two copies then.
        single = plan.settled_early
    return Storage(split_master=split, single_gradients=tuple(single), flushed=plan.flushed)


def _check_contributions(table: BlockTable, num_routes: int) -> None:
    for block in table.blocks:
        if num_routes * block.contributions > MAX_CONTRIBUTIONS:
            raise ConfigError(
                f"schedule: {num_routes} routes (replicas, directions of a pipeline) for block"
                f" {block.name!r}, which a route uses {block.contributions} times, are"
                f" {num_routes * block.contributions} gradient contributions; a block has at most"
                f" {MAX_CONTRIBUTIONS}: use {MAX_CONTRIBUTIONS // block.contributions} routes or"
                " fewer (schedule.replicas), or schedule.reduce_gradients: true"
            )
