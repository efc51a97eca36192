"""Memory: shared memory, the host's, the devices', and the daemon that serves it."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from penstock.grafana.dashboards.frame import Panels, Section, dashboard
from penstock.grafana.dashboards.panels import Steps, bars, dial, lines, stacked
from penstock.grafana.dashboards.queries import (
    NODES,
    each,
    highest,
    last,
    rate,
    total,
)

FULL: Steps = ((None, "green"), (0.85, "orange"), (0.95, "red"))
SHARED_USED = "penstock_node_shm_used_bytes"
SHARED_LIMIT = "penstock_node_shm_limit_bytes"
DEVICE = "{{node}}, device {{device}}"


def make() -> Dashboard:
    """Returns the dashboard."""
    return dashboard(
        "memory",
        "Memory",
        "What is full, and of what: shared memory that holds the model's state, the host's memory,"
        " the devices' memory, and the daemon that serves state to other nodes.",
        [
            Section(title="How full?", panels=_full()),
            Section(title="Shared memory", panels=_shared()),
            Section(title="Devices", panels=_devices()),
            Section(title="Host", panels=_host()),
            Section(title="Memory daemon", panels=_daemon()),
        ],
    )


def _device_share() -> str:
    peak = highest("penstock_device_memory_peak_bytes", NODES, "node, device")
    limit = highest("penstock_device_memory_limit_bytes", NODES, "node, device")
    return f"{peak} / on (node, device) {limit}"


def _full() -> Panels:
    used = highest(SHARED_USED, NODES, "node")
    limit = highest(SHARED_LIMIT, NODES, "node")
    left = highest("penstock_node_memory_available_bytes", NODES, "node")
    allowed = highest("penstock_node_memory_limit_bytes", NODES, "node")
    return [
        dial(
            "Shared memory",
            "Share of /dev/shm that is used, by node. The model's weights, gradients and optimizer"
            " state live there. Full means that the next save or start fails.",
            last(f"{used} / {limit}", "{{node}}"),
            size=(8, 6),
            steps=FULL,
        ),
        dial(
            "Host memory",
            "Share of the memory that this run may use (its control group's limit, or the"
            " machine's) that is taken, by node. Shared memory counts in it. At 100 % the kernel"
            " kills processes.",
            last(f"1 - {left} / {allowed}", "{{node}}"),
            size=(8, 6),
            steps=FULL,
        ),
        bars(
            "Device memory at its peak",
            "The most that each device held in the newest attempt, of what it may. At 100 % the"
            " next longer micro-batch fails; far below, the plan could keep more activations.",
            last(_device_share(), DEVICE),
            unit="percentunit",
            limits=(0, 1),
            steps=FULL,
            size=(8, 6),
            empty="limit unknown",
        ),
    ]


def _shared() -> Panels:
    huge = total("penstock_shm_huge_page_bytes", NODES, "node")
    segments = total("penstock_shm_segment_bytes", NODES, "node")
    return [
        lines(
            "Used, and the limit",
            "Bytes in /dev/shm by node, of all and of this run. The run's are constant while it"
            " trains; other growth comes from another run, or from other files in /dev/shm.",
            each(highest(SHARED_USED, NODES, "node"), "{{node}} used"),
            each(highest("penstock_node_shm_run_bytes", NODES, "node"), "{{node}} by this run"),
            each(highest(SHARED_LIMIT, NODES, "node"), "{{node}} limit"),
            unit="bytes",
            limits=(0, None),
        ),
        stacked(
            "By segment",
            "What the run's shared memory holds: weights and gradients twice each (versions take"
            " turns), optimizer state once, control words.",
            each(total("penstock_shm_segment_bytes", NODES, "segment"), "{{segment}}"),
            unit="bytes",
        ),
        lines(
            "In huge pages",
            "Share of the segments in huge pages. They make sweeps of the optimizer faster;"
            " `penstock doctor` says how to get them.",
            each(f"{huge} / {segments}", "{{node}}"),
            unit="percentunit",
            limits=(0, 1),
        ),
    ]


def _devices() -> Panels:
    names = {"": "now", "_peak": "peak of an attempt", "_limit": "limit"}
    return [
        lines(
            "Device memory",
            "Bytes on each device now, at the peak of the newest attempt, and what it may have.",
            *(
                each(
                    highest(f"penstock_device_memory{kind}_bytes", NODES, "node, device"),
                    f"{DEVICE}: {name}",
                )
                for kind, name in names.items()
            ),
            unit="bytes",
            limits=(0, None),
            size=(16, 8),
        ),
        bars(
            "Peak by device",
            "The most that each device held in the newest attempt. Uneven peaks mean that stages"
            " are uneven; the first stages of 1F1B keep more activations than the last.",
            last(highest("penstock_device_memory_peak_bytes", NODES, "node, device"), DEVICE),
            unit="bytes",
            size=(8, 8),
        ),
    ]


def _host() -> Panels:
    return [
        lines(
            "Available, and the limit",
            "Memory that is still free for this run, by node, and how much it may have in all. File"
            " cache counts as free.",
            each(highest("penstock_node_memory_available_bytes", NODES, "node"), "{{node}} left"),
            each(highest("penstock_node_memory_limit_bytes", NODES, "node"), "{{node}} limit"),
            unit="bytes",
            limits=(0, None),
            size=(12, 8),
        ),
        stacked(
            "By process",
            "Resident memory of each process. Pages of shared memory count in every process that"
            " has touched them, so the sum is more than the machine's.",
            each(
                total("penstock_process_resident_bytes", NODES, "node, process"),
                "{{node}} {{process}}",
            ),
            unit="bytes",
            size=(12, 8),
        ),
    ]


def _daemon() -> Panels:
    return [
        stacked(
            "Requests",
            "What others ask of memoryd, by kind. Reads are other nodes' weights and gradients.",
            each(rate("penstock_memoryd_requests_total", NODES, "kind"), "{{kind}}"),
            unit="reqps",
        ),
        lines(
            "Served to other nodes",
            "Bytes of state that memoryd sends to other nodes. One node serves nothing.",
            each(rate("penstock_memoryd_served_bytes_total", NODES, "node"), "{{node}}"),
            unit="Bps",
            limits=(0, None),
        ),
        stacked(
            "Work of its own",
            "Share of time in which memoryd loads, saves or checks blocks.",
            each(rate("penstock_memoryd_job_seconds_total", NODES, "job"), "{{job}}"),
            unit="percentunit",
        ),
        lines(
            "Requests that wait",
            "Requests for a version of a block that is not there yet. Some are normal within a"
            " step; the same number for minutes is a stuck run.",
            each(total("penstock_memoryd_waiting_requests", NODES, "node"), "{{node}}"),
            unit="none",
            limits=(0, None),
            size=(12, 7),
        ),
        lines(
            "Leases",
            "Versions of blocks that a reader or a save protects from being overwritten.",
            each(total("penstock_memoryd_leases", NODES, "node"), "{{node}}"),
            unit="none",
            limits=(0, None),
            size=(12, 7),
        ),
    ]
