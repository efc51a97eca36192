"""``penstock convert``: files as people have them, with every key accounted for.

Each converted file is loaded, so that no key of another trainer makes a configuration that is
refused later.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from penstock.client.convert.conversion import TOOLS, Conversion, convert
from penstock.client.convert.hugging_face import TRAINING
from penstock.client.main import app
from penstock.config.schema import Config, load_config, parse_config
from penstock.host.errors import ConfigError

TRL = """\
model_name_or_path: models/Qwen3-0.6B
dataset_name: chats.jsonl
learning_rate: 2e-5
num_train_epochs: 1
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
packing: true
max_length: 2048
assistant_only_loss: true
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_ratio: 0.03
logging_steps: 5
gradient_checkpointing: true
eval_strategy: steps
eval_steps: 100
report_to: [wandb]
output_dir: out
run_name: first try
attn_implementation: flash_attention_2
bf16: true
"""
LLAMA_FACTORY = """\
### model
model_name_or_path: models/llama
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
### dataset
dataset: identity, alpaca_en_demo
template: chatml
cutoff_len: 4096
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
### output
output_dir: saves/llama3-8b/full/sft
logging_steps: 10
save_steps: 250
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
### eval
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
"""
AXOLOTL = """\
base_model: models/llama
model_type: LlamaForCausalLM
load_in_8bit: false
load_in_4bit: false
strict: false
datasets:
  - path: chats.jsonl
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles: {user: [human, prompter], assistant: [gpt]}
    roles_to_train: [assistant]
    train_on_eos: turn
  - {path: json, data_files: alpaca.json, ds_type: json, split: train, type: alpaca}
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
eval_steps: 50
output_dir: ./outputs/out
sequence_len: 4096
sample_packing: true
eval_sample_packing: false
pad_to_sequence_len: true
wandb_project:
wandb_entity:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 2e-5
cosine_min_lr_ratio: 0.1
bf16: auto
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
logging_steps: 1
flash_attention: true
warmup_steps: 10
saves_per_epoch: 1
weight_decay: 0.01
special_tokens:
  pad_token: <|end_of_text|>
"""
PEFT = """\
peft_type: LORA
peft_version: 0.21.2
task_type: CAUSAL_LM
base_model_name_or_path: models/llama
inference_mode: true
r: 16
lora_alpha: 32
lora_dropout: 0.1
use_rslora: true
target_modules: [v_proj, q_proj, embed_tokens]
exclude_modules: [layers.0.self_attn.q_proj]
modules_to_save: [lm_head]
layers_to_transform: [0, 1]
layers_pattern: layers
rank_pattern: {q_proj: 4}
alpha_pattern: {q_proj: 8}
bias: none
fan_in_fan_out: false
init_lora_weights: true
loftq_config: {}
megatron_core: megatron.core
"""
FILES = {"trl": TRL, "llamafactory": LLAMA_FACTORY, "axolotl": AXOLOTL, "peft": PEFT}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with data."""
    monkeypatch.chdir(tmp_path)
    chats = '{"messages": []}\n{"prompt": 1, "completion": 2}\n'
    (tmp_path / "chats.jsonl").write_text(chats * 4)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    pairs = [{"prompt": "a", "completion": "b", "id": 1}] * 8
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    return tmp_path


def made(tool: str, text: str, devices: int = 1, **keys: Any) -> Conversion:
    """The conversion of a text with some keys replaced; the configuration is loaded."""
    values = yaml.safe_load(text) | keys
    path = Path("theirs.yaml")
    path.write_text(yaml.safe_dump(values))
    conversion = convert(tool, path, devices)
    if not TOOLS[tool].whole:
        return conversion
    mine = Path("mine.yaml")
    mine.write_text(conversion.to_yaml())
    assert load_config(mine) == parse_config(dict(conversion.config))
    return conversion


def config_of(conversion: Conversion) -> Config:
    """The configuration, as a run has it."""
    return parse_config(dict(conversion.config))


