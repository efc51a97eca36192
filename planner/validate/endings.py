"""What must hold when nothing moves any more: no deadlock, nothing left over, nothing missing."""

from __future__ import annotations

from penstock.planner.tensors import Send, transferred
from penstock.planner.validate.events import Event
from penstock.planner.validate.transfers import places_of
from penstock.planner.validate.world import DeviceState, RuleError, Side, World
from penstock.protocol.plan.instructions import Instruction, OffloadGradients, ReduceGradients

_SHOWN_WAITS = 16
"""Devices that a deadlock message lists at most."""


def check_deadlock(world: World) -> None:
    """Raise when devices wait; the message says for whom each waits."""
    stuck: list[tuple[bool, int, str]] = []
    for event, devices in world.waiting.items():
        for device in devices:
            circular, fate = _fate(world, event)
            instruction = world.programs[device][world.devices[device].position]
            what = world.events.describe(event)
            stuck.append(
                (circular, device, f"device {device} ({instruction}) waits for the {what} {fate}")
            )
    if not stuck:
        return
    # What nobody sends is the cause; devices in a circle only follow.
    stuck.sort()
    device = stuck[0][1]
    reason = "deadlock: " + "; ".join(text for _, _, text in stuck[:_SHOWN_WAITS])
    if len(stuck) > _SHOWN_WAITS:
        reason += f"; and {len(stuck) - _SHOWN_WAITS} more devices wait"
    raise RuleError(device, world.devices[device].position, reason)


def _fate(world: World, event: Event) -> tuple[bool, str]:
    """Whether the event would still happen if its device went on, and how to say it."""
    number = world.events.collective_of(event)
    if number is not None:
        return _fate_of_collective(world, number)
    offloaded, reduced = world.events.offload_of(event), world.events.reduction_of(event)
    if offloaded is not None:
        source, will = world.backward.devices[offloaded], "offloads them"
    elif reduced is not None:
        source, will = world.backward.devices[reduced], "reduces them"
    else:
        tensor = world.events.tensor_of(event)
        assert tensor is not None
        places = places_of(world, tensor)
        assert places is not None
        source, will = places[0], "sends it"
    rest = world.programs[source][world.devices[source].position :]
    circular = any(_makes(world, instruction, event) for instruction in rest)
    return circular, f"from {source}, which {'waits itself' if circular else f'never {will}'}"


def _fate_of_collective(world: World, number: int) -> tuple[bool, str]:
    absent = [device for device in world.devices if device.collectives <= number]
    done = [d for d in absent if d.position == len(world.programs[d.index])]
    device = (done or absent)[0]
    fate = "never enters it" if done else "waits itself"
    return not done, f"with {device.index}, which {fate}"


def _makes(world: World, instruction: Instruction, event: Event) -> bool:
    if isinstance(instruction, Send):
        tensor = transferred(instruction)
        return world.events.tensor(tensor.kind, tensor.stage, tensor.micro_batch) == event
    if isinstance(instruction, ReduceGradients):
        return world.events.reduction(instruction.stage) == event
    return (
        isinstance(instruction, OffloadGradients)
        and world.events.offload(instruction.stage) == event
    )


def check_leftovers(world: World, device: DeviceState) -> None:
    """Nothing stays on a device."""
    end = len(world.programs[device.index])
    for event, position in device.posted.items():
        what = world.events.describe(event)
        raise RuleError(device.index, position, f"the received {what} is never used")
    for event in sorted(device.held):
        what = world.events.describe(event)
        raise RuleError(device.index, end, f"at the end: the {what} was neither used nor sent")
    for stage, micro_batch in device.graphs:
        raise RuleError(
            device.index,
            end,
            f"at the end: activations of stage {stage}, micro-batch {micro_batch} wait for their"
            " BACKWARD",
        )
    for stage, micro_batch in sorted(device.deferred):
        raise RuleError(
            device.index, end, f"at the end: BACKWARD_WEIGHT {stage} {micro_batch} is missing"
        )
    for stage, phase in device.buffers:
        raise RuleError(
            device.index, end, f"at the end: weights of {phase} stage {stage} are not released"
        )


def check_complete(world: World) -> None:
    """All work was done: every FORWARD of an evaluation; every BACKWARD and offload otherwise.

    FORWARDs that nothing needed may be missing.
    """
    if world.rules.evaluation:
        _check_done(world, world.forward, "FORWARD")
        return
    _check_done(world, world.backward, "BACKWARD")
    for index, stage in enumerate(world.backward.stages):
        if index not in world.offloaded:
            raise RuleError(
                stage.device,
                len(world.programs[stage.device]),
                f"at the end: gradients of backward stage {index} were never offloaded",
            )


def _check_done(world: World, side: Side, name: str) -> None:
    count = len(world.route_of)
    for index, stage in enumerate(side.stages):
        for m in world.layout.microbatches_of_route[side.routes[index]]:
            if not side.done[index * count + m]:
                raise RuleError(
                    stage.device,
                    len(world.programs[stage.device]),
                    f"at the end: {name} {index} {m} is missing",
                )


def check_channels(world: World) -> None:
    """Both ends of a channel agree on its order: ordered transports match by position."""
    for sender in world.devices:
        for target, sent in sender.sent.items():
            received = world.devices[target].received[sender.index]
            for event, (expected, position) in zip(sent, received.items(), strict=False):
                if event != expected:
                    raise RuleError(
                        target,
                        position,
                        f"receives from device {sender.index} are not in the order of its sends:"
                        f" the {world.events.describe(event)} is sent in this place",
                    )
            if len(sent) != len(received):
                missing = min(set(sent) - set(received))
                raise RuleError(
                    target,
                    len(world.programs[target]),
                    f"at the end: device {sender.index} sent the"
                    f" {world.events.describe(missing)}, which is never received",
                )


def check_collectives(world: World) -> None:
    """All devices entered as many."""
    for device in world.devices:
        if device.collectives < len(world.collectives):
            raise RuleError(
                device.index,
                len(world.programs[device.index]),
                f"at the end: other devices enter collective {device.collectives}, this one"
                " does not",
            )
