"""FORWARD, RECOMPUTE and BACKWARD, whole or in two halves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from penstock.models.binding import BoundBlock
from penstock.models.forward_storage import ForwardStorage
from penstock.models.runtime import StageOutput
from penstock.models.saved_activations import release_values
from penstock.models.split_backward.split import run_together
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Keep,
    Phase,
    Recompute,
)
from penstock.workers.attempt import Attempt
from penstock.workers.state.weights import StageKey


def forward(instruction: Forward, attempt: Attempt) -> None:
    """Runs a forward stage; ``instruction.keep`` names the tensors that stay."""
    _FORWARDS[instruction.keep](instruction, attempt)


def recompute(instruction: Recompute, attempt: Attempt) -> None:
    """Runs a backward stage forward, with autograd, from its checkpoint; or makes only the dropped
    tensors of its forward again.
    """
    stage, m = instruction.stage, instruction.micro_batch
    if attempt.has_graph(stage, m):
        _make_again(instruction, attempt)
        return
    inputs = attempt.inputs(instruction)
    attempt.await_others(instruction)
    bound = attempt.stages.bound(attempt.stages.backward_key(stage), grads=True)
    storage = attempt.forward_storage(stage, m)
    output = _run(attempt, bound, inputs, m, autograd=True, storage=storage, output_read=False)
    attempt.count_loss(m, output)
    _keep_graph(attempt, stage, m, output)


def backward(instruction: Backward, attempt: Attempt) -> None:
    """Computes the gradients of a stage's weights and adds them up. Leaves those of its inputs to
    the stage before.
    """
    _backward(instruction, attempt)


def backward_input(instruction: BackwardInput, attempt: Attempt) -> None:
    """Computes the gradients of a stage's inputs only; those of its weights wait."""
    stage, m = instruction.stage, instruction.micro_batch
    output = _backward(instruction, attempt)
    assert output.stored is not None and output.stored.deferred is not None
    attempt.defer(stage, m, output.stored.deferred)


def backward_weight(instruction: BackwardWeight, attempt: Attempt) -> None:
    """Computes the waiting weight gradients, and adds them up micro-batch by micro-batch unless the
    plan concatenates them.
    """
    stage = instruction.stage
    run_together(
        [attempt.take_deferred(stage, m) for m in instruction.micro_batches],
        concatenate=attempt.context.plan.concatenates_gradients,
    )


def _backward(instruction: Backward | BackwardInput, attempt: Attempt) -> StageOutput:
    stage, m = instruction.stage, instruction.micro_batch
    gradients = attempt.inputs(instruction)
    _bind_anew(attempt, stage)
    attempt.stages.begin_backward(stage)
    output = attempt.take_graph(stage, m)
    input_gradients = attempt.context.runtime.backward(output, gradients)
    for kind, of_stage in attempt.left(instruction).values():
        attempt.keep(kind, of_stage, m, input_gradients)
    return output


def _make_again(instruction: Recompute, attempt: Attempt) -> None:
    """Makes the dropped tensors of a forward from its kept ones."""
    stage, m = instruction.stage, instruction.micro_batch
    attempt.await_others(instruction)
    _bind_anew(attempt, stage)
    attempt.saved_activations(stage, m).recompute()


def _keep_graph(attempt: Attempt, stage: int, micro_batch: int, output: StageOutput) -> None:
    """Keeps a graph. It starts at its output but does not need the output's values, which may be
    sent by now: their storage is released.
    """
    for tensor in output.tensors.values():
        release_values(tensor)
    attempt.keep_graph(stage, micro_batch, output)


def _bind_anew(attempt: Attempt, stage: int) -> None:
    """Waits for the weights if they may have been released since the forward."""
    if attempt.context.plan.rebinds_weights:
        attempt.stages.bound(attempt.stages.backward_key(stage), grads=True)


def _forward_with_graph(instruction: Forward, attempt: Attempt) -> None:
    """Runs a FORWARD with ``keep=all`` or ``selective``: both lists have the same stages then."""
    stage, m = instruction.stage, instruction.micro_batch
    inputs = attempt.inputs(instruction)
    bound = attempt.stages.bound(StageKey(stage, Phase.FORWARD), grads=True)
    storage = attempt.forward_storage(stage, m, instruction.drop)
    output = _run(attempt, bound, inputs, m, autograd=True, storage=storage)
    attempt.count_loss(m, output)
    _hand_on(instruction, attempt, output.tensors)
    _keep_graph(attempt, stage, m, output)


def _forward_for_checkpoints(instruction: Forward, attempt: Attempt) -> None:
    """Runs a FORWARD with ``keep=input``, which leaves the inputs of the backward stages that start
    inside this stage.

    The last forward stage has no reader of its output, because RECOMPUTE counts its loss. It stops
    at the last checkpoint.
    """
    stage, m = instruction.stage, instruction.micro_batch
    blocks = attempt.context.routing.layout.forward[stage].blocks
    left = attempt.left(instruction)
    stop = max(left, default=blocks.start)
    tensors = attempt.inputs(instruction)
    checkpoints: dict[int, Mapping[str, torch.Tensor]] = {blocks.start: tensors}
    if stop > blocks.start:
        bound = attempt.stages.bound(StageKey(stage, Phase.FORWARD), grads=False)
        inner = [start for start in left if blocks.start < start < stop]
        output = _run(attempt, bound[: stop - blocks.start], tensors, m, checkpoints_at=inner)
        checkpoints |= {**output.checkpoints, stop: output.tensors}
    for block, (kind, of_stage) in left.items():
        attempt.keep(kind, of_stage, m, checkpoints[block])


def _forward_only(instruction: Forward, attempt: Attempt) -> None:
    """Runs a FORWARD with ``keep=none``: evaluation."""
    stage, m = instruction.stage, instruction.micro_batch
    inputs = attempt.inputs(instruction)
    bound = attempt.stages.bound(StageKey(stage, Phase.FORWARD), grads=False)
    output = _run(attempt, bound, inputs, m)
    attempt.count_loss(m, output)
    _hand_on(instruction, attempt, output.tensors)


_FORWARDS: Mapping[Keep, Callable[[Forward, Attempt], None]] = {
    Keep.ALL: _forward_with_graph,
    Keep.SELECTIVE: _forward_with_graph,
    Keep.INPUT: _forward_for_checkpoints,
    Keep.NONE: _forward_only,
}


def _hand_on(instruction: Forward, attempt: Attempt, tensors: Mapping[str, torch.Tensor]) -> None:
    for kind, of_stage in attempt.left(instruction).values():
        attempt.keep(kind, of_stage, instruction.micro_batch, tensors)


def _run(
    attempt: Attempt,
    bound: Sequence[BoundBlock],
    inputs: Mapping[str, torch.Tensor],
    micro_batch: int,
    *,
    autograd: bool = False,
    checkpoints_at: Collection[int] = (),
    storage: ForwardStorage | None = None,
    output_read: bool = True,
) -> StageOutput:
    job = attempt.job
    return attempt.context.runtime.forward(
        bound,
        inputs,
        job.batches[micro_batch],
        data_position=job.data_position,
        micro_batch_index=micro_batch,
        training=job.phase == "train",
        loss_weight=job.loss_weight,
        checkpoints_at=checkpoints_at,
        autograd=autograd,
        storage=storage,
        output_read=output_read,
    )
