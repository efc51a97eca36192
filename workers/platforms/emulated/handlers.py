"""The workers' handlers on an emulated device: each as it is, and then the time that it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.protocol.plan.instructions import Instruction, Opcode
from penstock.protocol.plan.semantics import SEMANTICS, Lane
from penstock.protocol.run.trace import TraceLane
from penstock.workers.attempt import Attempt
from penstock.workers.handlers import HANDLERS, Handler
from penstock.workers.platforms.emulated import compute, gradients
from penstock.workers.platforms.emulated.compute import device_of


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
    """The numbers first: they say what the instruction waits for. Then its time."""

    def run(instruction: Instruction, attempt: Attempt) -> None:
        device, tally = device_of(attempt), attempt.tally
        begun_at, waited_s = time.monotonic(), attempt.waited_s
        device.begin()
        handler(instruction, attempt)
        seconds = device.durations(attempt.context.flow.facts).seconds(instruction)
        start, end = device.compute_for(seconds, attempt.context.abort)
        attempt.timeline.ran(start, end)
        known_s = attempt.waited_s - waited_s
        tally.received_s["copies"] += max(0.0, start - begun_at - known_s)

    return run


def _sent(handler: Handler) -> Handler:
    def run(instruction: Any, attempt: Attempt) -> None:
        device, sender = device_of(attempt), attempt.context.device_index
        device.begin()
        num_bytes = device.durations(attempt.context.flow.facts).num_bytes(instruction)
        device.sends(sender, instruction.peer, num_bytes)
        handler(instruction, attempt)

    return run


_AROUND: Mapping[Lane | None, Callable[[Handler], Handler]] = MappingProxyType(
    {Lane.COMPUTE: _computed, Lane.LINK: _sent}
)

EMULATED_HANDLERS: Mapping[Opcode, Handler] = MappingProxyType(
    {
        opcode: _AROUND.get(SEMANTICS[opcode].lane, _issued)(
            {**compute.OWN, **gradients.OWN}.get(opcode, handler)
        )
        for opcode, handler in HANDLERS.items()
    }
)
"""For every opcode: what is emulated in a way of its own, the rest as real devices handle it."""
