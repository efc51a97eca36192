"""Overview: is it learning, how fast, what holds it back, is anything wrong."""

from __future__ import annotations

from grafana_foundation_sdk.models.common import BigValueTextMode
from grafana_foundation_sdk.models.dashboard import Dashboard

from penstock.grafana.dashboards import shared
from penstock.grafana.dashboards.colors import DECISIONS
from penstock.grafana.dashboards.frame import Panels, Section, dashboard
from penstock.grafana.dashboards.panels import grid, lines, number, stacked, states, words
from penstock.grafana.dashboards.queries import (
    NODES,
    RUN,
    each,
    highest,
    last,
    quantile,
    rate,
)

FIRING = f'ALERTS{{{RUN}, alertstate="firing", alertname!="PenstockWatchdog"}}'


def make() -> Dashboard:
    """Returns the dashboard."""
    return dashboard(
        "overview",
        "Overview",
        "One run at a glance: is it learning, how fast, what holds it back, is anything wrong.",
        [
            Section(title="Now", panels=[*_progress(), *_verdict()]),
            Section(title="Is it learning?", panels=_learning()),
            Section(title="How fast, and what holds it back?", panels=_speed()),
            Section(title="Is anything wrong?", panels=_wrong()),
            Section(title="What is it?", panels=_what()),
        ],
    )


def _progress() -> Panels:
    return [
        number(
            "Phase",
            "What the run does at this moment.",
            last(f"{highest('penstock_phase', RUN, 'phase')} == 1", "{{phase}}"),
            unit="none",
            text_mode=BigValueTextMode.NAME,
            empty="not running",
            steps=((None, "green"),),
        ),
        number(
            "Progress",
            "Steps that count (committed), of those that the configuration asks for.",
            each(f"{highest('penstock_step', RUN)} / {highest('penstock_steps', RUN)}"),
            unit="percentunit",
            decimals=1,
        ),
        number(
            "Time left",
            "Estimated time to the last step, at the speed of late.",
            each(highest("penstock_eta_seconds", RUN)),
            unit="s",
            empty="unknown",
        ),
        number(
            "Loss now",
            "Mean loss per token of the newest step, in nats. Lower is better.",
            each(highest("penstock_loss", RUN)),
            unit="none",
            decimals=3,
            empty="no step yet",
        ),
        number(
            "Speed",
            "Tokens per second that count towards training, of the whole run.",
            each(rate("penstock_tokens_total", RUN)),
            unit="short",
        ),
    ]


def _verdict() -> Panels:
    return [
        number(
            "Model FLOPs utilization",
            "Computation that the model needs, as a share of what the devices could do at their"
            " peak. Computing activations a second time does not count. Empty where the peak is"
            " not known, as on CPUs.",
            each(shared.utilization()),
            unit="percentunit",
            decimals=1,
            empty="peak unknown",
        ),
        number(
            "Held back by",
            "The resource without which a step would be shortest, and by how many seconds. From the"
            " newest step that was analysed.",
            last(
                f"topk(1, {highest('penstock_savings_seconds', RUN, 'resource')})", "{{resource}}"
            ),
            unit="s",
            text_mode=BigValueTextMode.VALUE_AND_NAME,
            empty="no step analysed yet",
            steps=((None, "orange"),),
        ),
        number(
            "Alerts",
            "Alerts that fire for this run; the table below names them. No answer means none.",
            last(f"count({FIRING})"),
            unit="none",
            empty="none",
            steps=((None, "green"), (1, "red")),
        ),
    ]


def _learning() -> Panels:
    return [
        lines(
            "Loss",
            "Mean loss per token in nats, of each step and of evaluations on held-out data. It"
            " should fall, quickly at first. Evaluation that rises while training falls means"
            " overfitting.",
            each(highest("penstock_loss", RUN), "training"),
            each(highest("penstock_evaluation_loss", RUN), "evaluation"),
            unit="none",
            size=(10, 9),
        ),
        shared.gradient_norm(size=(8, 9)),
        lines(
            "Learning rate",
            "The optimizer's step size, as the configured schedule has it.",
            each(highest("penstock_learning_rate", RUN), "learning rate"),
            unit="sci",
            size=(6, 9),
        ),
    ]


