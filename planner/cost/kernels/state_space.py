"""Kernels of Mamba's selective state space (Gu and Dao 2023, section 3.3 and appendix D).

Fused (``Shape.flash``): the kernels of its authors, which keep the projected input, what of it the
time steps come from, and the scan's result before the gate; convolution, time steps and states are
made again in the backward. Otherwise the recurrence step by step, as Hugging Face's modules run
without these kernels: each token's states and the matrices between them are made and kept in fp32,
and three kernels a token are launched one after the other.
"""

from __future__ import annotations

from penstock.planner.cost.kernels.transformer import residual_kernel
from penstock.planner.cost.kernels.work import (
    Kernel,
    KernelWork,
    Shape,
    elementwise,
    linear,
    norm,
)
from penstock.planner.cost.language_models import LanguageModel, StateSpace

_STATE_FLOPS = 17.0
"""Of one state of one channel for one token, forward: 9 (Gu and Dao, appendix D) and the
exponential.
"""
_FP32 = 4.0


def state_space_kernels(model: LanguageModel, shape: Shape, *, residual_kept: bool) -> list[Kernel]:
    """Returns norm, projections, convolution, scan and output projection.

    ``residual_kept``: the sum after it is kept by the other half of the same block.
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

    Passes over them: the forward writes A dt, its exponential, B dt and that times x and reads what
    these come from, then reads two and writes one in each step; the backward the same with
    gradients.
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
