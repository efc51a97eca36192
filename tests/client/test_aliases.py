"""Words of other trainers, and names of the Hub, where errors answer with ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from penstock.client.convert.aliases import TRAINERS
from penstock.client.convert.conversion import TOOLS, convert
from penstock.client.main import app
from penstock.config.hub_names import hub_name
from penstock.config.schema import Config, parse_config
from penstock.config.words import keys_of
from penstock.host.errors import ConfigError
from penstock.models.checkpoints.causes import check_folder
from penstock.models.data.sources import find_source
from penstock.models.data.tokenizer import JsonTokenizer
from tests.client.test_convert import FILES, minimal

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny.yaml"
LORA_ALPHA = "write adapter.alpha (a number, above 0) for lora_alpha of TRL, LLaMA-Factory, Axolotl"
MORE: Mapping[str, tuple[str, ...]] = {
    "trl": (
        "chat_template_path: a.jinja\ncompletion_only_loss: true\ndataset_text_field: body\n",
        "truncation_mode: keep_start\nbf16: false\nfp16: true\nmax_steps: 9\nsave_total_limit: 2\n",
        "save_strategy: 'no'\noptim: sgd\ntrain_sampling_strategy: sequential\n"
        "label_smoothing_factor: 0.1\n",
        "lr_scheduler_type: warmup_stable_decay\n"
        "lr_scheduler_kwargs: {num_decay_steps: 5, decay_type: linear, min_lr_ratio: 0.1}\n",
        "use_peft: true\nlora_target_modules: [a, b]\nlora_modules_to_save: [c]\n"
        "use_rslora: true\n",
        "beta: 0.3\nloss_type: sigmoid\n",
        "beta: 2\nloss_type: simpo\nsimpo_gamma: 0.8\ncpo_alpha: 0.1\nlabel_smoothing: 0.1\n",
        "dataset_name: folder\ndataset_test_split: dev\neval_strategy: steps\neval_steps: 5\n"
        "load_best_model_at_end: true\nmetric_for_best_model: loss\ngreater_is_better: false\n",
    ),
    "llamafactory": (
        "neat_packing: true\nmask_history: true\ndisable_shuffling: true\nmax_samples: 8\n"
        "split_special_tokens: true\n"
        "label_smoothing_factor: 0.1\ngradient_accumulation_steps: 1\n",
        "max_steps: 9\nsave_strategy: 'no'\nsave_total_limit: 2\nrun_name: a\nfp16: true\n",
        "pure_bf16: true\nval_size: 0.1\neval_strategy: steps\neval_steps: 5\ntemplate: chatml\n",
        "eval_dataset: e\neval_on_each_dataset: true\neval_strategy: steps\neval_steps: 5\n"
        "load_best_model_at_end: true\nmetric_for_best_model: eval_e_loss\n"
        "early_stopping_steps: 2\ngreater_is_better: false\n",
        "finetuning_type: lora\nadditional_target: lm_head\nuse_rslora: true\nlora_dropout: 0.1\n"
        "loraplus_lr_ratio: 16\n",
        "finetuning_type: lora\nadapter_name_or_path: a\nadapter_folder: b\n",
        "stage: dpo\npref_beta: 0.2\npref_loss: sigmoid\ndpo_label_smoothing: 0.1\n",
        "stage: dpo\npref_beta: 0.2\npref_loss: orpo\npref_ftx: 0.1\n",
        "stage: dpo\npref_beta: 0.2\npref_loss: simpo\nsimpo_gamma: 0.8\npref_ftx: 0.1\n",
    ),
    "axolotl": (
        "chat_template: chatml\nchat_template_kwargs: {a: 1}\nbatch_size: 4\nmax_steps: 9\n",
        "chat_template_jinja: a.jinja\ncosine_min_lr_ratio: 0.1\nbfloat16: true\n",
        "tokenizer_config: t\ncurriculum_sampling: true\ntrain_on_inputs: true\nfloat16: true\n",
        "excess_length_strategy: raise\nwarmup_ratio: 0.1\nval_set_size: 0.1\neval_steps: 4\n",
        "run_name: a\nsave_steps: 9\nbf16: false\nfp16: true\n",
        "test_datasets: [{path: t.jsonl, type: alpaca}]\nmax_steps: 90\nevals_per_epoch: 9\n"
        "eval_strategy: steps\n",
        "test_datasets: [{path: t.jsonl, type: alpaca}]\neval_steps: 9\nsave_steps: 9\n"
        "load_best_model_at_end: true\nmetric_for_best_model: loss\ngreater_is_better: false\n"
        "early_stopping_patience: 2\n",
        "embedding_lr_scale: 0.1\n",
        "embedding_lr: 1e-6\n",
        "adapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_modules: [q_proj]\n"
        "lora_dropout: 0.1\nlora_target_linear: true\nlora_modules_to_save: [lm_head]\n"
        "lora_exclude_modules: [a]\nlora_rank_pattern: {q_proj: 4}\n"
        "lora_alpha_pattern: {q_proj: 4}\npeft_use_rslora: true\n"
        "peft_layers_to_transform: [0]\npeft_layers_pattern: [layers]\nloraplus_lr_ratio: 16\n",
        "adapter: lora\nlora_model_dir: a\n",
        "rl: dpo\ndatasets: [{path: a.jsonl}]\ntrl: {beta: 0.2}\ndpo_label_smoothing: 0.1\n"
        "unfrozen_parameters: [lm_head]\n",
        "rl: dpo\ndatasets: [{path: a.jsonl}]\nrl_beta: 0.2\n",
        "rl: orpo\ndatasets: [{path: a.jsonl}]\norpo_alpha: 0.2\n",
        "rl: orpo\ndatasets: [{path: a.jsonl}]\nrl_beta: 0.2\n",
        "rl: orpo\ndatasets: [{path: a.jsonl}]\ntrl: {beta: 0.2}\n",
        "rl: simpo\ndatasets: [{path: a.jsonl}]\ntrl: {beta: 0.2}\nsimpo_gamma: 0.5\n"
        "cpo_alpha: 0.1\n",
        "rl: simpo\ndatasets: [{path: a.jsonl}]\nrl_beta: 0.2\n",
    ),
    "peft": (),
}
"""Keys that :data:`FILES` lack, by trainer."""


def test_each_key_of_the_trainers_has_an_answer() -> None:
    known = keys_of(Config)
    for tool in TOOLS.values():
        for name, key in tool.table.items():
            answer = TRAINERS.of(name)
            assert answer is not None and tool.title in answer, name
            assert set(key.places) <= set(known), name
            assert not key.places or f"write {key.places[0]} (" in answer, name
        assert all(TRAINERS.of(old) is not None for old in tool.old)


@pytest.mark.parametrize("tool", TOOLS)
def test_answers_name_the_places_that_a_conversion_takes(tool: str, tmp_path: Path) -> None:
    table = TOOLS[tool].table
    new_names = TOOLS[tool].old
    base = yaml.safe_load(minimal(tool))
    texts = [FILES[tool], *(yaml.dump(base | yaml.safe_load(more)) for more in MORE[tool])]
    seen = set()
    for number, text in enumerate(texts):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        for entry in convert(tool, file, 1).mapped:
            key = table[new_names.get(entry["key"], entry["key"])]
            places = {place.partition("[")[0] for place in entry["to"]}
            assert places <= set(key.places), (tool, entry["key"])
            seen.add(entry["key"])
    expected = {name for name, key in table.items() if key.places and key.effect is None}
    expected -= {name for name in expected if name.startswith("freeze_")}  # needs a model's file
    assert len(expected - seen) <= 4, expected - seen


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "learning_rate=1e-5",
            "unknown key; write optimizer.lr (a number, above 0) for learning_",
        ),
        ("train.num_train_epochs=3", "write train.epochs (a number, above 0"),
        (
            "per_device_train_batch_size=2",
            "write train.global_batch (a whole number, 1 or more) for"
            " per_device_train_batch_size of TRL and LLaMA-Factory (sequences of a device x steps"
            " of accumulation x devices)",
        ),
        ("train.gradient_accumulation_steps=2", "write train.global_batch ("),
        ("max_seq_length=512", "write data.sequence_length (a whole number, 1 or more)"),
        ("data.max_length=512", "write data.sequence_length ("),
        ("cutoff_len=512", "write data.sequence_length (a whole number, 1 or more), and data."),
        (
            "model.lora=true",
            "write adapter.r (a whole number, 1 or more and at most 65536) for lora",
        ),
        ("lora_r=8", "65536) for lora_r of TRL and Axolotl"),
        ("lora_target=all", "write adapter.targets (all-linear, a list of module names such as"),
        ("use_dora=true", "Penstock has no use_dora of TRL, LLaMA-Factory and PEFT (adapters have"),
        ("lora_model_dir=a", "write adapter.path (a path or null) and adapter.dropout"),
        ("loraplus_lr_ratio=16", "write optimizer.groups ("),
        ("target_modules=[q_proj]", "for target_modules of PEFT; penstock convert trl, llama"),
        ("model.bf16=true", "write model.dtype (fp32, bf16 or fp16) for bf16 of TRL, LLaMA"),
        ("train.warmup_ratio=0.1", "write optimizer.warmup_steps (a whole number of steps, or"),
        ("lr_scheduler_type=cosine", "write optimizer.schedule (cosine, linear, constant or wsd)"),
        ("dataset=identity", "write data.sources (a list of sources such as"),
        ("model_name_or_path=m", "write model.path (a path or null)"),
        ("deepspeed=z3.json", "(Penstock divides model and state by cluster, schedule and memory)"),
    ],
)
def test_unknown_keys_are_answered_in_our_words(setting: str, words: str) -> None:
    """Checks errors of a file's keys and of ``--set``."""
    result = CliRunner().invoke(app, ["data", str(TINY), "--set", setting])
    assert result.exit_code == 2 and words in result.stderr
    assert result.stderr.count("FILE converts a whole file") == 1
    *sections, name = setting.partition("=")[0].split(".")
    fields: dict[str, Any] = {name: 1}
    for section in sections:
        fields = {section: fields}
    with pytest.raises(ConfigError) as caught:
        parse_config(fields, translation=TRAINERS)
    assert words in str(caught.value)


