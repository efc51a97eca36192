"""FETCH_WEIGHTS, RELEASE_WEIGHTS, OFFLOAD_GRADIENTS, SWAP_OUT and SWAP_IN."""

from __future__ import annotations

from penstock.protocol.instructions import (
    FetchWeights,
    OffloadGradients,
    ReleaseWeights,
    SwapIn,
    SwapOut,
)
from penstock.workers.attempt import Attempt
from penstock.workers.weights import StageKey


def fetch_weights(instruction: FetchWeights, attempt: Attempt) -> None:
    """Start; the first use waits."""
    attempt.stages.fetch(StageKey(instruction.stage, instruction.phase))


def release_weights(instruction: ReleaseWeights, attempt: Attempt) -> None:
    """The buffer is free."""
    attempt.stages.release(StageKey(instruction.stage, instruction.phase))


def offload_gradients(instruction: OffloadGradients, attempt: Attempt) -> None:
    """Publish the sums of a backward stage."""
    layout, stage = attempt.bench.flow.layout, instruction.stage
    attempt.gradients.publish(layout.backward[stage].blocks, layout.backward_routes[stage])


def swap_out(instruction: SwapOut, attempt: Attempt) -> None:
    """Start copying a share of what a forward kept to host memory."""
    swaps, kept = attempt.swaps, attempt.kept(instruction.stage, instruction.micro_batch)
    kept.swap_out(instruction.fraction, allocate=swaps.allocate, copies=swaps.out)


def swap_in(instruction: SwapIn, attempt: Attempt) -> None:
    """Start copying it back; the first use waits."""
    kept = attempt.kept(instruction.stage, instruction.micro_batch)
    kept.swap_in(copies=attempt.swaps.back)
