"""The handlers of emulated devices: those of real ones, each with the time of its instruction.

Instructions that compute, swap, or shard weights have handlers of their own. Graphs and bytes do
not exist. So a split backward leaves the factors of its gradients for later. A recomputation of
dropped operators and a swap only take time. With sharded weights, fetches, reductions and offloads
take the times of collectives.
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
    FetchWeights,
    Forward,
    Instruction,
    Keep,
    OffloadGradients,
    Opcode,
    Phase,
    Recompute,
    ReduceGradients,
    SwapIn,
    SwapOut,
)
from penstock.protocol.plan.semantics import SEMANTICS, Lane
from penstock.protocol.run.trace import TraceLane
from penstock.workers.attempt import Attempt
from penstock.workers.device import Copied
from penstock.workers.handlers import HANDLERS, Handler, state
from penstock.workers.platforms.emulated.collectives import Rings
from penstock.workers.platforms.emulated.device import EmulatedDevice, SwapKey
from penstock.workers.platforms.emulated.runtime import Deferred, EmulatedOutput, EmulatedRuntime
from penstock.workers.state.weights import StageKey, arrays_of
from penstock.workers.telemetry.account import IdleCause


def device_of(attempt: Attempt) -> EmulatedDevice:
    """Returns the attempt's device."""
    device = attempt.context.device
    assert isinstance(device, EmulatedDevice)
    return device


def forward(instruction: Forward, attempt: Attempt) -> None:
    """Runs a forward stage; leaves the inputs of a backward, or checkpoints, by ``keep``."""
    stage, m, keep = instruction.stage, instruction.micro_batch, instruction.keep
    blocks = attempt.context.routing.layout.forward[stage].blocks
    inputs, left = attempt.inputs(instruction), attempt.left(instruction)
    if keep is Keep.INPUT and not left.keys() - {blocks.start}:
        for kind, of_stage in left.values():  # it computes nothing, so it has no weights
            attempt.keep(kind, of_stage, m, inputs)
        return
    trains = keep in (Keep.ALL, Keep.SELECTIVE)
    inner = [block for block in left if block < blocks.stop]
    output = _run(attempt, StageKey(stage, Phase.FORWARD), inputs, m, trains, inner)
    tensors_at = {**output.checkpoints, blocks.stop: output.tensors}
    for block, (kind, of_stage) in left.items():
        attempt.keep(kind, of_stage, m, tensors_at[block])
    if keep is not Keep.INPUT:
        attempt.count_loss(m, output)
    if trains:
        attempt.keep_graph(stage, m, output)
    if keep is Keep.SELECTIVE:
        device_of(attempt).dropped.add((stage, m))


def recompute(instruction: Recompute, attempt: Attempt) -> None:
    """Recomputes a stage from its checkpoint. After a forward with dropped operators only time
    passes.
    """
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
    """Runs both halves of a backward at once."""
    _runtime(attempt).backward_weight(_input_gradient(instruction, attempt))


def backward_input(instruction: BackwardInput, attempt: Attempt) -> None:
    """Makes the input's gradient now; BACKWARD_WEIGHT of the micro-batch makes those of the
    weights.
    """
    deferred = _input_gradient(instruction, attempt)
    device_of(attempt).deferred[instruction.stage, instruction.micro_batch] = deferred


def backward_weight(instruction: BackwardWeight, attempt: Attempt) -> None:
    """Adds the gradients that BACKWARD_INPUT left."""
    device = device_of(attempt)
    for m in instruction.micro_batches:
        _runtime(attempt).backward_weight(device.deferred.pop((instruction.stage, m)))


def swap_out(instruction: SwapOut, attempt: Attempt) -> None:
    """Swaps on the outgoing stream, or the link to the peer."""
    device = device_of(attempt)
    num_bytes = _bytes(instruction, attempt)
    device.swap_out(_key(instruction), num_bytes)
    if instruction.peer is None:
        attempt.timeline.copied("d2h", "swaps", Copied(num_bytes, *device.copies[-1]))


def swap_in(instruction: SwapIn, attempt: Attempt) -> None:
    """Swaps on the incoming stream, or the link from the peer, once the activations are out."""
    device = device_of(attempt)
    num_bytes = _bytes(instruction, attempt)
    device.swap_in(_key(instruction), num_bytes)
    if instruction.peer is None:
        attempt.timeline.copied("h2d", "swaps", Copied(num_bytes, *device.copies[-1]))


def _input_gradient(instruction: Backward | BackwardInput, attempt: Attempt) -> Deferred:
    """Passes the gradient of the stage's input on; returns the deferred part for the weights.

    Weights may have been released since the forward; then they are awaited again.
    """
    stage, m = instruction.stage, instruction.micro_batch
    device_of(attempt).await_swap(stage, m)
    _await_weights(stage, attempt)
    gradients = attempt.inputs(instruction)
    attempt.stages.begin_backward(stage)
    output: object = attempt.take_graph(stage, m)
    assert isinstance(output, EmulatedOutput)
    input_gradients, deferred = _runtime(attempt).backward_input(output, gradients)
    for kind, of_stage in attempt.left(instruction).values():
        attempt.keep(kind, of_stage, m, input_gradients)
    return deferred


def _run(
    attempt: Attempt,
    key: StageKey,
    inputs: Mapping[str, torch.Tensor],
    micro_batch: int,
    trains: bool,
    starts: Collection[int],
) -> EmulatedOutput:
    """Runs a forward. The numbers cost nothing, so a forward need not stop at its last
    checkpoint.
    """
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
    durations = device_of(attempt).durations(attempt.context.routing.facts)
    return swap.fraction * durations.kept_bytes(swap.stage, swap.micro_batch)


