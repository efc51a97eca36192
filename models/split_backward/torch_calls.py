"""Calls of torch functions as a function mode sees them: their kinds, their tensors, replacements.

This module classifies functions for :mod:`penstock.models.split_backward.split`, which treats them
by their class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch


class Treatment(Enum):
    """The treatment of a function of parameters and activations in a split backward."""

    PRODUCT = "product"
    """Weight gradients cost as much as input gradients: deferred."""
    REDUCTION = "reduction"
    """Elementwise, or a norm. Weight gradients are sums over tensors that the input gradients read
    or make anyway. To defer them saves little time and keeps an input and a gradient.
    """


_PRODUCTS = """
    linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    embedding embedding_bag __getitem__ index_select gather
    matmul __matmul__ __rmatmul__ mm bmm mv addmm baddbmm
"""
_REDUCTIONS = """
    mul multiply __mul__ __rmul__ add __add__ __radd__ sub subtract __sub__ __rsub__ rsub
    layer_norm rms_norm group_norm instance_norm batch_norm
    cat concat concatenate stack where
"""

TREATMENTS: Mapping[str, Treatment] = {
    **dict.fromkeys(_PRODUCTS.split(), Treatment.PRODUCT),
    **dict.fromkeys(_REDUCTIONS.split(), Treatment.REDUCTION),
}
"""Functions with weight gradients that read no weights."""

ONLY_LIKE = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})
"""Methods that take no values from tensors other than the first."""

NOT_COMPUTED = frozenset(
    """
    __set__ requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook backward
    detach detach_ data_ptr untyped_storage storage size stride dim numel nelement is_contiguous
    __repr__ __format__ __len__ __hash__
    """.split()
)
"""Methods that return no part of the graph."""

_VIEW_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
_IN_PLACE_OPERATORS = frozenset(
    """
    __setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__
    __iand__ __ior__ __ixor__ __ilshift__ __irshift__
    """.split()
)


def computed_name(function: Any) -> str | None:
    """Returns the function's name; None if it does not return a part of the graph."""
    name: str = function.__name__
    if name == "__get__":
        name = function.__self__.__name__
        return name if name in _VIEW_PROPERTIES else None
    return None if name in NOT_COMPUTED else name


class TorchCall:
    """A call of a torch function that is about to be made."""

    __slots__ = ("args", "function", "kwargs", "name")

    def __init__(
        self, function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self.function, self.name, self.args, self.kwargs = function, name, args, kwargs

    @property
    def in_place(self) -> bool:
        """True if the call changes a tensor, by the conventions of torch's names."""
        name = self.name
        return (
            (name.endswith("_") and not name.endswith("__"))
            or name in _IN_PLACE_OPERATORS
            or self.kwargs.get("out") is not None
        )

    def run(self, replacements: Mapping[int, torch.Tensor]) -> Any:
        """Makes the call, with some tensors (by id) replaced by others of the same shape and dtype;
        returns its result.
        """
        if not replacements:
            return self.function(*self.args, **self.kwargs)
        args = [replaced(value, replacements) for value in self.args]
        if not self.kwargs:
            return self.function(*args)
        return self.function(*args, **replaced(self.kwargs, replacements))


class MatrixProduct(NamedTuple):
    """``rows @ weight.T + bias``, or (``transposed``) ``rows @ weight + bias``.

    ``rows`` is (..., inputs), ``bias`` (outputs,), ``weight`` (outputs, inputs), or (inputs,
    outputs) where it is transposed.
    """

    rows: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    transposed: bool = False

    @property
    def plain(self) -> bool:
        """True if it runs as one matrix product over the rows, independent of required
        gradients.
        """
        rows, weight = self.rows, self.weight
        return (
            rows.dim() >= 2
            and rows.is_contiguous()
            and weight.dim() == 2
            and weight.is_contiguous()
            and not torch.is_autocast_enabled(rows.device.type)
        )


def matrix_product(call: TorchCall) -> MatrixProduct | None:
    """Returns the product that a call of ``F.linear`` or ``addmm`` makes; None for other calls, and
    for an ``addmm`` with factors.
    """
    if call.name == "linear":
        return _linear(*call.args, **call.kwargs)
    if call.name == "addmm" and len(call.args) == 3 and not call.kwargs:
        bias, rows, weight = call.args
        return MatrixProduct(rows, weight, bias, True)
    return None


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> MatrixProduct:
    return MatrixProduct(input, weight, bias)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors, of any shape and dtype, in nested lists, tuples and dicts, in order."""
    tensors: list[torch.Tensor] = []
    _collect((value,), tensors)
    return tensors


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


def replaced(value: Any, replacements: Mapping[int, torch.Tensor]) -> Any:
    """Returns nested lists, tuples and dicts with some tensors (by id) replaced, of any shape and
    dtype; the others stay.
    """
    if isinstance(value, torch.Tensor):
        return replacements.get(id(value), value)
    if isinstance(value, tuple):
        items = [replaced(item, replacements) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [replaced(item, replacements) for item in value]
    if isinstance(value, dict):
        return {key: replaced(item, replacements) for key, item in value.items()}
    return value


def storage_of(tensor: torch.Tensor) -> int:
    """Returns the address of the memory that a tensor of any shape is a view of."""
    return tensor.untyped_storage().data_ptr()
