"""Counters of a node's supervisor, and its metricsd's measurements of the node and its
processes.
"""

from __future__ import annotations

from enum import StrEnum

from penstock.protocol.metrics.registry import Metric, counter, gauge, info

_MEMBERS = "the node's processes"
_INTERFACES = "network interfaces that the addresses of the cluster's nodes lead over"
_FIRST = "the first node"


class RestartCause(StrEnum):
    """Why a process had to be started again."""

    EXITED = "exited"
    KILLED = "killed"
    FENCED = "fenced"
    """Killed by order of the scheduler."""
    HUNG = "hung"
    """It stood still, or said nothing: the node killed it."""


NODE: tuple[Metric, ...] = (
    counter(
        "penstock_restarts",
        "Times a process was started again, by why it had ended.",
        {"member": _MEMBERS, "cause": tuple(RestartCause)},
    ),
    counter(
        "penstock_fences",
        "Processes killed and reaped by order of the scheduler.",
        {"member": _MEMBERS},
    ),
)
"""All of a node's supervisor's."""

PROCESS_UP = gauge(
    "penstock_process_up", "1 if the process handed out its metrics in time, else 0."
)
COLLECT_SECONDS = gauge(
    "penstock_collect_seconds",
    "How long the process took to hand out its metrics, or was waited for.",
)
PROCESS_CPU = counter("penstock_process_cpu_seconds", "CPU time of all threads of the process.")
PROCESS_MEMORY = gauge(
    "penstock_process_resident_bytes",
    "Memory of the process's own: what it maps of /dev/shm is left out.",
    absent="while no process runs",
)
PROCESS_START = gauge(
    "penstock_process_start_time_seconds",
    "When the process was started, in seconds since 1970.",
    absent="while no process runs",
)
PROCESS: tuple[Metric, ...] = (
    PROCESS_UP,
    COLLECT_SECONDS,
    PROCESS_CPU,
    PROCESS_MEMORY,
    PROCESS_START,
)
"""Metrics that metricsd reports for each process of its node, under that process's labels."""

RESOURCES: tuple[Metric, ...] = (
    gauge("penstock_node_shm_used_bytes", "Bytes used in /dev/shm by all processes."),
    gauge("penstock_node_shm_limit_bytes", "Size of /dev/shm."),
    gauge("penstock_node_shm_run_bytes", "Size of this run's segments on this node."),
    gauge(
        "penstock_node_memory_available_bytes",
        "Memory that processes of this node can still take: of the machine, or of the control group"
        " that leaves least.",
        absent="where the kernel does not say it",
    ),
    gauge(
        "penstock_node_memory_limit_bytes",
        "Memory of the machine, or limit of that control group.",
        absent="where the kernel does not say it",
    ),
    gauge(
        "penstock_node_disk_free_bytes",
        "Free for this user on the file system of the run directory, and of its saved states.",
        {"what": ("run", "state")},
        absent="while the file system does not answer",
    ),
    gauge(
        "penstock_node_disk_size_bytes",
        "Size of that file system.",
        {"what": ("run", "state")},
        absent="while the file system does not answer",
    ),
    counter(
        "penstock_node_network_receive_bytes",
        "Received over an interface by all processes.",
        {"interface": _INTERFACES},
    ),
    counter(
        "penstock_node_network_transmit_bytes",
        "Sent over an interface by all processes.",
        {"interface": _INTERFACES},
    ),
    gauge(
        "penstock_node_network_speed_bytes_per_second",
        "What the interface's device can do each way.",
        {"interface": _INTERFACES},
        absent="where the device does not say it, as virtual ones do not",
    ),
    gauge(
        "penstock_node_planned_network_bytes_per_second",
        "Bandwidth between nodes that planning counted on, from a profile or an emulated cluster.",
        absent="where planning guessed it, and on a single node",
    ),
    counter(
        "penstock_node_cpu_used_seconds",
        "CPU time of everything on the machine; less the node's processes: others.",
    ),
    counter(
        "penstock_node_cpu_stolen_seconds",
        "CPU time that a hypervisor gave to others, of all CPUs of the machine.",
    ),
    counter(
        "penstock_node_cpu_throttled_seconds",
        "Time in which the control groups' CPU quota was used up.",
    ),
    gauge(
        "penstock_clock_offset_seconds",
        "This node's clock is so far ahead of the first node's.",
        {"peer": _FIRST},
        absent="on the first node, and while that does not answer",
    ),
    gauge(
        "penstock_clock_offset_error_seconds",
        "The offset is wrong by this at most.",
        {"peer": _FIRST},
        absent="on the first node, and while that does not answer",
    ),
)
"""Metrics that metricsd measures for its node."""

KEYS_EXPIRE = gauge(
    "penstock_keys_expire_timestamp_seconds",
    "When the certificate of this node expires, in seconds since 1970; 0: it cannot be read.",
    absent="without cluster.security: tls",
)
BUILD = info(
    "penstock_build",
    "What the node's processes are made of.",
    {
        "version": "Penstock's",
        "python": "its version",
        "torch": "its version",
        "native": "vector instructions of the optimizer's kernels",
    },
)
RUN = info(
    "penstock_run",
    "What the run is.",
    {
        "run_id": "12 hexadecimal digits",
        "scheme": "of the plan",
        "model": "its folder's name, or type",
        "devices": "how many, on all nodes",
        "nodes": "how many",
        "micro_batches": "per step",
        "optimizer": "its name",
        "platform": "of the devices",
    },
)
OWN: tuple[Metric, ...] = (BUILD, RUN, KEYS_EXPIRE, *RESOURCES)
"""Metrics under metricsd's own labels."""

METRICSD: tuple[Metric, ...] = (*PROCESS, *OWN)
"""All of metricsd's."""


LOG_DROPPED = counter(
    "penstock_log_dropped", "Log lines that could not be written, mostly for a full disk."
)
METRICS_CPU = counter(
    "penstock_metrics_cpu_seconds",
    "CPU time of the thread that hands out this process's metrics: what being watched costs it. Of"
    " metricsd, which does nothing else, see penstock_process_cpu_seconds_total.",
)
EVERY: tuple[Metric, ...] = (LOG_DROPPED, METRICS_CPU)
"""Metrics in the registries of all processes."""
