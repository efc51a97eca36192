"""Rules of sends and receives.

Collectives over all devices: where weights are sharded, every fetch and reduction is one.

They match by position, so every device must enter the same ones in the same order.
"""

from __future__ import annotations

from penstock.planner.tensors import Receive, Send, Tensor, TensorKind, endpoints, transferred
from penstock.planner.validate.events import Event
from penstock.planner.validate.world import DeviceState, RuleBroken, World
from penstock.protocol.plan.plan import StageRange


def send(world: World, device: DeviceState, sending: Send) -> None:
    """Takes a tensor that was made here."""
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
    """Posts a buffer."""
    tensor = transferred(receiving)
    event = _check(world, device, tensor, receiving.peer, sends=False)
    received = device.received[receiving.peer]
    if event in received:
        raise RuleBroken(f"a receive of the {tensor} was posted before")
    device.posted[event] = device.position
    received[event] = device.position


def places_of(world: World, tensor: Tensor) -> tuple[int, int] | None:
    """Devices that make and use a tensor; ``None`` when nobody can need it."""
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
        raise RuleBroken(f"nobody uses the {tensor}: FORWARD {stage + 1} {m} is missing")
    here, there = places if sends else places[::-1]
    if places[0] == places[1]:
        raise RuleBroken(f"the {tensor} is produced and used on device {here}: nothing to transfer")
    if (here, there) != (device.index, peer):
        verb = "sent" if sends else "received"
        raise RuleBroken(f"wrong peer: the {tensor} is {verb} on device {here}, peer={there}")
    return world.events.tensor(tensor.kind, stage, m)


def enter(world: World, device: DeviceState, kind: str, stage: StageRange) -> int:
    """Enter the device's next collective; returns its number."""
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
    """The event to wait for while not all devices have entered."""
    event = world.events.collective(number)
    return None if event in world.happened else event


def _blocks(stage: StageRange) -> str:
    return f"[{stage.start}, {stage.stop})"
