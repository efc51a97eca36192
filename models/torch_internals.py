"""Penstock's uses of torch beyond torch's promises: the one place to check for a new torch.

Names with an underscore, and undocumented names, may change with any minor version. They are used
only in this module (``tests/test_architecture.py`` has the exceptions, with reasons).
docs/VERSIONS.md lists the tried versions, and the way to try another.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore, Work
from torch._ops import OpOverload
from torch.autograd.graph import Node
from torch.distributed import ProcessGroupGloo
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "OpOverload",
    "PrefixStore",
    "SavedTensorHooks",
    "StorageWeakRef",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "Work",
    "cudnn_attention",
    "flash_attention_backward",
    "gloo_group",
    "has_hooks",
    "innermost_saved_tensor_hooks",
    "is_of_checkpoint",
    "key_of",
    "node_of_product",
    "reads_first_factor",
    "schema_of",
    "unseen_by_modes",
]

SavedTensorHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""A function that packs a tensor saved by autograd, and one that unpacks it."""


def unseen_by_modes() -> AbstractContextManager[None]:
    """Returns a context in which no dispatch mode sees the thread's operations."""
    return torch._C._DisableTorchDispatch()


def key_of(storage: torch.UntypedStorage) -> int:
    """Returns a number that no other living storage has; also for storages of no bytes."""
    return int(storage._cdata)


def node_of_product(output: torch.Tensor) -> Node:
    """Returns the node of a matrix product's derivative; ``output`` is the product, (..., outputs).

    torch multiplies rows of two dimensions, and then restores the shape of the result. Up to 2.14
    it uses a view, from 2.15 an unsafe view. The sum of a gradient over the rows has the right bits
    only in the layout that arrives at the product itself.
    """
    node = output.grad_fn
    assert node is not None
    if node.name() in ("ViewBackward0", "UnsafeViewBackward0"):
        node = node.next_functions[0][0]
        assert node is not None
    return node


def reads_first_factor(product: Node) -> bool:
    """Returns whether the derivative of an element-wise product reads the first factor's values."""
    node: Any = product
    return node._saved_self is not None


def has_hooks(parameter: torch.Tensor) -> bool:
    """Returns whether a leaf of any shape has hooks for its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def cudnn_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output, (batch, heads, rows, size), and natural log-sum-exps, (batch, heads, rows),
    of cuDNN's attention. Versions of torch differ in a last dimension of one of the latter.
    """
    output, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, is_causal, False, scale=scale
    )
    return output, sums.reshape(query.shape[:3]).contiguous()


def flash_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value by FlashAttention-2; ``sums``: natural
    log-sum-exps, contiguous.
    """
    # Unread without dropout.
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)
    offset = torch.empty((), dtype=torch.uint64, device=query.device)
    of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *(gradient, query, key, value, output, sums),
        *(None, None, query.shape[2], key.shape[2]),
        *(0.0, is_causal, seed, offset),
        scale=scale,
    )
    return of_query, of_key, of_value


def schema_of(kernel: OpOverload[..., Any]) -> torch.FunctionSchema:
    """Returns a kernel's name and arguments, with those that it changes marked."""
    return kernel._schema


def innermost_saved_tensor_hooks() -> SavedTensorHooks | None:
    """Returns the innermost hooks for tensors that autograd saves on this thread; None without
    any.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_of_checkpoint(hooks: SavedTensorHooks) -> bool:
    """Returns whether hooks are those of a ``torch.utils.checkpoint`` that is not reentrant."""
    return hooks[0].__qualname__.startswith("_checkpoint_hook.")


def gloo_group(store: Store, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    """Returns a ``ProcessGroupGloo`` over the interface of ``address``, outside of any default
    group. Blocks until the ``size`` ranks have called, each with the same store.

    Raises:
        RuntimeError: a rank has not called in ``timeout``, or has ended.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub says Options
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
    return ProcessGroupGloo(store, rank, size, options)


def set_most_graphs(number: int) -> None:
    """Sets the number of graphs of one module class; above it, calls of the class run uncompiled.
    It holds for the calling thread.
    """
    from torch._dynamo import config as dynamo

    dynamo.recompile_limit = number
    dynamo.accumulated_recompile_limit = number


def num_compiled_graphs() -> int:
    """Returns the number of graphs that this process has compiled."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compilation_error() -> type[Exception]:
    """Returns the base class of ``torch.compile``'s errors for a module that is not one graph."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException
