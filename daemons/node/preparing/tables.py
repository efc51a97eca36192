"""Block tables of configurations that have no run directory."""

from __future__ import annotations

from penstock.config.schema import Config
from penstock.daemons.node.preparing.hub import with_hub_model
from penstock.daemons.node.preparing.places import with_absolute_paths
from penstock.daemons.node.preparing.tool import run_models_prepare
from penstock.host.files import write_atomically
from penstock.host.limits.scratch import scratch_folder
from penstock.planner.cost.emulation import Emulation
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import BlockTable


def table_of(config: Config, *, config_only: bool = False) -> BlockTable:
    """Returns the block table of a configuration that has no run directory; at full size.
    ``config_only``: of a model folder only ``config.json`` is read, as of a model of the Hub.

    Raises:
        ConfigError: the model is impossible.
    """
    if config.cluster.platform.builtin_model:
        return Emulation.of(with_absolute_paths(config)).table
    local = with_hub_model(config, lambda line: None)
    config_only = config_only or local.model.path != config.model.path
    with scratch_folder("plan") as directory:
        RunDirectory.create(directory)
        text = with_absolute_paths(local).to_yaml()
        write_atomically(directory / "resolved.yaml", text)
        run_models_prepare(local, directory, "--config-only" if config_only else "--table-only")
        return RunDirectory(directory).table
