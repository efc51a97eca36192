"""Determines a node's name, the other nodes and the scheduler's address, and waits for the run.

The configuration has priority: names and hosts in ``cluster.nodes``, ``--node``,
``cluster.scheduler_port``. The engine that started the process supplies missing values
(:mod:`penstock.daemons.node.joining.launchers`). A contradiction is an error that names both sides.
The first node writes all values into ``resolved.yaml``, which every other process reads.

Nodes that an engine starts together must not use the run directory of an earlier start. A shared
file system may also show files late. So all nodes but the first ask the scheduler for the checksum
of its inputs. The scheduler starts after the first node has prepared the run. The nodes continue
when their view of the directory has the same checksum.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.config.execution import NodeConfig
from penstock.config.schema import Config
from penstock.config.training import TrainConfig
from penstock.daemons.node.endpoint import read_endpoint
from penstock.daemons.node.joining.addresses import (
    LOOPBACK,
    addresses_of,
    find_addresses,
    is_loopback,
    is_own,
)
from penstock.daemons.node.joining.launchers import Environment, Place, find_place, tasks_of_step
from penstock.daemons.node.preparing.machine import check_machine
from penstock.daemons.node.preparing.prepare import is_complete, prepare_run
from penstock.daemons.preload.starting import Starter
from penstock.host.errors import ConfigError, ExitCode, LostMemberError
from penstock.host.process_identity import start_ticks
from penstock.host.requirements import check_torch
from penstock.protocol.run.checksums import checksums_digest
from penstock.protocol.run.data_size import with_known_steps
from penstock.protocol.run.names import nodes_beside
from penstock.protocol.run.run_result import EndWatch, RunEnd
from penstock.protocol.run.rundir import SHARED
from penstock.protocol.security.addresses import check_addresses
from penstock.protocol.security.credentials import keys_of_node, member_credentials
from penstock.protocol.wire.control import ControlClient

LATE_FILES_S = 180.0
"""Files that another machine wrote may stay unseen for so long: NFS keeps what it knows of a
directory for a minute.
"""
_ASK_INTERVAL_S = 0.25
_ASK_TIMEOUT_S = 3.0
_SAY_INTERVAL_S = 30.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Values that a node needs to begin. ``ended``: the run was over before the node joined it."""

    node: str
    resolved: Path
    ended: RunEnd | None = None


def meet(
    path: Path,
    config: Config,
    name: str | None,
    scheduler: str | None,
    environment: Environment,
    full_name: Callable[[], str],
    say: Say,
    starter: Starter | None = None,
) -> Meeting:
    """Settles which node this is, prepares the run if that is the first, else waits until the first
    has.

    ``path`` is the file that ``config`` was read from; a ``resolved.yaml`` is prepared already.
    ``name`` and ``scheduler`` are what the command line says, if it does. ``starter`` starts what
    needs torch.

    Raises:
        ConfigError: configuration and environment contradict each other, or lack something; also
            this machine: a torch that would do.
        LostMemberError: the first node did not come in time.
        PenstockError: the run cannot be prepared.
    """
    check_torch()
    place = find_place(environment, full_name)
    node = name or config.cluster.nodes[0].name
    if place is not None:
        config, node = settle(config, place, name)
        say(f"{place.engine}: {place.rank_source}, so this is node {node}")
    if path.name == "resolved.yaml":
        return Meeting(node=node, resolved=path)
    resolved = config.run_dir.absolute() / "resolved.yaml"
    if node == config.cluster.nodes[0].name:
        alone = len(config.cluster.nodes) == 1
        here = nodes_beside(config, 0)
        run = prepare_run(config, config.run_dir, say, here, starter, rests=alone)
        train = with_known_steps(config, run.path).train
        if alone and is_complete(run, train.steps):
            return Meeting(node=node, resolved=resolved, ended=_all_done(train))
        return Meeting(node=node, resolved=resolved)
    ended = wait_for_start(config, node, scheduler, say)
    return Meeting(node=node, resolved=resolved, ended=ended)


def _all_done(train: TrainConfig) -> RunEnd:
    """Returns the end of a run that has nothing left to do."""
    return RunEnd(
        reason=f"all {train.steps} steps are done and saved; raise {train.length_key} to go on",
        code=ExitCode.DONE,
        keep_memory=False,
        failed=False,
        written_s=time.time(),
    )