def fates(conversion: Conversion) -> dict[str, str]:
    """Effect of each dropped key."""
    return {entry["key"]: entry["effect"] for entry in conversion.dropped}


def results(conversion: Conversion) -> set[str]:
    """Dropped keys that change the result."""
    return {key for key, effect in fates(conversion).items() if effect == "result"}


def refusal(tool: str, text: str, **keys: Any) -> str:
    """The error of a file, which names the file."""
    with pytest.raises(ConfigError) as caught:
        made(tool, text, **keys)
    assert str(caught.value).startswith("theirs.yaml: ")
    return str(caught.value)


def minimal(tool: str) -> str:
    """The shortest file of a trainer."""
    return {
        "trl": "{model_name_or_path: m, dataset_name: chats.jsonl}",
        "llamafactory": "{model_name_or_path: m, dataset: d, finetuning_type: full}",
        "axolotl": "{base_model: m, learning_rate: 1e-4, "
        "datasets: [{path: a.jsonl, type: alpaca}]}",
        "peft": "{peft_type: LORA, target_modules: [q_proj]}",
    }[tool]


def test_trl() -> None:
    conversion = made("trl", TRL, devices=4)
    config = config_of(conversion)
    assert conversion.config == {
        "run": {"dir": "out", "seed": 42},
        "model": {"path": "models/Qwen3-0.6B", "dtype": "bf16"},
        "data": {
            "sources": [{"path": "chats.jsonl"}],
            "sequence_length": 2048,
            "packing": "best-fit",
            "packing_window": 1000,
            "too_long": "truncate",
            "train_on": "assistant",
            "special_in_text": True,
            "shuffle": True,
        },
        "train": {"global_batch": 64, "epochs": 1.0, "clip_grad_norm": 1.0, "save_every": 500},
        "optimizer": {
            "name": "adamw",
            "lr": 2e-5,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": 0.0,
            "schedule": "cosine",
            "curve": "transformers",
            "warmup_steps": 0.03,
            "min_lr": 2e-6,
        },
    }
    assert config.optimizer.betas == (0.9, 0.999)
    assert fates(conversion) == {
        "run_name": "none",
        "logging_steps": "none",
        "eval_strategy": "none",
        "eval_steps": "none",
        "report_to": "none",
        "attn_implementation": "speed",
    }
    assert not conversion.changes_result


def test_llamafactory() -> None:
    conversion = made("llamafactory", LLAMA_FACTORY, devices=2)
    registry = {"registry": "data/dataset_info.json", "limit": 1000}
    assert conversion.config["data"] == {
        "sources": [registry | {"name": "identity"}, registry | {"name": "alpaca_en_demo"}],
        "sequence_length": 4096,
        "too_long": "truncate",
        "packing": "none",
        "chat_template": "chatml",
        "eval_fraction": 0.1,
        "train_on": "assistant",
        "special_in_text": True,
        "shuffle": True,
    }
    train, optimizer = conversion.config["train"], conversion.config["optimizer"]
    assert train["global_batch"] == 4 and train["eval_every"] == 500 and train["epochs"] == 3.0
    assert train["save_every"] == 250 and conversion.config["eval"] == {"sets": [{"name": "eval"}]}
    assert (optimizer["lr"], optimizer["warmup_steps"]) == (1e-5, 0.1)
    assert fates(conversion)["deepspeed"] == "speed"
    assert results(conversion) == {"val_size"}, "it draws the records that it holds out"


def test_axolotl() -> None:
    conversion = made("axolotl", AXOLOTL)
    assert conversion.config["data"] == {
        "sources": [
            {
                "path": "chats.jsonl",
                "format": "chat",
                "columns": {
                    "conversations": None,
                    "messages": "conversations",
                    "role": "from",
                    "content": "value",
                },
                "roles": {"human": "user", "prompter": "user", "gpt": "assistant"},
            },
            {"path": "alpaca.json", "format": "stanford"},
        ],
        "train_on": "auto",
        "sequence_length": 4096,
        "packing": "best-fit",
        "too_long": "drop",
        "shuffle": True,
        "eval_fraction": 0.05,
        "chat_template": "model",
        "special_in_text": True,
    }
    optimizer = conversion.config["optimizer"]
    assert (optimizer["name"], optimizer["min_lr"], optimizer["warmup_steps"]) == (
        "adamw",
        2e-6,
        10,
    )
    assert conversion.config["train"]["global_batch"] == 8
    assert conversion.config["train"]["keep_snapshots"] == 4
    assert conversion.config["eval"] == {"sets": [{"name": "eval"}]}
    assert results(conversion) == {"val_set_size"}


