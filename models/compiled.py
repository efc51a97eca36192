"""Layers through ``torch.compile``: one graph for all layers of a kind.

The runtime has one module object per kind; its parameters are different tensors for each layer. For
the compiler, parameters are inputs of its graph. It checks their types and shapes, not their
identity, so the second layer compiles nothing. A graph of its own is compiled for each combination
of:

* with or without autograd, and training or evaluation;
* the shape of micro-batches;
* the set of frozen tensors;
* a layer number that the model's code reads (GPT-2's ``scale_attn_by_inverse_layer_idx``).

A process compiles any number of graphs. Beyond torch's limit layers would run uncompiled and round
otherwise, so the limit is raised out of reach.

Forwards that drop operators (:mod:`penstock.models.forward_storage`) run uncompiled: a mode would
see one opaque function. Whole and split backwards are one graph; its products hand their tensors
to a sink (:mod:`penstock.models.split_backward.products`). Saved tensors of compiled layers are
swapped, and their weights found again, like those of any graph. Embedding and head are calls of a
whole decoder around stubs and run uncompiled, too.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.models.torch_internals import set_most_graphs

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

    def set_up_process(self) -> None:
        """Sets the folder of compiled graphs, before the first one of the process is compiled."""
        if self.cache is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.cache)
            os.environ["TRITON_CACHE_DIR"] = str(self.cache / "triton")

    @property
    def options(self) -> dict[str, Any]:
        """Options of the backend. They hold for a graph's backward, too, whichever thread runs it.

        The calling process compiles, not a pool of processes or threads. Random numbers come from
        torch's own kernels: dropout of a recomputation must hit the elements of its forward.
        Graphs free their buffers and write no buffer twice: a sink may keep the tensors that a
        product handed over (:mod:`penstock.models.split_backward.products`).
        """
        if self.backend != "inductor":
            return {}
        return {
            "fallback_random": True,
            "deterministic": self.deterministic,
            "compile_threads": 1,
            "allow_buffer_reuse": False,
            "inplace_buffers": False,
        }


class CompiledLayer:
    """The module of one kind of layer. Its first run compiles it (seconds to minutes)."""

    def __init__(self, layer: nn.Module, compiler: Compiler) -> None:
        self._run: Any = torch.compile(
            layer,
            backend=compiler.backend,
            fullgraph=True,
            dynamic=False,
            options=compiler.options or None,
        )
        self._ready = threading.local()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer: arguments and results are its own, of the same shapes and dtypes."""
        if not hasattr(self._ready, "done"):
            set_most_graphs(_MOST_GRAPHS)  # torch's settings are those of a thread
            self._ready.done = True
        return self._run(*args, **kwargs)
