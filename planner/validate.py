"""Does a plan make sense? Rejects what would hang, compute garbage or do work twice.

The rules are those of :class:`penstock.planner.rules.Machine`; on top: the plan fits its block
table, and its peak device memory a limit. An error shows the whole grid with the bad step marked.
"""

from __future__ import annotations

from penstock.planner.grid import program_grid
from penstock.planner.layout import StageLayout
from penstock.planner.memory import device_peaks
from penstock.planner.rules import Machine, RuleError, Rules
from penstock.protocol.errors import ConfigError
from penstock.protocol.plan import Plan
from penstock.shm.table import BlockTable


class PlanError(ConfigError):
    """A plan breaks a rule. ``device`` and ``position`` say where, ``reason`` why; the text has the
    grid.
    """

    def __init__(self, message: str, *, reason: str, device: int, position: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.device = device
        self.position = position


def validate(
    plan: Plan,
    table: BlockTable | None = None,
    *,
    memory_limit: int | None = None,
    tokens: int = 0,
) -> None:
    """Check a plan.

    With ``table`` the plan must cover its blocks; with ``memory_limit`` (bytes) as well, no device
    may need more when a micro-batch has ``tokens`` tokens.

    Raises:
        PlanError: a program breaks a rule.
        ConfigError: stages, devices and blocks do not fit together, or memory is short.
    """
    plan.validate_shape()
    if table is not None and plan.num_blocks != len(table.blocks):
        raise ConfigError(
            f"plan covers {plan.num_blocks} blocks, the model has {len(table.blocks)}; it was made"
            " for another model"
        )
    layout = StageLayout.of(plan)
    _check_routes(layout)
    for name, programs in (("plan", plan.programs), ("evaluation", plan.evaluation)):
        try:
            Machine(layout, programs, Rules.of(plan, evaluation=name == "evaluation")).run()
        except RuleError as error:
            place = (error.device, error.position)
            program = programs[error.device]
            step = f" ({program[error.position]})" if error.position < len(program) else ""
            raise PlanError(
                f"{name}: device {error.device}, instruction {error.position}{step}:"
                f" {error.reason}\n{program_grid(programs, mark=place)}",
                reason=error.reason,
                device=error.device,
                position=error.position,
            ) from error
    if table is not None and memory_limit is not None:
        _check_memory(plan, table, memory_limit, tokens)


def _check_routes(layout: StageLayout) -> None:
    for route, micro_batches in enumerate(layout.microbatches_of_route):
        if not micro_batches:
            raise ConfigError(
                f"plan: no micro-batch takes route {route}; {layout.num_microbatches} micro-batches"
                f" for {layout.num_routes} routes, each needs one or more"
            )


def _check_memory(plan: Plan, table: BlockTable, memory_limit: int, tokens: int) -> None:
    for device, peak in enumerate(device_peaks(plan, table, tokens)):
        if peak.total_bytes > memory_limit:
            raise ConfigError(
                f"memory.device_limit = {memory_limit}: device {device} needs {peak.total_bytes}"
                f" bytes ({peak.weight_bytes} weights, {peak.gradient_bytes} gradients,"
                f" {peak.activation_bytes} activations); use more stages, smaller micro-batches"
                " or schedule.recompute: full"
            )
