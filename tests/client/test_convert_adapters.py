"""``penstock convert``: keys of LoRA make the adapters that PEFT makes of the same keys."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFT_CHOICES
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.client.convert.adapters import PEFT_TARGETS
from penstock.client.convert.conversion import TOOLS, Conversion, convert
from penstock.models.adapters.settings import Adapter, resolved
from tests.client.test_convert import config_of, fates, folder, made, minimal, refusal, results, run

__all__ = ["folder"]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}
LORA: dict[str, dict[str, Any]] = {
    "trl": {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"]},
    "llamafactory": {"finetuning_type": "lora"},
    "axolotl": {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True},
}


def model() -> LlamaForCausalLM:
    """A small LLaMA without weights."""
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**LLAMA))


def ours(conversion: Conversion) -> Adapter:
    """The adapters of a conversion, in the small LLaMA."""
    values = {**conversion.config}
    if not conversion.is_whole:
        values = {"model": {"path": "m"}, "data": {"tokens": "t.bin"}} | values
    adapter = config_of(dataclasses.replace(conversion, config=values)).adapter
    assert adapter is not None
    return resolved(adapter, model())


def theirs(**keys: Any) -> dict[str, tuple[int, float]]:
    """Rank and factor of the modules that PEFT adapts in the small LLaMA."""
    wrapped = peft.get_peft_model(model(), peft.LoraConfig(task_type="CAUSAL_LM", **keys))
    return {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in wrapped.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }


def pairs(adapter: Adapter) -> dict[str, tuple[int, float]]:
    """Rank and factor by module."""
    return {name: (module.r, module.scale) for name, module in adapter.modules.items()}


@pytest.mark.parametrize(
    "keys",
    [
        {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 16},
        {"target_modules": "all-linear", "use_rslora": True, "lora_alpha": 16},
        {"target_modules": r".*\.(?:1|2)\..*_proj", "exclude_modules": ["mlp.down_proj"]},
        {"target_modules": ["q_proj", "embed_tokens"], "layers_to_transform": [0, 2]},
        {"target_modules": ["up_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
        {"target_modules": ["o_proj"], "layers_to_transform": [0], "exclude_modules": ["q_proj"]},
        {
            "target_modules": ["q_proj", "k_proj"],
            "rank_pattern": {"layers.1.self_attn.q_proj": 2, "k_proj": 3},
            "alpha_pattern": {"k_proj": 5},
        },
        {"target_modules": "all-linear", "modules_to_save": ["lm_head"]},
    ],
)
def test_a_file_of_peft_adapts_the_modules_that_peft_adapts(keys: dict[str, Any]) -> None:
    """The file is PEFT's own, with all of its fields."""
    peft.LoraConfig(task_type="CAUSAL_LM", base_model_name_or_path="m", **keys).save_pretrained(".")
    conversion = convert("peft", Path("adapter_config.json"), 1)
    adapter = ours(conversion)
    assert pairs(adapter) == theirs(**keys)
    assert not conversion.changes_result
    assert conversion.config["model"] == {"path": "m"}
    assert adapter.saved == tuple(keys.get("modules_to_save", ()))


def test_each_field_of_peft_has_a_fate() -> None:
    """The defaults of fields are those of PEFT, so that a default changes nothing."""
    table = TOOLS["peft"].table
    given = peft.LoraConfig()
    given.peft_version = None
    fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    assert {*table} == {*fields}
    for name, default in fields.items():
        same = name in ("peft_type", "task_type", "runtime_config")
        assert same or default in (table[name].default, None), name


@pytest.mark.parametrize(
    "keys",
    [
        {"use_dora": True},
        {"init_lora_weights": "pissa"},
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        {"bias": "all"},
        {"trainable_token_indices": [1]},
        {"layer_replication": [[0, 2]]},
        {"task_type": "SEQ_CLS"},
        {"layers_to_transform": [0], "layers_pattern": ["a", "b"]},
    ],
)
def test_other_adapters_of_peft_change_the_result(keys: dict[str, Any]) -> None:
    conversion = made("peft", minimal("peft"), **keys)
    assert results(conversion) == {[*keys][-1]}


def test_the_command_prints_the_sections_of_a_file_of_peft(folder: Path) -> None:
    peft.LoraConfig(r=4, target_modules=["q_proj"]).save_pretrained(str(folder))
    code, out, err = run("peft", "adapter_config.json")
    assert code == 0 and not err.count("result")
    assert [line for line in out.splitlines() if line[0] != "#"] == [
        *("adapter:", "  r: 4", "  alpha: 8.0", "  dropout: 0.0", "  targets:", "  - q_proj"),
    ]
    code, out, _ = run("peft", "adapter_config.json", "--out", "mine.yaml")
    assert code == 0 and "add its sections to a configuration" in out
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    assert "peft_type = 'IA3': only LORA" in run("peft", "adapter_config.json")[2]


