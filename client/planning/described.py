"""Models and machines that options describe: ``estimate`` and ``tune --model`` plan for them.

The options become a configuration and a machine; :func:`planned_run.plan_anyway` does the rest, as
for ``penstock train``. :meth:`Description.keys` is the configuration that ``train`` takes.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.client.convert.aliases import TRAINERS
from penstock.client.planning.shapes import hugging_face_config
from penstock.config.execution import NodeConfig, ScheduleConfig
from penstock.config.hub_names import from_hub
from penstock.config.schema import Config, parse_config
from penstock.config.words import apply_overrides
from penstock.daemons.node.preparing.fitting.planned_run import HostMachine
from penstock.daemons.node.preparing.gpus import LIBRARY, FoundGpu, found_gpus, guess_here
from penstock.daemons.node.preparing.hub import CONFIG as CONFIG_ONLY
from penstock.daemons.node.preparing.hub import local_folder
from penstock.host.errors import ConfigError
from penstock.host.files import DAMAGED, parse_json
from penstock.host.limits.scratch import scratch_folder
from penstock.planner.cost.catalogue import MODELS, gpu_named, model_named
from penstock.planner.planning.auto import searched_keys
from penstock.protocol.plan.positions import positions_of
from penstock.shm.table import DType

CONFIG = "config.json"
LENGTH = 2048
"""Tokens of a sequence unless given; fewer if the model has fewer positions."""
_DTYPES = {"float32": DType.FP32, "bfloat16": DType.BF16, "float16": DType.FP16}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """The options that describe a machine. ``gpu``: a name of the catalogue; sizes in bytes, None
    where not given. Without a GPU and sizes it is this machine.
    """

    gpu: str | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    shm_bytes: int | None = None

    def __post_init__(self) -> None:
        """Gives the GPU the name that the catalogue has for it.

        Raises:
            ConfigError: the catalogue lacks it; names those that are alike.
        """
        if self.gpu is not None:
            object.__setattr__(self, "gpu", gpu_named(self.gpu).name)

    @property
    def is_named(self) -> bool:
        """True if the options describe another machine than this one."""
        return any(each is not None for each in (self.gpu, self.host_bytes, self.shm_bytes))

    def machine(self, config: Config) -> HostMachine:
        """Returns the machine that plans of ``config`` are held against."""
        if not self.is_named:
            return HostMachine.here(config)
        return HostMachine.named(
            guess_here(config) if self.gpu is None else None,
            gpu=self.gpu,
            dtype=config.model.dtype,
            host_bytes=self.host_bytes,
            shm_bytes=self.shm_bytes,
        )

    def config(self, config: Config) -> Config:
        """Returns the configuration on the named GPU, with the given limit of device memory."""
        if self.gpu is not None and not config.cluster.platform.own_memory:
            cluster = config.cluster.model_copy(update={"device": "cuda"})
            config = config.model_copy(update={"cluster": cluster})
        if self.device_bytes is not None:
            limit = {"device_limit": self.device_bytes}
            config = config.model_copy(update={"memory": config.memory.model_copy(update=limit)})
        return config

    def __str__(self) -> str:
        return "this machine" if not self.is_named else self.gpu or "the described machine"


HERE = MachineOptions()
"""This machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The options that describe a run. ``model``: a folder in the Hugging Face layout, its
    ``config.json``, or a name of the catalogue. None, or no entry: the default of the configuration
    (of ``sequence_length``: :data:`LENGTH`). ``settings``: overrides of keys, as with ``--set``.
    """

    model: str
    machine: MachineOptions = HERE
    workers: int = 1
    workers_per_node: int = 8
    sequence_length: int | None = None
    micro_batch: str | None = None
    global_batch: int | None = None
    dtype: str | None = None
    profile: Path | None = None
    settings: tuple[str, ...] = ()

    @contextmanager
    def config(self) -> Iterator[Config]:
        """Yields the configuration. The folder of a named model exists until the end.

        Raises:
            ConfigError: there is no such model, or an option is impossible.
        """
        path = Path(self.model)
        if self.model in MODELS and not path.exists():
            with scratch_folder("model") as folder:
                content = hugging_face_config(model_named(self.model))
                if content is None:
                    raise ConfigError(
                        f"model {self.model!r}: is not a causal language model, which train needs;"
                        f" penstock plan --costs analytic:GPU:{self.model} shows schedules for it"
                    )
                (folder / CONFIG).write_text(json.dumps(content), encoding="utf-8")
                yield self._config(folder)
        else:
            yield self._config(
                _folder_of(local_folder("MODEL", path, CONFIG_ONLY, lambda line: None))
            )

    def _config(self, folder: Path) -> Config:
        fields = _fields(folder / CONFIG)
        device = "cpu" if self.machine.gpu is None and gpu_here() is None else "cuda"
        values = self._given(_dtype(fields), min(LENGTH, positions_of(fields) or LENGTH))
        data: dict[str, dict[str, Any]] = {
            "run": {"name": "estimate"},
            "model": {"path": str(folder)},
            "data": {"tokens": "tokens.bin"},
            "cluster": {"device": device},
        }
        for section, keys in values.items():
            data.setdefault(section, {}).update(keys)
        data = apply_overrides(data, self.settings)
        config = parse_config(data, source="penstock", translation=TRAINERS)
        platform = config.cluster.platform
        if platform.builtin_model:
            raise ConfigError(
                f"cluster.device = {config.cluster.device!r}: an emulated device brings its own"
                " model; use penstock plan CONFIG.yaml, or --gpu for the rates of a GPU"
            )
        if self.machine.gpu is not None and not platform.own_memory:
            raise ConfigError(f"cluster.device = {config.cluster.device!r}: --gpu needs cuda")
        return self._on_nodes(self.machine.config(config))

    def _given(self, dtype: str | None, length: int) -> dict[str, dict[str, Any]]:
        """Returns the keys that the options set. ``dtype`` and ``length``: of the model."""
        values: tuple[tuple[str, str, Any], ...] = (
            ("model", "dtype", self.dtype or dtype),
            ("data", "sequence_length", self.sequence_length or length),
            ("train", "global_batch", self.global_batch),
            ("train", "micro_batch", self.micro_batch),
            ("cluster", "workers", min(self.workers, self.workers_per_node)),
            ("schedule", "profile", None if self.profile is None else str(self.profile)),
        )
        given: dict[str, dict[str, Any]] = {}
        for section, key, value in values:
            if value is not None:
                given.setdefault(section, {})[key] = value
        return given

    def _on_nodes(self, config: Config) -> Config:
        """Returns the configuration on as many machines as its workers fill."""
        if self.workers <= self.workers_per_node or "nodes" in config.cluster.model_fields_set:
            return config
        if self.workers % self.workers_per_node:
            raise ConfigError(
                f"--workers {self.workers}: is no multiple of --workers-per-node"
                f" {self.workers_per_node}"
            )
        names = [f"node{index}" for index in range(self.workers // self.workers_per_node)]
        nodes = tuple(NodeConfig(name=name, host=f"host-{name}") for name in names)
        cluster = config.cluster.model_copy(update={"nodes": nodes})
        return config.model_copy(update={"cluster": cluster})

    def keys(self, config: Config) -> dict[str, Any]:
        """Returns the keys that ``train`` needs for the run of ``config``, besides model and data:
        what the options say, and the schedule.
        """
        given = self._given(config.model.dtype.value, config.data.sequence_length)
        names = ("model", "data", "train", "schedule", "cluster", "memory")
        keys = {name: given.get(name, {}) for name in names[:-1]}
        train = {"global_batch": config.train.global_batch, "micro_batch": config.train.micro_batch}
        keys["train"] = train
        default = ScheduleConfig().model_dump(mode="json")
        schedule = searched_keys(config.schedule)
        keys["schedule"].update(
            {key: value for key, value in schedule.items() if value != default[key]}
        )
        keys["schedule"].setdefault("scheme", schedule["scheme"])
        keys["cluster"] = {"device": config.cluster.device, "workers": config.cluster.workers}
        if self.workers > self.workers_per_node:
            keys["cluster"]["nodes"] = [{"name": node.name} for node in config.cluster.nodes]
        if self.machine.device_bytes is not None:
            keys["memory"] = {"device_limit": self.machine.device_bytes}
        return _deep(keys, apply_overrides({}, self.settings))


def _deep(keys: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keys with those of ``others`` that are not there."""
    for name, value in others.items():
        if isinstance(keys.get(name), dict) and isinstance(value, Mapping):
            keys[name] = _deep(keys[name], value)
        else:
            keys.setdefault(name, value)
    return keys


