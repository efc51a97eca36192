"""Rules of REDUCE_GRADIENTS, OFFLOAD_GRADIENTS and UPDATE."""

from __future__ import annotations

from penstock.planner.validate.events import Event
from penstock.planner.validate.transfers import enter, wait_for_collective
from penstock.planner.validate.world import DeviceState, RuleBroken, World
from penstock.protocol.plan.instructions import OffloadGradients, ReduceGradients, Update


def reduce(world: World, device: DeviceState, reducing: ReduceGradients) -> None:
    """Takes the final gradients of a stage."""
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
    """Takes the final gradients of a stage, reduced where others are: the sum of all routes, which
    its root waits for; elsewhere nothing is left to offload.
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
