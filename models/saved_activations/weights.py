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
from penstock.models.saved_activations.slots import SavedActivationError


class BoundWeights:
    """Where the weights of one stage are now. Shared by all micro-batches of the stage."""

    def __init__(self, blocks: Iterable[BoundBlock] = ()) -> None:
        self._leaves: dict[int, Mapping[str, torch.Tensor]] = {}
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, int, str]] = []
        self.bind(blocks)

    def bind(self, blocks: Iterable[BoundBlock]) -> None:
        """From now on these blocks, and no others, are where their leaves are.

        The leaves' ``.grad`` is not looked at: gradients go to the leaves of the forward.
        """
        self._leaves = {block.index: block.leaves for block in blocks}
        self._ranges = sorted(
            (leaf.data_ptr(), leaf.data_ptr() + leaf.nbytes, index, name)
            for index, leaves in self._leaves.items()
            for name, leaf in leaves.items()
            if leaf.numel()
        )
        self._starts = [start for start, *_ in self._ranges]

    def release(self) -> None:
        """The memory belongs to others; no reference to it is left here."""
        self.bind(())

    def find(self, tensor: torch.Tensor, block: int | None) -> WeightView | None:
        """The view of a weight that ``tensor`` is, or None if its memory is no weight's.

        Where a tied tensor is the same memory in several blocks, ``block`` is preferred.
        """
        address = tensor.data_ptr()
        last = bisect_right(self._starts, address) - 1
        if last < 0 or not address < self._ranges[last][1]:
            return None
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
        """Where a weight is now.

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
    """A weight, or a part or transposition of it: nothing is held."""

    weights: BoundWeights
    block: int
    name: str
    offset_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """The view of the weights bound now."""
        leaf = self.weights.leaf(self.block, self.name)
        offset = leaf.storage_offset() * leaf.itemsize + self.offset_bytes
        return torch.empty(0, dtype=self.dtype, device=leaf.device).set_(
            leaf.untyped_storage(), offset // self.dtype.itemsize, self.size, self.stride
        )

    def check(self) -> None:
        """Raise what :meth:`tensor` would."""
        self.weights.leaf(self.block, self.name)
