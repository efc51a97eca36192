"""The learning rate of each step: warmup, curve, and the lowest rate.

``optimizer.curve`` names the convention. With ``penstock``, step ``k`` has the rate at point ``k``
of the curve, so the last step has the lowest rate. With ``transformers``, step ``k`` has the rate
at point ``k - 1``, as ``LambdaLR`` gives it, so warmup begins at 0. There the operations and their
order are those of transformers, which makes the rates equal in every bit.
"""

from __future__ import annotations

import math

from penstock.config.training import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, steps: int, version: int) -> float:
    """Returns the learning rate of the update to ``version`` (the first update leads to 1), in a
    run of ``steps``. Later versions keep the rate of the curve's end.
    """
    warmup = _in_steps(optimizer.warmup_steps, steps)
    if optimizer.curve == "transformers":
        return optimizer.lr * _factor(optimizer, steps, warmup, min(version - 1, steps))
    if version <= warmup:
        return optimizer.lr * version / warmup
    if optimizer.schedule == "constant":
        return optimizer.lr
    begin = warmup
    if optimizer.schedule == "wsd":
        begin = max(warmup, steps - _in_steps(optimizer.decay_steps, steps))
        if version <= begin:
            return optimizer.lr
    progress = min(1.0, (version - begin) / max(1, steps - begin))
    left = _left(optimizer, progress)
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * left


def _factor(optimizer: OptimizerConfig, steps: int, warmup: int, point: int) -> float:
    """Returns the rate at a point of transformers' curve, as a factor of ``lr``."""
    lowest = optimizer.min_lr / optimizer.lr
    if point < warmup:
        factor = point / warmup
        # Of transformers' schedules, wsd alone begins its warmup at the lowest rate.
        return factor * (1.0 - lowest) + lowest if optimizer.schedule == "wsd" else factor
    if optimizer.schedule == "constant":
        return 1.0
    if optimizer.schedule == "linear":  # not 1 - progress, which rounds differently
        return max(0.0, (steps - point) / max(1, steps - warmup))
    if optimizer.schedule == "cosine":
        progress = (point - warmup) / max(1, steps - warmup)
        return max(0.0, _left(optimizer, progress) * (1 - lowest) + lowest)
    decay = _in_steps(optimizer.decay_steps, steps)
    stable = steps - warmup - decay
    if point < warmup + stable:
        return 1.0
    if point >= steps:
        return lowest
    left = _left(optimizer, (point - warmup - stable) / max(1, decay))
    return max(0.0, left * (1.0 - lowest) + lowest)


def _left(optimizer: OptimizerConfig, progress: float) -> float:
    """Returns the part of the way from ``lr`` to ``min_lr`` that is left at ``progress`` (0 to
    1) of the decay.
    """
    shape = optimizer.decay_type if optimizer.schedule == "wsd" else optimizer.schedule
    if shape == "linear":
        return 1.0 - progress
    if shape == "1-sqrt":
        return 1.0 - math.sqrt(progress)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _in_steps(number: int | float, steps: int) -> int:
    """Returns a number of steps; a number below 1 is a share of ``steps``, rounded up."""
    return int(number) if number >= 1 else math.ceil(steps * number)
