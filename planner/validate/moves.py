"""Rules of all instructions that move something: tensors, weights, activations and gradients.

Sends and receives of tensors come first, then fetches and releases of weights, swaps of
activations, and last REDUCE_GRADIENTS, OFFLOAD_GRADIENTS and UPDATE. Where weights are sharded,
every fetch and every reduction is a collective over all devices. Collectives match by position, so
every device must enter the same ones in the same order.
"""

from __future__ import annotations

from penstock.planner.schedule.tensors import (
    Receive,
    Send,
    Tensor,
    TensorKind,
    endpoints,
    transferred,
)
from penstock.planner.validate.world import Buffer, DeviceState, Event, Graph, RuleBroken, World
from penstock.protocol.plan.instructions import (
    FetchWeights,
    OffloadGradients,
    Phase,
    ReduceGradients,
    ReleaseWeights,
    SwapIn,
    SwapOut,
    Update,
)
from penstock.protocol.plan.plan import StageRange


def send(world: World, device: DeviceState, sending: Send) -> None:
    """Takes a tensor that was made on this device."""
    tensor = transferred(sending)
    event = _check(world, device, tensor, sending.peer, sends=True)
    if event in world.happened:
        raise RuleBroken(f"the {tensor} was sent before")
    if event not in device.held:
        raise RuleBroken(f"the {tensor} does not exist on this device at this point")
    device.held.remove(event)
    device.sent[sending.peer].append(event)
    world.happen(event)


def receive(world: World, device: DeviceState, receiving: Receive) -> None:
    """Posts a buffer for a tensor that another device sends."""
    tensor = transferred(receiving)
    event = _check(world, device, tensor, receiving.peer, sends=False)
    received = device.received[receiving.peer]
    if event in received:
        raise RuleBroken(f"a receive of the {tensor} was posted before")
    device.posted[event] = device.position
    received[event] = device.position


def places_of(world: World, tensor: Tensor) -> tuple[int, int] | None:
    """Returns the devices that make and use a tensor, or ``None`` if no device can need it."""
    kind, stage, m = tensor.kind, tensor.stage, tensor.micro_batch
    if m >= len(world.route_of):
        return None
    skipped = False
    if kind is TensorKind.CHECKPOINT and stage < len(world.backward.stages):
        skipped = not world.is_run(world.layout.checkpoint_source(stage), m)
    places = endpoints(world.layout, kind, stage, skipped=skipped)
    routes = (world.forward if kind is TensorKind.ACTIVATION else world.backward).routes
    return None if places is None or routes[stage] != world.route_of[m] else places


def _check(world: World, device: DeviceState, tensor: Tensor, peer: int, *, sends: bool) -> Event:
    places = places_of(world, tensor)
    if places is None:
        raise RuleBroken(f"there is no {tensor}")
    stage, m = tensor.stage, tensor.micro_batch
    if tensor.kind is TensorKind.ACTIVATION and not world.is_run(stage + 1, m):
        raise RuleBroken(f"no device uses the {tensor}: FORWARD {stage + 1} {m} is missing")
    here, other = places if sends else places[::-1]
    if places[0] == places[1]:
        raise RuleBroken(f"the {tensor} is produced and used on device {here}: nothing to transfer")
    if (here, other) != (device.index, peer):
        verb = "sent" if sends else "received"
        raise RuleBroken(f"wrong peer: the {tensor} is {verb} on device {here}, peer={other}")
    return world.events.tensor(tensor.kind, stage, m)


def enter(world: World, device: DeviceState, kind: str, stage: StageRange) -> int:
    """Enters the device's next collective and returns its number."""
    number = device.collectives
    device.collectives += 1
    if number == len(world.collectives):
        world.collectives.append((kind, stage, 0))
    first_kind, first_stage, entered = world.collectives[number]
    if (kind, stage.blocks) != (first_kind, first_stage.blocks):
        raise RuleBroken(
            f"collective {number} is the {kind} of blocks {_blocks(stage)} here, and the"
            f" {first_kind} of blocks {_blocks(first_stage)} elsewhere"
        )
    world.collectives[number] = (first_kind, first_stage, entered + 1)
    if entered + 1 == len(world.devices):
        world.happen(world.events.collective(number))
    return number


