"""What a kernel does: operations, bytes moved, bytes kept; products with weights, element-wise
kernels, norms.

How long it takes is :mod:`penstock.planner.cost.analytic`'s matter.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """``count`` matrix products of (``rows``, ``depth``) with (``depth``, ``columns``)."""

    rows: float
    columns: float
    depth: float
    count: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """``flops`` on tensor cores, ``vector_flops`` elsewhere (an exponential counts 8, as it takes
    so long), and bytes read and written; ``launches``: so many kernels, one after the other.

    ``product``: what the ``flops`` are, where that is one kind of product. ``reduced_bytes``: of a
    tensor that the devices of a tensor-parallel group sum, each with all of it.
    """

    flops: float = 0.0
    vector_flops: float = 0.0
    moved_bytes: float = 0.0
    launches: float = 1.0
    product: Product | None = None
    reduced_bytes: float = 0.0


NOTHING = KernelWork(launches=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel for one micro-batch: forward, gradient of the input (p1), of the weights (p2).

    ``kept_bytes``: of its output, for the backward; ``deferred_bytes``: input and output gradient
    of a weight, from p1 till p2.
    """

    operator: str
    forward: KernelWork
    input_gradient: KernelWork
    weight_gradient: KernelWork = NOTHING
    kept_bytes: float = 0.0
    deferred_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One micro-batch: ``micro_batch`` sequences of ``sequence_length`` tokens.

    ``itemsize``: bytes of an activation or weight; ``gradient_itemsize``: of an accumulated
    weight gradient; ``flash``: attention without stored scores, state spaces without stored states;
    ``fused_norms``, ``fused_rotary``: RMSNorm, and the rotary embedding, are one kernel each.
    """

    sequence_length: int
    micro_batch: int
    itemsize: int = 2
    gradient_itemsize: int = 4
    flash: bool = True
    fused_norms: bool = True
    fused_rotary: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequence_length * self.micro_batch

    def bytes_of(self, width: float) -> float:
        """Returns the bytes of an activation of ``width`` numbers a token."""
        return self.tokens * width * self.itemsize


def norm(shape: Shape, hidden: float, operator: str = "norm") -> Kernel:
    """Returns a norm of hidden states; its output is kept.

    Not fused (RMSNorm as element-wise kernels): to fp32, square, mean, factor, product, back, times
    the weight; 36 bytes a number forward, 62 backward. The input in fp32 and the normalized one are
    kept too.
    """
    if shape.fused_norms:
        return elementwise(
            operator, shape, reads=hidden, writes=hidden, backward_reads=2 * hidden, kept=hidden
        )
    numbers = shape.tokens * hidden
    return Kernel(
        operator=operator,
        forward=KernelWork(moved_bytes=36.0 * numbers, launches=8.0),
        input_gradient=KernelWork(moved_bytes=62.0 * numbers, launches=12.0),
        kept_bytes=4.0 * numbers + shape.bytes_of(2 * hidden),
    )


def rotary(operator: str, shape: Shape, width: float) -> Kernel:
    """Returns the rotary embedding of queries and keys, ``width`` numbers a token together; not
    fused it is two products, a negation, a concatenation and a sum of each.
    """
    if shape.fused_rotary:
        return elementwise(operator, shape, reads=width, writes=width)
    work = KernelWork(moved_bytes=shape.bytes_of(10.5 * width), launches=10.0)
    return Kernel(operator=operator, forward=work, input_gradient=work)


def all_reduce(
    shape: Shape, width: float, *, forward: bool = True, backward: bool = True
) -> Kernel:
    """Returns the sum over a tensor-parallel group of a tensor, ``width`` numbers a token: of an
    output in forwards, of the gradient of an input in backwards.
    """
    work = KernelWork(reduced_bytes=shape.bytes_of(width))
    return Kernel(
        operator="all_reduce",
        forward=work if forward else NOTHING,
        input_gradient=work if backward else NOTHING,
    )


def elementwise(
    operator: str,
    shape: Shape,
    *,
    reads: float,
    writes: float,
    backward_reads: float | None = None,
    backward_writes: float | None = None,
    kept: float = 0.0,
) -> Kernel:
    """Returns a kernel limited by memory; widths per token. The backward moves the same unless
    told.
    """
    backward = (reads if backward_reads is None else backward_reads) + (
        reads if backward_writes is None else backward_writes
    )
    return Kernel(
        operator=operator,
        forward=KernelWork(moved_bytes=shape.bytes_of(reads + writes)),
        input_gradient=KernelWork(moved_bytes=shape.bytes_of(backward)),
        kept_bytes=shape.bytes_of(kept),
    )


def linear(
    operator: str,
    shape: Shape,
    width_in: int,
    width_out: int,
    *,
    kept: float,
    shares_input: bool = False,
    copies: int = 1,
    matrices: int = 1,
) -> Kernel:
    """Returns a product with weights: three equal products; ``kept`` is a width.

    ``shares_input``: another product defers the same input. ``copies``: rows per token, shared out
    evenly among so many ``matrices`` of weights.
    """
    flops = 2.0 * shape.tokens * copies * width_in * width_out
    activations = shape.bytes_of(copies * (width_in + width_out))
    weights = float(width_in * width_out) * matrices
    rows = shape.tokens * copies / matrices
    read_bytes = activations + weights * shape.itemsize
    deferred = copies * (width_out if shares_input else width_in + width_out)
    return Kernel(
        operator=operator,
        forward=KernelWork(
            flops=flops,
            moved_bytes=read_bytes,
            product=Product(rows=rows, columns=width_out, depth=width_in, count=matrices),
        ),
        input_gradient=KernelWork(
            flops=flops,
            moved_bytes=read_bytes,
            product=Product(rows=rows, columns=width_in, depth=width_out, count=matrices),
        ),
        weight_gradient=KernelWork(
            flops=flops,
            moved_bytes=activations + 2 * weights * shape.gradient_itemsize,
            product=Product(rows=width_in, columns=width_out, depth=rows, count=matrices),
        ),
        kept_bytes=shape.bytes_of(kept),
        deferred_bytes=shape.bytes_of(deferred),
    )
