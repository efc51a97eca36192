"""The matrix products of a layer that run as Penstock's operator, ``penstock::product``.

In compiled layers these are all linear modules (:mod:`penstock.models.split_backward.products`),
and the backward hands the weight's part to a sink. A module keeps autograd's backward if it runs
twice, or if another operator reads its weight. Autograd adds up the gradients of several uses in
its own order.

A layer ends with ``residual + down(...)``, and the derivative of a sum reads neither summand. So a
recomputation with an unread output may leave the last product out. The graph keeps the product's
input and weight for the backward, and the output is unwritten memory. The gradients are the same to
the last bit.

:class:`ProductWatch` derives all of this from the graph of one forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from penstock.models.split_backward.products import Sink, product, switch, ticket_for
from penstock.models.torch_internals import node_of_product, reads_first_factor

_PASSED = ("AddBackward0", "ViewBackward0", "UnsafeViewBackward0", "NativeDropoutBackward0")
"""Nodes that read no value of their inputs."""

_SCALED = "MulBackward0"
"""The same, unless the other factor has a gradient."""


_TICKET = "_penstock_ticket"
"""Attribute of a module that runs as Penstock's operator: the ticket of its sink, or None."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProductModule:
    """A module of a layer that makes one product a forward. ``transposed``: its weight is (inputs,
    outputs). ``last``: recomputations may leave the product out. ``alone``: no other operator of
    the layer reads its weight and bias. ``forward`` runs the module as Penstock's operator.
    """

    module: nn.Module
    transposed: bool
    last: bool
    alone: bool
    forward: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of(cls, module: nn.Module, *, last: bool, alone: bool) -> ProductModule:
        """Returns the module's part in the layer."""
        transposed = type(module) is not nn.Linear
        # Made once: the compiler checks that a module's forward is still the same object.
        forward = partial(_forward, module, transposed, last)
        return cls(module=module, transposed=transposed, last=last, alone=alone, forward=forward)


class LayerProducts:
    """The products of a layer's module that may run as Penstock's operator."""

    def __init__(self, modules: Sequence[ProductModule]) -> None:
        self._modules = modules

    @property
    def last(self) -> list[nn.Module]:
        """The modules with products that a recomputation may leave out."""
        return [each.module for each in self._modules if each.last]

    @property
    def handing_over(self) -> list[nn.Module]:
        """The modules with weight gradients that a sink may make."""
        return [each.module for each in self._modules if each.alone]

    @contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Leaves the last products out inside; the other modules run unchanged."""
        with ExitStack() as stack:
            stack.enter_context(_left_out(True))
            for each in self._modules:
                if each.last:
                    stack.enter_context(_replaced(each, None))
            yield

    @contextmanager
    def handed_over(
        self, leaves: Mapping[int, torch.Tensor], sink: Sink | None, *, left_out: bool
    ) -> Iterator[None]:
        """Runs all products as Penstock's operator inside, with weight gradients for ``sink``, in
        the order of the layer's modules. None: there is no backward. ``leaves``: by the id of the
        tensors that are installed as parameters now, the leaves that gradients go to.
        """
        with ExitStack() as stack:
            stack.enter_context(_left_out(left_out))
            for each in self._modules:
                weight, bias = each.module.weight, each.module.bias
                ticket = None
                if sink is not None and each.alone and weight.requires_grad:
                    leaf = leaves[id(weight)]
                    receive = sink.product(
                        leaf,
                        None if bias is None else leaves[id(bias)],
                        transposed=each.transposed,
                    )
                    ticket = ticket_for(leaf, receive)
                stack.enter_context(_replaced(each, ticket))
            yield


@contextmanager
def _left_out(left_out: bool) -> Iterator[None]:
    before = switch.left_out
    switch.left_out = left_out
    try:
        yield
    finally:
        switch.left_out = before


@contextmanager
def _replaced(each: ProductModule, ticket: torch.Tensor | None) -> Iterator[None]:
    """Runs a module as Penstock's operator inside."""
    attributes = vars(each.module)
    attributes["forward"], attributes[_TICKET] = each.forward, ticket
    try:
        yield
    finally:
        del attributes["forward"], attributes[_TICKET]


def _forward(module: nn.Module, transposed: bool, last: bool, rows: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = product(
        rows, module.weight, module.bias, getattr(module, _TICKET), transposed, last
    )
    return result


class ProductWatch:
    """Notes which node of a graph each module with a product made, in one forward of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._nodes: defaultdict[nn.Module, list[Node]] = defaultdict(list)
        self._ends: dict[nn.Module, list[Node]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Runs the forward inside; it must have a graph."""

        def note(module: nn.Module, _: Any, output: torch.Tensor) -> None:
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                self._nodes[module].append(node_of_product(output))
                # Parameters are other tensors after the forward.
                self._ends[module] = [
                    get_gradient_edge(parameter).node
                    for parameter in module.parameters(recurse=False)
                    if parameter.requires_grad
                ]

        with ExitStack() as stack:
            for module in self._layer.modules():
                # A subclass may compute something else.
                if type(module) in _kinds() and "forward" not in vars(module):
                    stack.callback(module.register_forward_hook(note).remove)
            yield

    def products(self, output: torch.Tensor) -> LayerProducts:
        """Returns the modules that made one product each on the way to ``output``, of the watched
        forward, in the order of their products.
        """
        readers = _readers(output)
        unread = _unread(output, readers)
        modules = [
            ProductModule.of(
                module,
                last=type(module) is nn.Linear and nodes[0] in unread,
                alone=all(len(readers[end]) == 1 for end in self._ends[module]),
            )
            for module, nodes in self._nodes.items()
            if len(nodes) == 1
        ]
        self._nodes.clear()
        self._ends.clear()
        return LayerProducts(modules)


@cache
def _kinds() -> tuple[type[nn.Module], ...]:
    """Returns the classes of modules that make one product. Transformers takes seconds to
    import.
    """
    from transformers.pytorch_utils import Conv1D

    return nn.Linear, Conv1D


def _readers(output: torch.Tensor) -> Mapping[Node, set[Node]]:
    """Returns for each node of the graph of ``output`` the nodes that read its result."""
    readers: defaultdict[Node, set[Node]] = defaultdict(set)
    if output.grad_fn is None:
        return readers
    rest, seen = [output.grad_fn], {output.grad_fn}
    while rest:
        node = rest.pop()
        for source, _ in node.next_functions:
            if source is not None:
                readers[source].add(node)
                if source not in seen:
                    seen.add(source)
                    rest.append(source)
    return readers


def _unread(output: torch.Tensor, readers: Mapping[Node, set[Node]]) -> set[Node]:
    """Returns the nodes with results that no other node reads on their way into ``output``."""
    if output.grad_fn is None:
        return set()
    unread = {output.grad_fn}
    passing = [node for node in unread if _passes(node)]
    while passing:
        node = passing.pop()
        for source, _ in node.next_functions:
            if source is None or source in unread:
                continue
            if all(user in unread and _passes(user) for user in readers[source]):
                unread.add(source)
                passing += [source] if _passes(source) else []
    return unread


def _passes(node: Node) -> bool:
    """Returns whether a node's backward reads no value that has a gradient."""
    if node.name() == _SCALED:
        return not reads_first_factor(node)
    return node.name() in _PASSED
