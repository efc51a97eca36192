"""The launcher of this process, by its environment, and the option that requests more CPUs from
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Something that starts processes within limits. ``variable``: set in what it starts.

    ``more_cpus`` (with ``{n}``), ``more_memory``, ``more_shm`` (some with ``{size}``): sentences
    that name the option for more.
    """

    name: str
    variable: str
    more_cpus: str
    more_memory: str
    more_shm: str


_REMOUNT = "Enlarge /dev/shm (as root: mount -o remount,size={size} /dev/shm)"

ENGINES = (
    Engine(
        name="Slurm",
        variable="SLURM_JOB_ID",
        more_cpus="Slurm gives a task one CPU unless asked: #SBATCH --cpus-per-task={n} and, since"
        " srun does not take that over from the script, export SRUN_CPUS_PER_TASK={n} before srun",
        more_memory="Ask Slurm for more memory a node: #SBATCH --mem=… (--mem=0: all of it)",
        more_shm=_REMOUNT + ", or choose a node where it is larger",
    ),
    Engine(
        name="Kubernetes",
        variable="KUBERNETES_SERVICE_HOST",
        more_cpus='Set resources.requests.cpu and resources.limits.cpu of the container to "{n}"',
        more_memory="Raise resources.requests.memory and resources.limits.memory of the container:"
        " /dev/shm counts in them",
        more_shm="Raise sizeLimit of the memory-backed emptyDir at /dev/shm, and with it the memory"
        " of the container; without such a volume /dev/shm has 64 MiB",
    ),
    Engine(
        name="systemd",
        variable="INVOCATION_ID",
        more_cpus="Raise CPUQuota=, AllowedCPUs= or CPUAffinity= of the unit to {n} CPUs",
        more_memory="Raise MemoryMax= and MemoryHigh= of the unit",
        more_shm=_REMOUNT,
    ),
)
UNKNOWN = Engine(
    name="",
    variable="",
    more_cpus="Give it {n} CPUs (taskset, cpuset, docker run --cpus or --cpuset-cpus)",
    more_memory="Raise the limit of the control group (docker run --memory)",
    more_shm=_REMOUNT + ", or docker run --shm-size",
)


def engine_of(environ: Mapping[str, str]) -> Engine:
    """Returns the engine that started a process with this environment."""
    return next((engine for engine in ENGINES if engine.variable in environ), UNKNOWN)