def wait_for_collective(world: World, number: int) -> Event | None:
    """Returns the collective's event while not all devices have entered it, ``None`` afterwards."""
    event = world.events.collective(number)
    return None if event in world.happened else event


def _blocks(stage: StageRange) -> str:
    return f"[{stage.start}, {stage.stop})"


def fetch(world: World, device: DeviceState, fetching: FetchWeights) -> None:
    """Takes a free buffer and begins to fill it with the weights of a stage."""
    side = world.forward if fetching.phase is Phase.FORWARD else world.backward
    stage = fetching.stage
    if stage >= len(side.stages):
        raise RuleBroken(f"there are {len(side.stages)} {side.phase} stages, numbered from 0")
    if side.devices[stage] != device.index:
        raise RuleBroken(f"{side.phase} stage {stage} is on device {side.devices[stage]}")
    buffer = (stage, fetching.phase)
    if buffer in device.buffers:
        raise RuleBroken("these weights are already here")
    most = world.rules.weight_buffers
    if len(device.buffers) >= most:
        raise RuleBroken(f"no free buffer: all {most} weight buffers are in use")
    device.buffers[buffer] = False
    if world.rules.shards_weights:
        device.gathers[buffer] = enter(world, device, "all-gather", side.stages[stage])


def release(world: World, device: DeviceState, releasing: ReleaseWeights) -> None:
    """Frees a buffer that was used, and that no kept activations rely on."""
    buffer = (releasing.stage, releasing.phase)
    if buffer not in device.buffers:
        raise RuleBroken("these weights are not here: never fetched, or released before")
    if not world.rules.rebinds_weights:
        for (stage, micro_batch), graph in device.graphs.items():
            if graph.buffer == buffer:
                raise RuleBroken(
                    f"activations of stage {stage}, micro-batch {micro_batch} still wait for their"
                    " BACKWARD, which needs these weights"
                )
    if not device.buffers.pop(buffer):
        raise RuleBroken("these weights were fetched and never used")


def wait_for_weights(world: World, device: DeviceState, buffer: Buffer) -> Event | None:
    """Checks that weights are fetched. Returns the collective that brings them while it is under
    way.
    """
    if buffer not in device.buffers:
        raise RuleBroken(
            f"weights of {buffer[1]} stage {buffer[0]} are not here: not fetched yet, or already"
            " released"
        )
    if not world.rules.shards_weights:
        return None
    return wait_for_collective(world, device.gathers[buffer])


def weights_of_backward(world: World, device: DeviceState, stage: int) -> Buffer:
    """Returns the backward stage's own buffer, or that of the same forward stage if only this is
    fetched.
    """
    ours, shared = (stage, Phase.BACKWARD), (stage, Phase.FORWARD)
    if ours not in device.buffers and shared in device.buffers and world.layout.is_coupled(stage):
        return shared
    return ours


def swap_out(world: World, device: DeviceState, swap: SwapOut) -> None:
    """Takes a part of what a FORWARD kept away from the device."""
    graph = _kept(device, swap)
    if graph.swapped is not None:
        raise RuleBroken("a part of these activations was swapped out before")
    if not 0.0 < swap.fraction <= 1.0:
        raise RuleBroken(f"fraction is {swap.fraction}, expected more than 0 and at most 1")
    if swap.peer is not None and (swap.peer >= len(world.devices) or swap.peer == device.index):
        raise RuleBroken(f"wrong peer: there are {len(world.devices)} devices, and this is one")
    graph.swapped = (swap.fraction, swap.peer)