ALL = {"completion_only_loss": False}
"""A key of TRL without which the first records decide on the tokens that count."""


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        ("trl", {"global_batch": 8, "epochs": 3.0, "length": 1024, "lr": 2e-5, "dtype": "bf16"}),
        (
            "llamafactory",
            {"global_batch": 8, "epochs": 3.0, "length": 2048, "lr": 5e-5, "dtype": "fp32"},
        ),
        ("axolotl", {"global_batch": 1, "epochs": 1.0, "length": 512, "lr": 1e-4, "dtype": "bf16"}),
    ],
)
def test_defaults_of_the_trainer_are_written(tool: str, expected: dict[str, Any]) -> None:
    config = made(tool, minimal(tool)).config
    assert expected == {
        "global_batch": config["train"]["global_batch"],
        "epochs": config["train"]["epochs"],
        "length": config["data"]["sequence_length"],
        "lr": config["optimizer"]["lr"],
        "dtype": config["model"]["dtype"],
    }
    optimizer, train = config["optimizer"], config["train"]
    assert (optimizer["betas"], optimizer["eps"]) == ([0.9, 0.999], 1e-8)
    assert (optimizer["weight_decay"], optimizer["curve"]) == (0.0, "transformers")
    assert (optimizer["schedule"] == "cosine") is (tool == "axolotl")
    assert (train["clip_grad_norm"], config["run"]["seed"]) == (1.0, 42)
    assert config["data"]["packing"] == "none"


@pytest.mark.parametrize("tool", TOOLS)
def test_every_key_of_a_file_is_accounted_for(tool: str) -> None:
    conversion, table = made(tool, FILES[tool]), TOOLS[tool].table
    listed = {entry["key"] for entry in (*conversion.mapped, *conversion.dropped)}
    for key, value in yaml.safe_load(FILES[tool]).items():
        assert key in listed or value in (None, table[key].default), key
    dropped = [entry["key"] for entry in conversion.dropped]
    assert len(dropped) == len(set(dropped))


@pytest.mark.parametrize("tool", TOOLS)
def test_each_known_key_has_a_reason_or_a_place(tool: str) -> None:
    """A key without an effect is read by the conversion, so a value other than its default is
    mapped, or dropped with its reason.
    """
    for name, key in TOOLS[tool].table.items():
        assert key.why or (key.effect is None and key.places), name
        if key.effect is None or name in ("eval_strategy", "eval_steps", "special_tokens"):
            continue
        effects = fates(made(tool, minimal(tool), **{name: "other"}))
        assert effects.get(name) == key.effect.value, name


@pytest.mark.parametrize("tool", TOOLS)
def test_an_unknown_key_changes_the_result(tool: str) -> None:
    conversion = made(tool, minimal(tool), novel_trick=3)
    assert fates(conversion)["novel_trick"] == "result" and conversion.changes_result


def test_the_table_of_training_arguments_has_every_name_of_transformers() -> None:
    """Foreign code has the names and defaults."""
    import dataclasses

    from transformers import TrainingArguments

    for field in dataclasses.fields(TrainingArguments):
        key = TRAINING[field.name]
        if field.default is dataclasses.MISSING:
            continue
        theirs = field.default
        equal = theirs == key.default or (theirs is None and key.default in (None, False))
        assert equal, (field.name, theirs, key.default)


