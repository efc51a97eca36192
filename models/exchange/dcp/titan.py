"""torchtitan's names and orders of rows as those of transformers, for llama3 and qwen3.

The names of llama3 are those of torchtitan at commit 9db065018e077ae3fc2693e0d28dd426ac659a2f, in
its ``state_dict_adapter.py``. Those of qwen3 are of 1a618d1d75dc67b78977fb35a785633b70e5999e. In
release 0.3.0 some names have ``qkv_linear`` and ``lm_head``.

torchtitan's llama3 rotates neighbouring rows of q and k. transformers rotates rows of two halves of
a head. So these rows are moved, in weights and in moments. Release 0.3.0 keeps moments of q, k and
v in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from penstock.host.errors import ConfigError
from penstock.models.exchange.dcp.metadata import METADATA, ChunkedTensor
from penstock.models.exchange.dcp.names import NamedContents
from penstock.models.exchange.foreign import WEIGHT, ForeignState, ForeignTensor
from penstock.models.surgery.skeleton import Skeleton

KIND = "torchtitan"
EMBEDDING = "tok_embeddings.weight"
Load = Callable[[], torch.Tensor]

_TOP: Mapping[str, str] = MappingProxyType(
    {
        EMBEDDING: "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        "lm_head.weight": "lm_head.weight",
    }
)
_MODULES: Mapping[str, str] = MappingProxyType(
    {
        **{f"attention.w{x}": f"self_attn.{x}_proj" for x in "qkvo"},
        **{f"attention.qkv_linear.w{x}": f"self_attn.{x}_proj" for x in "qkv"},
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
)
"""Modules of a layer."""
_FUSED = "attention.qkv_linear.wqkv"
_PROJECTIONS = tuple(f"self_attn.{x}_proj" for x in "qkv")
_NAME = re.compile(r"layers\.(\d+)\.(.+)\.weight")


def is_titan(contents: NamedContents) -> bool:
    """Returns whether the parameters have torchtitan's names."""
    return (EMBEDDING, WEIGHT) in contents.tensors


def names_of(name: str) -> tuple[str, ...]:
    """Returns transformers' names of a parameter; three for a joined projection, none if neither
    llama3 nor qwen3 has the parameter.
    """
    if name in _TOP:
        return (_TOP[name],)
    match = _NAME.fullmatch(name)
    if match is None:
        return ()
    layer, module = match.groups()
    modules = _PROJECTIONS if module == _FUSED else tuple(filter(None, [_MODULES.get(module)]))
    return tuple(f"model.layers.{layer}.{each}.weight" for each in modules)


def as_transformers(path: Path, contents: NamedContents, state: ForeignState) -> ForeignState:
    """Returns the checkpoint ``state`` under transformers' names. Loads of q and k follow once the
    run's model is known.

    Raises:
        ConfigError: the checkpoint is of another family of torchtitan.
    """
    every = {name for name, _ in contents.tensors} | set(contents.steps)
    unknown = sorted(name for name in every if not names_of(name))
    if unknown or any((_fused(name), WEIGHT) in contents.tensors for name in every):
        shown = unknown[0] if unknown else _FUSED
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
        config = skeleton.model.config
        size = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        return replace(known, tensors=tuple(tensors(_Heads(size=size))), fit=None)

    return replace(known, tensors=tuple(tensors(None)), fit=fit)


@dataclass(frozen=True, slots=True)
class _Heads:
    """Rows of a head."""

    size: int

    def halves(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns rows of pairs as rows of halves, head by head. Shape ``(rows, columns)``."""
        parts = tensor.reshape(-1, self.size // 2, 2, *tensor.shape[1:])
        return parts.transpose(1, 2).reshape(tensor.shape)

    def part(self, tensor: torch.Tensor, number: int, queries: int) -> torch.Tensor:
        """Returns the rows of q, k or v of a joined tensor. Each group has ``queries`` heads of q,
        one of k and one of v.
        """
        groups = tensor.reshape(-1, queries + 2, self.size, *tensor.shape[1:])
        first, last = ((0, queries), (queries, queries + 1), (queries + 1, queries + 2))[number]
        return groups[:, first:last].reshape(-1, *tensor.shape[1:])


def _tensors(path: Path, contents: NamedContents, heads: _Heads | None) -> Iterator[ForeignTensor]:
    rotates_pairs = not any(".q_norm." in name for name, _ in contents.tensors)
    for (name, role), tensor in contents.tensors.items():
        names = names_of(name)
        rows = [tensor.shape[0]] if tensor.shape else []
        if len(names) > 1:
            rows = _rows(path, contents, name, tensor)
        for number, to in enumerate(names):
            moves = rotates_pairs and (".q_proj." in to or ".k_proj." in to)
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
                file=tensor.files,
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
    heads: _Heads | None,
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


def _fused(name: str) -> str:
    match = _NAME.fullmatch(name)
    return "" if match is None else f"layers.{match[1]}.{_FUSED}.weight"
