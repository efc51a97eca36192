"""``penstock plan``: what a configuration would do, without starting anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.daemons.node.capacity import human_bytes, render_needs
from penstock.daemons.node.prepare import Prospect, look_ahead, table_of
from penstock.planner.memory import MemoryRow
from penstock.planner.render import svg, timeline
from penstock.planner.simulate import Simulation, simulate_config
from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError
from penstock.protocol.plan import Plan, StageRange


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The plan of a configuration, how long an attempt takes, and what memory it needs."""

    prospect: Prospect
    simulation: Simulation

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        plan = self.prospect.plan
        return {
            "scheme": plan.scheme,
            "devices": plan.num_devices,
            "micro_batches": plan.num_microbatches,
            "forward_stages": [[s.start, s.stop, s.device] for s in plan.forward_stages],
            "backward_stages": [[s.start, s.stop, s.device] for s in plan.backward_stages],
            "parameters": self.prospect.table.num_parameters,
            **self.simulation.summary(),
            "memory": [
                {
                    "place": row.place,
                    "resource": row.resource.value,
                    "use": row.use,
                    "bytes": row.num_bytes,
                }
                for row in self.prospect.rows
            ],
            "needs": [
                {
                    "place": need.place,
                    "what": need.what,
                    "needed_bytes": need.needed,
                    "there_bytes": need.there,
                    "short": need.short,
                }
                for need in self.prospect.needs
            ],
        }

    def to_text(self, width: int) -> str:
        """For people: stages, schedule picture, times, memory."""
        plan, simulation = self.prospect.plan, self.simulation
        return "\n".join(
            (
                f"{plan.scheme}: {plan.num_devices} devices, {plan.num_microbatches} micro-batches,"
                f" {self.prospect.table.num_parameters:,} parameters in {plan.num_blocks} blocks",
                f"forward stages   {_stages(plan.forward_stages)}",
                f"backward stages  {_stages(plan.backward_stages)}",
                "",
                timeline(simulation, width=max(20, width - 16)).rstrip(),
                "",
                f"simulated (default rates, not measured on this machine): one step takes"
                f" {simulation.makespan_s:.3f} s; bubbles {simulation.bubble_ratio:.1%};"
                f" optimizer tail {simulation.optimizer_tail_s:.3f} s",
                "",
                _rows(self.prospect.rows),
                "",
                render_needs(self.prospect.needs),
            )
        )


def make_report(config: Config) -> PlanReport:
    """Plan, simulate, and add up memory.

    Raises:
        ConfigError: the configuration has no plan.
    """
    prospect = look_ahead(config, table_of(config), run_id=None)
    simulation = simulate_config(config, prospect.table, prospect.plan)
    return PlanReport(prospect=prospect, simulation=simulation)


def write_outputs(report: PlanReport, plan_path: Path | None, svg_path: Path | None) -> None:
    """Write the files that were asked for.

    Raises:
        ConfigError: a file cannot be written.
    """
    outputs = ((plan_path, _plan_text(report.prospect.plan)), (svg_path, svg(report.simulation)))
    for path, text in outputs:
        if path is None:
            continue
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot write it: {error}") from error


def _plan_text(plan: Plan) -> str:
    return plan.to_json() + "\n"


def _stages(stages: Sequence[StageRange]) -> str:
    return "  ".join(f"{s.start}-{s.stop - 1}@{s.device}" for s in stages) + "   (blocks@device)"


def _rows(rows: Sequence[MemoryRow]) -> str:
    lines = [f"{'where':<12} {'memory':<8} {'use':<18} {'needed':>10}"]
    lines += [
        f"{row.place:<12} {row.resource.value:<8} {row.use:<18} {human_bytes(row.num_bytes):>10}"
        for row in rows
    ]
    return "\n".join(lines)