@pytest.mark.parametrize(
    ("tool", "keys", "words"),
    [
        ("trl", {"model_name_or_path": None}, "model_name_or_path = None: needs the folder"),
        ("trl", {"dataset_name": None}, "dataset_name = None: needs the data"),
        ("trl", {"learning_rate": "fast"}, "learning_rate = 'fast': needs a number"),
        ("trl", {"packing": "yes please"}, "packing = 'yes please': needs true or false"),
        ("trl", {"max_length": [1]}, "max_length = [1]: needs an integer"),
        ("trl", {"seed": True}, "seed = True: needs an integer"),
        ("trl", {"datasets": ["a"]}, "datasets[0] = 'a': needs a mapping"),
        ("trl", {"datasets": [{"split": "train"}]}, "datasets[0] = "),
        ("trl", {"max_length": -4}, "data.sequence_length"),
        ("trl", {"max_seq_length": 3, "max_length": 4}, "max_length; keep one"),
        ("llamafactory", {"stage": "kto"}, "stage = 'kto': only sft and dpo"),
        ("llamafactory", {"dataset": 3}, "dataset = 3: needs names"),
        ("llamafactory", {"dataset_dir": "ONLINE"}, "dataset_dir = 'ONLINE': needs a local"),
        ("llamafactory", {"mask_history": True, "train_on_prompt": True}, "keep one"),
        ("llamafactory", {"eval_dataset": "e", "val_size": 0.1}, "val_size = 0.1: excludes eval_"),
        ("llamafactory", {"eval_dataset": 3}, "eval_dataset = 3: needs names"),
        ("trl", {"eval_strategy": "often"}, "eval_strategy = 'often': needs steps, epoch or no"),
        ("axolotl", {"test_datasets": [{"path": "a"}], "val_set_size": 0.1}, "keep one"),
        ("axolotl", {"rl": "kto"}, "rl = 'kto': only dpo, orpo, simpo and"),
        ("axolotl", {"learning_rate": None}, "learning_rate = None"),
        ("axolotl", {"datasets": []}, "datasets = []: needs a list"),
        ("axolotl", {"datasets": [{"type": "alpaca"}]}, "needs a path"),
        ("axolotl", {"bf16": "maybe"}, "bf16 = 'maybe'"),
        ("axolotl", {"batch_size": 3, "micro_batch_size": 2}, "batch_size = 3: needs a multiple"),
        ("axolotl", {"excess_length_strategy": "wrap"}, "needs drop, truncate or raise"),
        (
            "axolotl",
            {"datasets": [{"path": "a", "type": "chat_template", "roles": {"user": 3}}]},
            "datasets[0].roles.user = 3: needs a list of roles",
        ),
    ],
)
def test_wrong_values_are_refused(tool: str, keys: dict[str, Any], words: str) -> None:
    assert words in refusal(tool, minimal(tool), **keys)