def test_modules_that_peft_chooses_are_named(folder: Path) -> None:
    for name, targets in PEFT_TARGETS.items():
        known = PEFT_CHOICES[name]
        assert targets == (known if isinstance(known, str) else tuple(known))
    assert {*PEFT_CHOICES} & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} <= {*PEFT_TARGETS}
    keys = {"use_peft": True}
    assert results(made("trl", minimal("trl"), **keys)) == {"lora_target_modules"}
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text(json.dumps(LLAMA))
    conversion = made("trl", minimal("trl"), **keys)
    assert conversion.config["adapter"] == {
        **{"r": 16, "alpha": 32.0, "dropout": 0.05},
        "targets": ["q_proj", "v_proj"],
    }
    assert pairs(ours(conversion)) == theirs(r=16, lora_alpha=32)
    assert not conversion.changes_result
    (folder / "m" / "config.json").write_text('{"model_type": "new"}')
    assert results(made("trl", minimal("trl"), **keys)) == {"lora_target_modules"}


@pytest.mark.parametrize(
    ("tool", "keys", "section"),
    [
        ("trl", {"lora_target_modules": "all-linear"}, {"targets": "all-linear", "r": 16}),
        ("trl", {"lora_target_modules": [".*q_proj"]}, {"targets": ".*q_proj", "alpha": 32.0}),
        ("trl", {"use_rslora": True}, {"rslora": True, "dropout": 0.05}),
        ("llamafactory", {}, {"r": 8, "alpha": 16.0, "dropout": 0.0, "targets": "all-linear"}),
        ("llamafactory", {"lora_rank": 4, "lora_alpha": 4}, {"r": 4, "alpha": 4.0}),
        (
            "llamafactory",
            {"lora_target": "q_proj, v_proj", "additional_target": "embed_tokens,lm_head"},
            {"targets": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        ),
        ("axolotl", {}, {"r": 8, "alpha": 16.0, "dropout": 0.0, "targets": "all-linear"}),
        ("axolotl", {"lora_target_modules": ["q_proj", "down_proj"]}, {"targets": "all-linear"}),
        (
            "axolotl",
            {"lora_target_modules": ["q_proj"], "lora_target_linear": False},
            {"targets": ["q_proj"]},
        ),
    ],
)
def test_keys_of_lora(tool: str, keys: dict[str, Any], section: dict[str, Any]) -> None:
    conversion = made(tool, minimal(tool), **LORA[tool] | keys)
    assert section.items() <= conversion.config["adapter"].items()
    assert not results(conversion) - {"template"}
    assert ours(conversion).modules or section["targets"] == "q_proj"


@pytest.mark.parametrize(
    ("tool", "keys", "dropped"),
    [
        ("trl", {"use_dora": True}, {"use_dora"}),
        ("trl", {"lora_target_parameters": ["a"]}, {"lora_target_parameters"}),
        ("trl", {"lora_task_type": "SEQ_CLS"}, {"lora_task_type"}),
        ("trl", {"load_in_4bit": True}, {"load_in_4bit"}),
        ("llamafactory", {"use_dora": True, "pissa_init": True}, {"use_dora", "pissa_init"}),
        ("llamafactory", {"quantization_bit": 4}, {"quantization_bit"}),
        ("llamafactory", {"adapter_name_or_path": "a,b"}, {"adapter_name_or_path"}),
        (
            "llamafactory",
            {"adapter_name_or_path": "a", "create_new_adapter": True},
            {"adapter_name_or_path"},
        ),
        ("axolotl", {"adapter": "qlora", "load_in_4bit": True}, {"adapter", "load_in_4bit"}),
        ("axolotl", {"peft_use_dora": True}, {"peft_use_dora"}),
        ("axolotl", {"peft": {"loftq_config": {"loftq_bits": 4}}}, {"peft"}),
        ("axolotl", {"lora_target_modules": ["embed_tokens"]}, {"lora_target_modules"}),
        ("axolotl", {"peft_init_lora_weights": "gaussian"}, {"peft_init_lora_weights"}),
        ("axolotl", {"relora": True}, {"relora"}),
        ("axolotl", {"lora_mlp_kernel": True, "lora_on_cpu": True}, set()),
    ],
)
def test_variants_of_lora_change_the_result(
    tool: str, keys: dict[str, Any], dropped: set[str]
) -> None:
    """The rest of the section is made, so that --force writes plain LoRA."""
    conversion = made(tool, minimal(tool), **LORA[tool] | keys)
    assert results(conversion) == dropped
    assert conversion.config["adapter"]["r"]


@pytest.mark.parametrize("tool", LORA)
def test_keys_of_lora_have_no_effect_without_it(tool: str) -> None:
    off: dict[str, Any] = {"use_peft": False, "adapter": None, "finetuning_type": "full"}
    keys = {key: off.get(key, value) for key, value in LORA[tool].items()}
    keys |= {"use_dora": True} if tool != "axolotl" else {"peft_use_dora": True}
    conversion = made(tool, minimal(tool), **keys)
    assert "adapter" not in conversion.config and not conversion.changes_result


def test_values_that_axolotl_needs() -> None:
    keys = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16}
    assert "lora_target_linear: true" in refusal("axolotl", minimal("axolotl"), **keys)
    linear = keys | {"lora_target_linear": True}
    assert "lora_r = None: needs" in refusal(
        "axolotl", minimal("axolotl"), **linear | {"lora_r": None}
    )
    assert "lora_alpha = None" in refusal(
        "axolotl", minimal("axolotl"), **linear | {"lora_alpha": None}
    )


