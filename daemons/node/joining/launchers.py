"""Reads this process's place among the nodes of a run from the environment of the engine that
started it.

Each reader turns the environment of one engine into a :class:`Place`: Slurm (``SLURM_*``), a
Kubernetes JobSet or Indexed Job (``JOB_COMPLETION_INDEX`` and related variables), and torchrun
(``GROUP_RANK`` or ``NODE_RANK``, ``MASTER_ADDR`` …). Names are not resolved here.
:mod:`penstock.daemons.node.joining.addresses` finds addresses, and
:mod:`penstock.daemons.node.joining.rendezvous` compares the place with the configuration.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.host.errors import ConfigError

Environment = Mapping[str, str]

POD_PORT = 29_600
"""The scheduler's port on engines that give each node an address but name no port."""
SLURM_PORTS = range(20_000, 32_000)
"""One of these follows from the number of the job, so that all nodes know it. They lie below the
range from which the system serves port 0.
"""
_LARGEST_LIST = 100_000
"""More hosts than that in a list of Slurm's are a garbled list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One process's place among the nodes that an engine started.

    ``engine`` names engine and job for errors. ``rank``: which node this is, from 0, as
    ``rank_source`` says. ``count``: how many nodes there are, as ``count_source`` says; None where
    the engine does not say. ``hosts``: the nodes' names in the engine, in the order of ranks; empty
    where it does not say. ``first``: where the first node is reached, known without ``hosts``.
    ``port``: where the scheduler listens unless the configuration names a port. ``moves``: names of
    hosts stay while their addresses change.
    """

    engine: str
    rank: int
    rank_source: str
    count: int | None
    count_source: str = ""
    hosts: tuple[str, ...] = ()
    first: str | None = None
    port: int
    moves: bool = False

    def host(self, rank: int) -> str | None:
        """Returns the engine's name of the host of a node, if it says."""
        if rank < len(self.hosts):
            return self.hosts[rank]
        return self.first if rank == 0 else None


def find_place(environment: Environment, full_name: Callable[[], str]) -> Place | None:
    """Returns the place of this process, or None where no engine started it.

    ``full_name`` returns the machine's name with its domain, which pods of an Indexed Job ask for.

    Raises:
        ConfigError: variables are missing or garbled, contradict each other, or say that several
            processes were started on one node.
    """
    places = [
        place
        for place in (
            _slurm_place(environment),
            _pod_place(environment, full_name),
            _torchrun_place(environment),
        )
        if place is not None
    ]
    for one, other in itertools.pairwise(place for place in places if place.count is not None):
        if one.count != other.count:
            raise ConfigError(
                f"{one.count_source} of {one.engine} and {other.count_source} of {other.engine}"
                " give different numbers of nodes: unset the variables of one engine"
            )
    return places[0] if places else None


def tasks_of_step(environment: Environment) -> int:
    """Returns how many copies of this process an engine started: tasks of a Slurm step, or
    processes of torchrun, on all nodes.
    """
    names = ("SLURM_STEP_NUM_TASKS", "WORLD_SIZE")
    texts = (environment.get(name, "") for name in names)
    return max((int(text) for text in texts if text.isdecimal()), default=1)