def swap_in(world: World, device: DeviceState, swap: SwapIn) -> None:
    """Brings back what the SWAP_OUT with the same fields took."""
    del world
    graph = _kept(device, swap)
    if graph.swapped is None:
        raise RuleBroken("these activations are not swapped out")
    if graph.swapped != (swap.fraction, swap.peer):
        fraction, peer = graph.swapped
        where = "the host" if peer is None else f"device {peer}"
        raise RuleBroken(
            f"the SWAP_OUT took fraction {fraction} to {where}; this brings back another"
        )
    graph.swapped = None


def _kept(device: DeviceState, swap: SwapOut | SwapIn) -> Graph:
    graph = device.graphs.get((swap.stage, swap.micro_batch))
    if graph is None or not graph.forwarded:
        raise RuleBroken("no activations: no FORWARD with keep=all or keep=selective ran before it")
    return graph


def reduce(world: World, device: DeviceState, reducing: ReduceGradients) -> None:
    """Takes the final gradients of a stage: it sends them to their root, or enters a reduce-scatter
    where weights are sharded.
    """
    stage = _final_stage(world, device, reducing)
    if stage in world.offloaded:
        raise RuleBroken("these gradients were offloaded before")
    if stage in world.reduced:
        raise RuleBroken("these gradients were reduced before")
    world.reduced.add(stage)
    world.happen(world.events.reduction(stage))
    if world.rules.shards_weights:
        number = enter(world, device, "reduce-scatter", world.backward.stages[stage])
        world.scatters[stage] = number


def offload(world: World, device: DeviceState, offloading: OffloadGradients) -> Event | None:
    """Takes the final gradients of a stage.

    Where the plan reduces gradients, REDUCE_GRADIENTS ran before. The root of a reduction waits for
    the sum of all routes and offloads it; elsewhere nothing is left to offload.
    """
    stage = _final_stage(world, device, offloading)
    if stage in world.offloaded:
        raise RuleBroken("these gradients were offloaded before")
    if world.reduces and stage not in world.reduced:
        raise RuleBroken(
            "the plan reduces gradients, and no REDUCE_GRADIENTS of these ran before it"
        )
    if stage in world.scatters:
        awaited = wait_for_collective(world, world.scatters[stage])
        if awaited is not None:
            return awaited
    for sender in world.reduction.senders(stage):
        if sender not in world.reduced:
            return world.events.reduction(sender)
    world.offloaded.add(stage)
    world.happen(world.events.offload(stage))
    return None


def update(world: World, device: DeviceState, updating: Update) -> Event | None:
    """Takes the offloaded gradients of a block, of all routes."""
    block = updating.block
    if block >= world.layout.num_blocks:
        raise RuleBroken(f"there are {world.layout.num_blocks} blocks, numbered from 0")
    if block in world.updated:
        raise RuleBroken("this work was done before")
    if updating.flush and updating.resident:
        raise RuleBroken("state that stays on the device (resident) is not flushed")
    for stage in world.backward_stages_of[block]:
        if stage in world.offloaded:
            continue
        if world.backward.devices[stage] == device.index:
            raise RuleBroken(
                f"the gradients of the block are not final: OFFLOAD_GRADIENTS {stage} did not run"
                " before it"
            )
        return world.events.offload(stage)
    world.updated.add(block)
    return None


def _final_stage(
    world: World, device: DeviceState, instruction: ReduceGradients | OffloadGradients
) -> int:
    stage, side = instruction.stage, world.backward
    if stage >= len(side.stages) or side.devices[stage] != device.index:
        raise RuleBroken("this device has no such backward stage")
    if world.remaining[stage]:
        missing = next(
            m
            for m in world.layout.microbatches_of_route[side.routes[stage]]
            if not side.weighted[stage * len(world.route_of) + m]
        )
        split = (stage, missing) in device.deferred
        name = "BACKWARD_WEIGHT" if split else "BACKWARD"
        raise RuleBroken(f"the gradients are not final: {name} of micro-batch {missing} is missing")
    return stage
