"""A Hugging Face language model without parameters, and the block of each of its parts.

The model is built on the meta device, so that its parameters take no memory. Its non-persistent
buffers (rotary frequencies, embedding scales) are then rebuilt with their values. A test run
*observes* the decoder's modules before and after the layers: its own forward runs once, and stubs
replace all modules with parameters. No code here depends on an architecture's name.

:mod:`penstock.models.surgery.decoder_parts` runs the parts.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.config.adapter import AdapterConfig
from penstock.host.errors import ConfigError, reason
from penstock.models.adapters.modules import inject
from penstock.models.adapters.settings import Adapter, resolved
from penstock.models.surgery.probe import children_around, observe_order, refused

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EMBEDDING_KIND = "embedding"
HEAD_KIND = "head"

LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_number")
"""Attributes with a layer's number in Hugging Face layers; a different number alone makes no other
kind.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One block's share of the model: its kind and its parameters.

    ``tensors`` maps state-dict names to ``(module, attribute)``, the place of the parameter.
    ``others`` are further places of the same parameters within the block, by the same names.
    ``constants`` are the places of its persistent buffers, which training leaves as they are.
    """

    name: str
    kind: str
    layer_index: int | None
    tensors: dict[str, tuple[nn.Module, str]]
    others: dict[str, list[tuple[nn.Module, str]]]
    constants: dict[str, tuple[nn.Module, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """The model on the meta device and its parts in block order: embedding, layers, head.

    ``decoder_path`` names the module with the forward from token ids through the layers.
    ``layers_name`` names its list of layers, dotted if the list belongs to an inner encoder.
    ``before`` and ``after`` name the modules with parameters that run before the first and after
    the last layer. ``embeds_alone`` or ``finishes_alone`` names a module that does all of that
    work. ``layer_results``: the length of the tuple that the decoder expects of a layer, 0 for
    hidden states alone. ``adapter``: the adapters in the model's modules.
    """

    model: Any
    decoder_path: str
    layers_name: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    embeds_alone: str | None
    finishes_alone: str | None
    layer_results: int
    parts: tuple[Part, ...]
    adapter: Adapter | None

    @property
    def decoder(self) -> nn.Module:
        """The module with the forward from token ids through the layers."""
        decoder: nn.Module = self.model.get_submodule(self.decoder_path)
        return decoder

    @property
    def layers(self) -> nn.ModuleList:
        """The list of layers, without parameters."""
        layers = self.decoder.get_submodule(self.layers_name)
        assert isinstance(layers, nn.ModuleList)
        return layers

    def constants(self) -> dict[str, tuple[torch.Tensor, bool]]:
        """Returns the value of each persistent buffer in a new model, by name, and whether the
        model initializes it.
        """
        values = {}
        for part in self.parts:
            for name, (module, attribute) in part.constants.items():
                buffer = module._buffers[attribute]
                assert buffer is not None
                values[name] = (buffer, not _is_unset(buffer))
        return values

    def around(self) -> dict[str, nn.Module]:
        """Returns the decoder's modules outside its layers, by name in the order of the modules."""
        return children_around(self.decoder, self.layers_name)

    def tied_names(self) -> dict[str, list[str]]:
        """Returns, for every distinct parameter, its first name in block order -> all its names in
        block order.
        """
        first: dict[int, str] = {}
        names: dict[str, list[str]] = {}
        for part in self.parts:
            for name, (module, attribute) in part.tensors.items():
                owner = first.setdefault(id(module._parameters[attribute]), name)
                names.setdefault(owner, []).append(name)
        return names