def gpu_here() -> FoundGpu | None:
    """Returns this machine's smallest GPU, by memory."""
    with suppress(OSError):
        gpus = tuple(found_gpus(ctypes.CDLL(LIBRARY)))
        return min(gpus, key=lambda gpu: gpu.memory_bytes, default=None)
    return None


def _folder_of(model: Path) -> Path:
    """Returns the folder of a ``config.json`` that is named by itself or by its folder.

    Raises:
        ConfigError: there is none.
    """
    folder = model.parent if model.name == CONFIG and not model.is_dir() else model
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"MODEL {str(model)!r}: has no {CONFIG}; give a folder in the Hugging Face layout, its"
            f" {CONFIG}, or a name of the catalogue ({model_hint(str(model))}{from_hub(model)})"
        )
    return folder


def model_hint(name: str) -> str:
    """Returns the names of the catalogue that are like ``name``, as a hint."""
    try:
        model_named(name)
    except ConfigError as error:
        alike = str(error).partition("did you mean ")[2].partition("?")[0]
        return f"did you mean {alike}? " if alike else "penstock plan --list shows them; "
    return ""


def _fields(path: Path) -> Mapping[str, Any]:
    try:
        fields = parse_json(path.read_bytes())
    except (OSError, *DAMAGED):
        return {}  # the preparation of the model names the mistake
    return fields if isinstance(fields, dict) else {}


def _dtype(fields: Mapping[str, Any]) -> str | None:
    """Returns the type of weights that a ``config.json`` names; None where it names none."""
    named = fields.get("dtype", fields.get("torch_dtype"))
    dtype = _DTYPES.get(named) if isinstance(named, str) else None
    return None if dtype is None else dtype.value
