"""The operators inside a block, told apart by the modules that its forward calls.

A module without children is an operator (``q_proj``, ``act_fn`` …, under the planner's names where
it has one: :data:`_NAMES`). What a module with children does itself, between calling them, is one
too if it is an attention or an MLP: scores, softmax and values; the product of gate and up.

What dropping an operator saves is measured where the names are known: by dropping it
(:mod:`penstock.models.profiling.memory`).
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
from torch.nn.modules import module as hooks

from penstock.models.saved_activations.operators import plain_name
from penstock.models.torch_device import torch_device

_NAMES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"), "qkv"),
    **dict.fromkeys(("o_proj", "out_proj", "dense"), "attention_output"),
    **dict.fromkeys(("gate_proj", "w1"), "gate"),
    **dict.fromkeys(("up_proj", "w3", "c_fc", "fc1", "dense_h_to_4h"), "up"),
    **dict.fromkeys(("down_proj", "w2", "fc2", "dense_4h_to_h"), "down"),
    "lm_head": "head",
}
"""What models call their modules, and the planner their operators."""


@dataclass(slots=True, kw_only=True)
class _TimedModule:
    """A module that is running, and the seconds that its children have taken so far."""

    operator: str | None
    started_s: float
    children_s: float = 0.0


@dataclass(slots=True)
class _TimedForward:
    """One forward: the modules that are running, and the seconds of operators that are over."""

    stack: list[_TimedModule] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class OperatorProbe:
    """Watches forwards of one block; the first one warms up and does not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: dict[int, str] = {}
        self._runs: list[_TimedForward] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run one forward of the block inside; all modules that any thread calls are taken for
        its.
        """
        run = _TimedForward()

        def before(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            self._names.update({id(child): name for name, child in module.named_children()})
            run.stack.append(_TimedModule(operator=self._operator(module), started_s=self._now()))

        def after(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            self._leave(run, run.stack.pop())

        handles = (
            hooks.register_module_forward_pre_hook(before),
            hooks.register_module_forward_hook(after),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._runs.append(run)

    @property
    def seconds(self) -> dict[str, float]:
        """Median seconds of each operator by name, in the order in which they first end."""
        counted = self._runs[1:]
        return {
            name: statistics.median(run.seconds.get(name, 0.0) for run in counted)
            for name in counted[-1].seconds
        }

    def _operator(self, module: nn.Module) -> str | None:
        """Returns the planner's name; None for a module that only calls others."""
        kind, name = type(module).__name__.lower(), self._names.get(id(module), "")
        if next(module.children(), None) is not None:
            return _own_work(kind)
        if "norm" in kind:
            return "norm"
        if "activation" in kind or name in ("act", "act_fn", "activation_fn"):
            return kind.removesuffix("activation") or "activation"
        return _NAMES.get(name) or plain_name(name or kind)

    def _leave(self, run: _TimedForward, call: _TimedModule) -> None:
        took_s = self._now() - call.started_s
        if run.stack:
            run.stack[-1].children_s += took_s
        if call.operator is not None:
            own_s = took_s - call.children_s
            run.seconds[call.operator] = run.seconds.get(call.operator, 0.0) + own_s

    def _now(self) -> float:
        # So that the seconds of a module's kernels are its own; the sum is longer than a forward's.
        torch_device(self._device).synchronize()
        return time.perf_counter()


def _own_work(kind: str) -> str | None:
    if "attention" in kind:
        return "attention_core"
    return "mul" if "mlp" in kind else None