@pytest.mark.parametrize(
    ("keys", "place", "value"),
    [
        ({"max_steps": 30}, "train.steps", 30),
        ({"num_train_epochs": 0.5}, "train.epochs", 0.5),
        ({"max_grad_norm": 0}, "train.clip_grad_norm", None),
        ({"max_grad_norm": None}, "train.clip_grad_norm", None),
        ({"warmup_steps": 20}, "optimizer.warmup_steps", 20),
        ({"warmup_steps": 0.1}, "optimizer.warmup_steps", 0.1),
        ({"warmup_steps": 20, "warmup_ratio": 0.5}, "optimizer.warmup_steps", 20),
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 20},
            "optimizer.warmup_steps",
            0,
        ),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 20},
            "optimizer.warmup_steps",
            20,
        ),
        ({"optim": "sgd"}, "optimizer.momentum", 0.0),
        ({"optim": "paged_lion_32bit"}, "optimizer.name", "lion"),
        ({"save_strategy": "no"}, "train.save_every", 0),
        ({"bf16": False}, "model.dtype", "fp32"),
        ({"fp16": True}, "model.dtype", "fp16"),
        ({"bf16": False, "torch_dtype": "bfloat16"}, "model.dtype", "bf16"),
        ({"max_seq_length": 64}, "data.sequence_length", 64),
        ({"packing": True, "packing_strategy": "bfd_split"}, "data.too_long", "split"),
        ({"train_sampling_strategy": "sequential"}, "data.shuffle", False),
        ({"completion_only_loss": True}, "data.train_on", "completion"),
        ({"completion_only_loss": False}, "data.train_on", "all"),
        ({}, "data.train_on", "all"),
        ({"dataset_name": "prompts.jsonl"}, "data.train_on", "completion"),
        ({"dataset_name": "pairs.json"}, "data.train_on", "completion"),
        ({"chat_template_path": "t.jinja"}, "data.chat_template", "t.jinja"),
        (
            {"dataset_text_field": "body"},
            "data.sources",
            [{"path": "chats.jsonl", "columns": {"text": "body"}}],
        ),
        (
            {
                "dataset_name": None,
                "datasets": [{"path": "json", "data_files": "chats.jsonl", "split": "train"}],
            },
            "data.sources",
            [{"path": "chats.jsonl"}],
        ),
        (
            {"dataset_name": "chats", "dataset_train_split": "train_sft[:10%]", **ALL},
            "data.sources",
            [{"path": "chats", "split": "train_sft[:10%]"}],
        ),
        ({"dataset_name": "chats", **ALL}, "data.sources", [{"path": "chats", "split": "train"}]),
        (
            {"dataset_name": None, "datasets": [{"path": "chats", "split": "test"}], **ALL},
            "data.sources",
            [{"path": "chats", "split": "test"}],
        ),
    ],
)
def test_values_of_trl(keys: dict[str, Any], place: str, value: Any) -> None:
    conversion = made("trl", minimal("trl"), **keys)
    section, _, key = place.partition(".")
    assert conversion.config[section][key] == value
    assert not conversion.changes_result, conversion.dropped


@pytest.mark.parametrize(
    ("records", "keys", "theirs", "ours"),
    [
        (10, {"num_train_epochs": 3, "per_device_train_batch_size": 4}, 9, 8),
        (10, {"num_train_epochs": 0.5, "per_device_train_batch_size": 4}, 2, 2),
        (
            11,
            {
                "num_train_epochs": 2,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 3,
            },
            4,
            4,
        ),
        (12, {"num_train_epochs": 3, "per_device_train_batch_size": 4}, None, None),
    ],
)
def test_passes_that_the_batch_does_not_divide_change_the_result(
    folder: Path, records: int, keys: dict[str, Any], theirs: int | None, ours: int | None
) -> None:
    """transformers rounds the steps of each pass up."""
    (folder / "chats.jsonl").write_text('{"text": "a"}\n\n' * records)
    conversion = made("trl", minimal("trl"), **keys)
    dropped = {entry["key"]: entry["why"] for entry in conversion.dropped}
    assert conversion.changes_result is (theirs is not None)
    if theirs is not None:
        assert f"are {theirs} steps there and {ours} here" in dropped["num_train_epochs"]
    assert conversion.config["train"]["epochs"] == keys["num_train_epochs"]
    unknown = made("trl", minimal("trl"), packing=True)
    notes = {entry["key"]: entry.get("note", "") for entry in unknown.mapped}
    assert not unknown.changes_result and "smaller batch" in notes["num_train_epochs"]


def test_a_registry_of_openai_messages_has_another_system(folder: Path) -> None:
    (folder / "data").mkdir()
    registry = folder / "data" / "dataset_info.json"
    registry.write_text('{"d": {"file_name": "d.json", "formatting": "openai"}}')
    conversion = made("llamafactory", minimal("llamafactory"))
    assert fates(conversion) == {"dataset_info.json: d.formatting": "result"}


def test_records_of_a_registry_are_counted(folder: Path) -> None:
    (folder / "data").mkdir()
    registry = folder / "data" / "dataset_info.json"
    registry.write_text('{"d": {"file_name": "d.json"}}')
    (folder / "data" / "d.json").write_text(json.dumps([{"instruction": "a"}] * 9))
    assert fates(made("llamafactory", minimal("llamafactory")))["num_train_epochs"] == "result"
    assert not made("llamafactory", minimal("llamafactory"), max_samples=8).changes_result


