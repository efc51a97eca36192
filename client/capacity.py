"""The capacity section of ``penstock doctor CONFIG``: the CPUs and memory that a run needs and has.

Limits are those of the machine and of the control groups from Slurm, systemd or Kubernetes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.execution import NodeConfig
from penstock.config.schema import Config
from penstock.daemons.node.preparing.fitting.capacity import (
    MemoryDemand,
    check_capacity,
    render_demands,
)
from penstock.daemons.node.preparing.fitting.planned_run import (
    HostMachine,
    RunRequest,
    plan_anyway,
    planned_before,
)
from penstock.daemons.node.preparing.tables import table_of
from penstock.deploy.kubernetes.manifests import PodNeeds
from penstock.host.errors import ConfigError, PenstockError
from penstock.host.limits.cgroup import CpuLimit, cpu_limit
from penstock.host.logind_check import logout_risk
from penstock.protocol.run.hardware.cpus import check_cpus, cpu_shortage, cpus_needed
from penstock.protocol.run.names import nodes_beside
from penstock.protocol.run.rundir import RunDirectory, run_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityReport:
    """CPUs and memory that a configuration needs, and those available.

    ``warning`` names a shortage that permits a start, or is empty. ``refusals`` are the errors of a
    start on this machine.
    """

    cpus: CpuLimit
    cpus_needed: int
    demands: tuple[MemoryDemand, ...]
    warning: str
    refusals: tuple[PenstockError, ...]

    @classmethod
    def of(cls, path: Path, config: Config) -> CapacityReport:
        """Compares the configuration in ``path`` with this machine.

        For the ``resolved.yaml`` of a run, uses the plan of the run. Without ``cluster.nodes``, the
        number of nodes is that of the job.
        """
        config = _of_job(config, os.environ)
        nodes = nodes_beside(config, 0)
        cpus, refusals = cpu_limit(), list[PenstockError]()
        demands: Sequence[MemoryDemand] = ()
        try:
            check_cpus(config, nodes, cpus, os.environ)
        except PenstockError as error:
            refusals.append(error)
        try:
            demands = _demands(path, config, nodes)
            check_capacity(demands)
        except PenstockError as error:
            refusals.append(error)
        if (risk := logout_risk()) is not None:
            refusals.append(ConfigError(str(risk)))
        return cls(
            cpus=cpus,
            cpus_needed=cpus_needed(config) * len(nodes),
            demands=tuple(demands),
            warning="" if refusals else cpu_shortage(config, nodes, cpus),
            refusals=tuple(refusals),
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the report for ``--json``; sizes are bytes."""
        return {
            "cpus": self.cpus.count,
            "cpus_from": self.cpus.owner,
            "cpus_needed": self.cpus_needed,
            "memory": [
                {"where": n.place, "what": n.what, "needed": n.needed, "there": n.available}
                for n in self.demands
            ],
            "warning": self.warning,
            "refused": [str(refusal) for refusal in self.refusals],
        }

    def to_lines(self) -> Iterator[str]:
        """Yields the report for people."""
        yield "capacity"
        yield f"  CPUs: needed {self.cpus_needed}, available {self.cpus}"
        # The message of a refusal for lack of memory has the table.
        if self.demands and not any(demand.short for demand in self.demands):
            yield from (f"  {line}" for line in render_demands(self.demands).splitlines())
        if self.warning:
            yield f"  advice: {self.warning}: threads will wait for each other"
        yield from (f"  REFUSED: {refusal}" for refusal in self.refusals)


def pod_needs(config: Config, num_nodes: int, cpus: int) -> PodNeeds:
    """Returns the needs of the largest of ``num_nodes`` nodes, each on its own machine, from a plan
    made on this machine. ``cpus`` replaces the computed CPUs, unless 0.

    Raises:
        ConfigError: no plan can be built.
    """
    spread = _spread(config, num_nodes)
    request = RunRequest(config=spread, table=table_of(spread))
    planned = plan_anyway(request, HostMachine.here(spread))
    shm, memory = (need.needed for need in planned.demands[:2])
    has_gpus = config.cluster.platform.pins_host_memory
    return PodNeeds(
        cpus=cpus or cpus_needed(config),
        memory_bytes=memory,
        shm_bytes=shm,
        gpus=config.cluster.workers if has_gpus else 0,
    )


def _of_job(config: Config, environ: Mapping[str, str]) -> Config:
    """Returns the configuration with the number of nodes of the job, unless it names nodes."""
    if "nodes" in config.cluster.model_fields_set:
        return config
    counts = (environ.get(name, "") for name in ("SLURM_JOB_NUM_NODES", "NNODES", "PET_NNODES"))
    count = next((int(text) for text in counts if text.isdecimal()), 1)
    return _spread(config, count) if count > 1 else config


def _spread(config: Config, num_nodes: int) -> Config:
    """Returns the configuration with ``num_nodes`` nodes, each on its own machine."""
    given = config.cluster.nodes if len(config.cluster.nodes) == num_nodes else ()
    names = [node.name for node in given] or [f"node-{i}" for i in range(num_nodes)]
    nodes = tuple(NodeConfig(name=name, host=f"host-{name}") for name in names)
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"nodes": nodes})})


def _demands(path: Path, config: Config, nodes: Sequence[int]) -> tuple[MemoryDemand, ...]:
    run_dir = run_of(path)
    if run_dir is not None and (run_dir / "plan.json").exists():
        return planned_before(RunDirectory(run_dir), nodes).demands
    held_by = run_dir or config.run_dir
    run_id = RunDirectory(held_by).run_id if (held_by / "run.json").exists() else None
    request = RunRequest(config=config, table=table_of(config))
    return plan_anyway(request, HostMachine.here(config, run_id)).demands
