"""Low-rank adapters of other trainers as the section ``adapter``, and parameters that train alone.
All use PEFT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.client.convert.keys import Effect
from penstock.client.convert.reading import KeyReading
from penstock.config.adapter import ALL_LINEAR
from penstock.config.hub_names import fetch_model, hub_name
from penstock.host.files import DAMAGED, parse_json

NO_DORA = "adapters have no magnitudes of their own (DoRA)"
NO_EXPERTS = "parameters of experts get no adapter; name modules in adapter.targets"
NO_START = "adapters start as in PEFT's default: A uniform, B zero"
NO_TOKENS = "rows of an embedding are not trained apart"
NOT_LORA = "adapters are LoRA alone: the section adapter"
NO_REPLICATION = "the model's layers are kept"
OTHER_KEYS = "another key decides"

_QUERY_AND_VALUE = ("q_proj", "v_proj")
PEFT_TARGETS: Mapping[str, str | tuple[str, ...]] = {
    **dict.fromkeys(
        "bart gemma gemma2 gemma3_text gpt_neo gptj llama llama4 mistral mixtral opt qwen2 qwen3"
        " stablelm".split(),
        _QUERY_AND_VALUE,
    ),
    **dict.fromkeys(("bloom", "falcon", "gpt_neox"), ("query_key_value",)),
    **dict.fromkeys(("bert", "electra", "roberta", "xlm-roberta"), ("query", "value")),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    "codegen": ("qkv_proj",),
    "gemma4": r".*language_model\..*\.(q_proj|v_proj)",
    "mpt": ("Wqkv",),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "rwkv": ("key", "value", "receptance", "output"),
}
"""Modules that PEFT 0.21 adapts where a configuration names none, by the model's type."""

_LINEAR = frozenset(
    "q_proj k_proj v_proj o_proj qkv_proj query_key_value dense dense_h_to_4h dense_4h_to_h"
    " gate_proj up_proj down_proj gate_up_proj out_proj fc1 fc2".split()
)
"""Names that all-linear contains, wherever a model has them."""

_ROWS = re.compile(r"(.+)\[([0-9]*)(?::([0-9]*))?\]")
"""A pattern of Axolotl with rows of a parameter at its end."""

_CONV1D = ("gpt2", "openai-gpt")
"""Types of models with linear layers that are no ``torch.nn.Linear``."""

_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "embeddings")
_MATRICES = (*_EMBEDDINGS, "lm_head", "embed_out")
"""Modules with one parameter of two axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraNames:
    """A trainer's names of the keys of an adapter."""

    r: str = "lora_r"
    alpha: str = "lora_alpha"
    dropout: str = "lora_dropout"
    targets: str = "lora_target_modules"
    saved: str = "lora_modules_to_save"
    rslora: str = "use_rslora"


def put_sizes(reading: KeyReading, names: LoraNames, alpha: float, *switches: str) -> None:
    """Sets rank, factor and dropout; ``switches`` are keys that make the training one of adapters.

    Raises:
        ConfigError: the file has no rank.
    """
    r = reading.get(names.r)
    if r is None:
        raise reading.refused(names.r, r, "needs the rank of the adapters, an integer")
    reading.put("adapter.r", r, *switches, names.r)
    reading.put("adapter.alpha", float(alpha), names.alpha)
    reading.put("adapter.dropout", float(reading.get(names.dropout) or 0.0), names.dropout)
    if reading.get(names.rslora):
        reading.put("adapter.rslora", True, names.rslora)


def put_targets(reading: KeyReading, key: str, value: Any, note: str = "") -> None:
    """Sets the modules with an adapter: names, a regular expression or all-linear; without a value
    those that PEFT chooses by the type of the model.

    Raises:
        ConfigError: the value has another form.
    """
    if not value:
        _put_chosen(reading, key)
    elif isinstance(value, str):
        text = ALL_LINEAR if value.lower() == ALL_LINEAR else value
        reading.put("adapter.targets", text, key, note=note)
    else:
        reading.put("adapter.targets", names_of(reading, key, value), key, note=note)


def names_of(reading: KeyReading, key: str, value: Any) -> list[str]:
    """Returns the names in a list, or in a text with commas between.

    Raises:
        ConfigError: the value has another form.
    """
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise reading.refused(key, value, "needs names of modules, such as [q_proj, v_proj]")
    return [name.strip() for name in names]


