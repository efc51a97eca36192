"""FETCH_WEIGHTS, RELEASE_WEIGHTS and OFFLOAD_GRADIENTS."""

from __future__ import annotations

from penstock.protocol.instructions import FetchWeights, OffloadGradients, ReleaseWeights
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
