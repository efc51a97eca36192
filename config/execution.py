"""The sections about schedule and machines: schedule, cluster, memory, emulation, observability.
Keys are explained as in :mod:`penstock.config.training`.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from penstock.config.platforms import (
    DEVICE_CHOICES,
    DEVICE_PATTERN,
    PLATFORMS,
    TRANSPORTS,
    Platform,
    TransportName,
    parameter_of,
    platform_of,
)
from penstock.config.values import Accepts, Old, Seconds, Share, Size, Unit
from penstock.config.words import Section

SchemeName = Literal[
    "auto",
    "naive",
    "gpipe",
    "1f1b",
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
]
"""Values of ``schedule.scheme``. All but ``auto`` are defined in modules of
:mod:`penstock.planner.schemes`, and its registry has this order.
"""


class DeviceUpdates(StrEnum):
    """Treatment of a block's state by an UPDATE that a pass inserts."""

    PREVIEW = "preview"
    """Leaves it to the CPU, after the commit."""
    FLUSH = "flush"
    """Writes the next state into a second copy, and keeps the committed state."""
    AUTO = "auto"
    """Selects the choice with the shorter simulated step."""


_PAPERS_1F1B = "1f1b-2"
"""Name of the 2BP paper for 1F1B with two micro-batches for each device: the orders are the same.
"""


