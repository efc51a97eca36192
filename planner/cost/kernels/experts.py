"""Kernels of a mixture of experts: router, rows sorted by expert, grouped products, rows summed.

The products of all experts are one grouped kernel each (gate and up together, and down), as Hugging
Face's ``grouped_mm`` and Megatron's experts make them. Tokens are taken to be shared out evenly.
"""

from __future__ import annotations

from penstock.planner.cost.kernels.transformer import (
    gated_kernels,
    gating_kernels,
    residual_kernel,
)
from penstock.planner.cost.kernels.work import (
    Kernel,
    KernelWork,
    Shape,
    elementwise,
    linear,
    norm,
)
from penstock.planner.cost.language_models import LanguageModel

_INDEX_BYTES = 8.0


def expert_kernels(model: LanguageModel, shape: Shape) -> list[Kernel]:
    """Returns norm, router, experts and the shared expert; the sum after them is the next block's
    input.
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
