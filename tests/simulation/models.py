"""Numbers instead of models, in workers of simulated processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.models.runtime import HIDDEN, Borrowed
from penstock.workers.platforms.emulated.runtime import (
    EmulatedBlock,
    EmulatedOutput,
    EmulatedRuntime,
)


class SimRuntime(EmulatedRuntime):
    """Gradients are no multiples of a power of two: whoever sums in another order gets other bits.
    Some gradients overflow while the loss scale is high; one backward in ``undefined`` (0: none)
    has an infinite one at any scale.
    """

    def __init__(self, table: Any, *, seed: int, overflows: bool, undefined: int) -> None:
        super().__init__(table, seed=seed)
        self._overflows = overflows
        self._undefined = undefined

    def backward_input(self, output: EmulatedOutput, gradients: Any) -> Any:
        """See :class:`EmulatedRuntime`."""
        tensors, deferred = super().backward_input(output, gradients)
        block, factor = deferred[0]
        number = int(tensors[HIDDEN][0])
        deferred = tuple(
            (block, factor * _roughness(number, block.index)) for block, factor in deferred
        )
        scaled = self._overflows and output.amplitude > 8.0 and number % 3 == 0
        if scaled or (self._undefined and number % self._undefined == 0):
            deferred = ((block, math.copysign(math.inf, factor)), *deferred[1:])
        return tensors, deferred


def _roughness(number: int, block: int) -> float:
    """Returns a factor between 0.5 and 1 of 10 bits, which follows from backward and block. With it
    gradients have all 24 bits of float32: products are exact on every processor, sums are not.
    """
    return (512 + (number + 37 * block) % 512) / 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _SmoothBlock(EmulatedBlock):
    """``level``: a sum over its weights that changes with each step, and little with a bit."""

    level: float


class SmoothRuntime(SimRuntime):
    """For runs whose weights have rounding errors: losses and gradients follow from weights without
    jumps, so what is a rounding error in weights is one in everything else.
    """

    def bind(
        self,
        block: int,
        *,
        weights: torch.Tensor | None,
        borrowed: Mapping[str, Borrowed] | None = None,
        **named: Any,
    ) -> EmulatedBlock:
        """Its number follows from no weights."""
        bound = super().bind(block, weights=None, **named)
        lent = [array for array, _ in (borrowed or {}).values()]
        arrays = [array.double() for array in (weights, *lent) if array is not None]
        level = sum(float((array * torch.arange(len(array)).cos()).mean()) for array in arrays)
        return _SmoothBlock(
            index=block, weights=bound.weights, gradients=bound.gradients, level=level
        )

    def forward(self, bound: Any, *args: Any, **named: Any) -> EmulatedOutput:
        """See :class:`EmulatedRuntime`."""
        output = super().forward(bound, *args, **named)
        if output.loss_sum is None:
            return output
        factor = 1.0 + sum(block.level for block in bound) / 16
        return replace(output, loss_sum=output.loss_sum * factor)

    def backward_input(self, output: EmulatedOutput, gradients: Any) -> Any:
        """See :class:`EmulatedRuntime`."""
        tensors, deferred = super().backward_input(output, gradients)
        smooth = ((b, factor * (1.5 + math.tanh(4 * b.level))) for b, factor in deferred)
        return tensors, tuple(smooth)
