"""What emulated devices do in their own way: split backwards, dropped operators, swaps.

There is no graph to split and nothing to move: a split backward leaves the factors of its gradients
for later, a recomputation of dropped operators and a swap take time only. Everything else is done
by the handlers of real devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from penstock.protocol.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Keep,
    Opcode,
    Recompute,
    RecomputeAfter,
    SwapIn,
    SwapOut,
)
from penstock.workers.attempt import Attempt
from penstock.workers.emulated.device import EmulatedDevice, SwapKey
from penstock.workers.emulated.runtime import EmulatedOutput, EmulatedRuntime
from penstock.workers.handlers import compute


def device_of(attempt: Attempt) -> EmulatedDevice:
    """The attempt's device."""
    device = attempt.bench.device
    assert isinstance(device, EmulatedDevice)
    return device


def forward(instruction: Forward, attempt: Attempt) -> None:
    """What is dropped takes no memory here, and so is kept."""
    if instruction.keep is Keep.SELECTIVE:
        device_of(attempt).dropped.add((instruction.stage, instruction.micro_batch))
        instruction = replace(instruction, keep=Keep.ALL, drop=())
    compute.forward(instruction, attempt)


def recompute(instruction: Recompute, attempt: Attempt) -> None:
    """Nothing to make again after a forward that dropped operators."""
    stage, m = instruction.stage, instruction.micro_batch
    device = device_of(attempt)
    if (stage, m) not in device.dropped:
        compute.recompute(instruction, attempt)
        return
    device.dropped.remove((stage, m))
    device.await_swap(stage, m)
    _await_weights(stage, attempt)
    if instruction.after is RecomputeAfter.GRADIENT:
        attempt.await_posted("gradient", stage + 1, m)


def backward(instruction: Backward, attempt: Attempt) -> None:
    """Weights may have been released since the forward; then they are awaited again."""
    device_of(attempt).await_swap(instruction.stage, instruction.micro_batch)
    _await_weights(instruction.stage, attempt)
    compute.backward(instruction, attempt)


def backward_input(instruction: BackwardInput, attempt: Attempt) -> None:
    """The input's gradient now, those of the weights when BACKWARD_WEIGHT names the micro-batch."""
    stage, m = instruction.stage, instruction.micro_batch
    layout, device = attempt.bench.flow.layout, device_of(attempt)
    device.await_swap(stage, m)
    _await_weights(stage, attempt)
    gradients = {} if layout.is_last_backward(stage) else attempt.take("gradient", stage + 1, m)
    output: object = attempt.take_graph(stage, m)
    assert isinstance(output, EmulatedOutput)
    found, device.deferred[stage, m] = _runtime(attempt).backward_input(output, gradients)
    if not layout.is_first_backward(stage):
        attempt.keep("gradient", stage, m, found)


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


def _runtime(attempt: Attempt) -> EmulatedRuntime:
    runtime: object = attempt.bench.runtime
    assert isinstance(runtime, EmulatedRuntime)
    return runtime


def _await_weights(stage: int, attempt: Attempt) -> None:
    attempt.stages.bound(attempt.stages.backward_key(stage), grads=True)


def _key(swap: SwapOut | SwapIn) -> SwapKey:
    return SwapKey(swap.stage, swap.micro_batch, swap.fraction, swap.peer)


def _bytes(swap: SwapOut | SwapIn, attempt: Attempt) -> float:
    durations = device_of(attempt).durations(attempt.bench.flow.layout)
    return swap.fraction * durations.kept_bytes(swap.stage, swap.micro_batch)