def _put_chosen(reading: KeyReading, key: str) -> None:
    folder = reading.config.get("model", {}).get("path")
    model_type = (
        None if folder is None else fields_of(Path(folder) / "config.json").get("model_type")
    )
    targets = PEFT_TARGETS.get(model_type) if isinstance(model_type, str) else None
    if targets is not None:
        value = targets if isinstance(targets, str) else list(targets)
        reading.put("adapter.targets", value, key, note=f"as PEFT chooses for {model_type}")
        return
    why = (
        f"PEFT has no choice for models of type {model_type}"
        if model_type
        else f"PEFT chooses by the type of the model, and {folder}/config.json cannot be read"
    )
    reading.drop(key, f"{why}; name the modules, or write all-linear")


def fields_of(path: Path) -> Mapping[str, Any]:
    """Returns the fields of a JSON file; none if the file cannot be read."""
    try:
        fields = parse_json(path.read_bytes())
    except (OSError, *DAMAGED):
        return {}
    return fields if isinstance(fields, dict) else {}


def put_saved(reading: KeyReading, key: str) -> None:
    """Sets the modules that are trained whole.

    Raises:
        ConfigError: the value has another form.
    """
    if reading.get(key):
        reading.put("adapter.modules_to_save", names_of(reading, key, reading.get(key)), key)


def put_patterns(reading: KeyReading, rank: str, alpha: str) -> None:
    """Sets ranks and factors by names."""
    for key, place in ((rank, "adapter.rank_pattern"), (alpha, "adapter.alpha_pattern")):
        if reading.get(key):
            reading.put(place, dict(reading.get(key)), key)


def put_excluded(reading: KeyReading, excluded: str, layers: str, pattern: str) -> None:
    """Sets the modules without an adapter: those of a key, and all outside of some layers.

    Raises:
        ConfigError: a value has another form.
    """
    value, numbers = reading.get(excluded), reading.get(layers)
    parts = [] if not value else [value] if isinstance(value, str) else None
    if value:
        names = value if isinstance(value, str) else names_of(reading, excluded, value)
        reading.put("adapter.exclude", names, excluded)
    if numbers is None or numbers == []:
        return
    if parts is None:
        ends = "|".join(re.escape(name) for name in names_of(reading, excluded, value))
        parts = [rf"(?:.*\.)?(?:{ends})"]
    outside = _outside(reading, layers, numbers, pattern)
    if outside is None:
        reading.drop(
            pattern, "give one name, such as layers, or a regular expression in adapter.exclude"
        )
        return
    keys = [layers] + ([pattern] if reading.get(pattern) else [])
    keys += [excluded] if value else []
    reading.put(
        "adapter.exclude",
        "|".join([*parts, outside]),
        *keys,
        note="a regular expression that excludes all other layers",
    )


def _outside(reading: KeyReading, key: str, numbers: Any, pattern: str) -> str | None:
    """Returns a regular expression for modules outside of layers; None for unknown patterns.

    The number of a layer is the first behind two parts of a name, as in PEFT: 3 of
    ``model.layers.3.mlp``.

    Raises:
        ConfigError: the layers are no integers.
    """
    listed = [numbers] if isinstance(numbers, int) else numbers
    if not isinstance(listed, list) or not all(type(number) is int for number in listed):
        raise reading.refused(key, numbers, "needs numbers of layers, such as [0, 1]")
    choices = "|".join(map(str, listed))
    given = reading.get(pattern)
    if not given:
        return rf"(?![^.]+\.[^.]+(?:\.(?!\d+\.)[^.]+)*\.(?:{choices})\.).*"
    name = given[0] if isinstance(given, list) and len(given) == 1 else given
    if not isinstance(name, str) or not re.fullmatch(r"\w+", name):
        return None
    return rf"(?!(?:.*?\.)?{name}\.(?:{choices})\.).*"


