"""The configuration: YAML -> typed, frozen, fully resolved.

Unknown keys and impossible values raise :class:`~penstock.protocol.errors.ConfigError` that names
the key, the value and what would be accepted. What must fit together across sections (stages
against blocks, workers against stages) is checked by :func:`penstock.planner.build.build_plan`,
which knows the block table.
"""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from penstock.protocol.config.values import Cores, LeftShare, Share, Size
from penstock.protocol.config.words import Form, apply_overrides, check_booleans, explain, spelled
from penstock.protocol.errors import ConfigError, reason
from penstock.shm.table import DType


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_enum_values=False, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, data: Any) -> Any:
        return {} if data is None else data  # a section with nothing under it

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        form = Form.of(cls.model_fields[str(info.field_name)])
        check_booleans(form, value)
        return spelled(form, value)


AUTO = "auto"
"""The scheme that the tuner chooses."""

_ONE_MODEL = "give exactly one of model.hf and model.path"


class RunConfig(_Section):
    """Identity and place of a run."""

    name: str = Field(
        default="penstock",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="a text of 1 to 64 letters, digits, dots, underscores and hyphens",
    )
    seed: int = Field(default=1234, ge=0, lt=2**63)
    dir: Path | None = None


class ModelConfig(_Section):
    """The model: ``hf`` (a Hugging Face configuration as a mapping) or ``path`` (a local
    directory). Emulated devices know their model by themselves.

    ``compile``: run the layers through ``torch.compile``, but for forwards whose plan splits the
    backward, drops operators, swaps, or binds weights anew.
    """

    hf: dict[str, Any] | None = Field(
        default=None, description="a mapping such as {model_type: llama, hidden_size: 256}, or null"
    )
    path: Path | None = None
    dtype: DType = DType.FP32
    compile: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.hf is not None and self.path is not None:
            raise ValueError(_ONE_MODEL)
        if self.hf is not None and "model_type" not in self.hf:
            raise ValueError("model.hf needs model_type, such as llama, gpt2, qwen2, mistral")
        return self


class DataConfig(_Section):
    """Training text: ``path`` (``@stdlib``, file or glob of .txt/.jsonl/.py) or ``tokens`` (binary
    token file).

    ``tokenizer``: ``byte``, or a tokenizer.json or the folder of one; by default that of
    ``model.path``, and ``byte`` for a model made from ``model.hf``.
    ``eval_fraction`` of the sequences, taken from the end, is held out when ``train.eval_every`` is
    set and no ``eval_path`` is given.
    """

    path: str | None = None
    tokens: Path | None = None
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    tokenizer: str | None = None
    sequence_length: int = Field(default=256, ge=1)
    shuffle: bool = True
    document_masks: bool = False
    eval_path: str | None = None
    eval_fraction: float = Field(default=0.02, gt=0.0, lt=1.0)

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if (self.path is None) == (self.tokens is None):
            raise ValueError("give exactly one of data.path and data.tokens")
        return self


class TrainConfig(_Section):
    """Length and batch of the run; batches count sequences. ``freeze``: regular expressions on
    parameter names.
    """

    steps: int = Field(default=200, ge=1)
    global_batch: int = Field(default=8, ge=1)
    micro_batch: int = Field(default=1, ge=1)
    clip_grad_norm: float | None = Field(default=1.0, gt=0.0)
    freeze: tuple[str, ...] = Field(
        default=(), description="a list of regular expressions such as [^model.embed]"
    )
    eval_every: int = Field(default=0, ge=0)
    eval_batches: int = Field(default=2, ge=1)
    save_every: int = Field(default=0, ge=0)
    keep_snapshots: int = Field(default=2, ge=1)
    max_skips: int = Field(default=20, ge=1)

    @model_validator(mode="after")
    def _divisible(self) -> TrainConfig:
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"train.global_batch {self.global_batch} is not divisible by"
                f" train.micro_batch {self.micro_batch}"
            )
        for pattern in self.freeze:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"train.freeze: {pattern!r} is no regular expression: {error}"
                ) from error
        return self

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per attempt."""
        return self.global_batch // self.micro_batch


class OptimizerName(StrEnum):
    """Optimizers with a native kernel."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"
    LION = "lion"
    ADAGRAD = "adagrad"

    @property
    def state_arrays(self) -> tuple[str, ...]:
        """What it keeps per parameter beside master, by torch's names."""
        return _STATE_ARRAYS[self]