def test_a_key_without_use_is_dropped() -> None:
    keys = {"packing_strategy": "wrapped", "optim": "sgd", "adam_beta2": 0.95}
    assert fates(made("trl", minimal("trl"), **keys)) == {
        "packing_strategy": "none",
        "adam_beta2": "none",
    }


def test_a_stable_rate_with_decay() -> None:
    arguments = {"num_decay_steps": 40, "decay_type": "linear", "min_lr_ratio": 0.1}
    schedule = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": arguments}
    conversion = made("trl", minimal("trl"), **schedule)
    optimizer = conversion.config["optimizer"]
    assert (optimizer["schedule"], optimizer["decay_steps"]) == ("wsd", 40)
    assert (optimizer["decay_type"], optimizer["min_lr"]) == ("linear", 2e-6)
    assert not conversion.changes_result
    arguments.pop("num_decay_steps")
    assert made("trl", minimal("trl"), **schedule).changes_result


def test_columns_that_trl_selects_are_the_only_ones() -> None:
    mixture = [{"path": "json", "data_files": "chats.jsonl", "columns": ["messages", "tools"]}]
    columns = made("trl", minimal("trl"), datasets=mixture).config["data"]["sources"][0]["columns"]
    assert columns["prompt"] is None and "messages" not in columns and "tools" not in columns


