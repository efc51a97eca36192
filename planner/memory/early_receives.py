"""How early tensors may arrive: as soon as their senders can have got so far.

A device posts a receive shortly before it needs the tensor, but its peer sends when the tensor is
made, which may be long before. Until the receive, it waits in the host's memory. How far a peer can
be depends on what it waits for: only an instruction that takes a tensor from another device waits
for one.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.planner.schedule.tensors import Receive, Send, Tensor, taken_by, transferred
from penstock.protocol.plan.instructions import Program

_Clock = list[int]
"""Of each device, how many of its instructions have surely been executed."""


def early_arrivals(programs: tuple[Program, ...]) -> Iterator[tuple[int, Tensor, int, int]]:
    """Yields tensors that may be there before their receive is posted: device, tensor, the first
    instruction during which it may be there, and the one that posts the receive. The programs must
    be those of a valid plan.
    """
    sent = _sent(programs)
    for device, program in enumerate(programs):
        for position, instruction in enumerate(program):
            if isinstance(instruction, Receive):
                tensor = transferred(instruction)
                earliest = sent[tensor, device][device]
                if earliest < position:
                    yield device, tensor, earliest, position


def _sent(programs: tuple[Program, ...]) -> dict[tuple[Tensor, int], _Clock]:
    """Returns by tensor and target what has surely been executed when it is sent."""
    sent: dict[tuple[Tensor, int], _Clock] = {}
    clocks = [[0] * len(programs) for _ in programs]
    awaited = [_received(program) for program in programs]
    moved = True
    while moved:
        moved = False
        for device, program in enumerate(programs):
            clock = clocks[device]
            while clock[device] < len(program):
                instruction = program[clock[device]]
                taken = taken_by(instruction)
                if taken is not None and taken in awaited[device]:
                    if (taken, device) not in sent:
                        break
                    clock[:] = map(max, clock, sent[taken, device])
                if isinstance(instruction, Send):
                    sent[transferred(instruction), instruction.peer] = clock.copy()
                clock[device] += 1
                moved = True
    return sent


def _received(program: Program) -> frozenset[Tensor]:
    return frozenset(transferred(i) for i in program if isinstance(i, Receive))
