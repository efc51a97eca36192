"""Kernels of layers: the operations, bytes moved and bytes kept of each kernel.

A layer is attention, a dense MLP, a mixture of experts, or Mamba's selective state space.
:mod:`penstock.planner.cost.analytic` turns the work of a kernel into seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.cost.language_models import LanguageModel, Mixer, StateSpace


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
    """Returns the rotary embedding of queries and keys, ``width`` numbers a token together.
    Unfused, it is two products, a negation, a concatenation and a sum of each.
    """
    if shape.fused_rotary:
        return elementwise(operator, shape, reads=width, writes=width)
    work = KernelWork(moved_bytes=shape.bytes_of(10.5 * width), launches=10.0)
    return Kernel(operator=operator, forward=work, input_gradient=work)


def all_reduce(
    shape: Shape, width: float, *, forward: bool = True, backward: bool = True
) -> Kernel:
    """Returns the sum of a tensor, ``width`` numbers a token, over a tensor-parallel group.
    Forwards sum an output, backwards the gradient of an input.
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


def attention_kernels(
    model: LanguageModel,
    shape: Shape,
    *,
    residual_kept: bool,
    mixer: Mixer = Mixer.ATTENTION,
) -> list[Kernel]:
    """Returns norm, projections, rotary embedding, attention core, output projection.

    ``residual_kept``: the sum after it is kept by the MLP half of the same block (a half-layer's
    output is the next one's input instead).
    """
    h, q, kv = model.hidden_size, model.head_width, model.key_value_size
    kernels = [
        norm(shape, h),
        linear("qkv", shape, h, q + 2 * kv, kept=q + 2 * kv),
    ]
    if model.query_key_norms:
        # The rotary embedding's result is kept by the projection; this is what the norm reads.
        kernels.append(norm(shape, q + kv, "qkv"))
    if model.gated:
        kernels.append(rotary("qkv", shape, q + kv))
    window = model.window if mixer is Mixer.WINDOW else shape.sequence_length
    kernels.append(_flash_core(model, shape, window) if shape.flash else _plain_core(model, shape))
    kernels.append(linear("attention_output", shape, q, h, kept=h if residual_kept else 0))
    return kernels + _leave("attention_output", model, shape)


def mlp_kernels(model: LanguageModel, shape: Shape) -> list[Kernel]:
    """Returns norm and MLP; the sum after it is the next block's input."""
    h, f = model.hidden_size, model.intermediate_size
    if model.gated:
        inner = gated_kernels(shape, h, f)
    else:
        inner = [
            linear("up", shape, h, f, kept=f),
            elementwise("gelu", shape, reads=f, writes=f, backward_reads=2 * f, kept=f),
        ]
    down = linear("down", shape, f, h, kept=0)
    return [norm(shape, h), *inner, down, *_leave("down", model, shape)]


def gated_kernels(shape: Shape, hidden: int, intermediate: int) -> list[Kernel]:
    """Returns gate, up, SiLU and product of a gated MLP."""
    h, f = hidden, intermediate
    return [
        linear("gate", shape, h, f, kept=f),
        linear("up", shape, h, f, kept=f, shares_input=True),
        *gating_kernels(shape, f),
    ]


def gating_kernels(shape: Shape, width: int) -> list[Kernel]:
    """Returns SiLU of the gate, and its product with the other half."""
    f = width
    return [
        elementwise("silu", shape, reads=f, writes=f, backward_reads=2 * f, kept=f),
        elementwise(
            "mul",
            shape,
            reads=2 * f,
            writes=f,
            backward_reads=3 * f,
            backward_writes=2 * f,
            kept=f,
        ),
    ]


def residual_kernel(operator: str, model: LanguageModel, shape: Shape) -> Kernel:
    """Returns the sum at the end of a half of a layer."""
    h = model.hidden_size
    return elementwise(
        operator, shape, reads=2 * h, writes=h, backward_reads=2 * h, backward_writes=h
    )


def _flash_core(model: LanguageModel, shape: Shape, window: int) -> Kernel:
    """Returns attention with two products forward and five backward (scores again). A causal mask
    halves them; a window w in s tokens leaves w - w² / 2 s of s columns.

    Kept: its output, and an fp32 number per head and token. Source: Dao et al. 2022 and 2023.
    """
    q, kv, length = model.head_width, model.key_value_size, shape.sequence_length
    seen = min(window, length)
    share = (seen - seen * seen / (2.0 * length)) / length if model.causal else seen / length
    product = 2.0 * shape.tokens * length * q * share
    statistics = 4.0 * shape.tokens * model.num_heads
    return Kernel(
        operator="attention_core",
        forward=KernelWork(
            flops=2 * product, moved_bytes=shape.bytes_of(2 * q + 2 * kv) + statistics
        ),
        input_gradient=KernelWork(flops=5 * product, moved_bytes=shape.bytes_of(4 * q + 4 * kv)),
        kept_bytes=shape.bytes_of(q) + statistics,
    )


