"""The learning rate as a pure function of the version: the scheduler's, and reference loops'."""

from __future__ import annotations

import math

from penstock.protocol.config import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, steps: int, version: int) -> float:
    """The learning rate of the update that leads to ``version`` (the first update leads to 1).

    Linear warmup to ``lr`` at version ``warmup_steps``, then constant, or a cosine or straight line
    down to ``min_lr`` at version ``steps``; later versions stay there.
    """
    if version <= optimizer.warmup_steps:
        return optimizer.lr * version / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.lr
    decay_steps = max(1, steps - optimizer.warmup_steps)
    progress = min(1.0, (version - optimizer.warmup_steps) / decay_steps)
    if optimizer.schedule == "linear":
        left = 1.0 - progress
    else:
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * left
