"""What the machine is, and what it refuses: the rest goes on; ``lost`` says without what."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu import shapes
from bench.gpu.install import requirements
from bench.gpu.measures.trained import Recipe, train
from bench.gpu.memory import GIB, meminfo, registered, touch
from bench.gpu.running import Measurement, Task, own_shared_memory
from penstock.host.limits.cgroup import cpu_limit, memory_limits
from penstock.host.topology import Topology
from penstock.shm.pages import NodeRange, prefer_nodes

_COMMAND_S = 20


def _pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _mbind() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as area:
        prefer_nodes(area, [NodeRange(offset=0, num_bytes=mmap.PAGESIZE, node=0)])


_CALLS: dict[str, tuple[Callable[[], None], str]] = {
    "pidfd_open": (_pidfd, "deaths of processes are noticed by polls"),
    "mbind": (_mbind, "memory is not placed on NUMA nodes; with one node nothing is lost"),
}
"""What is tried, and what is lost where it is refused."""


def versions(task: Task) -> None:
    """Reports programs and packages."""
    names = [re.split(r"[<>=!~ ]", text)[0] for text in requirements()]
    task.say(
        python=platform.python_version(),
        kernel=platform.release(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        packages={name: _version(name) for name in names},
        programs={name: shutil.which(name) for name in ("nvcc", "compute-sanitizer", "g++")},
        cpu=_first("model name", "/proc/cpuinfo"),
        cpus=os.cpu_count(),
    )
    if task.cuda:
        properties: Any = torch.cuda.get_device_properties(0)
        task.say(
            gpu=properties.name,
            gpu_bytes=properties.total_memory,
            multiprocessors=properties.multi_processor_count,
            driver=_smi("driver_version,pcie.link.gen.max,pcie.link.width.max,power.limit"),
        )


def host(task: Task) -> None:
    """Reports memory, limits and system calls of the machine."""
    status = os.statvfs("/dev/shm")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    task.say(
        dev_shm_bytes=status.f_blocks * status.f_frsize,
        memory_bytes=meminfo("MemTotal"),
        available_bytes=meminfo("MemAvailable"),
        memory_limits=[f"{one.owner} {one.limit / GIB:.1f} GiB" for one in memory_limits()],
        cpus_allowed=cpu_limit().count,
        numa_nodes=len(Topology.read().nodes),
        memlock="unlimited" if soft == resource.RLIM_INFINITY else soft,
    )
    lost = []
    if soft != resource.RLIM_INFINITY:
        lost.append("locked memory: a GPU's worker registers no more than the limit (ulimit -l)")
    for name, (attempt, loss) in _CALLS.items():
        try:
            attempt()
            task.say(**{name: "yes"})
        except (OSError, AttributeError) as error:
            task.say(**{name: f"refused: {error}"})
            lost.append(f"{name}: {loss}")
    task.say(lost=lost)


def shared_memory(task: Task) -> None:
    """Reports whether a private /dev/shm works, and the memory of the machine after touching it."""
    own = own_shared_memory()
    status = os.statvfs("/dev/shm")
    task.say(own_dev_shm=own, own_dev_shm_bytes=status.f_blocks * status.f_frsize)
    if not own:
        task.say(
            lost=[
                "a /dev/shm of its own: runs share the machine's, whose size above is what they may"
                " have, and a killed one leaves memory there (penstock doctor --clean --force)."
                " Larger: mount -o remount,size=90% /dev/shm, as root"
            ]
        )
    before, most = meminfo("MemTotal"), int(0.85 * meminfo("MemAvailable"))
    touched = touch(0 if task.tiny else most, task.left_s - 5.0)
    task.say(touched_bytes=touched, memory_bytes=meminfo("MemTotal"), memory_bytes_before=before)


def register(task: Task) -> None:
    """Registers POSIX shared memory with the driver, as workers do, and reports the time."""
    task.need_gpu()
    started_s = time.perf_counter()
    with registered(4 * GIB):
        took_s = time.perf_counter() - started_s
        task.say(register_s_per_gib=took_s / 4, register="yes")


def train_on_cpu(task: Task) -> None:
    """Trains the smallest model on CPUs, to check daemons, sockets and shared memory."""
    recipe = Recipe(shape=shapes.TINY, device="cpu", steps=3, warmup_steps=1, trace=False)
    run = train(task, recipe)
    task.say(steps=len(run.steps), seconds_to_first_step=run.start_s)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _smi(fields: str) -> str:
    """Returns the output of nvidia-smi, which changes nothing."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known: {error}"
    return (done.stdout or done.stderr).strip()


def _first(key: str, path: str) -> str:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


MEASUREMENTS = (
    Measurement(name="versions", deadline_s=25, run=versions),
    Measurement(name="host", deadline_s=15, run=host, shares_shm=True),
    Measurement(name="register", deadline_s=25, run=register),
    Measurement(name="train on CPU", deadline_s=40, run=train_on_cpu),
    Measurement(name="shared memory", deadline_s=40, run=shared_memory, shares_shm=True),
)
