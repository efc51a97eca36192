"""``penstock plan``: what a configuration would do, without starting anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.client.reports import figures, heading, stages_text
from penstock.daemons.node.capacity import human_bytes, render_needs
from penstock.daemons.node.prepare import Prospect, look_ahead, table_of
from penstock.planner.bound import lower_bound_s
from penstock.planner.grid import program_grid
from penstock.planner.memory import MemoryRow
from penstock.planner.profile import CPU_COSTS, CostModel, block_costs
from penstock.planner.render import Caption, timeline
from penstock.planner.schedule import schedule_of
from penstock.planner.simulate import Simulation, simulate_config
from penstock.planner.trial import Trial
from penstock.protocol.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The plan of a configuration, how long an attempt takes, and what memory it needs."""

    prospect: Prospect
    trial: Trial

    @property
    def simulation(self) -> Simulation:
        """Of one attempt."""
        return self.trial.simulation

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        plan = self.prospect.plan
        return {
            "forward_stages": [[s.start, s.stop, s.device] for s in plan.forward_stages],
            "backward_stages": [[s.start, s.stop, s.device] for s in plan.backward_stages],
            "parameters": self.prospect.table.num_parameters,
            **self.simulation.summary(),
            **figures(self.trial),
            "instructions": [[str(i) for i in program] for program in plan.programs],
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

    @property
    def caption(self) -> Caption:
        """For pictures."""
        return Caption(heading=heading(self.prospect.plan))

    def to_text(self, width: int, *, instructions: bool) -> str:
        """For people: stages, schedule picture, times, memory."""
        plan, simulation = self.prospect.plan, self.simulation
        return "\n".join(
            (
                f"{plan.scheme}: {plan.num_devices} devices, {plan.num_microbatches} micro-batches,"
                f" {self.prospect.table.num_parameters:,} parameters in {plan.num_blocks} blocks",
                f"forward stages   {stages_text(plan.forward_stages)}",
                f"backward stages  {stages_text(plan.backward_stages)}",
                "",
                timeline(simulation, width=max(20, width - 16)).rstrip(),
                "",
                f"simulated (default rates, not measured on this machine): one step takes"
                f" {simulation.makespan_s:.3f} s; bubbles {simulation.bubble_ratio:.1%};"
                f" optimizer tail {simulation.optimizer_tail_s:.3f} s; no order of this work"
                f" computes in less than {self.trial.lower_bound_s:.3f} s",
                "",
                _rows(self.prospect.rows),
                "",
                render_needs(self.prospect.needs),
                *(("", program_grid(plan.programs).rstrip()) if instructions else ()),
            )
        )


def make_report(config: Config) -> PlanReport:
    """Plan, simulate, and add up memory.

    Raises:
        ConfigError: the configuration has no plan.
    """
    prospect = look_ahead(config, table_of(config), run_id=None)
    model = CPU_COSTS if config.cluster.device == "cpu" else CostModel()
    simulation = simulate_config(config, prospect.table, prospect.plan, model)
    tokens = config.train.micro_batch * config.data.sequence_length
    schedule = schedule_of(prospect.plan)
    bound_s = lower_bound_s(
        schedule.layout, schedule.orders, block_costs(prospect.table, model, tokens=tokens)
    )
    trial = Trial(plan=prospect.plan, simulation=simulation, lower_bound_s=bound_s)
    return PlanReport(prospect=prospect, trial=trial)


def _rows(rows: Sequence[MemoryRow]) -> str:
    lines = [f"{'where':<12} {'memory':<8} {'use':<18} {'needed':>10}"]
    lines += [
        f"{row.place:<12} {row.resource.value:<8} {row.use:<18} {human_bytes(row.num_bytes):>10}"
        for row in rows
    ]
    return "\n".join(lines)
