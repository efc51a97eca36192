"""The planner's operator of a running kernel.

Names are those of :mod:`penstock.planner.cost.operators`: ``qkv``, ``attention_core``,
``attention_output``, ``gate``, ``up``, ``down``, ``silu``, ``gelu``, ``mul``, ``norm``,
``dropout``, ``embedding``, ``head``, ``loss``. A module without a counterpart there has the name
that its parent gives it.

Names follow from the running modules (Hugging Face's class and attribute names). Where a module
with children computes by itself, the kernel decides:

- in an attention, before the first product of activations or softmax: ``qkv`` (rotary embedding);
  from there to the output projection: ``attention_core``;
- in an MLP or among experts: ``mul``; experts' own products are ``gate`` and ``down``;
- residual additions: the projection before them;
- outside of all modules: ``loss``.

Batch norms have no name: they change their running statistics, so they never run twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import nn
from torch.nn.modules import module as hooks

_PROJECTIONS = {
    **dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "q_attn"), "qkv"
    ),
    **dict.fromkeys(("query", "key", "value", "q_lin", "k_lin", "v_lin", "Wqkv"), "qkv"),
    **dict.fromkeys(("o_proj", "out_proj", "out_lin", "Wo"), "attention_output"),
    **dict.fromkeys(("gate_proj", "gate_up_proj", "w1"), "gate"),
    **dict.fromkeys(("up_proj", "w3", "c_fc", "fc1", "fc_in", "dense_h_to_4h"), "up"),
    **dict.fromkeys(("down_proj", "w2", "fc2", "fc_out", "dense_4h_to_h"), "down"),
    **dict.fromkeys(("lm_head", "embed_out"), "head"),
}
"""The planner's operators by the models' names for their projections."""

_KERNELS = {
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "rms_norm"), "norm"),
    **dict.fromkeys(("silu", "gelu", "relu"), None),
}
"""Kernels that are an operator wherever a module with children calls them (None: its own name)."""

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"})
_CORE_PREFIXES = (
    "_scaled_dot_product",
    "_softmax",
    "_safe_softmax",
    "_flash_attention",
    "cudnn_flash",
)


class _Role(Enum):
    """The kind of kernels between the calls of a module's children."""

    OPERATOR = auto()
    """One operator: a module without children."""
    ATTENTION = auto()
    MLP = auto()
    EXPERTS = auto()
    AROUND = auto()
    """Residual additions around other modules."""


@dataclass(slots=True, kw_only=True)
class _RunningModule:
    """A module that is running. ``operator``: its name, for the role of that name.

    ``core_reached``, ``activated``: an attention is past its first product, experts are past their
    activation.
    """

    role: _Role
    kind: str
    operator: str | None = None
    core_reached: bool = False
    activated: bool = False


