"""Uses of parameters with waiting weight gradients: the kept tensors, and the gradients.

Weights are released as soon as BACKWARD_INPUT has passed. BACKWARD_WEIGHT reads none, so their
buffers may hold another stage by then. :mod:`penstock.models.split_backward.deferred` orders the
uses, and adds up the gradients of several uses of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from penstock.models.split_backward.products import Receive
from penstock.models.torch_internals import SavedTensorHooks, has_hooks


class ParameterRecord:
    """A parameter of the stage, of any shape and dtype, and the place of its gradient.

    Holds the gradient array, which is bound when BACKWARD_INPUT ends at the latest. Holds the
    parameter before that, without a bound array, or if hooks read the gradient.
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
        """End of the store's graphs for this parameter."""
        self.caught = False
        """True if a leaf of the main graph represents the parameter."""
        self.uses = 0
        """Number of entries with gradients for it."""
        self.waiting: list[torch.Tensor] = []

    @property
    def place(self) -> int:
        """A key, equal for all records with gradients in the same memory."""
        return id(self._parameter) if self._gradient is None else self._gradient.data_ptr()

    def settle(self) -> None:
        """Holds the gradient array, if one is bound by now, instead of the parameter."""
        parameter = self._parameter
        if parameter is None or parameter.grad is None:
            return
        if not has_hooks(parameter):
            # The parameter aliases weights, and their buffer may hold another stage by
            # BACKWARD_WEIGHT. Without a reference from here, its last reference goes with the
            # graph.
            self._gradient, self._parameter = parameter.grad, None

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Adds a gradient of the parameter's shape, in the compute dtype, to ``.grad``."""
        self.settle()
        if self._gradient is not None:
            # As autograd does, to the bit: converted to the sum's dtype (fp32, for example), then
            # added in place, so that the sum rounds once per gradient. One kernel widens and adds.
            dtype = self._gradient.dtype
            widens = torch.promote_types(dtype, gradient.dtype) is dtype
            self._gradient.add_(gradient if widens else gradient.to(dtype))
        else:
            assert self._parameter is not None
            torch.autograd.backward([self._parameter], [gradient])

    def receive(self, gradient: torch.Tensor) -> None:
        """Takes a gradient of the parameter's shape from BACKWARD_INPUT.

        The gradient waits if later ones must be added to it first. Autograd adds up all uses of a
        parameter before they reach ``.grad``; another order would round differently.
        """
        if self.uses or (self.caught and self.edge is not None):
            self.waiting.append(gradient)
        else:
            self.accumulate(gradient)


class DeferredTensor:
    """A tensor of any shape that waits for BACKWARD_WEIGHT, packed by the saved-tensor hooks around
    the forward (a swap, for example), if there are any.
    """

    __slots__ = ("_packed", "_unpack", "_version")

    def __init__(self, tensor: torch.Tensor, hooks: SavedTensorHooks | None) -> None:
        # Without its graph, which may keep this object alive: a reference cycle would never be
        # freed.
        tensor = tensor.detach()
        self._packed = tensor if hooks is None else hooks[0](tensor)
        self._unpack = None if hooks is None else hooks[1]
        self._version = tensor._version

    def get(self) -> torch.Tensor:
        """Returns the tensor, of the shape and dtype that it had.

        Raises:
            RuntimeError: it was changed in place meanwhile.
        """
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
        """Yields the tensor itself, if it is kept alive here and not by the hooks."""
        if isinstance(self._packed, torch.Tensor):
            yield self._packed


class SavedWeights:
    """Weights, of any shape, that a use saved. After BACKWARD_INPUT only their shape remains.

    Until then the saved-tensor hooks around the forward find them, if there are hooks, perhaps in
    other memory than the forward's.
    """

    __slots__ = ("_packed", "_shape", "_unpack")

    def __init__(self, tensor: torch.Tensor, hooks: SavedTensorHooks | None) -> None:
        self._packed: Any = tensor if hooks is None else hooks[0](tensor)
        self._unpack = None if hooks is None else hooks[1]
        self._shape = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def get(self) -> torch.Tensor:
        """Returns the weights, or uninitialized memory of their shape, strides and dtype, which no
        weight gradient reads.
        """
        if self._packed is None:
            size, stride, dtype, device = self._shape
            return torch.empty_strided(size, stride, dtype=dtype, device=device)
        tensor: torch.Tensor = self._packed if self._unpack is None else self._unpack(self._packed)
        return tensor

    def forget(self) -> None:
        """Releases the weights: BACKWARD_INPUT has read them for the last time."""
        self._packed = None


