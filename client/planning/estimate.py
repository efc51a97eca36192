"""``penstock estimate``: memory, disk and time of a step, from ``config.json`` alone.

The command needs no weights, no data and no run directory. Plan, bytes and seconds come from the
functions that prepare a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from penstock.client.planning.described import Description
from penstock.config.schema import Config
from penstock.config.values import human_bytes
from penstock.daemons.memory.snapshot import base_bytes, saved_bytes
from penstock.daemons.node.preparing.fitting.capacity import HOST, SHM, missing, shortage
from penstock.daemons.node.preparing.fitting.planned_run import PlannedRun, RunRequest, plan_anyway
from penstock.daemons.node.preparing.fitting.reliefs import Relief, reliefs
from penstock.daemons.node.preparing.tables import table_of
from penstock.planner.memory.table import MemoryKind
from penstock.planner.planning.plan_search import Progress
from penstock.planner.render.units import SECONDS
from penstock.protocol.run.rundir import memory_spec
from penstock.shm.layout import SegmentKind

_KINDS = {"weights": "weights", "frozen": "frozen weights", "master": "master", "low": "master"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The memory, the disk space and the time that a model needs.

    ``shm``: bytes in /dev/shm of the node with the most, by kind. ``source``: names the rates that
    ``step_s`` follows from. ``reliefs``: settings that need less of what is short.
    """

    described: Description
    run: PlannedRun
    shm: Mapping[str, int]
    step_s: float
    source: str
    reliefs: tuple[Relief, ...] = ()

    @property
    def keys(self) -> Mapping[str, Any]:
        """The keys of a configuration with which ``train`` makes this plan."""
        return self.described.keys(self.run.config)

    @property
    def host_bytes(self) -> int:
        """Bytes of host RAM that the processes of a machine need outside /dev/shm."""
        shm, both = self.run.demands[:2]
        return both.needed - shm.needed

    @property
    def device_rows(self) -> Mapping[str, int]:
        """Bytes of the worker that needs most, by use."""
        devices: dict[str, dict[str, int]] = {}
        for row in self.run.rows:
            if row.place.startswith("device ") and row.resource is not MemoryKind.EMULATED:
                devices.setdefault(row.place, {})[row.use] = row.num_bytes
        return max(devices.values(), key=lambda rows: sum(rows.values()))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        config = self.run.config
        return config.train.global_batch * config.data.sequence_length

    def to_dict(self) -> dict[str, Any]:
        """Returns the estimate for ``--json``; sizes are bytes."""
        config, table, plan = self.run.config, self.run.table, self.run.plan
        state, kept = saved_bytes(table), config.train.keep_snapshots
        kept += config.train.keep_best is not None
        return {
            "model": self.described.model,
            "parameters": table.num_parameters,
            "trained_parameters": table.trained_parameters,
            "blocks": len(table.blocks),
            "dtype": table.weight_dtype.value,
            "device": config.cluster.device,
            "workers": config.num_workers,
            "sequence_length": config.data.sequence_length,
            "global_batch": config.train.global_batch,
            "micro_batch": config.train.micro_batch,
            "scheme": plan.scheme,
            "shm": {**self.shm, "total": sum(self.shm.values())},
            "host": self.host_bytes,
            "worker": {**self.device_rows, "total": sum(self.device_rows.values())},
            "saved_state": state,
            "kept_states": kept,
            "kept_states_bytes": state * kept,
            "base": base_bytes(table),
            "step_seconds": self.step_s,
            "tokens_per_second": self.tokens_per_step / self.step_s,
            "rates": self.source,
            "machine": str(self.described.machine),
            "fits": self.run.fits,
            "needs": [need.to_dict() for need in self.run.demands],
            "reliefs": [str(relief) for relief in self.reliefs],
            "keys": self.keys,
        }

    def to_text(self) -> str:
        """Returns the estimate for people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        figures = self.to_dict()
        config = self.run.config
        trained, total = figures["trained_parameters"], figures["parameters"]
        share = "" if trained == total else f" ({trained:,} of them trained, {trained / total:.2%})"
        yield (
            f"{self.described.model}: {total:,} parameters{share} in {figures['blocks']} blocks,"
            f" {figures['dtype']}"
        )
        workers = "worker" if config.num_workers == 1 else "workers"
        yield (
            f"{config.num_workers} {config.cluster.platform.name} {workers}, {figures['scheme']},"
            f" {config.train.global_batch} sequences of {config.data.sequence_length} tokens a"
            f" step in micro-batches of {config.train.micro_batch}"
        )
        if self.run.choice:
            yield self.run.choice
        kind = "device memory" if config.cluster.platform.own_memory else "host RAM"
        for heading, sizes in (
            ("/dev/shm of a node", figures["shm"]),
            (f"{kind} of the largest worker", figures["worker"]),
        ):
            yield f"\n{heading}"
            for use, size in sizes.items():
                if size or use != "frozen weights":
                    yield f"  {use:<30} {human_bytes(size):>10}"
        best = ", and the best one" if config.train.keep_best is not None else ""
        kept = f"kept states (train.keep_snapshots {config.train.keep_snapshots}{best})"
        yield "\nothers"
        frozen = [("disk: frozen tensors, kept once", figures["base"])] if figures["base"] else []
        for use, size in (
            ("host RAM of all processes", self.host_bytes),
            ("disk: one saved state", figures["saved_state"]),
            (f"disk: {kept}", figures["kept_states_bytes"]),
            *frozen,
        ):
            yield f"  {use:<44} {human_bytes(size):>10}"
        yield (
            f"\na step takes {SECONDS.format(self.step_s)},"
            f" {figures['tokens_per_second']:,.0f} tokens/s (simulated; {self.source})"
        )
        yield "\nkeys of this run, besides model.path and data"
        yield yaml.safe_dump(self.keys, sort_keys=False)
        if not self.run.fits:
            yield shortage(self.run.demands, list(map(str, self.reliefs))) + "\n"
        yield self._verdict()

    def _verdict(self) -> str:
        """Returns the last line: whether the run fits, with the sizes that decide."""
        needs = self.run.demands
        if not self.run.fits:
            return missing(needs)
        devices = [need for need in needs if need.place.startswith("device ")]
        device = max(devices, key=lambda need: need.needed, default=None)
        shown = [need for need in needs if need.what in (SHM, HOST)]
        shown = shown if device is None else [device, *shown]
        limited = [need for need in shown if need.available is not None]
        verdict = f"fits {self.described.machine}: {'; '.join(map(str, limited or shown))}"
        if len(limited) == len(shown) or not limited:
            return verdict
        open_ = "; ".join(str(need) for need in shown if need.available is None)
        return f"{verdict}; not compared (give --host-memory): {open_}"


def estimate(described: Description, progress: Progress = lambda done, of, best: None) -> Estimate:
    """Returns what training a model takes, whether the machine has it or not.

    Raises:
        ConfigError: there is no such model, or an option is impossible.
    """
    with described.config() as config:
        machine = described.machine.machine(config)
        request = RunRequest(config=config, table=table_of(config, config_only=True))
        run = plan_anyway(request, machine, progress)
        return Estimate(
            described=described,
            run=run,
            shm=_largest_node(run),
            step_s=run.simulate().makespan_s,
            source=_source(config, described.machine.gpu),
            reliefs=() if run.fits else reliefs(run),
        )


def _largest_node(run: PlannedRun) -> Mapping[str, int]:
    """Returns the bytes in /dev/shm of the node with the most, by kind."""
    config = run.config
    nodes = (_shm_of(run, node) for node in range(len(config.cluster.nodes)))
    return max(nodes, key=lambda kinds: sum(kinds.values()))


def _shm_of(run: PlannedRun, node: int) -> dict[str, int]:
    config = run.config
    spec = memory_spec(config, run.table, run.plan, node, run_id="")
    kinds = dict.fromkeys(("weights", "frozen weights", "master", "moments", "gradients"), 0)
    for (_, name, _, _), array in spec.layout.arrays.items():
        is_gradient = array.segment is SegmentKind.GRADS
        kinds["gradients" if is_gradient else _KINDS.get(name, "moments")] += array.num_bytes
    kinds["control and padding"] = spec.file_bytes - sum(kinds.values())
    place = f"node {config.cluster.nodes[node].name}"
    replicas = [row for row in run.rows if row.place == place and "replica" in row.use]
    return kinds | {row.use: row.num_bytes for row in replicas}


def _source(config: Config, gpu: str | None) -> str:
    """Returns the name of the rates that a configuration's plans are simulated with."""
    if config.schedule.profile is not None:
        return f"measured: {config.schedule.profile}"
    if gpu is not None:
        return f"rates of {gpu} in the catalogue"
    return f"default rates of {config.cluster.platform.name}, not measured; penstock profile does"
