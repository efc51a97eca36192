"""The sections that say how and where a model is trained: schedule, cluster, memory, emulation,
observability. Keys are explained as in :mod:`penstock.config.training`.
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
"""What ``schedule.scheme`` can name. All but ``auto`` are defined in modules of
:mod:`penstock.planner.schemes`, and its registry has this order.
"""


class DeviceUpdates(StrEnum):
    """What an UPDATE that a pass inserts does with the state of its block."""

    PREVIEW = "preview"
    """Leaves it to the CPU, after the commit."""
    FLUSH = "flush"
    """Writes the next one beside the committed one."""
    AUTO = "auto"
    """What makes the simulated step shorter."""


_PAPERS_1F1B = "1f1b-2"
"""What the 2BP paper calls 1F1B with two micro-batches for each device: the same orders."""


class ScheduleConfig(Section):
    """The pipeline schedule; `schedule: NAME` is short for `scheme: NAME`. What `auto` chose is
    kept by resumes unless workers, limits, batches or the request changed.
    """

    scheme: SchemeName = Field(
        default="spipe",
        description="A scheme by name (`penstock plan --list`; bpipe within one node). With auto,"
        " the fastest that the tuner finds within all memory limits; other keys of this section"
        " that are given restrict its search. Unset, auto with one worker on a GPU.",
    )
    forward_stages: int | None = Field(
        default=None,
        ge=1,
        description="The forward of each pipeline is cut into so many stages; unset, into as many"
        " as the scheme uses with the workers at hand.",
    )
    backward_stages: int | None = Field(
        default=None,
        ge=1,
        description="The backward is cut into so many stages, in schemes that cut it differently.",
    )
    stages_per_device: int | None = Field(
        default=None,
        ge=1,
        description="The number of forward stages for each worker, instead of `forward_stages`.",
    )
    replicas: Annotated[int, Unit("pipelines")] = Field(
        default=1,
        ge=1,
        description="Data parallelism: so many pipelines share the workers and the batch.",
    )
    reduce_gradients: bool | Literal["auto"] = Field(
        default="auto",
        description="Whether devices sum the gradients of replicas (or of both directions of"
        " chimera), and one of them hands over the sum; otherwise the optimizer sums them. With"
        " auto, where the replicas of a stage are on several nodes.",
    )
    recompute: Literal["auto", "full", "selective", "none"] | None = Field(
        default=None,
        description="What backwards make again instead of keeping it: everything between stage"
        " inputs, the operators in `drop`, or nothing. With auto, devices keep the activations of"
        " as many micro-batches as they have room for, and make the others again. Unset, auto on"
        " GPUs, for a schedule without passes and file; elsewhere what the scheme is known for.",
    )
    drop: tuple[str, ...] = Field(
        default=(),
        description="With `recompute: selective`: operators such as norm, or sets such as cmb, mlp,"
        " attention, core.",
    )
    weight_gradients: Literal["looped", "concatenated"] = Field(
        default="looped",
        description="How a split backward takes several micro-batches at once (passes 2bp and"
        " concatenate): looped leaves the bits of an unsplit one; concatenated is one product over"
        " the rows of all, faster where these are few, with other rounding.",
    )
    passes: tuple[str, ...] = Field(
        default=(),
        description="Optimising passes over the schedule, in this order (`penstock plan --list`).",
    )
    update_stride: Annotated[float | None, Unit("blocks")] = Field(
        default=None,
        ge=1,
        description="Of the pass interleave-updates: of each device's blocks every so many-th is"
        " updated there (1.5: two of three); unset, what is fastest by the rates of `profile`.",
    )
    resident_share: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Of each device's parameters, the share whose optimizer state stays on the"
        " device: the last to be updated with interleave-updates, the first with twinflow.",
    )
    device_updates: DeviceUpdates = Field(
        default=DeviceUpdates.PREVIEW,
        description="What devices do with the blocks that interleave-updates or device-update give"
        " them: preview, write their next weights, and the CPU takes the step into their state"
        " after the commit; flush, write their next state as well, next to the committed one, so"
        " that the CPU has nothing to do with them, for a second copy of their state in host memory"
        " (Deep Optimizer States; docs/PLANNING.md); auto, what makes the simulated step shorter,"
        " which may be no updates on devices if no stride or share is given.",
    )
    file: Path | None = Field(
        default=None,
        description="A finished schedule instead of a scheme: a plan.json, or the action text of"
        " torch.distributed.pipelining as .csv.",
    )
    profile: Path | None = Field(
        default=None,
        description="What `penstock profile` measured, for the costs of simulations; unset, a guess"
        " at the device.",
    )
    asked: dict[str, Any] | None = Field(
        default=None,
        description="Written to resolved.yaml, not by users: the keys that restricted the search of"
        " `scheme: auto`.",
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        data = {"scheme": data} if isinstance(data, str) else data
        if isinstance(data, dict) and data.get("scheme") == _PAPERS_1F1B:
            data = {**data, "scheme": "1f1b"}  # as old run directories have it
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
        description="The node's daemons listen on this address, which the other nodes must reach.",
    )


class ClusterConfig(Section):
    """Nodes, workers, and how they talk."""

    workers: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Each node has so many workers (devices), one process each.",
    )
    device: Annotated[str, Accepts(DEVICE_CHOICES)] = Field(
        default="cpu",
        pattern=DEVICE_PATTERN,
        description="What workers compute on. More cuda workers than a node has GPUs share them."
        " Emulated devices only take the time of the GPU and model that are named, or that"
        " `penstock profile` measured.",
    )
    transport: Literal["auto", TransportName] = Field(
        default="auto",
        description="How tensors get from worker to worker: zmq, messages through host memory;"
        " gloo, through host memory, and nccl, from GPU to GPU, process groups of"
        " torch.distributed. With auto, nccl where each worker of a node has a GPU of its own, else"
        " zmq; nodes must be alike. Between two workers of a machine gloo takes 0.6 to 0.8 of zmq's"
        " time for transfers of up to 64 KiB, 1.5 to 1.9 of it from 1 MiB on.",
    )
    fetch: Literal["zmq", "nixl", "auto"] = Field(
        default="zmq",
        description="How a node gets the weights and gradients that another one holds: zmq, its"
        " memoryd sends them; nixl, they are read out of its memory without asking, by RDMA where"
        " there is a device for it, else over TCP or shared memory (`pip install penstock[rdma]`)."
        " With auto, nixl on nodes with such a device. Between nodes that do not both offer it"
        " everything goes by zmq (docs/NODES.md).",
    )
    nodes: Annotated[
        tuple[NodeConfig, ...],
        Accepts("a list of nodes such as [{name: a}, {name: b, host: 10.0.0.2}]"),
    ] = Field(
        default=(NodeConfig(name="a"),),
        description="The machines; the first prepares the run and hosts the scheduler. Unset, with"
        " `penstock node`: those that Slurm, a JobSet or torchrun started, as node-0, node-1 and so"
        " on.",
    )
    scheduler_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="The scheduler listens on this port of the first node; 0: on one that is free.",
    )
    security: SecurityName = Field(
        default="none",
        description="With none, addresses other than loopback are refused, and a token in the run"
        " directory keeps other users of the machine away. With insecure, any address is allowed,"
        " and everybody on the network may read and change the run. With tls, all traffic is"
        " encrypted, and callers without a key of the run are rejected (docs/SECURITY.md). With"
        " tls-trusted-fabric, RDMA and process groups of torch.distributed stay unencrypted, in a"
        " network that is private; tls refuses both.",
    )
    keys: Path | None = Field(
        default=None,
        description="With tls, the folder that `penstock keys make` made; a node needs"
        " its own part of it only, at this path (`penstock keys pack`).",
    )
    pin_memory: bool = Field(
        default=True,
        description="GPUs copy shared memory that the driver has pinned, during the computation."
        " Without, where a driver refuses that (WSL, some virtual GPUs): through the driver's own"
        " memory, more slowly, while the worker waits.",
    )
    threads_per_worker: Annotated[int, Unit("threads")] = Field(
        default=0,
        ge=0,
        description="Each worker computes with so many threads; 0: with its share of the cores.",
    )
    cpus_per_node: Annotated[int | None, Unit("CPUs")] = Field(
        default=None,
        ge=1,
        description="A node refuses to start where affinity, cpuset or CPU quota leave it fewer"
        " CPUs than this, though the machine has more; unset: one for each thread that is"
        " configured, each worker, and the optimizer.",
    )
    heartbeat_interval_s: Seconds = Field(
        default=0.5, gt=0.0, description="Each process gives a sign of life so often."
    )
    heartbeat_timeout_s: Seconds = Field(
        default=10.0,
        gt=0.0,
        description="A process that was silent for so long is killed and replaced; at least twice"
        " `heartbeat_interval_s`.",
    )
    attempt_timeout_s: Seconds = Field(
        default=600.0,
        gt=0.0,
        description="An attempt or evaluation without progress for this time is aborted, and"
        " the member that blocks it is killed and replaced. So is a process that has not joined the"
        " run at that age. Longer than any single instruction takes.",
    )
    start_timeout_s: Seconds = Field(
        default=1800.0,
        gt=0.0,
        description="Other nodes than the first wait so long until it has prepared the run and"
        " started the scheduler.",
    )
    max_restarts: int = Field(
        default=20,
        ge=0,
        description="A process that was replaced so many times within an hour in which no step was"
        " committed is not replaced again, and the run ends.",
    )
    preload: bool = Field(
        default=True,
        description="Each node keeps two processes that have imported what others need, and fork"
        " them: a process that is lost is back sooner. False: all are started from nothing.",
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
        """Returns what the devices can do."""
        return platform_of(self.device)

    @property
    def device_parameter(self) -> str | None:
        """Returns what ``device`` says behind the platform's name: where costs come from."""
        return parameter_of(self.device)


