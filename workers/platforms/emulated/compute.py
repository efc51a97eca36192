"""What emulated devices do in their own way: compute instructions and swaps.

There is no graph to split and nothing to move: a split backward leaves the factors of its gradients
for later, a recomputation of dropped operators and a swap take time only. Everything else is done
by the handlers of real devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch

from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Keep,
    Opcode,
    Phase,
    Recompute,
    SwapIn,
    SwapOut,
)
from penstock.workers.attempt import Attempt
from penstock.workers.platforms.emulated.device import EmulatedDevice, SwapKey
from penstock.workers.platforms.emulated.runtime import Deferred, EmulatedOutput, EmulatedRuntime
from penstock.workers.state.weights import StageKey


def device_of(attempt: Attempt) -> EmulatedDevice:
    """The attempt's device."""
    device = attempt.context.device
    assert isinstance(device, EmulatedDevice)
    return device


def forward(instruction: Forward, attempt: Attempt) -> None:
    """Run a forward stage; leaves what a backward needs, or checkpoints, as ``keep`` says."""
    stage, m, keep = instruction.stage, instruction.micro_batch, instruction.keep
    blocks = attempt.context.flow.layout.forward[stage].blocks
    inputs, left = attempt.inputs(instruction), attempt.left(instruction)
    if keep is Keep.INPUT and not left.keys() - {blocks.start}:
        for kind, of_stage in left.values():  # it computes nothing, so it has no weights
            attempt.keep(kind, of_stage, m, inputs)
        return
    trains = keep in (Keep.ALL, Keep.SELECTIVE)
    inner = [block for block in left if block < blocks.stop]
    output = _run(attempt, StageKey(stage, Phase.FORWARD), inputs, m, trains, inner)
    found = {**output.checkpoints, blocks.stop: output.tensors}
    for block, (kind, of_stage) in left.items():
        attempt.keep(kind, of_stage, m, found[block])
    if keep is not Keep.INPUT:
        attempt.count_loss(m, output)
    if trains:
        attempt.keep_graph(stage, m, output)
    if keep is Keep.SELECTIVE:
        device_of(attempt).dropped.add((stage, m))


def recompute(instruction: Recompute, attempt: Attempt) -> None:
    """From the checkpoint; nothing to make again after a forward that dropped operators."""
    stage, m = instruction.stage, instruction.micro_batch
    device = device_of(attempt)
    if (stage, m) in device.dropped:
        device.dropped.remove((stage, m))
        device.await_swap(stage, m)
        _await_weights(stage, attempt)
    else:
        inputs = attempt.inputs(instruction)
        output = _run(attempt, attempt.stages.backward_key(stage), inputs, m, True, ())
        attempt.count_loss(m, output)
        attempt.keep_graph(stage, m, output)
    attempt.await_others(instruction)


def backward(instruction: Backward, attempt: Attempt) -> None:
    """Both halves at once."""
    _runtime(attempt).backward_weight(_input_gradient(instruction, attempt))


def backward_input(instruction: BackwardInput, attempt: Attempt) -> None:
    """The input's gradient now, those of the weights when BACKWARD_WEIGHT names the micro-batch."""
    deferred = _input_gradient(instruction, attempt)
    device_of(attempt).deferred[instruction.stage, instruction.micro_batch] = deferred


def backward_weight(instruction: BackwardWeight, attempt: Attempt) -> None:
    """Add up what was left for later."""
    device = device_of(attempt)
    for m in instruction.micro_batches:
        _runtime(attempt).backward_weight(device.deferred.pop((instruction.stage, m)))


def swap_out(instruction: SwapOut, attempt: Attempt) -> None:
    """On the outgoing stream, or the link to the peer."""
    device = device_of(attempt)
    device.swap_out(_key(instruction), _bytes(instruction, attempt))


def swap_in(instruction: SwapIn, attempt: Attempt) -> None:
    """On the incoming stream, or the link from the peer, once it is out."""
    device = device_of(attempt)
    device.swap_in(_key(instruction), _bytes(instruction, attempt))


OWN: Mapping[Opcode, Callable[[Any, Attempt], None]] = MappingProxyType(
    {
        Opcode.FORWARD: forward,
        Opcode.RECOMPUTE: recompute,
        Opcode.BACKWARD: backward,
        Opcode.BACKWARD_INPUT: backward_input,
        Opcode.BACKWARD_WEIGHT: backward_weight,
        Opcode.SWAP_OUT: swap_out,
        Opcode.SWAP_IN: swap_in,
    }
)


def _input_gradient(instruction: Backward | BackwardInput, attempt: Attempt) -> Deferred:
    """Hand the gradient of the stage's input on; returns what is left for the weights.

    Weights may have been released since the forward; then they are awaited again.
    """
    stage, m = instruction.stage, instruction.micro_batch
    device_of(attempt).await_swap(stage, m)
    _await_weights(stage, attempt)
    gradients = attempt.inputs(instruction)
    attempt.stages.begin_backward(stage)
    output: object = attempt.take_graph(stage, m)
    assert isinstance(output, EmulatedOutput)
    found, deferred = _runtime(attempt).backward_input(output, gradients)
    for kind, of_stage in attempt.left(instruction).values():
        attempt.keep(kind, of_stage, m, found)
    return deferred


def _run(
    attempt: Attempt,
    key: StageKey,
    inputs: Mapping[str, torch.Tensor],
    micro_batch: int,
    trains: bool,
    starts: Collection[int],
) -> EmulatedOutput:
    """Where the numbers cost nothing, a forward need not stop at its last checkpoint."""
    job = attempt.job
    bound: Any = attempt.stages.bound(key, grads=trains)
    return _runtime(attempt).forward(
        bound,
        inputs,
        job.batches[micro_batch],
        data_position=job.data_position,
        micro_batch_index=micro_batch,
        training=job.phase == "train",
        loss_weight=job.loss_weight,
        checkpoints_at=starts,
    )


def _runtime(attempt: Attempt) -> EmulatedRuntime:
    runtime: object = attempt.context.runtime
    assert isinstance(runtime, EmulatedRuntime)
    return runtime


def _await_weights(stage: int, attempt: Attempt) -> None:
    attempt.stages.bound(attempt.stages.backward_key(stage), grads=True)


def _key(swap: SwapOut | SwapIn) -> SwapKey:
    return SwapKey(swap.stage, swap.micro_batch, swap.fraction, swap.peer)


def _bytes(swap: SwapOut | SwapIn, attempt: Attempt) -> float:
    durations = device_of(attempt).durations(attempt.context.flow.facts)
    return swap.fraction * durations.kept_bytes(swap.stage, swap.micro_batch)
