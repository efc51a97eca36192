"""REDUCE_GRADIENTS and OFFLOAD_GRADIENTS; :mod:`penstock.protocol.reduction` says who sums."""

from __future__ import annotations

from penstock.protocol.instructions import OffloadGradients, ReduceGradients
from penstock.workers.attempt import Attempt


def reduce_gradients(instruction: ReduceGradients, attempt: Attempt) -> None:
    """Send the sums of a backward stage to its root, which only notes here what will come."""
    reduction, stage = attempt.bench.flow.reduction, instruction.stage
    if reduction.publishes(stage):
        for sender in reduction.senders(stage):
            attempt.post("reduction", sender, 0, attempt.bench.flow.layout.backward[sender].device)
    else:
        attempt.keep("reduction", stage, 0, attempt.gradients.take(stage))
        attempt.send("reduction", stage, 0, reduction.root_device(stage))


def offload_gradients(instruction: OffloadGradients, attempt: Attempt) -> None:
    """Publish the sums of a backward stage: its own, plus in the order of routes what others send,
    so that they have the same bits each time. Nothing where the sums were sent.
    """
    reduction, stage = attempt.bench.flow.reduction, instruction.stage
    if reduction.publishes(stage):
        for sender in reduction.senders(stage):
            attempt.gradients.add(stage, attempt.take("reduction", sender, 0))
        attempt.gradients.publish(stage)