def _speed() -> Panels:
    return [
        lines(
            "Tokens per second",
            "Tokens that count towards training, of the whole run. Steps that are slow, broken,"
            " paused or saved in between lower it.",
            each(rate("penstock_tokens_total", RUN), "tokens"),
            unit="short",
            limits=(0, None),
            size=(8, 8),
        ),
        lines(
            "Seconds a step",
            "Half of the steps took less than the median. The simulation says what the plan should"
            " take; far above it, a device, a link or the optimizer is slower than assumed.",
            each(quantile(0.5, "penstock_attempt_seconds", RUN), "median"),
            each(quantile(0.95, "penstock_attempt_seconds", RUN), "95 of 100 are faster"),
            each(highest("penstock_simulated_step_seconds", RUN), "simulated"),
            unit="s",
            limits=(0, None),
            limits_named=("simulated",),
            size=(8, 8),
        ),
        stacked(
            "Decisions",
            "How attempts at a step end. Commit: the step counts. Amend: the gradients' norm was"
            " over its limit, the weights are computed again with clipped gradients, and the step"
            " counts. Skip: gradients were infinite or undefined, and the weights stay.",
            each(rate("penstock_attempts_total", RUN, "decision"), "{{decision}}"),
            unit="cps",
            colors=DECISIONS,
            size=(8, 8),
        ),
        shared.critical_seconds(size=(12, 9)),
        shared.savings(size=(6, 9)),
        shared.waiting_by_cause(size=(6, 9)),
    ]


def _wrong() -> Panels:
    return [
        grid(
            "Firing alerts",
            "Alerts of this run; the runbook (docs/RUNBOOK.md) says what to do about each. Empty is"
            " good. Needs Penstock's rules in Prometheus.",
            last(FIRING),
            columns={
                "alertname": "Alert",
                "severity": "Severity",
                "node": "Node",
                "process": "Process",
                "device": "Device",
            },
            empty="nothing fires",
        ),
        states(
            "Processes",
            "Whether each process of the run answers when it is asked for its metrics. One that is"
            " killed is started again by its node; one that stays silent hangs.",
            each(highest("penstock_process_up", NODES, "node, process"), "{{node}} {{process}}"),
            names={1: ("answers", "green"), 0: ("silent", "red")},
            size=(12, 8),
        ),
    ]


def _what() -> Panels:
    return [
        grid(
            "The run",
            "What trains here, how it is spread over devices, and by which schedule.",
            last(
                f"max by (run, run_id, model, scheme, devices, nodes, micro_batches, optimizer,"
                f" platform) (penstock_run_info{{{RUN}}})"
            ),
            columns={
                "run": "Run",
                "run_id": "Id",
                "model": "Model",
                "scheme": "Schedule",
                "devices": "Devices",
                "nodes": "Nodes",
                "micro_batches": "Micro-batches",
                "optimizer": "Optimizer",
                "platform": "Platform",
            },
            size=(24, 4),
        ),
        words(
            "Words",
            "**Attempt**: one try of a step; it ends in a decision, or is broken by a fault and"
            " repeated, with the same result. **Commit**: the moment in which a step counts."
            " **Amend**: weights computed again because the gradients' norm was over its limit."
            " **Skip**: no step, since gradients were not finite. **Optimizer tail**: from the last"
            " gradient to the commit. **Bubble**: time in which a device waits for its neighbours"
            " in the pipeline. **Snapshot**: a saved state on disk, which survives a reboot; what"
            " is committed only survives killed processes.",
            size=(24, 4),
        ),
    ]
