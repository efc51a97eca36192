"""Metrics of an optimizerd: sweeps, their memory traffic, its cores, and its waits."""

from __future__ import annotations

from penstock.protocol.metrics.registry import Metric, counter, gauge, info
from penstock.protocol.metrics.worker import DROPPED, FETCHES

PASSES = (
    "preview",
    "settle",
    "advance",
    "hold",
    "finish",
    "invert",
    "gradient_status",
    "cast",
)
WAIT_CAUSES = ("gradients", "fetches", "decision", "idle")
_PASS = {"pass": PASSES}

OPTIMIZER: tuple[Metric, ...] = (
    counter("penstock_sweep_seconds", "Duration of sweeps, each over one block.", _PASS),
    counter(
        "penstock_sweep_bytes",
        "Bytes of DRAM that sweeps read and wrote, by the layout of what they walk through.",
        _PASS,
    ),
    counter(
        "penstock_sweep_parameters", "Parameters that sweeps went through, with padding.", _PASS
    ),
    gauge(
        "penstock_memory_bandwidth_ceiling_bytes_per_second",
        "What these cores move in a sweep without arithmetic; of an emulated node, its bandwidth.",
        absent="until it is measured, which a node does once, before it takes part, if its state is"
        " larger than caches",
    ),
    gauge("penstock_optimizer_cores", "Threads that sweep."),
    counter("penstock_optimizer_busy_seconds", "Thread-seconds in sweeps."),
    counter(
        "penstock_optimizer_cpu_seconds",
        "CPU time that these threads got. Less than the busy seconds: their cores are taken away.",
        absent="on emulated nodes, where sweeps take time without work",
    ),
    gauge("penstock_optimizer_queue_length", "Blocks that wait for their sweep."),
    counter(
        "penstock_optimizer_wait_seconds",
        "Seconds without a sweep: until gradients of this node, or from others (fetches), are"
        " there; until the scheduler decides; idle between attempts.",
        {"cause": WAIT_CAUSES},
    ),
    *FETCHES,
    counter(
        "penstock_dropped_messages",
        "Messages on the local socket, or of peers, that were not used.",
        {"reason": DROPPED},
        sparse=True,
    ),
    info(
        "penstock_optimizer_placement",
        "Cores of the optimizer's threads, NUMA nodes of these, and the workers' cores.",
        {"optimizer": "cores", "numa_nodes": "of these", "workers": "cores"},
    ),
    gauge(
        "penstock_optimizer_threads",
        "Threads pinned to cores.",
        {"numa_node": "those of the machine"},
    ),
    gauge(
        "penstock_optimizer_local_state_ratio",
        "Share of the state's pages (a sample, at start) that lie on the NUMA node of the thread"
        " that works on them.",
        absent="where the kernel does not say",
    ),
    gauge(
        "penstock_optimizer_huge_page_bytes",
        "Mapped shared memory that lay in huge pages at start.",
    ),
)
"""All of optimizerd's."""
