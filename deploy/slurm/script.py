"""Fills in the batch script of one run."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from penstock.config.schema import Config
from penstock.deploy import fill
from penstock.host.errors import ConfigError

_TEMPLATE = Path(__file__).with_name("train.sbatch")
_TIME = re.compile(r"[0-9]+(-[0-9]+)?(:[0-9]+){0,2}")
_MEMORY = re.compile(r"[0-9]+[KMGT]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """Values of a batch script. Paths are absolute; relative paths of the configuration start at
    ``folder``.

    ``cpus`` and ``memory`` are those of a machine; ``memory`` and ``time`` have Slurm's format.
    With ``cpus`` 0 the configuration decides; ``memory`` 0 means all. ``lead_s`` seconds before
    the time limit the run is asked to save.
    """

    config: Path
    penstock: Path
    folder: Path
    nodes: int
    cpus: int
    memory: str
    time: str
    lead_s: int

    def __post_init__(self) -> None:
        if not _TIME.fullmatch(self.time):
            raise ConfigError(
                f"--time {self.time}: expected minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, as for"
                " sbatch"
            )
        if not _MEMORY.fullmatch(self.memory):
            raise ConfigError(f"--memory {self.memory}: expected a size such as 200G, or 0 for all")
        for path in (self.config, self.penstock, self.folder):
            if not str(path).isprintable():
                raise ConfigError(
                    f"{path!r}: batch scripts cannot name paths with control characters"
                )

    def script(self, config: Config) -> str:
        """Returns the text of the script for the run of ``config``.

        Raises:
            ConfigError: ``cluster.nodes`` names another number of nodes.
        """
        named = config.cluster.nodes
        if "nodes" in config.cluster.model_fields_set and len(named) != self.nodes:
            raise ConfigError(
                f"--nodes {self.nodes}: cluster.nodes has {len(named)} nodes; give --nodes"
                f" {len(named)}, or leave out cluster.nodes, which then follows from the job"
            )
        gpus = config.cluster.workers if config.cluster.platform.pins_host_memory else 0
        return fill(
            _TEMPLATE,
            {
                "NAME": config.run.name,
                "NODES": str(self.nodes),
                "CPUS": str(self.cpus or config.cluster.cpus_per_node or least_cpus(config)),
                "MEMORY": self.memory,
                "GPUS": f"#SBATCH --gpus-per-node={gpus}" if gpus else "# No GPUs.",
                "TIME": self.time,
                "LEAD": str(self.lead_s),
                "FOLDER": _directive(self.folder),
                "OUTPUT": _directive(self.folder / f"{config.run.name}-%j.txt"),
                "PENSTOCK": shlex.quote(str(self.penstock)),
                "CONFIG": shlex.quote(str(self.config)),
            },
        )


def least_cpus(config: Config) -> int:
    """Returns the fewest CPUs of a node without contention.

    These are the threads in the configuration, at least one for each worker and one for the
    optimizer.
    """
    cluster = config.cluster
    return cluster.workers * max(1, cluster.threads_per_worker) + max(1, config.optimizer.threads)


def _directive(path: Path) -> str:
    """Returns a path as a word of an ``#SBATCH`` line; Slurm accepts quotes, but no escapes."""
    text = str(path)
    if '"' in text or "\\" in text:
        raise ConfigError(f"{text}: a batch script cannot name paths with quotes or backslashes")
    return f'"{text}"' if " " in text else text
