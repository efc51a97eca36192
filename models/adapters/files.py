"""adapter_config.json of PEFT: the settings of an adapter in and out. No tensors.

The rules are those of PEFT 0.21. Settings that would train or compute something else than a plain
LoRA are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from penstock.config.adapter import ALL_LINEAR, AdapterConfig, matcher
from penstock.host.errors import ConfigError, StateError, reason
from penstock.host.files import DAMAGED, is_file, parse_json
from penstock.host.limits.bounds import matching
from penstock.protocol.run.checksums import ADAPTER, read_checked

SETTINGS = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_PEFT_VERSION = "0.21.2"
"""The version of the written keys."""

_OURS: Mapping[str, str] = MappingProxyType(
    {
        "r": "r",
        "lora_alpha": "alpha",
        "use_rslora": "rslora",
        "target_modules": "targets",
        "exclude_modules": "exclude",
        "modules_to_save": "modules_to_save",
        "rank_pattern": "rank_pattern",
        "alpha_pattern": "alpha_pattern",
    }
)
"""Keys of PEFT and of ``AdapterConfig`` with the same meaning."""

_LAYERS = ("layers_to_transform", "layers_pattern")
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode"),
        *("lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision"),
        *("runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    }
)
"""Keys that change nothing once an adapter is in a file; ``adapter.dropout`` is the run's."""

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "target_parameters": "adapters of parameters such as stacked experts are not supported",
        "trainable_token_indices": "training of single tokens is not supported",
        "use_dora": "DoRA scales the rows of a weight, too",
        "lora_bias": "biases of adapters are not supported",
        "layer_replication": "repeated layers are not supported",
        "alora_invocation_tokens": "adapters of some tokens alone are not supported",
        "ensure_weight_tying": "tied adapters are not supported",
        "megatron_config": "layers of Megatron are not supported",
        "use_qalora": "it is for quantized weights",
    }
)
"""Keys that ask for something else than a plain LoRA, and the reason."""

_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of initializations that change the model's own weights."""

_TASKS = (None, "CAUSAL_LM", "FEATURE_EXTRACTION")
_PLAIN_INITS = ("gaussian", "orthogonal", "eva")


def read_settings(folder: Path, modules: Collection[str], dropout: float) -> AdapterConfig:
    """Returns the settings of an adapter in PEFT's files. ``modules`` are the names of the model's
    modules; a list of targets becomes the names that it matches.

    Raises:
        ConfigError: there are no such files, or they ask for something that is not supported; names
            file, key and remedy.
        StateError: the file is damaged.
    """
    fields = _read_fields(folder)
    path = folder / SETTINGS
    _check_kind(path, fields)
    chosen = {ours: fields[key] for key, ours in _OURS.items() if fields.get(key) is not None}
    targets = chosen.get("targets")
    if targets is None:
        raise ConfigError(
            f"{path}: target_modules is missing; write the names of the adapted modules there, as"
            " PEFT does when it saves"
        )
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        chosen["targets"] = ALL_LINEAR
    elif isinstance(targets, list):
        in_layers, is_target = _layers(path, fields), matcher(tuple(targets))
        with matching(f"{path}: layers_pattern", fields.get("layers_pattern") or ""):
            chosen["targets"] = [name for name in modules if is_target(name) and in_layers(name)]
        if not chosen["targets"]:
            raise ConfigError(
                f"{path}: target_modules = {_cut(targets)}: no module of this model has such a"
                " name; the adapter belongs to another model"
            )
    elif fields.get("layers_to_transform") is not None:
        raise ConfigError(f"{path}: layers_to_transform needs target_modules to be a list")
    try:
        return AdapterConfig(**chosen, dropout=dropout)
    except ValidationError as error:
        first = error.errors()[0]
        key = next((theirs for theirs, ours in _OURS.items() if ours in first["loc"]), "a value")
        raise StateError(f"{path}: {key} = {_cut(fields.get(key))}: {first['msg']}") from error


def read_kept(run_dir: Path, dropout: float) -> AdapterConfig:
    """Returns the settings that a run has kept of ``adapter.path``.

    Raises:
        StateError: the file is missing or damaged, or was edited.
    """
    path = run_dir / ADAPTER
    try:
        fields = parse_json(read_checked(run_dir, ADAPTER))
        return AdapterConfig(**{**fields, "dropout": dropout})
    except (OSError, *DAMAGED) as error:
        why = reason(error)
        raise StateError(f"{path}: {why}; restore it as Penstock wrote it") from error


def settings_fields(
    settings: AdapterConfig,
    adapted: Collection[str],
    modules: Collection[str],
    *,
    base: Path | None,
    transposed: bool,
    causal: bool,
) -> dict[str, Any]:
    """Returns the content of adapter_config.json. ``adapted`` are the modules with an adapter among
    all ``modules`` of the model; ``base`` is the folder of the model. ``transposed``: weights of
    adapted modules are (inputs, outputs). ``causal``: the model predicts the next token.
    """
    return {
        "peft_type": "LORA",
        "peft_version": _PEFT_VERSION,
        "task_type": "CAUSAL_LM" if causal else None,
        "base_model_name_or_path": None if base is None else str(base),
        "inference_mode": True,
        "r": settings.r,
        "lora_alpha": _whole(settings.alpha),
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rslora,
        "target_modules": _shortest(adapted, modules),
        "modules_to_save": list(settings.modules_to_save) or None,
        "rank_pattern": dict(settings.rank_pattern),
        "alpha_pattern": {name: _whole(a) for name, a in settings.alpha_pattern.items()},
        "fan_in_fan_out": transposed,
        "bias": "none",
        "init_lora_weights": True,
    }


