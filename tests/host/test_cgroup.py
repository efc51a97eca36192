"""Limits of control groups: of both generations and of containers, on machines that are not here;
and real ones on this machine.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from penstock.host.limits.cgroup import (
    CpuLimit,
    MemoryLimit,
    cpu_limit,
    memory_limits,
    tightest_memory,
)
from tests.groups import V1_ROOT, group, needs_groups, run_in

MIB, GIB = 2**20, 2**30
UNIFIED = "30 1 0:2 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate"
FIRST = """\
31 30 0:2 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 30 0:3 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 30 0:4 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset
34 30 0:5 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"""
MACHINE = MemoryLimit(owner="the machine", limit=512 * GIB, available=500 * GIB)


def machine(root: Path, *, groups: str, mounts: str = UNIFIED, **files: str) -> Path:
    """A machine of 64 CPUs and 512 GiB whose process is in ``groups``; ``files``: path (with
    ``__`` for slashes and ``_`` for dots of a name) below /sys/fs/cgroup -> content.
    """
    contents = {
        "proc/meminfo": f"MemTotal: {512 * MIB} kB\nMemFree: 1 kB\nMemAvailable: {500 * MIB} kB\n",
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": "20 1 0:1 / / rw - ext4 /dev/vda rw\n" + mounts,
        "sys/devices/system/cpu/online": "0-63\n",
    }
    contents |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text and text + "\n")
    return root


def test_every_group_up_to_the_root_limits(tmp_path: Path) -> None:
    """File cache can be dropped, so it is available; dirty pages and shared memory are not."""
    job = "slurm/job_5"
    files = {
        f"{job}/step_0/memory.max": "max",
        f"{job}/step_0/cpu.max": "max 100000",
        f"{job}/memory.max": str(16 * GIB),
        f"{job}/memory.high": str(12 * GIB),
        f"{job}/memory.current": str(8 * GIB),
        f"{job}/memory.stat": f"shmem {4 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\n"
        f"file_dirty {GIB}\nfile_writeback 0\ninactive_anon {4 * GIB}",
        f"{job}/cpu.max": "250000 100000",
        "slurm/cpuset.cpus.effective": "0-1",
        "slurm/memory.max": str(400 * GIB),
        "slurm/memory.current": str(398 * GIB),
    }
    root = machine(tmp_path, groups=f"0::/{job}/step_0", **files)
    assert memory_limits(root) == (
        MACHINE,
        MemoryLimit(owner="cgroup /slurm/job_5", limit=12 * GIB, available=6 * GIB),
        MemoryLimit(owner="cgroup /slurm", limit=400 * GIB, available=2 * GIB),
    )
    assert tightest_memory(root).owner == "cgroup /slurm"
    cpus = cpu_limit(root, range(64))
    assert (cpus.count, cpus.quota, cpus.owner) == (2, 2.5, "quota of cgroup /slurm/job_5")
    assert cpu_limit(root, [0, 1]).owner == "cpuset of cgroup /slurm"
    assert str(cpu_limit(root, [0])) == (
        "1 of the machine's 64 (CPUs 0, 2.5 CPUs' time: affinity, as taskset and srun set it)"
    )


def test_the_first_generation_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    files = {
        "memory/a/b/memory.limit_in_bytes": str(GIB),
        "memory/a/b/memory.usage_in_bytes": str(GIB // 2),
        "memory/a/b/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 4}\ntotal_dirty 0",
        "memory/a/memory.limit_in_bytes": str(2**63 - 4096),
        "cpu,cpuacct/c/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/c/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/cpu.cfs_quota_us": "50000",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "cpuset/cpuset.cpus": "4-7",
    }
    groups = "5:cpuset:/\n4:cpu,cpuacct:/c\n3:memory:/a/b\n1:name=systemd:/x\n0::/x"
    root = machine(tmp_path, groups=groups, mounts=FIRST, **files)
    limit = MemoryLimit(owner="cgroup /a/b", limit=GIB, available=GIB * 3 // 4)
    assert memory_limits(root) == (MACHINE, limit)
    assert cpu_limit(root, range(4, 8)) == CpuLimit(
        allowed=frozenset(range(4, 8)), online=64, quota=0.5, owner="quota of cgroup /"
    )
    assert cpu_limit(root, range(4, 8)).count == 1


@pytest.mark.parametrize(
    ("groups", "shown"),
    [
        ("/", "/"),  # a container with a namespace of its own: its group is the root that it sees
        ("/docker/5f", "/docker/5f"),  # one without: the mount shows its group under its own name
        ("/../other", "/"),  # moved out of what its namespace shows
        ("/kubepods/x", "/docker/5f"),  # a mount that shows another group
    ],
)
def test_containers_see_their_group_as_the_topmost(tmp_path: Path, groups: str, shown: str) -> None:
    files = {"memory.max": str(3 * GIB), "memory.current": str(GIB), "cpu.max": "400000 100000"}
    mounts = UNIFIED.replace(" / /sys", f" {shown} /sys")
    root = machine(tmp_path, groups=f"0::{groups}", mounts=mounts, **files)
    assert tightest_memory(root) == MemoryLimit(owner="cgroup /", limit=3 * GIB, available=2 * GIB)
    assert cpu_limit(root, range(64)).count == 4


def test_without_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, groups="", mounts="")
    assert memory_limits(root) == (MACHINE,)
    assert str(cpu_limit(root, range(64))) == "64 (CPUs 0-63: the machine)"


def test_memory_that_a_run_holds_counts_but_never_beyond_the_limit() -> None:
    """After a container's restart its shared memory is charged to a group that it does not see."""
    limit = MemoryLimit(owner="cgroup /", limit=8 * GIB, available=7 * GIB)
    assert limit.room(0) == 7 * GIB
    assert limit.room(6 * GIB) == 8 * GIB


TOO_LARGE = """
from penstock.shm import segment
from penstock.host.limits.cgroup import cpu_limit, usable_cpus
print(cpu_limit().owner, usable_cpus())
try:
    segment.Segment.create("/penstock-{name}-t-state", 192 << 20)
except segment.NoSpaceError as error:
    print(error)
segment.Segment.create("/penstock-{name}-t-state", 32 << 20).unlink()
print("alive")
"""


@needs_groups
def test_a_segment_beyond_a_real_limit_is_refused_and_wakes_no_killer() -> None:
    """Before, the kernel killed whoever created it."""
    name = secrets.token_hex(6)
    with (
        group("memory", memory_limit_in_bytes=128 * MIB) as memory,
        group("cpu", cpu_cfs_period_us=100_000, cpu_cfs_quota_us=100_000) as cpu,
    ):
        done = run_in((memory, cpu), TOO_LARGE.format(name=name))
    assert done.returncode == 0, done.stderr
    shown = f"cgroup /{memory.relative_to(V1_ROOT / 'memory')}"
    quota = f"quota of cgroup /{cpu.relative_to(V1_ROOT / 'cpu')} 1"
    assert done.stdout.splitlines()[0] == quota
    assert f"needs {192 * MIB} bytes; {shown} has" in done.stdout
    assert done.stdout.endswith("alive\n")
