"""FETCH_WEIGHTS, RELEASE_WEIGHTS, SWAP_OUT and SWAP_IN."""

from __future__ import annotations

from penstock.protocol.instructions import (
    FetchWeights,
    ReleaseWeights,
    SwapIn,
    SwapOut,
)
from penstock.workers.attempt import Attempt
from penstock.workers.weights import StageKey


def fetch_weights(instruction: FetchWeights, attempt: Attempt) -> None:
    """Start; the first use waits.

    With ``shards_weights`` this is a model of devices that each fetch a share and gather the rest
    from each other. Here nothing is gathered: CPUs read weights where they lie in shared memory
    (those of other nodes come from their memoryd), and each GPU copies them from there in full.
    """
    attempt.stages.fetch(StageKey(instruction.stage, instruction.phase))


def release_weights(instruction: ReleaseWeights, attempt: Attempt) -> None:
    """The buffer is free."""
    attempt.stages.release(StageKey(instruction.stage, instruction.phase))


def swap_out(instruction: SwapOut, attempt: Attempt) -> None:
    """Start copying a share of what a forward kept to host memory, or to a peer's."""
    swaps = attempt.swaps(instruction.peer)
    kept = attempt.kept(instruction.stage, instruction.micro_batch)
    kept.swap_out(instruction.fraction, allocate=swaps.allocate, copies=swaps.out)


def swap_in(instruction: SwapIn, attempt: Attempt) -> None:
    """Start copying it back; the first use waits."""
    kept = attempt.kept(instruction.stage, instruction.micro_batch)
    kept.swap_in(copies=attempt.swaps(instruction.peer).back)
