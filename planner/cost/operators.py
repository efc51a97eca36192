"""Kernels of a language model on a GPU: operations, bytes moved, bytes kept.

The numbers follow from first principles (Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", 2022, section 4). A 16-bit activation of the hidden size h is 2h bytes a
token, a dropout mask h, and so on. With flash attention (Dao et al. 2022) no scores are kept.
:mod:`penstock.planner.cost.analytic` has the seconds.

Every tensor that the backward reads belongs to the operator that makes it, so that dropping the
operator saves exactly this tensor. The input of a block belongs to no operator, as the block cannot
make it again. If dropping one tensor needs another step, the steps are one operator: the rotary
embedding belongs to ``qkv``, residual additions to the projection before them.

Split backward (2BP, section 3): only matrix products with weights, biases and the embedding have a
second half. Norms, attention, scans and element-wise kernels are p1 alone, with the gradients of
norms' weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from penstock.planner.cost.language_models import FeedForward, LanguageModel, LayerKind, Mixer
from penstock.planner.cost.layer_kernels import (
    NOTHING,
    Kernel,
    KernelWork,
    Shape,
    attention_kernels,
    elementwise,
    expert_kernels,
    linear,
    mlp_kernels,
    norm,
    state_space_kernels,
)

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


def mixer_kernels(
    model: LanguageModel, shape: Shape, kind: LayerKind, *, residual_kept: bool
) -> list[Kernel]:
    """Returns the first half of a layer: norm, attention or state space, and the sum after it.

    ``residual_kept``: that sum is kept by the other half of the same block.
    """
    if kind.mixer is Mixer.STATE_SPACE:
        return state_space_kernels(model, shape, residual_kept=residual_kept)
    return attention_kernels(model, shape, residual_kept=residual_kept, mixer=kind.mixer)


def feed_forward_kernels(model: LanguageModel, shape: Shape, kind: LayerKind) -> list[Kernel]:
    """Returns the second half of a layer, nothing where there is none."""
    match kind.feed_forward:
        case FeedForward.DENSE:
            return mlp_kernels(model, shape)
        case FeedForward.EXPERTS:
            return expert_kernels(model, shape)
        case FeedForward.NONE:
            return []


def embedding_kernels(model: LanguageModel, shape: Shape) -> list[Kernel]:
    """Returns rows of the table, and the addition of their gradients. The embedding has no input
    gradient. BERT adds types and a norm.
    """
    h, tokens = model.hidden_size, shape.tokens
    row = shape.bytes_of(h)
    gradient = KernelWork(moved_bytes=row + 2 * tokens * h * shape.gradient_itemsize)
    rows = Kernel(
        operator="embedding",
        forward=KernelWork(moved_bytes=2 * row),
        input_gradient=NOTHING,
        weight_gradient=gradient,
        deferred_bytes=row,
    )
    return [rows] if model.causal else [rows, norm(shape, h)]


def head_kernels(model: LanguageModel, shape: Shape) -> list[Kernel]:
    """Returns final norm (BERT: a dense layer, GELU and norm), projection to the vocabulary,
    cross-entropy over all tokens.

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
    before = []
    if not model.causal:
        before = [
            linear("dense", shape, h, h, kept=h),
            elementwise("gelu", shape, reads=h, writes=h, backward_reads=2 * h, kept=h),
        ]
    return [*before, norm(shape, h), linear("head", shape, h, vocab, kept=0), loss]


def operator_set(name: str, model: LanguageModel) -> tuple[str, ...]:
    """Returns the operators of a named set that a model has.

    Raises:
        KeyError: unknown set.
    """
    shape = Shape(sequence_length=1, micro_batch=1)
    present = {
        kernel.operator
        for kind in model.pattern
        for kernel in (
            *mixer_kernels(model, shape, kind, residual_kept=True),
            *feed_forward_kernels(model, shape, kind),
        )
    }
    return tuple(operator for operator in OPERATOR_SETS[name] if operator in present)
