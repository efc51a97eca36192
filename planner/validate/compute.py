"""Rules of FORWARD, RECOMPUTE, BACKWARD and its halves.

Each function checks an instruction and lets it happen. It returns the event that the device has to
wait for, or ``None`` when the instruction has run. It raises :class:`.world.RuleBroken`.
"""

from __future__ import annotations

from penstock.planner.validate.moves import wait_for_weights, weights_of_backward
from penstock.planner.validate.world import (
    Buffer,
    DeviceState,
    Event,
    Graph,
    RuleBroken,
    Side,
    World,
)
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Keep,
    Phase,
    Recompute,
    RecomputeAfter,
)


def forward(world: World, device: DeviceState, work: Forward) -> Event | None:
    """Takes the batch or an activation, and leaves the needed parts of its output and its graph."""
    s, m = work.stage, work.micro_batch
    index = _check_work(world, device, world.forward, s, m, world.forward.done)
    _check_keep(world, work)
    buffer = (s, Phase.FORWARD)
    awaited = wait_for_weights(world, device, buffer)
    if awaited is None and not world.layout.is_first_forward(s):
        source = world.forward.devices[s - 1]
        awaited = _take(world, device, world.events.activation(s - 1, m), source)
    if awaited is not None:
        return awaited
    device.buffers[buffer] = True
    world.forward.done[index] = 1
    if work.keep is Keep.ALL or work.keep is Keep.SELECTIVE:
        incomplete = work.keep is Keep.SELECTIVE
        device.graphs[s, m] = Graph(buffer=buffer, forwarded=True, incomplete=incomplete)
    elif work.keep is Keep.INPUT:
        for b in world.layout.checkpoints_of(s):
            if not world.layout.is_first_backward(b):
                device.held.add(world.events.checkpoint(b, m))
    _leave_output(world, device, s, m)
    return None


def _check_keep(world: World, work: Forward) -> None:
    if (work.keep is Keep.NONE) is not world.rules.evaluation:
        raise RuleBroken("keep=none belongs into evaluation programs, and only keep=none does")
    keeps_graph = work.keep is Keep.ALL or work.keep is Keep.SELECTIVE
    if keeps_graph and not world.layout.is_coupled(work.stage):
        raise RuleBroken(
            f"keep={work.keep} needs a backward stage of the same number, blocks and device;"
            " use keep=input and RECOMPUTE"
        )
    if (work.keep is Keep.SELECTIVE) is not bool(work.drop):
        raise RuleBroken("keep=selective and operators to drop belong together")


def _leave_output(world: World, device: DeviceState, stage: int, micro_batch: int) -> None:
    """Leaves the output as the next forward's input, or as a checkpoint where that forward is left
    out.
    """
    layout = world.layout
    if layout.is_last_forward(stage):
        return
    following = layout.checkpoint_after(stage)
    if world.is_run(stage + 1, micro_batch):
        device.held.add(world.events.activation(stage, micro_batch))
    elif following is not None and not world.rules.evaluation:
        device.held.add(world.events.checkpoint(following, micro_batch))


def recompute(world: World, device: DeviceState, work: Recompute) -> Event | None:
    """Takes a checkpoint, or what a selective forward kept, and leaves a graph."""
    b, m = work.stage, work.micro_batch
    side = world.backward
    index = _check_work(world, device, side, b, m, side.recomputed)
    graph = device.graphs.get((b, m))
    if graph is not None and not graph.incomplete:
        raise RuleBroken("its FORWARD kept all activations (keep=all); there is nothing to redo")
    _check_swap(graph)
    buffer = _buffer(world, device, b, graph)
    awaited = wait_for_weights(world, device, buffer)
    if awaited is None and work.after is RecomputeAfter.GRADIENT:
        awaited = _wait_for_gradient(world, device, b, m, consume=False)
    if awaited is None and graph is None and not world.layout.is_first_backward(b):
        source = world.forward.devices[world.checkpoint_source(b, m)]
        awaited = _take(world, device, world.events.checkpoint(b, m), source)
    if awaited is not None:
        return awaited
    device.buffers[buffer] = True
    side.recomputed[index] = 1
    device.graphs[b, m] = Graph(buffer=buffer, forwarded=False)
    return None


