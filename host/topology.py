"""The machine's cores and NUMA nodes, as Linux describes them under /sys.

The root directory is an argument, so that decisions can be tested on machines that do not exist.
:mod:`penstock.protocol.run.hardware.placement` assigns cores.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SYSTEM_ROOT = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """A physical core: the CPUs (hardware threads) on it that may be used, ascending."""

    node: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Online CPUs. ``node_of``: CPU -> NUMA node. ``siblings``: CPU -> all CPUs of its core.

    ``nodes``: all NUMA nodes, including nodes with memory only. The size of memory is left out:
    /sys counts too little after memory was plugged in.
    """

    node_of: dict[int, int]
    siblings: dict[int, tuple[int, ...]]
    nodes: tuple[int, ...]

    @classmethod
    def read(cls, root: Path = SYSTEM_ROOT) -> Topology:
        """Reads the topology of this machine. Without /sys, the machine has one node, and each CPU
        is a core.
        """
        online = _cpu_list(root / "cpu" / "online") or tuple(sorted(os.sched_getaffinity(0)))
        node_of, nodes = dict.fromkeys(online, 0), set[int]()
        for path in (root / "node").glob("node[0-9]*"):
            node = int(path.name.removeprefix("node"))
            nodes.add(node)
            node_of |= {cpu: node for cpu in _cpu_list(path / "cpulist") if cpu in node_of}
        siblings = {}
        for cpu in online:
            threads = _cpu_list(root / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list")
            siblings[cpu] = threads or (cpu,)
        return cls(node_of=node_of, siblings=siblings, nodes=tuple(sorted(nodes)) or (0,))

    def cores(self, allowed: Iterable[int]) -> tuple[Core, ...]:
        """Returns the physical cores of the CPUs in ``allowed``, NUMA node by NUMA node."""
        usable = set(allowed) & set(self.node_of)
        node_of_core = {
            tuple(sorted(set(self.siblings[cpu]) & usable)): self.node_of[cpu] for cpu in usable
        }
        cores = (Core(node=node, cpus=cpus) for cpus, node in node_of_core.items())
        return tuple(sorted(cores, key=lambda core: (core.node, core.cpus)))


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parses a list of CPUs as Linux writes it: ``0-3,8`` -> 0, 1, 2, 3, 8, in the given order.

    Raises:
        ValueError: the text is no such list.
    """
    cpus: list[int] = []
    for part in text.split(",") if text.strip() else ():
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part, re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{part!r} is no core and no range of cores such as 0-3")
        cpus += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(cpus)


def format_cpus(cpus: Iterable[int]) -> str:
    """Returns CPUs in ascending order, with runs as ranges: ``0-3,8``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def _cpu_list(path: Path) -> tuple[int, ...]:
    try:
        return parse_cpus(path.read_text(encoding="ascii"))
    except (FileNotFoundError, PermissionError):
        return ()