class MemoryConfig(Section):
    """Limits that plans are held against; unset means what the machine has."""

    host_limit: Size | None = Field(
        default=None, description="Penstock may use so much host memory of each node."
    )
    device_limit: Size | None = Field(
        default=None, description="A plan may use so much memory of each device."
    )
    mirror: Literal["none", "partner"] = Field(
        default="none",
        description="partner: each node's partner, the next one in `cluster.nodes`, keeps a replica"
        " of its optimizer state and steps it along, so that a node that is lost with its memory"
        " costs no step. It takes the memory of that state once more, and the gradients go over the"
        " network (docs/NODES.md).",
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
        description="One second of the emulated cluster takes so many seconds on the clock.",
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
        description="Each compute instruction takes so much longer than its costs say.",
    )
    compute_speed: float = Field(
        default=1.0,
        gt=0.0,
        le=1e12,
        description="Devices compute so many times as fast as their costs say.",
    )
    optimizer_bytes: Annotated[float | None, Unit("bytes per parameter")] = Field(
        default=None,
        gt=0.0,
        description="A step of the optimizer moves so much memory; unset, what its sweeps move.",
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
        description="Prometheus asks each node here for the metrics of all its processes; nodes on"
        " one machine have ports that follow each other. With 0 each takes a free one, which"
        " `penstock status` and `RUN_DIR/metrics/` show.",
    )
    metrics_host: Annotated[
        str, Accepts("an address of the machine, such as 127.0.0.1 or 0.0.0.0")
    ] = Field(
        default="127.0.0.1",
        description="Where metrics are served, on every node; 0.0.0.0 for a Prometheus on another"
        " machine: with `cluster.security: tls` they are served with TLS and a password.",
    )
    targets: Path | None = Field(
        default=None,
        description="A folder that Prometheus' file_sd watches: nodes write into it where they"
        " serve metrics, and remove that when they end. Runs may share it.",
    )
    trace: bool = Field(
        default=False, description="Records what every process does when, for `penstock trace`."
    )
    sample_every: int = Field(
        default=50,
        ge=0,
        description="Every so many attempts one is recorded and analysed, off the step's path:"
        " which resource it spent its time on, and what would be saved without; 0: none.",
    )

    @property
    def traced_every(self) -> int:
        """Of so many attempts one is recorded: 1 is all of them, and evaluations; 0 is none."""
        return 1 if self.trace else self.sample_every

    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = Field(
        default=(),
        description="Where lines of `metrics.jsonl` go as well, each by a process that no step"
        " waits for.",
    )
    tracker_project: Annotated[str | None, Old()] = Field(default=None, min_length=1)
    wandb_mode: Annotated[Literal["online", "offline"] | None, Old()] = None
    mlflow_uri: Annotated[str | None, Old()] = None
    opentelemetry: Annotated[str | None, Accepts("a URL such as http://127.0.0.1:4318")] = Field(
        default=None,
        pattern=r"^https?://.+",
        description="Collector that takes spans of attempts, evaluations and saves by OTLP over"
        " HTTP.",
    )
    memory: bool = Field(
        default=False,
        description="CPU workers count the bytes of live tensors, some 10 µs an operator; GPUs and"
        " emulated devices are always measured.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Messages below this level are not logged."
    )