@pytest.mark.parametrize(
    ("tool", "keys", "dropped"),
    [
        (
            "llamafactory",
            {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
            {"label_smoothing_factor"},
        ),
        ("trl", {"use_peft": True, "lora_r": 16}, {"lora_target_modules"}),
        ("trl", {"load_in_4bit": True}, {"load_in_4bit"}),
        ("trl", {"optim": "adafactor"}, {"optim"}),
        ("trl", {"lr_scheduler_type": "polynomial"}, {"lr_scheduler_type"}),
        ("trl", {"lr_scheduler_kwargs": {"power": 2}}, {"lr_scheduler_kwargs"}),
        ("trl", {"max_length": None}, {"max_length"}),
        ("trl", {"packing": True, "packing_strategy": "wrapped"}, {"packing_strategy"}),
        ("trl", {"truncation_mode": "keep_end"}, {"truncation_mode"}),
        ("trl", {"loss_type": "dft"}, {"loss_type"}),
        ("trl", {"neftune_noise_alpha": 5}, {"neftune_noise_alpha"}),
        ("trl", {"bf16": False, "dtype": "auto"}, {"dtype"}),
        ("trl", {"chat_template_path": "org/model"}, {"chat_template_path"}),
        ("trl", {"dataset_name": "rows.parquet"}, {"completion_only_loss"}),
        (
            "trl",
            {"dataset_train_split": "train+test", "completion_only_loss": False},
            {"dataset_train_split"},
        ),
        (
            "trl",
            {"dataset_name": "trl-lib/Capybara", "completion_only_loss": False},
            {"dataset_name"},
        ),
        ("trl", {"assistant_only_loss": True, "completion_only_loss": True}, None),
        (
            "llamafactory",
            {"finetuning_type": "oft", "oft_rank": 8},
            {"finetuning_type", "oft_rank"},
        ),
        ("llamafactory", {"template": "llama3"}, {"template"}),
        ("llamafactory", {"packing": True}, {"packing"}),
        ("llamafactory", {"packing": True, "neat_packing": True}, set()),
        ("llamafactory", {"lora_rank": 8}, set()),
        ("llamafactory", {"use_galore": True}, {"use_galore"}),
        ("llamafactory", {"val_size": 100}, {"val_size"}),
        (
            "llamafactory",
            {"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 0.2},
            {"val_size"},
        ),
        ("llamafactory", {"mix_strategy": "interleave_under"}, {"mix_strategy"}),
        ("llamafactory", {"enable_thinking": False}, {"enable_thinking"}),
        ("axolotl", {"adapter": "llama-adapter", "lora_r": 8}, {"adapter"}),
        ("axolotl", {"lora_r": 8}, set()),
        ("axolotl", {"lr_scheduler": "rex"}, {"lr_scheduler"}),
        ("axolotl", {"special_tokens": {"eos_token": "</s>"}}, {"special_tokens"}),
        ("axolotl", {"chat_template": "llama3"}, {"chat_template"}),
        ("axolotl", {"chat_template_jinja": "{% for %}"}, {"chat_template_jinja"}),
        ("axolotl", {"val_set_size": 0.1}, {"val_set_size"}),
        (
            "axolotl",
            {"datasets": [{"path": "a.jsonl", "type": "input_output"}]},
            {"datasets[0].type"},
        ),
        (
            "axolotl",
            {"datasets": [{"path": "org/data", "type": "alpaca", "shards": 3}]},
            {"datasets[0].path", "datasets[0].shards"},
        ),
    ],
)
def test_keys_without_a_counterpart_change_the_result(
    tool: str, keys: dict[str, Any], dropped: set[str] | None
) -> None:
    expected = {"completion_only_loss"} if dropped is None else dropped
    assert results(made(tool, minimal(tool), **keys)) == expected


@pytest.mark.parametrize("tool", ["trl", "llamafactory"])
def test_smoothed_labels_are_mapped(tool: str) -> None:
    """LLaMA-Factory with a step of one batch."""
    keys = {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 1}
    conversion = made(tool, minimal(tool), **keys)
    assert conversion.config["train"]["label_smoothing"] == 0.1
    assert "label_smoothing_factor" not in fates(conversion)


def test_a_draw_of_the_registry_is_told_apart_from_its_start(folder: Path) -> None:
    (folder / "data").mkdir()
    entries = {"d": {"file_name": "d.json", "num_samples": 9}}
    (folder / "data" / "dataset_info.json").write_text(json.dumps(entries))
    conversion = made("llamafactory", minimal("llamafactory"))
    assert fates(conversion) == {"dataset_info.json: d.num_samples": "result"}


@pytest.mark.parametrize(
    ("keys", "warmup"),
    [
        ({}, 0.03),
        ({"max_steps": 1000}, 30),
        ({"max_steps": 10000}, 100),
        ({"max_steps": 40}, 2),
        ({"max_steps": 1000, "warmup_ratio": 0.2}, 200),
        ({"warmup_ratio": 0.2}, 0.2),
        ({"warmup_steps": 7, "warmup_ratio": 0.2}, 7),
    ],
)
def test_warmup_of_axolotl(keys: dict[str, Any], warmup: float) -> None:
    config = made("axolotl", minimal("axolotl"), **keys).config
    assert config["optimizer"]["warmup_steps"] == warmup


@pytest.mark.parametrize(
    ("keys", "rate"),
    [
        ({"embedding_lr_scale": 0.25}, 0.25),
        ({"embedding_lr": 5e-5}, 0.5),
        ({"embedding_lr": 5e-5, "embedding_lr_scale": 0.25}, 0.25),
    ],
)
def test_rates_of_embeddings_of_axolotl(keys: dict[str, float], rate: float) -> None:
    """Axolotl gives embeddings and head a group of their own, which has no weight decay."""
    conversion = made("axolotl", minimal("axolotl"), weight_decay=0.1, **keys)
    (group,) = config_of(conversion).optimizer.groups
    assert (group.match, group.weight_decay) == (("embed_tokens", "lm_head"), 0.0)
    assert group.rate == pytest.approx(rate, rel=1e-12)
    assert not {*keys} & {*fates(conversion)}
    groups = [{"name": "a", "modules": ["mlp"], "lr": 1e-5}]
    assert fates(made("axolotl", minimal("axolotl"), lr_groups=groups))["lr_groups"] == "result"


def test_texts_of_axolotl_are_sources_with_other_rows() -> None:
    texts = [
        {"path": "json", "data_files": "a.jsonl", "type": "pretrain", "text_column": "body"},
        "b.jsonl",
    ]
    keys = {"datasets": None, "pretraining_dataset": texts, "max_steps": 9, "sample_packing": True}
    conversion = made("axolotl", minimal("axolotl"), **keys)
    assert conversion.config["data"]["sources"] == [
        {"path": "a.jsonl", "format": "text", "columns": {"text": "body"}},
        {"path": "b.jsonl", "format": "text"},
    ]
    data = conversion.config["data"]
    assert (data["packing"], data["too_long"], data["train_on"]) == ("best-fit", "split", "all")
    assert fates(conversion) == {"pretraining_dataset": "result"}
    one = made("axolotl", minimal("axolotl"), **keys | {"pretraining_dataset": "b.jsonl"})
    assert one.config["data"]["sources"] == [{"path": "b.jsonl", "format": "text"}]
    both = made("axolotl", minimal("axolotl"), pretraining_dataset="b.jsonl")
    assert fates(both) == {"pretraining_dataset": "result"}


def test_prepared_tokens_of_axolotl() -> None:
    conversion = made("axolotl", minimal("axolotl"), datasets=[{"path": "a.jsonl", "type": None}])
    assert conversion.config["data"]["sources"] == [{"path": "a.jsonl", "format": "tokens"}]
    assert not conversion.changes_result
    names = ({"path": "a.jsonl", "type": "input_output"},)
    assert fates(made("axolotl", minimal("axolotl"), datasets=list(names))) == {
        "datasets[0].type": "result"
    }


def test_an_old_batch_of_axolotl_is_divided() -> None:
    keys = {"batch_size": 32, "micro_batch_size": 4}
    config = made("axolotl", minimal("axolotl"), devices=2, **keys).config
    assert config["train"]["global_batch"] == 64


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``penstock convert``."""
    done = CliRunner().invoke(app, ["convert", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_the_command_writes_a_file(folder: Path) -> None:
    (folder / "sft.yaml").write_text(TRL)
    code, out, err = run("trl", "sft.yaml", "--out", "mine.yaml")
    assert code == 0 and "penstock train mine.yaml" in out
    assert "dropped (speed): attn_implementation = 'flash_attention_2'" in err
    assert "# " in (folder / "mine.yaml").read_text()
    assert load_config(folder / "mine.yaml").optimizer.lr == 2e-5
    code, _, err = run("trl", "sft.yaml", "--out", "mine.yaml")
    assert code == 2 and "mine.yaml: exists" in err


def test_the_command_prints_yaml_or_json(folder: Path) -> None:
    (folder / "sft.yaml").write_text(TRL)
    code, out, _ = run("trl", "sft.yaml")
    assert code == 0 and parse_config(yaml.safe_load(out)).data.sequence_length == 2048
    code, out, _ = run("trl", "sft.yaml", "--devices", "2", "--json")
    value = json.loads(out)
    assert code == 0 and set(value) == {"config", "mapped", "dropped"}
    assert value["config"]["train"]["global_batch"] == 32
    entry = {"key": "run_name", "value": "first try", "effect": "none"}
    assert entry.items() <= value["dropped"][0].items()


def test_a_changed_result_needs_force(folder: Path) -> None:
    (folder / "sft.yaml").write_text(TRL + "load_in_4bit: true\n")
    code, out, err = run("trl", "sft.yaml", "--out", "mine.yaml")
    assert code == 2 and not out and "--force" in err
    assert not (folder / "mine.yaml").exists()
    assert run("trl", "sft.yaml", "--json")[0] == 2
    assert run("trl", "sft.yaml", "--out", "mine.yaml", "--force")[0] == 0
    assert "# " in (folder / "mine.yaml").read_text()


def test_the_command_refuses_other_tools_and_files(folder: Path) -> None:
    assert "expected trl, llamafactory, axolotl, peft" in run("unsloth", "sft.yaml")[2]
    code, _, err = run("trl", "sft.yaml")
    assert code == 2 and "sft.yaml: cannot read it" in err
