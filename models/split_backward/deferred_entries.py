"""Uses of parameters whose weight gradients wait: what they keep, and their gradients.

Weights are let go as soon as BACKWARD_INPUT has passed: BACKWARD_WEIGHT reads none, so their
buffers may hold another stage by then. In which order uses run, and how gradients of several uses
of a parameter are added up, is :mod:`penstock.models.split_backward.deferred`'s part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

SavedTensorHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Functions that pack a tensor and unpack it, as ``torch.autograd.graph`` has them."""


class ParameterRecord:
    """A parameter of the stage: where its gradient goes.

    Holds the gradient array that is bound when BACKWARD_INPUT ends, at the latest; before that, or
    with none bound, or with hooks that want to see the gradient, the parameter.
    """

    __slots__ = (
        "__weakref__",
        "_gradient",
        "_parameter",
        "caught",
        "edge",
        "uses",
        "waiting",
    )

    def __init__(self, parameter: torch.Tensor) -> None:
        self._gradient: torch.Tensor | None = None
        self._parameter: torch.Tensor | None = parameter
        self.settle()
        self.edge: GradientEdge | None = None
        """Where graphs of the store end."""
        self.caught = False
        """Whether a leaf of the main graph stands for the parameter."""
        self.uses = 0
        """How many entries have gradients for it."""
        self.waiting: list[torch.Tensor] = []

    @property
    def place(self) -> int:
        """The same for all records whose gradients go there."""
        return id(self._parameter) if self._gradient is None else self._gradient.data_ptr()

    def settle(self) -> None:
        """Hold the gradient array, if one is bound by now, instead of the parameter."""
        parameter = self._parameter
        if parameter is None or parameter.grad is None:
            return
        if not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            self._gradient, self._parameter = parameter.grad, None

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Add to ``.grad`` as autograd does: converted to its type, then added in place."""
        self.settle()
        if self._gradient is not None:
            self._gradient.add_(gradient.to(self._gradient.dtype))
        else:
            assert self._parameter is not None
            torch.autograd.backward([self._parameter], [gradient])

    def receive(self, gradient: torch.Tensor) -> None:
        """A gradient that BACKWARD_INPUT made; it waits if others follow that belong to one sum."""
        if self.uses or (self.caught and self.edge is not None):
            self.waiting.append(gradient)
        else:
            self.accumulate(gradient)


class DeferredTensor:
    """A tensor that waits for BACKWARD_WEIGHT, packed by the saved-tensor hooks around the forward
    (a swap, for example), if any. Without its graph, which may be the one that keeps it.
    """

    __slots__ = ("_packed", "_unpack", "_version")

    def __init__(self, tensor: torch.Tensor, hooks: SavedTensorHooks | None) -> None:
        tensor = tensor.detach()
        self._packed = tensor if hooks is None else hooks[0](tensor)
        self._unpack = None if hooks is None else hooks[1]
        self._version = tensor._version

    def get(self) -> torch.Tensor:
        """The tensor; raises RuntimeError if it was changed in place meanwhile."""
        if self._unpack is not None:
            return self._unpack(self._packed)
        tensor: torch.Tensor = self._packed
        if tensor._version != self._version:
            raise RuntimeError(
                "a tensor needed for a weight gradient was changed in place: shape"
                f" {tuple(tensor.shape)}, version {tensor._version}, expected {self._version}"
            )
        return tensor

    def held(self) -> Iterator[torch.Tensor]:
        """What it keeps alive."""
        if isinstance(self._packed, torch.Tensor):
            yield self._packed


class Lent:
    """Weights that a use saved: real until BACKWARD_INPUT has passed, then only their shape.

    Until then they are where the saved-tensor hooks around the forward find them, if there are any:
    perhaps in other memory than the forward's.
    """

    __slots__ = ("_packed", "_shape", "_unpack")

    def __init__(self, tensor: torch.Tensor, hooks: SavedTensorHooks | None) -> None:
        self._packed: Any = tensor if hooks is None else hooks[0](tensor)
        self._unpack = None if hooks is None else hooks[1]
        self._shape = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def get(self) -> torch.Tensor:
        """The weights, or memory of their shape, which no weight gradient reads."""
        if self._packed is None:
            size, stride, dtype, device = self._shape
            return torch.empty_strided(size, stride, dtype=dtype, device=device)
        tensor: torch.Tensor = self._packed if self._unpack is None else self._unpack(self._packed)
        return tensor

    def forget(self) -> None:
        """Let go of the weights."""
        self._packed = None


class GraphEntry:
    """A use of parameters with a small autograd graph of its own.

    The graph ends at ``inputs`` (edges of the activations that went in) and at the edges of
    ``records``; its nodes saved ``saved`` and ``lent``. ``derived``: the graph reaches a parameter
    through tensors that other entries may share.
    """

    __slots__ = ("_edges", "_roots", "_seeds", "derived", "inputs", "lent", "records", "saved")

    def __init__(self, records: tuple[ParameterRecord, ...], *, derived: bool) -> None:
        self.records = records
        self.derived = derived
        self.inputs: list[GradientEdge] = []
        self.saved: list[DeferredTensor] = []
        self.lent: list[Lent] = []
        self._edges: list[GradientEdge] = []
        self._roots: list[GradientEdge] = []
        self._seeds: list[torch.Tensor] = []

    @property
    def reached(self) -> bool:
        """Whether BACKWARD_INPUT brought a gradient."""
        return bool(self._roots)

    def attach(self, edges: Iterable[GradientEdge]) -> None:
        """The edges of its outputs."""
        self._edges = list(edges)

    def receive(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Keep the gradients of the outputs; returns those of the inputs."""
        pairs = [(e, g) for e, g in zip(self._edges, gradients, strict=True) if g is not None]
        self._roots = [edge for edge, _ in pairs]
        self._seeds = [gradient for _, gradient in pairs]
        found: list[torch.Tensor | None] = [None] * len(self.inputs)
        if self.inputs and pairs:
            found = list(
                torch.autograd.grad(
                    self._roots, self.inputs, self._seeds, retain_graph=True, allow_unused=True
                )
            )
        for lent in self.lent:
            lent.forget()
        self.lent.clear()
        self.inputs, self._edges = [], []
        return found

    def roots(self) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Where its half of the backward starts, and the gradients there."""
        return self._roots, self._seeds

    def held(self) -> Iterator[torch.Tensor]:
        """What it keeps alive."""
        yield from self._seeds
        for saved in self.saved:
            yield from saved.held()


class ProductEntry:
    """``rows @ weight.T + bias`` (or ``rows @ weight``) with parameters that nothing else touched.

    ``rows`` has shape (..., inputs), the gradient (..., outputs).
    """

    __slots__ = ("_bias", "_gradient", "_rows", "_transposed", "_weight", "records")

    def __init__(
        self,
        rows: DeferredTensor | None,
        weight: ParameterRecord | None,
        bias: ParameterRecord | None,
        *,
        transposed: bool,
        gradient: torch.Tensor | None = None,
    ) -> None:
        self._rows, self._weight, self._bias = rows, weight, bias
        self._transposed = transposed
        self._gradient = gradient
        self.records = tuple(filter(None, (weight, bias)))

    @property
    def reached(self) -> bool:
        """Whether BACKWARD_INPUT brought a gradient."""
        return self._gradient is not None

    @property
    def place(self) -> tuple[int, int]:
        """Where its gradients go: equal for the same Linear in other micro-batches."""
        weight, bias = self._weight, self._bias
        return (0 if weight is None else weight.place, 0 if bias is None else bias.place)

    def receive(self, gradient: torch.Tensor) -> None:
        """Keep the gradient of the product."""
        self._gradient = gradient

    def gradients(self) -> Iterator[tuple[ParameterRecord, torch.Tensor]]:
        """Gradients of weight and bias, by the kernels of addmm's derivative."""
        assert self._gradient is not None
        gradient = self._gradient.reshape(-1, self._gradient.shape[-1])
        if self._bias is not None:
            yield self._bias, self._gradient.sum_to_size(gradient.shape[1])
        if self._weight is not None:
            assert self._rows is not None
            rows = self._rows.get()
            rows = rows.reshape(-1, rows.shape[-1])
            product = rows.t().mm(gradient) if self._transposed else gradient.t().mm(rows)
            yield self._weight, product

    def held(self) -> Iterator[torch.Tensor]:
        """What it keeps alive."""
        if self._gradient is not None:
            yield self._gradient
        if self._rows is not None:
            yield from self._rows.held()

    @staticmethod
    def joined(entries: Sequence[ProductEntry]) -> ProductEntry:
        """The same product over the rows of several micro-batches."""
        first = entries[0]
        if len(entries) == 1:
            return first
        rows, gradients = [], []
        for entry in entries:
            assert entry._gradient is not None
            gradients.append(entry._gradient.reshape(-1, entry._gradient.shape[-1]))
            if entry._rows is not None:
                saved = entry._rows.get()
                rows.append(saved.reshape(-1, saved.shape[-1]))
        return ProductEntry(
            DeferredTensor(torch.cat(rows), None) if rows else None,
            first._weight,
            first._bias,
            transposed=first._transposed,
            gradient=torch.cat(gradients),
        )


Entry = GraphEntry | ProductEntry