class ScheduleConfig(Section):
    """The pipeline schedule; `schedule: NAME` is short for `scheme: NAME`. What `auto` chose is
    kept by resumes unless workers, limits, batches or the request changed.
    """

    scheme: SchemeName = Field(
        default="spipe",
        description="A scheme by name (`penstock plan --list`; bpipe within one node). With auto,"
        " the fastest scheme that the tuner finds within all memory limits; other given keys of"
        " this section restrict its search. Unset: spipe, or auto with one worker on a GPU.",
    )
    forward_stages: int | None = Field(
        default=None,
        ge=1,
        description="Number of stages into which the forward of each pipeline is cut. Unset: as"
        " many as the scheme uses with the available workers.",
    )
    backward_stages: int | None = Field(
        default=None,
        ge=1,
        description="Number of stages of the backward, in schemes that cut it differently from"
        " the forward.",
    )
    stages_per_device: int | None = Field(
        default=None,
        ge=1,
        description="Number of forward stages for each worker, instead of `forward_stages`.",
    )
    replicas: Annotated[int, Unit("pipelines")] = Field(
        default=1,
        ge=1,
        description="Data parallelism: number of pipelines that share the workers and the batch.",
    )
    reduce_gradients: bool | Literal["auto"] = Field(
        default="auto",
        description="True: devices sum the gradients of replicas (or of both directions of"
        " chimera), and one device sends the sum to the optimizer. False: the optimizer sums"
        " them. auto: true if the replicas of a stage are on several nodes.",
    )
    recompute: Literal["auto", "full", "selective", "none"] | None = Field(
        default=None,
        description="Activations that backwards compute again instead of keeping them: full:"
        " everything between stage inputs; selective: the operators in `drop`; none: nothing."
        " auto: devices keep the activations of as many micro-batches as fit into memory, and"
        " recompute the rest. Unset: auto on GPUs for a schedule without passes and file,"
        " otherwise the usual choice of the scheme.",
    )
    drop: tuple[str, ...] = Field(
        default=(),
        description="With `recompute: selective`: operators such as norm, or sets such as cmb, mlp,"
        " attention, core.",
    )
    weight_gradients: Literal["looped", "concatenated"] = Field(
        default="looped",
        description="Computation of a split backward over several micro-batches (passes 2bp and"
        " concatenate). looped: the bits of an unsplit backward. concatenated: one product over"
        " all rows, faster for few rows, with other rounding.",
    )
    passes: tuple[str, ...] = Field(
        default=(),
        description="Optimising passes over the schedule, in this order (`penstock plan --list`).",
    )
    update_stride: Annotated[float | None, Unit("blocks")] = Field(
        default=None,
        ge=1,
        description="For the pass interleave-updates: every n-th of a device's blocks is updated"
        " on the device (1.5: two of three). Unset: the fastest stride by the rates of `profile`.",
    )
    resident_share: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Share of each device's parameters with optimizer state on the device: the"
        " last to be updated with interleave-updates, the first with twinflow.",
    )
    device_updates: DeviceUpdates = Field(
        default=DeviceUpdates.PREVIEW,
        description="Work of devices on blocks from interleave-updates or device-update. preview:"
        " devices write the next weights, and the CPU updates the state after the commit. flush:"
        " devices write the next state as well, next to the committed state, so that the CPU does"
        " nothing for these blocks; this needs a second copy of their state in host memory (Deep"
        " Optimizer States; `penstock docs PLANNING`). auto: the choice with the shorter simulated"
        " step, possibly no updates on devices if no stride or share is given.",
    )
    file: Path | None = Field(
        default=None,
        description="A finished schedule instead of a scheme: a plan.json, or the action text of"
        " torch.distributed.pipelining as .csv.",
    )
    profile: Path | None = Field(
        default=None,
        description="Measurements of `penstock profile`, for the costs of simulations. Unset: a"
        " guess at the device.",
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        data = {"scheme": data} if isinstance(data, str) else data
        if isinstance(data, dict) and data.get("scheme") == _PAPERS_1F1B:
            data = {**data, "scheme": "1f1b"}  # as old run directories have it
        if isinstance(data, dict):
            # Old run directories have the constraints of a search here; now search.json has them.
            data = {key: value for key, value in data.items() if key != "asked"}
        return data


SecurityName = Literal["none", "insecure", "tls", "tls-trusted-fabric"]


class NodeConfig(Section):
    """One node of the cluster."""

    name: Annotated[str, Accepts("a text of 1 to 16 small letters, digits and hyphens")] = Field(
        pattern=r"^[a-z0-9][a-z0-9-]{0,15}$",
        description="The node's name, as in `penstock node --node NAME`.",
    )
    host: str = Field(
        default="127.0.0.1",
        description="Address on which the node's daemons listen. Other nodes must reach it.",
    )


class ClusterConfig(Section):
    """Nodes, workers, and how they talk."""

    workers: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Workers (devices) of each node, one process each.",
    )
    device: Annotated[str, Accepts(DEVICE_CHOICES)] = Field(
        default="cpu",
        pattern=DEVICE_PATTERN,
        description="Device of the workers. cuda workers share GPUs if a node has fewer GPUs than"
        " workers. Emulated devices only take the time of the named GPU and model, or of a"
        " measurement by `penstock profile`.",
    )
    transport: Literal["auto", TransportName] = Field(
        default="auto",
        description="Transport of tensors between workers. zmq: messages through host memory."
        " gloo (host memory) and nccl (from GPU to GPU): process groups of torch.distributed."
        " auto: nccl if each worker of a node has its own GPU, else zmq; nodes must be alike."
        " Between two workers of a machine gloo takes 0.6 to 0.8 of zmq's time for transfers of"
        " up to 64 KiB, and 1.5 to 1.9 of it from 1 MiB on.",
    )
    fetch: Literal["zmq", "nixl", "auto"] = Field(
        default="zmq",
        description="Transport of weights and gradients between nodes. zmq: the owner's memoryd"
        " sends them. nixl: the receiver reads the owner's memory directly, by RDMA if a device"
        " supports it, else over TCP or shared memory (`pip install penstock[rdma]`). auto: nixl"
        " on nodes with such a device. Two nodes use zmq unless both offer nixl"
        " (`penstock docs NODES`).",
    )
    nodes: Annotated[
        tuple[NodeConfig, ...],
        Accepts("a list of nodes such as [{name: a}, {name: b, host: 10.0.0.2}]"),
    ] = Field(
        default=(NodeConfig(name="a"),),
        description="The machines. The first prepares the run and hosts the scheduler. Unset,"
        " with `penstock node`: the nodes that Slurm, a JobSet or torchrun started, named node-0,"
        " node-1 and so on.",
    )
    scheduler_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port of the scheduler on the first node; 0: any free port.",
    )
    security: SecurityName = Field(
        default="none",
        description="none: only loopback addresses are allowed, and a token in the run directory"
        " keeps other users of the machine away. insecure: any address is allowed, and everybody"
        " on the network may read and change the run. tls: all traffic is encrypted, and callers"
        " without a key of the run are rejected (`penstock docs SECURITY`). tls-trusted-fabric: as"
        " tls, but RDMA and process groups of torch.distributed, which tls refuses, stay"
        " unencrypted on a private network.",
    )
    keys: Path | None = Field(
        default=None,
        description="Folder that `penstock keys make` made, for tls. Each node needs only its"
        " part of it, at this path (`penstock keys pack`).",
    )
    pin_memory: bool = Field(
        default=True,
        description="True: the driver pins shared memory, and GPUs copy it during the"
        " computation. False, for drivers that refuse to pin (WSL, some virtual GPUs): copies"
        " pass through the driver's memory, more slowly, while the worker waits.",
    )
    threads_per_worker: Annotated[int, Unit("threads")] = Field(
        default=0,
        ge=0,
        description="Threads with which each worker computes; 0: its share of the cores.",
    )
    cpus_per_node: Annotated[int | None, Unit("CPUs")] = Field(
        default=None,
        ge=1,
        description="Fewest CPUs of a node: with fewer by affinity, cpuset or CPU quota it"
        " refuses to start, even if the machine has more. Unset: one for each configured thread,"
        " each worker, and the optimizer.",
    )
    heartbeat_interval_s: Seconds = Field(
        default=0.5, gt=0.0, description="Time between two heartbeats of a process."
    )
    heartbeat_timeout_s: Seconds = Field(
        default=10.0,
        gt=0.0,
        description="Time without a heartbeat after which a process is killed and replaced; at"
        " least twice `heartbeat_interval_s`.",
    )
    attempt_timeout_s: Seconds = Field(
        default=600.0,
        gt=0.0,
        description="Time without progress after which an attempt or evaluation is aborted, and"
        " the member that blocks it is killed and replaced. A process that has not joined the run"
        " at this age is replaced, too. Must be longer than any single instruction.",
    )
    start_timeout_s: Seconds = Field(
        default=1800.0,
        gt=0.0,
        description="Time in which the first node must prepare the run and start the scheduler;"
        " other nodes wait.",
    )
    max_restarts: int = Field(
        default=20,
        ge=0,
        description="Most replacements of a process within an hour without a committed step; the"
        " next failure ends the run.",
    )
    preload: bool = Field(
        default=True,
        description="True: each node keeps two processes that have already imported the modules"
        " of the others, and forks them, so that a lost process is replaced sooner. False: every"
        " process imports its modules itself.",
    )
    stop_grace_s: Seconds | None = Field(
        default=None,
        gt=0.0,
        description="Time between a stop request and the kill by the batch system. Unset: no"
        " limit, or the end of the Slurm job.",
    )

    @model_validator(mode="after")
    def _values(self) -> ClusterConfig:
        names = [node.name for node in self.nodes]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"cluster.nodes need distinct names, at least one; got {names}")
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                "cluster.heartbeat_timeout_s must be at least twice heartbeat_interval_s"
            )
        if self.security == "tls" and self.fetch != "zmq":
            raise ValueError(
                f"cluster.fetch {self.fetch} reads memory without encryption, and its software"
                " paths check no keys; with cluster.security: tls use zmq, or declare the network"
                " private (cluster.security: tls-trusted-fabric)"
            )
        if self.transport != "auto" and not self.may_use(self.transport):
            raise ValueError(
                f"cluster.transport {self.transport} is unencrypted, and its ports admit everybody;"
                " with cluster.security: tls use zmq, or declare the network private"
                " (cluster.security: tls-trusted-fabric)"
            )
        *others, last = "auto", *self.platform.transports
        if self.transport not in (*others, last):
            able = [name for name, p in PLATFORMS.items() if self.transport in p.transports]
            raise ValueError(
                f"cluster.transport {self.transport} is for cluster.device: {', '.join(able)},"
                f" which is {self.device!r}; {', '.join(others)} and {last} work there"
            )
        if self.platform.simulated_clock and len({node.host for node in self.nodes}) > 1:
            raise ValueError(
                f"cluster.nodes of an {self.platform.name} cluster run on one machine; give them"
                " one host"
            )
        return self

    def may_use(self, transport: TransportName) -> bool:
        """Returns whether a transport is as safe as ``security`` asks for: process groups of
        torch.distributed, and their store, are plain.
        """
        plain = TRANSPORTS[transport].group_module is not None
        return not plain or self.security != "tls"

    @property
    def uses_keys(self) -> bool:
        """True if processes authenticate by the keys of the run, and encrypt."""
        return self.security in ("tls", "tls-trusted-fabric")

    @property
    def opens_addresses(self) -> bool:
        """True if addresses other than loopback are allowed."""
        return self.security != "none"

    @property
    def fetches_one_sidedly(self) -> bool:
        """Returns whether nodes are to read each other's memory, as far as they can."""
        return self.fetch != "zmq" and len(self.nodes) > 1

    @property
    def platform(self) -> Platform:
        """Capabilities of the devices."""
        return platform_of(self.device)

    @property
    def device_parameter(self) -> str | None:
        """Text of ``device`` after the platform's name, which names the source of costs; None
        without one.
        """
        return parameter_of(self.device)


