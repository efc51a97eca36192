"""Weights as a saved activation sees them: by block, name and place inside the tensor.

What the forward saved of a weight is a view of its memory. Between forward and backward the memory
may be given to another stage, and the weights may come back elsewhere; so the view is remembered,
not the memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from penstock.models.binding import BoundBlock
from penstock.models.saved_activations.tensor_slots import SavedActivationError


class BoundWeights:
    """Where the weights of one stage are now. Shared by all micro-batches of the stage.

    Nothing is held but the leaves of the blocks bound last.
    """

    def __init__(self, blocks: Iterable[BoundBlock] = ()) -> None:
        self._leaves: dict[int, Mapping[str, torch.Tensor]] = {}
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, int, str]] = []
        self.bind(blocks)

    def bind(self, blocks: Iterable[BoundBlock]) -> None:
        """Take these blocks, and no others, for the place of the stage's weights from now on.

        The leaves' ``.grad`` is not looked at: gradients go to the leaves of the forward.
        """
        self._leaves = {block.index: block.leaves for block in blocks}
        # Sorted once, here: find() runs for every tensor that a forward saves.
        self._ranges = sorted(
            (leaf.data_ptr(), leaf.data_ptr() + leaf.nbytes, index, name)
            for index, leaves in self._leaves.items()
            for name, leaf in leaves.items()
            if leaf.numel()
        )
        self._starts = [start for start, *_ in self._ranges]

    def release(self) -> None:
        """Let go of all weights, because their memory is going to belong to others."""
        self.bind(())

    def find(self, tensor: torch.Tensor, block: int | None) -> WeightView | None:
        """Returns the view of a weight that ``tensor``, of any shape and dtype, is; None if its
        memory is no weight's.

        Goes by address alone: while a forward runs, its weights stay bound, so no other tensor can
        have memory among theirs.
        Where a tied tensor is the same memory in several blocks, ``block`` is preferred.
        """
        address = tensor.data_ptr()
        last = bisect_right(self._starts, address) - 1
        if last < 0 or not address < self._ranges[last][1]:
            return None
        # Tied tensors lie at one address under several blocks and names: look at all of them.
        first = bisect_left(self._starts, self._starts[last])
        same = self._ranges[first : last + 1]
        start, _, index, name = next((found for found in same if found[2] == block), same[-1])
        return WeightView(
            weights=self,
            block=index,
            name=name,
            offset_bytes=address - start,
            dtype=tensor.dtype,
            size=tensor.size(),
            stride=tensor.stride(),
        )

    def leaf(self, block: int, name: str) -> torch.Tensor:
        """Returns a weight where it is now: the leaf, of the tensor's own shape, in the compute
        dtype.

        Raises:
            SavedActivationError: its block is not bound.
        """
        try:
            return self._leaves[block][name]
        except KeyError:
            raise SavedActivationError(
                f"weight {name!r} of block {block} is needed and not bound: fetch the stage's"
                " weights and bind them before its recomputation or backward"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightView:
    """A weight, or a part or transposition of it, by place: none of its memory is held.

    ``offset_bytes`` counts from the start of the weight; ``stride`` counts elements of ``dtype``.
    """

    weights: BoundWeights
    block: int
    name: str
    offset_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """Returns the view, of shape ``size``, over the weights that are bound now.

        Raises:
            SavedActivationError: the weight's block is not bound.
        """
        leaf = self.weights.leaf(self.block, self.name)
        offset = leaf.storage_offset() * leaf.itemsize + self.offset_bytes
        # The leaf may lie anywhere in its flat array, so its own offset counts, too.
        return torch.empty(0, dtype=self.dtype, device=leaf.device).set_(
            leaf.untyped_storage(), offset // self.dtype.itemsize, self.size, self.stride
        )

    def check(self) -> None:
        """Raise what :meth:`tensor` would."""
        self.weights.leaf(self.block, self.name)
