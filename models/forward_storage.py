"""What a forward leaves for its backward, where autograd alone would not do.

A forward of :class:`~penstock.models.runtime.ModelRuntime` that is given a :class:`ForwardStorage` runs
inside a store of saved activations (:mod:`penstock.models.saved_activations`: operators dropped,
swaps, weights bound anew), taken apart for a split backward
(:mod:`penstock.models.split_backward.split`), or both; the :class:`StoredForward` of its
:class:`~penstock.models.runtime.StageOutput` is then what the instructions in between work on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from penstock.models.binding import BoundBlock
from penstock.models.saved_activations import (
    BoundWeights,
    SavedActivations,
    SavedTensorPolicy,
    saving_activations,
)
from penstock.models.split_backward.split import DeferredWeights, SplitMode


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredForward:
    """What one forward of one stage on one micro-batch left for its backward.

    ``activations``: the store that they are saved in; None: autograd saves them. ``deferred``: the
    weight gradients that BACKWARD_INPUT leaves for BACKWARD_WEIGHT; None: the backward is not
    split. ``watch``: the mode that splits blocks which are not compiled.
    """

    activations: SavedActivations | None
    deferred: DeferredWeights | None
    watch: SplitMode | None

    @contextmanager
    def block(self, index: int, *, compiled: bool) -> Iterator[None]:
        """Run block ``index`` of the model inside. ``compiled``: its products hand their tensors to
        ``deferred``; otherwise the operators are watched where the backward is split.
        """
        with ExitStack() as stack:
            if self.activations is not None:
                stack.enter_context(self.activations.block(index))
            if self.watch is not None and not compiled:
                stack.enter_context(self.watch)
            yield

    def discard(self) -> None:
        """Free everything, because the micro-batch is given up."""
        if self.activations is not None:
            self.activations.discard()
        if self.deferred is not None:
            self.deferred.discard()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardStorage:
    """How a forward is stored.

    ``weights``: where the stage's weights are, now and later. ``policy``: what of the graph stays;
    ``None`` leaves that to autograd. ``split``: whether the backward comes in two halves.
    """

    weights: BoundWeights
    policy: SavedTensorPolicy | None = None
    split: bool = False

    @property
    def drops(self) -> bool:
        """Returns whether operators are dropped, which a compiled layer would hide. Otherwise hooks
        pack the tensors that a graph saves, and the graph may be a compiled one.
        """
        return self.policy is not None and bool(self.policy.drop)

    @contextmanager
    def around(
        self, bound: Sequence[BoundBlock], constants: Sequence[torch.Tensor]
    ) -> Iterator[StoredForward]:
        """Run a forward of ``bound`` inside; ``constants``, tensors of any shape, outlive it."""
        with ExitStack() as stack:
            activations = deferred = watch = None
            # The store first: calls that the split takes apart find its hooks for saved tensors in
            # place, and pack what they keep with them.
            if self.policy is not None:
                activations = stack.enter_context(
                    saving_activations(self.policy, self.weights, constants)
                )
            if self.split:
                deferred = DeferredWeights()
                leaves = [leaf for block in bound for leaf in block.leaves.values()]
                watch = SplitMode(deferred, leaves)
                stack.callback(watch.close)
            yield StoredForward(activations=activations, deferred=deferred, watch=watch)

    def block_now(self, block: BoundBlock) -> BoundBlock:
        """Returns the block over the memory where its weights are now; its gradients go nowhere
        new.

        For parts of a forward that run again inside the backward.

        Raises:
            SavedActivationError: the weights are not bound.
        """
        if self.policy is None or not self.policy.rebind:
            return block
        leaves = {name: self._leaf_now(block, name) for name in block.leaves}
        return BoundBlock(index=block.index, leaves=leaves)

    def _leaf_now(self, block: BoundBlock, name: str) -> torch.Tensor:
        leaf = self.weights.leaf(block.index, name).detach()
        # It must ask for gradients as the first leaf did: a checkpoint that runs again has to save
        # the same tensors as the first time.
        return leaf.requires_grad_(block.leaves[name].requires_grad)
