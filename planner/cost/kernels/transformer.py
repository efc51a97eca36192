"""Kernels of attention and of the dense MLP."""

from __future__ import annotations

from penstock.planner.cost.kernels.work import (
    Kernel,
    KernelWork,
    Product,
    Shape,
    elementwise,
    linear,
    norm,
    rotary,
)
from penstock.planner.cost.language_models import LanguageModel, Mixer


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
    """Returns attention with two products forward, five backward (scores again); under a causal
    mask only half of them, with a window w in s tokens w - w² / 2 s of s columns.

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
    """Returns what follows a half of a layer: dropout (GPT), whose byte mask is kept, or a norm
    (Gemma 2), whose input is kept, and the residual.
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
