"""Memory and CPUs that this process may use, by its control groups and the machine.

A container, a Slurm job and a systemd unit see the whole machine in /proc/meminfo and in the list
of CPUs. They are killed or throttled at their own limits. Both generations of control groups are
read, from the process's own group up to the topmost visible group: a limit of any of them binds.
The kernel charges shared memory to the group of the process that touches a page first. The charge
stays, or moves to a parent when the group is removed.

All files are read below a root directory, so that tests can describe other machines.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from penstock.host.topology import format_cpus, parse_cpus

ROOT = Path("/")
MACHINE = "the machine"
_NO_LIMIT_BYTES = 1 << 60
"""Groups of the first generation say a number near 2**63 for "no limit"."""
_OCTAL = re.compile(r"\\([0-7]{3})")


class MemoryUnknownError(Exception):
    """/proc/meminfo does not say how much memory is available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """A limit of memory. ``owner``: the machine, or ``cgroup PATH``.

    ``limit``: most bytes of all its processes and their shared memory. ``available``: bytes that
    can be allocated now; file cache counts as available, swap does not.
    """

    owner: str
    limit: int
    available: int

    def room(self, held: int) -> int:
        """Returns the bytes that a run may have that holds ``held`` bytes of shared memory already.
        The held bytes may be charged to an invisible group, such as that of a container before its
        restart. So the result never exceeds the limit.
        """
        return min(self.limit, self.available + held)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLimit:
    """CPUs that a process may use.

    ``allowed``: CPUs it may run on. ``online``: number of CPUs of the machine. ``quota``: CPU
    seconds a second that its groups grant, None without a limit. ``owner``: the tightest limit, in
    words.
    """

    allowed: frozenset[int]
    online: int
    quota: float | None
    owner: str

    @property
    def count(self) -> int:
        """Returns the number of threads that can run all the time; at least 1."""
        quota = len(self.allowed) if self.quota is None else int(self.quota)
        return max(1, min(len(self.allowed), quota))

    @property
    def is_cut(self) -> bool:
        """Returns whether the machine has more CPUs than this process gets."""
        return self.count < self.online

    def __str__(self) -> str:
        quota = "" if self.quota is None else f", {self.quota:g} CPUs' time"
        of = f" of the machine's {self.online}" if self.is_cut else ""
        return f"{self.count}{of} (CPUs {format_cpus(self.allowed)}{quota}: {self.owner})"


