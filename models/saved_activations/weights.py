"""Weights as a saved activation refers to them: by block, name and offset inside the tensor.

A tensor that the forward saved of a weight is a view of the weight's memory. Between forward and
backward that memory may serve another stage, and the weights may return to other memory. So the
view is stored, not the memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from penstock.models.binding import BoundBlock
from penstock.models.saved_activations.tensor_slots import SavedActivationError


class BoundWeights:
    """The current locations of the weights of one stage, shared by all its micro-batches.

    Only the leaves of the blocks bound last are held.
    """

    def __init__(self, blocks: Iterable[BoundBlock] = ()) -> None:
        self._leaves: dict[int, Mapping[str, torch.Tensor]] = {}
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, int, str]] = []
        self.bind(blocks)

    def bind(self, blocks: Iterable[BoundBlock]) -> None:
        """Sets the stage's weights to these blocks, and no others, from now on.

        The leaves' ``.grad`` is ignored: gradients go to the leaves of the forward.
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
        """Releases all weights, because their memory is about to serve other stages."""
        self.bind(())

    def find(self, tensor: torch.Tensor, block: int | None) -> WeightView | None:
        """Returns ``tensor``, of any shape and dtype, as a view of a weight; None if its memory is
        no weight's.

        The address alone decides. Weights stay bound while a forward runs, so no other tensor can
        have memory among theirs. Where several blocks share a tied tensor's memory, ``block`` is
        preferred.
        """
        address = tensor.data_ptr()
        last = bisect_right(self._starts, address) - 1
        if last < 0 or not address < self._ranges[last][1]:
            return None
        # Tied tensors lie at one address under several blocks and names: consider all of them.
        first = bisect_left(self._starts, self._starts[last])
        same = self._ranges[first : last + 1]
        start, _, index, name = next(
            (candidate for candidate in same if candidate[2] == block), same[-1]
        )
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
        """Returns the current leaf of a weight, of the tensor's own shape, in the compute dtype.

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
        """Raises as :meth:`tensor` would."""
        self.weights.leaf(self.block, self.name)
