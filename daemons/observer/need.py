"""When a run has an observerd."""

from __future__ import annotations

from penstock.protocol.config.schema import Config


def is_observed(config: Config) -> bool:
    """Returns whether there may be anything for observerd to do: attempts that are sampled."""
    every = config.observability.sample_every
    return 0 < every <= config.train.steps