def _slurm_place(environment: Environment) -> Place | None:
    """Reads Slurm's environment: a step has its own list of nodes; a batch script is one process on
    the first node.
    """
    job = environment.get("SLURM_JOB_ID")
    if not job:
        return None
    engine, number = f"Slurm job {job[:40]}", _number(environment, "SLURM_JOB_ID")
    if "SLURM_STEP_ID" not in environment:
        return _batch_place(environment, engine, number)
    hosts = expand_hosts(_text(environment, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST")
    _check_length(environment, "SLURM_STEP_NUM_NODES", hosts)
    tasks, local = _number(environment, "SLURM_STEP_NUM_TASKS"), environment.get("SLURM_LOCALID")
    if tasks != len(hosts) or local not in (None, "0"):
        raise ConfigError(
            f"{engine}: the step has SLURM_STEP_NUM_TASKS={tasks} on {len(hosts)} nodes, and"
            " penstock node runs once a node: srun --ntasks-per-node=1 penstock node …"
        )
    rank = _number(environment, "SLURM_NODEID")
    source = f"SLURM_NODEID={rank}"
    _check_rank(
        rank, source, len(hosts), f"SLURM_STEP_NODELIST={environment['SLURM_STEP_NODELIST']}"
    )
    here = environment.get("SLURMD_NODENAME", hosts[rank])
    if here != hosts[rank]:
        raise ConfigError(
            f"SLURMD_NODENAME={here} and {source} (which is {hosts[rank]} of SLURM_STEP_NODELIST)"
            " contradict each other: start penstock node by srun alone"
        )
    return Place(
        engine=engine,
        rank=rank,
        rank_source=source,
        count=len(hosts),
        count_source=f"SLURM_STEP_NUM_NODES={len(hosts)}",
        hosts=hosts,
        port=_slurm_port(number),
    )


def _batch_place(environment: Environment, engine: str, number: int) -> Place:
    """Returns the place of a process outside all steps: there is one, however many nodes the job
    has.
    """
    hosts = expand_hosts(_text(environment, "SLURM_JOB_NODELIST"), "SLURM_JOB_NODELIST")
    if len(hosts) > 1:
        raise ConfigError(
            f"{engine} has {len(hosts)} nodes, and this process is outside of its steps: start one"
            " process on each node with srun --ntasks-per-node=1 penstock node …"
        )
    return Place(
        engine=engine,
        rank=0,
        rank_source="being outside of steps",
        count=1,
        count_source=f"SLURM_JOB_NODELIST={hosts[0]}",
        hosts=hosts,
        port=_slurm_port(number),
    )


def _slurm_port(job: int) -> int:
    return SLURM_PORTS[job % len(SLURM_PORTS)]


def _pod_place(environment: Environment, full_name: Callable[[], str]) -> Place | None:
    """Reads the place of a pod of an Indexed Job, alone or in a JobSet; a headless service names
    the pods.
    """
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    rank = _number(environment, "JOB_COMPLETION_INDEX")
    source = f"JOB_COMPLETION_INDEX={rank}"
    count_name = _present(environment, "NNODES", "PET_NNODES")
    count = None if count_name is None else _number(environment, count_name)
    if count is not None:
        _check_rank(rank, source, count, f"{count_name}={count}")
    job_set = environment.get("JOBSET_NAME")
    if job_set:
        job = f"{job_set}-{_text(environment, 'REPLICATED_JOB_NAME')}"
        job += f"-{environment.get('JOB_INDEX') or '0'}"
        domain = environment.get("JOBSET_SUBDOMAIN") or job_set
        engine = f"JobSet {job_set}"
    else:
        host_name = full_name()
        pod, _, domain = host_name.partition(".")
        job = pod.removesuffix(f"-{rank}")
        engine = f"Indexed Job {job}"
        if (count or 2) > 1 and (job == pod or not domain):
            raise ConfigError(
                f"{source}: this pod is called {host_name}, which is not JOB-{rank}.SERVICE: give"
                " the pods a subdomain with a headless service, or name cluster.nodes with hosts"
            )
    return Place(
        engine=engine,
        rank=rank,
        rank_source=source,
        count=count,
        count_source="" if count is None else f"{count_name}={count}",
        hosts=tuple(f"{job}-{i}.{domain}" for i in range(count or 0)),
        first=f"{job}-0.{domain}",
        port=POD_PORT,
        moves=True,
    )


def _torchrun_place(environment: Environment) -> Place | None:
    """Reads the variables of torchrun, or of a launcher with the same variables. They name only the
    first node.
    """
    rank_name = _present(environment, "GROUP_RANK", "NODE_RANK", "PET_NODE_RANK")
    if rank_name is None:
        return None
    rank = _number(environment, rank_name)
    source = f"{rank_name}={rank}"
    count_name = _present(environment, "GROUP_WORLD_SIZE", "NNODES", "PET_NNODES")
    if count_name is None:
        raise ConfigError(
            f"{source} is set, and neither GROUP_WORLD_SIZE nor NNODES: set NNODES to the number of"
            f" nodes, or unset {rank_name}"
        )
    count = _number(environment, count_name)
    _check_rank(rank, source, count, f"{count_name}={count}")
    if _number(environment, "LOCAL_WORLD_SIZE", default=1) > 1:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={environment['LOCAL_WORLD_SIZE']}: penstock node runs once a node,"
            " and starts the workers itself: torchrun --nproc-per-node=1 --no-python penstock node"
            " …"
        )
    prefix = "PET_" if rank_name.startswith("PET_") else ""
    several = count > 1
    return Place(
        engine="torchrun",
        rank=rank,
        rank_source=source,
        count=count,
        count_source=f"{count_name}={count}",
        first=_text(environment, f"{prefix}MASTER_ADDR") if several else None,
        port=_beside_the_store(environment, f"{prefix}MASTER_PORT") if several else POD_PORT,
    )


def _beside_the_store(environment: Environment, name: str) -> int:
    """Returns the port after MASTER_PORT, on which torchrun's own store may listen."""
    port = _number(environment, name) + 1
    if not 1 < port < 2**16:
        raise ConfigError(
            f"{name}={port - 1}: the scheduler would listen on the next port, which is no valid"
            " port; choose a lower port, or set cluster.scheduler_port"
        )
    return port


def expand_hosts(text: str, source: str) -> tuple[str, ...]:
    """Returns the names in one of Slurm's lists: ``n[1-2,07]x,login`` is n1x, n2x, n07x, login.

    Numbers keep their leading zeros. ``source`` names the variable in errors.

    Raises:
        ConfigError: the list is empty or garbled, or names a host twice.
    """
    garbled = ConfigError(
        f"{source}={text[:80]!r} is not a list of hosts such as n[1-2]: start penstock node by srun"
    )
    hosts: list[str] = []
    for entry in re.split(r",(?![^\[]*\])", text):
        parts = re.split(r"\[([^\[\]]*)\]", entry)  # odd ones are what stood in brackets
        choices = []
        for i, part in enumerate(parts):
            if i % 2 == 0 and not re.fullmatch(r"[A-Za-z0-9._-]*", part):
                raise garbled
            choices.append(_numbers(part, garbled) if i % 2 else [part])
        hosts += map("".join, itertools.islice(itertools.product(*choices), _LARGEST_LIST + 1))
    if not all(hosts) or len(hosts) != len(set(hosts)) or len(hosts) > _LARGEST_LIST:
        raise garbled
    return tuple(hosts)


def _numbers(text: str, garbled: ConfigError) -> list[str]:
    """Returns what ``1-2,07`` in brackets stands for."""
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if match is None:
            raise garbled
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= _LARGEST_LIST:
            raise garbled
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return numbers


def _present(environment: Environment, *names: str) -> str | None:
    """Returns the first of the variables that is set."""
    return next((name for name in names if environment.get(name)), None)


def _text(environment: Environment, name: str) -> str:
    text = environment.get(name, "")
    if not text:
        raise ConfigError(
            f"{name} is not set, though other variables of the engine are: start penstock node by"
            " srun, torchrun or the job itself, or unset those"
        )
    return text


def _number(environment: Environment, name: str, default: int | None = None) -> int:
    if default is not None and not environment.get(name):
        return default
    text = _text(environment, name)
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise ConfigError(f"{name}={text[:40]!r} is not a number: unset it, or set it right")
    return int(text)


def _check_length(environment: Environment, name: str, hosts: tuple[str, ...]) -> None:
    count = _number(environment, name)
    if count != len(hosts):
        raise ConfigError(
            f"{name}={count} and SLURM_STEP_NODELIST={environment['SLURM_STEP_NODELIST'][:80]}"
            f" ({len(hosts)} hosts) contradict each other: start penstock node by srun alone"
        )


def _check_rank(rank: int, source: str, count: int, count_source: str) -> None:
    if rank >= count:
        raise ConfigError(
            f"{source} and {count_source} contradict each other: ranks of {count} nodes are 0 to"
            f" {count - 1}"
        )
