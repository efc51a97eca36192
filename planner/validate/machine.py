"""Runs the programs of all devices by the rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.planner.layout import StageLayout
from penstock.planner.validate import (
    compute,
    endings,
    gradients,
    transfers,
    weights,
)
from penstock.planner.validate import (
    weights as swaps,
)
from penstock.planner.validate.events import Event
from penstock.planner.validate.world import DeviceState, PlanRules, RuleBroken, RuleError, World
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
"""Checks an instruction and lets it happen, or returns what it waits for."""

_EVALUATION: Mapping[type[Instruction], _Rule] = MappingProxyType(
    {
        Forward: compute.forward,
        SendActivation: transfers.send,
        RecvActivation: transfers.receive,
        FetchWeights: weights.fetch,
        ReleaseWeights: weights.release,
    }
)

_TRAINING: Mapping[type[Instruction], _Rule] = MappingProxyType(
    {
        **_EVALUATION,
        Recompute: compute.recompute,
        Backward: compute.backward,
        BackwardInput: compute.backward,
        BackwardWeight: compute.backward_weight,
        SendGradient: transfers.send,
        SendCheckpoint: transfers.send,
        RecvGradient: transfers.receive,
        RecvCheckpoint: transfers.receive,
        ReduceGradients: gradients.reduce,
        OffloadGradients: gradients.offload,
        SwapOut: swaps.swap_out,
        SwapIn: swaps.swap_in,
        Update: gradients.update,
    }
)


class AbstractMachine:
    """Runs the programs of all devices to the end.

    Raises (from :meth:`run`):
        RuleError: with the first place at which a rule is broken.
    """

    def __init__(
        self, layout: StageLayout, programs: tuple[Program, ...], rules: PlanRules
    ) -> None:
        self._world = World(layout, programs, rules)
        self._table = _EVALUATION if rules.evaluation else _TRAINING

    def run(self) -> None:
        """Run everything, then check that nothing is missing or left over."""
        world = self._world
        while world.ready:
            self._advance(world.devices[world.ready.pop()])
        endings.check_deadlock(world)
        for device in world.devices:
            endings.check_leftovers(world, device)
        endings.check_complete(world)
        endings.check_channels(world)
        endings.check_collectives(world)

    def _advance(self, device: DeviceState) -> None:
        """Run a device as far as it goes."""
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
