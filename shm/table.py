"""The block table: a model described as data.

Computed once from the configuration on torch's meta device (``penstock.models``) and saved as JSON
in the run directory. Every daemon reads the JSON, so that no daemon needs torch. Byte positions
inside the shared-memory segments follow from it in :mod:`penstock.shm.layout`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

VECTOR_ELEMENTS = 16
"""Tensors start at multiples of this many elements, so that no vector holds two tensors."""

LOGITS_BYTES = 64 << 20
"""Bytes of a chunk's logits in fp32, in runs without ``loss_rows`` in the table."""

MAX_CONTRIBUTIONS = 12
"""Gradient writers of one block: the control segment has this many ready words for each."""


class DType(StrEnum):
    """Storage types of model state."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return 4 if self is DType.FP32 else 2


def padded(num_elements: int) -> int:
    """Rounds up to whole vectors of :data:`VECTOR_ELEMENTS`."""
    return -(-num_elements // VECTOR_ELEMENTS) * VECTOR_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One parameter (or persistent buffer) of a block.

    ``name`` is its key in the Hugging Face state dict. ``offset`` counts elements from the start of
    the block's trainable array (``trainable``) or of its frozen array (otherwise).
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool
    decay: bool
    offset: int

    @property
    def num_elements(self) -> int:
        """Elements without padding."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowedTensor:
    """A tied tensor: this block computes with ``name`` of block ``owner`` (a head, for example,
    with the embedding's weight).

    ``local_name`` is the tensor's key in the borrowing module. ``contribution`` is the index of the
    owner's gradient range that this use fills; the owner's own use is contribution 0. It is 0 for a
    frozen tensor, which has no gradients.
    """

    name: str
    local_name: str
    owner: int
    contribution: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """One block: embedding, one layer, or final norm + head.

    ``kind`` names the module class and the attributes that differ by layer. Blocks of one kind
    share one module object in a worker. ``trainable_elements`` and ``frozen_elements`` include
    padding. ``forward_flops`` counts floating-point operations of one forward per token at the
    configured sequence length. ``activation_bytes`` counts the bytes that autograd keeps per token,
    ``output_bytes`` the bytes that the block outputs per token. ``contributions`` counts the uses
    of the block's parameters, more than one if they are tied. A plan with several routes has that
    many for each route.
    """

    index: int
    name: str
    kind: str
    layer_index: int | None
    tensors: tuple[TensorSpec, ...]
    borrows: tuple[BorrowedTensor, ...]
    trainable_elements: int
    frozen_elements: int
    contributions: int
    forward_flops: float
    activation_bytes: float
    output_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """All blocks of a model with the storage types of its state.

    ``loss_rows``: rows of hidden states for which a loss computes logits at once; None in tables of
    older runs, see :attr:`rows_of_loss`.
    """

    blocks: tuple[BlockSpec, ...]
    weight_dtype: DType
    grad_dtype: DType
    state_arrays: tuple[str, ...]
    vocab_size: int
    num_parameters: int
    loss_rows: int | None = None

    @property
    def rows_of_loss(self) -> int:
        """Rows of a chunk of the loss: the rounding of gradients depends on the number."""
        return self.loss_rows or max(1, LOGITS_BYTES // (4 * self.vocab_size))

    @property
    def trained_parameters(self) -> int:
        """Number of parameters that the run trains, each tied one once, without padding."""
        tensors = (tensor for block in self.blocks for tensor in block.tensors)
        return sum(tensor.num_elements for tensor in tensors if tensor.trainable)

    def validate(self) -> None:
        """Checks the table's own invariants.

        Raises:
            ValueError: names the number, or the block and the tensor with an impossible place.
        """
        rows = self.loss_rows
        if rows is not None and (type(rows) is not int or rows < 1):
            raise ValueError(f"loss_rows is {rows!r}, expected a number from 1")
        for position, block in enumerate(self.blocks):
            if block.index != position:
                raise ValueError(
                    f"block {block.name!r} has index {block.index}, stands at {position}"
                )
            if not 1 <= block.contributions <= MAX_CONTRIBUTIONS:
                raise ValueError(
                    f"block {block.name!r} has {block.contributions} gradient contributions,"
                    f" expected 1 to {MAX_CONTRIBUTIONS}"
                )
            _check_places(block, trainable=True, limit=block.trainable_elements)
            _check_places(block, trainable=False, limit=block.frozen_elements)
            self._check_borrows(block)

    def _check_borrows(self, block: BlockSpec) -> None:
        for borrowed in block.borrows:
            if not 0 <= borrowed.owner < len(self.blocks):
                raise ValueError(
                    f"block {block.name!r} borrows from block {borrowed.owner},"
                    f" there are {len(self.blocks)}"
                )
            owner = self.blocks[borrowed.owner]
            tied = {t.name: t for t in owner.tensors}.get(borrowed.name)
            if tied is None:
                raise ValueError(f"block {block.name!r} borrows unknown {borrowed.name!r}")
            uses = range(1, owner.contributions) if tied.trainable else range(1)
            if borrowed.contribution not in uses:
                raise ValueError(f"block {block.name!r}: bad contribution {borrowed.contribution}")

    def to_json(self) -> str:
        """Serializes the table; :meth:`from_json` returns an equal table."""
        fields = dataclasses.asdict(self)
        if self.loss_rows is None:
            del fields["loss_rows"]  # The digest of an older run's table stays the same.
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> BlockTable:
        """Parses and validates a table.

        Raises:
            ValueError: the text is no block table, or its invariants do not hold.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            blocks = tuple(_block(entry) for entry in data.pop("blocks"))
            table = cls(
                blocks=blocks,
                weight_dtype=DType(data.pop("weight_dtype")),
                grad_dtype=DType(data.pop("grad_dtype")),
                state_arrays=tuple(data.pop("state_arrays")),
                **data,
            )
            table.validate()
        except (LookupError, ArithmeticError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a block table: {error!r}") from error
        return table

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the serialized table; memory laid out for one fits no other."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def _check_places(block: BlockSpec, *, trainable: bool, limit: int) -> None:
    """Checks that the tensors of one array follow one another, each starting at a whole vector."""
    end = 0
    tensors = (t for t in block.tensors if t.trainable is trainable)
    for tensor in sorted(tensors, key=lambda t: t.offset):
        if tensor.offset != end:
            raise ValueError(
                f"block {block.name!r}: tensor {tensor.name!r} starts at element {tensor.offset},"
                f" expected {end}"
            )
        end = tensor.offset + padded(tensor.num_elements)
    if end != limit:
        raise ValueError(f"block {block.name!r}: tensors end at {end}, array at {limit}")


def _block(entry: dict[str, Any]) -> BlockSpec:
    tensors = tuple(
        TensorSpec(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in entry.pop("tensors")
    )
    borrows = tuple(BorrowedTensor(**borrowed) for borrowed in entry.pop("borrows"))
    return BlockSpec(tensors=tensors, borrows=borrows, **entry)
