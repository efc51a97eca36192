"""TRL's ``trl sft --config``: the keys of SFTConfig, ScriptArguments and ModelConfig (TRL 1.16)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.client.convert.adapters import (
    NO_DORA,
    NO_EXPERTS,
    NOT_LORA,
    LoraNames,
    drop_used,
    fields_of,
    put_saved,
    put_sizes,
    put_targets,
)
from penstock.client.convert.evaluation import Evaluations, loss_of, put_best
from penstock.client.convert.hugging_face import (
    NO_QUANTIZATION,
    OLD,
    REMOTE_CODE,
    TRAINING,
    Names,
    hub_data,
    is_file,
    put_model,
    put_precision,
    put_smoothing,
    put_training,
    shuffles,
    split_key,
    steps_between,
    strategy_of,
    warmup_of,
)
from penstock.client.convert.keys import (
    Effect,
    Key,
    Table,
    ValueKind,
    dropped,
    mapped,
    placed,
    switched,
    without,
)
from penstock.client.convert.pairs import TRL, names_pairs, put_trl
from penstock.client.convert.passes import counted_records
from penstock.client.convert.reading import KeyReading
from penstock.config.hub_names import hub_name
from penstock.host.inputs import read_text

OLD_NAMES: Mapping[str, str] = {**OLD, "max_seq_length": "max_length"}
_NO_LORA = "use_peft is false"
_QUANTIZATION = "bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage"
_BUILDERS = ("json", "csv", "parquet", "text", "arrow")
_COLUMNS = (
    *("text", "messages", "conversations", "prompt", "completion", "input_ids", "labels"),
    *("tools", "chat_template_kwargs"),
)
_FIRST_BYTES = 8 << 20
_LENGTH = 1024
"""Tokens of a row without ``max_length``."""

_ROUTERS = "router_aux_loss_coef"
_ROUTED = "output_router_logits"
_NO_LOSS = "the loss is that of the tokens alone"
COEFFICIENTS: Mapping[str, float] = {
    **dict.fromkeys(
        (
            "afmoe axk1 axk2 bailing_hybrid beam cohere2_moe dbrx deepseek_ocr2 deepseek_ocr2_text"
            " deepseek_v2 deepseek_v3 deepseek_v32 dots1 dots3_note dots3_note_text exaone_moe"
            " glm4_moe glm4_moe_lite glm_moe_dsa hunyuan_v1_moe hy_v3 hy_v4 hy_v4_vl hy_v4_vl_text"
            " jetmoe kimi_k25 kimi_linear kolibri1 lfm2_moe longcat_flash mimo_v2_flash mistral4"
            " mistral_large4 mistral_large4_text muse_spark muse_spark_text nemo_speechlm"
            " nemotron_h nemotron_h_omni sarvam_mla sarvam_moe solar_open step3p5 step3p7"
            " unlimited_ocr unlimited_ocr_text zaya"
        ).split(),
        0.0,
    ),
    **dict.fromkeys(("glm4v_moe", "glm4v_moe_text"), 0.0001),
    "flint": 0.0005,
    **dict.fromkeys(
        (
            "deepseek_v4 doge ernie4_5_moe ernie4_5_vl_moe ernie4_5_vl_moe_text glm5_next"
            " glm5_next_text gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared"
            " jamba laguna lara_mini llama4 llama4_text mellum minimax minimax_m2 minimax_m3_vl"
            " minimax_m3_vl_text mixtral nllb-moe openai_privacy_filter phimoe qwen2_moe"
            " qwen3_5_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen3_omni_moe"
            " qwen3_omni_moe_talker_text qwen3_omni_moe_text qwen3_omni_moe_thinker qwen3_vl_moe"
            " qwen3_vl_moe_text qwen4_exp qwen4_exp_text"
        ).split(),
        0.001,
    ),
    **dict.fromkeys(("flex_olmo", "olmoe"), 0.01),
}
"""Coefficients of transformers 5.24 where config.json has none, by the model's type. Other types
have no routers, unless their config.json says so.
"""

_KEYS: Table = {
    **TRAINING,
    **mapped(ValueKind.NUMBER, learning_rate=2e-5),
    **mapped(ValueKind.FLAG, bf16=None),
    **dropped(Effect.NONE, "Penstock logs every step", logging_steps=10, logging_strategy="steps"),
    **dropped(
        Effect.SPEED, "schedule.recompute chooses recomputation", gradient_checkpointing=True
    ),
    # ModelConfig
    **mapped(ValueKind.TEXT, model_name_or_path=None, dtype="float32"),
    **dropped(
        Effect.RESULT, "fetch the revision: hf download MODEL --revision", model_revision="main"
    ),
    **dropped(Effect.NONE, REMOTE_CODE, trust_remote_code=False),
    **without(Effect.SPEED, "model.attention chooses kernels", "attn_implementation"),
    **mapped(ValueKind.FLAG, use_peft=False, use_rslora=False),
    **mapped(ValueKind.WHOLE, lora_r=16),
    **mapped(ValueKind.NUMBER, lora_alpha=32, lora_dropout=0.05),
    **mapped(ValueKind.ANY, lora_target_modules=None, lora_modules_to_save=None),
    **switched(_NO_LORA, NO_EXPERTS, lora_target_parameters=None),
    **switched(_NO_LORA, NOT_LORA, lora_task_type="CAUSAL_LM"),
    **switched(_NO_LORA, NO_DORA, use_dora=False),
    **dropped(Effect.RESULT, NO_QUANTIZATION, load_in_8bit=False, load_in_4bit=False),
    **without(Effect.NONE, "the model is not quantized", _QUANTIZATION, used=NO_QUANTIZATION),
    _ROUTERS: Key(kind=ValueKind.NUMBER, why=_NO_LOSS),
    # ScriptArguments and the mixture of datasets
    **mapped(ValueKind.TEXT, dataset_name=None),
    **mapped(ValueKind.MAPPING, dataset_mixer=None),
    **mapped(ValueKind.LIST, dataset_splits=None),
    **without(Effect.RESULT, "name the files in data.sources", "dataset_configs"),
    **mapped(ValueKind.LIST, datasets=None),
    **without(Effect.RESULT, "name the files in data.sources", "dataset_config"),
    **mapped(ValueKind.TEXT, dataset_train_split="train"),
    **mapped(ValueKind.TEXT, dataset_test_split="test"),
    **without(
        Effect.RESULT,
        "TRL holds out records that it draws; take parts of a file: split: train[:90%] of the"
        " source, and split: train[90%:] of a set in eval.sets",
        "test_split_size",
    ),
    **dropped(Effect.NONE, "Penstock streams all files", dataset_streaming=False, streaming=False),
    **dropped(Effect.SPEED, "unused", gradient_checkpointing_use_reentrant=False),
    **dropped(Effect.NONE, "unused", ignore_bias_buffers=False),
    **without(Effect.NONE, "set variables of the environment in the shell", "env"),
    # SFTConfig
    "max_length": Key(default=_LENGTH, kind=ValueKind.WHOLE, empty=True),
    **mapped(ValueKind.FLAG, packing=False, assistant_only_loss=False, completion_only_loss=None),
    **mapped(ValueKind.TEXT, packing_strategy="bfd", truncation_mode="keep_start"),
    **mapped(ValueKind.TEXT, dataset_text_field="text", chat_template_path=None),
    **without(Effect.RESULT, "arguments of from_pretrained have no place", "model_init_kwargs"),
    **without(Effect.RESULT, "prepared data are read by format tokens", "dataset_kwargs"),
    **without(Effect.RESULT, "data.eos ends a document; set it by hand", "eos_token"),
    **without(Effect.NONE, "padding does not count", "pad_token pad_to_multiple_of"),
    **without(Effect.NONE, "evaluations have data.packing", "eval_packing"),
    **without(Effect.SPEED, "all cores prepare the data", "dataset_num_proc"),
    **dropped(Effect.NONE, "data.shuffle draws an order for each pass", shuffle_dataset=False),
    **dropped(Effect.SPEED, "data.packing decides", padding_free=False),
    **dropped(Effect.SPEED, "schedule.recompute decides", activation_offloading=False),
    "loss_type": Key(why="the loss is the mean negative log-likelihood"),
    **TRL,
}
TABLE = placed(
    _KEYS,
    {
        "model_name_or_path": "model.path",
        "dtype": "model.dtype",
        "dataset_name": "data.sources",
        "dataset_train_split": "data.sources",
        "dataset_test_split": "eval.sets",
        "datasets": "data.sources",
        "dataset_mixer": "data.sources",
        "dataset_splits": "data.sources",
        "max_length": "data.sequence_length",
        "packing": "data.packing data.packing_window",
        "packing_strategy": "data.packing data.packing_window data.too_long",
        "truncation_mode": "data.too_long",
        "assistant_only_loss": "data.train_on",
        "completion_only_loss": "data.train_on",
        "dataset_text_field": "data.sources",
        "chat_template_path": "data.chat_template",
        "loss_type": "data.objective",
        "use_peft": "adapter.r",
        "lora_r": "adapter.r",
        "lora_alpha": "adapter.alpha",
        "lora_dropout": "adapter.dropout",
        "lora_target_modules": "adapter.targets",
        "lora_modules_to_save": "adapter.modules_to_save",
        "use_rslora": "adapter.rslora",
    },
    {
        "loss_type": "dpo is sigmoid",
        "use_peft": "the section adapter makes the training one of LoRA",
        "dataset_text_field": "columns: {text: NAME} of a source",
        "dataset_test_split": "split of a set",
        "packing": "best-fit is true, none is false",
        "assistant_only_loss": "assistant is true",
        "completion_only_loss": "completion is true, all is false",
    },
    base=TRAINING,
)


def convert(reading: KeyReading) -> None:
    """Fills in the configuration of a file of TRL.

    Raises:
        ConfigError: the file has no model or data, or a value is of no known form.
    """
    put_model(reading, "model_name_or_path")
    _put_routers(reading)
    _put_precision(reading)
    _put_sources(reading)
    _put_rows(reading)
    pairs = _has_pairs(reading)
    if not pairs:
        _put_counted(reading)
    reading.put("data.special_in_text", True)
    shuffles(reading)
    put_training(reading, Names(), warmup_of(reading))
    _put_evaluations(reading)
    _put_adapter(reading)
    if pairs:
        put_trl(reading)
        return
    if reading.get("label_smoothing_factor"):
        put_smoothing(reading)
    if reading.get("loss_type") not in (None, "nll", "chunked_nll"):
        reading.drop("loss_type", TABLE["loss_type"].why)


def _has_pairs(reading: KeyReading) -> bool:
    """Returns whether a file is one of pairs: by its keys, or by the columns of the data."""
    if names_pairs(reading):
        return True
    paths = [Path(source["path"]) for source in reading.config["data"]["sources"]]
    return all(first_columns(path) >= {"chosen", "rejected"} for path in paths)


def _put_precision(reading: KeyReading) -> None:
    """Sets the type of the weights: TRL computes in bf16 unless told otherwise."""
    bf16, fp16, dtype = (reading.get(key) for key in ("bf16", "fp16", "dtype"))
    types = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    if fp16:
        put_precision(reading, "fp16", "fp16", "dtype")
    elif bf16 or bf16 is None:
        put_precision(reading, "bf16", "bf16", "dtype")
    elif dtype in types:
        put_precision(reading, types[dtype], "dtype", "bf16")
    else:
        reading.drop("dtype", "set model.dtype to fp32 or bf16: the model's files decide in TRL")


def _put_routers(reading: KeyReading) -> None:
    """Records the routers' loss that TRL adds, which has no place in Penstock.

    Without the key, TRL takes the coefficient of the model. 0 stands for no such loss.
    """
    given = reading.get(_ROUTERS)
    if given == 0:
        reading.map(_ROUTERS, {}, f"0 adds no loss of routers: {_NO_LOSS} here, too")
        return
    folder = reading.config["model"]["path"]
    path = Path(folder) / "config.json"
    fields = fields_of(path)
    if not fields:
        _put_unknown(reading, path, given)
        return
    default = coefficient_of(fields)
    if default is None:
        if given is not None:
            why = f"{path} has no routers, and TRL refuses the key; remove it"
            reading.drop(_ROUTERS, why, Effect.NONE)
        return
    value = default if given is None else given
    if value:
        origin = f"TRL's default is that of {path}" if given is None else "TRL adds it"
        reading.drop(
            _ROUTERS,
            f"the routers' loss ({origin}) is not added, and {_NO_LOSS}; set {_ROUTERS}: 0.0 for"
            " equal losses",
            value=value,
        )


def _put_unknown(reading: KeyReading, path: Path, given: Any) -> None:
    """Records the loss of routers for a model without a readable config.json."""
    if given is not None:
        reading.drop(
            _ROUTERS, f"the routers' loss is not added, and {_NO_LOSS}; set {_ROUTERS}: 0.0"
        )
        return
    reading.map(
        _ROUTERS,
        {},
        f"{path} cannot be read: with a mixture of experts, TRL adds the routers' loss by default,"
        f" and Penstock does not; set {_ROUTERS}: 0.0 for equal losses",
    )


def coefficient_of(fields: Mapping[str, Any]) -> float | None:
    """Returns the coefficient of the routers' loss in the fields of a config.json, as TRL reads it
    of transformers' configuration. None for a model without routers.
    """
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        text = fields
    kind = text.get("model_type", fields.get("model_type"))
    default = COEFFICIENTS.get(kind) if isinstance(kind, str) else None
    if default is None and _ROUTED not in text:
        return None
    experts = [text[key] for key in ("num_local_experts", "num_experts") if key in text]
    if experts and not any(experts):
        return None
    given = text.get(_ROUTERS, default or 0.0)
    known = isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)
    return float(given) if known else 0.0


def _put_rows(reading: KeyReading) -> None:
    length = reading.get("max_length")
    if length is None:
        reading.put("data.sequence_length", _LENGTH)
        reading.drop("max_length", "set data.sequence_length to the tokens of the longest sample")
    else:
        reading.put("data.sequence_length", length, "max_length")
    strategy = reading.get("packing_strategy")
    if not reading.get("packing"):
        reading.put("data.packing", "none", "packing")
        reading.put("data.too_long", "truncate", "truncation_mode")
    else:
        reading.put("data.packing", "best-fit", "packing", "packing_strategy")
        reading.put("data.packing_window", 1000, "packing")
        cut = "split" if strategy == "bfd_split" else "truncate"
        reading.put("data.too_long", cut, "packing_strategy")
        if strategy not in ("bfd", "bfd_split"):
            reading.drop("packing_strategy", "samples that share a row are kept apart and whole")
    if reading.get("truncation_mode") != "keep_start":
        reading.drop("truncation_mode", "a sample that is too long loses its end")
    template = reading.get("chat_template_path")
    if template is None:
        return
    if template.endswith((".jinja", ".jinja2", ".j2")):
        reading.put("data.chat_template", template, "chat_template_path")
    else:
        reading.drop("chat_template_path", "give the file of the template in data.chat_template")


def _put_counted(reading: KeyReading) -> None:
    """Sets the tokens that count.

    TRL counts the completion of a prompt, and all tokens of a conversation, which one value of
    ``data.train_on`` cannot express: the first record decides.
    """
    assistant, completion = reading.get("assistant_only_loss"), reading.get("completion_only_loss")
    keys = ("assistant_only_loss", "completion_only_loss")
    if assistant and completion:
        reading.drop(keys[1], "data.train_on counts the assistant's turns alone", value=True)
    if assistant:
        reading.put("data.train_on", "assistant", keys[0])
    elif completion:
        reading.put("data.train_on", "completion", keys[1])
    elif completion is False:
        reading.put("data.train_on", "all", *keys)
    else:
        paths = [Path(source["path"]) for source in reading.config["data"]["sources"]]
        columns = [first_columns(path) for path in paths]
        prompts = {names >= {"prompt", "completion"} for names in columns}
        known = all(columns) and len(prompts) == 1
        value = "completion" if known and prompts == {True} else "all"
        note = "by the columns of the first record" if known else ""
        reading.put("data.train_on", value, *(keys if known else keys[:1]), note=note)
        if not known:
            reading.drop(
                keys[1],
                "TRL counts the completion of a prompt, and all tokens of other records, and the"
                " first records do not show one kind; set data.train_on",
            )


def _put_sources(reading: KeyReading) -> None:
    """Sets the sources.

    Raises:
        ConfigError: the file names no data, or a source has an unknown form.
    """
    mixture, name = reading.get("datasets"), reading.get("dataset_name")
    if mixture:
        sources = [_source(reading, number, item) for number, item in enumerate(mixture)]
        reading.put("data.sources", sources, "datasets")
        if reading.get("dataset_train_split") != "train":
            reading.drop("dataset_train_split", "each of datasets has its split", Effect.NONE)
        if name:
            reading.drop("dataset_name", "datasets replaces it", Effect.NONE)
    elif reading.get("dataset_mixer"):
        _put_mixer(reading)
    elif name:
        key = "dataset_train_split"
        split = split_key(reading, key, name, reading.get(key))
        reading.put("data.sources", [{"path": name, **split}], "dataset_name")
        if split or key in reading.values:
            reading.map(key, {"data.sources[*].split": split.get("split")})
        if hub_name(name):
            hub_data(reading, "dataset_name", name)
    else:
        remedy = "needs the data; name a file or folder, or give datasets or dataset_mixer"
        raise reading.refused("dataset_name", name, remedy)
    field = reading.get("dataset_text_field")
    if field != "text":
        for source in reading.config["data"]["sources"]:
            source.setdefault("columns", {}).setdefault("text", field)
        reading.map("dataset_text_field", {"data.sources[*].columns.text": field})


def _put_mixer(reading: KeyReading) -> None:
    """Sets the sources of ``dataset_mixer``, a key of alignment-handbook. A share below 1 takes the
    first records.

    Raises:
        ConfigError: a share is no number, or no split is one to train on.
    """
    mixer, key = reading.get("dataset_mixer"), "dataset_splits"
    names = reading.get(key) or ["train", "test"]
    splits = [name for name in names if isinstance(name, str) and "train" in name]
    if not splits:
        raise reading.refused(key, names, "needs a split to train on, such as train")
    sources = []
    for path, share in mixer.items():
        place = f"dataset_mixer.{path}"
        number = reading.typed(place, ValueKind.NUMBER, share)
        if hub_name(str(path)):
            hub_data(reading, place, str(path))
        count = counted_records(Path(str(path))) if 0 < number < 1 else None
        limit = {} if count is None else {"limit": max(1, int(number * count))}
        if number != 1 and not limit:
            why = "takes this share of the records from the start; set limit of a source"
            reading.drop(place, why, value=share)
        sources += [
            {"path": str(path), **split_key(reading, key, str(path), name), **limit}
            for name in splits
        ]
    reading.put("data.sources", sources, "dataset_mixer")
    others = [name for name in names if name not in splits]
    if key in reading.values:
        reading.map(key, {"data.sources[*].split": splits})
    if key in reading.values and others:
        why = "name held-out data in eval.sets"
        reading.drop(key, why, Effect.NONE, value=others)


def _put_evaluations(reading: KeyReading) -> None:
    """Sets evaluations: on the split ``dataset_test_split`` of the data."""
    sets, key, name = [], "dataset_test_split", reading.get("dataset_name")
    strategy = strategy_of(reading)
    one_split = bool(name) and is_file(name) and reading.get(key) != "train"
    if strategy != "no" and name and not one_split and not reading.get("datasets"):
        split = split_key(reading, key, name, reading.get(key))
        (source,) = reading.config["data"]["sources"]
        where = {field: value for field, value in source.items() if field != "split"}
        sets = [{"name": "eval", **where, **split}]
    evaluations = Evaluations(
        sets=sets,
        keys=(key,),
        metrics=loss_of("eval"),
        strategy=strategy,
        steps=steps_between(reading),
        missing="name the file of held-out data in eval.sets",
    )
    every = evaluations.put(reading)
    loads = bool(reading.get("load_best_model_at_end"))
    put_best(reading, evaluations, every, loads=loads, patience="")


def _source(reading: KeyReading, number: int, item: Any) -> dict[str, Any]:
    """Returns the source of an entry of ``datasets``.

    Raises:
        ConfigError: the entry has no path, or a value has another type.
    """
    place = f"datasets[{number}]"
    fields = {
        k: v for k, v in reading.typed(place, ValueKind.MAPPING, item).items() if v is not None
    }
    path = reading.typed(f"{place}.path", ValueKind.TEXT, fields.pop("path", ""))
    files = fields.pop("data_files", None)
    if not path:
        raise reading.refused(place, item, "needs a path")
    if path in _BUILDERS and isinstance(files, str):
        path = files
    elif files is not None:
        reading.drop(f"{place}.data_files", "list each file as a source", value=files)
    elif hub_name(path):
        hub_data(reading, f"{place}.path", path)
    source: dict[str, Any] = {"path": path}
    if (columns := fields.pop("columns", None)) is not None:
        kept = reading.typed(f"{place}.columns", ValueKind.LIST, columns)
        source["columns"] = {name: None for name in _COLUMNS if name not in kept}
    split = reading.typed(f"{place}.split", ValueKind.TEXT, fields.pop("split", "train"))
    source |= split_key(reading, f"{place}.split", path, split)
    for key, value in fields.items():
        reading.drop(f"{place}.{key}", "name the files in data.sources", value=value)
    return source


def _put_adapter(reading: KeyReading) -> None:
    """Sets the section ``adapter``, and drops the keys of quantization with their effect.

    Raises:
        ConfigError: a list of modules has another form.
    """
    if reading.get("load_in_8bit") or reading.get("load_in_4bit"):
        drop_used(reading, _QUANTIZATION)
    if not reading.get("use_peft"):
        return
    names = LoraNames()
    put_sizes(reading, names, reading.get(names.alpha), "use_peft")
    targets, note = reading.get(names.targets), ""
    if isinstance(targets, list) and len(targets) == 1:
        targets, note = targets[0], "TRL reads a list of one name as a regular expression"
    put_targets(reading, names.targets, targets, note)
    put_saved(reading, names.saved)
    drop_used(reading, "lora_target_parameters lora_task_type use_dora")


def first_columns(path: Path) -> set[str]:
    """Returns the columns of the first record of a JSON file; none if it cannot be read."""
    if path.suffix not in (".jsonl", ".json"):
        return set()
    try:
        text = read_text(path, _FIRST_BYTES).lstrip()
        start = text[1:].lstrip() if text.startswith("[") else text
        record, _ = json.JSONDecoder().raw_decode(start)
    except (OSError, ValueError, RecursionError):
        return set()
    return set(record) if isinstance(record, dict) else set()
