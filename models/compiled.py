"""Layers through ``torch.compile``: one graph for all layers of a kind.

The runtime has one module object per kind, whose parameters are other tensors for each layer. For
the compiler parameters are inputs of its graph: it checks their types and shapes, not which they
are, so the second layer compiles nothing. What does need a graph of its own: with and without
autograd, training and evaluation, another micro-batch shape, other frozen tensors, and a layer
number that the model's code reads (GPT-2's ``scale_attn_by_inverse_layer_idx``); beyond torch's
limit of such variants (8 for each module class) layers run uncompiled.

Forwards that somebody watches (split backward, dropped operators, swaps, weights bound anew; see
:mod:`penstock.models.storing`) run uncompiled: hooks and modes would see one opaque function. So do
embedding and head, which are calls of a whole decoder around stubs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from penstock.models.binding import BoundBlock

_OPTIONS: Mapping[str, dict[str, Any]] = MappingProxyType({"inductor": {"fallback_random": True}})
"""Random numbers come from torch's own kernels: dropout of a recomputation, which is another graph
than that of its forward, must hit the same elements."""


class CompiledLayer:
    """The module of one kind of layer; compiled when it first runs (seconds to minutes)."""

    def __init__(self, layer: nn.Module, backend: str) -> None:
        self._run: Any = torch.compile(
            layer, backend=backend, dynamic=False, options=_OPTIONS.get(backend)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer: arguments and results are its own, of the same shapes and dtypes."""
        return self._run(*args, **kwargs)

    def aliased(self, block: BoundBlock) -> BoundBlock:
        """Returns the block over tensors that share its leaves' memory and hand their gradients on.

        The leaves themselves have gradients that may be wider than they are, which the compiler's
        stand-ins for tensors cannot have.
        """
        # Without autograd nobody asks for gradients, and a detached tensor is alias enough.
        leaves = {
            name: _alias(leaf) if leaf.requires_grad and torch.is_grad_enabled() else leaf.detach()
            for name, leaf in block.leaves.items()
        }
        return BoundBlock(index=block.index, leaves=leaves)


class _Alias(torch.autograd.Function):
    """A tensor over the same memory that autograd takes for neither a leaf nor a view of one."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # In the compute dtype; autograd converts it when it adds it to the leaf's wider sum.
        return gradients[0]


def _alias(leaf: torch.Tensor) -> torch.Tensor:
    aliased: torch.Tensor = _Alias.apply(leaf)  # type: ignore[no-untyped-call]
    return aliased