class MemoryConfig(Section):
    """Limits that plans are held against; unset means what the machine has."""

    host_limit: Size | None = Field(
        default=None, description="Most host memory of each node that Penstock may use."
    )
    device_limit: Size | None = Field(
        default=None, description="Most memory of each device that a plan may use."
    )
    mirror: Literal["none", "partner"] = Field(
        default="none",
        description="partner: each node's partner, the next one in `cluster.nodes`, keeps a"
        " replica of its optimizer state and steps the replica, too, so that a node that is lost"
        " with its memory costs no step. The replica takes the memory of that state once more,"
        " and gradients cross the network (`penstock docs NODES`).",
    )
    share_base: Literal["auto", "never"] = Field(
        default="auto",
        description="auto: frozen weights are in /dev/shm once for all runs of a user that have"
        " the same ones: same files of model.path (not copies), or same seed and configuration."
        " Where another user has taken the name in /dev/shm, the run has its own."
        " never: each run has its own (`penstock docs OPERATION`).",
    )


class EmulationConfig(Section):
    """Emulated devices (`cluster.device: emulated:…`), and what differs from the machines that
    `cluster.device` names.
    """

    scale: Share = Field(
        default=1e-3,
        description="Share of each block's parameters that is stored, computed with and sent.",
    )
    time_scale: float = Field(
        default=1.0,
        gt=0.0,
        le=1e3,
        description="Seconds on the clock for one second of the emulated cluster.",
    )
    machine: Annotated[
        dict[str, float], Accepts("a mapping of numbers such as {nic_bandwidth: 1.25e+10}")
    ] = Field(
        default={},
        description="Sizes (bytes), bandwidths (bytes/s), latencies (seconds) and rates"
        " (parameters/s) that differ, by the names of the fields in `planner/cost/cluster.py`.",
    )
    instruction_s: Seconds | None = Field(
        default=None,
        ge=0.0,
        description="Time that each compute instruction takes in addition to its costs.",
    )
    compute_speed: float = Field(
        default=1.0,
        gt=0.0,
        le=1e12,
        description="Factor by which devices compute faster than their costs.",
    )
    optimizer_bytes: Annotated[float | None, Unit("bytes per parameter")] = Field(
        default=None,
        gt=0.0,
        description="Memory traffic of a step of the optimizer. Unset: the traffic of its sweeps.",
    )
    optimizer_start: Literal["offload", "flush"] = Field(
        default="offload",
        description="With flush, every node's optimizer waits for its last gradients, as in Mobius"
        " and Megatron; with offload it starts with the first.",
    )


