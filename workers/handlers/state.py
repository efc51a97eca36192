"""Handlers of instructions that move tensors or change model state.

They are SEND_* and RECV_*; FETCH_WEIGHTS and RELEASE_WEIGHTS; SWAP_OUT and SWAP_IN;
REDUCE_GRADIENTS and OFFLOAD_GRADIENTS, with sums by :mod:`penstock.protocol.plan.reduction`; and
UPDATE. UPDATE makes a block's next weights on this device instead of on its node's CPU cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from penstock.planner.schedule.tensors import Receive, Send
from penstock.protocol.plan.instructions import (
    FetchWeights,
    OffloadGradients,
    Opcode,
    ReduceGradients,
    ReleaseWeights,
    SwapIn,
    SwapOut,
    Update,
)
from penstock.protocol.plan.semantics import RECEIVES, SENDS
from penstock.protocol.wire.frames import TransferKind
from penstock.workers.attempt import Attempt
from penstock.workers.device import Copied, Stamp
from penstock.workers.state.weights import StageKey

_KINDS: Mapping[Opcode, TransferKind] = MappingProxyType(
    {
        transfer.opcode: kind.value
        for transfers in (SENDS, RECEIVES)
        for kind, transfer in transfers.items()
    }
)


def send(instruction: Send, attempt: Attempt) -> None:
    """Queues a tensor for the device that needs it, which becomes its only owner."""
    kind = _KINDS[instruction.opcode]
    attempt.send(kind, instruction.stage, instruction.micro_batch, instruction.peer)


def receive(instruction: Receive, attempt: Attempt) -> None:
    """Posts the receive of a tensor; the instruction that takes the tensor waits."""
    kind = _KINDS[instruction.opcode]
    attempt.post(kind, instruction.stage, instruction.micro_batch, instruction.peer)


def fetch_weights(instruction: FetchWeights, attempt: Attempt) -> None:
    """Starts to fetch a stage's weights; their first use waits.

    ``shards_weights`` models devices that each fetch a share and gather the rest from each other.
    This handler gathers nothing. CPUs read weights in place in shared memory (memoryds of other
    nodes send theirs); each GPU copies all weights from there.
    """
    attempt.stages.fetch(StageKey(instruction.stage, instruction.phase))


def release_weights(instruction: ReleaseWeights, attempt: Attempt) -> None:
    """Gives the buffer of a stage's weights back."""
    attempt.stages.release(StageKey(instruction.stage, instruction.phase))


def swap_out(instruction: SwapOut, attempt: Attempt) -> None:
    """Starts to copy a share of a forward's activations to host memory, or to a peer's."""
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
    """Counts bytes, and the seconds of their issue: their streams run concurrently to the
    computation.
    """
    if instruction.peer is None:
        copied = Copied(moved, start, attempt.context.device.stamp())
        attempt.timeline.copied(direction, "swaps", copied)


def reduce_gradients(instruction: ReduceGradients, attempt: Attempt) -> None:
    """Sends the sums of a backward stage to its root; the root itself only posts the receives."""
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
    """Publishes the sums of a backward stage. Sums of other pipeline replicas are added in their
    fixed order, so that the bits are equal each time. Does nothing if the sums were sent to a root.
    """
    reduction, stage = attempt.context.routing.reduction, instruction.stage
    if reduction.publishes(stage):
        for sender in reduction.senders(stage):
            attempt.gradients.add(stage, attempt.take("reduction", sender, 0))
        attempt.gradients.publish(stage)


def update(instruction: Update, attempt: Attempt) -> None:
    """Starts the update of a block; the attempt ends after it. In a synchronous step the CPU
    updates all blocks.
    """
    attempt.update(instruction)