def build_skeleton(hf_config: PretrainedConfig, adapter: AdapterConfig | None = None) -> Skeleton:
    """Builds the model of a configuration on the meta device and finds its parts.

    The model predicts masked tokens if :func:`predicts_masked` is true, else the next one. Its
    modules get the adapters of ``adapter``.

    Raises:
        ConfigError: the model cannot be built, or does not run layer after layer, or ``adapter``
            names modules that it lacks.
    """
    model = _build_on_meta(hf_config)
    adapters = None if adapter is None else resolved(adapter, model)
    if adapters is not None:
        inject(model, adapters)
    with refused(
        lambda error: (
            f"model: type {model.config.model_type!r} cannot be taken apart into layers"
            f" ({reason(error)}); this architecture is not supported"
        )
    ):
        _check_kind(model)
        return _taken_apart(model, adapters)


def _taken_apart(model: Any, adapter: Adapter | None) -> Skeleton:
    rebuild_buffers(model)
    decoder_path, layers_name = _find_layers(model)
    decoder = model.get_submodule(decoder_path)
    order = observe_order(decoder, layers_name, int(model.config.hidden_size))
    parts = _divide(model, decoder_path, layers_name, order.before)
    return Skeleton(
        model=model,
        decoder_path=decoder_path,
        layers_name=layers_name,
        before=order.before,
        after=order.after,
        embeds_alone=order.embeds_alone,
        finishes_alone=order.finishes_alone,
        layer_results=order.layer_results,
        parts=parts,
        adapter=adapter,
    )


def predicts_masked(hf_config: PretrainedConfig) -> bool:
    """Returns whether a configuration's model sees the words on both sides and so is trained on
    masked words. True if transformers has it as a masked language model, and not as a decoder.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
    )

    kind = type(hf_config)
    if kind not in MODEL_FOR_MASKED_LM_MAPPING:
        return False
    decodes = getattr(hf_config, "is_decoder", None) is not False
    return not (decodes and kind in MODEL_FOR_CAUSAL_LM_MAPPING)


def loaded_dtypes(hf_config: PretrainedConfig, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Returns the type of each tensor in a model that transformers loads as ``dtype``. Some
    tensors, such as those of routers, stay in fp32.
    """
    from transformers.core_model_loading import build_glob_alternation

    model = _build_on_meta(hf_config, dtype)
    plan = model._get_dtype_plan(dtype)
    kept = build_glob_alternation(list(plan))[0] if plan else None
    return {
        name: torch.float32 if kept is not None and kept.search(name) else value.dtype
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }


def _build_on_meta(hf_config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    # Imported here: it takes seconds, and emulated workers import this module and build nothing.
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    config = copy.deepcopy(hf_config)
    config.use_cache = False
    # Soft-capped attention scores exist in the eager implementation only.
    softcap = getattr(config, "attn_logit_softcapping", None)
    attention = {"attn_implementation": "eager"} if softcap is not None else {}

    def explain(error: Exception) -> str:
        if "Padding_idx" in str(error):
            return (
                f"pad_token_id = {config.pad_token_id} (config.json of model.path, or model.hf):"
                f" the model has no such row; vocab_size is {config.vocab_size}"
            )
        kind = f"transformers cannot build a model of type {config.model_type!r}"
        return f"model: {kind} from these values: {reason(error)}"

    with refused(explain), torch.device("meta"):
        kind: Any = AutoModelForMaskedLM if predicts_masked(config) else AutoModelForCausalLM
        model = kind.from_config(config, dtype=dtype, **attention)
    return model.train()


def _check_kind(model: Any) -> None:
    """Refuses models that do not run layer after layer, or use random numbers in a way that other
    processes could not repeat.
    """
    config = model.config
    for key in ("vocab_size", "hidden_size", "num_hidden_layers"):
        value = getattr(config, key, None)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"model: type {config.model_type!r} has no {key}; models that run layer after"
                " layer are supported"
            )
    statistics = [
        name for name, module in model.named_modules() if getattr(module, "track_running_stats", 0)
    ]
    if statistics:
        raise ConfigError(
            f"model: type {config.model_type!r} keeps running statistics"
            f" ({', '.join(statistics[:3])}), which forwards change; supported models have"
            " parameters and constants alone"
        )
    if getattr(config, "layerdrop", 0.0):
        raise ConfigError(
            f"model.hf.layerdrop = {config.layerdrop}: skipping layers at random is not supported;"
            " set it to 0"
        )