def check_alone(environment: Environment) -> str | None:
    """Returns a warning if ``penstock train`` was started under an engine with more nodes for the
    run; None otherwise.

    Raises:
        ConfigError: several copies of the command were started.
    """
    copies = tasks_of_step(environment)
    if copies > 1:
        raise ConfigError(
            f"penstock train was started {copies} times, and once is enough for all processes of a"
            " run on one machine. On each of several machines start one penstock node --config FILE"
        )
    job, nodes = environment.get("SLURM_JOB_ID"), environment.get("SLURM_JOB_NUM_NODES", "")
    if job and nodes.isdecimal() and int(nodes) > 1:
        return (
            f"Slurm job {job} has {nodes} nodes, and penstock train uses this one only; for all of"
            " them: srun --ntasks-per-node=1 penstock node --config FILE"
        )
    return None


def settle(config: Config, place: Place, name: str | None) -> tuple[Config, str]:
    """Returns the configuration with the nodes that the engine started, and this node's name.

    The addresses count that the first node finds; the others read them from ``resolved.yaml``.

    Raises:
        ConfigError: names what contradicts what.
    """
    nodes = _nodes(config, place)
    node = nodes[place.rank]
    if name is not None and name != node.name:
        raise ConfigError(
            f"--node {name} and {place.rank_source} of {place.engine}, which is node {node.name},"
            " contradict each other: omit --node"
        )
    hosts = _hosts(nodes, place)
    cluster = config.cluster
    port = cluster.scheduler_port or (place.port if len(nodes) > 1 else 0)
    named = tuple(
        NodeConfig(name=node.name, host=host) for node, host in zip(nodes, hosts, strict=True)
    )
    cluster = cluster.model_copy(update={"nodes": named, "scheduler_port": port})
    return config.model_copy(update={"cluster": cluster}), node.name


def _nodes(config: Config, place: Place) -> tuple[NodeConfig, ...]:
    """Returns the nodes that the configuration names, else as many as the engine has. Their names
    are numbers: a run goes on on other hosts.
    """
    if "nodes" not in config.cluster.model_fields_set:
        if place.count is None:
            raise ConfigError(
                f"{place.engine}: {place.rank_source} is set, but the number of nodes is unknown:"
                " set NNODES in the environment of all nodes, or set cluster.nodes"
            )
        return tuple(NodeConfig(name=f"node-{i}") for i in range(place.count))
    nodes = config.cluster.nodes
    names = ", ".join(node.name for node in nodes)
    if place.count not in (None, len(nodes)):
        raise ConfigError(
            f"cluster.nodes has {len(nodes)} ({names}), and {place.count_source} of {place.engine}"
            f" gives {place.count}: start as many nodes, or omit cluster.nodes to take them from"
            " the engine"
        )
    if place.rank >= len(nodes):
        raise ConfigError(
            f"cluster.nodes has {len(nodes)} ({names}), and {place.rank_source} of {place.engine}"
            f" is node number {place.rank + 1}: start no more nodes than cluster.nodes has"
        )
    return nodes


def _hosts(nodes: tuple[NodeConfig, ...], place: Place) -> list[str]:
    """Returns where each node is reached: as the configuration says, else as the engine does."""
    if len(nodes) == 1:
        given = "host" in nodes[0].model_fields_set
        return [nodes[0].host if given else LOOPBACK]
    hosts = [place.host(rank) for rank in range(len(nodes))]
    for i, node in enumerate(nodes):
        if "host" not in node.model_fields_set:
            continue
        elsewhere = [rank for rank, host in enumerate(hosts) if host == node.host and rank != i]
        mine = i == place.rank and not is_own(node.host)
        if (elsewhere and node.host not in (LOOPBACK, hosts[i])) or mine:
            where = "no address of this machine" if mine else f"node number {elsewhere[0] + 1}"
            raise ConfigError(
                f"cluster.nodes: node {node.name} has host {node.host}, which is {where}, and"
                f" {place.engine} has it on {hosts[i] or 'this one'}: leave the hosts out, and they"
                " follow from the engine; or put them into its order"
            )
    open_ranks = [i for i, node in enumerate(nodes) if "host" not in node.model_fields_set]
    looked_up = _looked_up(hosts, open_ranks, place)
    return [looked_up.get(i, node.host) for i, node in enumerate(nodes)]


