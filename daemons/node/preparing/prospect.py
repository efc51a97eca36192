"""What a configuration leads to on this machine: its schedule, its plan, and its memory.

Preparing a run and ``penstock plan`` look ahead by the same function. Who asks says which nodes are
on this machine; otherwise the machine that needs most is held against this one. Emulated devices
are held against the machines that they emulate; what is really
stored, against this one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.daemons.node.preparing.capacity import (
    MachineMemory,
    Need,
    check_capacity,
    heaviest_machine,
    needs,
)
from penstock.daemons.node.preparing.emulated import emulated_needs, emulated_rows
from penstock.daemons.node.preparing.gpus import guess_here
from penstock.planner.configured import config_context, config_prices, plan_within_limit
from penstock.planner.cost.costs import Costs
from penstock.planner.cost.emulation import Emulation
from penstock.planner.cost.profile import Guess
from penstock.planner.memory.table import MemoryRow, memory_table
from penstock.planner.pipeline import PlanContext
from penstock.planner.settling import choose_settled_early, is_to_choose
from penstock.planner.tuning.auto import choose
from penstock.planner.tuning.search import Outcome
from penstock.protocol.config.schema import Config
from penstock.protocol.plan.cpus import check_cpus
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.cgroup import cpu_limit
from penstock.shm.table import BlockTable

SAY_EVERY_S = 5.0
"""How often a long search says how far it is."""

Progress = Callable[[str], None]
"""Takes a line of what is being done, or was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What a configuration leads to: its plan and its memory, needed and there.

    ``config``: with the schedule that ``schedule: auto`` stands for; ``choice`` says in words what
    that came to, empty where nothing was to choose. ``table``: at full size. ``context``: what the
    plan was made with.
    """

    config: Config
    table: BlockTable
    context: PlanContext
    plan: Plan
    rows: tuple[MemoryRow, ...]
    needs: tuple[Need, ...]
    choice: str


def look_ahead(
    config: Config,
    table: BlockTable,
    run_id: str | None,
    progress: Progress = lambda message: None,
    nodes: Sequence[int] | None = None,
    guess: Guess | None = None,
) -> Prospect:
    """Returns schedule, plan and memory of a configuration on this machine.

    ``run_id``: whose memory may be used again. ``progress`` hears how far a search is, and what it
    came to. ``nodes``: those (indices) that this machine has; None: those of the host that needs
    most, which is taken to be like this machine. ``guess``: rates for blocks that no profile has
    measured, by default those of this machine's GPUs, or of the platform.

    Raises:
        ConfigError: no plan can be built, or workers cannot run it.
        CapacityError: devices have less than any plan of it needs, or ``schedule: auto`` found
            nothing that fits.
    """
    config = config.with_defaults()
    guess = guess or guess_here(config)
    surroundings, choice = _Surroundings.of(config, table, run_id, nodes), ""
    table = surroundings.table
    if config.chooses:
        winner = choose(config, table, surroundings, _now_and_then(progress), guess)
        config, choice = winner.config, str(winner)
        progress(choice)
    context = config_context(config, table, config_prices(config, table, guess=guess))
    plan = plan_within_limit(config, table, context)
    if is_to_choose(config):
        plan = choose_settled_early(plan, context)
    rows, found = surroundings.memory(config, plan, context.prices.costs)
    return Prospect(
        config=config,
        table=table,
        context=context,
        plan=plan,
        rows=rows,
        needs=found,
        choice=choice,
    )


def needs_of_run(directory: RunDirectory, nodes: Sequence[int]) -> tuple[Need, ...]:
    """Returns what ``nodes`` (indices) of a prepared run need of this machine, by its plan.

    Raises:
        ConfigError, StateError: the directory's files are damaged.
    """
    config, table = directory.config, directory.table
    names = [config.cluster.nodes[node].name for node in nodes]
    surroundings = _Surroundings.of(config, table, directory.run_id, nodes, names)
    costs = config_context(config, surroundings.table).prices.costs
    return surroundings.memory(config, directory.plan, costs)[1]


def check_room(directory: RunDirectory, node: int) -> None:
    """Refuse to start a node (by index) of a prepared run where CPUs or memory would starve it.

    Raises:
        CapacityError: says what is there, what is needed, and what to change.
        ConfigError, StateError: the directory's files are damaged.
    """
    check_cpus(directory.config, [node], cpu_limit(), os.environ)
    check_capacity(needs_of_run(directory, [node]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surroundings:
    """What plans of a configuration are held against; the limits of emulated devices are those of
    the emulated machines. ``table``: at full size. ``nodes``: those on this machine, None where
    that is not known.
    """

    table: BlockTable
    emulation: Emulation | None
    machine: MachineMemory
    nodes: tuple[int, ...] | None

    @classmethod
    def of(
        cls,
        config: Config,
        table: BlockTable,
        run_id: str | None,
        nodes: Sequence[int] | None,
        holders: Sequence[str] | None = None,
    ) -> _Surroundings:
        emulation = Emulation.of(config) if config.cluster.platform.models_time else None
        return cls(
            table=table if emulation is None else emulation.table,
            emulation=emulation,
            machine=MachineMemory.probe(run_id, holders),
            nodes=None if nodes is None else tuple(nodes),
        )

    def memory(
        self, config: Config, plan: Plan, costs: Costs
    ) -> tuple[tuple[MemoryRow, ...], tuple[Need, ...]]:
        """Returns what a plan needs, row by row, and its sums beside what is there."""
        emulation = self.emulation
        if emulation is None:
            rows = memory_table(config, self.table, plan, costs)
        else:
            emulation = replace(emulation, costs=costs)  # those of the plan's micro-batches
            rows = emulated_rows(config, emulation, plan)
        nodes = heaviest_machine(config, rows) if self.nodes is None else self.nodes
        if emulation is None:
            return rows, needs(config, rows, self.machine, nodes)
        return rows, emulated_needs(config, emulation, rows, self.machine, nodes)

    def check(self, config: Config, plan: Plan, costs: Costs) -> None:
        """Refuses what does not fit.

        Raises:
            CapacityError: with the whole table.
        """
        check_capacity(self.memory(config, plan, costs)[1])


def _now_and_then(progress: Progress) -> Callable[[int, int, Outcome | None], None]:
    due_s = time.monotonic() + SAY_EVERY_S

    def say(done: int, total: int, best: Outcome | None) -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + SAY_EVERY_S
            found = "" if best is None else f", best so far {best.candidate.request.scheme}"
            progress(f"schedule: auto has tried {done} of {total} candidates{found}")

    return say
