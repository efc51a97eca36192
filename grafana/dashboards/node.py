"""Node: processors, disks, networks, clocks and processes of each machine."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from penstock.grafana.dashboards.frame import Panels, Section, dashboard
from penstock.grafana.dashboards.panels import Steps, dial, grid, lines, stacked, states, words
from penstock.grafana.dashboards.queries import NODES, each, highest, last, rate, total

FULL: Steps = ((None, "green"), (0.85, "orange"), (0.95, "red"))
PROCESS = "{{node}} {{process}}"


def make() -> Dashboard:
    """Returns the dashboard."""
    return dashboard(
        "node",
        "Node",
        "The machines as this run sees them: processors, disks, networks, clocks, and the processes"
        " of the run on each. Fans, temperatures and other programs are node exporter's and DCGM's;"
        " links to their dashboards are at the top.",
        [
            Section(title="How full?", panels=_full()),
            Section(title="Processors", panels=_processors()),
            Section(title="Network", panels=_network()),
            Section(title="Disks and clocks", panels=_disks()),
            Section(title="Processes and versions", panels=_processes()),
        ],
        published=True,
    )


def _full() -> Panels:
    shared = "penstock_node_shm_used_bytes", "penstock_node_shm_limit_bytes"
    memory = "penstock_node_memory_available_bytes", "penstock_node_memory_limit_bytes"
    used, limit = (highest(metric, NODES, "node") for metric in shared)
    left, allowed = (highest(metric, NODES, "node") for metric in memory)
    free = highest("penstock_node_disk_free_bytes", NODES, "node, what")
    size = highest("penstock_node_disk_size_bytes", NODES, "node, what")
    return [
        dial(
            "Disk",
            "Share of the file systems that is taken: of the run directory, and of saved states.",
            last(f"1 - {free} / {size}", "{{node}} {{what}}"),
            size=(8, 6),
            steps=FULL,
        ),
        dial(
            "Shared memory",
            "Share of /dev/shm that is used.",
            last(f"{used} / {limit}", "{{node}}"),
            size=(8, 6),
            steps=FULL,
        ),
        dial(
            "Host memory",
            "Share of the memory that the run may use that is taken.",
            last(f"1 - {left} / {allowed}", "{{node}}"),
            size=(8, 6),
            steps=FULL,
        ),
    ]


def _processors() -> Panels:
    return [
        stacked(
            "Processors by process",
            "CPU seconds per second of each process of the run: 1 is one core.",
            each(rate("penstock_process_cpu_seconds_total", NODES, "node, process"), PROCESS),
            unit="none",
            size=(12, 8),
        ),
        lines(
            "Processors taken away",
            "CPU seconds per second that the run wanted and did not get: throttled by the limit of"
            " its control group, or stolen by other guests of a virtual machine.",
            each(
                rate("penstock_node_cpu_throttled_seconds_total", NODES, "node"),
                "{{node}} throttled",
            ),
            each(rate("penstock_node_cpu_stolen_seconds_total", NODES, "node"), "{{node}} stolen"),
            unit="none",
            limits=(0, None),
            size=(12, 8),
            empty="this machine does not say",
        ),
    ]


def _network() -> Panels:
    by = "node, interface"
    received = rate("penstock_node_network_receive_bytes_total", NODES, by)
    sent = rate("penstock_node_network_transmit_bytes_total", NODES, by)
    speed = highest("penstock_node_network_speed_bytes_per_second", NODES, by)
    planned = highest("penstock_node_planned_network_bytes_per_second", NODES, "node")
    return [
        lines(
            "Traffic",
            "Bytes a second on the interfaces that the run uses, of all programs on the machine.",
            each(received, "{{node}} {{interface}} in"),
            each(sent, "{{node}} {{interface}} out"),
            unit="Bps",
            limits=(0, None),
        ),
        lines(
            "Share of the interface's speed",
            "Traffic over what the interface says that it can do. Empty where it does not say, as"
            " loopback and many virtual ones.",
            each(f"{received} / on (node, interface) {speed}", "{{node}} {{interface}} in"),
            each(f"{sent} / on (node, interface) {speed}", "{{node}} {{interface}} out"),
            unit="percentunit",
            limits=(0, 1),
            steps=((None, "green"), (0.9, "orange")),
            empty="speed unknown",
        ),
        lines(
            "Speed of fetches, and the plan's",
            "Bytes a second while state is fetched from other nodes, and what the plan assumed."
            " Below it by far, the network holds the run back.",
            each(
                f"{rate('penstock_fetch_bytes_total', NODES, 'node')} /"
                f" ({rate('penstock_fetch_seconds_total', NODES, 'node')} > 0)",
                "{{node}} fetched",
            ),
            each(planned, "{{node}} planned"),
            unit="Bps",
            limits=(0, None),
            empty="nothing is fetched from other nodes",
        ),
    ]


def _disks() -> Panels:
    return [
        lines(
            "Free on disk",
            "Bytes left where the run directory and its saved states lie. A save needs as much as"
            " the state is large.",
            each(
                highest("penstock_node_disk_free_bytes", NODES, "node, what"), "{{node}} {{what}}"
            ),
            unit="bytes",
            limits=(0, None),
            size=(12, 8),
        ),
        lines(
            "Clock against other nodes",
            "How far this node's clock is ahead of another's, and the error of that estimate."
            " Traces of several nodes are no better than this. A single node has"
            " no value.",
            each(
                highest("penstock_clock_offset_seconds", NODES, "node, peer"),
                "{{node}} before {{peer}}",
            ),
            each(
                highest("penstock_clock_offset_error_seconds", NODES, "node, peer"),
                "{{node}} before {{peer}}: error",
            ),
            unit="s",
            size=(12, 8),
            empty="one node only",
        ),
    ]


def _processes() -> Panels:
    started = highest("penstock_process_start_time_seconds", NODES, "node, process")
    return [
        lines(
            "Age of processes",
            "Time since each process started; a restart begins at nothing.",
            each(f"time() - {started}", PROCESS),
            unit="s",
            limits=(0, None),
            size=(8, 8),
        ),
        lines(
            "Time to collect metrics",
            "Seconds that each process took to answer with its metrics. One that does not answer in"
            " time is left out, and counts as silent.",
            each(total("penstock_collect_seconds", NODES, "node, process"), PROCESS),
            unit="s",
            limits=(0, None),
            size=(8, 8),
        ),
        states(
            "Processes that answer",
            "Whether each process of the run answers when it is asked for its metrics.",
            each(highest("penstock_process_up", NODES, "node, process"), PROCESS),
            names={1: ("answers", "green"), 0: ("silent", "red")},
            size=(8, 8),
        ),
        grid(
            "Versions",
            "What runs on each node. They should be the same everywhere.",
            last(highest("penstock_build_info", NODES, "node, version, python, torch, native")),
            columns={
                "node": "Node",
                "version": "Penstock",
                "python": "Python",
                "torch": "PyTorch",
                "native": "Vector path",
            },
            size=(12, 6),
        ),
        words(
            "What others measure",
            "GPUs' clocks, temperatures and power: [NVIDIA DCGM exporter](https://github.com/NVIDIA/"
            "dcgm-exporter) and its dashboard **12239**. The whole machine: [node exporter]"
            "(https://github.com/prometheus/node_exporter) and **1860**. Grafana: Dashboards, New,"
            " Import, the number.",
            size=(12, 6),
        ),
    ]
