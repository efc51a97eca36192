"""``penstock convert``: pairs of answers of TRL, LLaMA-Factory and Axolotl; parameters that train
alone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.client.convert.conversion import Conversion, convert
from penstock.config.schema import parse_config
from penstock.host.errors import ConfigError
from tests.client.test_convert import (
    config_of,
    fates,
    folder,
    made,
    minimal,
    refusal,
    results,
)
from tests.client.test_convert_adapters import LLAMA, LORA, model

__all__ = ["folder"]
RANKING = {
    "alpaca": {"file_name": "a.json", "ranking": True},
    "sharegpt": {"file_name": "s.json", "ranking": True, "formatting": "sharegpt"},
    "plain": {"file_name": "p.json"},
}
DPO = {"stage": "dpo", "dataset": "alpaca, sharegpt"}


@pytest.fixture(autouse=True)
def registry(folder: Path) -> Path:
    """The registry of the files, and pairs that TRL reads."""
    (folder / "data").mkdir()
    (folder / "data" / "dataset_info.json").write_text(json.dumps(RANKING))
    record = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (folder / "dpo.jsonl").write_text((json.dumps(record) + "\n") * 12)
    return folder


def llamafactory(**keys: Any) -> Conversion:
    """The conversion of a file of ``stage: dpo``."""
    return made("llamafactory", minimal("llamafactory"), **DPO | keys)


def axolotl(entry: dict[str, Any], **keys: Any) -> Conversion:
    """The conversion of a file of ``rl: dpo`` with one data set."""
    values = {"rl": "dpo", "datasets": [{"path": "dpo.jsonl", **entry}]}
    return made("axolotl", minimal("axolotl"), **values | keys)


def test_pairs_of_trl(tmp_path: Path) -> None:
    """Keys of DPOConfig, or the columns of the data, tell a file of ``trl dpo``."""
    plain = {"model_name_or_path": "models/a", "dataset_name": str(tmp_path / "pairs.jsonl")}
    record = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(record))
    for keys, beta, rate in (({}, 0.1, 1e-6), ({"beta": 0.3, "learning_rate": 5e-7}, 0.3, 5e-7)):
        path = tmp_path / "dpo.yaml"
        values = {**plain, **keys, "per_device_train_batch_size": 3, "loss_type": ["sigmoid"]}
        path.write_text(yaml.safe_dump(values))
        conversion = convert("trl", path, 2)
        config = parse_config(dict(conversion.config))
        assert (config.data.objective, config.data.dpo.beta) == ("dpo", beta)
        assert (config.train.global_batch, config.optimizer.lr) == (12, rate)
        assert config.data.train_on == "auto"
    path.write_text(yaml.safe_dump({**plain, "loss_type": ["ipo"]}))
    with pytest.raises(ConfigError, match=r"loss_type = \['ipo'\]: the losses of pairs are those"):
        convert("trl", path, 1)


def notes(conversion: Conversion) -> dict[str, str]:
    """Notes of a conversion by the trainer's key."""
    return {entry["key"]: entry["note"] for entry in conversion.mapped if "note" in entry}


def trl_pairs(objective: str | None = None, **keys: Any) -> Conversion:
    """The conversion of a file of TRL with pairs."""
    values = {**yaml.safe_load(minimal("trl")), "dataset_name": "dpo.jsonl", **keys}
    Path("theirs.yaml").write_text(yaml.safe_dump(values))
    return convert("trl", Path("theirs.yaml"), 2, objective)


def test_trl_without_a_reference() -> None:
    """Keys of CPOConfig tell SimPO; a file of ORPOConfig has the keys of DPOConfig."""
    orpo = trl_pairs("orpo", beta=0.3, per_device_train_batch_size=3, max_completion_length=9)
    config = parse_config(dict(orpo.config))
    assert orpo.config["data"]["objective"] == "orpo" and not orpo.changes_result
    assert orpo.config["data"]["orpo"] == {"beta": 0.3} and "dpo" not in orpo.config["data"]
    assert (config.train.global_batch, config.optimizer.lr) == (12, 1e-6)
    assert "over all tokens of a step" in notes(orpo)["beta"]
    keys = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.8, "label_smoothing": 0.1}
    keys["per_device_train_batch_size"] = 3
    for named in (None, "simpo"):
        simpo = trl_pairs(named, **keys, cpo_alpha=0.0)
        assert parse_config(dict(simpo.config)).data.objective == "simpo"
        assert simpo.config["data"]["simpo"] == {
            **{"beta": 2.0, "gamma": 0.8, "likelihood": 0.0, "label_smoothing": 0.1},
        }
        assert "over all tokens" not in notes(simpo)["beta"] and not simpo.changes_result
    assert trl_pairs(loss_type="simpo").config["data"]["simpo"] == {
        **{"beta": 0.1, "gamma": 0.5, "likelihood": 1.0},
    }
    assert trl_pairs("simpo").config["data"]["objective"] == "simpo"
    assert trl_pairs("dpo", padding_value=0).config["data"]["dpo"] == {"beta": 0.1}
    given = trl_pairs(beta=0.2, label_smoothing=0.1, per_device_train_batch_size=3)
    assert fates(given) == {"label_smoothing": "none"}