_STATE_ARRAYS = {
    OptimizerName.ADAMW: ("exp_avg", "exp_avg_sq"),
    OptimizerName.ADAM: ("exp_avg", "exp_avg_sq"),
    OptimizerName.SGD: ("momentum_buffer",),
    OptimizerName.LION: ("exp_avg",),
    OptimizerName.ADAGRAD: ("sum",),
}


class OptimizerConfig(_Section):
    """The optimizer and its learning-rate schedule. Weight decay acts on parameters with two or
    more axes; ``adamw`` and ``lion`` decouple it from the gradient. ``betas`` are those of Adam and
    Lion (usually 0.9 and 0.99), ``momentum`` is SGD's, ``eps`` Adam's and Adagrad's.

    ``settle``: when the state of blocks that the CPU updates takes a committed step in: with
    ``advance`` in one sweep with the next one's preview; with ``early`` in a sweep of its own
    during the next forward, which leaves a shorter preview behind the last gradient. With ``auto``
    the planner chooses block by block, from the rates of ``schedule.profile`` or of an emulated
    device (:mod:`penstock.planner.settling`); all blocks advance where it has none. Same bits.

    ``master``: ``split`` keeps the lower halves of the fp32 masters only, next to bf16 weights that
    are the upper ones, rounded half up. It takes 2 bytes per parameter less; blocks that are
    settled early have one copy of gradients, too (if the owner's node computes all of them).

    ``cores``: CPUs that the threads are pinned to, one each; with ``auto`` as
    :func:`penstock.protocol.plan.placement.place` decides: as many as ``threads`` says (0: one for
    each physical core), or as there are if these are fewer, with ``leave_cores`` of the physical
    cores, rounded, left to the workers.

    ``rollback``: ``exact`` computes weights ahead of the state, so that nothing has to be undone;
    ``arithmetic`` steps in place and inverts steps that do not count (SPipe, DeepSpeed), which
    loses bits, but needs one copy of the gradients only
    (:mod:`penstock.daemons.optimizer.machine.arithmetic`).

    ``speculate``: whether weights are computed before the gradients' norm is known: ``always``,
    ``never`` (every update waits for it), or, with ``auto``, as long as little enough is clipped.
    Same bits.

    fp16 models train with a loss scale: it starts at ``initial_loss_scale``, halves with every
    attempt whose gradients overflow, down to ``loss_scale_min``, and doubles after
    ``loss_scale_growth_interval`` steps in a row. After more than ``train.max_skips`` overflows in
    a row, the last at the lowest scale, the run ends.
    """

    name: OptimizerName = OptimizerName.ADAMW
    lr: float = Field(default=3.0e-4, gt=0.0)
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="two numbers, 0 or more and below 1, such as [0.9, 0.95]"
    )
    momentum: float = Field(default=0.9, ge=0.0, lt=1.0)
    eps: float = Field(default=1.0e-8, gt=0.0)
    weight_decay: float = Field(default=0.1, ge=0.0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    min_lr: float = Field(default=0.0, ge=0.0)
    grad_dtype: DType = DType.FP32
    rollback: Literal["exact", "arithmetic"] = "exact"
    settle: Literal["auto", "advance", "early"] = "auto"
    master: Literal["fp32", "split"] = "fp32"
    threads: int = Field(default=0, ge=0)
    cores: Cores = "auto"
    leave_cores: LeftShare = "auto"
    speculate: Literal["auto", "always", "never"] = "auto"
    initial_loss_scale: float = Field(default=65536.0, gt=0.0, allow_inf_nan=False)
    loss_scale_min: float = Field(default=1.0, gt=0.0)
    loss_scale_growth_interval: int = Field(default=2000, ge=1)

    @model_validator(mode="after")
    def _in_place(self) -> OptimizerConfig:
        if self.rollback == "arithmetic" and self.settle == "early":
            raise ValueError(
                "optimizer.rollback arithmetic steps in place, and optimizer.settle early leaves"
                " the state for later; use settle advance, or rollback exact"
            )
        return self

    @model_validator(mode="after")
    def _values(self) -> OptimizerConfig:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"optimizer.betas {list(self.betas)}: each must be in [0, 1)")
        if self.min_lr > self.lr:
            raise ValueError(f"optimizer.min_lr {self.min_lr} is above optimizer.lr {self.lr}")
        if self.cores != AUTO and (self.threads or self.leave_cores != AUTO):
            raise ValueError(
                f"optimizer.cores {list(self.cores)} says which cores, one thread each; leave out"
                " optimizer.threads and optimizer.leave_cores, or use cores: auto"
            )
        if self.loss_scale_min > self.initial_loss_scale:
            raise ValueError(
                f"optimizer.loss_scale_min {self.loss_scale_min} is above"
                f" optimizer.initial_loss_scale {self.initial_loss_scale}"
            )
        return self


