"""Kernels of attention by the names of ``model.attention``, for all layers of a process.

Layers call attention through transformers and torch. Torch's own kernels are chosen by switches of
the process, which hold in all threads and while the compiler traces. Torch's cache of compiled
graphs ignores the switches, so graphs of each choice have a folder of their own.

``cudnn-flash`` is an operator of Penstock. It combines cuDNN's forward with the backward of
FlashAttention-2, from the output and the log-sum-exp of that forward. The backward of cuDNN adds in
any order. FlashAttention-2 has a fixed order, which ``torch.use_deterministic_algorithms`` chooses.
A compiled graph calls forward and backward unchanged. Heads are padded to a multiple of eight
elements; the kernels handle grouped heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from penstock.config.values import AUTO, SDPA
from penstock.models.torch_internals import cudnn_attention, flash_attention_backward
from penstock.protocol.run.rundir import COMPILED

CUDNN, CUDNN_FLASH = "cudnn", "cudnn-flash"

OPERATOR = "cudnn_flash_attention"
"""Name of the operator's forward; the backward has ``_backward`` behind it."""

_SWITCHES: Mapping[str, Callable[[bool], None]] = MappingProxyType(
    {
        "flash": torch.backends.cuda.enable_flash_sdp,
        "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
        "math": torch.backends.cuda.enable_math_sdp,
        CUDNN: torch.backends.cuda.enable_cudnn_sdp,
    }
)
_MULTIPLE = 8
"""Head sizes of the fused kernels are multiples of eight."""


def choose_attention(name: str) -> None:
    """Sets the attention of all layers of the process, before a layer is traced or runs. ``auto``,
    which preparation settles, and ``sdpa`` leave all kernels to torch.
    """
    for kernel, switch in _SWITCHES.items():
        switch(name == kernel or name not in _SWITCHES)
    if name == CUDNN_FLASH:
        # Imported here: seconds, which processes without this choice need not take.
        from transformers import AttentionInterface

        AttentionInterface.register("sdpa", _transformers_attention)


def graphs_folder(run_dir: Path, name: str) -> Path:
    """Returns the folder of a run's compiled graphs with an attention."""
    folder = run_dir / COMPILED
    return folder if name in (AUTO, SDPA) else folder / name


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Computes attention by ``cudnn-flash``, with the results of
    ``F.scaled_dot_product_attention``.

    Raises:
        ValueError: one of the two kernels cannot compute the call; names the reason.
    """
    tensors = (query, key, value)
    if has_torch_function(tensors):
        result: torch.Tensor = handle_torch_function(
            attend,
            tensors,
            *tensors,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return result
    if attn_mask is not None:
        raise ValueError("a mask, but cudnn-flash supports the causal one alone")
    if dropout_p:
        raise ValueError("attention dropout: two kernels draw different random numbers")
    size = query.shape[-1]
    if value.shape[-1] != size:
        raise ValueError(f"query heads have {size} elements, value heads {value.shape[-1]}")
    if is_causal and query.shape[2] != key.shape[2]:
        raise ValueError("causal mask, but queries and keys differ in number")
    if scale is None:
        scale = size**-0.5
    padding = -size % _MULTIPLE
    if padding:
        query, key, value = (F.pad(tensor, (0, padding)) for tensor in tensors)
    output: torch.Tensor = _attention(query, key, value, is_causal, scale)[0]
    return output[..., :size] if padding else output


def _transformers_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention in place of torch's function, which transformers calls otherwise; see
    ``transformers.integrations.sdpa_attention``.
    """
    mask = attention_mask if position_bias is None else position_bias
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    output = attend(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=query.shape[2] > 1 and mask is None and causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


@torch.library.custom_op(f"penstock::{OPERATOR}", mutates_args=(), device_types="cuda")
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output (batch, heads, rows, size) and natural log-sum-exps (batch, heads, rows)."""
    query, key, value = map(_with_rows, (query, key, value))
    output, sums = cudnn_attention(query, key, value, is_causal=is_causal, scale=scale)
    return _by_rows(output), sums


@_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op(f"penstock::{OPERATOR}_backward", mutates_args=(), device_types="cuda")
def _attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value."""
    gradient, query, key, value = map(_with_rows, (gradient, query, key, value))
    gradients = flash_attention_backward(
        gradient, query, key, value, output, sums, is_causal=is_causal, scale=scale
    )
    of_query, of_key, of_value = map(_by_rows, gradients)
    return of_query, of_key, of_value


@_attention_backward.register_fake
def _(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _like(query), _like(key), _like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients of the operator's arguments; its log-sum-exps have none."""
    gradients = _attention_backward(gradient, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
    return (*gradients, None, None)


_attention.register_autograd(_differentiate, setup_context=_save)


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same values with a dense last dimension."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns (batch, heads, rows, size) in the memory order (batch, rows, heads, size)."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns memory of the shape of a tensor, in the order of :func:`_by_rows`."""
    batch, heads, rows, size = tensor.shape
    return tensor.new_empty(batch, rows, heads, size).transpose(1, 2)
