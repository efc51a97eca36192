"""Blocks with an overlapped state update: ``optimizer.settle`` and the plan's ``settled_early``.

A block that advances takes one sweep after its gradients. A block that is settled early takes two:
a short preview after its gradients, and a deferred update of the state. The second sweep overlaps
the next forward, which leaves the cores alone. If backwards hide a sweep, an advance is less work.
After the last backwards nothing hides a sweep, and the step ends sooner with previews. ``auto``
tries by simulation how many of the last blocks should be settled early.

``auto`` advances all blocks if that is better, or if the machine has no profile (an emulated one
has given speeds). CPU workers compute on the optimizer's cores, so that less work is faster: their
blocks advance, too. Three kinds of runs leave no choice: steps in place, updates that always wait
for the norm, and emulated optimizers of other systems.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.config.platforms import CoreUse
from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.planner.planning.pipeline import PlanContext
from penstock.planner.simulate import Simulation, simulate
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.semantics import Lane
from penstock.shm.table import BlockTable

MATTERS = 1e-3
"""Least relative gain of a step for which more blocks are settled early."""

_GRID = 12


def overlap_as_configured(config: Config, table: BlockTable, plan: Plan) -> Plan:
    """Returns the plan with what ``optimizer.settle`` says of all blocks; ``auto`` changes nothing.

    Raises:
        ConfigError: a plan file settles blocks early, and the optimizer steps in place.
    """
    optimizer = config.optimizer
    if optimizer.rollback == "arithmetic" and optimizer.settle == "auto" and plan.settled_early:
        raise ConfigError(
            f"schedule.file = {str(config.schedule.file)!r}: the plan settles"
            f" {len(plan.settled_early)} blocks early (settled_early), optimizer.rollback"
            " arithmetic steps in place; use rollback exact, or optimizer.settle advance"
        )
    if optimizer.settle == "auto":
        return plan
    updates = plan.updates
    early = (
        block.index
        for block in table.blocks
        if block.trainable_elements and block.index not in updates
    )
    return replace(plan, settled_early=tuple(early) if optimizer.settle == "early" else ())


def with_overlap(config: Config, plan: Plan, context: PlanContext) -> Plan:
    """Returns the plan of a configuration with the choice of ``optimizer.settle: auto``, if it has
    one.
    """
    return choose_overlap(plan, context) if chooses_overlap(config) else plan


def chooses_overlap(config: Config) -> bool:
    """Returns whether ``auto`` has something to choose, and something to choose by."""
    optimizer, schedule, emulation = config.optimizer, config.schedule, config.emulation
    platform = config.cluster.platform
    complete = schedule.file is not None and schedule.file.suffix.lower() != ".csv"
    foreign = emulation.optimizer_bytes is not None or emulation.optimizer_start != "offload"
    return (
        optimizer.settle == "auto"
        and optimizer.rollback == "exact"
        and optimizer.speculate != "never"
        and (schedule.profile is not None or platform.simulated_clock)
        and platform.cores is not CoreUse.COMPUTE
        and not complete
        and not foreign
    )


def choose_overlap(plan: Plan, context: PlanContext) -> Plan:
    """Returns the plan with the number of last blocks settled early that makes the simulated step
    shortest. Among numbers that make no difference (:data:`MATTERS`) the smallest is taken.

    The context's optimizer is one with an ``early`` way.
    """

    def simulated(blocks: tuple[int, ...]) -> Simulation:
        return simulate(
            replace(plan, settled_early=tuple(sorted(blocks))),
            context.prices.costs,
            context.prices.cluster,
            optimizer=context.optimizer,
            stops_early=context.stops_early,
        )

    advancing = simulated(())
    if advancing.optimizer_tail_s <= MATTERS * advancing.makespan_s:
        return replace(plan, settled_early=())
    blocks = _last_first(advancing)
    count = _fewest(lambda count: simulated(blocks[:count]).makespan_s, len(blocks))
    return replace(plan, settled_early=tuple(sorted(blocks[:count])))


def _last_first(simulation: Simulation) -> tuple[int, ...]:
    """Returns the blocks that the CPU updates, those that end last first."""
    plan, blocks = simulation.plan, simulation.costs.blocks
    ends: dict[int, float] = {}
    for span in simulation.spans:
        code, stage = span.label.split()[:2]
        if span.lane is Lane.OPTIMIZER and code == "U":
            for block in plan.backward_stages[int(stage)].blocks:
                ends[block] = max(ends.get(block, 0.0), span.end_s)
    updates = plan.updates
    ours = (b for b in ends if b not in updates and blocks[b].parameters)
    return tuple(sorted(ours, key=lambda block: (-ends[block], block)))


def _fewest(step_s: Callable[[int], float], most: int) -> int:
    """Returns the least number, from 0 to ``most``, with the shortest step. The search takes a
    grid, then numbers closer to its best point.
    """
    stride = max(1, -(-most // _GRID))
    known = {count: step_s(count) for count in (*range(0, most, stride), most)}
    while stride > 1:
        stride = -(-stride // 2)
        best = _best(known)
        for count in (best - stride, best + stride):
            if 0 <= count <= most and count not in known:
                known[count] = step_s(count)
    return _best(known)


def _best(known: dict[int, float]) -> int:
    enough = min(known.values()) * (1.0 + MATTERS)
    return min(count for count, seconds in known.items() if seconds <= enough)
