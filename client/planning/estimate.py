"""``penstock estimate``: memory, disk and time of a step, from ``config.json`` alone.

The command needs no weights, no data and no run directory. Plan, bytes and seconds come from the
functions that prepare a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.client.convert.aliases import TRAINERS
from penstock.config.hub_names import from_hub
from penstock.config.schema import Config, parse_config
from penstock.config.values import parse_size
from penstock.config.words import apply_overrides
from penstock.daemons.memory.snapshot import base_bytes, saved_bytes
from penstock.daemons.node.preparing.capacity import human_bytes
from penstock.daemons.node.preparing.planned_run import (
    HostMachine,
    PlannedRun,
    RunRequest,
    plan_run,
)
from penstock.daemons.node.preparing.prepare import table_of
from penstock.host.errors import ConfigError
from penstock.host.files import DAMAGED, parse_json
from penstock.planner.cost.catalogue import GPUS
from penstock.planner.cost.profile import guess_of_gpu
from penstock.planner.memory.table import MemoryKind
from penstock.planner.render.units import SECONDS
from penstock.protocol.run.rundir import memory_spec
from penstock.shm.layout import SegmentKind
from penstock.shm.table import DType

_CONFIG = "config.json"
_DTYPES = {"float32": DType.FP32, "bfloat16": DType.BF16, "float16": DType.FP16}
_KINDS = {"weights": "weights", "frozen": "frozen weights", "master": "master", "low": "master"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions:
    """The options of ``penstock estimate``; ``None`` where not given. ``settings``: overrides of
    keys, as with ``--set``.
    """

    workers: int | None = None
    sequence_length: int | None = None
    micro_batch: str | None = None
    global_batch: int | None = None
    dtype: str | None = None
    gpu: str | None = None
    device_memory: str | None = None
    profile: Path | None = None
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The memory, the disk space and the time that a model needs.

    ``shm``: bytes in /dev/shm of the node with the most, by kind. ``source``: names the rates that
    ``step_s`` follows from.
    """

    model: Path
    run: PlannedRun
    shm: Mapping[str, int]
    step_s: float
    source: str

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
            "model": str(self.model),
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
            f"{self.model}: {total:,} parameters{share} in {figures['blocks']} blocks,"
            f" {figures['dtype']}"
        )
        yield (
            f"{config.num_workers} {config.cluster.platform.name} workers, {figures['scheme']},"
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


def estimate(model: Path, options: EstimateOptions) -> Estimate:
    """Returns what training a model takes.

    Raises:
        ConfigError: ``model`` is no model, or an option is impossible.
        CapacityError: the plan needs more memory than a device has.
    """
    folder = _folder_of(model)
    config = _config_of(folder, options)
    machine = HostMachine.here(config)
    if options.gpu is not None:
        machine = replace(machine, guess=guess_of_gpu(options.gpu, config.model.dtype))
    request = RunRequest(config=config, table=table_of(config, config_only=True))
    run = plan_run(request, machine)
    return Estimate(
        model=model,
        run=run,
        shm=_largest_node(run),
        step_s=run.simulate().makespan_s,
        source=_source(config, options.gpu),
    )


def _folder_of(model: Path) -> Path:
    """Returns the folder of a ``config.json`` that is named by itself or by its folder.

    Raises:
        ConfigError: there is none.
    """
    folder = model.parent if model.name == _CONFIG and not model.is_dir() else model
    if not (folder / _CONFIG).is_file():
        raise ConfigError(
            f"MODEL {str(model)!r}: has no {_CONFIG}; give a folder in the Hugging Face layout, or"
            f" its {_CONFIG} ({from_hub(model)})"
        )
    return folder


def _config_of(folder: Path, options: EstimateOptions) -> Config:
    """Returns the configuration that the options describe; all other keys have their defaults."""
    device = "cpu" if options.gpu is None else "cuda"
    limit = options.device_memory
    if limit is None and options.gpu is not None and options.gpu in GPUS:
        limit = str(int(GPUS[options.gpu].memory_bytes))
    values: Sequence[tuple[str, str, Any]] = (
        ("model", "dtype", options.dtype or dtype_of(folder / _CONFIG)),
        ("data", "sequence_length", options.sequence_length),
        ("train", "global_batch", options.global_batch),
        ("train", "micro_batch", options.micro_batch),
        ("cluster", "workers", options.workers),
        ("schedule", "profile", None if options.profile is None else str(options.profile)),
        ("memory", "device_limit", None if limit is None else _size(limit)),
    )
    data: dict[str, dict[str, Any]] = {
        "run": {"name": "estimate"},
        "model": {"path": str(folder)},
        "data": {"tokens": "tokens.bin"},
        "cluster": {"device": device},
    }
    for section, key, value in values:
        if value is not None:
            data.setdefault(section, {})[key] = value
    config = parse_config(
        apply_overrides(data, options.settings), source="penstock estimate", translation=TRAINERS
    )
    if config.cluster.platform.builtin_model:
        raise ConfigError(
            f"cluster.device = {config.cluster.device!r}: an emulated device brings its own model;"
            " use penstock plan CONFIG.yaml, or --gpu for the rates of a GPU"
        )
    return config


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--device-memory {text!r}: {error}") from error


def dtype_of(path: Path) -> str | None:
    """Returns the type of weights that a ``config.json`` names; ``None`` where it names none."""
    try:
        fields = parse_json(path.read_bytes())
    except (OSError, *DAMAGED):
        return None  # the preparation of the model names the mistake
    named = fields.get("dtype", fields.get("torch_dtype")) if isinstance(fields, dict) else None
    dtype = _DTYPES.get(named) if isinstance(named, str) else None
    return None if dtype is None else dtype.value


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