class ObservabilityConfig(Section):
    """Metrics, traces and logs."""

    metrics_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port of each node on which Prometheus scrapes the metrics of all its"
        " processes; nodes on one machine use consecutive ports. 0: any free port, which"
        " `penstock status` and `RUN_DIR/metrics/` show.",
    )
    metrics_host: Annotated[
        str, Accepts("an address of the machine, such as 127.0.0.1 or 0.0.0.0")
    ] = Field(
        default="127.0.0.1",
        description="Address on which every node serves metrics; 0.0.0.0 for a Prometheus on"
        " another machine. With tls, metrics need TLS and a password.",
    )
    targets: Path | None = Field(
        default=None,
        description="Folder that Prometheus' file_sd watches: nodes write their metrics addresses"
        " into it, and remove them at their end. Runs may share it.",
    )
    trace: bool = Field(
        default=False,
        description="Records the times of everything that processes do, for `penstock trace`.",
    )
    sample_every: int = Field(
        default=50,
        ge=0,
        description="Attempts for each attempt that is recorded and analysed, off the step's"
        " path: on which resource it spent its time, and the savings without; 0: none.",
    )

    @property
    def traced_every(self) -> int:
        """Attempts for each attempt that is recorded: 1 records all, and evaluations; 0 records
        none.
        """
        return 1 if self.trace else self.sample_every

    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = Field(
        default=(),
        description="Trackers that receive the lines of `metrics.jsonl`, each through a process"
        " that no step waits for.",
    )
    tracker_project: Annotated[str | None, Old()] = Field(default=None, min_length=1)
    wandb_mode: Annotated[Literal["online", "offline"] | None, Old()] = None
    mlflow_uri: Annotated[str | None, Old()] = None
    opentelemetry: Annotated[str | None, Accepts("a URL such as http://127.0.0.1:4318")] = Field(
        default=None,
        pattern=r"^https?://.+",
        description="Collector that receives spans of attempts, evaluations and saves by OTLP"
        " over HTTP.",
    )
    memory: bool = Field(
        default=False,
        description="CPU workers count the bytes of live tensors, some 10 µs an operator; GPUs and"
        " emulated devices are always measured.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Messages below this level are not logged."
    )
