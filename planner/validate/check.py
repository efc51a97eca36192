"""The check of a plan: rejects plans that would hang, compute garbage or do work twice.

The rules are those of :class:`penstock.planner.validate.AbstractMachine`. Three more are checked:
the plan fits its block table, its peak device memory a limit, and its updates the nodes of a
cluster. An error shows the whole grid with the bad step marked.

Programs side by side as text: one column per device, one row per instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from penstock.config.values import human_bytes
from penstock.host.errors import ConfigError
from penstock.planner.cost.costs import Costs
from penstock.planner.memory.footprint import footprints
from penstock.planner.schedule.layout import StageLayout
from penstock.planner.validate import AbstractMachine, PlanRules, RuleError
from penstock.protocol.plan.instructions import Program, Update, format_instruction
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.reduction import Reduction
from penstock.shm.table import BlockTable


def program_grid(programs: Sequence[Program], *, mark: tuple[int, int] | None = None) -> str:
    """Returns all instructions of all devices as text: a column for each device, a row for each
    position. The instruction at ``mark`` (device, position) stands between ``>>`` and ``<<``.
    """
    columns: list[list[str]] = []
    for device, program in enumerate(programs):
        cells = [format_instruction(instruction) for instruction in program]
        if mark is not None and mark[0] == device and mark[1] < len(cells):
            cells[mark[1]] = f">>{cells[mark[1]]}<<"
        columns.append([f"device {device}", *cells])
    widths = [max(map(len, column)) for column in columns]
    rows = []
    for position, row in enumerate(zip_longest(*columns, fillvalue="")):
        number = "" if position == 0 else str(position - 1)
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        rows.append("  ".join([number.rjust(4), *cells]).rstrip())
    return "\n".join(rows) + "\n"


class PlanError(ConfigError):
    """A plan breaks a rule.

    ``device`` and ``position`` name the place, ``reason`` the rule. ``source`` names the origin of
    the plan, if it is set. The text shows the whole grid, which is drawn only on demand.
    """

    def __init__(self, programs: Sequence[Program], message: str, error: RuleError) -> None:
        super().__init__(message)
        self.source = ""
        self.reason = error.reason
        self.device = error.device
        self.position = error.position
        self._programs = programs

    @classmethod
    def at_step(cls, programs: Sequence[Program], name: str, error: RuleError) -> PlanError:
        """Returns the error of an instruction in programs that are called ``name``."""
        program = programs[error.device]
        step = f" ({program[error.position]})" if error.position < len(program) else ""
        message = f"{name}: device {error.device}, instruction {error.position}{step}"
        return cls(programs, f"{message}: {error.reason}", error)

    def __str__(self) -> str:
        grid = program_grid(self._programs, mark=(self.device, self.position))
        return f"{self.source}{': ' if self.source else ''}{super().__str__()}\n{grid}"


def validate(
    plan: Plan,
    table: BlockTable | None = None,
    *,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    devices_per_node: int | None = None,
) -> None:
    """Checks a plan, its training programs and its evaluation programs.

    With ``table`` the plan must cover the table's blocks. With ``costs`` and ``memory_limit``
    (bytes) no device may need more. With ``devices_per_node`` updates must run on the node that
    owns the block.

    Raises:
        PlanError: a program breaks a rule, or memory is short (at the step that needs most).
        ConfigError: stages, devices, blocks and routes do not fit together.
    """
    plan.validate_shape()
    if table is not None and plan.num_blocks != len(table.blocks):
        raise ConfigError(
            f"plan covers {plan.num_blocks} blocks, the model has {len(table.blocks)}; it was made"
            " for another model"
        )
    layout = StageLayout.of(plan)
    _check_routes(layout)
    reduction = Reduction.of(plan)
    for evaluation in (False, True):
        programs = plan.evaluation if evaluation else plan.programs
        try:
            AbstractMachine(layout, programs, PlanRules.of(plan, evaluation=evaluation)).run()
        except RuleError as error:
            raise PlanError.at_step(
                programs, "evaluation" if evaluation else "plan", error
            ) from error
    if devices_per_node is not None:
        _check_updates(plan, reduction, devices_per_node)
    if costs is not None and memory_limit is not None:
        _check_memory(plan, costs, memory_limit)


def _check_routes(layout: StageLayout) -> None:
    for route, micro_batches in enumerate(layout.microbatches_of_route):
        if not micro_batches:
            raise ConfigError(
                f"plan: no micro-batch takes route {route}; {layout.num_microbatches} micro-batches"
                f" for {layout.num_routes} routes, each needs one or more"
            )


def _check_updates(plan: Plan, reduction: Reduction, devices_per_node: int) -> None:
    for device, program in enumerate(plan.programs):
        for position, instruction in enumerate(program):
            if isinstance(instruction, Update):
                node = reduction.owner_device(instruction.block) // devices_per_node
                if device // devices_per_node != node:
                    reason = f"block {instruction.block} is owned by node {node}, not by this one"
                    error = RuleError(device, position, reason)
                    raise PlanError.at_step(plan.programs, "plan", error)


def _check_memory(plan: Plan, costs: Costs, memory_limit: float) -> None:
    for device, footprint in enumerate(footprints(plan, costs)):
        peak, position = footprint.peak, footprint.peak_position
        if peak.total_bytes <= memory_limit:
            continue
        parts = {
            "weights": peak.weight_bytes,
            "gradients": peak.gradient_bytes,
            "activations": peak.activation_bytes,
            "workspace": peak.workspace_bytes,
            "what is always there": peak.static_bytes,
        }
        sizes = [f"{human_bytes(value)} {name}" for name, value in parts.items() if value]
        reason = f"device {device} needs {human_bytes(peak.total_bytes)} ({', '.join(sizes)})"
        message = (
            f"memory.device_limit = {human_bytes(memory_limit)}: {reason}; use more stages,"
            " smaller micro-batches or schedule.recompute: full"
        )
        raise PlanError(plan.programs, message, RuleError(device, position, reason))
