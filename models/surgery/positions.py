"""The largest sequence length that a model's positions allow.

A table with a row for each position is a hard limit. Rotary frequencies are none, even beyond
``max_position_embeddings``: yarn and its relatives go further.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.models.surgery.decoder_parts import BatchTensors, DecoderParts
from penstock.models.surgery.skeleton import Skeleton, build_skeleton

_LENGTH = "max_position_embeddings"
_TRIAL_TOKENS = 3


def check_positions(config: Config, hf_config: PretrainedConfig, skeleton: Skeleton) -> None:
    """Refuses sequences that are longer than a table of positions.

    Raises:
        ConfigError: names ``data.sequence_length``.
    """
    length = config.data.sequence_length
    rows = _rows(hf_config, skeleton, length)
    if rows is not None and rows < length:
        raise ConfigError(
            f"data.sequence_length = {length}: the model has a table of {rows} positions; give at"
            " most that"
        )


def _rows(hf_config: PretrainedConfig, skeleton: Skeleton, length: int) -> int | None:
    """Returns the positions that the model's smallest table of them has; None without a table."""
    rows = _decoder_positions(skeleton)
    declared = getattr(hf_config, _LENGTH, None)
    if isinstance(declared, int) and 0 < declared < length and _layers_have_tables(hf_config):
        rows.append(declared)
    return min(rows, default=None)


def _decoder_positions(skeleton: Skeleton) -> list[int]:
    """Returns the numbers of positions of the decoder's tables outside of its layers.

    The decoder runs on a few equal tokens. A table that is read at rising rows is a table of
    positions, from the first of these rows on. A model that cannot run on such tokens, such as one
    for pictures, has no table.
    """
    cpu = torch.device("cpu")
    parts = DecoderParts(skeleton, device=cpu, compute_dtype=torch.float32)
    pad = getattr(skeleton.model.config, "pad_token_id", None)
    ids = torch.full((1, _TRIAL_TOKENS), int(pad == 0), dtype=torch.long)
    trial = BatchTensors(shape=(1, _TRIAL_TOKENS))
    with _zeros_in(skeleton), _Lookups() as lookups, torch.no_grad():
        # Forwards of models raise any kind of error.
        with suppress(Exception):
            parts.embed(ids, trial, training=False)
        with suppress(Exception):
            parts.layer_calls(trial)
    return [
        rows - int(indices[0])
        for indices, rows in lookups.seen
        if len(indices) == _TRIAL_TOKENS and bool((torch.diff(indices) == 1).all())
    ]


class _Lookups(TorchFunctionMode):
    """Notes the rows that are read of tables: (indices, rows of the table)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Tensor, int]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is nn.functional.embedding:
            self._note(args[1], args[0])
        elif func is torch.Tensor.__getitem__:
            self._note(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _note(self, table: torch.Tensor, indices: Any) -> None:
        if isinstance(indices, torch.Tensor) and indices.dtype is torch.long:
            self.seen.append((indices.reshape(-1), table.shape[0]))


@contextmanager
def _zeros_in(skeleton: Skeleton) -> Iterator[None]:
    """Gives the parameters of the embedding's block zeros that take no memory."""
    places = [
        place
        for name, first in skeleton.parts[0].tensors.items()
        for place in (first, *skeleton.parts[0].others.get(name, ()))
    ]
    before = [(module, key, module._parameters[key]) for module, key in places]
    try:
        for module, key, parameter in before:
            assert parameter is not None
            zeros = torch.zeros(()).expand(parameter.shape)
            # Past nn.Module's __setattr__, which takes parameters alone.
            module._parameters[key] = zeros
        yield
    finally:
        for module, key, parameter in before:
            module._parameters[key] = parameter


def _layers_have_tables(hf_config: PretrainedConfig) -> bool:
    """Returns whether the layers hold tensors with as many rows as the configuration has positions:
    sizes that another number of positions changes.
    """
    other = copy.deepcopy(hf_config)
    setattr(other, _LENGTH, getattr(hf_config, _LENGTH) + 1)
    sizes = [_layer_sizes(build_skeleton(each)) for each in (hf_config, other)]
    return sizes[0] != sizes[1]


def _layer_sizes(skeleton: Skeleton) -> list[tuple[str, torch.Size]]:
    tensors = (*skeleton.layers.named_buffers(), *skeleton.layers.named_parameters())
    return [(name, tensor.shape) for name, tensor in tensors]
