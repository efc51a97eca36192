"""Fills in the batch script of one run."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from penstock.config.schema import Config
from penstock.deploy.templates import fill
from penstock.host.errors import ConfigError

_TEMPLATE = Path(__file__).with_name("train.sbatch")
_TIME = re.compile(r"[0-9]+(-[0-9]+)?(:[0-9]+){0,2}")
_MEMORY = re.compile(r"[0-9]+[KMGT]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """What a batch script asks for. Paths are absolute; ``folder`` is where relative paths of the
    configuration begin. ``cpus`` (of a machine; 0: what the configuration needs at least),
    ``memory`` (of a machine, as Slurm writes it; 0: all), ``time`` (as Slurm writes it),
    ``lead_s``: so long before the end the run is asked to save.
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
                f"--time {self.time}: accepted are minutes, HOURS:MINUTES:SECONDS and DAYS-HOURS,"
                " as with sbatch"
            )
        if not _MEMORY.fullmatch(self.memory):
            raise ConfigError(f"--memory {self.memory}: accepted is a size such as 200G; 0: all")
        for path in (self.config, self.penstock, self.folder):
            if not str(path).isprintable():
                raise ConfigError(f"{path!r}: scripts cannot name paths with control characters")

    def script(self, config: Config) -> str:
        """Returns the text of the script for the run of ``config``.

        Raises:
            ConfigError: ``cluster.nodes`` names another number of nodes.
        """
        named = config.cluster.nodes
        if "nodes" in config.cluster.model_fields_set and len(named) != self.nodes:
            raise ConfigError(
                f"--nodes {self.nodes}: cluster.nodes has {len(named)}; give as many, or leave"
                " cluster.nodes out, and it follows from the job"
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
    """Returns the CPUs without which processes of a node wait for each other: the threads that the
    configuration names, at least one for each worker and one for the optimizer.
    """
    cluster = config.cluster
    return cluster.workers * max(1, cluster.threads_per_worker) + max(1, config.optimizer.threads)


def _directive(path: Path) -> str:
    """Slurm takes words in quotes, and nothing that hides a quote in them."""
    text = str(path)
    if '"' in text or "\\" in text:
        raise ConfigError(f"{text}: a batch script cannot name paths with quotes or backslashes")
    return f'"{text}"' if " " in text else text