@pytest.mark.parametrize(
    ("objective", "keys", "words"),
    [
        (None, {"cpo_alpha": 0.5}, "cpo_alpha = 0.5: is of CPOConfig, and its loss is sigmoid"),
        (None, {"loss_type": "hinge"}, "loss_type = 'hinge': the losses of pairs are those of"),
        (None, {"loss_type": "alphapo"}, "loss_type = 'alphapo': the losses"),
        (None, {"loss_type": "simpo", "alpha": 0.2}, "alpha = 0.2: no loss has the rewards"),
        (None, {"padding_value": 3}, "padding_value = 3: is of ORPOConfig, or of an old"),
        ("orpo", {"loss_type": "simpo"}, "loss_type = 'simpo': --objective is orpo; give simpo"),
        ("simpo", {"loss_type": "sigmoid"}, "loss_type = 'sigmoid': the losses of pairs"),
        ("kto", {}, "--objective kto: goes with trl alone, and takes dpo, orpo, simpo"),
    ],
)
def test_files_of_trl_for_other_trainers(
    objective: str | None, keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        trl_pairs(objective, **keys)


def test_llamafactory_without_a_reference() -> None:
    """Its likelihood term is the mean of each answer, and no reference takes part."""
    orpo = llamafactory(pref_loss="orpo", pref_beta=0.2, pref_ftx=0.5, ref_model="other")
    assert orpo.config["data"]["orpo"] == {
        **{"beta": 0.2, "likelihood": 1.5},
        **{"likelihood_mean": "samples", "likelihood_on": "completion"},
    }
    assert config_of(orpo).data.objective == "orpo" and fates(orpo) == {"ref_model": "none"}
    simpo = llamafactory(pref_loss="simpo", pref_beta=2.0, simpo_gamma=1.2)
    assert simpo.config["data"]["simpo"] == {"beta": 2.0, "gamma": 1.2}
    assert config_of(simpo).data.objective == "simpo" and not fates(simpo)
    mixed = llamafactory(pref_loss="simpo", pref_ftx=0.3, ld_alpha=0.5, pref_bco_weight=1.0)
    assert mixed.config["data"]["simpo"] == {
        **{"beta": 0.1, "gamma": 0.5, "likelihood": 0.3, "likelihood_mean": "samples"},
    }
    assert results(mixed) == {"ld_alpha"} and config_of(mixed).data.simpo.likelihood == 0.3


def test_axolotl_without_a_reference() -> None:
    orpo = axolotl({}, rl="orpo", orpo_alpha=0.2, micro_batch_size=3)
    assert orpo.config["data"]["orpo"] == {"beta": 0.2} and not orpo.changes_result
    assert orpo.config["train"]["global_batch"] == 6
    assert axolotl({}, rl="orpo", orpo_alpha=0.2, rl_beta=0.4).config["data"]["orpo"] == {
        "beta": 0.4
    }
    talk = axolotl({"type": "chat_template.argilla"}, rl="orpo")
    assert talk.config["data"]["sources"][0]["format"] == "preference"
    assert results(talk) == {"datasets[0].type"}
    simpo = axolotl({"type": {"field_prompt": "ask"}}, rl="simpo", rl_beta=2.0, cpo_alpha=0)
    assert simpo.config["data"]["simpo"] == {"beta": 2.0, "gamma": 0.5, "likelihood": 0.0}
    assert config_of(simpo).data.objective == "simpo" and not simpo.changes_result
    entry = [{"path": "dpo.jsonl", "type": "chat_template"}]
    assert "datasets[0].type = 'chat_template': rl: orpo has chat_template.argilla" in refusal(
        "axolotl", minimal("axolotl"), rl="orpo", datasets=entry
    )


def test_adapters_and_evaluations_of_pairs_of_trl() -> None:
    """Passes count pairs, and the batch counts rows."""
    keys = {"dataset_name": "dpo.jsonl", "per_device_train_batch_size": 4, "beta": 0.2}
    conversion = made("trl", minimal("trl"), **keys, **LORA["trl"], use_rslora=True)
    assert conversion.config["adapter"] == {
        **{"r": 16, "alpha": 32.0, "dropout": 0.05, "rslora": True},
        "targets": ["q_proj", "v_proj"],
    }
    assert conversion.config["data"]["dpo"] == {"beta": 0.2} and not conversion.changes_result
    other = {"dataset_test_split": "train", "eval_strategy": "epoch"}
    config = made("trl", minimal("trl"), **keys, **other).config
    assert config["train"]["global_batch"] == 8 and config["train"]["eval_every"] == 3
    assert made("trl", minimal("trl"), **keys, use_peft=True, use_dora=True).changes_result


def test_pairs_of_llamafactory() -> None:
    keys = {"pref_beta": 0.3, "dpo_label_smoothing": 0.1, "per_device_train_batch_size": 2}
    conversion = llamafactory(**keys, gradient_accumulation_steps=2, packing=True, ppo_target=3.0)
    config = config_of(conversion)
    assert (config.data.objective, config.data.packing) == ("dpo", "none")
    assert (config.data.dpo.beta, config.data.dpo.label_smoothing) == (0.3, 0.1)
    assert config.data.train_on == "auto" and config.train.global_batch == 8
    assert [source.name for source in config.data.sources] == ["alpaca", "sharegpt"]
    assert fates(conversion) == {"ppo_target": "none"}
    used = {"pref_ftx": 1.0, "pref_bco_weight": 0.5, "ld_alpha": 0.5, "ref_model": "other"}
    assert results(llamafactory(**used)) == {*used}
    assert fates(made("llamafactory", minimal("llamafactory"), **used)) == dict.fromkeys(
        used, "none"
    )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"pref_loss": "ipo"},
            "pref_loss = 'ipo': the losses of pairs are those of dpo (sigmoid), ",
        ),
        ({"pref_loss": "kto_pair"}, "pref_loss = 'kto_pair'"),
        ({"pref_loss": "orpo", "dpo_label_smoothing": 0.1}, "dpo_label_smoothing = 0.1: goes"),
        ({"dataset": "alpaca, plain"}, "dataset = 'plain': stage dpo takes entries with ranking"),
        ({"stage": "sft"}, "dataset = 'alpaca': stage sft takes entries without ranking"),
        ({"mask_history": True}, "mask_history = True: goes with stage sft"),
        ({"neat_packing": True}, "neat_packing = True: goes with stage sft"),
    ],
)
def test_values_that_stage_dpo_cannot_have(keys: dict[str, Any], words: str) -> None:
    assert words in refusal("llamafactory", minimal("llamafactory"), **DPO | keys)


