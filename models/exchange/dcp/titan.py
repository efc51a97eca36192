"""Checkpoints with torchtitan's names and rows as those of transformers.

Release 0.3.0 keeps moments of q, k and v in one tensor, which is divided.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from penstock.host.errors import ConfigError
from penstock.models.checkpoints.exports.torchtitan import (
    EMBEDDING,
    FUSED,
    Heads,
    fused_name,
    has_moved_rows,
    names_of,
)
from penstock.models.exchange.dcp.metadata import METADATA, ChunkedTensor
from penstock.models.exchange.dcp.names import NamedContents
from penstock.models.exchange.foreign import WEIGHT, ForeignState, ForeignTensor
from penstock.models.surgery.skeleton import Skeleton

KIND = "torchtitan"


def is_titan(contents: NamedContents) -> bool:
    """Returns whether the parameters have torchtitan's names."""
    return (EMBEDDING, WEIGHT) in contents.tensors


def as_transformers(path: Path, contents: NamedContents, state: ForeignState) -> ForeignState:
    """Returns the checkpoint ``state`` under transformers' names. Loads of q and k follow once the
    run's model is known.

    Raises:
        ConfigError: the checkpoint is of another family of torchtitan.
    """
    every = {name for name, _ in contents.tensors} | set(contents.steps)
    unknown = sorted(name for name in every if not names_of(name))
    if unknown or any((fused_name(name), WEIGHT) in contents.tensors for name in every):
        shown = unknown[0] if unknown else FUSED
        raise ConfigError(
            f"{path / METADATA}: is of torchtitan and has {shown}, which is not in its llama3 or"
            " qwen3; convert the checkpoint there to files of Hugging Face"
        )
    groups = tuple(
        replace(group, names=tuple(to for name in group.names for to in names_of(name)))
        for group in state.groups
    )
    known = replace(
        state,
        kind=KIND,
        steps={to: n for name, n in contents.steps.items() for to in names_of(name)},
        groups=groups,
    )
    tensors = partial(_tensors, path, contents)

    def fit(skeleton: Skeleton, trained: Collection[str]) -> ForeignState:
        heads = Heads.of(skeleton.model.config)
        return replace(known, tensors=tuple(tensors(heads)), fit=None)

    return replace(known, tensors=tuple(tensors(None)), fit=fit)


def _tensors(path: Path, contents: NamedContents, heads: Heads | None) -> Iterator[ForeignTensor]:
    rotates_pairs = not any(".q_norm." in name for name, _ in contents.tensors)
    for (name, role), tensor in contents.tensors.items():
        names = names_of(name)
        rows = [tensor.shape[0]] if tensor.shape else []
        if len(names) > 1:
            rows = _rows(path, contents, name, tensor)
        for number, to in enumerate(names):
            moves = rotates_pairs and has_moved_rows(to)
            shape = (rows[number], *tensor.shape[1:]) if rows else tensor.shape
            load = tensor.load
            if moves or len(names) > 1:
                fused = number if len(names) > 1 else None
                load = partial(_load, path, tensor, heads, rows, fused, moves=moves)
            num_elements = tensor.num_elements // sum(rows) * rows[number] if sum(rows) else 0
            yield ForeignTensor(
                name=to,
                role=role,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=shape,
                num_elements=num_elements,
                num_bytes=tensor.num_bytes
                if len(names) == 1
                else num_elements * tensor.dtype.itemsize,
                file=tensor.files(path),
                load=load,
            )


def _rows(path: Path, contents: NamedContents, name: str, tensor: ChunkedTensor) -> list[int]:
    """Returns the rows of q, k and v in a joined tensor, as the separate weights have them."""
    prefix = name.removesuffix("wqkv.weight")
    weights = [contents.tensors.get((f"{prefix}w{x}.weight", WEIGHT)) for x in "qkv"]
    rows = [weight.shape[0] for weight in weights if weight is not None and weight.shape]
    if len(rows) < 3 or sum(rows) != tensor.shape[0] or not rows[1] or rows[0] % rows[1]:
        raise ConfigError(
            f"{path / METADATA}: {name} of the optimizer does not fit the weights of q, k and v;"
            " give --weights-only"
        )
    return rows


def _load(
    path: Path,
    tensor: ChunkedTensor,
    heads: Heads | None,
    rows: list[int],
    fused: int | None,
    *,
    moves: bool,
) -> torch.Tensor:
    if heads is None or heads.size % 2 or any(count % heads.size for count in rows):
        size = "unknown" if heads is None else heads.size
        raise ConfigError(
            f"{path / METADATA}: {tensor.key} has {rows} rows, and a head of the configuration's"
            f" model has {size}; give the configuration of the model that was trained"
        )
    value = tensor.load()
    if fused is not None:
        value = heads.part(value, fused, rows[0] // rows[1])
    return heads.halves(value) if moves else value
