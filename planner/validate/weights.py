"""Rules of FETCH_WEIGHTS and RELEASE_WEIGHTS, and of those who use weights.

Rules of SWAP_OUT and SWAP_IN.
"""

from __future__ import annotations

from penstock.planner.validate.events import Event
from penstock.planner.validate.transfers import enter, wait_for_collective
from penstock.planner.validate.world import Buffer, DeviceState, Graph, RuleBroken, World
from penstock.protocol.plan.instructions import FetchWeights, Phase, ReleaseWeights, SwapIn, SwapOut


def fetch(world: World, device: DeviceState, fetching: FetchWeights) -> None:
    """Takes a free buffer."""
    side = world.forward if fetching.phase is Phase.FORWARD else world.backward
    stage = fetching.stage
    if stage >= len(side.stages):
        raise RuleBroken(f"there are {len(side.stages)} {side.phase} stages, numbered from 0")
    if side.devices[stage] != device.index:
        raise RuleBroken(f"{side.phase} stage {stage} is on device {side.devices[stage]}")
    buffer = (stage, fetching.phase)
    if buffer in device.buffers:
        raise RuleBroken("these weights are already here")
    there = world.rules.weight_buffers
    if len(device.buffers) >= there:
        raise RuleBroken(f"no free buffer: all {there} weight buffers are in use")
    device.buffers[buffer] = False
    if world.rules.shards_weights:
        device.gathers[buffer] = enter(world, device, "all-gather", side.stages[stage])


def release(world: World, device: DeviceState, releasing: ReleaseWeights) -> None:
    """Frees a buffer that was used and that no kept activations rely on."""
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
    """The weights are fetched; returns the collective that brings them while it is under way."""
    if buffer not in device.buffers:
        raise RuleBroken(
            f"weights of {buffer[1]} stage {buffer[0]} are not here: not fetched yet, or already"
            " released"
        )
    if not world.rules.shards_weights:
        return None
    return wait_for_collective(world, device.gathers[buffer])


def weights_of_backward(world: World, device: DeviceState, stage: int) -> Buffer:
    """The stage's own buffer, or that of the same forward stage if only this is fetched."""
    own, shared = (stage, Phase.BACKWARD), (stage, Phase.FORWARD)
    if own not in device.buffers and shared in device.buffers and world.layout.is_coupled(stage):
        return shared
    return own


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