class OperatorTracker:
    """Follows the calls of modules on one thread; one forward at a time."""

    def __init__(self) -> None:
        self._stack: list[_RunningModule] = []
        self._names: dict[int, str] = {}
        self._projection: str | None = None

    def restart(self) -> None:
        """Begins a new block, in which no projection has run."""
        self._names.clear()
        self._projection = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follows all modules that this thread calls inside, of any model."""
        thread = threading.get_ident()  # the hooks see all threads

        def before(module: nn.Module, _: tuple[Any, ...]) -> None:
            if threading.get_ident() == thread:
                self._enter(module)

        def after(_: nn.Module, __: tuple[Any, ...], ___: Any) -> None:
            if threading.get_ident() == thread:
                self._stack.pop()

        entered = hooks.register_module_forward_pre_hook(before)
        left = hooks.register_module_forward_hook(after, always_call=True)
        try:
            yield
        finally:
            entered.remove()
            left.remove()

    def operator_of(self, kernel: str) -> str | None:
        """Returns the operator of a kernel (``mm``, ``native_layer_norm`` …) that starts now. None:
        the kernel belongs to no operator and is never dropped.

        The caller asks for every kernel, in order.
        """
        if not self._stack:
            return "loss"
        call = self._stack[-1]
        if call.role is _Role.OPERATOR:
            return call.operator
        if kernel in _KERNELS:
            call.activated = call.activated or _KERNELS[kernel] is None
            return _KERNELS[kernel] or kernel
        if call.role is _Role.ATTENTION:
            return self._in_attention(call, kernel)
        if call.role is _Role.EXPERTS:
            return self._in_experts(call, kernel)
        return "mul" if call.role is _Role.MLP else call.operator or self._projection

    def _in_attention(self, call: _RunningModule, kernel: str) -> str:
        if self._projection == "attention_output":
            return self._projection
        if kernel in _PRODUCTS or kernel.startswith(_CORE_PREFIXES):
            call.core_reached = True
        return "attention_core" if call.core_reached else "qkv"

    def _in_experts(self, call: _RunningModule, kernel: str) -> str:
        if kernel not in _PRODUCTS:
            return "mul"
        operator = "down" if call.activated else "gate"
        call.activated = False
        self._projection = operator
        return operator

    def _enter(self, module: nn.Module) -> None:
        kind = type(module).__name__.lower()
        name = self._names.get(id(module), "")
        self._names.update((id(child), called) for called, child in module.named_children())
        if next(module.children(), None) is None:
            self._stack.append(self._leaf(module, kind, name))
        else:
            self._stack.append(_container(kind, name, inner=bool(self._stack)))

    def _leaf(self, module: nn.Module, kind: str, name: str) -> _RunningModule:
        operator = self._element_wise(module, kind, name)
        if operator is None and "batchnorm" not in kind:
            operator = self._projection_of(kind, name)
            if not isinstance(module, nn.Embedding):
                self._projection = operator
        return _RunningModule(role=_Role.OPERATOR, kind=kind, operator=operator)

    def _element_wise(self, module: nn.Module, kind: str, name: str) -> str | None:
        if "batchnorm" in kind:
            return None
        if "norm" in kind:
            return "norm"
        if "router" in kind:
            return "router"
        if isinstance(module, nn.Embedding):
            return "embedding"
        if isinstance(module, nn.Dropout):
            scores = self._inside("attention") and self._projection != "attention_output"
            return "attention_core" if scores else "dropout"
        if "activation" in kind or name in ("act", "act_fn", "activation", "activation_fn"):
            if self._stack:
                self._stack[-1].activated = True
            return _activation(kind)
        return None

    def _projection_of(self, kind: str, name: str) -> str:
        if name in _PROJECTIONS:
            return _PROJECTIONS[name]
        if name in ("c_proj", "dense"):  # GPT-2's and BERT's names for several projections
            if self._inside("attention"):
                return "attention_output"
            return "up" if self._inside("intermediate") else "down"
        return plain_name(name or kind)

    def _inside(self, kind: str) -> bool:
        return any(kind in call.kind for call in self._stack)


def plain_name(name: str) -> str:
    """Returns the name as instructions can carry it: ASCII letters, digits and ``_``, at most
    32.
    """
    kept = "".join(c if c.isalnum() and c.isascii() else "_" for c in name.lower())
    return kept[:32]


def _container(kind: str, name: str, *, inner: bool) -> _RunningModule:
    if "attention" in kind:
        return _RunningModule(role=_Role.ATTENTION, kind=kind)
    if "experts" in kind:
        return _RunningModule(role=_Role.EXPERTS, kind=kind)
    if any(part in kind for part in ("mlp", "feedforward", "ffn", "moe")):
        return _RunningModule(role=_Role.MLP, kind=kind)
    # Around its children a layer only adds; other modules' own kernels have the module's name.
    around = not inner or any(part in kind for part in ("layer", "block", "output"))
    operator = None if around else plain_name(name or kind)
    return _RunningModule(role=_Role.AROUND, kind=kind, operator=operator)


def _activation(kind: str) -> str:
    for known in ("gelu", "silu"):
        if known in kind:
            return known
    return plain_name(kind.removesuffix("activation") or "activation")