@dataclass(frozen=True)
class ControlGroups:
    """The control groups of one process, as they are under ``root``. A missing file is no limit."""

    root: Path = ROOT
    process: str = "self"

    def memory_limits(self) -> tuple[MemoryLimit, ...]:
        """Returns the limits of the groups that have one, the process's own group first."""
        limits = []
        for group in self._groups("memory"):
            limit = group.smallest("memory.max", "memory.high", "memory.limit_in_bytes")
            used = group.number("memory.current") or group.number("memory.usage_in_bytes") or 0
            if limit is not None and limit < _NO_LIMIT_BYTES:
                available = max(0, limit - max(0, used - group.droppable_bytes()))
                limits.append(MemoryLimit(owner=group.name, limit=limit, available=available))
        return tuple(limits)

    def cpu_quota(self) -> tuple[float, str] | None:
        """Returns the smallest quota, in CPUs, and the name of the group that has it."""
        quotas = [
            (quota, group.name)
            for group in self._groups("cpu")
            if (quota := group.cpu_quota()) is not None
        ]
        return min(quotas, default=None)

    def cpu_throttled_s(self) -> float | None:
        """Returns the seconds in which the groups had used up their quota, added up; None if no
        group counts them.
        """
        counted = [group.cpu_throttled_s() for group in self._groups("cpu")]
        return sum(known) if (known := [s for s in counted if s is not None]) else None

    def cpuset(self) -> tuple[frozenset[int], str] | None:
        """Returns the CPUs of the process's nearest group with a list of CPUs, and the name of the
        group.
        """
        for group in self._groups("cpuset"):
            for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
                cpus = parse_cpus(group.text(name))
                if cpus:
                    return frozenset(cpus), group.name
        return None

    def _groups(self, controller: str) -> Iterator[_Group]:
        """Yields the groups that account the process for ``controller``, its own first."""
        mount = self._mounts.get(controller)
        path = self._paths.get(controller)
        if mount is None or path is None:  # of the second generation, in a machine with both
            mount, path, controller = self._mounts.get(""), self._paths.get(""), ""
        if mount is None or path is None:
            return
        top, shown = mount
        inner = PurePosixPath(path)
        # A container may see its own group as the topmost one, under the name that it has outside.
        below = inner.relative_to(shown) if inner.is_relative_to(shown) else PurePosixPath(".")
        if ".." in below.parts:  # above what is mounted here: the topmost that can be seen
            below = PurePosixPath(".")
        for part in (below, *below.parents):
            name = PurePosixPath("/") / part
            yield _Group(directory=top / part, name=f"cgroup {name}")

    @cached_property
    def _paths(self) -> Mapping[str, str]:
        """Controller -> path of the process's group; "" for the second generation."""
        path_of: dict[str, str] = {}
        for line in _lines(self.root / "proc" / self.process / "cgroup"):
            _, controllers, path = line.split(":", 2)
            path_of |= dict.fromkeys(controllers.split(","), path)
        return path_of

    @cached_property
    def _mounts(self) -> Mapping[str, tuple[Path, str]]:
        """Controller -> mount point of its tree, and the topmost group there."""
        mounts: dict[str, tuple[Path, str]] = {}
        for mount in parse_mounts(_lines(self.root / "proc" / self.process / "mountinfo")):
            if mount.kind not in ("cgroup", "cgroup2"):
                continue
            place = (self.root / mount.point.lstrip("/"), mount.root)
            for controller in mount.options if mount.kind == "cgroup" else ("",):
                mounts.setdefault(controller, place)
        return mounts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """One directory of a tree of control groups."""

    directory: Path
    name: str

    def text(self, name: str) -> str:
        try:
            return (self.directory / name).read_text(encoding="ascii")
        except OSError:  # not in this generation, not at the root, or not ours to read
            return ""

    def number(self, name: str) -> int | None:
        text = self.text(name).strip()
        return int(text) if text.isdigit() else None

    def smallest(self, *names: str) -> int | None:
        numbers = (self.number(name) for name in names)
        return min((number for number in numbers if number is not None), default=None)

    def droppable_bytes(self) -> int:
        """Returns the bytes of file cache, as MemAvailable counts them for the whole machine.
        Shared memory is no file cache here: the kernel lists its pages with anonymous ones.
        """
        fields = dict(line.split() for line in self.text("memory.stat").splitlines())
        prefix = "total_" if "total_inactive_file" in fields else ""  # with groups below it
        names = ("inactive_file", "active_file")
        dirty = ("file_dirty", "file_writeback") if not prefix else ("dirty", "writeback")
        cached = sum(int(fields.get(prefix + name, 0)) for name in names)
        return max(0, cached - sum(int(fields.get(prefix + name, 0)) for name in dirty))

    def cpu_throttled_s(self) -> float | None:
        fields = dict(line.split() for line in self.text("cpu.stat").splitlines())
        if "throttled_usec" in fields:
            return int(fields["throttled_usec"]) / 1e6
        return int(fields["throttled_time"]) / 1e9 if "throttled_time" in fields else None

    def cpu_quota(self) -> float | None:
        words = self.text("cpu.max").split()
        if not words:
            words = [self.text(f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) != 2 or not all(word.isdigit() for word in words) or words[1] == "0":
            return None  # max, or -1
        return int(words[0]) / int(words[1])


def memory_limits(root: Path = ROOT) -> tuple[MemoryLimit, ...]:
    """Returns the limits of this process's memory: the machine, then its control groups.

    Raises:
        MemoryUnknownError: the kernel does not say what is available.
    """
    return (_machine_memory(root), *ControlGroups(root).memory_limits())


def tightest_memory(root: Path = ROOT) -> MemoryLimit:
    """Returns the limit with the least available memory.

    Raises:
        MemoryUnknownError: the kernel does not say what is available.
    """
    return min(memory_limits(root), key=lambda limit: limit.available)


def cpu_limit(root: Path = ROOT, allowed: Collection[int] | None = None) -> CpuLimit:
    """Returns the CPUs that this process may use; ``allowed`` replaces its affinity."""
    groups = ControlGroups(root)
    mine = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    listed = _text(root / "sys/devices/system/cpu/online")
    online = max(len(parse_cpus(listed)), len(mine))
    quota, cpuset = groups.cpu_quota(), groups.cpuset()
    if quota is not None and quota[0] < len(mine):
        owner = f"quota of {quota[1]}"
    elif len(mine) == online:
        owner = MACHINE
    elif cpuset is not None and len(cpuset[0]) <= len(mine):
        owner = f"cpuset of {cpuset[1]}"
    else:
        owner = "affinity, as taskset and srun set it"
    return CpuLimit(allowed=mine, online=online, quota=quota and quota[0], owner=owner)


def usable_cpus() -> int:
    """Returns the number of threads of this process that can run all the time."""
    return cpu_limit().count


def stolen_s(root: Path = ROOT) -> float:
    """Returns the CPU time that a hypervisor gave to others, of all CPUs of the machine."""
    return sum(_cpu_times(root)[7:8])


def machine_cpu_s(root: Path = ROOT) -> float:
    """Returns the CPU time of everything that has run on the machine, interrupts included."""
    user, nice, system, _idle, _waiting, *interrupts = _cpu_times(root) or [0.0] * 5
    return user + nice + system + sum(interrupts[:2])


def _cpu_times(root: Path) -> list[float]:
    """Returns the CPU times of all CPUs together from /proc/stat, in seconds."""
    words = _text(root / "proc/stat").partition("\n")[0].split()
    return [int(word) / os.sysconf("SC_CLK_TCK") for word in words[1:]]


def _machine_memory(root: Path) -> MemoryLimit:
    fields = dict(line.split(":", 1) for line in _lines(root / "proc/meminfo") if ":" in line)
    if "MemAvailable" not in fields:
        raise MemoryUnknownError(
            "/proc/meminfo has no MemAvailable: this kernel is too old (needs 3.14)"
        )
    available, total = (
        1024 * int(fields[name].split()[0]) for name in ("MemAvailable", "MemTotal")
    )
    return MemoryLimit(owner=MACHINE, limit=total, available=available)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (FileNotFoundError, PermissionError):
        return ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except (FileNotFoundError, PermissionError):
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A mount, as ``/proc/PID/mountinfo`` lists it (proc_pid_mountinfo(5)): the folder ``root`` of
    a file system of type ``kind`` is seen at ``point``.

    ``options`` are the mount's, then the file system's own, which may say the same.
    """

    root: str
    point: str
    kind: str
    options: tuple[str, ...]


def parse_mounts(lines: Iterable[str]) -> list[Mount]:
    """Returns the mounts, in their order; lines of another form are left out."""
    mounts = []
    for line in lines:
        before, dash, after = line.partition(" - ")
        fields, theirs = before.split(), after.split()
        if not dash or len(fields) < 6 or not theirs:
            continue
        options = (text for field in (fields[5], *theirs[2:]) for text in field.split(","))
        root, point = (_unescaped(word) for word in fields[3:5])
        mounts.append(Mount(root=root, point=point, kind=theirs[0], options=tuple(options)))
    return mounts


def _unescaped(word: str) -> str:
    """Returns a path of mountinfo, where blanks are octal numbers."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), word)
