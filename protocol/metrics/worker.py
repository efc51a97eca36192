"""Metrics of a worker: a device's time, transfers, memory and work."""

from __future__ import annotations

from penstock.protocol.metrics.registry import Metric, counter, gauge
from penstock.protocol.plan.instructions import Opcode

FETCHES = (
    counter(
        "penstock_fetch_bytes",
        "Bytes that came from other nodes: sent by their memoryd (zmq), or read out of their memory"
        " (nixl). Weights in workers, gradients in optimizerd.",
        {"way": ("zmq", "nixl")},
    ),
    counter(
        "penstock_fetch_seconds", "Spent on these fetches, one at a time.", {"way": ("zmq", "nixl")}
    ),
    counter("penstock_fetches", "These fetches, an array each.", {"way": ("zmq", "nixl")}),
)
DROPPED = (
    "cut",
    "doubled",
    "full",
    "malformed",
    "not_local",
    "not_on_device",
    "not_ready",
    "not_settled",
    "other_attempt",
    "other_run",
    "slot_in_use",
    "stale",
    "unexpected",
)

BUSY = (
    "forward",
    "recompute",
    "backward",
    "backward_input",
    "backward_weight",
    "update",
    "evaluate",
)
"""Kinds of computation on a device: names of opcodes, and ``evaluate`` for all of an evaluation."""

IDLE_CAUSES = (
    "weights",
    "activations",
    "gradients",
    "optimizer",
    "peers",
    "data",
    "scheduler",
    "recovery",
    "overhead",
)

TIME = (
    counter(
        "penstock_device_busy_seconds",
        "Seconds computing since the worker was ready first; with the idle ones they add up to the"
        " time since then. What has been under way for a second counts.",
        {"instruction": BUSY},
    ),
    counter(
        "penstock_device_idle_seconds",
        "All other seconds, by what was waited for: weights, activations, gradients on their way,"
        " the optimizer to settle or decide, peers that still compute, data to be read, the"
        " scheduler to say what is next, recovery from one membership to the next, and the host's"
        " overhead between instructions.",
        {"cause": IDLE_CAUSES},
    ),
    counter(
        "penstock_worker_attempts",
        "Attempts and batches of evaluations, by how they ended here.",
        {"outcome": ("done", "aborted", "failed")},
    ),
    counter(
        "penstock_instructions",
        "Executed instructions.",
        {"instruction": tuple(opcode.name.lower() for opcode in Opcode)},
        sparse=True,
    ),
)

DIRECTIONS = ("h2d", "d2h", "send", "receive")
KINDS = ("weights", "gradients", "activations", "checkpoints", "swaps", "optimizer_state")

TRANSFERS = (
    counter(
        "penstock_transfer_bytes",
        "Bytes copied from the host to the device (h2d) and back (d2h), sent to other workers and"
        " received from them. What a device reads where it lies in shared memory is not copied.",
        {"direction": DIRECTIONS, "kind": KINDS},
        sparse=True,
    ),
    counter(
        "penstock_transfer_seconds",
        "Seconds of copies, each by itself; that messages took to be handed over (send), and were"
        " waited for (receive).",
        {"direction": DIRECTIONS, "kind": KINDS},
        sparse=True,
    ),
    *FETCHES,
    counter(
        "penstock_dropped_messages",
        "Messages on the local socket, or of peers, that were not used.",
        {"reason": DROPPED},
        sparse=True,
    ),
)

MEMORY = (
    gauge(
        "penstock_device_memory_bytes",
        "What the device held at the end of the last attempt.",
        absent="where it is not measured (on CPUs, without observability.memory)",
    ),
    gauge(
        "penstock_device_memory_limit_bytes",
        "What the device has.",
        absent="where it computes in the host's memory",
    ),
    gauge(
        "penstock_device_memory_peak_bytes",
        "The most that the device held in the last attempt.",
        absent="where it is not measured",
    ),
)

WORK = (
    counter(
        "penstock_device_model_flops",
        "Floating-point operations of the model in attempts that ended here: those of a forward"
        " (2 for each weight and token in products, and attention's at the configured length), and"
        " twice as many of a backward. Over the peak and the time, summed over devices: MFU.",
    ),
    counter(
        "penstock_device_recomputed_flops",
        "Those of forwards that were made again from a checkpoint. What selective recomputation"
        " makes again is not counted.",
    ),
    gauge(
        "penstock_device_peak_flops_per_second",
        "Dense 16-bit products a second by the GPU's data sheet; of an emulated one by the clock.",
        absent="where the device is not in the table (planner/cost/catalogue.py)",
    ),
)

WORKER: tuple[Metric, ...] = (*TIME, *TRANSFERS, *MEMORY, *WORK)
"""All of a worker's."""