def rebuild_buffers(model: Any) -> None:
    """Gives every buffer on the meta device its true value, on the CPU, by the model's own
    initialization.

    A persistent buffer may stay unset, as files may have it.

    Raises:
        ConfigError: the model cannot fill another buffer.
    """
    owned = list(_with_owner(model, "", model))
    filled: list[nn.Module] = []
    for _, module, _ in owned:
        for key, old in module._buffers.items():
            if old is not None and old.is_meta:
                module._buffers[key] = _marked_unset(old)
                if module not in filled:
                    filled.append(module)
    with torch.no_grad():
        for _, module, owner in owned:
            if module in filled:
                owner._init_weights(module)
        # A model may fill buffers of modules inside (falcon_h1); inner models first.
        if any(_unset_keys(module) for module in filled):
            for _, module, owner in reversed(owned):
                if owner is module:
                    owner._init_weights(module)
    persistent = set(model.state_dict())
    for path, module, _ in owned:
        unset = [
            key for key in _unset_keys(module) if f"{path}.{key}".lstrip(".") not in persistent
        ]
        if module in filled and unset:
            raise ConfigError(
                f"model: type {model.config.model_type!r} does not say how to rebuild its"
                f" buffer {path}.{unset[0]}; this architecture is not supported"
            )


def _unset_keys(module: nn.Module) -> list[str]:
    return [key for key, buffer in module._buffers.items() if _is_unset(buffer)]