@pytest.mark.parametrize("tool", ["llamafactory", "axolotl"])
def test_a_trained_adapter_is_the_start(tool: str, folder: Path) -> None:
    """Its file decides the dropout, too, as in PEFT."""
    key = "adapter_name_or_path" if tool == "llamafactory" else "lora_model_dir"
    keys = LORA[tool] | {key: "old", "lora_alpha": 64}
    conversion = made(tool, minimal(tool), **keys)
    assert results(conversion) == {f"{key}: lora_dropout"}
    peft.LoraConfig(lora_dropout=0.25, target_modules=["q_proj"]).save_pretrained(
        str(folder / "old")
    )
    conversion = made(tool, minimal(tool), **keys)
    assert conversion.config["adapter"] == {"path": "old", "dropout": 0.25}
    assert fates(conversion)["lora_alpha"] == "none" and not conversion.changes_result
    keys[key] = "org/adapter"
    assert "hf download org/adapter" in made(tool, minimal(tool), **keys).to_yaml()


@pytest.mark.parametrize("tool", ["llamafactory", "axolotl"])
def test_the_rate_of_b_in_lora_plus(tool: str) -> None:
    conversion = made(tool, minimal(tool), **LORA[tool], loraplus_lr_ratio=16)
    (group,) = config_of(conversion).optimizer.groups
    (pattern,) = group.match
    names = ("layers.0.q_proj.lora_B.weight", "q_proj.lora_A.weight", "wte.lora_embedding_B")
    assert [bool(re.search(pattern, name)) for name in names] == [True, False, False]
    assert (group.rate, group.weight_decay) == (16.0, None)
    saved = "additional_target" if tool == "llamafactory" else "lora_modules_to_save"
    norms = made(tool, minimal(tool), **LORA[tool], loraplus_lr_ratio=16, **{saved: ["norm"]})
    assert results(norms) == {"loraplus_lr_ratio"}


def test_layers_that_llamafactory_trains(folder: Path) -> None:
    keys: dict[str, Any] = {"finetuning_type": "freeze", "freeze_trainable_layers": 2}
    text = minimal("llamafactory")
    assert results(made("llamafactory", text, **keys)) == {"freeze_trainable_layers"}
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text(json.dumps(LLAMA))
    parameters = [name for name, _ in model().named_parameters()]

    def trained(**more: Any) -> list[str]:
        conversion = made("llamafactory", text, **keys | more)
        assert not conversion.changes_result and "adapter" not in conversion.config
        patterns = config_of(conversion).train.only
        return [name for name in parameters if any(re.search(p, name) for p in patterns)]

    assert trained() == [name for name in parameters if ".1." in name or ".2." in name]
    first = trained(freeze_trainable_layers=-1, freeze_trainable_modules="mlp,input_layernorm")
    assert first == [
        name for name in parameters if name.startswith(("model.layers.0.mlp", "model.layers.0.inp"))
    ]
    with_head = trained(freeze_trainable_layers=1, freeze_extra_modules="lm_head")
    assert with_head == [name for name in parameters if ".2." in name or "lm_head" in name]
    zero = refusal("llamafactory", text, **keys | {"freeze_trainable_layers": 0})
    assert "needs a number of layers other than 0" in zero
