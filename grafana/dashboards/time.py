"""Where time goes: steps by resource, devices by what they do and wait for, links, optimizer."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from penstock.grafana.dashboards import shared
from penstock.grafana.dashboards.colors import COLORS, STATES
from penstock.grafana.dashboards.frame import Panels, Section, dashboard
from penstock.grafana.dashboards.panels import bars, grid, lines, number, spread, stacked, states
from penstock.grafana.dashboards.queries import (
    NODES,
    RUN,
    Query,
    each,
    highest,
    increase,
    last,
    quantile,
    rate,
    total,
)

DEVICE = "node {{node}}, device {{device}}"


def make() -> Dashboard:
    """Returns the dashboard."""
    return dashboard(
        "time",
        "Where time goes",
        "Which resource holds steps back and why: the critical path of steps, what each device does"
        " and waits for, links between memories, the optimizer.",
        [
            Section(title="A step, resource by resource", panels=_steps()),
            Section(title="Devices", panels=_devices()),
            Section(title="Between and after computation", panels=_ends()),
            Section(title="Links", panels=_links()),
            Section(title="Optimizer", panels=_optimizer()),
            Section(title="How these numbers come about", panels=_analysis()),
        ],
    )


def _steps() -> Panels:
    median = quantile(0.5, "penstock_attempt_seconds", RUN)
    return [
        shared.critical_seconds(size=(12, 9)),
        shared.savings(size=(6, 9)),
        lines(
            "Measured over simulated",
            "The median step over what the simulation of the plan says; 1 means as planned. Far"
            " above, something is slower than the costs that the plan was made with.",
            each(f"{median} / {highest('penstock_simulated_step_seconds', RUN)}", "ratio"),
            unit="none",
            limits=(0, None),
            steps=((None, "green"), (1.5, "orange"), (2, "red")),
            size=(6, 9),
            empty="no step simulated yet",
        ),
    ]


def state_of_each_device() -> str:
    """Returns, for each device, the number of the state that it was in for most of the window."""
    busy = rate("penstock_device_busy_seconds_total", NODES, "node, device")
    idle = rate("penstock_device_idle_seconds_total", NODES, "node, device, cause")
    share = (
        f'(label_replace({busy}, "state", "computing", "", "") or sum by (node, device, state)'
        f' (label_replace({idle}, "state", "$1", "cause", "(.+)")))'
    )
    most = f"{share} == on (node, device) group_left () max by (node, device) ({share} > 0)"
    numbers = " or ".join(
        f'label_replace(vector({number}), "state", "{state}", "", "")'
        for number, state in enumerate(STATES)
    )
    return f"max by (node, device) (({most}) * 0 + on (state) group_left () ({numbers}))"


def _devices() -> Panels:
    busy = rate("penstock_device_busy_seconds_total", NODES, "node, device")
    kinds = rate("penstock_device_busy_seconds_total", NODES, "instruction")
    return [
        states(
            "What each device mostly does",
            "One lane a device, in the colour of what took most of its time: computing is good,"
            " everything else is waiting, and for what. All lanes alike: the resource of that name"
            " is short for all. One lane green where the others wait for peers: that device is the"
            " slow one.",
            each(state_of_each_device(), DEVICE),
            names={number: (name, COLORS[name]) for number, name in enumerate(STATES)},
            size=(24, 8),
        ),
        lines(
            "Share of time that devices compute",
            "Seconds with computation per second. What is missing to 100 % is in 'What devices wait"
            " for'. Devices far below the others are given too little, or wait for one that is"
            " slow.",
            each(busy, DEVICE),
            unit="percentunit",
            limits=(0, 1),
        ),
        shared.waiting_by_cause(size=(8, 8)),
        stacked(
            "What devices compute",
            "Share of all devices' time by kind of instruction. Forward and backward are what the"
            " model needs; recompute is the price of not keeping activations.",
            each(f"{kinds} / on () group_left () ({shared.device_seconds('')})", "{{instruction}}"),
            unit="percentunit",
            limits=(0, 1),
        ),
        grid(
            "Devices, in the time shown",
            "Seconds that each device computed or waited, by cause, in the time shown; the largest"
            " come first.",
            last(_seconds_of_each_device()),
            columns={"node": "Node", "device": "Device", "state": "What", "Value": "Seconds"},
            unit="s",
            size=(12, 9),
        ),
        bars(
            "Computation over what was expected",
            "Seconds that each device computed in a step, over what profile or simulation expect of"
            " it. Around 1 is right. One device far above the others is slow (heat, clocks,"
            " another process); all of them above: the costs are too low.",
            last(_over_expected(), "device {{device}}"),
            unit="none",
            steps=((None, "green"), (1.3, "orange"), (1.6, "red")),
            size=(12, 9),
            empty="no step simulated yet",
        ),
    ]


def _seconds_of_each_device() -> str:
    busy = increase("penstock_device_busy_seconds_total", NODES, "node, device")
    idle = increase("penstock_device_idle_seconds_total", NODES, "node, device, cause")
    return (
        f'sort_desc(label_replace({busy}, "state", "computing", "", "") or sum by (node, device,'
        f' state) (label_replace({idle}, "state", "waiting for $1", "cause", "(.+)")))'
    )


def _over_expected() -> str:
    busy = increase("penstock_device_busy_seconds_total", RUN, "device")
    steps = increase("penstock_attempts_total", RUN)
    expected = highest("penstock_expected_busy_seconds", RUN, "device")
    return f"{busy} / on () group_left () ({steps} > 0) / on (device) {expected}"


def _ends() -> Panels:
    recomputed = rate("penstock_device_recomputed_flops_total", NODES)
    peak = total("penstock_device_peak_flops_per_second", NODES)
    parts = {
        "penstock_optimizer_tail_seconds_total": "optimizer tail",
        "penstock_between_attempts_seconds_total": "between attempts",
        "penstock_evaluation_seconds_total": "evaluation",
        "penstock_save_blocked_seconds_total": "waiting for saves",
        "penstock_paused_seconds_total": "paused",
    }
    return [
        stacked(
            "Time outside of computation",
            "Share of the run's time in which no device has work of a step: the optimizer's tail"
            " after the last gradient, the scheduler between attempts, evaluations, waiting for a"
            " save to get room, pauses on request.",
            *(each(rate(metric, RUN), name) for metric, name in parts.items()),
            unit="percentunit",
            size=(8, 8),
        ),
        lines(
            "Model FLOPs utilization",
            "Computation that the model needs, over the devices' peak. 'With recomputation' also"
            " counts what is computed a second time: busy, but not progress. Empty where the peak"
            " is not known, as on CPUs.",
            each(shared.utilization(), "model"),
            each(f"{shared.utilization()} + {recomputed} / {peak}", "with recomputation"),
            unit="percentunit",
            limits=(0, None),
            size=(8, 8),
            empty="peak unknown",
        ),
        spread(
            "Durations of steps",
            "How long attempts took: the darker, the more. Two bands mean two kinds of steps, such"
            " as those with and without a save.",
            Query(
                expr=rate("penstock_attempt_seconds_bucket", RUN, "le"),
                legend="{{le}}",
                heatmap=True,
            ),
            unit="s",
            empty="no step in this time",
        ),
    ]


def _links() -> Panels:
    labels = "direction, kind"
    moved = rate("penstock_transfer_bytes_total", NODES, "direction")
    moving = rate("penstock_transfer_seconds_total", NODES, "direction")
    fetched = rate("penstock_fetch_bytes_total", NODES, "way")
    fetching = rate("penstock_fetch_seconds_total", NODES, "way")
    return [
        stacked(
            "Bytes moved",
            "What devices move: weights and swapped tensors from the host (h2d), gradients and"
            " swaps to it (d2h), activations and gradients between devices (send, receive).",
            each(rate("penstock_transfer_bytes_total", NODES, labels), "{{direction}} {{kind}}"),
            unit="Bps",
        ),
        lines(
            "Speed while moving",
            "Bytes over the seconds in which something moved, by direction: what the link gives,"
            " and not how often it is used. Compare it with what the bus or the network can do.",
            each(f"{moved} / ({moving} > 0)", "{{direction}}"),
            unit="Bps",
            limits=(0, None),
        ),
        lines(
            "Fetches from other nodes",
            "Weights and gradients read from other nodes' memory, by way: bytes a second on the"
            " average, and while something is being fetched. One node fetches nothing.",
            each(fetched, "{{way}}, average"),
            each(f"{fetched} / ({fetching} > 0)", "{{way}}, while fetching"),
            unit="Bps",
            limits=(0, None),
            empty="nothing is fetched from other nodes",
        ),
    ]


def _optimizer() -> Panels:
    moved = rate("penstock_sweep_bytes_total", NODES, "node")
    seconds = rate("penstock_sweep_seconds_total", NODES, "node")
    ceiling = highest("penstock_memory_bandwidth_ceiling_bytes_per_second", NODES, "node")
    waits = rate("penstock_optimizer_wait_seconds_total", NODES, "cause")
    nodes = f"count(penstock_optimizer_cores{{{NODES}}})"
    return [
        lines(
            "Memory bandwidth of sweeps",
            "Bytes that the optimizer's sweeps read and write in the host's memory, while they run,"
            " over what this machine's memory was measured to give. Near 100 % the memory channels"
            " are full: more cores do not help, fewer bytes (bf16 state) or more nodes do.",
            each(f"{moved} / ({seconds} > 0) / on (node) {ceiling}", "{{node}}"),
            unit="percentunit",
            limits=(0, None),
            steps=((None, "green"), (0.9, "orange")),
            empty="not measured: memory is no limit here",
        ),
        lines(
            "Optimizer cores",
            "Cores that sweeps occupy, those of them that the kernel really gave (CPU time), and"
            " those configured. CPU time below occupied: something else runs on these cores.",
            each(rate("penstock_optimizer_busy_seconds_total", NODES), "occupied"),
            each(rate("penstock_optimizer_cpu_seconds_total", NODES), "CPU time"),
            each(total("penstock_optimizer_cores", NODES), "configured"),
            unit="none",
            limits=(0, None),
            limits_named=("configured",),
        ),
        stacked(
            "What the optimizer waits for",
            "Share of the optimizers' time without a sweep, by what they wait for. Waiting for"
            " gradients is right: devices set the pace. Fetches: the network does. Decision: the"
            " gradients' norm of all blocks must be known first.",
            each(f"{waits} / on () group_left () {nodes}", "{{cause}}"),
            unit="percentunit",
            limits=(0, 1),
        ),
        lines(
            "Parameters a second",
            "Parameters that sweeps go over, by kind of sweep: preview writes the next weights,"
            " settle takes a step into the state, advance does both.",
            each(rate("penstock_sweep_parameters_total", NODES, "pass"), "{{pass}}"),
            unit="short",
            limits=(0, None),
            size=(12, 8),
        ),
        lines(
            "Blocks that wait for the optimizer",
            "Sweeps that could run but wait for a free core. Rising in every step: the optimizer is"
            " behind the devices.",
            each(total("penstock_optimizer_queue_length", NODES, "node"), "{{node}}"),
            unit="none",
            limits=(0, None),
            size=(12, 8),
        ),
    ]


def _analysis() -> Panels:
    analysed = increase("penstock_analysed_attempts_total", RUN)
    return [
        number(
            "Steps analysed",
            "Steps in the time shown whose critical path was worked out (every"
            " observability.sample_every-th).",
            last(analysed),
            unit="none",
            size=(4, 4),
            decimals=0,
        ),
        number(
            "Analyses that failed",
            "Traces that could not be used, because they were broken off or incomplete. The run is"
            " not affected.",
            last(increase("penstock_analysis_failures_total", RUN)),
            unit="none",
            size=(4, 4),
            decimals=0,
            steps=((None, "green"), (1, "orange")),
            empty="none",
        ),
        number(
            "Sum of resources over the step",
            "Critical seconds of all resources over the measured seconds of the same steps: 100 %"
            " means that nothing is lost or counted twice.",
            last(
                f"{total('penstock_critical_seconds_total', RUN)} /"
                f" {total('penstock_analysed_step_seconds_total', RUN)}"
            ),
            unit="percentunit",
            size=(4, 4),
            decimals=1,
            empty="no step analysed yet",
        ),
        grid(
            "Costs of the simulation",
            "Where the simulated step's costs come from: a profile, the emulated hardware's costs,"
            " or fitted to the first analysed steps (which then cannot be slower than simulated"
            " from the start).",
            last(highest("penstock_simulated_step_info", RUN, "costs")),
            columns={"costs": "Costs from"},
            size=(12, 4),
            empty="no step simulated yet",
        ),
    ]