class GraphEntry:
    """A use of parameters with a small autograd graph of its own.

    The graph ends at ``inputs`` (edges of the activations that went in) and at the edges of
    ``records``. Its nodes saved ``saved`` and ``saved_weights``. ``derived``: the graph reaches a
    parameter through tensors that other entries may share.
    """

    __slots__ = (
        "_edges",
        "_roots",
        "_seeds",
        "derived",
        "inputs",
        "records",
        "saved",
        "saved_weights",
    )

    def __init__(self, records: tuple[ParameterRecord, ...], *, derived: bool) -> None:
        self.records = records
        self.derived = derived
        self.inputs: list[GradientEdge] = []
        self.saved: list[DeferredTensor] = []
        self.saved_weights: list[SavedWeights] = []
        self._edges: list[GradientEdge] = []
        self._roots: list[GradientEdge] = []
        self._seeds: list[torch.Tensor] = []

    @property
    def reached(self) -> bool:
        """True if BACKWARD_INPUT brought a gradient."""
        return bool(self._roots)

    def attach(self, edges: Iterable[GradientEdge]) -> None:
        """Takes the edges of the outputs; BACKWARD_INPUT brings gradients to them."""
        self._edges = list(edges)

    def receive(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Keeps the gradients of the outputs, one of each output's shape or None. Returns those of
        the inputs, of the inputs' shapes.

        The graph is retained: its other half runs in BACKWARD_WEIGHT.
        """
        pairs = [(e, g) for e, g in zip(self._edges, gradients, strict=True) if g is not None]
        self._roots = [edge for edge, _ in pairs]
        self._seeds = [gradient for _, gradient in pairs]
        input_gradients: list[torch.Tensor | None] = [None] * len(self.inputs)
        if self.inputs and pairs:
            input_gradients = list(
                torch.autograd.grad(
                    self._roots, self.inputs, self._seeds, retain_graph=True, allow_unused=True
                )
            )
        for weights in self.saved_weights:
            weights.forget()
        self.saved_weights.clear()
        self.inputs, self._edges = [], []
        return input_gradients

    def roots(self) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Returns the start of BACKWARD_WEIGHT, and the gradients at it, of the outputs' shapes."""
        return self._roots, self._seeds

    def held(self) -> Iterator[torch.Tensor]:
        """Yields the tensors, of any shape, that the entry keeps alive; none is a weight."""
        yield from self._seeds
        for saved in self.saved:
            yield from saved.held()


class ProductEntry:
    """``rows @ weight.T + bias`` (``transposed``: ``rows @ weight + bias``) with parameters without
    another use.

    ``rows`` has shape (..., inputs), the gradient (..., outputs). The weight is (outputs, inputs)
    or, transposed, (inputs, outputs). ``rows`` may be None if no weight is trained.
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
        """True if BACKWARD_INPUT brought a gradient."""
        return self._gradient is not None

    @property
    def place(self) -> tuple[int, int]:
        """A key for the place of its gradients: equal for the same Linear in other
        micro-batches.
        """
        weight, bias = self._weight, self._bias
        return (0 if weight is None else weight.place, 0 if bias is None else bias.place)

    def receive(self, gradient: torch.Tensor) -> None:
        """Keeps the gradient of the product, of shape (..., outputs)."""
        self._gradient = gradient

    def take(self, gradient: torch.Tensor, rows: torch.Tensor) -> None:
        """Keeps the gradient of the product, (..., outputs), and its input, (..., inputs), which
        the graph has saved until now.
        """
        self._gradient = gradient.detach()
        if self._weight is not None:
            self._rows = DeferredTensor(rows, None)

    def gradients(self) -> Iterator[tuple[ParameterRecord, torch.Tensor]]:
        """Yields the gradients of bias, (outputs,), and weight, of the weight's shape, in the
        compute dtype.

        dL/dW = G^T X, and dL/db is the sum of G over the rows. The kernels are those of addmm's
        derivative, so the bits are those of an unsplit backward.
        """
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
        """Yields the rows and the gradient, as far as they are kept alive here."""
        if self._gradient is not None:
            yield self._gradient
        if self._rows is not None:
            yield from self._rows.held()

    @staticmethod
    def joined(entries: Sequence[ProductEntry]) -> ProductEntry:
        """Returns the same product over the rows of several micro-batches (2BP, section 3).

        Inputs and gradients are copied. One sum over all rows rounds differently from a sum of
        sums.
        """
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


class AtOnce:
    """The sink of compiled layers with a whole backward. Weight gradients are made when a product
    hands its tensors over (:class:`penstock.models.split_backward.products.Sink`).
    """

    def product(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, transposed: bool
    ) -> Receive:
        """Returns a receiver that adds the gradients of a product's parameters to ``.grad``."""

        def receive(gradient: torch.Tensor, rows: torch.Tensor) -> None:
            # New for each backward: the sums may have been bound since the forward.
            records = [record_of_trained(leaf) for leaf in (weight, bias)]
            entry = ProductEntry(None, *records, transposed=transposed)
            entry.take(gradient, rows)
            for record, made in entry.gradients():
                record.accumulate(made)

        return receive


def record_of_trained(leaf: torch.Tensor | None) -> ParameterRecord | None:
    """Returns a new record of a leaf of any shape; None if the leaf requires no gradient."""
    return None if leaf is None or not leaf.requires_grad else ParameterRecord(leaf)


Entry = GraphEntry | ProductEntry
