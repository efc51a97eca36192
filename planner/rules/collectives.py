"""Collectives over all devices: where weights are sharded, every fetch and reduction is one.

They match by position, so every device must enter the same ones in the same order.
"""

from __future__ import annotations

from penstock.planner.rules.events import Event
from penstock.planner.rules.world import Broken, Device, World
from penstock.protocol.plan import StageRange


def enter(world: World, device: Device, kind: str, stage: StageRange) -> int:
    """Enter the device's next collective; returns its number."""
    number = device.collectives
    device.collectives += 1
    if number == len(world.collectives):
        world.collectives.append((kind, stage, 0))
    first_kind, first_stage, entered = world.collectives[number]
    if (kind, stage.blocks) != (first_kind, first_stage.blocks):
        raise Broken(
            f"collective {number} is the {kind} of blocks {_blocks(stage)} here, and the"
            f" {first_kind} of blocks {_blocks(first_stage)} elsewhere"
        )
    world.collectives[number] = (first_kind, first_stage, entered + 1)
    if entered + 1 == len(world.devices):
        world.happen(world.events.collective(number))
    return number


def wait_for_collective(world: World, number: int) -> Event | None:
    """The event to wait for while not all devices have entered."""
    event = world.events.collective(number)
    return None if event in world.happened else event


def _blocks(stage: StageRange) -> str:
    return f"[{stage.start}, {stage.stop})"
