"""``model.attention: auto``: the attention of a run, settled before its first step.

The bits of a run depend on it, so ``resolved.yaml`` names it, and a run keeps the value until its
user sets another one. The tool process that observes kernels makes the choice. Runs that are older
than the key have ``sdpa``.
"""

from __future__ import annotations

from penstock.config.schema import Config
from penstock.config.values import AUTO


def keep_attention(config: Config, previous: Config | None) -> Config:
    """Returns the configuration with the value that ``auto`` stood for in the run until now.
    Another device has a choice of its own. ``previous``: the configuration of a run that has
    started, else None.
    """
    if config.model.attention != AUTO or previous is None:
        return config
    if previous.model.attention == AUTO or previous.cluster.device != config.cluster.device:
        return config
    return with_attention(config, previous.model.attention)


def with_attention(config: Config, name: str) -> Config:
    """Returns the configuration with another value of ``model.attention``."""
    return config.model_copy(update={"model": config.model.model_copy(update={"attention": name})})
