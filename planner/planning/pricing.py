"""Costs of blocks and machines of a configuration: measured, emulated, guessed, or fitted."""

from __future__ import annotations

from dataclasses import replace

from penstock.config.platforms import CoreUse
from penstock.config.schema import Config
from penstock.planner.cost.cluster import OptimizerModel
from penstock.planner.cost.emulation import Emulation, optimizer_way
from penstock.planner.cost.profile import Guess, cluster_of, guess_of, table_costs
from penstock.planner.cost.sources import Prices
from penstock.planner.planning.pipeline import PlanContext
from penstock.planner.traces.critical_path import CriticalPath, critical_path
from penstock.planner.traces.fitted import Fit
from penstock.planner.traces.measured import MeasuredAttempt
from penstock.planner.traces.what_if import CostSource, Pricing, Savings, savings
from penstock.protocol.plan.profile import load_profile
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import BlockTable


def config_prices(config: Config, table: BlockTable, guess: Guess | None = None) -> Prices:
    """Returns the cluster of a configuration, and the costs of blocks for its micro-batches.

    ``schedule.profile`` has both; without a profile, the cluster that ``cluster.device`` emulates.
    Otherwise ``guess`` has them, by default the platform's.

    Raises:
        ConfigError: the profile cannot be read, or is of another model.
    """
    profile, platform = config.schedule.profile, config.cluster.platform
    if profile is None and platform.simulated_clock:
        emulation = Emulation.of(config)
        return Prices(costs=emulation.costs, cluster=emulation.cluster)
    source = load_profile(profile) if profile is not None else guess or guess_of(platform)
    return Prices(
        costs=table_costs(
            table,
            source,
            tokens=(config.train.micro_batch or 1) * config.data.sequence_length,
            own_memory=platform.own_memory,
        ),
        cluster=replace(
            cluster_of(source, devices_per_node=config.cluster.workers),
            update_fetch_bytes=config.optimizer.name.traits.stepped_bytes,
            shares_cores=platform.cores is CoreUse.COMPUTE,
        ),
    )


def optimizer_of(config: Config) -> OptimizerModel:
    """Returns the way in which a configuration's optimizer works on the cores of its nodes."""
    emulated = config.cluster.platform.simulated_clock
    way = Emulation.of(config).optimizer if emulated else optimizer_way(config.optimizer)
    return replace(way, mirrored=config.mirrors)


def config_context(config: Config, table: BlockTable, guess: Guess | None = None) -> PlanContext:
    """Returns the context that plans of a configuration are made and simulated with.

    Raises:
        ConfigError: the profile cannot be read, or is of another model.
    """
    optimizer = optimizer_of(config)
    early = config.optimizer.settle == "early"
    return PlanContext(
        prices=config_prices(config, table, guess),
        block_work=tuple(block.forward_flops for block in table.blocks),
        optimizer=optimizer,
        stops_early=True,
        memory_limit_bytes=config.memory.device_limit,
        updates_by=(early and optimizer.early) or optimizer,
        update_stride=config.schedule.update_stride,
        resident_share=config.schedule.resident_share,
        device_updates=config.schedule.device_updates,
    )


def given_pricing(run: RunDirectory) -> Pricing | None:
    """Returns the costs of ``schedule.profile``, or of the emulated cluster; None without either.

    Raises:
        ConfigError: the profile cannot be read, or is of another model.
    """
    config = run.config
    profile = config.schedule.profile
    if profile is None and not config.cluster.platform.simulated_clock:
        return None
    prices = config_prices(config, run.table)
    return Pricing(
        costs=prices.costs,
        cluster=prices.cluster,
        optimizer=optimizer_of(config),
        source=CostSource.EMULATED if profile is None else CostSource.PROFILE,
    )


def fitted_pricing(config: Config, fit: Fit) -> Pricing:
    """Returns the costs that were fitted to attempts of the run."""
    return Pricing.of_fit(fit, optimizer_of(config).start)


def judge_step(
    config: Config, given: Pricing | None, attempt: MeasuredAttempt
) -> tuple[CriticalPath, Savings]:
    """Returns the critical path of a step, and the seconds that each resource could save.

    Savings follow from costs fitted to this attempt: a profile was measured on another day. On an
    emulated cluster they follow from the costs that the cluster runs on.
    """
    fit = Fit.of([attempt], config.cluster.workers)
    path = critical_path(attempt, fit)
    if given is None or given.source is not CostSource.EMULATED:
        given = fitted_pricing(config, fit)
    return path, savings(attempt.plan, given, path)
