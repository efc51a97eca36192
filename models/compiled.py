"""Layers through ``torch.compile``: one graph for all layers of a kind.

The runtime has one module object per kind, whose parameters are other tensors for each layer. For
the compiler parameters are inputs of its graph: it checks their types and shapes, not which they
are, so the second layer compiles nothing. These need a graph of their own: with and without
autograd, training and evaluation, another micro-batch shape, other frozen tensors, and a layer
number that the model's code reads (GPT-2's ``scale_attn_by_inverse_layer_idx``). A process compiles
any number of graphs: torch's limit, beyond which layers would run uncompiled and round otherwise,
is out of reach.

Forwards whose operators are watched (split backward, dropped operators; see
:mod:`penstock.models.storing`) run uncompiled: a mode would see one opaque function. Saved tensors
of compiled layers are swapped, and their weights bound anew, like those of any graph. Embedding and
head, which are calls of a whole decoder around stubs, run uncompiled, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from penstock.models.torch_internals import set_compiler_options

_OPTIONS: Mapping[str, dict[str, Any]] = MappingProxyType({"inductor": {"fallback_random": True}})
"""Random numbers come from torch's own kernels: dropout of a recomputation, which is another graph
than that of its forward, must hit the same elements."""


_MOST_GRAPHS = 1 << 16
"""Graphs of a module class that a process may compile; torch's default is 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """The compiler of a process. ``backend``: of ``torch.compile``. ``deterministic``: Inductor
    chooses kernels by rule, never by a benchmark. ``cache``: folder of compiled graphs for later
    processes; None: torch's own in the temporary folder.
    """

    backend: str = "inductor"
    deterministic: bool = True
    cache: Path | None = None

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of ``torch.compile`` for the backend."""
        return _OPTIONS.get(self.backend, {})

    def set_up_process(self) -> None:
        """Sets torch's options for all graphs of the process, before the first one is compiled."""
        if self.cache is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.cache)
            os.environ["TRITON_CACHE_DIR"] = str(self.cache / "triton")
        set_compiler_options(deterministic=self.deterministic, most_graphs=_MOST_GRAPHS)


class CompiledLayer:
    """The module of one kind of layer; compiled when it first runs (seconds to minutes)."""

    def __init__(self, layer: nn.Module, backend: str) -> None:
        self._run: Any = torch.compile(
            layer, backend=backend, fullgraph=True, dynamic=False, options=_OPTIONS.get(backend)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer: arguments and results are its own, of the same shapes and dtypes."""
        return self._run(*args, **kwargs)