def _plain_core(model: LanguageModel, shape: Shape) -> Kernel:
    """Scores stored: softmax kept, and with dropout its mask and result too (Korthikanti's 5as).

    A window saves nothing: the mask covers what was computed. Launched are two products, softmax,
    and copies of transposed tensors.
    """
    q, length = model.head_width, shape.sequence_length
    product = 2.0 * shape.tokens * length * q
    entries = float(shape.tokens * length * model.num_heads)
    scores = entries * shape.itemsize
    dropout = 0.0 if model.gated else scores + entries
    one = Product(
        rows=length,
        columns=length,
        depth=q / model.num_heads,
        count=shape.micro_batch * model.num_heads,
    )
    return Kernel(
        operator="attention_core",
        forward=KernelWork(
            flops=2 * product,
            moved_bytes=4 * scores + 2 * dropout,
            launches=6.0,
            product=one,
        ),
        input_gradient=KernelWork(
            flops=4 * product,
            moved_bytes=6 * scores + 2 * dropout,
            launches=8.0,
            product=one,
        ),
        kept_bytes=shape.bytes_of(q) + scores + dropout,
    )


def _leave(operator: str, model: LanguageModel, shape: Shape) -> list[Kernel]:
    """Returns the end of a half of a layer: the residual, and GPT's dropout or Gemma 2's norm.
    Dropout keeps its byte mask, the norm its input.
    """
    h = model.hidden_size
    residual = residual_kernel(operator, model, shape)
    if model.post_norms:
        return [norm(shape, h, operator), residual]
    if model.gated:
        return [residual]
    mask = float(shape.tokens * h)
    dropout = Kernel(
        operator="dropout",
        forward=KernelWork(moved_bytes=shape.bytes_of(2 * h) + mask),
        input_gradient=KernelWork(moved_bytes=shape.bytes_of(2 * h) + mask),
        kept_bytes=mask,
    )
    return [dropout, residual]


_INDEX_BYTES = 8.0


def expert_kernels(model: LanguageModel, shape: Shape) -> list[Kernel]:
    """Returns norm, router, experts and the shared expert; the sum after them is the next block's
    input.

    Rows are sorted by expert. The products of all experts are one grouped kernel each (gate and up
    together, and down), as in Hugging Face's ``grouped_mm`` and Megatron's experts. Tokens are
    assumed to be shared out evenly.
    """
    experts, h = model.experts, model.hidden_size
    assert experts is not None, "a layer of experts in a model that has none"
    k, f = experts.per_token, experts.intermediate_size
    busy = min(experts.number, shape.tokens * k)
    kernels = [
        norm(shape, h),
        linear("router", shape, h, experts.number, kept=0),
        _choice(shape, experts.number, k),
        elementwise("router", shape, reads=k * h, writes=k * h, kept=k * h),
        linear("gate", shape, h, 2 * f, kept=2 * k * f, copies=k, matrices=busy),
        *gating_kernels(shape, k * f),
        linear("down", shape, f, h, kept=k * h, copies=k, matrices=busy),
        elementwise("down", shape, reads=k * h, writes=h, backward_reads=(k + 1) * h),
    ]
    if experts.shared_size:
        kernels += _shared(shape, h, experts.shared_size)
    return [*kernels, residual_kernel("down", model, shape)]


def _choice(shape: Shape, number: int, per_token: int) -> Kernel:
    """Returns softmax over the experts in fp32, the best of them, and the order of rows by expert.

    Kept are the probabilities, and for each chosen expert its number, its weight, and two indices
    of the rows' order.
    """
    probabilities = 4.0 * shape.tokens * number
    chosen = (3 * _INDEX_BYTES + 2 * 4.0) * shape.tokens * per_token
    return Kernel(
        operator="router",
        forward=KernelWork(moved_bytes=3 * probabilities + 2 * chosen, launches=4.0),
        input_gradient=KernelWork(moved_bytes=3 * probabilities + chosen, launches=2.0),
        kept_bytes=probabilities + chosen,
    )


