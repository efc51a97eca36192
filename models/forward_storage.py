"""The storage of a forward for a backward that autograd alone cannot serve.

A forward of :class:`~penstock.models.runtime.ModelRuntime` with a :class:`ForwardStorage` has one
or both of two parts:

* a store of saved activations (:mod:`penstock.models.saved_activations`): operators are dropped,
  activations swapped, weights found again by name;
* deferred weight gradients for a split backward (:mod:`penstock.models.split_backward.split`).

The :class:`~penstock.models.runtime.StageOutput` holds the resulting :class:`StoredForward`. Later
instructions work on that object.
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
    """The results of one forward of one stage on one micro-batch, kept for its backward.

    ``activations``: the store of saved tensors; None: autograd saves them. ``deferred``: the weight
    gradients that BACKWARD_INPUT leaves for BACKWARD_WEIGHT; None: the backward is not split.
    ``watch``: the mode that splits blocks which are not compiled.
    """

    activations: SavedActivations | None
    deferred: DeferredWeights | None
    watch: SplitMode | None

    @contextmanager
    def block(self, index: int, *, compiled: bool) -> Iterator[None]:
        """Runs block ``index`` of the model inside the context.

        ``compiled``: the block's products hand their tensors to ``deferred``. Otherwise ``watch``
        follows the operators if the backward is split.
        """
        with ExitStack() as stack:
            if self.activations is not None:
                stack.enter_context(self.activations.block(index))
            if self.watch is not None and not compiled:
                stack.enter_context(self.watch)
            yield

    def discard(self) -> None:
        """Frees everything, because the micro-batch is dropped."""
        if self.activations is not None:
            self.activations.discard()
        if self.deferred is not None:
            self.deferred.discard()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardStorage:
    """The settings of a forward's storage.

    ``weights``: the current locations of the stage's weights. ``policy``: the tensors of the graph
    that stay; None leaves the choice to autograd. ``split``: True if the backward comes in two
    halves.
    """

    weights: BoundWeights
    policy: SavedTensorPolicy | None = None
    split: bool = False

    @property
    def drops(self) -> bool:
        """True if operators are dropped. A compiled layer would hide them from the recorder;
        without dropped operators hooks pack the saved tensors, and the graph may be compiled.
        """
        return self.policy is not None and bool(self.policy.drop)

    @contextmanager
    def around(
        self, bound: Sequence[BoundBlock], constants: Sequence[torch.Tensor]
    ) -> Iterator[StoredForward]:
        """Runs a forward of ``bound`` inside; ``constants``, tensors of any shape, outlive the
        forward.
        """
        with ExitStack() as stack:
            activations = deferred = watch = None
            # The store comes first: calls that the split takes apart must find its hooks for saved
            # tensors, and pack their tensors with them.
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
        """Returns the block over the current memory of its weights. Its gradients still go to the
        first leaves.

        Parts of a forward that run again inside the backward use it.

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
