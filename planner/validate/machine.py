"""Runs the programs of all devices by the rules, until nothing moves any more.

Then it checks the end: no device waits for another in a circle, nothing is missing, nothing is left
over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.planner.schedule.layout import StageLayout
from penstock.planner.schedule.tensors import Send, transferred
from penstock.planner.validate import compute, moves
from penstock.planner.validate.moves import places_of
from penstock.planner.validate.world import (
    DeviceState,
    Event,
    PlanRules,
    RuleBroken,
    RuleError,
    Side,
    World,
)
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    FetchWeights,
    Forward,
    Instruction,
    OffloadGradients,
    Program,
    Recompute,
    RecvActivation,
    RecvCheckpoint,
    RecvGradient,
    ReduceGradients,
    ReleaseWeights,
    SendActivation,
    SendCheckpoint,
    SendGradient,
    SwapIn,
    SwapOut,
    Update,
)

_Rule = Callable[[World, DeviceState, Any], Event | None]
"""A rule checks an instruction and lets it happen, or returns the event that the device
waits for.
"""
_EVALUATION: Mapping[type[Instruction], _Rule] = MappingProxyType(
    {
        Forward: compute.forward,
        SendActivation: moves.send,
        RecvActivation: moves.receive,
        FetchWeights: moves.fetch,
        ReleaseWeights: moves.release,
    }
)
_TRAINING: Mapping[type[Instruction], _Rule] = MappingProxyType(
    {
        **_EVALUATION,
        Recompute: compute.recompute,
        Backward: compute.backward,
        BackwardInput: compute.backward,
        BackwardWeight: compute.backward_weight,
        SendGradient: moves.send,
        SendCheckpoint: moves.send,
        RecvGradient: moves.receive,
        RecvCheckpoint: moves.receive,
        ReduceGradients: moves.reduce,
        OffloadGradients: moves.offload,
        SwapOut: moves.swap_out,
        SwapIn: moves.swap_in,
        Update: moves.update,
    }
)
_SHOWN_WAITS = 16
"""A deadlock message lists at most so many devices."""


class AbstractMachine:
    """Runs the programs of all devices to the end.

    Raises (from :meth:`run`):
        RuleError: the first place at which a rule is broken.
    """

    def __init__(
        self, layout: StageLayout, programs: tuple[Program, ...], rules: PlanRules
    ) -> None:
        self._world = World(layout, programs, rules)
        self._table = _EVALUATION if rules.evaluation else _TRAINING

    def run(self) -> None:
        """Runs everything, then checks that nothing is missing or left over."""
        world = self._world
        while world.ready:
            self._advance(world.devices[world.ready.pop()])
        check_deadlock(world)
        for device in world.devices:
            check_leftovers(world, device)
        check_complete(world)
        check_channels(world)
        check_collectives(world)

    def _advance(self, device: DeviceState) -> None:
        """Runs a device as far as it goes."""
        world = self._world
        program = world.programs[device.index]
        try:
            while device.position < len(program):
                instruction = program[device.position]
                rule = self._table.get(type(instruction))
                if rule is None:
                    raise RuleBroken("does not belong into a forward-only evaluation")
                awaited = rule(world, device, instruction)
                if awaited is not None:
                    world.waiting.setdefault(awaited, []).append(device.index)
                    return
                device.position += 1
        except RuleBroken as error:
            raise RuleError(device.index, device.position, str(error)) from error


def check_deadlock(world: World) -> None:
    """Raises ``RuleError`` when devices wait; the message names what each of them waits for."""
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
    # A missing send is the cause; devices in a circle only follow.
    stuck.sort()
    device = stuck[0][1]
    reason = "deadlock: " + "; ".join(text for _, _, text in stuck[:_SHOWN_WAITS])
    if len(stuck) > _SHOWN_WAITS:
        reason += f"; and {len(stuck) - _SHOWN_WAITS} more devices wait"
    raise RuleError(device, world.devices[device].position, reason)


def _fate(world: World, event: Event) -> tuple[bool, str]:
    """Returns whether the event would still happen if its device went on, and words for it."""
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
    """Raises ``RuleError`` if anything stays on a device."""
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
    """Raises ``RuleError`` if work is missing: a FORWARD of an evaluation; a BACKWARD or an offload
    otherwise.

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
    """Raises ``RuleError`` if the ends of a channel disagree on its order: ordered transports match
    by position.
    """
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
    """Raises ``RuleError`` if devices entered different numbers of collectives."""
    for device in world.devices:
        if device.collectives < len(world.collectives):
            raise RuleError(
                device.index,
                len(world.programs[device.index]),
                f"at the end: other devices enter collective {device.collectives}, this one"
                " does not",
            )
