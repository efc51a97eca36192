"""``penstock plan``: what a configuration would do, without starting anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.client.planning.described import HERE, MachineOptions
from penstock.client.planning.outputs import blocks_text, heading, rates_of, stages_text
from penstock.config.execution import DeviceUpdates
from penstock.config.schema import Config
from penstock.config.values import human_bytes
from penstock.daemons.node.preparing.fitting.capacity import render_demands
from penstock.daemons.node.preparing.fitting.planned_run import (
    HostMachine,
    PlannedRun,
    RunRequest,
    plan_anyway,
)
from penstock.daemons.node.preparing.tables import table_of
from penstock.planner.memory.table import MemoryRow
from penstock.planner.render import Caption, timeline
from penstock.planner.simulate import Simulation
from penstock.planner.validate.check import program_grid
from penstock.protocol.run.hardware.placement import check_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The plan of a configuration, how long an attempt takes, and what memory it needs.

    ``forms_s``: seconds of a step by what devices do with the blocks that they update, where
    ``schedule.device_updates`` is auto.
    """

    run: PlannedRun
    simulation: Simulation
    forms_s: Mapping[DeviceUpdates, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
        plan = self.run.plan
        return {
            "forward_stages": [[s.start, s.stop, s.device] for s in plan.forward_stages],
            "backward_stages": [[s.start, s.stop, s.device] for s in plan.backward_stages],
            "parameters": self.run.table.num_parameters,
            "trained_parameters": self.run.table.trained_parameters,
            **({"choice": self.run.choice} if self.run.choice else {}),
            **self._updates(),
            **self.simulation.summary(),
            "memory": [
                {
                    "place": row.place,
                    "resource": row.resource.value,
                    "use": row.use,
                    "bytes": row.num_bytes,
                }
                for row in self.run.rows
            ],
            "needs": [need.to_dict() for need in self.run.demands],
        }

    def _updates(self) -> dict[str, Any]:
        plan, flushed = self.run.plan, self.run.plan.flushed
        if not plan.updates and not self.forms_s:
            return {}
        updates: dict[str, Any] = {
            "previewed": sorted(plan.updates.keys() - set(flushed)),
            "flushed": list(flushed),
        }
        if self.forms_s:
            updates["simulated_s"] = {form.value: seconds for form, seconds in self.forms_s.items()}
        return {"device_updates": updates}

    def _update_lines(self) -> Iterator[str]:
        """Yields lines with the blocks that devices update, and with the choice of auto."""
        plan = self.run.plan
        if plan.updates:
            previewed = sorted(plan.updates.keys() - set(plan.flushed))
            yield f"devices preview  {blocks_text(previewed)}"
            yield f"devices flush    {blocks_text(plan.flushed)}"
        if self.forms_s:
            forms = ", ".join(f"{form} {seconds:.4g} s" for form, seconds in self.forms_s.items())
            taken = "flush" if plan.flushed else "preview" if plan.updates else "none"
            yield (
                f"device updates   auto took {taken}, {self.simulation.makespan_s:.4g} s a step"
                f" (simulated; {forms})"
            )

    @property
    def caption(self) -> Caption:
        """The heading of pictures."""
        return Caption(heading=heading(self.run.plan))

    def to_text(self, width: int, *, instructions: bool) -> str:
        """Returns the report for people: stages, picture of the schedule, times, memory."""
        plan, simulation = self.run.plan, self.simulation
        return "\n".join(
            (
                *((self.run.choice, "") if self.run.choice else ()),
                f"{plan.scheme}: {plan.num_devices} devices, {plan.num_microbatches} micro-batches,"
                f" {self.run.table.num_parameters:,} parameters in {plan.num_blocks} blocks",
                f"forward stages   {stages_text(plan.forward_stages)}",
                f"backward stages  {stages_text(plan.backward_stages)}",
                f"settled early    {blocks_text(plan.settled_early)}",
                *self._update_lines(),
                "",
                timeline(simulation, width=max(20, width - 16)).rstrip(),
                "",
                f"simulated ({rates_of(self.run.config)}): one step takes"
                f" {simulation.makespan_s:.3f} s; bubbles {simulation.bubble_ratio:.1%};"
                f" optimizer tail {simulation.optimizer_tail_s:.3f} s; computing takes"
                f" {simulation.pipeline_s:.3f} s, in no order less than"
                f" {simulation.lower_bound_s:.3f} s",
                "",
                _rows(self.run.rows),
                "",
                render_demands(self.run.demands),
                *(("", program_grid(plan.programs).rstrip()) if instructions else ()),
            )
        )


def make_run_report(
    config: Config, profile: Path | None = None, described: MachineOptions = HERE
) -> RunReport:
    """Plans and simulates a configuration, and adds up its memory, whether the machine has it or
    not. ``profile`` replaces the configured one. ``described``: the machine.

    Raises:
        ConfigError: the configuration has no plan, the profile is of another model, or the machine
            lacks some of ``optimizer.cores``.
    """
    if not described.is_named:
        check_cores(config)
    config = described.config(config.with_profile(profile))
    machine = described.machine(config)
    run = plan_anyway(RunRequest(config=config, table=table_of(config)), machine)
    return RunReport(run=run, simulation=run.simulate(), forms_s=_forms_s(run, machine))


def _forms_s(run: PlannedRun, machine: HostMachine) -> dict[DeviceUpdates, float]:
    """Returns the seconds of a step with each form of updates on devices, if the form is auto."""
    config, forms_s = run.config, dict[DeviceUpdates, float]()
    if config.schedule.device_updates is not DeviceUpdates.AUTO:
        return forms_s
    for form in (DeviceUpdates.PREVIEW, DeviceUpdates.FLUSH):
        schedule = config.schedule.model_copy(update={"device_updates": form})
        other = config.model_copy(update={"schedule": schedule})
        planned = plan_anyway(RunRequest(config=other, table=run.table), machine)
        forms_s[form] = planned.simulate().makespan_s
    return forms_s


def _rows(rows: Sequence[MemoryRow]) -> str:
    lines = [f"{'where':<12} {'memory':<8} {'use':<18} {'needed':>10}"]
    lines += [
        f"{row.place:<12} {row.resource.value:<8} {row.use:<18} {human_bytes(row.num_bytes):>10}"
        for row in rows
    ]
    return "\n".join(lines)