def _looked_up(found: list[str | None], open_ranks: list[int], place: Place) -> dict[int, str]:
    """Returns the hosts of those nodes for which the configuration has none."""
    names = {rank: host for rank in open_ranks if (host := found[rank]) is not None}
    if place.moves:
        return names
    if place.rank != 0:
        known_here = find_addresses(tuple(names.values()))
        return {rank: known_here.get(host, host) for rank, host in names.items()}
    addresses = addresses_of(tuple(names.values()), place.engine)
    known = dict(zip(names, addresses, strict=True))
    missing = [rank for rank in open_ranks if rank not in known]
    if missing and is_loopback(known.get(0, "")):
        return known | dict.fromkeys(missing, known[0])
    if missing:
        raise ConfigError(
            f"{place.engine} gives the address of the first node, but not of node number"
            f" {missing[0] + 1}: set the addresses of all nodes in cluster.nodes"
        )
    return known


def wait_for_start(config: Config, node: str, scheduler: str | None, say: Say) -> RunEnd | None:
    """Waits until the first node has prepared the run, its scheduler answers ``node``, and this
    machine sees the prepared files. Returns the run's end if the run ended meanwhile.

    Raises:
        LostMemberError: that did not happen within ``cluster.start_timeout_s``.
        CapacityError: the address space of processes is limited too tightly.
        ConfigError: this machine lacks what every run needs; or the scheduler answers, but this
            machine never sees the run; or the keys of this node are of no use.
    """
    check_addresses(config)
    check_machine(config, [[entry.name for entry in config.cluster.nodes].index(node)])
    if config.cluster.uses_keys:
        keys_of_node(config, node)
    run_dir, first = config.run_dir.absolute(), config.cluster.nodes[0]
    ending = EndWatch(run_dir, old=RunEnd.read(run_dir))
    timeout_s = config.cluster.start_timeout_s
    start_s = said_s = time.monotonic()
    answered_s: float | None = None
    say(f"waiting until node {first.name} has prepared the run and started the scheduler")
    while (end := ending.look()) is None:
        address, now_s = scheduler or _known_address(config, run_dir), time.monotonic()
        digest = None if address is None else _prepared_digest(config, node, address)
        if digest is not None:
            answered_s = answered_s or now_s
            if digest == checksums_digest(run_dir):
                return None
            if now_s - answered_s > LATE_FILES_S:
                raise ConfigError(
                    f"{run_dir}: after {LATE_FILES_S:g} s it still does not show the run of the"
                    f" scheduler at {address}; {SHARED}"
                )
        where = address or f"{run_dir / 'endpoint.json'}, which is for nodes of one machine"
        if now_s - start_s > timeout_s:
            raise LostMemberError(
                f"node {first.name}, which prepares the run and hosts the scheduler, was not there"
                f" within {timeout_s:g} s (cluster.start_timeout_s); tried {where}: read that"
                " node's output, start it, or set cluster.scheduler_port"
            )
        if now_s - said_s > _SAY_INTERVAL_S:
            said_s = now_s
            waited = (
                "the scheduler to answer" if answered_s is None else f"{run_dir} to show the run"
            )
            say(f"waiting for {waited} at {where}: {now_s - start_s:.0f} s of {timeout_s:g} s")
        time.sleep(_ASK_INTERVAL_S)
    return end


def _known_address(config: Config, run_dir: Path) -> str | None:
    """Returns where the scheduler listens or will listen; None: not known yet."""
    cluster = config.cluster
    if cluster.scheduler_port:
        return f"{cluster.nodes[0].host}:{cluster.scheduler_port}"
    endpoint = read_endpoint(run_dir)
    alive = endpoint is not None and start_ticks(endpoint.pid) is not None
    return endpoint.scheduler if endpoint is not None and alive else None


def _prepared_digest(config: Config, node: str, address: str) -> str | None:
    """Returns the checksum of the inputs of the scheduler's run. Returns None while no scheduler
    answers, or this machine does not see the token of this start yet.
    """
    try:
        access = member_credentials(config, config.run_dir.absolute(), node)
        with ControlClient(address, access, timeout_s=_ASK_TIMEOUT_S) as client:
            return client.status().inputs
    except (ConfigError, LostMemberError):
        return None
