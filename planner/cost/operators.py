"""What a transformer does on a GPU, kernel by kernel: operations, bytes moved, bytes kept.

From first principles, after Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, section 4: a 16-bit activation of the hidden size h is 2h bytes a token,
a dropout mask h, and so on; with flash attention (Dao et al. 2022) no scores are kept. How long it
takes is :mod:`penstock.planner.cost.analytic`'s matter.

Every tensor that the backward reads belongs to the operator that makes it, so that dropping the
operator saves exactly this tensor. The input of a block belongs to nobody: the block cannot make
it again. Where one tensor cannot be dropped without another step, the steps are one operator: the
rotary embedding belongs to ``qkv``, residual additions to the projection before them.

Split backward (2BP, section 3): only matrix products with weights, biases and the embedding have a
second half; norms, attention and element-wise kernels are p1 alone (the gradients of norms' weights
come with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from penstock.planner.cost.catalogue import LanguageModel

OPERATOR_SETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cmb": ("gelu", "mul", "norm", "silu"),
        "mlp": ("down", "dropout", "gate", "gelu", "mul", "silu", "up"),
        "attention": ("attention_core", "attention_output", "qkv"),
        "core": ("attention_core",),
    }
)
"""Named sets of operators to drop; of each set those that a model has (:func:`operator_set`).