class ScheduleConfig(_Section):
    """The pipeline schedule: a scheme of the planner, or a ``file`` (a plan as JSON, or the action
    text of ``torch.distributed.pipelining`` as .csv). Whether workers run what comes of it is
    decided by :mod:`penstock.protocol.plan.executable`.

    Numbers of stages (of one route) default to what the scheme uses with the workers at hand;
    ``stages_per_device`` says ``forward_stages`` per worker. ``replicas``: as many pipelines share
    the workers and the batch (data parallelism). ``reduce_gradients``: devices sum the gradients of
    such routes, and one of them hands them over; otherwise the optimizer does, in its sweeps;
    ``auto``: where routes of a stage are on several nodes. ``drop``: what ``recompute: selective``
    makes again, names of operators or of sets of them (:mod:`penstock.planner.cost.operators`).
    ``weight_gradients``: how a BACKWARD_WEIGHT takes several micro-batches (passes ``2bp`` and
    ``concatenate``): ``looped`` leaves the bits of an unsplit backward; ``concatenated`` is one
    product over the rows of all, which is faster where they are few, and rounds otherwise.

    ``update_stride``: the pass ``interleave-updates`` has every so many-th block updated on its
    device; unset, what is fastest by the rates of ``profile``. ``resident_share``: of each device's
    parameters, those whose optimizer state stays on the device: the last to be updated with
    ``interleave-updates``, the first with ``twinflow``.

    ``schedule: NAME`` is short for ``scheme: NAME``. ``auto`` is the fastest that the tuner finds
    (:mod:`penstock.planner.tuning.auto`); other keys that are given restrict its search.
    ``profile``: what ``penstock profile`` measured, for costs of simulations; a guess at the device
    otherwise.
    ``asked``: written to ``resolved.yaml``: the restrictions under which ``auto`` chose the rest.
    """

    scheme: Literal[
        "auto",
        "naive",
        "gpipe",
        "1f1b",
        "1f1b-2",
        "interleaved",
        "chimera",
        "hanayo",
        "zb-h1",
        "zb-v",
        "dualpipe-v",
        "bpipe",
        "mobius",
        "megatron-offload",
        "spipe",
        "zero3-offload",
    ] = "spipe"
    forward_stages: int | None = Field(default=None, ge=1)
    backward_stages: int | None = Field(default=None, ge=1)
    stages_per_device: int | None = Field(default=None, ge=1)
    replicas: int = Field(default=1, ge=1)
    reduce_gradients: bool | Literal["auto"] = "auto"
    recompute: Literal["full", "selective", "none"] | None = None
    drop: tuple[str, ...] = ()
    weight_gradients: Literal["looped", "concatenated"] = "looped"
    passes: tuple[str, ...] = ()
    update_stride: int | None = Field(default=None, ge=1)
    resident_share: float = Field(default=0.0, ge=0.0, le=1.0)
    file: Path | None = None
    profile: Path | None = None
    asked: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        return {"scheme": data} if isinstance(data, str) else data


