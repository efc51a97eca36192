"""Adam's and AdamW's step on tensors of any device, in the operations of ``native/steps.h``.

Every operation rounds once. Results have the bits of the native kernels under two conditions. The
device rounds square root and division correctly: CUDA does without fast math, torch's square root
on CPUs does not. No multiply is contracted with an add: torch's eager kernels do not, and nothing
may fuse them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Self

import numpy as np
import torch

from penstock.config.optimizers import OptimizerName
from penstock.config.training import OptimizerConfig
from penstock.protocol.plan.groups import StepRange
from penstock.protocol.plan.step import OptimizerStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScalars:
    """One step's constants, rounded to fp32: ``StepScalars`` of ``native/kernels.h``.

    ``correction`` and ``learning_rate``: fp64, from which the constants of ranges follow.
    """

    coefficient: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inverse_sqrt_correction: float
    eps: float
    correction: float
    learning_rate: float
    optimizer: OptimizerName

    @classmethod
    def of(cls, step: OptimizerStep, config: OptimizerConfig) -> Self:
        """Returns the constants, computed in fp64 and rounded once, as ``derive_scalars`` does."""
        beta1, beta2 = config.betas
        return cls(
            coefficient=_fp32(step.coefficient),
            one_minus_beta1=_fp32(1.0 - beta1),
            beta2=_fp32(beta2),
            one_minus_beta2=_fp32(1.0 - beta2),
            inverse_sqrt_correction=_fp32(1.0 / math.sqrt(1.0 - _power(beta2, step.bias_step))),
            eps=_fp32(config.eps),
            correction=1.0 - _power(beta1, step.bias_step),
            learning_rate=step.learning_rate,
            optimizer=config.name,
        )

    def step_size(self, rate: float) -> float:
        """Returns the step size of a range, as ``derive_range`` computes the size."""
        return _fp32(self.learning_rate * rate / self.correction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a block on the device, all flat and fp32; :func:`apply` overwrites all of it.

    ``gradients``: the sum of all partials. ``ranges`` cover the part, and count from its start.
    """

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    gradients: torch.Tensor
    scratch: torch.Tensor
    ranges: Sequence[StepRange]


def apply(piece: Piece, scalars: StepScalars) -> torch.Tensor:
    """Writes the next master weights and state over the old ones, (elements,) fp32 each; returns
    the master weights. Gradients and scratch are undefined afterwards. On copies of the state the
    call is a preview, on the state itself a settle.
    """
    return STEPS[scalars.optimizer](piece, scalars)


def _adam(piece: Piece, scalars: StepScalars) -> torch.Tensor:
    """Steps by Kingma & Ba, "Adam", algorithm 1; with decoupled decay by Loshchilov & Hutter,
    algorithm 2.
    """
    decoupled = scalars.optimizer.traits.decouples_decay
    master, mean, square, grad = piece.master, piece.exp_avg, piece.exp_avg_sq, piece.gradients
    scratch = piece.scratch
    grad.mul_(scalars.coefficient)
    if not decoupled:
        for start, end, decay, _ in piece.ranges:
            torch.mul(master[start:end], _fp32(decay), out=scratch[start:end])
        grad.add_(scratch)
    torch.sub(grad, mean, out=scratch)
    mean.add_(scratch.mul_(scalars.one_minus_beta1))
    torch.mul(grad, scalars.one_minus_beta2, out=scratch)
    square.mul_(scalars.beta2).add_(scratch.mul_(grad))
    scratch.copy_(square)
    denominator = scratch.sqrt_().mul_(scalars.inverse_sqrt_correction).add_(scalars.eps)
    for start, end, rate in _rates(piece.ranges):
        torch.mul(mean[start:end], scalars.step_size(rate), out=grad[start:end])
    change = grad.div_(denominator)
    if decoupled:
        for start, end, decay, rate in piece.ranges:
            master[start:end].mul_(_fp32(1.0 - scalars.learning_rate * rate * decay))
    return master.sub_(change)


def _rates(ranges: Sequence[StepRange]) -> Iterator[tuple[int, int, float]]:
    """Yields (start, end, rate) of the longest parts with one rate each: a part costs a launch."""
    for rate, group in groupby(ranges, key=lambda part: part.rate):
        parts = list(group)
        yield parts[0].start, parts[-1].end, rate


STEPS: Mapping[OptimizerName, Callable[[Piece, StepScalars], torch.Tensor]] = MappingProxyType(
    {OptimizerName.ADAMW: _adam, OptimizerName.ADAM: _adam}
)
"""The step of each optimizer for which GPUs execute UPDATE."""


def sum_squares(gradients: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the squares of fp32 ``gradients``, (elements,), as an fp64 scalar tensor.

    Squares are exact in fp64, so the sum is finite exactly when all gradients are. The order of
    summation is torch's: the sum may differ from the native kernel's in the last bits. ``scratch``:
    fp64, as long as the gradients; overwritten.
    """
    scratch.copy_(gradients)
    return scratch.mul_(scratch).sum()


def _fp32(value: float) -> float:
    return float(np.float32(value))


def _power(base: float, exponent: int) -> float:
    """Returns ``base ** exponent`` by repeated squaring, as ``power`` of ``native/sweeps.cpp``: the
    order of the roundings decides the last bit.
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
