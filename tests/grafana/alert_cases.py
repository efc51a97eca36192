"""What Prometheus sees of a healthy run, and of runs with faults, as promtool's series.

A sample every 15 s from time 0 on, for ten minutes; promtool's notation is ``begin+stepxcount``,
and ``_`` is a scrape without the series. The healthy run takes steps of a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

COMMITTED = 'penstock_last_commit_timestamp_seconds{process="schedulerd"}'
SAVED = 'penstock_last_snapshot_timestamp_seconds{process="schedulerd"}'

HEALTHY: dict[str, str] = {
    'up{job="penstock"}': "1x40",
    'penstock_process_up{process="observerd"}': "1x40",
    'penstock_process_start_time_seconds{process="schedulerd"}': "1x40",
    'penstock_process_start_time_seconds{process="node.a"}': "1x40",
    'penstock_phase{phase="running"}': "1x40",
    'penstock_phase{phase="paused"}': "0x40",
    'penstock_phase{phase="saving"}': "0x40",
    'penstock_phase{phase="evaluating"}': "0x40",
    COMMITTED: "0+15x40",
    SAVED: "0+15x40",
    "penstock_save_interval_seconds": "60x40",
    "penstock_standstill_seconds": "0.2x40",
    "penstock_attempt_seconds_sum": "0+15x40",
    "penstock_attempt_seconds_count": "0+15x40",
    "penstock_simulated_step_seconds": "0.95x40",
    'penstock_attempts_total{decision="commit"}': "0+13x40",
    'penstock_attempts_total{decision="amend"}': "0+2x40",
    'penstock_attempts_total{decision="skip"}': "0x40",
    "penstock_optimizer_tail_seconds_total": "0+1x40",
    'penstock_device_busy_seconds_total{process="worker.0", device="0"}': "0+9x40",
    'penstock_device_busy_seconds_total{process="worker.1", device="1"}': "0+6x40",
    'penstock_device_idle_seconds_total{device="0", cause="data"}': "0+0.1x40",
    'penstock_expected_busy_seconds{device="0"}': "0.55x40",
    'penstock_expected_busy_seconds{device="1"}': "0.4x40",
    "penstock_optimizer_busy_seconds_total": "0+6x40",
    "penstock_optimizer_cpu_seconds_total": "0+5.7x40",
    "penstock_node_cpu_used_seconds_total": "0+18x40",
    'penstock_process_cpu_seconds_total{process="worker.0"}': "0+15x40",
    "penstock_sweep_seconds_total": "0+3x40",
    "penstock_sweep_bytes_total": "0+6e10x40",
    "penstock_memory_bandwidth_ceiling_bytes_per_second": "3e10x40",
    'penstock_fetch_seconds_total{way="zmq"}': "0+0.6x40",
    'penstock_fetch_bytes_total{way="zmq"}': "0+3e8x40",
    'penstock_fetches_total{way="zmq"}': "0+30x40",
    "penstock_node_planned_network_bytes_per_second": "1e9x40",
    'penstock_critical_seconds_total{resource="network"}': "0+0.05x40",
    "penstock_analysed_step_seconds_total": "0+0.3x40",
    "penstock_node_shm_used_bytes": "6e9x40",
    "penstock_node_shm_limit_bytes": "1e10x40",
    'penstock_node_disk_free_bytes{what="state"}': "5e10x40",
    'penstock_node_disk_size_bytes{what="state"}': "1e11x40",
    "penstock_node_memory_available_bytes": "3e10x40",
    "penstock_node_memory_limit_bytes": "6e10x40",
    "penstock_loss_scale": "1024x40",
    "penstock_loss_scale_floor": "1x40",
    'penstock_restarts_total{member="worker.0", cause="killed"}': "0x40",
    'penstock_restarts_total{member="observerd", cause="killed"}': "0x40",
    'penstock_members{state="missing"}': "0x40",
    'penstock_members{state="fencing"}': "0x40",
    "penstock_epochs_total": "1x40",
    'penstock_saves_total{outcome="failed"}': "0x40",
    "penstock_data_position_samples": "0+120x40",
    "penstock_data_samples": "100000x40",
    "penstock_data_passes": "1x40",
    "penstock_keys_expire_timestamp_seconds": "1e9x40",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """``changed``: series whose values differ from the healthy run's; an empty text leaves one out.
    ``fires``: seconds -> alerts that fire then, of this run; at all times of the table that are not
    named nothing is asked.
    """

    name: str
    changed: Mapping[str, str] = field(default_factory=dict)
    fires: Mapping[int, frozenset[str]]


NOTHING: frozenset[str] = frozenset()
DEVICES = {
    'penstock_device_busy_seconds_total{process="worker.0", device="0"}': 9.0,
    'penstock_device_busy_seconds_total{process="worker.1", device="1"}': 6.0,
}
"""Busy seconds of the healthy run in 15 s."""
STOPS = {
    **{name: f"0+{step:g}x16 {16 * step:g}x24" for name, step in DEVICES.items()},
    "penstock_optimizer_busy_seconds_total": "0+6x16 96x24",
    "penstock_optimizer_cpu_seconds_total": "0+5.7x16 91.2x24",
    "penstock_attempt_seconds_sum": "0+15x16 240x24",
    "penstock_attempt_seconds_count": "0+15x16 240x24",
    'penstock_attempts_total{decision="commit"}': "0+13x16 208x24",
    'penstock_attempts_total{decision="amend"}': "0+2x16 32x24",
    COMMITTED: "0+15x16 240x24",
    "penstock_sweep_seconds_total": "0+3x16 48x24",
    "penstock_sweep_bytes_total": "0+6e10x16 96e10x24",
}
STUCK = {**STOPS, "penstock_standstill_seconds": "0.2x16 0+15x23"}
"""Nothing moves any more from 240 s on; with ``STUCK`` though something should."""


def alerts(*names: str) -> frozenset[str]:
    """Alerts by what follows ``Penstock`` in their names."""
    return frozenset(f"Penstock{name}" for name in names)


def gone(at: int) -> dict[str, str]:
    """Every series ends after so many samples, as when the run's processes end."""
    return {
        name: f"{values.removesuffix('x40')}x{at} _x{40 - at}" for name, values in HEALTHY.items()
    }


