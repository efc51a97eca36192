"""When a run has an observerd."""

from __future__ import annotations

from penstock.config.schema import Config
from penstock.daemons.monitor.trackers.registry import wanted_trackers


def is_observed(config: Config) -> bool:
    """Returns whether there may be anything for observerd to do: attempts that are sampled,
    trackers.
    """
    every = config.observability.sample_every
    return 0 < every <= config.train.steps or bool(wanted_trackers(config))