def _shared(shape: Shape, hidden: int, width: int) -> list[Kernel]:
    """Returns the expert that sees every token, its gate of one number, and their product and
    sum with the others.
    """
    h = hidden
    return [
        *gated_kernels(shape, h, width),
        linear("down", shape, width, h, kept=h),
        linear("shared_expert_gate", shape, h, 1, kept=1),
        elementwise("down", shape, reads=2 * h, writes=h, backward_reads=2 * h),
    ]


_STATE_FLOPS = 17.0
"""Operations of one state of one channel for one token, forward: 9 (Gu and Dao, appendix D) and
the exponential.
"""
_FP32 = 4.0


def state_space_kernels(model: LanguageModel, shape: Shape, *, residual_kept: bool) -> list[Kernel]:
    """Returns norm, projections, convolution, scan and output projection of Mamba's selective state
    space (Gu and Dao 2023, section 3.3 and appendix D).

    Fused kernels (``Shape.flash``) are those of its authors. They keep the projected input, the
    part of it that time steps come from, and the scan's result before the gate. The backward makes
    convolution, time steps and states again.

    Other kernels run the recurrence step by step, as Hugging Face's modules do. States of each
    token and the matrices between them are made and kept in fp32, and each token launches three
    kernels. ``residual_kept``: the other half of the same block keeps the sum after it.
    """
    space, h = model.state_space, model.hidden_size
    assert space is not None, "a layer of state space in a model that has none"
    e, r, n = space.inner_size, space.time_rank, space.state_size
    fused = shape.flash
    kernels = [
        norm(shape, h),
        linear("in_proj", shape, h, 2 * e, kept=2 * e),
        _convolution(space, shape),
        linear("x_proj", shape, e, r + 2 * n, kept=r + 2 * n),
    ]
    if space.inner_norms:
        kernels.append(norm(shape, r + 2 * n, "x_proj"))
    kernels.append(linear("dt_proj", shape, r, e, kept=0))
    kernels.append(_fused_scan(space, shape) if fused else _recurrence(space, shape))
    kernels.append(linear("out_proj", shape, e, h, kept=h if residual_kept else 0))
    return [*kernels, residual_kernel("out_proj", model, shape)]


def _convolution(space: StateSpace, shape: Shape) -> Kernel:
    """Returns the convolution over few tokens with its SiLU: limited by memory. Fused, it is made
    again in the backward; else it keeps what goes into SiLU, and what comes out.
    """
    e = space.inner_size
    return elementwise(
        "conv1d",
        shape,
        reads=e,
        writes=e,
        backward_reads=3 * e,
        backward_writes=2 * e,
        kept=0 if shape.flash else 2 * e,
    )


def _fused_scan(space: StateSpace, shape: Shape) -> Kernel:
    """Returns the scan with its gate: the states live in registers. The backward makes time steps
    and states again, and scans the gradients in the other direction: three times the work.
    """
    e, n = space.inner_size, space.state_size
    flops = _STATE_FLOPS * shape.tokens * e * n
    return Kernel(
        operator="scan",
        forward=KernelWork(vector_flops=flops, moved_bytes=shape.bytes_of(4 * e + 2 * n)),
        input_gradient=KernelWork(
            vector_flops=3 * flops, moved_bytes=shape.bytes_of(9 * e + 4 * n)
        ),
        kept_bytes=shape.bytes_of(e + 2 * n),
    )


def _recurrence(space: StateSpace, shape: Shape) -> Kernel:
    """Returns the recurrence in fp32: exp(A dt), B dt x and the states of every token are tensors
    of inner size x states.

    The forward writes A dt, its exponential, B dt and that times x, and reads their operands; each
    step reads two tensors and writes one. The backward does the same with gradients.
    """
    e, n, tokens = space.inner_size, space.state_size, shape.tokens
    states = _FP32 * tokens * e * n
    again = shape.bytes_of(e * n) if shape.itemsize < _FP32 else 0.0
    return Kernel(
        operator="scan",
        forward=KernelWork(
            vector_flops=_STATE_FLOPS * tokens * e * n,
            moved_bytes=11 * states + 2 * again,
            launches=3.0 * shape.sequence_length,
        ),
        input_gradient=KernelWork(
            vector_flops=2 * _STATE_FLOPS * tokens * e * n,
            moved_bytes=22 * states + 2 * again,
            launches=8.0 * shape.sequence_length,
        ),
        kept_bytes=3 * states + again + _FP32 * tokens * (4 * e + 2 * n) + shape.bytes_of(2 * e),
    )
