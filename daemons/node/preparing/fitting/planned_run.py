"""The one way from a configuration to a plan on a machine: ``plan_run(request, machine)``.

``penstock train``, ``plan``, ``tune``, ``estimate`` and ``doctor`` plan by this function. Memory is
compared with that of the machine on which the requested nodes run. Emulated devices are compared
with the machines that they emulate, and the bytes that are stored with this machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isinf
from typing import Any

from penstock.config.adapter import RANK_TENSORS
from penstock.config.execution import ScheduleConfig
from penstock.config.schema import Config
from penstock.config.values import AUTO, CHOSEN_LATER, PAIR
from penstock.daemons.node.preparing.fitting.capacity import (
    MachineMemory,
    MemoryDemand,
    check_capacity,
    heaviest_machine,
    memory_demands,
)
from penstock.daemons.node.preparing.fitting.emulated import emulated_demands, emulated_rows
from penstock.daemons.node.preparing.gpus import USABLE, guess_here
from penstock.host.errors import CapacityError, ConfigError
from penstock.host.limits.cgroup import cpu_limit
from penstock.planner.cost.costs import Costs
from penstock.planner.cost.emulation import Emulation
from penstock.planner.cost.profile import Guess, guess_of_gpu
from penstock.planner.memory.table import MemoryRow, memory_table
from penstock.planner.planning.auto import (
    SearchedPlan,
    SearchTerms,
    choose,
    search_all,
    search_constraints,
    settings_of,
)
from penstock.planner.planning.configured import complete_plan
from penstock.planner.planning.pipeline import PlanContext, try_plan
from penstock.planner.planning.plan_search import Progress, SearchOutcome
from penstock.planner.planning.pricing import config_context
from penstock.planner.simulate import Simulation
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.bases.base_identity import present_bytes
from penstock.protocol.run.hardware.cpus import check_cpus
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.layout import WEIGHT_SLOTS
from penstock.shm.table import BlockTable, DType

_NO_LIMIT = 1 << 60
"""Bytes of a device that no plan fills."""

REPORT_EVERY_S = 5.0
"""Seconds between progress lines of a long search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A configuration with the block table of its model.

    ``nodes``: indices of the nodes on the machine; None: those of the host that needs most.
    ``terms``: search among all schedules by these terms, as ``penstock tune`` does; None: keep the
    configured schedule, and search if it is ``auto``.
    """

    config: Config
    table: BlockTable
    nodes: Sequence[int] | None = None
    terms: SearchTerms | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMachine:
    """The machine that plans are held against. ``guess``: rates of blocks and copies where nothing
    was measured; None: those of the platform.
    """

    memory: MachineMemory
    guess: Guess | None = None

    @classmethod
    def here(
        cls,
        config: Config,
        run_id: str | None = None,
        holders: Collection[str] | None = None,
        shared: int = 0,
    ) -> HostMachine:
        """Returns this machine. Memory that the run ``run_id`` holds (of its nodes ``holders``)
        counts as free, and so do ``shared`` bytes of bases that it would use.

        Raises:
            CapacityError: the kernel does not say how much memory the machine has.
        """
        guess = guess_here(config)
        return cls(
            memory=MachineMemory.probe(run_id, holders, shared, _device_bytes(guess)), guess=guess
        )

    @classmethod
    def named(
        cls,
        guess: Guess | None = None,
        *,
        gpu: str | None = None,
        dtype: DType,
        host_bytes: int | None = None,
        shm_bytes: int | None = None,
    ) -> HostMachine:
        """Returns a machine of which only a description is at hand: a GPU of the catalogue (None:
        ``guess``) that computes in ``dtype``, the bytes of host memory, and those of /dev/shm
        (None: half of the host memory, as Linux mounts it). Memory without a size has no limit.

        Raises:
            ConfigError: unknown GPU.
        """
        if gpu is not None:
            guess = guess_of_gpu(gpu, dtype)
            usable = guess.machine.device_memory_bytes * USABLE
            guess = replace(guess, machine=replace(guess.machine, device_memory_bytes=usable))
        if shm_bytes is None and host_bytes is not None:
            shm_bytes = host_bytes // 2
        memory = MachineMemory(
            ram_available=host_bytes, shm_free=shm_bytes, device=_device_bytes(guess)
        )
        return cls(memory=memory, guess=guess)


def _device_bytes(guess: Guess | None) -> int | None:
    """Returns the bytes of a device that plans may fill; None without a limit."""
    size = inf if guess is None else guess.machine.device_memory_bytes
    return None if isinf(size) else int(size)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A plan of a configuration on a machine.

    ``config`` has the schedule that was chosen, if the ``request`` left one open; ``choice``
    describes it, and ``constraints`` restricted the choice (None: the schedule was given).
    ``table``: at full size. The plan is held against ``machine``. ``context``: prices and limits
    that the plan was made with. ``searched``: the search by the terms of the request.
    """

    config: Config
    request: RunRequest
    machine: HostMachine
    table: BlockTable
    context: PlanContext
    plan: Plan
    limits: _Limits
    choice: str = ""
    constraints: Mapping[str, Any] | None = None
    searched: SearchedPlan | None = None

    @property
    def trained(self) -> str:
        """The trained share of the parameters, in words; empty for a made-up model."""
        if self.config.cluster.platform.builtin_model:
            return ""
        trained, total = self.table.trained_parameters, self.table.num_parameters
        if trained == total:
            return f"trains all {total:,} parameters"
        share = f"trains {trained:,} of {total:,} parameters ({100 * trained / total:.2g}%)"
        tensors = (tensor for block in self.table.blocks for tensor in block.tensors)
        ranks = sorted({each.shape[0] for each in tensors if each.name.endswith(RANK_TENSORS)})
        if ranks:
            return (
                f"{share}: adapter r={' to '.join(map(str, dict.fromkeys((ranks[0], ranks[-1]))))}"
            )
        keys = [f"train.{key}" for key in ("freeze", "only") if getattr(self.config.train, key)]
        return f"{share}: {keys[0]}" if keys else share

    @property
    def rows(self) -> tuple[MemoryRow, ...]:
        """The memory that the plan needs, by place and use."""
        return self._memory[0]

    @property
    def demands(self) -> tuple[MemoryDemand, ...]:
        """The sums of the rows beside the memory that is available."""
        return self._memory[1]

    @cached_property
    def _memory(self) -> tuple[tuple[MemoryRow, ...], tuple[MemoryDemand, ...]]:
        return self.limits.memory(self.config, self.plan, self.context.prices.costs)

    @property
    def fits(self) -> bool:
        """True if the machine has all the memory that the plan needs."""
        return not any(need.short for need in self.demands)

    def simulate(self) -> Simulation:
        """Returns a simulated attempt of the plan.

        Raises:
            ConfigError: a device needs more memory than its limit.
        """
        return try_plan(self.plan, self.context)

    def with_keys(self, config: Config, table: BlockTable) -> PlannedRun:
        """Returns the run of another configuration, with its table, on the same machine. The
        schedule is that of this run; passes that exclude the keys are left out.

        Raises:
            ConfigError: no plan can be built.
        """
        given = replace(self.request, config=config, table=table, terms=None)
        with suppress(ConfigError):
            return plan_anyway(given, self.machine)
        updates = ScheduleConfig().device_updates
        bare = config.schedule.model_copy(update={"passes": (), "device_updates": updates})
        bare_config = config.model_copy(update={"schedule": bare})
        return plan_anyway(replace(given, config=bare_config), self.machine)


