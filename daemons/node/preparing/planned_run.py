"""The one way from a configuration to a plan on a machine: ``plan_run(request, machine)``.

``penstock train``, ``plan``, ``estimate`` and ``doctor`` plan by this function; ``tune`` searches
by :func:`search_run`. A request names the nodes on this machine; otherwise the machine that needs
most is held against this one. Emulated devices are held against the machines that they emulate; the
bytes that are stored, against this one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import inf

from penstock.config.schema import Config
from penstock.config.values import AUTO, CHOSEN_LATER
from penstock.daemons.node.preparing.capacity import (
    MachineMemory,
    MemoryDemand,
    check_capacity,
    heaviest_machine,
    memory_demands,
)
from penstock.daemons.node.preparing.emulated import emulated_demands, emulated_rows
from penstock.daemons.node.preparing.gpus import guess_here
from penstock.host.cgroup import cpu_limit
from penstock.planner.cost.cluster import OptimizerModel
from penstock.planner.cost.costs import Costs
from penstock.planner.cost.emulation import Emulation
from penstock.planner.cost.profile import Guess
from penstock.planner.memory.table import MemoryRow, memory_table
from penstock.planner.planning.auto import TunedConfig, choose, space_of
from penstock.planner.planning.configured import config_context, plan_within_limit
from penstock.planner.planning.pipeline import PlanContext, try_plan
from penstock.planner.planning.plan_search import Outcome, Search
from penstock.planner.planning.plan_search import Progress as SearchProgress
from penstock.planner.planning.settling import settled
from penstock.planner.simulate import Simulation
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.hardware.cpus import check_cpus
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import BlockTable

SAY_EVERY_S = 5.0
"""Seconds between progress lines of a long search."""

Progress = Callable[[str], None]
"""Takes a line of what is being done, or was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A configuration with the block table of its model. ``nodes``: indices of the nodes that the
    machine has; None: those of the host that needs most, which is taken to be like the machine.
    """

    config: Config
    table: BlockTable
    nodes: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMachine:
    """The machine that plans are held against. ``guess``: rates of blocks and copies where nothing
    was measured; None: those of the platform.
    """

    memory: MachineMemory
    guess: Guess | None = None

    @classmethod
    def here(
        cls, config: Config, run_id: str | None = None, holders: Collection[str] | None = None
    ) -> HostMachine:
        """Returns this machine. Memory that the run ``run_id`` holds (of its nodes ``holders``)
        counts as free.

        Raises:
            CapacityError: the kernel does not say how much memory the machine has.
        """
        return cls(memory=MachineMemory.probe(run_id, holders), guess=guess_here(config))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A plan of a configuration with the memory that it needs and that the machine has.

    ``config``: with the schedule that ``schedule: auto`` stands for; ``choice`` describes that
    schedule, and is empty where nothing was to choose. ``table``: at full size. ``context``: prices
    and limits that the plan was made with.
    """

    config: Config
    table: BlockTable
    context: PlanContext
    plan: Plan
    rows: tuple[MemoryRow, ...]
    demands: tuple[MemoryDemand, ...]
    choice: str = ""

    def simulate(self) -> Simulation:
        """Returns an attempt of the plan, simulated.

        Raises:
            ConfigError: a device needs more memory than its limit.
        """
        return try_plan(self.plan, self.context)


