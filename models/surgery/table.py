"""The block table of a configuration: the tensors of each block, and its estimated costs.

The costs serve planning before any measurement; ``penstock profile`` measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig

from penstock.config.schema import Config
from penstock.config.training import TrainConfig
from penstock.host.errors import ConfigError
from penstock.host.limits.bounds import matching
from penstock.models.adapters.settings import Adapter
from penstock.models.loss import loss_rows
from penstock.models.surgery.positions import check_positions
from penstock.models.surgery.skeleton import (
    EMBEDDING_KIND,
    HEAD_KIND,
    Part,
    Skeleton,
    build_skeleton,
    predicts_masked,
)
from penstock.protocol.plan.groups import check_matches, is_matched
from penstock.shm.table import BlockSpec, BlockTable, BorrowedTensor, TensorSpec, padded


def build_table(
    config: Config,
    hf_config: PretrainedConfig,
    skeleton: Skeleton | None = None,
    *,
    previous: BlockTable | None = None,
) -> BlockTable:
    """Returns the model of ``hf_config`` as blocks: embedding, each layer, final norm + head.

    ``skeleton`` is that model, with its adapters, if it has been built already. ``previous``: the
    table of a run that has trained; the run keeps the chunks of its loss.

    Trainable tensors of a block lie in state-dict order, those with weight decay (two or more axes)
    first. A tied tensor belongs to the first block that uses it; later ones borrow it.

    Raises:
        ConfigError: the architecture cannot be cut into blocks, or its table of positions is too
            short for the sequences. Or a pattern matches no parameter, or nothing is left to train.
    """
    skeleton = build_skeleton(hf_config, config.adapter) if skeleton is None else skeleton
    check_positions(config, hf_config, skeleton)
    tied = skeleton.tied_names()
    frozen = _frozen_names(config.train, skeleton.adapter, tied)
    ties = _Ties.find(skeleton, tied, frozen)
    vocab_size = int(hf_config.vocab_size)
    costs = _Costs(
        hf_config=skeleton.model.config,
        sequence_length=config.data.sequence_length,
        itemsize=config.model.dtype.itemsize,
        rows_of_loss=previous.rows_of_loss if previous else loss_rows(vocab_size),
    )
    blocks = tuple(
        _block(index, part, ties, frozen, costs) for index, part in enumerate(skeleton.parts)
    )
    table = BlockTable(
        blocks=blocks,
        weight_dtype=config.model.dtype,
        grad_dtype=config.optimizer.grad_dtype,
        state_arrays=config.optimizer.name.traits.state_arrays,
        vocab_size=vocab_size,
        num_parameters=sum(t.num_elements for b in blocks for t in b.tensors),
        loss_rows=previous.loss_rows if previous else loss_rows(vocab_size),
    )
    table.validate()
    return table


def _frozen_names(
    train: TrainConfig, adapter: Adapter | None, tied: dict[str, list[str]]
) -> frozenset[str]:
    """Returns the owners' names of the parameters that are not trained. A pattern matches a
    parameter under any of its names.
    """
    names = [name for group in tied.values() for name in group]
    key, patterns = ("train.only", train.only) if train.only else ("train.freeze", train.freeze)
    with matching(key, patterns, len(names)):
        check_matches(key, patterns, names)
        frozen = {o for o, group in tied.items() if is_matched(patterns, group) != bool(train.only)}
    if adapter is not None:
        frozen |= {o for o, group in tied.items() if not any(map(adapter.trains, group))}
    if len(frozen) == len(tied):
        what = "of the adapter" if adapter is not None else "of the model"
        raise ConfigError(
            f"{key}: {list(patterns)} freezes every parameter {what}; nothing is left to train"
        )
    return frozenset(frozen)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ties:
    """Tied parameters: ``borrows[block]`` lists those of other blocks, and ``contributions[block]``
    counts the uses of a block's parameters, each with separate gradients.
    """

    borrows: dict[int, tuple[BorrowedTensor, ...]]
    contributions: dict[int, int]

    @classmethod
    def find(cls, skeleton: Skeleton, tied: dict[str, list[str]], frozen: frozenset[str]) -> _Ties:
        block_of = {name: i for i, part in enumerate(skeleton.parts) for name in part.tensors}
        borrowers: dict[int, list[int]] = {}
        borrows: dict[int, list[BorrowedTensor]] = {}
        for owner_name, aliases in tied.items():
            owner = block_of[owner_name]
            for alias in aliases[1:]:
                block = block_of[alias]
                if block == owner:
                    raise ConfigError(
                        f"model: {alias} and {owner_name} share memory inside one block; this"
                        " architecture is not supported"
                    )
                # One gradient partial per borrowing block: its range holds the owner's whole block.
                users = borrowers.setdefault(owner, [])
                if owner_name not in frozen and block not in users:
                    users.append(block)
                contribution = 0 if owner_name in frozen else 1 + users.index(block)
                borrows.setdefault(block, []).append(
                    BorrowedTensor(
                        name=owner_name, local_name=alias, owner=owner, contribution=contribution
                    )
                )
        return cls(
            borrows={block: tuple(entries) for block, entries in borrows.items()},
            contributions={block: 1 + len(users) for block, users in borrowers.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """Estimates per token of a micro-batch of sequences of ``sequence_length`` tokens.

    A matrix costs two operations an element. Attention over s tokens, scores and values of h heads
    of d numbers, costs 2 * 2 s h d operations a token. Causal attention costs half of that
    (Narayanan et al. 2021, arXiv 2104.04473, appendix). Layers without attention (Mamba) cost their
    matrices. Of the scan over n states of each of d channels, A (d, n) is one.
    """

    hf_config: PretrainedConfig
    sequence_length: int
    itemsize: int
    rows_of_loss: int

    @property
    def _hidden(self) -> int:
        return int(self.hf_config.hidden_size)

    def forward_flops(self, part: Part, shapes: Sequence[tuple[int, ...]]) -> float:
        if part.kind == EMBEDDING_KIND:
            return float(self._hidden)
        matrices = 2.0 * sum(math.prod(shape) for shape in shapes if len(shape) >= 2)
        if part.kind == HEAD_KIND:
            return matrices + 5.0 * int(self.hf_config.vocab_size)
        heads = self._size("num_attention_heads")
        if not heads:
            return matrices
        head_size = self._size("head_dim") or self._hidden // heads
        seen = 2.0 if predicts_masked(self.hf_config) else 1.0
        return matrices + seen * 2.0 * self.sequence_length * heads * head_size

    def _size(self, key: str) -> int:
        """Returns a number of the configuration; 0 if it is absent, or is a list with one for each
        layer.
        """
        try:
            return int(getattr(self.hf_config, key, None) or 0)
        except Exception:  # transformers has an error of its own for the latter
            return 0

    def activation_bytes(self, part: Part, shapes: Sequence[tuple[int, ...]]) -> float:
        if part.kind == EMBEDDING_KIND:
            return 8.0
        if part.kind == HEAD_KIND:
            logits = 8.0 * int(self.hf_config.vocab_size)
            kept = logits if self.rows_of_loss >= self.sequence_length else 0.0
            return 3.0 * self.itemsize * self._hidden + kept
        # Each matrix keeps its input; its output is kept by what follows (attention, activation,
        # residual).
        ends = sum(sum(shape[-2:]) for shape in shapes if len(shape) >= 2)
        return float(self.itemsize * (ends + 2 * self._hidden))

    def output_bytes(self, part: Part) -> float:
        return 0.0 if part.kind == HEAD_KIND else float(self.itemsize * self._hidden)


def _block(index: int, part: Part, ties: _Ties, frozen: frozenset[str], costs: _Costs) -> BlockSpec:
    borrows = ties.borrows.get(index, ())
    borrowed = {b.local_name for b in borrows}
    shapes = {
        name: tuple(getattr(module, attribute).shape)
        for name, (module, attribute) in part.tensors.items()
    }
    owned_shapes = {name: shape for name, shape in shapes.items() if name not in borrowed}
    trainable, trainable_elements = _place(
        sorted(
            (n for n in owned_shapes if n not in frozen), key=lambda n: len(owned_shapes[n]) < 2
        ),
        owned_shapes,
        True,
    )
    kept, frozen_elements = _place([n for n in owned_shapes if n in frozen], owned_shapes, False)
    return BlockSpec(
        index=index,
        name=part.name,
        kind=part.kind,
        layer_index=part.layer_index,
        tensors=(*trainable, *kept),
        borrows=borrows,
        trainable_elements=trainable_elements,
        frozen_elements=frozen_elements,
        contributions=ties.contributions.get(index, 1),
        forward_flops=costs.forward_flops(part, list(shapes.values())),
        activation_bytes=costs.activation_bytes(part, list(shapes.values())),
        output_bytes=costs.output_bytes(part),
    )


def _place(
    names: Sequence[str], shapes: dict[str, tuple[int, ...]], trainable: bool
) -> tuple[list[TensorSpec], int]:
    specs: list[TensorSpec] = []
    offset = 0
    for name in names:
        spec = TensorSpec(
            name=name,
            shape=shapes[name],
            trainable=trainable,
            decay=trainable and len(shapes[name]) >= 2,
            offset=offset,
        )
        specs.append(spec)
        # Each tensor starts at a whole vector of the kernels; what lies between is zero.
        offset += padded(spec.num_elements)
    return specs, offset
