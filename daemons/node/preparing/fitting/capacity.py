"""Compares the memory that a run needs with the memory of the machine and its control groups,
before anything is allocated.

Rows come from :func:`penstock.planner.memory.table.memory_table`. This module sums them by resource
and compares the sums with /dev/shm, host RAM, the limits of control groups, and the configured
limits. The given nodes are assumed to share one machine.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from penstock.config.schema import Config
from penstock.config.values import human_bytes
from penstock.host.errors import CapacityError
from penstock.host.limits.cgroup import MemoryLimit, MemoryUnknownError, memory_limits
from penstock.planner.memory.table import MemoryKind, MemoryRow
from penstock.protocol.run.hardware.launchers import UNKNOWN, Engine, engine_of
from penstock.shm.inventory import inventory
from penstock.shm.segment import free_bytes

MIB, GIB = 2**20, 2**30
WORKER_BYTES = 450 * MIB
"""Estimated private bytes of a worker besides its buffers; mostly torch."""
DAEMON_BYTES = 60 * MIB
"""Private memory of one daemon. An estimate."""
SHM, HOST = "/dev/shm", "host RAM (/dev/shm and processes)"
"""Names of the demands that a machine's memory must meet."""
_MORE_LOCKED = (
    "Lock as much as /dev/shm holds: ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; Slurm:"
    " PropagateResourceLimitsExcept=MEMLOCK); or cluster.pin_memory: false, with slower copies"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """Memory of a machine, in bytes; None without a limit.

    ``held``: bytes that this run's segments, and bases for it, occupy in /dev/shm. ``device``:
    bytes of each device that plans may fill. ``groups``: the control groups that limit this
    process. ``engine``: the container engine or scheduler that started this process; it supplies
    the remedies. ``is_here``: this machine, as it is now.
    """

    ram_available: int | None
    shm_free: int | None
    held: int = 0
    memlock: int | None = None
    device: int | None = None
    groups: tuple[MemoryLimit, ...] = ()
    engine: Engine = UNKNOWN
    is_here: bool = False

    @classmethod
    def probe(
        cls,
        run_id: str | None,
        nodes: Collection[str] | None = None,
        shared: int = 0,
        device: int | None = None,
    ) -> MachineMemory:
        """Returns the memory of this machine now. ``nodes``: names of the nodes that ``held``
        counts; None: all. ``shared``: bytes of bases that exist, and that the run would use.
        ``device``: bytes of a GPU that plans may fill.

        Raises:
            CapacityError: the kernel does not report the machine's memory.
        """
        held = sum(
            entry.num_bytes
            for entry in inventory()
            if entry.run_id == run_id and (nodes is None or entry.keeper in nodes)
        )
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        try:
            machine, *groups = memory_limits()
        except MemoryUnknownError as error:
            raise CapacityError(str(error)) from error
        return cls(
            ram_available=machine.available,
            shm_free=free_bytes(),
            held=held + shared,
            memlock=None if limit == resource.RLIM_INFINITY else limit,
            device=device,
            groups=tuple(groups),
            engine=engine_of(os.environ),
            is_here=True,
        )

    @property
    def tightest(self) -> MemoryLimit | None:
        """Returns the control group that leaves least to the run."""
        return min(self.groups, key=lambda group: group.room(self.held), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDemand:
    """One line of the table of needed memory: bytes ``needed`` and bytes ``available`` (None: no
    limit). ``remedy``: how to get more, in whole sentences.
    """

    place: str
    what: str
    needed: int
    available: int | None
    remedy: str = ""

    @property
    def short(self) -> bool:
        """True if more is needed than available."""
        return self.available is not None and self.needed > self.available

    @property
    def name(self) -> str:
        """The kind of memory without the parts that count in it."""
        return self.what.partition(" (")[0]

    def __str__(self) -> str:
        of = "" if self.available is None else f" of {human_bytes(self.available)}"
        return f"{self.name} {human_bytes(self.needed)}{of}"

    def to_dict(self) -> dict[str, str | int | bool | None]:
        """Returns the demand for ``--json``."""
        return {
            "place": self.place,
            "what": self.what,
            "needed_bytes": self.needed,
            "there_bytes": self.available,
            "short": self.short,
        }


def memory_demands(
    config: Config, rows: Sequence[MemoryRow], machine: MachineMemory, nodes: Sequence[int]
) -> tuple[MemoryDemand, ...]:
    """Returns the demands of ``nodes`` (indices), all on ``machine``, with the machine's memory,
    and the demands of all nodes and devices with the configured limits.
    """
    everyone = range(len(config.cluster.nodes))
    shm = {node: _sum(rows, _node_place(config, node), MemoryKind.SHM) for node in everyone}
    host = {node: _host_bytes(config, rows, node) for node in everyone}
    table = list(
        _machine_demands(
            machine, sum(shm[node] for node in nodes), sum(host[node] for node in nodes)
        )
    )
    for node in everyone:
        needed = shm[node] + host[node]
        place = _node_place(config, node)
        limit = config.memory.host_limit
        table.append(
            MemoryDemand(place=place, what="memory.host_limit", needed=needed, available=limit)
        )
    table += _device_demands(config, rows, machine)
    if config.cluster.platform.pins_host_memory and config.cluster.pin_memory:
        needed = sum(shm[node] for node in nodes)
        table.append(
            MemoryDemand(
                place="machine",
                what="memlock limit",
                needed=needed,
                available=machine.memlock,
                remedy=_MORE_LOCKED,
            )
        )
    return tuple(table)


def heaviest_machine(config: Config, rows: Sequence[MemoryRow]) -> tuple[int, ...]:
    """Returns the nodes (indices) of the machine that needs most. Nodes with one host are taken to
    be on one machine.
    """
    machines: dict[str, list[int]] = {}
    for node, entry in enumerate(config.cluster.nodes):
        machines.setdefault(entry.host, []).append(node)

    def needed(nodes: Iterable[int]) -> int:
        return sum(
            _sum(rows, _node_place(config, node), MemoryKind.SHM) + _host_bytes(config, rows, node)
            for node in nodes
        )

    return tuple(max(machines.values(), key=needed))


def _machine_demands(
    machine: MachineMemory, shm_bytes: int, host_bytes: int
) -> Iterator[MemoryDemand]:
    """Yields what is needed of /dev/shm, of the machine, and of the control group that leaves
    least.
    """
    needed, held = shm_bytes + host_bytes, machine.held
    more_shm = machine.engine.more_shm.format(size=f"{ceil(shm_bytes / GIB)}G")
    if machine.is_here:
        more_shm += "; penstock doctor lists the runs that hold it now"
    yield MemoryDemand(
        place="machine",
        what=SHM,
        needed=shm_bytes,
        available=None if machine.shm_free is None else machine.shm_free + held,
        remedy=more_shm,
    )
    yield MemoryDemand(
        place="machine",
        what=HOST,
        needed=needed,
        available=None if machine.ram_available is None else machine.ram_available + held,
    )
    group = machine.tightest
    if group is not None:
        yield MemoryDemand(
            place="machine",
            what=f"{group.owner}: {human_bytes(group.limit)}",
            needed=needed,
            available=group.room(machine.held),
            remedy=machine.engine.more_memory,
        )


def _device_demands(
    config: Config, rows: Sequence[MemoryRow], machine: MachineMemory
) -> Iterator[MemoryDemand]:
    """Yields the demand of each device. Devices that use host memory are included only if
    ``memory.device_limit`` is set.
    """
    own_memory, limit = config.cluster.platform.own_memory, config.memory.device_limit
    if not own_memory and limit is None:
        return
    resource = MemoryKind.DEVICE if own_memory else MemoryKind.HOST
    for place in (f"device {device}" for device in range(config.num_workers)):
        needed = _sum(rows, place, resource)
        if needed:
            yield MemoryDemand(
                place=place,
                what="device memory" if limit is None else "memory.device_limit",
                needed=needed,
                available=machine.device if limit is None else limit,
            )


def check_capacity(table: Sequence[MemoryDemand], reliefs: Sequence[str] = ()) -> None:
    """Refuses to start if a demand exceeds its limit. ``reliefs``: lines about keys that need less.

    Raises:
        CapacityError: has :func:`shortage`.
    """
    if any(need.short for need in table):
        raise CapacityError(shortage(table, reliefs))


def shortage(table: Sequence[MemoryDemand], reliefs: Sequence[str] = ()) -> str:
    """Returns the table of demands of which some are short, the lines ``reliefs``, and how to get
    more memory.
    """
    short = [need for need in table if need.short]
    remedies = list(reliefs)
    remedies += dict.fromkeys(need.remedy for need in short if need.remedy)
    lines = "".join(f"\n  {line}" for line in remedies)
    help_lines = f"\nTo need less, or to have more:{lines}" if lines else ""
    return f"not enough memory:\n{render_demands(table)}{help_lines}"


def missing(table: Sequence[MemoryDemand]) -> str:
    """Returns what is short, each kind of memory once."""
    worst: dict[str, MemoryDemand] = {}
    for need in sorted(table, key=lambda need: need.needed):
        if need.short:
            worst[need.what] = need
    return "does not fit: " + "; ".join(map(str, worst.values()))


def render_demands(table: Sequence[MemoryDemand]) -> str:
    """Returns the table as text, one line a need."""
    width = max(34, *(len(need.what) for need in table))
    lines = [f"{'where':<12} {'what':<{width}} {'needed':>10} {'there':>10}"]
    for need in table:
        limit = "no limit" if need.available is None else human_bytes(need.available)
        sizes = f"{human_bytes(need.needed):>10} {limit:>10}"
        mark = "  <-- short" if need.short else ""
        lines.append(f"{need.place:<12} {need.what:<{width}} {sizes}{mark}")
    return "\n".join(lines)


def _host_bytes(config: Config, rows: Sequence[MemoryRow], node: int) -> int:
    workers = config.cluster.workers
    devices = range(node * workers, (node + 1) * workers)
    buffers = sum(_sum(rows, f"device {device}", MemoryKind.HOST) for device in devices)
    buffers += _sum(rows, _node_place(config, node), MemoryKind.HOST)
    daemons = 4 + config.mirrors
    return buffers + workers * WORKER_BYTES + daemons * DAEMON_BYTES


def _node_place(config: Config, node: int) -> str:
    return f"node {config.cluster.nodes[node].name}"


def _sum(rows: Sequence[MemoryRow], place: str, kind: MemoryKind) -> int:
    return sum(row.num_bytes for row in rows if row.place == place and row.resource is kind)
