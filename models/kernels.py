"""Kernels and settings that a run computes with, observed before its first step.

A tool process runs one layer of each kind on the meta device, without weights, and notes the
layer's calls of attention. It then repeats a call on small tensors of the run's device. The
repetition shows the kernels that torch chooses for forward and backward. It also shows whether the
kernel of ``model.attention`` can compute the call.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from penstock.config.schema import Config
from penstock.config.values import AUTO, SDPA
from penstock.host.errors import ConfigError
from penstock.host.files import write_atomically
from penstock.models.attention import (
    CUDNN,
    CUDNN_FLASH,
    OPERATOR,
    attend,
    choose_attention,
)
from penstock.models.binding import TORCH_DTYPES
from penstock.models.compiled import Compiler
from penstock.models.surgery.decoder_parts import BatchTensors, DecoderParts, LayerCall
from penstock.models.surgery.hf import load_run_config
from penstock.models.surgery.skeleton import build_skeleton
from penstock.models.torch_device import first_device, repeat_bits
from penstock.models.torch_internals import TorchDispatchMode
from penstock.protocol.run.data_size import TrainingData
from penstock.protocol.run.numerics import (
    KERNELS,
    Arithmetic,
    Attention,
    CompilerChoice,
    Kernels,
)

OWN, UNKNOWN, COMPOSED = "model", "unknown", "math"
_ROWS = 256
"""Positions of the small tensors: torch chooses by head size, type, mask and device."""

_HOPPER = 9
"""Major compute capability of GPUs on which cuDNN attention is about twice as fast as flash."""

_WORDS = 300
"""Most characters of torch's reasons in an error."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of attention by a layer: ``run`` is torch's function or Penstock's."""

    run: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """Calls of one kind of layer in training and in evaluation; a word for a layer without."""

    trained: Call | str
    evaluated: Call | str


class _RefusedError(Exception):
    """The error of kernels that cannot compute a call; names the reason."""


def observe_kernels(
    config: Config, run_dir: Path, progress: Progress = lambda message: None
) -> None:
    """Writes ``model/kernels.json`` of a prepared run, with the attention that ``auto`` stands for.
    Torch's settings of the process change, so the process computes nothing afterwards.

    Raises:
        ConfigError: the model cannot be built, or a layer cannot use the attention that
            ``model.attention`` names.
    """
    if config.model.deterministic:
        repeat_bits()
    own_memory = config.cluster.platform.own_memory
    dtype = TORCH_DTYPES[config.model.dtype] if own_memory else torch.float32
    first = first_device(config.cluster.platform.name)
    device = torch.device("cpu") if first is None else first.device
    compiler = Compiler(deterministic=config.model.deterministic)
    names = _candidates(config, None if first is None else device)
    choose_attention(names[0])
    calls = _calls(config, run_dir, device, dtype)
    choice, attention = _settled(config.model.attention, names, calls, device, progress)
    kernels = Kernels(
        asked=config.model.attention,
        choice=choice,
        attention=attention,
        arithmetic=_arithmetic(dtype),
        compiler=CompilerChoice(
            backend=compiler.backend,
            deterministic=compiler.deterministic,
            options={name: str(value) for name, value in compiler.options.items()},
        ),
    )
    write_atomically(run_dir / KERNELS, kernels.to_json())


def _candidates(config: Config, device: torch.device | None) -> tuple[str, ...]:
    """Returns the values of ``model.attention`` to try, in this order. ``device``: None where the
    machine has none of the run's platform.
    """
    model = config.model
    if model.attention != AUTO:
        return (model.attention,)
    if model.deterministic or not config.cluster.platform.own_memory or device is None:
        return (SDPA,)
    major, _ = torch.cuda.get_device_capability(device)
    return (CUDNN, SDPA) if major == _HOPPER else (SDPA,)


def _settled(
    asked: str,
    names: tuple[str, ...],
    calls: Mapping[str, _Calls],
    device: torch.device,
    progress: Progress,
) -> tuple[str, Mapping[str, Attention]]:
    """Returns the first attention that all layers can use, and its kernels by kind of layer.

    Raises:
        ConfigError: no attention works; names the kind of layer and the reason.
    """
    reason = ""
    for name in names:
        choose_attention(name)
        try:
            kernels = _kernels(name, calls, device)
        except _RefusedError as error:
            reason = str(error)
            continue
        if reason:
            progress(f"warning: model.attention: auto takes {name}, not {names[0]}: {reason}")
        return name, kernels
    raise ConfigError(
        f"model.attention = {asked!r}: {reason}; set model.attention to auto, or to a kernel that"
        " all layers can use"
    )