class NodeConfig(_Section):
    """One node of the cluster. ``host`` is where its daemons listen."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9-]{0,15}$",
        description="a text of 1 to 16 small letters, digits and hyphens",
    )
    host: str = "127.0.0.1"


class ClusterConfig(_Section):
    """Nodes and workers. ``workers`` counts per node. Ports of 0 are chosen by the system.

    ``attempt_timeout_s``: an attempt or evaluation in which nobody gets on for so long is broken
    off, and who holds it up is killed and replaced. Longer than any single instruction takes.

    ``grace_seconds``: a run that is asked to stop is killed from outside so much later; unset:
    never, or at the end of its Slurm job.

    ``device``: ``cpu``, ``cuda``, or ``emulated:`` and where costs come from, as in
    :mod:`penstock.planner.cost.emulation`.

    ``transport``: how tensors get from worker to worker. ``zmq``: messages through host memory.
    ``gloo``, through host memory, and ``nccl``, from GPU to GPU: process groups of
    torch.distributed. ``auto``: nccl where each worker of a node has a GPU of its own, else zmq;
    nodes must be alike. Between two workers of a machine gloo takes 0.6 to 0.8 of zmq's time for
    transfers of up to 64 KiB, 1.5 to 1.9 of it from 1 MiB on (``bench/transport.py``).
    """

    workers: int = Field(default=2, ge=1, le=64)
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda|emulated:.+)$",
        description="cpu, cuda, emulated:analytic:GPU:MODEL or emulated:PROFILE.json",
    )
    transport: Literal["auto", "zmq", "gloo", "nccl"] = "auto"
    nodes: tuple[NodeConfig, ...] = Field(
        default=(NodeConfig(name="a"),),
        description="a list of nodes such as [{name: a}, {name: b, host: 10.0.0.2}]",
    )
    scheduler_port: int = Field(default=0, ge=0, le=65535)
    threads_per_worker: int = Field(default=0, ge=0)
    heartbeat_interval_s: float = Field(default=0.5, gt=0.0)
    heartbeat_timeout_s: float = Field(default=10.0, gt=0.0)
    attempt_timeout_s: float = Field(default=600.0, gt=0.0)
    max_restarts: int = Field(default=20, ge=0)
    grace_seconds: float | None = Field(default=None, gt=0.0)

    @model_validator(mode="after")
    def _values(self) -> ClusterConfig:
        names = [node.name for node in self.nodes]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"cluster.nodes need distinct names, at least one; got {names}")
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                "cluster.heartbeat_timeout_s must be at least twice heartbeat_interval_s"
            )
        if self.transport == "nccl" and self.device != "cuda":
            raise ValueError(
                f"cluster.transport nccl is for cluster.device: cuda, which is {self.device!r};"
                " auto, zmq and gloo work there"
                if self.emulated is None
                else "cluster.transport nccl is for cluster.device: cuda; emulated devices take"
                " auto or zmq"
            )
        if self.transport == "gloo" and self.emulated is not None:
            raise ValueError(
                "cluster.transport gloo: emulated devices take auto or zmq, and reckon with the"
                " links of the cluster that they emulate"
            )
        if self.emulated is not None and len({node.host for node in self.nodes}) > 1:
            raise ValueError(
                "cluster.nodes of an emulated cluster run on one machine; give them one host"
            )
        return self

    @property
    def emulated(self) -> str | None:
        """Where the costs of emulated devices come from; ``None``: devices are real."""
        return self.device.removeprefix("emulated:") if ":" in self.device else None


class MemoryConfig(_Section):
    """Limits that ``plan`` and ``train`` hold the memory table against; unset means what the
    machine has.
    """

    host_limit: Size | None = None
    device_limit: Size | None = None


class EmulationConfig(_Section):
    """Emulated devices (``cluster.device: emulated:…``).

    ``scale``: share of each block's parameters that is stored, computed with and sent.
    ``time_scale``: seconds on the clock for a second of the emulated cluster.

    What else differs from the machines that ``cluster.device`` names: ``machine``, fields of
    :class:`penstock.planner.cost.cluster.Cluster` (bytes, bytes/s, seconds, parameters/s);
    ``instruction_s``, overhead of a compute instruction; ``optimizer_bytes``, memory traffic per
    parameter of the optimizer's sweep; ``optimizer_start``: ``flush`` keeps every node's optimizer
    waiting for its last gradients, as Mobius and Megatron do.
    """

    scale: Share = 1e-3
    time_scale: float = Field(default=1.0, gt=0.0, le=1e3)
    machine: dict[str, float] = Field(
        default={}, description="a mapping of numbers such as {nic_bandwidth: 1.25e+10}"
    )
    instruction_s: float | None = Field(default=None, ge=0.0)
    optimizer_bytes: float | None = Field(default=None, gt=0.0)
    optimizer_start: Literal["offload", "flush"] = "offload"


class ObservabilityConfig(_Section):
    """``metrics_port`` 0 lets each process choose a free port (``penstock status`` lists them).
    ``metrics_host``: where they listen, of every node; 0.0.0.0 for a Prometheus on another machine.

    ``memory``: CPU workers count the bytes of live tensors, some 10 µs an operator; GPUs and
    emulated devices are always measured.
    """

    metrics_port: int = Field(default=0, ge=0, le=65535)
    metrics_host: str = Field(
        default="127.0.0.1", description="an address of the machine, such as 127.0.0.1 or 0.0.0.0"
    )
    trace: bool = False
    memory: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class Config(_Section):
    """A whole configuration."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    cluster: ClusterConfig = ClusterConfig()
    memory: MemoryConfig = MemoryConfig()
    emulation: EmulationConfig = EmulationConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @model_validator(mode="after")
    def _halves_of_a_master(self) -> Config:
        if self.optimizer.master != "split":
            return self
        if self.model.dtype is not DType.BF16:
            raise ValueError(
                "optimizer.master split has bf16 weights as the upper halves of the master, and"
                f" model.dtype is {self.model.dtype.value}; use model.dtype bf16, or master fp32"
            )
        if self.optimizer.rollback != "exact":
            raise ValueError(
                f"optimizer.rollback {self.optimizer.rollback} steps in place, which overwrites"
                " upper halves that a rollback needs, and optimizer.master is split; use rollback"
                " exact, or master fp32"
            )
        return self

    @model_validator(mode="after")
    def _gradients_of_scaled_losses(self) -> Config:
        if self.optimizer.grad_dtype is DType.FP16 and self.model.dtype is not DType.FP16:
            raise ValueError(
                "optimizer.grad_dtype fp16 needs the loss scale that model.dtype fp16 has, which is"
                f" {self.model.dtype.value}; use bf16 or fp32"
            )
        return self

    @model_validator(mode="after")
    def _rollback_of_scaled_losses(self) -> Config:
        scaled = DType.FP16 in (self.model.dtype, self.optimizer.grad_dtype)
        if self.optimizer.rollback == "arithmetic" and scaled:
            raise ValueError(
                "optimizer.rollback arithmetic: a dynamic loss scale, which fp16 needs, makes"
                " gradients overflow again and again, and what an overflow does to a state that was"
                " stepped in place no arithmetic brings back; use rollback exact, or bf16"
            )
        return self

    @model_validator(mode="after")
    def _emulated_or_real(self) -> Config:
        if self.cluster.emulated is not None:
            if self.schedule.profile is not None:
                raise ValueError(
                    f"schedule.profile = {str(self.schedule.profile)!r}: emulated devices have the"
                    " costs that cluster.device names (emulated:FILE.json takes a profile)"
                )
            return self
        if self.model.hf is None and self.model.path is None:
            raise ValueError(_ONE_MODEL)
        if self.emulation != EmulationConfig():
            raise ValueError(
                f"emulation: is for cluster.device: emulated:…, which is {self.cluster.device!r}"
            )
        return self

    @property
    def run_dir(self) -> Path:
        """Where the run keeps its files."""
        return self.run.dir if self.run.dir is not None else Path("runs") / self.run.name

    @property
    def num_workers(self) -> int:
        """Workers (devices) of all nodes."""
        return self.cluster.workers * len(self.cluster.nodes)

    def to_yaml(self) -> str:
        """The full configuration, as written to ``RUN_DIR/resolved.yaml``."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> Config:
    """Read a YAML file and apply ``section.key=value`` overrides (values are YAML).

    Raises:
        ConfigError: unreadable file, no mapping, unknown key, impossible value; all of them listed.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {path}: cannot read it: {reason(error)}") from error
    except RecursionError as error:
        raise ConfigError(f"configuration {path}: is nested too deeply") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration {path}: not valid YAML: {reason(error)}") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"configuration {path}: expected sections (run, model, data, …), got {data!r}"
        )
    return parse_config(apply_overrides(data, overrides), source=str(path))


def parse_config(data: dict[str, Any], *, source: str = "configuration") -> Config:
    """Validate a nested mapping.

    Raises:
        ConfigError: every offending key with its value and what would be accepted.
    """
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {explain(error, Config)}") from error
