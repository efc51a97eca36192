"""Recovery and faults: what broke, how soon it went on, what would be lost."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from penstock.grafana.dashboards import shared
from penstock.grafana.dashboards.colors import DECISIONS, MEMBERS
from penstock.grafana.dashboards.frame import Panels, Section, dashboard
from penstock.grafana.dashboards.panels import grid, lines, number, stacked, states
from penstock.grafana.dashboards.queries import (
    NODES,
    RUN,
    each,
    highest,
    increase,
    last,
    mean,
    quantile,
    rate,
    total,
)

COUNT = ((None, "green"), (1, "orange"))


def make() -> Dashboard:
    """Returns the dashboard."""
    return dashboard(
        "recovery",
        "Recovery and faults",
        "What broke, which process and why, how soon the run went on, and what a reboot would"
        " lose.",
        [
            Section(title="In the time shown", panels=_numbers()),
            Section(title="Is everybody there?", panels=_alive()),
            Section(title="What broke, and for how long", panels=_broken()),
            Section(title="Decisions about steps", panels=_decisions()),
            Section(title="Commits", panels=_commits()),
            Section(title="Saves", panels=_saves()),
            Section(title="Data and messages", panels=_data()),
            Section(title="Trackers", panels=_trackers(), folded=True),
        ],
    )


def _numbers() -> Panels:
    saved = highest("penstock_last_snapshot_timestamp_seconds", RUN)
    committed = highest("penstock_last_commit_timestamp_seconds", RUN)
    return [
        number(
            "Broken attempts",
            "Attempts at a step that a fault broke off. Each is repeated, with the same result.",
            last(increase("penstock_attempts_broken_total", RUN)),
            unit="none",
            size=(4, 4),
            decimals=0,
            steps=COUNT,
        ),
        number(
            "Restarts",
            "Processes that their node started again.",
            last(increase("penstock_restarts_total", RUN)),
            unit="none",
            size=(4, 4),
            decimals=0,
            steps=COUNT,
        ),
        number(
            "Mean recovery",
            "From the moment in which an attempt breaks to the next one's start.",
            last(mean("penstock_recovery_seconds", RUN, window="$__range")),
            unit="s",
            size=(4, 4),
            empty="nothing broke",
        ),
        number(
            "Since the last commit",
            "Time since the last step that counts. Many times a step's duration: the run is stuck.",
            each(f"time() - {committed}"),
            unit="s",
            size=(4, 4),
        ),
        number(
            "Since the last save",
            "What a reboot, or the loss of a machine, would undo: time since the newest state on"
            " disk.",
            each(f"time() - {saved}"),
            unit="s",
            size=(4, 4),
            empty="nothing saved",
        ),
        number(
            "Steps not saved",
            "Committed steps since the newest state on disk. Killed processes do not lose them; a"
            " reboot does.",
            each(f"{highest('penstock_step', RUN)} - {highest('penstock_saved_step', RUN)}"),
            unit="none",
            size=(4, 4),
            empty="nothing saved",
        ),
    ]


def _alive() -> Panels:
    return [
        stacked(
            "Members by state",
            "Processes that take part in steps. All should be ready; missing ones are being started"
            " again, joining ones prepare, and a fenced one is made sure to be dead before another"
            " takes its place.",
            each(total("penstock_members", RUN, "state"), "{{state}}"),
            unit="none",
            colors=MEMBERS,
            size=(8, 9),
        ),
        states(
            "Phases",
            "What the run does: one lane a phase that it was in, coloured while it lasts. Short"
            " phases are seen now and then only.",
            each(f"{highest('penstock_phase', RUN, 'phase')} == 1", "{{phase}}"),
            names={1: ("in this phase", "blue")},
            size=(8, 9),
        ),
        states(
            "Processes",
            "Whether each process answers when it is asked for its metrics.",
            each(highest("penstock_process_up", NODES, "node, process"), "{{node}} {{process}}"),
            names={1: ("answers", "green"), 0: ("silent", "red")},
            size=(8, 9),
        ),
    ]


def _broken() -> Panels:
    restarts = increase("penstock_restarts_total", NODES, "node, member, cause")
    fences = increase("penstock_fences_total", NODES, "node, member")
    return [
        stacked(
            "Broken attempts by cause",
            "Lost member: a process died. Silent: its heartbeat stopped. Hung: it did not do what"
            " it should in time. Failed: it reported an error. Asked: a user stopped or paused.",
            each(increase("penstock_attempts_broken_total", RUN, "cause", "$window"), "{{cause}}"),
            unit="none",
            bars=True,
            size=(8, 8),
        ),
        lines(
            "Recovery",
            "Seconds from a broken attempt to the next one's start: noticing, fencing, starting"
            " again, joining. Half of the recoveries were faster than the median.",
            each(quantile(0.5, "penstock_recovery_seconds", RUN, window="$__range"), "median"),
            each(quantile(0.95, "penstock_recovery_seconds", RUN, window="$__range"), "slowest"),
            unit="s",
            limits=(0, None),
            size=(8, 8),
            empty="nothing broke",
        ),
        lines(
            "Memberships",
            "Times with the same members; a new membership begins after each recovery.",
            each(increase("penstock_epochs_total", RUN, window="$window"), "memberships begun"),
            unit="none",
            limits=(0, None),
            size=(8, 8),
        ),
        grid(
            "Restarts by process",
            "Which processes were started again in the time shown, and why. The same one again and"
            " again: look into its log (`penstock logs`, or logs/ in the run directory).",
            last(f"{restarts} > 0"),
            columns={"node": "Node", "member": "Process", "cause": "Cause", "Value": "Restarts"},
            decimals=0,
            size=(12, 7),
            empty="nothing was started again",
        ),
        grid(
            "Fenced processes",
            "Processes that their node made sure to be dead before it started others in their"
            " place, killed and silent ones.",
            last(f"{fences} > 0"),
            columns={"node": "Node", "member": "Process", "Value": "Times"},
            decimals=0,
            size=(12, 7),
            empty="nothing was fenced",
        ),
    ]


def _decisions() -> Panels:
    decided = rate("penstock_attempts_total", RUN, "decision")
    return [
        stacked(
            "Share of decisions",
            "Commit: the step counts as computed. Amend: it counts with clipped gradients; in most"
            " steps, the limit is too low or the run diverges. Skip: gradients were not finite; in"
            " fp16 now and then it is normal (the loss scale finds its place).",
            each(
                f"{decided} / on () group_left () ({rate('penstock_attempts_total', RUN)} > 0)",
                "{{decision}}",
            ),
            unit="percentunit",
            limits=(0, 1),
            colors=DECISIONS,
        ),
        shared.gradient_norm(size=(8, 8)),
        lines(
            "Loss scale",
            "fp16 only: what the loss is multiplied with so that small gradients do not vanish. It"
            " halves after each skipped step. At its floor and still skipping, the run diverges.",
            each(highest("penstock_loss_scale", RUN), "loss scale"),
            each(highest("penstock_loss_scale_floor", RUN), "floor"),
            unit="none",
            logarithmic=True,
            limits_named=("floor",),
            empty="no loss scale (not fp16)",
        ),
    ]


def _commits() -> Panels:
    latency = "penstock_commit_latency_seconds"
    return [
        lines(
            "Commit latency",
            "From the last report of a step to its journaled decision: the scheduler's own work,"
            " and the disk that holds the journal. Usually milliseconds.",
            each(quantile(0.5, latency, RUN), "median"),
            each(quantile(0.99, latency, RUN), "99 of 100 are faster"),
            unit="s",
            limits=(0, None),
            size=(12, 8),
        ),
        lines(
            "Committed step by node",
            "The step that each node's memory has, and the scheduler's. Nodes follow within"
            " milliseconds; one that stays behind has a stuck memoryd.",
            each(highest("penstock_committed_step", NODES, "node"), "{{node}}"),
            each(highest("penstock_step", RUN), "scheduler"),
            unit="none",
            limits_named=("scheduler",),
            size=(12, 8),
        ),
    ]


def _saves() -> Panels:
    done = f'{RUN}, outcome="done"'
    saves = rate("penstock_saves_total", done)
    bytes_ = rate("penstock_save_bytes_total", RUN)
    seconds = rate("penstock_save_seconds_total", RUN)
    age = f"time() - {highest('penstock_last_snapshot_timestamp_seconds', RUN)}"
    return [
        stacked(
            "Saves",
            "Saved states by outcome. A failed one leaves the run going and the older states in"
            " place; the log says why (a full disk, mostly).",
            each(increase("penstock_saves_total", RUN, "outcome", "$window"), "{{outcome}}"),
            unit="none",
            bars=True,
            size=(6, 8),
        ),
        lines(
            "Seconds of a save",
            "From its begin to the sealed manifest. Steps go on meanwhile.",
            each(f"{seconds} / ({saves} > 0)", "seconds"),
            unit="s",
            limits=(0, None),
            gaps=False,
            size=(6, 8),
            empty="no save in this time",
        ),
        lines(
            "Speed of saves",
            "Bytes over seconds of saves: what the file system gives.",
            each(f"{bytes_} / ({seconds} > 0)", "written"),
            unit="Bps",
            limits=(0, None),
            gaps=False,
            size=(6, 8),
            empty="no save in this time",
        ),
        lines(
            "Age of the newest state",
            "Time since the newest save, and how far apart saves should be. Rising over it, saves"
            " are late or fail.",
            each(age, "age"),
            each(highest("penstock_save_interval_seconds", RUN), "wanted"),
            unit="s",
            limits=(0, None),
            limits_named=("wanted",),
            size=(6, 8),
            empty="nothing saved",
        ),
    ]


def _data() -> Panels:
    position = highest("penstock_data_position_samples", RUN)
    size = highest("penstock_data_samples", RUN)
    return [
        lines(
            "Position in the data",
            "Samples used so far, over the samples of one pass: epochs; asked for is how many"
            " passes the configuration wants (data.passes). Behind the end of one, the next begins"
            " in another order.",
            each(f"{position} / {size}", "used"),
            each(highest("penstock_data_passes", RUN), "asked for"),
            unit="percentunit",
            limits=(0, None),
            limits_named=("asked for",),
            size=(8, 7),
            empty="data are made up",
        ),
        lines(
            "Devices that wait for data",
            "Share of each device's time that it waits for samples. Anything but nothing means slow"
            " storage.",
            each(
                rate(
                    "penstock_device_idle_seconds_total", f'{NODES}, cause="data"', "node, device"
                ),
                "node {{node}}, device {{device}}",
            ),
            unit="percentunit",
            limits=(0, None),
            size=(8, 7),
        ),
        lines(
            "Dropped messages",
            "Messages that a worker threw away, by reason: late ones of an attempt that was broken,"
            " or strangers'. Some are normal after a fault.",
            each(rate("penstock_dropped_messages_total", NODES, "reason"), "{{reason}}"),
            unit="cps",
            limits=(0, None),
            size=(8, 7),
            empty="none",
        ),
    ]


def _trackers() -> Panels:
    return [
        states(
            "Trackers that answer",
            "TensorBoard, Weights & Biases and others, where observability.trackers names them.",
            each(highest("penstock_tracker_up", RUN, "tracker"), "{{tracker}}"),
            names={1: ("up", "green"), 0: ("down", "red")},
            size=(8, 7),
            empty="no tracker is configured",
        ),
        lines(
            "Lines sent",
            "Lines of metrics handed to each tracker.",
            each(rate("penstock_tracker_lines_total", RUN, "tracker"), "{{tracker}}"),
            unit="cps",
            size=(8, 7),
            empty="no tracker is configured",
        ),
        lines(
            "Lines dropped",
            "Lines that a slow tracker never got. The run does not wait for trackers.",
            each(rate("penstock_tracker_dropped_total", RUN, "tracker"), "{{tracker}}"),
            unit="cps",
            size=(8, 7),
            empty="no tracker is configured",
        ),
    ]