def _kernels(
    name: str, calls: Mapping[str, _Calls], device: torch.device
) -> Mapping[str, Attention]:
    """Returns the kernels by kind of layer with the attention of the process, called ``name``.

    Raises:
        _RefusedError: a layer cannot use it, or no layer calls attention.
    """
    noted = [call for kind in calls.values() for call in (kind.trained, kind.evaluated)]
    if name != SDPA and not any(isinstance(call, Call) for call in noted):
        raise _RefusedError("no layer calls attention through torch (soft caps, models' own code)")
    kinds: dict[str, Attention] = {}
    for kind, both in calls.items():
        try:
            forward, backward = _chosen(both.trained, name, device, trains=True)
            evaluation, _ = _chosen(both.evaluated, name, device, trains=False)
        except _RefusedError as error:
            if name != SDPA:
                raise _RefusedError(
                    f"layers of kind {kind!r} cannot use {name}: {error}"
                ) from error
            # A model with layers that cannot run: its first forward names the cause.
            forward = backward = evaluation = UNKNOWN
        kinds[kind] = Attention(forward=forward, backward=backward, evaluation=evaluation)
    return kinds


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


def _calls(
    config: Config, run_dir: Path, device: torch.device, dtype: torch.dtype
) -> Mapping[str, _Calls]:
    """Returns the calls of attention by kind of layer."""
    hf_config = load_run_config(run_dir)
    skeleton = build_skeleton(hf_config)
    data = TrainingData.of(run_dir, config)
    restarts = data is not None and data.restarts_positions
    length = min(config.data.sequence_length, _ROWS)
    positions = None
    if config.data.document_masks or restarts:
        half = torch.arange(length) % max(1, length // 2)
        positions = half[None].to(device)
    for module in skeleton.model.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(device)
    parts = DecoderParts(skeleton, device=device, compute_dtype=dtype)
    calls = parts.layer_calls(BatchTensors(shape=(1, length), position_ids=positions))
    size = int(skeleton.model.config.hidden_size)
    hidden = torch.empty(1, length, size, dtype=dtype, device="meta")
    kinds: dict[str, _Calls] = {}
    for part in skeleton.parts:
        if part.layer_index is not None and part.kind not in kinds:
            layer = copy.deepcopy(skeleton.layers[part.layer_index]).to("meta", dtype)
            call = _on_meta(calls[part.layer_index])
            kinds[part.kind] = _Calls(
                trained=_noted(partial(call.run, layer.train(), hidden)),
                evaluated=_noted(partial(call.run, layer.eval(), hidden)),
            )
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
        if func in (F.scaled_dot_product_attention, attend) and self.call is None:
            self.call = Call(func, args, kwargs)
        return func(*args, **kwargs)


def _noted(run: Callable[[], object]) -> Call | str:
    """Returns the arguments of a layer's call of attention, or a word for a layer without."""
    notes = _Notes()
    try:
        with notes:
            run()
    except Exception:  # models branch on values, and tensors of the meta device have none
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
        name = str(func.name()).partition("::")[2].lstrip("_")
        if name.startswith(("scaled_dot_product_", OPERATOR)):
            self.names.append(name.removeprefix("scaled_dot_product_"))
        return func(*args, **(kwargs or {}))


def _chosen(call: Call | str, name: str, device: torch.device, *, trains: bool) -> tuple[str, str]:
    """Returns the kernels of a noted call on ``device``: of its forward and its backward.

    Raises:
        _RefusedError: no kernel that the attention ``name`` allows can compute the call.
    """
    if isinstance(call, str):
        return call, call
    if name == CUDNN_FLASH and call.run is not attend:
        raise _RefusedError("they call torch's attention past transformers' interface")
    args, kwargs = _moved(
        (call.args, call.kwargs), lambda tensor: _filled(tensor, device, trains=trains)
    )
    forward, backward = _Operators(), _Operators()
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            with forward, torch.set_grad_enabled(trains):
                output = call.run(*args, **kwargs)
            with backward:
                if trains:
                    torch.autograd.backward(output, torch.zeros_like(output))
        except (RuntimeError, ValueError) as error:
            raise _RefusedError(_reason(error, [str(one.message) for one in reasons])) from error
    names = (next(iter(seen.names), COMPOSED) for seen in (forward, backward))
    return next(names), next(names)


def _reason(error: Exception, messages: list[str]) -> str:
    """Returns torch's reasons against the kernels that are switched on, else the error's."""
    texts = (message.partition(" (Triggered internally")[0] for message in messages)
    reasons = [text for text in texts if not text.endswith(("because:", "runtime disabled."))]
    words = " ".join(dict.fromkeys(reasons)) or str(error)
    return " ".join(words.split())[:_WORDS].rstrip(".")


def _filled(tensor: torch.Tensor, device: torch.device, *, trains: bool) -> torch.Tensor:
    """Returns zeros like a noted tensor; masks, which have no gradients, allow all positions."""
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