def _marked_unset(like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on the CPU, full of a value that no real buffer has: NaN, or the smallest
    integer.
    """
    value: Any = float("nan")
    if not like.dtype.is_floating_point and not like.dtype.is_complex:
        value = False if like.dtype is torch.bool else torch.iinfo(like.dtype).min
    return torch.full(like.shape, value, dtype=like.dtype, device="cpu")


def _is_unset(buffer: torch.Tensor | None) -> bool:
    if buffer is None:
        return False
    if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
        return bool(buffer.isnan().any())
    return buffer.numel() > 0 and torch.equal(buffer, _marked_unset(buffer))


def _with_owner(module: nn.Module, path: str, owner: Any) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yields path, module and the innermost enclosing model, which initializes the module
    (``_init_weights``).
    """
    owner = module if hasattr(module, "_init_weights") else owner
    yield path, module, owner
    for name, child in module.named_children():
        yield from _with_owner(child, f"{path}.{name}" if path else name, owner)


def _find_layers(model: Any) -> tuple[str, str]:
    num_layers = int(model.config.num_hidden_layers)
    lists = [
        (path, len(list(module.parameters())))
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers > 0
    ]
    if not lists:
        raise ConfigError(
            f"model: type {model.config.model_type!r} with num_hidden_layers = {num_layers} has no"
            " list of that many layers; decoder-only models with at least one layer are supported"
        )
    path = max(lists, key=lambda entry: entry[1])[0]
    decoder_path, _, layers_name = path.rpartition(".")
    # The list may belong to an encoder within the module that takes token ids (BERT).
    outer = decoder_path
    while outer and not _takes_token_ids(model.get_submodule(outer)):
        outer = outer.rpartition(".")[0]
    return (outer, path.removeprefix(f"{outer}.")) if outer else (decoder_path, layers_name)


def _takes_token_ids(module: nn.Module) -> bool:
    return "input_ids" in inspect.signature(module.forward).parameters


_Places = dict[str, tuple[nn.Module, str]]
"""Module and attribute of each tensor, by its name."""


def _divide(
    model: Any, decoder_path: str, layers_name: str, before: tuple[str, ...]
) -> tuple[Part, ...]:
    last, persistent = int(model.config.num_hidden_layers) + 1, set(model.state_dict())
    parameters: list[_Places] = [{} for _ in range(last + 1)]
    constants: list[_Places] = [{} for _ in range(last + 1)]
    for module_path, module in model.named_modules(remove_duplicate=False):
        inside = _relative(module_path, decoder_path)
        of_decoder = inside is not None and (inside == "" or layers_name.startswith(f"{inside}."))
        block = _block_of(inside, layers_name, before, last)
        start = f"{module_path}." if module_path else ""
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            if of_decoder:
                raise ConfigError(
                    f"model: parameter {start}{attribute} belongs to the decoder itself, not to a"
                    " module of it; this architecture is not supported"
                )
            parameters[block][start + attribute] = (module, attribute)
        for attribute, buffer in module._buffers.items():
            if buffer is not None and start + attribute in persistent:
                constants[0 if of_decoder else block][start + attribute] = (module, attribute)
    kinds = _layer_kinds(model.get_submodule(f"{decoder_path}.{layers_name}"))
    names = ["embedding", *(f"layer.{i}" for i in range(last - 1)), "head"]
    return tuple(
        _part(names[block], kind, None if block in (0, last) else block - 1, *places)
        for block, (kind, *places) in enumerate(
            zip([EMBEDDING_KIND, *kinds, HEAD_KIND], parameters, constants, strict=True)
        )
    )


def _block_of(inside: str | None, layers_name: str, before: tuple[str, ...], last: int) -> int:
    """Returns the block of a module with the name ``inside`` in the decoder. None: the module is
    outside of the decoder; ``last`` is the head.
    """
    layer = None if inside is None else _relative(inside, layers_name)
    if layer:
        return 1 + int(layer.partition(".")[0])
    embeds = inside is not None and any(_relative(inside, name) is not None for name in before)
    return 0 if embeds else last


def _part(
    name: str, kind: str, layer_index: int | None, places: _Places, constants: _Places
) -> Part:
    """Returns a block. Each parameter has the first of its names in ``places``."""
    first: dict[int, str] = {}
    tensors: _Places = {}
    others: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, (module, attribute) in places.items():
        first_name = first.setdefault(id(module._parameters[attribute]), path)
        if first_name == path:
            tensors[path] = (module, attribute)
        else:
            others.setdefault(first_name, []).append((module, attribute))
    return Part(
        name=name,
        kind=kind,
        layer_index=layer_index,
        tensors=tensors,
        others=others,
        constants=constants,
    )


def _relative(path: str, ancestor: str) -> str | None:
    if path == ancestor:
        return ""
    return path.removeprefix(ancestor + ".") if path.startswith(ancestor + ".") else None


def _layer_kinds(layers: nn.ModuleList) -> list[str]:
    """Returns the kind of each layer: one name for all layers that differ only in their number. The
    name is the class, with ``#1`` for a second kind of it.
    """
    names: dict[tuple[Any, ...], str] = {}
    kinds = []
    for layer in layers:
        traits = tuple(_traits(path, module) for path, module in layer.named_modules())
        if traits not in names:
            same = sum(1 for other in names.values() if other.startswith(type(layer).__name__))
            names[traits] = type(layer).__name__ + (f"#{same}" if same else "")
        kinds.append(names[traits])
    return kinds


def _traits(path: str, module: nn.Module) -> tuple[Any, ...]:
    plain = {
        key: value
        if isinstance(value, (int, float, str, tuple, list, type(None)))
        else type(value).__qualname__
        for key, value in vars(module).items()
        if not key.startswith("_") and key not in (*LAYER_NUMBERS, "training")
    }
    shapes = {k: tuple(p.shape) for k, p in module._parameters.items() if p is not None}
    buffers = {k: _content(b) for k, b in module._buffers.items() if b is not None}
    return (
        path,
        type(module).__qualname__,
        *(repr(sorted(group.items())) for group in (plain, shapes, buffers)),
    )


def _content(buffer: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    """Returns type, shape and a checksum of a buffer, which may be a mask of all positions."""
    content = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return str(buffer.dtype), tuple(buffer.shape), hashlib.sha256(content.tobytes()).hexdigest()