def fetch_weights(instruction: FetchWeights, attempt: Attempt) -> None:
    """Fetches weights. With ``shards_weights`` the device's share comes from the host, then the
    rest around a ring; the first use waits until all devices have fetched theirs.
    """
    device, number = device_of(attempt), 0
    rings = _rings(attempt) if _shares(attempt) else None
    blocks = attempt.stages.blocks(StageKey(instruction.stage, instruction.phase))
    if rings is not None:
        number = rings.reserve(device.emulation.costs.of(blocks).weight_bytes)
    device.fetches.append((rings, number, _fetches_from(attempt, blocks)))
    state.fetch_weights(instruction, attempt)


def reduce_gradients(instruction: ReduceGradients, attempt: Attempt) -> None:
    """Sums go to the root over the link, or with ``shards_weights`` around a ring."""
    device, stage = device_of(attempt), instruction.stage
    routing = attempt.context.routing
    cost = device.emulation.costs.of(routing.layout.backward[stage].blocks)
    if _shares(attempt):
        rings = _rings(attempt)
        number = rings.reserve(cost.gradient_bytes)
        rings.enter(number, device.compute.free_at)
        device.scatters[stage] = number
    elif not routing.reduction.publishes(stage):
        root = routing.reduction.root_device(stage)
        device.sends(attempt.context.device_index, root, cost.device_gradient_bytes)
    state.reduce_gradients(instruction, attempt)


def offload_gradients(instruction: OffloadGradients, attempt: Attempt) -> None:
    """Publishes the sums; the copy starts when the gradients are summed."""
    device = device_of(attempt)
    scatter = device.scatters.pop(instruction.stage, None)
    if scatter is not None:
        device.needs(_rings(attempt).end(scatter), IdleCause.GRADIENTS)
    state.offload_gradients(instruction, attempt)


def _fetches_from(attempt: Attempt, blocks: range) -> float | None:
    """Returns the earliest start of the copy: the device's present time, if nothing must be
    awaited; otherwise None.

    The loading thread may be late because of Python; the emulated device is not.
    """
    context = attempt.context
    here = (
        context.ownership.owner[array.block] == context.weights.node
        and context.memory.control.readable(array.block, attempt.job.base_version)
        for array in arrays_of(context.table, blocks)
    )
    return device_of(attempt).compute.free_at if all(here) else None


def _shares(attempt: Attempt) -> bool:
    plan = attempt.context.plan
    return plan.shards_weights and plan.num_devices > 1


def _rings(attempt: Attempt) -> Rings:
    device = device_of(attempt)
    if device.rings is None:
        emulation = device.emulation
        device.rings = Rings(attempt.context, attempt.job, emulation.cluster, emulation.time_scale)
    return device.rings


def _issued(handler: Handler) -> Handler:
    def run(instruction: Instruction, attempt: Attempt) -> None:
        device = device_of(attempt)
        device.begin()
        handler(instruction, attempt)
        if device.copies:
            starts, ends = zip(*device.copies, strict=True)
            attempt.timeline.loaded(TraceLane.COPY, str(instruction), min(starts), max(ends))

    return run


def _computed(handler: Handler) -> Handler:
    """Runs the handler's numbers first: they decide what the instruction waits for. Then spends its
    time.
    """

    def run(instruction: Instruction, attempt: Attempt) -> None:
        device = device_of(attempt)
        backward = isinstance(instruction, (Backward, BackwardInput))
        device.begin(IdleCause.GRADIENTS if backward else IdleCause.ACTIVATIONS)
        handler(instruction, attempt)
        seconds = device.durations(attempt.context.routing.facts).seconds(instruction)
        start, end = device.compute_for(seconds, attempt.context.abort)
        attempt.timeline.ran(start, end, device.awaited)

    return run


def _sent(handler: Handler) -> Handler:
    def run(instruction: Any, attempt: Attempt) -> None:
        device, sender = device_of(attempt), attempt.context.device_index
        device.begin()
        num_bytes = device.durations(attempt.context.routing.facts).num_bytes(instruction)
        device.sends(sender, instruction.peer, num_bytes)
        handler(instruction, attempt)

    return run


_OWN: Mapping[Opcode, Handler] = MappingProxyType(
    {
        Opcode.FORWARD: forward,
        Opcode.RECOMPUTE: recompute,
        Opcode.BACKWARD: backward,
        Opcode.BACKWARD_INPUT: backward_input,
        Opcode.BACKWARD_WEIGHT: backward_weight,
        Opcode.SWAP_OUT: swap_out,
        Opcode.SWAP_IN: swap_in,
        Opcode.FETCH_WEIGHTS: fetch_weights,
        Opcode.REDUCE_GRADIENTS: reduce_gradients,
        Opcode.OFFLOAD_GRADIENTS: offload_gradients,
    }
)

_AROUND: Mapping[Lane | None, Callable[[Handler], Handler]] = MappingProxyType(
    {Lane.COMPUTE: _computed, Lane.LINK: _sent}
)

EMULATED_HANDLERS: Mapping[Opcode, Handler] = MappingProxyType(
    {
        opcode: _AROUND.get(SEMANTICS[opcode].lane, _issued)(_OWN.get(opcode, handler))
        for opcode, handler in HANDLERS.items()
    }
)
"""Handlers by opcode: emulated ones where they differ, the rest as on real devices."""
