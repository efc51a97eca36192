"""Needed memory against what the machine has, before anything is allocated.

The needs come from :func:`penstock.planner.memory.table.memory_table`; here they are summed by
resource and held against /dev/shm, host RAM and the configured limits. One machine is assumed for
the nodes asked about.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.planner.memory.table import MemoryKind, MemoryRow
from penstock.protocol.config.schema import Config
from penstock.protocol.errors import CapacityError
from penstock.shm.inventory import inventory
from penstock.shm.segment import free_bytes

MIB = 2**20
WORKER_BYTES = 450 * MIB
"""Private memory of a worker beside its buffers: mostly torch. An estimate."""
DAEMON_BYTES = 60 * MIB
"""Private memory of one daemon. An estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """What a machine has, in bytes; ``held``: what this run's segments occupy in /dev/shm now."""

    ram_available: int
    shm_free: int
    held: int
    memlock: int | None

    @classmethod
    def probe(cls, run_id: str | None) -> MachineMemory:
        """This machine, now. ``memlock`` None: unlimited."""
        held = sum(entry.num_bytes for entry in inventory() if entry.run_id == run_id)
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return cls(
            ram_available=_available_ram(),
            shm_free=free_bytes(),
            held=held,
            memlock=None if limit == resource.RLIM_INFINITY else limit,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One line of the table: ``there`` None means that nothing limits it."""

    place: str
    what: str
    needed: int
    there: int | None

    @property
    def short(self) -> bool:
        """Whether it does not fit."""
        return self.there is not None and self.needed > self.there


def needs(
    config: Config, rows: Sequence[MemoryRow], machine: MachineMemory, nodes: Sequence[int]
) -> tuple[Need, ...]:
    """Returns the needs of ``nodes`` (indices), all on ``machine``, against what is there."""
    shm = {node: _sum(rows, _node_place(config, node), MemoryKind.SHM) for node in nodes}
    host = {node: _host_bytes(config, rows, node) for node in nodes}
    table = [
        Need(
            place="machine",
            what="/dev/shm",
            needed=sum(shm.values()),
            there=machine.shm_free + machine.held,
        ),
        Need(
            place="machine",
            what="host RAM (/dev/shm and processes)",
            needed=sum(shm.values()) + sum(host.values()),
            there=machine.ram_available + machine.held,
        ),
    ]
    for node in nodes:
        needed = shm[node] + host[node]
        place = _node_place(config, node)
        limit = config.memory.host_limit
        table.append(Need(place=place, what="memory.host_limit", needed=needed, there=limit))
    table += _device_needs(config, rows)
    if config.cluster.platform.pins_host_memory:
        needed = sum(shm.values())
        table.append(
            Need(place="machine", what="memlock limit", needed=needed, there=machine.memlock)
        )
    return tuple(table)


def _device_needs(config: Config, rows: Sequence[MemoryRow]) -> Iterator[Need]:
    """Yields what each device needs; of devices whose memory is the host's only where they have a
    limit of their own.
    """
    own_memory, limit = config.cluster.platform.own_memory, config.memory.device_limit
    if not own_memory and limit is None:
        return
    resource = MemoryKind.DEVICE if own_memory else MemoryKind.HOST
    for place in (f"device {device}" for device in range(config.num_workers)):
        needed = _sum(rows, place, resource)
        if needed:
            yield Need(place=place, what="memory.device_limit", needed=needed, there=limit)


def check_capacity(table: Sequence[Need]) -> None:
    """Refuse to start when something is short.

    Raises:
        CapacityError: with the whole table.
    """
    if any(need.short for need in table):
        raise CapacityError(
            "not enough memory:\n" + render_needs(table) + "\nUse a smaller model or batch, more"
            " stages, or fewer workers; raise the limit; or free /dev/shm (penstock doctor)"
        )


def render_needs(table: Sequence[Need]) -> str:
    """Returns the table as text, one line a need."""
    lines = [f"{'where':<12} {'what':<34} {'needed':>10} {'there':>10}"]
    for need in table:
        there = "no limit" if need.there is None else human_bytes(need.there)
        mark = "  <-- short" if need.short else ""
        lines.append(
            f"{need.place:<12} {need.what:<34} {human_bytes(need.needed):>10} {there:>10}{mark}"
        )
    return "\n".join(lines)


def human_bytes(num_bytes: float) -> str:
    """Returns bytes in words such as ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _host_bytes(config: Config, rows: Sequence[MemoryRow], node: int) -> int:
    workers = config.cluster.workers
    devices = range(node * workers, (node + 1) * workers)
    buffers = sum(_sum(rows, f"device {device}", MemoryKind.HOST) for device in devices)
    buffers += _sum(rows, _node_place(config, node), MemoryKind.HOST)
    return buffers + workers * WORKER_BYTES + 4 * DAEMON_BYTES


def _node_place(config: Config, node: int) -> str:
    return f"node {config.cluster.nodes[node].name}"


def _sum(rows: Sequence[MemoryRow], place: str, kind: MemoryKind) -> int:
    return sum(row.num_bytes for row in rows if row.place == place and row.resource is kind)


def _available_ram() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise CapacityError("/proc/meminfo has no MemAvailable: this kernel is too old (needs 3.14)")
