"""Which plans workers run; refused here before anything starts, without torch.

:data:`EXECUTED` names the opcodes in the workers' table of handlers (``penstock.workers.handlers``,
a test holds the two together). Whether a plan makes sense at all is decided by
:mod:`penstock.planner.validate`.
"""

from __future__ import annotations

from penstock.protocol.errors import ConfigError
from penstock.protocol.instructions import Instruction, Opcode, SwapIn, SwapOut
from penstock.protocol.plan import Plan

EXECUTED = frozenset(
    {
        Opcode.FORWARD,
        Opcode.RECOMPUTE,
        Opcode.BACKWARD,
        Opcode.BACKWARD_INPUT,
        Opcode.BACKWARD_WEIGHT,
        Opcode.SEND_ACTIVATION,
        Opcode.RECV_ACTIVATION,
        Opcode.SEND_GRADIENT,
        Opcode.RECV_GRADIENT,
        Opcode.SEND_CHECKPOINT,
        Opcode.RECV_CHECKPOINT,
        Opcode.FETCH_WEIGHTS,
        Opcode.RELEASE_WEIGHTS,
        Opcode.OFFLOAD_GRADIENTS,
        Opcode.SWAP_OUT,
        Opcode.SWAP_IN,
    }
)
"""Opcodes that workers execute."""


def check_executable(plan: Plan, *, emulated: bool = False) -> None:
    """Refuse a plan with instructions that workers do not execute, or with weights that they cannot
    hold as it wants. ``emulated``: on emulated devices, which swap to each other, too.

    Raises:
        ConfigError: naming the first such thing and what workers do.
    """
    for name, programs in (("plan", plan.programs), ("evaluation", plan.evaluation)):
        for device, program in enumerate(programs):
            for position, instruction in enumerate(program):
                complaint = _complaint(instruction, emulated)
                if complaint is not None:
                    raise ConfigError(
                        f"{name}: {plan.scheme}, device {device}, instruction {position} is"
                        f" {str(instruction)!r}, and workers do not {complaint}"
                    )
    if plan.shards_weights:
        raise ConfigError(
            f"plan: workers cannot do what {plan.scheme} needs: share out weights over devices"
        )


def _complaint(instruction: Instruction, emulated: bool) -> str | None:
    """What workers do not do."""
    if instruction.opcode not in EXECUTED:
        known = ", ".join(opcode.name for opcode in Opcode if opcode in EXECUTED)
        return f"execute {instruction.opcode.name}; they execute {known}"
    if isinstance(instruction, (SwapOut, SwapIn)) and instruction.peer is not None and not emulated:
        return "swap to other devices; they swap to host memory (no peer=)"
    return None
