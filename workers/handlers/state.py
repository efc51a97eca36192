"""Handlers of what comes to a device, leaves it, or changes model state: FETCH_WEIGHTS and
RELEASE_WEIGHTS; SWAP_OUT and SWAP_IN; REDUCE_GRADIENTS and OFFLOAD_GRADIENTS, of which
:mod:`penstock.protocol.plan.reduction` says who sums; and UPDATE, which makes a block's next
weights on this device instead of on its node's CPU cores.
"""

from __future__ import annotations

from penstock.protocol.plan.instructions import (
    FetchWeights,
    OffloadGradients,
    ReduceGradients,
    ReleaseWeights,
    SwapIn,
    SwapOut,
    Update,
)
from penstock.workers.attempt import Attempt
from penstock.workers.device import Copied, Stamp
from penstock.workers.state.weights import StageKey


def fetch_weights(instruction: FetchWeights, attempt: Attempt) -> None:
    """Starts to fetch a stage's weights; their first use waits.

    With ``shards_weights`` this is a model of devices that each fetch a share and gather the rest
    from each other. Here nothing is gathered: CPUs read weights where they lie in shared memory
    (those of other nodes come from their memoryd), and each GPU copies them from there in full.
    """
    attempt.stages.fetch(StageKey(instruction.stage, instruction.phase))


def release_weights(instruction: ReleaseWeights, attempt: Attempt) -> None:
    """Gives the buffer of a stage's weights back."""
    attempt.stages.release(StageKey(instruction.stage, instruction.phase))


def swap_out(instruction: SwapOut, attempt: Attempt) -> None:
    """Starts to copy a share of what a forward kept to host memory, or to a peer's."""
    swaps = attempt.swaps(instruction.peer)
    saved = attempt.saved_activations(instruction.stage, instruction.micro_batch)
    start = attempt.context.device.stamp()
    moved = saved.swap_out(instruction.fraction, allocate=swaps.allocate, copies=swaps.out)
    _count_swap(attempt, instruction, "d2h", moved, start)


def swap_in(instruction: SwapIn, attempt: Attempt) -> None:
    """Starts to copy it back; its first use waits."""
    saved = attempt.saved_activations(instruction.stage, instruction.micro_batch)
    start = attempt.context.device.stamp()
    moved = saved.swap_in(copies=attempt.swaps(instruction.peer).back)
    _count_swap(attempt, instruction, "h2d", moved, start)


def _count_swap(
    attempt: Attempt, instruction: SwapOut | SwapIn, direction: str, moved: int, start: Stamp
) -> None:
    """Bytes, and how long they took to be issued: their streams run beside the computation."""
    if instruction.peer is None:
        copied = Copied(moved, start, attempt.context.device.stamp())
        attempt.timeline.copied(direction, "swaps", copied)


def reduce_gradients(instruction: ReduceGradients, attempt: Attempt) -> None:
    """Sends the sums of a backward stage to its root, which only notes here what will come."""
    reduction, stage = attempt.context.routing.reduction, instruction.stage
    if reduction.publishes(stage):
        for sender in reduction.senders(stage):
            attempt.post(
                "reduction", sender, 0, attempt.context.routing.layout.backward[sender].device
            )
    else:
        attempt.keep("reduction", stage, 0, attempt.gradients.take(stage))
        attempt.send("reduction", stage, 0, reduction.root_device(stage))


def offload_gradients(instruction: OffloadGradients, attempt: Attempt) -> None:
    """Publishes the sums of a backward stage: its own, plus in the order of routes what others
    send, so that they have the same bits each time. Nothing where the sums were sent.
    """
    reduction, stage = attempt.context.routing.reduction, instruction.stage
    if reduction.publishes(stage):
        for sender in reduction.senders(stage):
            attempt.gradients.add(stage, attempt.take("reduction", sender, 0))
        attempt.gradients.publish(stage)


def update(instruction: Update, attempt: Attempt) -> None:
    """Starts the update of a block, and the attempt ends when it is done. In an attempt that holds,
    the CPU updates all blocks.
    """
    attempt.update(instruction)