def to_json(fields: Mapping[str, Any]) -> str:
    """Returns the text of adapter_config.json."""
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def _whole(alpha: float) -> float:
    """Returns a whole number as an int, which some readers of the file expect."""
    return int(alpha) if alpha == int(alpha) else alpha


def _shortest(adapted: Collection[str], modules: Collection[str]) -> list[str]:
    """Returns the last parts of the adapted modules' names if they name no other module, else the
    whole names.
    """
    ends = {name.rpartition(".")[2] for name in adapted}
    named = {name for name in modules if name.rpartition(".")[2] in ends}
    return sorted(ends if named == set(adapted) else adapted)


def check_adapter_folder(folder: Path) -> None:
    """Refuses a folder without the files of an adapter.

    Raises:
        ConfigError: names the file and the remedy.
    """
    at = f"adapter.path = {str(folder)!r}"
    if not folder.is_dir():
        raise ConfigError(f"{at}: is no folder; give the folder where PEFT saved an adapter")
    if not is_file(folder / SETTINGS):
        raise ConfigError(f"{at}: has no {SETTINGS}; give the folder where PEFT saved an adapter")
    if not is_file(folder / WEIGHTS):
        if is_file(folder / _PICKLED):
            raise ConfigError(
                f"{at}: has {_PICKLED}, a pickle, which is not read; load the adapter with PEFT and"
                f" save it (save_pretrained), which writes {WEIGHTS}"
            )
        raise ConfigError(f"{at}: has no {WEIGHTS}; copy it there, too")


def _read_fields(folder: Path) -> dict[str, Any]:
    check_adapter_folder(folder)
    try:
        fields = parse_json((folder / SETTINGS).read_bytes())
        if not isinstance(fields, dict):
            raise ValueError("expected an object")
    except (OSError, *DAMAGED) as error:
        why = reason(error)
        raise StateError(f"{folder / SETTINGS}: not a configuration of PEFT: {why}") from error
    return fields


def _check_kind(path: Path, fields: Mapping[str, Any]) -> None:
    """Refuses everything but a plain LoRA."""
    if fields.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type = {fields.get('peft_type')!r}: only LORA is read")
    if fields.get("task_type") not in _TASKS:
        raise ConfigError(
            f"{path}: task_type = {fields.get('task_type')!r}: adapters of language models are"
            " read, CAUSAL_LM"
        )
    if fields.get("bias", "none") != "none":
        raise ConfigError(
            f"{path}: bias = {fields['bias']!r}: the model's own biases were trained with the"
            " adapter, which is not supported; only bias none is read"
        )
    _check_start(path, fields.get("init_lora_weights", True))
    known = {*_OURS, *_LAYERS, *_WITHOUT_EFFECT, "peft_type", "task_type", "bias"}
    for key, value in fields.items():
        # A key that is off in a file, as all keys of newer versions should be, asks for nothing.
        if key in {*known, "init_lora_weights"} or value in (None, False, [], {}, ""):
            continue
        why = _REFUSED.get(key, "this kind of LoRA is not supported")
        raise ConfigError(f"{path}: {key} = {_cut(value)}: {why}; train with a plain LoRA of PEFT")


def _check_start(path: Path, start: Any) -> None:
    key = f"{path}: init_lora_weights = {_cut(start)}"
    if isinstance(start, bool) or start in _PLAIN_INITS:
        return
    if isinstance(start, str) and start.startswith(_BASES):
        raise ConfigError(
            f"{key}: this start changed the model's own weights, so the adapter does not fit those"
            " of model.path; save it with PEFT's path_initial_model_for_weight_conversion"
        )
    raise ConfigError(f"{key}: not supported; true, false, {', '.join(_PLAIN_INITS)} are")


def _layers(path: Path, fields: Mapping[str, Any]) -> Callable[[str], bool]:
    """Returns a test for modules in the layers that the file names; any, if the file names none."""
    chosen, patterns = (fields.get(key) for key in _LAYERS)
    if chosen is None or chosen == []:
        return lambda name: True
    numbers = chosen if isinstance(chosen, list) else [chosen]
    patterns = [patterns] if isinstance(patterns, str) else patterns or []
    texts = [rf"(?:^|.*?\.){each}\.(?P<idx>\d+)\." for each in patterns]
    try:
        if not all(type(number) is int for number in numbers):
            raise ValueError("expected numbers of layers")
        rules = [re.compile(text) for text in texts or [r".*?\.[^.]*\.(?P<idx>\d+)\."]]
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        shown = f"layers_to_transform = {_cut(chosen)}, layers_pattern = {_cut(patterns)}"
        raise StateError(f"{path}: {shown}: {reason(error)}") from error

    def is_in(name: str) -> bool:
        place = next((match for rule in rules if (match := rule.match(name))), None)
        return place is not None and int(place["idx"]) in numbers

    return is_in


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