def test_our_own_words_come_first() -> None:
    """``seed`` and ``packing`` are also keys of trainers."""
    result = CliRunner().invoke(app, ["data", str(TINY), "--set", "seed=1", "--set", "packing=no"])
    assert "did you mean run.seed?" in result.stderr and "mean data.packing?" in result.stderr
    assert "converts a whole file" not in result.stderr


@pytest.mark.parametrize("word", ["--learning_rate", "--learning-rate=3", "learning_rate=3"])
def test_options_of_other_trainers(word: str) -> None:
    result = CliRunner().invoke(app, ["train", str(TINY), word, "3"])
    assert result.exit_code == 2
    text = " ".join(result.stderr.split())
    assert "unknown; write optimizer.lr (a number, above 0) for learning_rate of TRL" in text
    assert text.endswith("as --set SECTION.KEY=VALUE")


def test_keys_are_explained_in_our_words() -> None:
    result = CliRunner().invoke(app, ["config", "lora_alpha"])
    assert result.exit_code == 2 and LORA_ALPHA in result.stderr


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("tatsu-lab/alpaca", "tatsu-lab/alpaca"),
        ("here/Qwen2.5-0.5B", None),
        ("data/chats.jsonl", None),
        ("/models/Qwen", None),
        ("../models/Qwen", None),
        ("a/b/c", None),
        ("gpt2", None),
        ("chats/*.jsonl", None),
    ],
)
def test_names_of_the_hub(
    path: str, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "Qwen2.5-0.5B").mkdir(parents=True)
    assert hub_name(path) == name
    assert hub_name(tmp_path / path) == name or path.startswith(("/", ".."))


def test_names_of_the_hub_are_answered_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run has absolute paths, so names count from the current folder."""
    monkeypatch.chdir(tmp_path)
    data, model = "tatsu-lab/alpaca", "Qwen/Qwen2.5-0.5B"
    with pytest.raises(ConfigError, match="no such file or folder; to get this data set") as caught:
        find_source(str(tmp_path / data))
    command = f"hf download {data} --repo-type dataset --local-dir {data}"
    assert str(caught.value).endswith(command)
    with pytest.raises(ConfigError, match="no such folder; give a local folder") as caught:
        check_folder(tmp_path / model)
    assert f"from the Hub: hf download {model} --local-dir {model})" in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read it") as caught:
        JsonTokenizer(Path(model))
    assert f"hf download {model} --local-dir {model})" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        find_source("data/chats.jsonl")
    assert str(caught.value).endswith("no such file or folder")