def put_path(reading: KeyReading, key: str, folder: str, others: Sequence[str]) -> None:
    """Sets the adapter to start from. Its own file decides all of PEFT's keys: ``others`` of the
    trainer have no use.
    """
    note = f"fetch the folder: {fetch_model(folder)}" if hub_name(folder) else ""
    reading.put("adapter.path", folder, key, note=note)
    for name in others:
        if name in reading.values:
            reading.drop(name, "adapter_config.json of the adapter decides", Effect.NONE)
    fields = fields_of(Path(folder) / "adapter_config.json")
    if not fields:
        reading.drop(
            f"{key}: lora_dropout",
            f"set adapter.dropout to lora_dropout of {folder}/adapter_config.json, which cannot be"
            " read",
        )
    elif fields.get("lora_dropout"):
        note = "dropout is that of its adapter_config.json"
        reading.put("adapter.dropout", fields["lora_dropout"], key, note=note)


def put_plus(reading: KeyReading) -> None:
    """Sets the rate of B in LoRA+ (arXiv 2402.12354)."""
    key, ratio = "loraplus_lr_ratio", reading.get("loraplus_lr_ratio")
    if not ratio:
        return
    adapter, optimizer = reading.config["adapter"], reading.config["optimizer"]
    targets, saved = adapter.get("targets", ()), adapter.get("modules_to_save", ())
    embeds = any(name in str(targets) for name in _EMBEDDINGS)
    vectors = [name for name in saved if name.rpartition(".")[2] not in _MATRICES]
    if embeds or vectors or "path" in adapter or "groups" in optimizer:
        reading.drop(
            key,
            "embeddings, saved vectors and other groups take rates of their own there; write"
            " optimizer.groups by names, such as {match: '[.]lora_B[.]', rate: 16}",
        )
        return
    group = {"match": [r"\.lora_B\."], "rate": float(ratio)}
    reading.put("optimizer.groups", [group], key, note="B has this multiple of the rate")


def put_linear(reading: KeyReading, names: str, linear: str) -> None:
    """Sets the modules with an adapter, where the key ``linear`` adds all linear ones to a list.

    Raises:
        ConfigError: neither key names a module, or a value has another form.
    """
    given = reading.get(names)
    if not reading.get(linear):
        if not given:
            raise reading.refused(names, given, f"needs names of modules, or {linear}: true")
        put_targets(reading, names, given)
        return
    reading.put("adapter.targets", ALL_LINEAR, linear)
    listed = [given] if isinstance(given, str) else names_of(reading, names, given or [])
    others = {name.rpartition(".")[2] for name in listed} - _LINEAR - {ALL_LINEAR}
    if others:
        reading.drop(names, f"{linear} adds all linear modules; list all names in adapter.targets")
    elif given:
        reading.map(names, {"adapter.targets": ALL_LINEAR})


def note_kinds(reading: KeyReading, key: str) -> None:
    """Notes that LLaMA-Factory's ``all`` takes other modules of a model with Conv1D."""
    model_type = fields_of(Path(reading.config["model"]["path"]) / "config.json").get("model_type")
    if model_type in _CONV1D:
        note = (
            f"LLaMA-Factory's all finds no linear layer in the Conv1D of {model_type}; all-linear"
            " takes these, as PEFT does"
        )
        reading.map(key, {"adapter.targets": ALL_LINEAR}, note)


def put_unfrozen(reading: KeyReading, key: str) -> None:
    """Sets the trained parameters of Axolotl, which matches the starts of names. A dot in a pattern
    is a dot.

    Raises:
        ConfigError: the value is no list of patterns.
    """
    given = reading.get(key)
    if not given:
        return
    patterns = [given] if isinstance(given, str) else given
    if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns):
        raise reading.refused(key, given, "needs patterns of names, such as [model.layers.3]")
    if "adapter" in reading.config:
        reading.drop(key, "adapters train alone; name further modules in adapter.modules_to_save")
        return
    if any(_ROWS.fullmatch(each) for each in patterns):
        reading.drop(key, "rows of a parameter do not train apart; name whole parameters")
        return
    dots = [re.sub(r"\.(?!\+)", r"\\.", each) for each in patterns]
    reading.put("train.only", [f"^(?:{each})" for each in dots], key)


def drop_used(reading: KeyReading, names: str) -> None:
    """Drops keys that another key switches on, where they differ from their defaults."""
    for name in names.split():
        key = reading.table[name]
        if reading.get(name) != key.default and reading.get(name) not in ([], {}):
            reading.drop(name, key.used or key.why)