def plan_run(
    request: RunRequest,
    machine: HostMachine,
    progress: Progress = lambda done, of, best: None,
) -> PlannedRun:
    """Returns schedule, plan and memory of a request on a machine. ``progress`` follows a search.

    Raises:
        ConfigError: no plan can be built, or workers cannot run it.
        CapacityError: devices have less memory than every plan needs, or no schedule of a search
            fits.
    """
    limits = _Limits.of(request.config, request.table, machine.memory, request.nodes)
    table, guess = limits.table, machine.guess
    if request.terms is not None:
        searched = search_all(request.config, table, request.terms, limits, progress, guess)
        candidate, plan = searched.best.candidate, searched.best.plan
        return PlannedRun(
            request=request,
            machine=machine,
            config=searched.tuned.config_of(candidate),
            table=table,
            context=searched.tuned.context(candidate.micro_batch),
            plan=plan,
            limits=limits,
            searched=searched,
        )
    config = request.config.with_defaults().with_recomputation()
    if config.chooses:
        best = choose(config, table, limits, progress, guess)
        return PlannedRun(
            request=request,
            machine=machine,
            config=best.config,
            table=table,
            context=config_context(best.config, table, guess),
            plan=best.plan,
            limits=limits,
            choice=str(best),
            constraints=best.constraints,
        )
    context = config_context(config, table, guess)
    plan = complete_plan(config, table, context)
    return PlannedRun(
        config=config,
        request=request,
        machine=machine,
        table=table,
        context=context,
        plan=plan,
        limits=limits,
    )


def plan_anyway(
    request: RunRequest,
    machine: HostMachine,
    progress: Progress = lambda done, of, best: None,
) -> PlannedRun:
    """Returns the run of :func:`plan_run`; where no plan fits, one that shows what is missing.

    That is the fastest plan for the devices, or, if they have too little memory, the plan that
    needs least of theirs. Its demands are held against ``machine``, and it can be simulated.

    Raises:
        ConfigError: no plan can be built, or workers cannot run it.
        CapacityError: nothing fits, and the given keys exclude the plan that needs least.
    """
    unlimited = MachineMemory(ram_available=None, shm_free=None, device=machine.memory.device)
    roomy = replace(machine, memory=unlimited)
    hostless = _with_limits(request.config, request.config.memory.device_limit, None)
    try:
        run = plan_run(replace(request, config=hostless), roomy, progress)
    except CapacityError as error:
        frugal = replace(request, config=_frugal(request.config, request.table), terms=None)
        try:
            run = plan_run(frugal, roomy, progress)
        except ConfigError:  # its keys exclude the most frugal schedule
            raise error from None
    held = _held_against(run, request, machine)
    searched = run.choice or run.searched
    if not held.fits and searched and not _is_hopeless(request, machine.memory):
        with suppress(CapacityError):
            return plan_run(request, machine, progress)
    return held