def test_another_reference_of_llamafactory_changes_the_result(registry: Path) -> None:
    """Its reference is the model without an adapter, also where the training starts from one."""
    (registry / "old").mkdir()
    fields = {"peft_type": "LORA", "lora_dropout": 0.0, "target_modules": ["q_proj"]}
    (registry / "old" / "adapter_config.json").write_text(json.dumps(fields))
    lora = {"finetuning_type": "lora"}
    assert not llamafactory(**lora).changes_result
    started = lora | {"adapter_name_or_path": "old"}
    assert results(llamafactory(**started)) == {"ref_model"}
    same = {"ref_model": "m", "ref_model_adapters": "old"}
    conversion = llamafactory(**started, **same)
    assert fates(conversion) == dict.fromkeys(same, "none")
    assert results(llamafactory(**started, ref_model="m")) == {"ref_model"}
    assert results(llamafactory(ref_model="m", ref_model_quantization_bit=4)) == {
        *("ref_model", "ref_model_quantization_bit")
    }


@pytest.mark.parametrize("kind", [None, "passthrough.default"])
def test_ready_pairs_of_axolotl(kind: str | None) -> None:
    conversion = axolotl({"type": kind}, rl_beta=0.2, micro_batch_size=3, train_on_inputs=True)
    data = conversion.config["data"]
    assert data["sources"] == [{"path": "dpo.jsonl", "format": "preference"}]
    assert (data["objective"], data["dpo"], data["too_long"]) == ("dpo", {"beta": 0.2}, "drop")
    assert conversion.config["train"]["global_batch"] == 6 and "train_on" not in data
    assert not conversion.changes_result
    nested = axolotl({}, trl={"beta": 0.4, "max_tool_calls": 3}, dpo_label_smoothing=0.1)
    assert nested.config["data"]["dpo"] == {"beta": 0.4, "label_smoothing": 0.1}
    assert results(nested) == {"trl.max_tool_calls"}