``cmb``: the cost-effective ones of OHP and Obscura, section 8 (norm, SiLU or GELU, mul); ``mlp``:
everything in the MLP (BPipe in Obscura, section 9.1); ``attention``: everything in attention;
``core``: scores, softmax and values only (Korthikanti et al.'s selective recomputation).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """``flops`` on tensor cores, and bytes read and written."""

    flops: float = 0.0
    moved_bytes: float = 0.0


NOTHING = KernelWork()


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
    weight gradient; ``flash``: attention without stored scores.
    """

    sequence_length: int
    micro_batch: int
    itemsize: int = 2
    gradient_itemsize: int = 4
    flash: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequence_length * self.micro_batch

    def bytes_of(self, width: float) -> float:
        """Returns the bytes of an activation of ``width`` numbers a token."""
        return self.tokens * width * self.itemsize


def attention_kernels(model: LanguageModel, shape: Shape, *, residual_kept: bool) -> list[Kernel]:
    """Returns norm, projections, rotary embedding, attention core, output projection.

    ``residual_kept``: the sum after it is kept by the MLP half of the same block (a half-layer's
    output is the next one's input instead).
    """
    h, kv = model.hidden_size, model.key_value_size
    kernels = [
        _norm(shape, h),
        _linear("qkv", shape, h, h + 2 * kv, kept=h + 2 * kv),
    ]
    if model.gated:
        kernels.append(_elementwise("qkv", shape, reads=h + kv, writes=h + kv))
    kernels.append(_flash_core(model, shape) if shape.flash else _plain_core(model, shape))
    kernels.append(_linear("attention_output", shape, h, h, kept=h if residual_kept else 0))
    return kernels + _leave("attention_output", model, shape)


def mlp_kernels(model: LanguageModel, shape: Shape) -> list[Kernel]:
    """Returns norm and MLP; the sum after it is the next block's input."""
    h, f = model.hidden_size, model.intermediate_size
    if model.gated:
        inner = [
            _linear("gate", shape, h, f, kept=f),
            _linear("up", shape, h, f, kept=f, shares_input=True),
            _elementwise("silu", shape, reads=f, writes=f, backward_reads=2 * f, kept=f),
            _elementwise(
                "mul",
                shape,
                reads=2 * f,
                writes=f,
                backward_reads=3 * f,
                backward_writes=2 * f,
                kept=f,
            ),
        ]
    else:
        inner = [
            _linear("up", shape, h, f, kept=f),
            _elementwise("gelu", shape, reads=f, writes=f, backward_reads=2 * f, kept=f),
        ]
    down = _linear("down", shape, f, h, kept=0)
    return [_norm(shape, h), *inner, down, *_leave("down", model, shape)]


def embedding_kernels(model: LanguageModel, shape: Shape) -> list[Kernel]:
    """Rows of the table; their gradients are added to it. Nobody needs an input gradient."""
    h, tokens = model.hidden_size, shape.tokens
    row = shape.bytes_of(h)
    gradient = KernelWork(moved_bytes=row + 2 * tokens * h * shape.gradient_itemsize)
    return [
        Kernel(
            operator="embedding",
            forward=KernelWork(moved_bytes=2 * row),
            input_gradient=NOTHING,
            weight_gradient=gradient,
            deferred_bytes=row,
        )
    ]


def head_kernels(model: LanguageModel, shape: Shape) -> list[Kernel]:
    """Returns final norm, projection to the vocabulary, cross-entropy.

    The logarithms of the probabilities are kept in fp32, the logits are not.
    """
    h, vocab = model.hidden_size, model.vocab_size
    logits, probabilities = shape.bytes_of(vocab), 4.0 * shape.tokens * vocab
    loss = Kernel(
        operator="loss",
        forward=KernelWork(moved_bytes=2 * logits + probabilities),
        input_gradient=KernelWork(moved_bytes=logits + probabilities),
        kept_bytes=probabilities,
    )
    return [_norm(shape, h), _linear("head", shape, h, vocab, kept=0), loss]


def operator_set(name: str, model: LanguageModel) -> tuple[str, ...]:
    """Returns the operators of a named set that a model has.

    Raises:
        KeyError: unknown set.
    """
    shape = Shape(sequence_length=1, micro_batch=1)
    kernels = attention_kernels(model, shape, residual_kept=True) + mlp_kernels(model, shape)
    present = {kernel.operator for kernel in kernels}
    return tuple(operator for operator in OPERATOR_SETS[name] if operator in present)


def _norm(shape: Shape, hidden: int) -> Kernel:
    return _elementwise(
        "norm", shape, reads=hidden, writes=hidden, backward_reads=2 * hidden, kept=hidden
    )


def _elementwise(
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


def _linear(
    operator: str,
    shape: Shape,
    width_in: int,
    width_out: int,
    *,
    kept: float,
    shares_input: bool = False,
) -> Kernel:
    """Returns a product with weights: three equal products; ``kept`` is a width.

    ``shares_input``: another product defers the same input.
    """
    flops = 2.0 * shape.tokens * width_in * width_out
    activations = shape.bytes_of(width_in + width_out)
    weights = float(width_in * width_out)
    product = KernelWork(flops=flops, moved_bytes=activations + weights * shape.itemsize)
    deferred = width_out if shares_input else width_in + width_out
    return Kernel(
        operator=operator,
        forward=product,
        input_gradient=product,
        weight_gradient=KernelWork(
            flops=flops, moved_bytes=activations + 2 * weights * shape.gradient_itemsize
        ),
        kept_bytes=shape.bytes_of(kept),
        deferred_bytes=shape.bytes_of(deferred),
    )


def _flash_core(model: LanguageModel, shape: Shape) -> Kernel:
    """Returns attention with two products forward, five backward (scores again); only half of them
    under a causal mask.

    Kept: its output, and an fp32 number per head and token. Source: Dao et al. 2022 and 2023.
    """
    h, kv = model.hidden_size, model.key_value_size
    product = 2.0 * shape.tokens * shape.sequence_length * h * (0.5 if model.causal else 1.0)
    statistics = 4.0 * shape.tokens * model.num_heads
    return Kernel(
        operator="attention_core",
        forward=KernelWork(
            flops=2 * product, moved_bytes=shape.bytes_of(2 * h + 2 * kv) + statistics
        ),
        input_gradient=KernelWork(flops=5 * product, moved_bytes=shape.bytes_of(4 * h + 4 * kv)),
        kept_bytes=shape.bytes_of(h) + statistics,
    )


def _plain_core(model: LanguageModel, shape: Shape) -> Kernel:
    """Scores stored: softmax kept, and with dropout its mask and result too (Korthikanti's 5as)."""
    h = model.hidden_size
    product = 2.0 * shape.tokens * shape.sequence_length * h
    entries = float(shape.tokens * shape.sequence_length * model.num_heads)
    scores = entries * shape.itemsize
    dropout = 0.0 if model.gated else scores + entries
    return Kernel(
        operator="attention_core",
        forward=KernelWork(flops=2 * product, moved_bytes=4 * scores + 2 * dropout),
        input_gradient=KernelWork(flops=4 * product, moved_bytes=6 * scores + 2 * dropout),
        kept_bytes=shape.bytes_of(h) + scores + dropout,
    )


def _leave(operator: str, model: LanguageModel, shape: Shape) -> list[Kernel]:
    """Returns what follows a half of a layer: dropout (GPT), whose byte mask is kept, and the
    residual.
    """
    h = model.hidden_size
    mask = float(shape.tokens * h)
    residual = _elementwise(
        operator, shape, reads=2 * h, writes=h, backward_reads=2 * h, backward_writes=h
    )
    if model.gated:
        return [residual]
    dropout = Kernel(
        operator="dropout",
        forward=KernelWork(moved_bytes=shape.bytes_of(2 * h) + mask),
        input_gradient=KernelWork(moved_bytes=shape.bytes_of(2 * h) + mask),
        kept_bytes=mask,
    )
    return [dropout, residual]