def _is_hopeless(request: RunRequest, memory: MachineMemory) -> bool:
    """Returns whether /dev/shm is too small for every plan. It holds at least two copies of
    weights, the state, and one copy of gradients.
    """
    config, table = request.config, request.table
    if memory.shm_free is None or config.cluster.platform.simulated_clock:
        return False
    weight, gradient = table.weight_dtype.itemsize, table.grad_dtype.itemsize
    master = 2.0 if config.optimizer.master == "split" else 4.0
    state = master + config.optimizer.name.traits.state_bytes
    trained = sum(block.trainable_elements for block in table.blocks)
    frozen = sum(block.frozen_elements for block in table.blocks)
    needed = trained * (WEIGHT_SLOTS * weight + state + gradient) + frozen * weight
    machines = len({node.host for node in config.cluster.nodes})
    return needed / machines > memory.shm_free + memory.held


def _held_against(run: PlannedRun, request: RunRequest, machine: HostMachine) -> PlannedRun:
    """Returns a run with the memory of the request's configuration and of ``machine``. If that is
    too little, the limits stop no simulation.
    """
    config = run.config.model_copy(update={"memory": request.config.memory})
    limits = _Limits.of(config, request.table, machine.memory, request.nodes)
    held = replace(run, config=config, request=request, machine=machine, limits=limits)
    if held.fits:
        return held
    return replace(held, choice="", context=replace(run.context, memory_limit_bytes=None))


def _with_limits(config: Config, device: int | None, host: int | None) -> Config:
    limits = {"device_limit": device, "host_limit": host}
    return config.model_copy(update={"memory": config.memory.model_copy(update=limits)})


def _without_limits(config: Config) -> Config:
    return _with_limits(config, _NO_LIMIT, None)


def _frugal(config: Config, table: BlockTable) -> Config:
    """Returns the configuration that needs least memory of devices, as far as its keys leave that
    open. Devices hold weights of one block and activations of one row at a time.
    """
    config = _without_limits(config)
    if config.train.micro_batch == CHOSEN_LATER:
        config = config.with_micro_batch(PAIR if config.trains_on_pairs else 1)
    if config.schedule.scheme != AUTO:
        return config
    keys = {
        "scheme": "mobius",
        "forward_stages": len(table.blocks),
        "backward_stages": len(table.blocks),
        "recompute": "full",
        **search_constraints(config.schedule),
    }
    schedule = ScheduleConfig.model_validate({**settings_of(config.schedule), **keys})
    return config.model_copy(update={"schedule": schedule})


def planned_before(directory: RunDirectory, nodes: Sequence[int]) -> PlannedRun:
    """Returns the plan of a prepared run with the needs of ``nodes`` (indices) on this machine.

    Raises:
        ConfigError, StateError: the directory's files are damaged.
    """
    config = directory.config
    names = [config.cluster.nodes[node].name for node in nodes]
    shared = present_bytes(directory, config, names[0])
    memory = MachineMemory.probe(directory.run_id, names, shared)
    limits = _Limits.of(config, directory.table, memory, nodes)
    context = config_context(config, limits.table)
    return PlannedRun(
        config=config,
        request=RunRequest(config=config, table=directory.table, nodes=nodes),
        machine=HostMachine(memory=memory),
        table=limits.table,
        context=context,
        plan=directory.plan,
        limits=limits,
    )


def check_room(directory: RunDirectory, node: int) -> None:
    """Refuses to start a node (by index) of a prepared run that lacks CPUs or memory.

    Raises:
        CapacityError: names needed and available amounts, and what to change.
        ConfigError, StateError: the directory's files are damaged.
    """
    check_cpus(directory.config, [node], cpu_limit(), os.environ)
    check_capacity(planned_before(directory, [node]).demands)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """The memory that plans of a configuration may use; of emulated devices that of the emulated
    machines. ``table``: at full size. ``nodes``: those on this machine; None: not known.
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
    ) -> _Limits:
        emulation = Emulation.of(config) if config.cluster.platform.simulated_clock else None
        return cls(
            table=table if emulation is None else emulation.table,
            emulation=emulation,
            machine=memory,
            nodes=None if nodes is None else tuple(nodes),
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
        """Refuses a plan that does not fit.

        Raises:
            CapacityError: has the whole table.
        """
        check_capacity(self.memory(config, plan, costs)[1])


def search_lines(write: Callable[[str], None]) -> Progress:
    """Returns the progress of a search that writes a line every :data:`REPORT_EVERY_S`."""
    due_s = time.monotonic() + REPORT_EVERY_S

    def report(done: int, total: int, best: SearchOutcome | None) -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + REPORT_EVERY_S
            leader = "" if best is None else f", best so far {best.candidate.request.scheme}"
            write(f"schedule: auto has tried {done} of {total} candidates{leader}")

    return report
