"""Kernels and settings that a run computes with, observed before its first step.

A tool process runs one layer of each kind on the meta device, without weights, and notes how the
layer calls attention. The same call, on small tensors of the run's device, shows the kernel that
torch chooses for a forward and for a backward.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from penstock.models.binding import TORCH_DTYPES
from penstock.models.compiled import Compiler
from penstock.models.surgery.decoder_parts import BatchTensors, DecoderParts, LayerCall
from penstock.models.surgery.hf import load_run_config
from penstock.models.surgery.skeleton import build_skeleton
from penstock.models.torch_device import first_device, repeat_bits
from penstock.models.torch_internals import TorchDispatchMode
from penstock.protocol.config.schema import Config
from penstock.protocol.numerics import (
    KERNELS,
    Arithmetic,
    Attention,
    CompilerChoice,
    Kernels,
)
from penstock.protocol.run.files import write_atomically

OWN, UNKNOWN, COMPOSED = "model", "unknown", "math"
_ROWS = 256
"""Positions of the small tensors: torch chooses by head size, type, mask and device."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call of attention."""


def observe_kernels(config: Config, run_dir: Path) -> None:
    """Writes ``model/kernels.json`` of a prepared run. Torch's settings of the process change, so
    the process computes nothing afterwards.

    Raises:
        ConfigError: the model cannot be built.
    """
    if config.model.deterministic:
        repeat_bits()
    own_memory = config.cluster.platform.own_memory
    dtype = TORCH_DTYPES[config.model.dtype] if own_memory else torch.float32
    first = first_device(config.cluster.platform.name)
    device = torch.device("cpu") if first is None else first.device
    compiler = Compiler(deterministic=config.model.deterministic)
    kernels = Kernels(
        attention=_attention(config, run_dir, device, dtype),
        arithmetic=_arithmetic(dtype),
        compiler=CompilerChoice(
            backend=compiler.backend,
            deterministic=compiler.deterministic,
            options={name: str(value) for name, value in compiler.options.items()},
        ),
    )
    write_atomically(run_dir / KERNELS, kernels.to_json())


def _arithmetic(dtype: torch.dtype) -> Arithmetic:
    products = torch.backends.cuda.matmul
    return Arithmetic(
        compute_dtype=str(dtype).removeprefix("torch."),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        float32_precision=torch.get_float32_matmul_precision(),
        tf32_products=bool(products.allow_tf32),
        tf32_convolutions=bool(torch.backends.cudnn.allow_tf32),
        reduced_sums_bf16=bool(products.allow_bf16_reduced_precision_reduction),
        reduced_sums_fp16=bool(products.allow_fp16_reduced_precision_reduction),
        cublas_workspace=os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        instructions=torch.backends.cpu.get_cpu_capability(),
    )


def _attention(
    config: Config, run_dir: Path, device: torch.device, dtype: torch.dtype
) -> Mapping[str, Attention]:
    """Returns the attention kernels by kind of layer."""
    skeleton = build_skeleton(load_run_config(run_dir))
    length = min(config.data.sequence_length, _ROWS)
    positions = None
    if config.data.document_masks:
        half = torch.arange(length) % max(1, length // 2)
        positions = half[None].to(device)
    for module in skeleton.model.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(device)
    parts = DecoderParts(skeleton, device=device, compute_dtype=dtype)
    calls = parts.layer_calls(BatchTensors(shape=(1, length), position_ids=positions))
    size = int(skeleton.model.config.hidden_size)
    hidden = torch.empty(1, length, size, dtype=dtype, device="meta")
    kinds: dict[str, Attention] = {}
    for part in skeleton.parts:
        if part.layer_index is not None and part.kind not in kinds:
            layer = copy.deepcopy(skeleton.layers[part.layer_index]).to("meta", dtype)
            call = _on_meta(calls[part.layer_index])
            trained = _noted(partial(call.run, layer.train(), hidden))
            evaluated = _noted(partial(call.run, layer.eval(), hidden))
            forward, backward = _chosen(trained, device, trains=True)
            evaluation, _ = _chosen(evaluated, device, trains=False)
            kinds[part.kind] = Attention(forward=forward, backward=backward, evaluation=evaluation)
    return kinds


class _Notes(TorchFunctionMode):
    """Notes the first call of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.call: Call | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.call is None:
            self.call = args, kwargs
        return func(*args, **kwargs)


def _noted(run: Callable[[], object]) -> Call | str:
    """Returns the arguments of a layer's call of attention, or a word for a layer without."""
    notes = _Notes()
    try:
        with notes:
            run()
    except Exception:  # models branch on values, which the meta device has none of
        return notes.call or UNKNOWN
    return notes.call or OWN


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the fused attention operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func.name()).removeprefix("aten::").lstrip("_")
        if name.startswith("scaled_dot_product_"):
            self.names.append(name.removeprefix("scaled_dot_product_"))
        return func(*args, **(kwargs or {}))


def _chosen(call: Call | str, device: torch.device, *, trains: bool) -> tuple[str, str]:
    """Returns the kernels of a noted call on ``device``: of its forward and its backward."""
    if isinstance(call, str):
        return call, call
    args, kwargs = _moved(call, lambda tensor: _filled(tensor, device, trains=trains))
    with _Operators() as forward, torch.set_grad_enabled(trains):
        try:
            output = F.scaled_dot_product_attention(*args, **kwargs)
        except RuntimeError:  # a model whose layers cannot run: its first forward says why
            return UNKNOWN, UNKNOWN
    with _Operators() as backward:
        if trains:
            torch.autograd.backward(output, torch.zeros_like(output))
    names = (next(iter(seen.names), COMPOSED) for seen in (forward, backward))
    return next(names), next(names)


def _filled(tensor: torch.Tensor, device: torch.device, *, trains: bool) -> torch.Tensor:
    """Returns zeros like a noted tensor; masks, which have no gradients, let all positions pass."""
    if not tensor.is_floating_point():
        return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
    zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return zeros.requires_grad_(trains and tensor.requires_grad)


def _on_meta(call: LayerCall) -> LayerCall:
    args, kwargs = _moved((call.args, call.kwargs), lambda tensor: tensor.to("meta"))
    return LayerCall(args=args, kwargs=kwargs, hidden_by_name=call.hidden_by_name)


def _moved(value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns a value with each tensor inside replaced by ``move``."""
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, dict):
        return {key: _moved(item, move) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, move) for item in value)
    return value