def _steady(name: str, series: str, values: str, alert: str, at: int, **others: str) -> Case:
    """A case in which one series differs all the time."""
    return Case(name=name, changed={series: values, **others}, fires={at: alerts(alert)})


CASES = (
    Case(name="healthy", fires={t: NOTHING for t in (0, 15, 30, 60, 90, 120, 300, 600)}),
    Case(name="nothing measured yet", changed=dict.fromkeys(HEALTHY, ""), fires={120: NOTHING}),
    Case(
        name="ended, and its processes are gone",
        changed=gone(8),
        fires={120: NOTHING, 600: NOTHING},
    ),
    Case(
        name="ended, and its processes linger",
        changed={
            **STOPS,
            'penstock_phase{phase="running"}': "1x16 0x23",
            'penstock_phase{phase="done"}': "0x16 1x23",
            "penstock_run_ended": "_x17 0x22",
            SAVED: "0+15x16 240x23",
        },
        fires={240: NOTHING, 360: NOTHING, 600: NOTHING},
    ),
    Case(
        name="paused and resumed",
        changed={
            **{name: f"0+{s:g}x10 {10 * s:g}x19 {10 * s:g}+{s:g}x9" for name, s in DEVICES.items()},
            'penstock_phase{phase="running"}': "1x10 0x19 1x9",
            'penstock_phase{phase="paused"}': "0x10 1x19 0x9",
            COMMITTED: "0+15x10 150x19 465+15x9",
            SAVED: "0+15x10 150x29",
            "penstock_optimizer_busy_seconds_total": "0+6x10 60x19 60+6x9",
            "penstock_attempt_seconds_sum": "0+15x10 150x19 150+15x9",
            "penstock_attempt_seconds_count": "0+15x10 150x19 150+15x9",
        },
        fires={t: NOTHING for t in (240, 300, 420, 450, 480, 540, 600)},
    ),
    Case(
        name="every process was started again: counters begin at 0",
        changed={
            name: f"{values.removesuffix('x40')}x20 {values.removesuffix('x40')}x19"
            for name, values in HEALTHY.items()
            if values.startswith("0+") and "timestamp" not in name
        },
        fires={t: NOTHING for t in (300, 315, 330, 375, 600)},
    ),
    Case(
        name="a long evaluation that gets on",
        changed={
            COMMITTED: "0+15x16 240x24",
            'penstock_phase{phase="running"}': "1x16 0x24",
            'penstock_phase{phase="evaluating"}': "0x16 1x24",
            "penstock_attempt_seconds_sum": "0+15x16 240x24",
            "penstock_attempt_seconds_count": "0+15x16 240x24",
        },
        fires={360: NOTHING, 600: NOTHING},
    ),
    Case(
        name="a long save",
        changed={
            **STOPS,
            'penstock_phase{phase="running"}': "1x16 0x12 1x12",
            'penstock_phase{phase="saving"}': "0x16 1x12 0x12",
            "penstock_standstill_seconds": "0.2x16 0+15x12 0x12",
        },
        fires={300: NOTHING, 420: NOTHING},
    ),
    Case(
        name="steps of five minutes",
        changed={
            "penstock_standstill_seconds": "0+15x6 0x19 0+15x8 0x4",
            "penstock_attempt_seconds_sum": "0x19 300x19 600x2",
            "penstock_attempt_seconds_count": "0x19 1x19 2x2",
            "penstock_simulated_step_seconds": "290x40",
            COMMITTED: "_x20 300x19 600x1",
            'penstock_expected_busy_seconds{device="0"}': "165x40",
            'penstock_expected_busy_seconds{device="1"}': "120x40",
            "penstock_save_interval_seconds": "3000x40",
        },
        fires={t: NOTHING for t in (120, 280, 330, 450, 600)},
    ),
    Case(
        name="stuck",
        changed=STUCK,
        fires={240: NOTHING, 345: alerts("Stuck"), 600: alerts("Stuck")},
    ),
    Case(
        name="stuck in its first step",
        changed={
            **dict.fromkeys(STOPS, "0x40"),
            "penstock_standstill_seconds": "0+15x40",
            COMMITTED: "",
            SAVED: "",
            "penstock_save_interval_seconds": "",
        },
        fires={45: NOTHING, 120: alerts("Stuck")},
    ),
    Case(
        name="data stuck",
        changed={
            **STUCK,
            'penstock_device_idle_seconds_total{device="0", cause="data"}': "0x16 0+15x23",
        },
        fires={240: NOTHING, 300: alerts("DataStuck"), 420: alerts("DataStuck", "Stuck")},
    ),
    _steady(
        "data exhausted",
        "penstock_data_position_samples",
        "99000+120x40",
        "DataExhausted",
        300,
    ),
    Case(
        name="two passes over the data, as it was meant",
        changed={"penstock_data_position_samples": "150000x40", "penstock_data_passes": "2x40"},
        fires={300: NOTHING},
    ),
    Case(
        name="slower than simulated",
        changed={"penstock_attempt_seconds_count": "0+15x16 240+7x23"},
        fires={240: NOTHING, 330: alerts("StepSlow")},
    ),
    Case(
        name="a slow device",
        changed={
            'penstock_device_busy_seconds_total{process="worker.1", device="1"}': "0+6x16 96+12x23"
        },
        fires={240: NOTHING, 345: alerts("SlowWorker"), 600: alerts("SlowWorker")},
    ),
    Case(
        name="cores taken away",
        changed={"penstock_optimizer_cpu_seconds_total": "0+5.7x16 91.2+3x23"},
        fires={240: NOTHING, 330: alerts("OptimizerStarved")},
    ),
    Case(
        name="workers on the optimizer's cores",
        changed={
            "penstock_optimizer_cpu_seconds_total": "0+3x40",
            'penstock_run_info{platform="cpu"}': "1x40",
        },
        fires={330: NOTHING},
    ),
    Case(
        name="others on the cores that workers and optimizer share",
        changed={
            "penstock_optimizer_cpu_seconds_total": "0+3x40",
            'penstock_run_info{platform="cpu"}': "1x40",
            "penstock_node_cpu_used_seconds_total": "0+30x40",
        },
        fires={330: alerts("OptimizerStarved")},
    ),
    Case(
        name="memory channels full",
        changed={
            "penstock_sweep_bytes_total": "0+8.5e10x40",
            "penstock_optimizer_tail_seconds_total": "0+11x40",
        },
        fires={120: alerts("MemoryBandwidthSaturated")},
    ),
    Case(
        name="memory channels full as planned, for less than most of the step",
        changed={
            "penstock_sweep_bytes_total": "0+8.5e10x40",
            "penstock_optimizer_tail_seconds_total": "0+7x40",
        },
        fires={300: NOTHING},
    ),
    Case(
        name="memory channels full behind the backward",
        changed={"penstock_sweep_bytes_total": "0+8.5e10x40"},
        fires={300: NOTHING},
    ),
    _steady(
        "fetches take long",
        'penstock_fetch_seconds_total{way="zmq"}',
        "0+9x40",
        "NetworkSlow",
        120,
    ),
    Case(
        name="transfers take long",
        changed={
            "penstock_attempt_seconds_count": "0+15x16 240+7x23",
            'penstock_critical_seconds_total{resource="network"}': "0+0.05x16 0.8+0.2x23",
        },
        fires={240: NOTHING, 420: alerts("NetworkSlow", "StepSlow")},
    ),
    _steady("shm", "penstock_node_shm_used_bytes", "95e8x40", "ShmNearlyFull", 30),
    _steady("disk", 'penstock_node_disk_free_bytes{what="state"}', "1e9x40", "DiskNearlyFull", 30),
    _steady("memory", "penstock_node_memory_available_bytes", "1e9x40", "MemoryNearlyFull", 30),
    Case(
        name="everything is clipped",
        changed={
            'penstock_attempts_total{decision="commit"}': "0+13x16 208x24",
            'penstock_attempts_total{decision="amend"}': "0+2x16 32+15x23",
        },
        fires={240: NOTHING, 345: alerts("RollbackStorm")},
    ),
    Case(
        name="overflows",
        changed={
            'penstock_attempts_total{decision="commit"}': "0+13x16 208+7x23",
            'penstock_attempts_total{decision="skip"}': "0x16 0+7x23",
        },
        fires={240: NOTHING, 330: alerts("OverflowStorm")},
    ),
    Case(
        name="a few overflows while the loss scale finds its place",
        changed={
            'penstock_attempts_total{decision="commit"}': "0x4 0+1x36",
            'penstock_attempts_total{decision="skip"}': "0+2x3 6x37",
            "penstock_attempt_seconds_count": "0+2x3 6+1x36",
            "penstock_attempt_seconds_sum": "0+2x3 6+1x36",
        },
        fires={t: NOTHING for t in (30, 60, 90, 120, 300)},
    ),
    _steady("loss scale", "penstock_loss_scale", "1x40", "LossScaleAtFloor", 60),
    Case(
        name="a worker was killed",
        changed={'penstock_restarts_total{member="worker.0", cause="killed"}': "0x16 1x23"},
        fires={240: NOTHING, 270: alerts("MemberLost"), 330: NOTHING},
    ),
    Case(
        name="a node was killed and started again",
        changed={'penstock_process_start_time_seconds{process="node.a"}': "1x16 _x2 270x21"},
        fires={255: NOTHING, 285: alerts("MemberLost"), 375: NOTHING},
    ),
    Case(
        name="stopped, and resumed at once",
        changed={
            'penstock_process_start_time_seconds{process="node.a"}': "1x16 _x2 270x21",
            'penstock_phase{phase="running"}': "1x15 0x1 _x2 1x21",
            'penstock_phase{phase="stopping"}': "0x15 1x1 _x2 0x21",
        },
        fires={t: NOTHING for t in (255, 270, 285, 300, 315, 375)},
    ),
    Case(
        name="a helper was killed",
        changed={'penstock_restarts_total{member="observerd", cause="killed"}': "0x16 1x23"},
        fires={255: NOTHING, 270: NOTHING},
    ),
    Case(
        name="a worker is killed again and again",
        changed={'penstock_restarts_total{member="worker.0", cause="killed"}': "0x16 0+1x3 3x20"},
        fires={240: NOTHING, 315: alerts("RestartsInARow", "MemberLost")},
    ),
    _steady(
        "a member does not come back",
        'penstock_members{state="missing"}',
        "0x16 1x23",
        "MemberLost",
        300,
    ),
    Case(
        name="other nodes have yet to come",
        changed={'penstock_members{state="missing"}': "1x40", "penstock_epochs_total": "0x40"},
        fires={300: NOTHING},
    ),
    Case(
        name="metricsd is dead",
        changed={**gone(16), 'up{job="penstock"}': "1x16 0x23"},
        fires={240: NOTHING, 300: alerts("MetricsMissing"), 600: alerts("MetricsMissing")},
    ),
    _steady(
        "a helper hangs",
        'penstock_process_up{process="observerd"}',
        "1x16 0x23",
        "MetricsMissing",
        315,
    ),
    Case(
        name="a save fails",
        changed={'penstock_saves_total{outcome="failed"}': "0x16 1x23"},
        fires={240: NOTHING, 255: alerts("SaveFailing")},
    ),
    Case(
        name="saves do not come to their end",
        changed={SAVED: "0+15x16 240x23"},
        fires={240: NOTHING, 390: NOTHING, 450: alerts("SaveTooOld")},
    ),
    Case(
        name="the first save does not come",
        changed={SAVED: ""},
        fires={150: NOTHING, 240: alerts("SaveTooOld")},
    ),
    _steady("keys", "penstock_keys_expire_timestamp_seconds", "1e6x40", "KeysExpire", 60),
)
