"""Penstock's operator for the matrix products of layers, ``penstock::product``.

A compiled graph calls the operator unchanged. So one graph serves forwards and recomputations,
which leave the last product of a layer out (:mod:`penstock.models.split_backward.layer_products`).
It also serves whole and split backwards. The operator's backward makes the gradient of the
product's input. It hands the product's input and the gradient of its output to a *sink*. The sink
makes the weight gradient at once (BACKWARD) or later (BACKWARD_WEIGHT), by the same kernels.

A graph knows a sink by a *ticket*: a number in a tensor without dimensions on the CPU, which
requires a gradient. ``penstock::hand_over`` reads the number, finds the sink, and returns the
ticket's gradient, so that no compiler takes the call for dead code. The sink may keep both tensors:
compiled graphs never reuse their memory (:attr:`penstock.models.compiled.Compiler.options`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch.nn import functional as F

Receive = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes the gradient of a product's output, (..., outputs), and its input, (..., inputs)."""

_MOST_TICKETS = 1 << 20
"""Products of all graphs that a process keeps at a time. Their numbers are exact in fp32."""


class Sink(Protocol):
    """Destination of the weight gradients of one forward's products."""

    def product(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, transposed: bool
    ) -> Receive:
        """Returns the receiver of output gradient and input of the forward's next product.

        ``weight``, (outputs, inputs) or transposed, and ``bias``, (outputs,), are leaves; those
        that require no gradient get none.
        """


class NoSink:
    """The sink of graphs that are freed without a backward."""

    def product(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, transposed: bool
    ) -> Receive:
        """Returns a function that no backward calls."""
        return lambda gradient, rows: None


class _Switch(threading.local):
    """Switch of a thread that leaves last products out."""

    left_out = False


switch = _Switch()


@torch.library.custom_op("penstock::product", mutates_args=())
def product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ticket: torch.Tensor | None,
    transposed: bool,
    last: bool,
) -> torch.Tensor:
    """Returns ``rows @ weight.T + bias``, (..., outputs); ``transposed``: ``rows @ weight + bias``.

    ``last``: a product at the end of a layer, which recomputations leave out; they get unwritten
    memory. ``ticket``: of the sink that takes the weight's part of the backward; None: the backward
    makes the gradients of weight and bias.
    """
    if last and switch.left_out:
        return _unwritten(rows, weight.t() if transposed else weight)
    if not transposed:
        return F.linear(rows, weight, bias)
    flat = rows.reshape(-1, rows.shape[-1])
    made = flat.mm(weight) if bias is None else torch.addmm(bias, flat, weight)
    return made.view(*rows.shape[:-1], weight.shape[1])


@product.register_fake
def _(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ticket: torch.Tensor | None,
    transposed: bool,
    last: bool,
) -> torch.Tensor:
    return _unwritten(rows, weight.t() if transposed else weight)


def _unwritten(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((*rows.shape[:-1], weight.shape[0]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, weight, _, ticket, ctx.transposed, _ = inputs
    ctx.save_for_backward(rows, weight, ticket)


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients by the products that autograd makes for ``F.linear``."""
    rows, weight, ticket = ctx.saved_tensors
    of_rows, of_weight, of_bias, *_ = ctx.needs_input_grad
    flat = gradient.reshape(-1, gradient.shape[-1])
    to_rows = None
    if of_rows:
        factor = weight.t() if ctx.transposed else weight
        to_rows = (flat @ factor).view(*gradient.shape[:-1], factor.shape[1])
    if ticket is not None:
        return to_rows, None, None, _hand_over(gradient, rows, ticket), None, None
    to_weight = None
    if of_weight:
        flat_rows = rows.reshape(-1, rows.shape[-1])
        to_weight = flat_rows.t() @ flat if ctx.transposed else flat.t() @ flat_rows
    return to_rows, to_weight, flat.sum(0) if of_bias else None, None, None, None


product.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("penstock::hand_over", mutates_args=())
def _hand_over(gradient: torch.Tensor, rows: torch.Tensor, ticket: torch.Tensor) -> torch.Tensor:
    """Gives both tensors to the ticket's sink; returns the ticket's gradient: zero."""
    _receivers[int(ticket)].receive(gradient, rows)
    return torch.zeros_like(ticket)


@_hand_over.register_fake
def _(gradient: torch.Tensor, rows: torch.Tensor, ticket: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(ticket)


class _Receiver:
    """The entry of a ticket. It lives as long as the ticket's graph."""

    __slots__ = ("__weakref__", "receive")

    def __init__(self, receive: Receive) -> None:
        self.receive = receive


_receivers: weakref.WeakValueDictionary[int, _Receiver] = weakref.WeakValueDictionary()
_next_number = 0
_lock = threading.Lock()


class _Ticket(torch.autograd.Function):
    """A ticket as autograd sees it: a tensor with a graph, which keeps the receiver alive."""

    @staticmethod
    def forward(
        ctx: Any, leaf: torch.Tensor, number: torch.Tensor, receiver: _Receiver
    ) -> torch.Tensor:
        ctx.receiver = receiver
        return number.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, None


def ticket_for(leaf: torch.Tensor, receive: Receive) -> torch.Tensor:
    """Returns a new ticket, a CPU tensor without dimensions, of a product of the weight ``leaf``,
    which requires a gradient. Graphs that save the ticket keep ``receive`` alive, nothing else.
    """
    global _next_number
    receiver = _Receiver(receive)
    with _lock:
        while _next_number in _receivers:
            _next_number = (_next_number + 1) % _MOST_TICKETS
        number = _next_number
        _receivers[number] = receiver
        _next_number = (number + 1) % _MOST_TICKETS
    made: torch.Tensor = _Ticket.apply(leaf, ticket_memory()[number], receiver)  # type: ignore[no-untyped-call]
    return made


@cache
def ticket_memory() -> torch.Tensor:
    """Returns the memory of all tickets, (tickets,): a constant that graphs may save parts of."""
    return torch.arange(_MOST_TICKETS, dtype=torch.float32)
