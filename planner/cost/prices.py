"""What a configuration's plans cost: blocks and machines, measured, emulated or guessed."""

from __future__ import annotations

from pathlib import Path

from penstock.planner.cost.cluster import OptimizerModel
from penstock.planner.cost.emulation import Emulation, optimizer_way
from penstock.planner.cost.profile import cluster_of, guess_of, table_costs
from penstock.planner.cost.sources import Prices
from penstock.protocol.config.schema import Config
from penstock.protocol.plan.profile_file import load_profile
from penstock.shm.table import BlockTable


def config_prices(
    config: Config, table: BlockTable, profile: Path | None = None, micro_batch: int | None = None
) -> Prices:
    """Costs and cluster of a configuration, for its micro-batches or those of so many sequences.

    From ``profile``, or the one that ``schedule.profile`` names; else those of the
    cluster that ``cluster.device`` models, or a guess.

    Raises:
        ConfigError: the profile cannot be read, or is of another model.
    """
    profile = profile or config.schedule.profile
    micro_batch = micro_batch or config.train.micro_batch
    platform = config.cluster.platform
    if profile is None and platform.models_time:
        train = config.train.model_copy(update={"micro_batch": micro_batch})
        emulation = Emulation.of(config.model_copy(update={"train": train}))
        return Prices(costs=emulation.costs, cluster=emulation.cluster)
    source = load_profile(profile) if profile is not None else guess_of(platform)
    return Prices(
        costs=table_costs(
            table,
            source,
            tokens=micro_batch * config.data.sequence_length,
            own_memory=platform.own_memory,
        ),
        cluster=cluster_of(source, devices_per_node=config.cluster.workers),
    )


def optimizer_of(config: Config) -> OptimizerModel:
    """How a configuration's optimizer works on its nodes' cores."""
    if config.cluster.platform.models_time:
        return Emulation.of(config).optimizer
    return optimizer_way(config.optimizer)