def backward(world: World, device: DeviceState, work: Backward | BackwardInput) -> Event | None:
    """Takes a graph and a gradient, and leaves the input gradient; BACKWARD leaves the weight
    gradient too.
    """
    b, m = work.stage, work.micro_batch
    side = world.backward
    index = _check_work(world, device, side, b, m, side.done)
    graph = device.graphs.get((b, m))
    if graph is None:
        raise RuleBroken("no activations: neither RECOMPUTE nor FORWARD keep=all ran before it")
    if graph.incomplete:
        raise RuleBroken(
            "its FORWARD dropped operators, and no RECOMPUTE made them again before it"
        )
    _check_swap(graph)
    buffer = _buffer(world, device, b, graph)
    awaited = wait_for_weights(world, device, buffer)
    if awaited is None:
        awaited = _wait_for_gradient(world, device, b, m, consume=True)
    if awaited is not None:
        return awaited
    device.buffers[buffer] = True
    side.done[index] = 1
    del device.graphs[b, m]
    if not world.layout.is_first_backward(b):
        device.held.add(world.events.gradient(b, m))
    if type(work) is Backward:
        side.weighted[index] = 1
        world.remaining[b] -= 1
    else:
        device.deferred.add((b, m))
    return None


def backward_weight(world: World, device: DeviceState, work: BackwardWeight) -> None:
    """Takes what BACKWARD_INPUTs left. It reads no weights, so none need to be on the device."""
    side = world.backward
    if not work.micro_batches:
        raise RuleBroken("it names no micro-batch")
    for m in work.micro_batches:
        index = _check_work(world, device, side, work.stage, m, side.weighted)
        if (work.stage, m) not in device.deferred:
            raise RuleBroken(f"BACKWARD_INPUT of micro-batch {m} did not run before it")
        device.deferred.remove((work.stage, m))
        side.weighted[index] = 1
        world.remaining[work.stage] -= 1


def _check_work(
    world: World, device: DeviceState, side: Side, stage: int, micro_batch: int, done: bytearray
) -> int:
    """Checks that the stage exists, is this device's, and has not taken this micro-batch before.
    Returns the index of the work in ``done``.
    """
    count = len(world.route_of)
    if stage >= len(side.stages):
        raise RuleBroken(f"there are {len(side.stages)} {side.phase} stages, numbered from 0")
    if micro_batch >= count:
        raise RuleBroken(f"there are {count} micro-batches, from 0")
    if side.devices[stage] != device.index:
        raise RuleBroken(f"{side.phase} stage {stage} is on device {side.devices[stage]}")
    if side.routes[stage] != world.route_of[micro_batch]:
        raise RuleBroken(
            f"micro-batch {micro_batch} takes route {world.route_of[micro_batch]},"
            f" {side.phase} stage {stage} is of route {side.routes[stage]}"
        )
    index = stage * count + micro_batch
    if done[index]:
        raise RuleBroken("this work was done before")
    return index


def _check_swap(graph: Graph | None) -> None:
    if graph is not None and graph.swapped is not None:
        raise RuleBroken("a part of its activations is swapped out, and no SWAP_IN ran before it")


def _buffer(world: World, device: DeviceState, stage: int, graph: Graph | None) -> Buffer:
    """Returns the weights that a backward stage uses: those of its graph, unless it reads them
    again.
    """
    if graph is not None and not world.rules.rebinds_weights:
        return graph.buffer
    return weights_of_backward(world, device, stage)


def _wait_for_gradient(
    world: World, device: DeviceState, stage: int, micro_batch: int, *, consume: bool
) -> Event | None:
    if world.layout.is_last_backward(stage):
        return None
    source = world.backward.devices[stage + 1]
    event = world.events.gradient(stage + 1, micro_batch)
    return _take(world, device, event, source, consume=consume)


def _take(
    world: World, device: DeviceState, event: Event, source: int, *, consume: bool = True
) -> Event | None:
    """Consumes an input. Returns its event when it has not been sent yet, so that the
    device waits.
    """
    if source == device.index:
        if event not in device.held:
            name = world.events.describe(event)
            raise RuleBroken(f"needs the {name}, which this device has not computed before")
        if consume:
            device.held.remove(event)
        return None
    if event not in device.posted:
        name = world.events.describe(event)
        raise RuleBroken(f"needs the {name}, but no receive of it was posted before")
    if event not in world.happened:
        return event
    if consume:
        del device.posted[event]
    return None