def test_fields_of_pairs_of_axolotl() -> None:
    fields = {"field_prompt": "ask", "field_chosen": "good", "chosen_format": "{chosen}"}
    conversion = axolotl({"type": fields | {"field_system": "system"}})
    columns = {"prompt": "ask", "chosen": "good", "rejected": "rejected"}
    assert conversion.config["data"]["sources"][0]["columns"] == columns
    assert not conversion.changes_result
    chat = {"type": "chat_template.default", "field_messages": "talk", "field_chosen": "good"}
    conversion = axolotl(chat | {"roles": {"assistant": ["bot"]}})
    (source,) = conversion.config["data"]["sources"]
    assert source["format"] == "chat" and source["roles"] == {"bot": "assistant"}
    assert source["columns"] == {
        **{"conversations": None, "messages": "talk", "role": "role", "content": "content"},
        **{"chosen": "good", "rejected": "rejected"},
    }
    assert results(conversion) == {"datasets[0].type"}
    conversion = axolotl({"type": "chat_template.argilla_chat"})
    assert conversion.config["data"]["sources"][0]["format"] == "preference"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"type": "chatml.intel"}, "datasets[0].type = 'chatml.intel': only chat_template"),
        (
            {"type": {"prompt_format": "[{prompt}]"}},
            "datasets[0].type.prompt_format = '[{prompt}]'",
        ),
    ],
)
def test_texts_of_axolotl_are_refused(keys: dict[str, Any], words: str) -> None:
    entry = [{"path": "dpo.jsonl", **keys}]
    assert words in refusal("axolotl", minimal("axolotl"), rl="dpo", datasets=entry)


def test_other_trainings_of_axolotl() -> None:
    text, entry = minimal("axolotl"), [{"path": "dpo.jsonl"}]
    assert "sample_packing = True: goes without rl" in refusal(
        "axolotl", text, rl="dpo", datasets=entry, sample_packing=True
    )
    assert "dpo_loss_type = ['ipo']: the losses of pairs" in refusal(
        "axolotl", text, rl="dpo", datasets=entry, dpo_loss_type=["ipo"]
    )
    assert "datasets = None: needs a list" in refusal(
        "axolotl", text, rl="dpo", datasets=None, pretraining_dataset="a.jsonl"
    )
    started = {"adapter": "lora", "lora_model_dir": "old"}
    reference = "rl_adapter_ref_model"
    dropout = "lora_model_dir: lora_dropout"
    assert results(axolotl({}, **started)) == {reference, dropout}
    assert results(axolotl({}, **started, **{reference: True})) == {dropout}
    assert results(axolotl({}, rpo_alpha=1.0)) == {"rpo_alpha"}
    assert fates(made("axolotl", text, rpo_alpha=1.0)) == {"rpo_alpha": "none"}


def test_parameters_that_axolotl_unfreezes() -> None:
    """Axolotl matches from the start of a name, and a dot in a pattern is a dot."""
    patterns = ["^lm_head.weight$", "model.layers.[12].mlp.+proj", "layers.0"]
    names = [name for name, _ in model().named_parameters()]
    theirs = [re.compile(re.sub(r"\.(?!\+)", r"\\.", pattern)) for pattern in patterns]
    expected = [name for name in names if any(regex.match(name) for regex in theirs)]
    conversion = made("axolotl", minimal("axolotl"), unfrozen_parameters=patterns)
    ours = config_of(conversion).train.only
    assert [n for n in names if any(re.search(p, n) for p in ours)] == expected and expected
    assert not conversion.changes_result
    rows = made("axolotl", minimal("axolotl"), unfrozen_parameters=["model.embed_tokens$[:9]"])
    assert results(rows) == {"unfrozen_parameters"}
    adapted = made("axolotl", minimal("axolotl"), **LORA["axolotl"], unfrozen_parameters="a")
    assert results(adapted) == {"unfrozen_parameters"}
    wrong = refusal("axolotl", minimal("axolotl"), unfrozen_parameters=[3])
    assert "unfrozen_parameters = [3]: needs patterns" in wrong


def test_linear_layers_of_gpt2_have_a_note(registry: Path) -> None:
    (registry / "m").mkdir()
    for fields, noted in (({"model_type": "gpt2"}, True), (LLAMA, False)):
        (registry / "m" / "config.json").write_text(json.dumps(fields))
        conversion = llamafactory(finetuning_type="lora")
        assert ("Conv1D of gpt2" in conversion.to_yaml()) is noted
        assert conversion.config["adapter"]["targets"] == "all-linear"
