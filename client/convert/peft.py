"""PEFT's ``adapter_config.json``: the fields of LoraConfig (PEFT 0.21)."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.client.convert.adapters import (
    NO_DORA,
    NO_EXPERTS,
    NO_REPLICATION,
    NO_START,
    NO_TOKENS,
    NOT_LORA,
    LoraNames,
    put_excluded,
    put_patterns,
    put_saved,
    put_sizes,
    put_targets,
)
from penstock.client.convert.hugging_face import put_model
from penstock.client.convert.keys import (
    Effect,
    Key,
    Table,
    ValueKind,
    dropped,
    mapped,
    placed,
    without,
)
from penstock.client.convert.reading import KeyReading

OLD_NAMES: Mapping[str, str] = {}
_NAMES = LoraNames(r="r", targets="target_modules", saved="modules_to_save")
_VARIANTS = (
    "eva_config corda_config lora_ga_config velora_config alora_invocation_tokens"
    " monteclora_config use_bdlora arrow_config kasa_config"
)
_KEYS: Table = {
    "peft_type": Key(default="LORA", kind=ValueKind.TEXT, why=NOT_LORA),
    **dropped(Effect.RESULT, "the model is trained to predict tokens", task_type="CAUSAL_LM"),
    **mapped(ValueKind.TEXT, base_model_name_or_path=None),
    **mapped(ValueKind.WHOLE, r=8),
    **mapped(ValueKind.NUMBER, lora_alpha=8, lora_dropout=0.0),
    **mapped(ValueKind.FLAG, use_rslora=False),
    **mapped(ValueKind.ANY, target_modules=None, exclude_modules=None, modules_to_save=None),
    **mapped(ValueKind.ANY, layers_to_transform=None, layers_pattern=None),
    **mapped(ValueKind.MAPPING, rank_pattern={}, alpha_pattern={}),
    **dropped(Effect.RESULT, "biases are not trained with adapters", bias="none", lora_bias=False),
    **dropped(Effect.RESULT, NO_START, init_lora_weights=True, loftq_config={}),
    **dropped(Effect.RESULT, NO_DORA, use_dora=False),
    **without(Effect.RESULT, NO_EXPERTS, "target_parameters"),
    **without(Effect.RESULT, NO_TOKENS, "trainable_token_indices"),
    **without(Effect.RESULT, NO_REPLICATION, "layer_replication"),
    **dropped(Effect.RESULT, "tied modules are not saved", ensure_weight_tying=False),
    **dropped(Effect.RESULT, NOT_LORA, use_qalora=False),
    **without(Effect.RESULT, NOT_LORA, _VARIANTS),
    **without(Effect.RESULT, "Megatron's layers are not read", "megatron_config"),
    **without(Effect.RESULT, "fetch the revision: hf download MODEL --revision", "revision"),
    **dropped(
        Effect.NONE,
        "the kind of module decides",
        fan_in_fan_out=False,
        megatron_core="megatron.core",
        qalora_group_size=16,
    ),
    **dropped(Effect.NONE, "training decides", inference_mode=False),
    **without(Effect.NONE, "PEFT notes it", "auto_mapping peft_version"),
    **without(Effect.SPEED, "Penstock decides what is on a device", "runtime_config"),
}
TABLE = placed(
    _KEYS,
    {
        "base_model_name_or_path": "model.path",
        "r": "adapter.r",
        "lora_alpha": "adapter.alpha",
        "lora_dropout": "adapter.dropout",
        "use_rslora": "adapter.rslora",
        "target_modules": "adapter.targets",
        "exclude_modules": "adapter.exclude",
        "modules_to_save": "adapter.modules_to_save",
        "layers_to_transform": "adapter.exclude",
        "layers_pattern": "adapter.exclude",
        "rank_pattern": "adapter.rank_pattern",
        "alpha_pattern": "adapter.alpha_pattern",
    },
    {"layers_to_transform": "a regular expression that excludes all other layers"},
)


def convert(reading: KeyReading) -> None:
    """Fills in the section ``adapter``, and the model where the file names one.

    Raises:
        ConfigError: the file is of another kind of adapter, or a value has another form.
    """
    if reading.get("peft_type") != "LORA":
        raise reading.refused("peft_type", reading.get("peft_type"), "only LORA is converted")
    reading.map("peft_type", {})
    if reading.get("base_model_name_or_path"):
        put_model(reading, "base_model_name_or_path")
    put_sizes(reading, _NAMES, reading.get("lora_alpha"))
    put_targets(reading, "target_modules", reading.get("target_modules"))
    put_saved(reading, "modules_to_save")
    put_patterns(reading, "rank_pattern", "alpha_pattern")
    put_excluded(reading, "exclude_modules", "layers_to_transform", "layers_pattern")