def plan_run(
    request: RunRequest, machine: HostMachine, progress: Progress = lambda message: None
) -> PlannedRun:
    """Returns schedule, plan and memory of a request on a machine. ``progress`` takes lines with
    the state of a search, and its result.

    Raises:
        ConfigError: no plan can be built, or workers cannot run it.
        CapacityError: devices have less than any plan of it needs, or ``schedule: auto`` found
            nothing that fits.
    """
    config, choice = request.config.with_defaults().with_recomputation(), ""
    surroundings = _Surroundings.of(config, request.table, machine.memory, request.nodes)
    table = surroundings.table
    if config.chooses:
        say = _now_and_then(progress)
        winner = choose(config, table, surroundings, say, machine.guess)
        config, choice = winner.config, str(winner)
        progress(choice)
    context = config_context(config, table, machine.guess)
    plan = settled(config, plan_within_limit(config, table, context), context)
    return surroundings.planned(config, context, plan, choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTerms:
    """The terms of a search for many schedules. ``schemes``: those that are tried. ``optimizer``: a
    way of the optimizer in place of the configured one. ``any_plan``: also plans that ``train``
    refuses. ``host_bytes``: of a node. ``keep``: most outcomes.
    """

    schemes: tuple[str, ...]
    optimizer: OptimizerModel | None = None
    any_plan: bool = False
    host_bytes: float = inf
    keep: int = 20


def search_run(
    request: RunRequest,
    machine: HostMachine,
    terms: SearchTerms,
    progress: SearchProgress = lambda done, of, best: None,
) -> tuple[TunedConfig, Search]:
    """Returns a request's configuration with a schedule and micro-batch found by a search, in place
    of its own. Host memory does not limit the search.

    Raises:
        ConfigError: impossible model or profile.
    """
    config = request.config
    tuned = TunedConfig(
        config=config.with_micro_batch(config.train.micro_batch or 1),
        table=request.table,
        guess=machine.guess,
        optimizer=terms.optimizer,
        any_plan=terms.any_plan,
    )
    anything = tuned.with_schedule({"scheme": AUTO}).with_micro_batch(CHOSEN_LATER)
    space = space_of(anything, len(request.table.blocks), terms.schemes)
    search = tuned.searched(space, progress, keep=terms.keep, host_bytes=terms.host_bytes)
    return tuned, search


def planned_before(directory: RunDirectory, nodes: Sequence[int]) -> PlannedRun:
    """Returns the plan of a prepared run with the needs of ``nodes`` (indices) on this machine.

    Raises:
        ConfigError, StateError: the directory's files are damaged.
    """
    config = directory.config
    names = [config.cluster.nodes[node].name for node in nodes]
    memory = MachineMemory.probe(directory.run_id, names)
    surroundings = _Surroundings.of(config, directory.table, memory, nodes)
    context = config_context(config, surroundings.table)
    return surroundings.planned(config, context, directory.plan)


def check_room(directory: RunDirectory, node: int) -> None:
    """Refuses to start a node (by index) of a prepared run that lacks CPUs or memory.

    Raises:
        CapacityError: says what is there, what is needed, and what to change.
        ConfigError, StateError: the directory's files are damaged.
    """
    check_cpus(directory.config, [node], cpu_limit(), os.environ)
    check_capacity(planned_before(directory, [node]).demands)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surroundings:
    """The limits of plans of a configuration; those of emulated devices are the limits of the
    emulated machines. ``table``: at full size. ``nodes``: those on this machine, None where
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
        memory: MachineMemory,
        nodes: Sequence[int] | None,
    ) -> _Surroundings:
        emulation = Emulation.of(config) if config.cluster.platform.simulated_clock else None
        return cls(
            table=table if emulation is None else emulation.table,
            emulation=emulation,
            machine=memory,
            nodes=None if nodes is None else tuple(nodes),
        )

    def planned(
        self, config: Config, context: PlanContext, plan: Plan, choice: str = ""
    ) -> PlannedRun:
        """Returns a plan with its memory."""
        rows, demands = self.memory(config, plan, context.prices.costs)
        return PlannedRun(
            config=config,
            table=self.table,
            context=context,
            plan=plan,
            rows=rows,
            demands=demands,
            choice=choice,
        )

    def memory(
        self, config: Config, plan: Plan, costs: Costs
    ) -> tuple[tuple[MemoryRow, ...], tuple[MemoryDemand, ...]]:
        """Returns the memory rows of a plan, and their sums with the available memory."""
        emulation = self.emulation
        if emulation is None:
            rows = memory_table(config, self.table, plan, costs)
        else:
            emulation = replace(emulation, costs=costs)  # those of the plan's micro-batches
            rows = emulated_rows(config, emulation, plan)
        nodes = heaviest_machine(config, rows) if self.nodes is None else self.nodes
        if emulation is None:
            return rows, memory_demands(config, rows, self.machine, nodes)
        return rows, emulated_demands(config, emulation, rows, self.machine, nodes)

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
            leader = "" if best is None else f", best so far {best.candidate.request.scheme}"
            progress(f"schedule: auto has tried {done} of {total} candidates{leader}")

    return say
