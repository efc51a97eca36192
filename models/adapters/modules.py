"""Modules with an adapter: their own forward, plus the adapter's.

An adapted module keeps its object, parameters and names; its class becomes one that adds the
adapter. So the tensors of the model's files have their names still, and those of the adapter the
names of PEFT's files.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.adapters.settings import AdaptedModule, Adapter


class AdaptedProduct(nn.Module):
    """Adds B A x times a factor to a linear module's output; rows are (..., inputs)."""

    lora_A: nn.Module
    lora_B: nn.Module
    lora_dropout: nn.Module
    lora_scale: float

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns (..., outputs)."""
        result: torch.Tensor = super().forward(rows)
        added: torch.Tensor = self.lora_B(self.lora_A(self.lora_dropout(rows)))
        return result + added * self.lora_scale


class AdaptedEmbedding(nn.Module):
    """Adds the adapter's rows to those of an embedding; ids are int64 of any shape."""

    lora_embedding_A: nn.Parameter
    lora_embedding_B: nn.Parameter
    lora_scale: float
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns (..., dim)."""
        result: torch.Tensor = super().forward(ids)
        rows = F.embedding(
            ids,
            self.lora_embedding_A.T,
            padding_idx=self.padding_idx,
            max_norm=self.max_norm,
            norm_type=self.norm_type,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
        )
        added = rows @ self.lora_embedding_B.T * self.lora_scale
        scale = getattr(self, "embed_scale", None)  # of models that scale their embeddings (Gemma)
        if scale is not None:
            added = added * (scale.to(added.dtype) if isinstance(scale, torch.Tensor) else scale)
        return result + added


def inject(model: nn.Module, adapter: Adapter) -> None:
    """Gives the modules of a model on the meta device their adapters, without numbers."""
    for name, adapted in adapter.modules.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            _inject_embedding(module, adapted)
        else:
            _inject_product(module, adapted, adapter.dropout)
        vars(module)["lora_scale"] = adapted.scale
        module.__class__ = _adapted_class(type(module))  # type: ignore[arg-type]  # hashable


def _inject_product(module: Any, adapted: AdaptedModule, dropout: float) -> None:
    outputs, inputs = module.weight.shape
    if not isinstance(module, nn.Linear):
        inputs, outputs = outputs, inputs  # Conv1D has (inputs, outputs)
    kind = {"device": "meta", "dtype": module.weight.dtype}
    module.lora_A = nn.Linear(inputs, adapted.r, bias=False, **kind)
    module.lora_B = nn.Linear(adapted.r, outputs, bias=False, **kind)
    module.lora_dropout = nn.Dropout(dropout) if dropout else nn.Identity()


def _inject_embedding(module: nn.Embedding, adapted: AdaptedModule) -> None:
    kind: dict[str, Any] = {"device": "meta", "dtype": module.weight.dtype}
    rows, dim = module.weight.shape
    module.lora_embedding_A = nn.Parameter(torch.empty(adapted.r, rows, **kind))
    module.lora_embedding_B = nn.Parameter(torch.empty(dim, adapted.r, **kind))


@cache
def _adapted_class(kind: type[nn.Module]) -> type[nn.Module]:
    adding = AdaptedEmbedding if issubclass(kind, nn.Embedding) else AdaptedProduct
    return type(f"Adapted{kind.__name__}", (adding, kind), {})


def drawn(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Returns the first numbers of an adapter's tensor in fp32. They follow from the run's seed and
    the name.

    Their distribution is that of PEFT: uniform for A of a linear module, normal for B of an
    embedding. The other factor is zero, so a new adapter changes nothing.
    """
    values = torch.zeros(shape)
    digest = hashlib.blake2b(f"adapter/{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    if name.endswith(".lora_A.weight"):
        nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    elif name.endswith(".lora_embedding_B"):
        nn.init.normal_(values, generator=generator)
    return values
