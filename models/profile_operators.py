"""The operators inside a block, told apart by the modules that its forward calls.

A module without children is an operator (``q_proj``, ``act_fn`` …, under the planner's names where
it has one: :data:`_NAMES`). What a module with children does itself, between calling them, is one
too if it is an attention or an MLP: scores, softmax and values; the product of gate and up.

Kept memory belongs to the operator that made it: one whose output the storage is; otherwise, if it
was the input of the module during which autograd kept it, the module around that one; otherwise the
module itself. Dropping an operator saves this memory and costs its time. What belongs to no named
operator (the block's input, residual sums) is left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as hooks

_NAMES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"), "qkv"),
    **dict.fromkeys(("o_proj", "out_proj", "dense"), "attention_output"),
    **dict.fromkeys(("gate_proj", "w1"), "gate"),
    **dict.fromkeys(("up_proj", "w3", "c_fc", "fc1", "dense_h_to_4h"), "up"),
    **dict.fromkeys(("down_proj", "w2", "fc2", "dense_4h_to_h"), "down"),
    "lm_head": "head",
}
"""What models call their modules, and the planner their operators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorMeasure:
    """One operator of a block: seconds of its forward, bytes that it leaves for the backward."""

    name: str
    seconds: float
    kept_bytes: float


@dataclass(slots=True, kw_only=True)
class _Call:
    """A module that is running."""

    operator: str | None
    started_s: float
    inputs: frozenset[int]
    children_s: float = 0.0


@dataclass(slots=True)
class _Run:
    """One forward: its calls, what they made, what autograd kept.

    Outputs stay alive till the end, so that no address stands for two tensors.
    """

    stack: list[_Call] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    maker: dict[int, str] = field(default_factory=dict)
    kept: dict[int, tuple[int, str | None]] = field(default_factory=dict)
    alive: list[torch.Tensor] = field(default_factory=list)


class OperatorProbe:
    """Watches forwards of one block; the first one warms up and does not count."""

    def __init__(self, weights: frozenset[int], device: torch.device) -> None:
        """``weights``: addresses of storages that are no activations."""
        self._weights = weights
        self._device = device
        self._names: dict[int, str] = {}
        self._runs: list[_Run] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """One forward runs inside."""
        run = _Run()

        def before(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            self._names.update({id(child): name for name, child in module.named_children()})
            run.stack.append(
                _Call(
                    operator=self._operator(module),
                    started_s=self._now(),
                    inputs=frozenset(map(_address, filter(_is_tensor, arguments))),
                )
            )

        def after(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            self._leave(run, run.stack.pop(), output)

        handles = (
            hooks.register_module_forward_pre_hook(before),
            hooks.register_module_forward_hook(after),
        )
        try:
            with saved_tensors_hooks(lambda tensor: self._keep(run, tensor), lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()
        run.alive.clear()
        self._runs.append(run)

    def measures(self) -> tuple[OperatorMeasure, ...]:
        """Operators in the order in which they first end; seconds are medians."""
        counted = self._runs[1:]
        return tuple(
            OperatorMeasure(
                name=name,
                seconds=statistics.median(run.seconds.get(name, 0.0) for run in counted),
                kept_bytes=float(_kept_by(name, counted[-1])),
            )
            for name in counted[-1].seconds
        )

    def _operator(self, module: nn.Module) -> str | None:
        """The planner's name; None for a module that only calls others."""
        kind, name = type(module).__name__.lower(), self._names.get(id(module), "")
        if next(module.children(), None) is not None:
            return _own_work(kind)
        if "norm" in kind:
            return "norm"
        if "activation" in kind or name in ("act", "act_fn", "activation_fn"):
            return kind.removesuffix("activation") or "activation"
        return _NAMES.get(name) or _plain(name or kind)

    def _leave(self, run: _Run, call: _Call, output: Any) -> None:
        took_s = self._now() - call.started_s
        if run.stack:
            run.stack[-1].children_s += took_s
        if call.operator is None:
            return
        own_s = took_s - call.children_s
        run.seconds[call.operator] = run.seconds.get(call.operator, 0.0) + own_s
        for tensor in filter(_is_tensor, output if isinstance(output, tuple) else (output,)):
            run.maker.setdefault(_address(tensor), call.operator)
            run.alive.append(tensor)

    def _keep(self, run: _Run, tensor: torch.Tensor) -> torch.Tensor:
        address = _address(tensor)
        if address not in self._weights and address not in run.kept:
            run.kept[address] = (tensor.untyped_storage().nbytes(), _innermost(run.stack, address))
        return tensor

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _own_work(kind: str) -> str | None:
    if "attention" in kind:
        return "attention_core"
    return "mul" if "mlp" in kind else None


def _plain(name: str) -> str:
    """A name that instructions can carry."""
    kept = "".join(c if c.isalnum() and c.isascii() else "_" for c in name.lower())
    return kept[:32]


def _innermost(stack: list[_Call], address: int) -> str | None:
    """The operator of the innermost running module that did not get the storage as its input."""
    for call in reversed(stack):
        if address not in call.inputs:
            return call.operator
    return None


def _kept_by(operator: str, run: _Run) -> int:
    return sum(
        size
        for address, (size, during) in run.kept.items()
        if run.maker.get(address, during) == operator
    )


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
