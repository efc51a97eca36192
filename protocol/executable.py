"""Which plans workers run; refused here before anything starts, without torch.

:data:`EXECUTED` names the opcodes in the workers' table of handlers (``penstock.workers.handlers``,
a test holds the two together). Whether a plan makes sense at all is decided by
:mod:`penstock.planner.validate`.
"""

from __future__ import annotations

from penstock.protocol.errors import ConfigError
from penstock.protocol.instructions import Forward, Instruction, Keep, Opcode
from penstock.protocol.plan import Plan

EXECUTED = frozenset(
    {
        Opcode.FORWARD,
        Opcode.RECOMPUTE,
        Opcode.BACKWARD,
        Opcode.SEND_ACTIVATION,
        Opcode.RECV_ACTIVATION,
        Opcode.SEND_GRADIENT,
        Opcode.RECV_GRADIENT,
        Opcode.SEND_CHECKPOINT,
        Opcode.RECV_CHECKPOINT,
        Opcode.FETCH_WEIGHTS,
        Opcode.RELEASE_WEIGHTS,
        Opcode.OFFLOAD_GRADIENTS,
    }
)
"""Opcodes that workers execute."""

KEEPS = frozenset({Keep.ALL, Keep.INPUT, Keep.NONE})
"""What forwards of workers can keep."""


EMULATED_EXECUTED = EXECUTED | {
    Opcode.BACKWARD_INPUT,
    Opcode.BACKWARD_WEIGHT,
    Opcode.SWAP_OUT,
    Opcode.SWAP_IN,
}
"""Opcodes that workers execute on emulated devices, where forwards can keep anything."""


def check_executable(plan: Plan, *, emulated: bool = False) -> None:
    """Refuse a plan with instructions that workers do not execute, or with weights that they cannot
    hold as it wants. ``emulated``: on emulated devices.

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
    for what, wanted in (
        (
            "bind weights anew that were released between a forward and its backward (streamed"
            " weights without recomputation; use schedule.recompute: full)",
            plan.rebinds_weights and not emulated,
        ),
        ("share out weights over devices", plan.shards_weights),
    ):
        if wanted:
            raise ConfigError(f"plan: workers cannot do what {plan.scheme} needs: {what}")


def _complaint(instruction: Instruction, emulated: bool) -> str | None:
    """What workers do not do."""
    executed = EMULATED_EXECUTED if emulated else EXECUTED
    if instruction.opcode not in executed:
        known = ", ".join(opcode.name for opcode in Opcode if opcode in executed)
        return f"execute {instruction.opcode.name}; they execute {known}"
    if isinstance(instruction, Forward) and instruction.keep not in KEEPS and not emulated:
        known = ", ".join(keep.value for keep in Keep if keep in KEEPS)
        return f"keep activations this way; they support keep={known}"
    return None
