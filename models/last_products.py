"""Matrix products at the end of a layer, whose results no backward reads.

A layer ends with ``residual + down(...)``, and the derivative of a sum reads neither summand. So a
recomputation without a reader of its output may leave the last product out. The graph keeps the
product's input and weight for the backward, and the output is unwritten memory. The gradients are
the same to the last bit.

:class:`ProductWatch` reads from the graph of one forward which products these are.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn import functional as F

from penstock.models.torch_internals import node_of_product, reads_first_factor

_PASSED = ("AddBackward0", "ViewBackward0", "UnsafeViewBackward0", "NativeDropoutBackward0")
"""Nodes that read no value of their inputs."""

_SCALED = "MulBackward0"
"""The same, unless the other factor has a gradient."""


class _Switch(threading.local):
    """Switch of a thread that leaves last products out."""

    left_out = False


_switch = _Switch()


@torch.library.custom_op("penstock::last_product", mutates_args=())
def _last_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Returns ``F.linear``'s result, (..., outputs), or memory of its shape. A compiled graph calls
    the operator as it is, so one graph serves forwards and recomputations.
    """
    if _switch.left_out:
        return _unwritten(rows, weight)
    return F.linear(rows, weight, bias)


@_last_product.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _unwritten(rows, weight)


def _unwritten(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((*rows.shape[:-1], weight.shape[0]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, weight, _ = inputs
    ctx.save_for_backward(rows, weight)


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients by the products that autograd makes for ``F.linear``."""
    rows, weight = ctx.saved_tensors
    of_rows, of_weight, of_bias = ctx.needs_input_grad
    flat = gradient.reshape(-1, gradient.shape[-1])
    return (
        gradient @ weight if of_rows else None,
        flat.t() @ rows.reshape(-1, rows.shape[-1]) if of_weight else None,
        flat.sum(0) if of_bias else None,
    )


_last_product.register_autograd(_differentiate, setup_context=_save)


class LastProducts:
    """The products of a layer's module that a recomputation may leave out."""

    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        # Made once: the compiler checks that a module's forward is still the same object.
        self._forwards = [(module, partial(_forward, module)) for module in modules]

    @contextmanager
    def installed(self, *, left_out: bool) -> Iterator[None]:
        """Runs the products as Penstock's operator inside, or leaves them out."""
        before = _switch.left_out
        with ExitStack() as stack:
            for module, forward in self._forwards:
                vars(module)["forward"] = forward
                stack.callback(vars(module).pop, "forward")
            _switch.left_out = left_out
            stack.callback(setattr, _switch, "left_out", before)
            yield


def _forward(module: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _last_product(rows, module.weight, module.bias)
    return result


class ProductWatch:
    """Notes which node of a graph each linear module of a layer made, in one forward."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._nodes: defaultdict[nn.Linear, list[Node]] = defaultdict(list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run the forward inside; it must have a graph."""

        def note(module: nn.Module, _: Any, output: torch.Tensor) -> None:
            if isinstance(module, nn.Linear) and output.grad_fn is not None:
                self._nodes[module].append(node_of_product(output))

        with ExitStack() as stack:
            for module in self._layer.modules():
                # A subclass may compute something else.
                if type(module) is nn.Linear and "forward" not in vars(module):
                    stack.callback(module.register_forward_hook(note).remove)
            yield

    def last(self, output: torch.Tensor) -> LastProducts:
        """Returns the modules whose products only made ``output``, of the watched forward."""
        unread = _unread(output)
        modules = [
            module
            for module, nodes in self._nodes.items()
            if len(nodes) == 1 and nodes[0] in unread
        ]
        self._nodes.clear()
        return LastProducts(modules)


def _unread(output: torch.Tensor) -> set[Node]:
    """Returns the nodes whose results no other node reads on their way into ``output``."""
    if output.grad_fn is None:
        return set()
    consumers: defaultdict[Node, set[Node]] = defaultdict(set)
    rest, seen = [output.grad_fn], {output.grad_fn}
    while rest:
        node = rest.pop()
        for source, _ in node.next_functions:
            if source is not None:
                consumers[source].add(node)
                if source not in seen:
                    seen.add(source)
                    rest.append(source)
    unread = {output.grad_fn}
    passing = [node for node in unread if _passes(node)]
    while passing:
        node = passing.pop()
        for source, _ in node.next_functions:
            if source is None or source in unread:
                continue
            if all(user in unread and _passes(user) for user in consumers[source]):
                unread.add(source)
                passing += [source] if _passes(source) else []
    return unread


def _passes(node: Node) -> bool:
    """Returns whether a node's backward reads no value that has a gradient."""
    if node.name() == _SCALED:
        return not reads_first_factor(node)
    return node.name() in _PASSED
