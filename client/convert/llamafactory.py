"""LLaMA-Factory's ``llamafactory-cli train FILE``, stages sft and dpo (LLaMA-Factory 0.9)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.client.convert.adapters import (
    NO_DORA,
    NO_START,
    NOT_LORA,
    OTHER_KEYS,
    LoraNames,
    drop_used,
    fields_of,
    names_of,
    note_kinds,
    put_path,
    put_plus,
    put_saved,
    put_sizes,
    put_targets,
)
from penstock.client.convert.evaluation import (
    OWN_SET,
    Evaluations,
    loss_of,
    put_best,
    put_share,
    set_name,
)
from penstock.client.convert.hugging_face import (
    NO_QUANTIZATION,
    OLD,
    REMOTE_CODE,
    TRACKERS,
    TRAINING,
    Names,
    put_model,
    put_precision,
    put_smoothing,
    put_training,
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
from penstock.client.convert.pairs import (
    LLAMA_FACTORY,
    check_llamafactory,
    put_llamafactory,
)
from penstock.client.convert.passes import REGISTRY, entries_of
from penstock.client.convert.reading import KeyReading

OLD_NAMES: Mapping[str, str] = {**OLD}

_LORA = LoraNames(r="lora_rank", targets="lora_target", saved="additional_target")
_LORA_KEYS = (
    *("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "additional_target", "use_rslora"),
    *("use_dora", "pissa_init", "create_new_adapter"),
)
_NOT_USED = "finetuning_type switches it off"
_MERGED = (
    "LLaMA-Factory merges the adapters into the model before it trains; merge them (PEFT's"
    " merge_and_unload), and name the result in model.path"
)
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
_MEDIA = (
    "media_dir image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps"
    " video_maxlen audio_sampling_rate"
)
_QUANTIZATION = "quantization_method quantization_type double_quantization quantization_device_map"
_NO_TEMPLATE = "the model's own template renders conversations; compare by penstock data"
_OTHER_LOSS = "Penstock has no such training"

_KEYS: Table = {
    **TRAINING,
    **LLAMA_FACTORY,
    **mapped(ValueKind.TEXT, model_name_or_path=None),
    "stage": Key(default="sft", kind=ValueKind.TEXT, why="penstock train trains on text and chats"),
    "finetuning_type": Key(
        default="lora",
        kind=ValueKind.TEXT,
        why="the section adapter is lora, and train.only is freeze; without both all is trained",
    ),
    **mapped(ValueKind.WHOLE, lora_rank=8, freeze_trainable_layers=2),
    **mapped(ValueKind.NUMBER, lora_alpha=None, lora_dropout=0.0, loraplus_lr_ratio=None),
    **mapped(ValueKind.ANY, lora_target="all", additional_target=None, adapter_name_or_path=None),
    **mapped(ValueKind.ANY, freeze_trainable_modules="all", freeze_extra_modules=None),
    **mapped(ValueKind.FLAG, use_rslora=False),
    **mapped(ValueKind.TEXT, adapter_folder=None),
    **mapped(ValueKind.ANY, dataset=None),
    **mapped(ValueKind.TEXT, dataset_dir="data", template=None, mix_strategy="concat"),
    **mapped(ValueKind.WHOLE, cutoff_len=2048, max_samples=None),
    **mapped(ValueKind.FLAG, packing=None, neat_packing=False, pure_bf16=False),
    **mapped(ValueKind.FLAG, train_on_prompt=False, mask_history=False, disable_shuffling=False),
    **mapped(ValueKind.FLAG, split_special_tokens=False),
    **mapped(ValueKind.NUMBER, val_size=0.0),
    # Data
    **mapped(ValueKind.ANY, eval_dataset=None),
    **mapped(ValueKind.FLAG, eval_on_each_dataset=False),
    **mapped(ValueKind.WHOLE, early_stopping_steps=None),
    **without(Effect.RESULT, "set data.sources.weight instead", "interleave_probs"),
    **without(Effect.RESULT, "ready tokens are read by format tokens", "tokenized_path"),
    **without(Effect.RESULT, _NO_TEMPLATE, "tool_format default_system"),
    **dropped(Effect.RESULT, "set data.chat_template_kwargs", enable_thinking=True),
    **dropped(Effect.RESULT, "padding never counts", ignore_pad_token_for_loss=True),
    **dropped(Effect.NONE, "Penstock streams all files", streaming=False, buffer_size=16384),
    **dropped(
        Effect.SPEED,
        "all cores prepare the data, and cache it",
        overwrite_cache=False,
        preprocessing_batch_size=1000,
    ),
    **without(Effect.SPEED, "all cores prepare the data", "preprocessing_num_workers"),
    **without(Effect.NONE, "only texts are read", _MEDIA),
    **dropped(Effect.NONE, "each evaluation has token_accuracy", compute_accuracy=False),
    **without(Effect.NONE, "evaluations generate no text", "eval_num_beams"),
    **dropped(Effect.NONE, "evaluations generate no text", predict_with_generate=False),
    # Model
    **without(Effect.RESULT, NO_QUANTIZATION, "quantization_bit"),
    **without(Effect.NONE, "the model is not quantized", _QUANTIZATION, used=NO_QUANTIZATION),
    **dropped(Effect.RESULT, "the vocabulary is that of the model", resize_vocab=False),
    **without(Effect.RESULT, "the vocabulary is that of the model", "add_tokens"),
    **without(Effect.RESULT, "the vocabulary is that of the model", "add_special_tokens"),
    **without(Effect.RESULT, "the model's config.json decides", "rope_scaling mixture_of_depths"),
    **dropped(Effect.RESULT, "the loss is that of the tokens alone", moe_aux_loss_coef=0.0),
    **dropped(Effect.RESULT, "the model's layers are kept", shift_attn=False),
    **dropped(
        Effect.RESULT,
        "model.dtype decides for all layers",
        upcast_layernorm=False,
        upcast_lmhead_output=False,
    ),
    **dropped(Effect.RESULT, "give model.hf for a new model", train_from_scratch=False),
    **dropped(Effect.NONE, REMOTE_CODE, trust_remote_code=False),
    **dropped(
        Effect.RESULT, "fetch the revision: hf download MODEL --revision", model_revision="main"
    ),
    **dropped(Effect.SPEED, "model.attention chooses kernels", flash_attn="auto"),
    **dropped(
        Effect.SPEED,
        "other kernels are used",
        enable_liger_kernel=False,
        use_unsloth=False,
        use_unsloth_gc=False,
    ),
    **dropped(
        Effect.SPEED,
        "schedule.recompute chooses recomputation",
        disable_gradient_checkpointing=False,
        use_reentrant_gc=True,
    ),
    **dropped(
        Effect.NONE,
        "not used in training",
        use_fast_tokenizer=True,
        low_cpu_mem_usage=True,
        use_kv_cache=True,
        infer_backend="huggingface",
        infer_dtype="auto",
        print_param_status=False,
        offload_folder="offload",
    ),
    **without(Effect.NONE, "fetch folders by hf download", "cache_dir hf_hub_token ms_hub_token"),
    # Methods
    **switched(_NOT_USED, NO_DORA, use_dora=False),
    **switched(_NOT_USED, NO_START, pissa_init=False),
    **switched("pissa_init is false", NO_START, pissa_iter=16, pissa_convert=False),
    **switched(OTHER_KEYS, _MERGED, create_new_adapter=False),
    **switched(
        OTHER_KEYS, "optimizer.groups takes lora_embedding_B by name", loraplus_lr_embedding=1e-6
    ),
    **switched(
        _NOT_USED, NOT_LORA, oft_rank=0, oft_block_size=32, oft_target="all", module_dropout=0.0
    ),
    **dropped(
        Effect.RESULT,
        _OTHER_LOSS,
        use_galore=False,
        use_badam=False,
        use_apollo=False,
        use_adam_mini=False,
        use_muon=False,
        use_llama_pro=False,
        use_dft_loss=False,
        fp8=False,
    ),
    **dropped(Effect.NONE, "penstock report shows the losses", plot_loss=False),
    **dropped(Effect.NONE, TRACKERS, use_swanlab=False),
    **dropped(Effect.NONE, "speed is always shown", include_effective_tokens_per_second=False),
    **without(
        Effect.NONE,
        "Penstock starts its own processes",
        "ray_run_name ray_storage_path ray_num_workers resources_per_worker placement_strategy",
    ),
}
TABLE = placed(
    _KEYS,
    {
        "model_name_or_path": "model.path",
        "dataset": "data.sources",
        "dataset_dir": "data.sources",
        "template": "data.chat_template",
        "mix_strategy": "data.sources",
        "cutoff_len": "data.sequence_length data.too_long",
        "max_samples": "data.sources",
        "packing": "data.packing",
        "neat_packing": "data.packing",
        "pure_bf16": "model.dtype",
        "train_on_prompt": "data.train_on",
        "mask_history": "data.train_on",
        "disable_shuffling": "data.shuffle",
        "split_special_tokens": "data.special_in_text",
        "val_size": "data.eval_fraction eval.sets",
        "eval_dataset": "eval.sets",
        "eval_on_each_dataset": "eval.sets",
        "early_stopping_steps": "train.stop_early",
        "enable_thinking": "data.chat_template_kwargs",
        "lora_rank": "adapter.r",
        "lora_alpha": "adapter.alpha",
        "lora_dropout": "adapter.dropout",
        "lora_target": "adapter.targets",
        "additional_target": "adapter.modules_to_save",
        "use_rslora": "adapter.rslora",
        "adapter_name_or_path": "adapter.path adapter.dropout",
        "adapter_folder": "adapter.path",
        "loraplus_lr_ratio": "optimizer.groups",
        "freeze_trainable_layers": "train.only",
        "freeze_trainable_modules": "train.only",
        "freeze_extra_modules": "train.only",
    },
    {
        "dataset": f"[{{registry: data/{REGISTRY}, name: NAME}}], or [{{path: FILE}}]",
        "eval_dataset": f"[{{name: SET, registry: data/{REGISTRY}, entry: NAME}}]",
        "early_stopping_steps": "patience, in evaluations",
        "max_samples": "limit of a source",
        "mix_strategy": "weight of a source",
        "train_on_prompt": "all is true",
        "mask_history": "last is true",
        "neat_packing": "best-fit is true, none is false",
        "disable_shuffling": "false is true",
        "split_special_tokens": "false is true",
        "lora_target": "all is all-linear",
        "loraplus_lr_ratio": "a group of lora_B with this rate",
        "freeze_trainable_layers": "a pattern with the layers' numbers",
    },
    base=TRAINING,
)


def convert(reading: KeyReading) -> None:
    """Fills in the configuration of a file of LLaMA-Factory.

    Raises:
        ConfigError: the stage is another one, or the file has no model or data.
    """
    stage = reading.get("stage")
    if stage not in ("sft", "dpo"):
        raise reading.refused("stage", stage, "only sft and dpo are converted")
    reading.map("stage", {})
    pairs = stage == "dpo"
    if pairs:
        check_llamafactory(reading)
    put_model(reading, "model_name_or_path")
    _put_precision(reading)
    _put_sources(reading, pairs=pairs)
    _put_rows(reading, pairs=pairs)
    if not pairs:
        _put_counted(reading)
    special = not reading.get("split_special_tokens")
    reading.put("data.special_in_text", special, "split_special_tokens")
    shuffle = not reading.get("disable_shuffling")
    reading.put("data.shuffle", shuffle, "disable_shuffling")
    if reading.get("train_sampling_strategy") != "random":
        reading.drop("train_sampling_strategy", "disable_shuffling decides")
    put_training(reading, Names(), warmup_of(reading))
    _put_method(reading)
    _put_evaluations(reading)
    if pairs:
        put_llamafactory(reading)
    else:
        _put_smoothing(reading)


def _put_method(reading: KeyReading) -> None:
    """Sets the parameters that are trained: all, adapters, or some layers.

    Raises:
        ConfigError: a list of modules has another form.
    """
    method = reading.get("finetuning_type")
    paths = reading.get("adapter_name_or_path")
    if paths and method != "lora":
        reading.drop("adapter_name_or_path", _MERGED)
    if method == "full":
        reading.map("finetuning_type", {})
    elif method == "freeze":
        reading.map("finetuning_type", {})
        _put_layers(reading)
    elif method != "lora":
        reading.drop("finetuning_type", NOT_LORA)
        drop_used(reading, "oft_rank oft_block_size oft_target module_dropout")
    else:
        reading.map("finetuning_type", {})
        _put_adapter(reading, paths)


def _put_adapter(reading: KeyReading, paths: Any) -> None:
    resumes = bool(paths) and not reading.get("create_new_adapter")
    folders = names_of(reading, "adapter_name_or_path", paths) if paths else []
    if resumes and len(folders) == 1:
        folder, key = reading.get("adapter_folder"), "adapter_name_or_path"
        whole = str(Path(folders[0]) / folder) if folder else folders[0]
        put_path(reading, key, whole, _LORA_KEYS)
        if folder:
            reading.map("adapter_folder", {"adapter.path": whole})
        put_plus(reading)
        return
    if paths:
        reading.drop("adapter_name_or_path", _MERGED)
    put_sizes(reading, _LORA, reading.get("lora_alpha") or 2 * reading.get("lora_rank"))
    targets = reading.get("lora_target")
    names = names_of(reading, "lora_target", targets)
    put_targets(reading, "lora_target", "all-linear" if names == ["all"] else names)
    if names == ["all"]:
        note_kinds(reading, "lora_target")
    put_saved(reading, "additional_target")
    drop_used(reading, "use_dora pissa_init")
    if reading.get("pissa_init"):
        drop_used(reading, "pissa_iter pissa_convert")
    put_plus(reading)


def _put_layers(reading: KeyReading) -> None:
    """Sets the trained parameters of ``finetuning_type: freeze``.

    Raises:
        ConfigError: a list of modules has another form.
    """
    keys = ("freeze_trainable_layers", "freeze_trainable_modules")
    count, modules = (reading.get(key) for key in keys)
    fields = fields_of(Path(reading.config["model"]["path"]) / "config.json")
    total = next((fields[name] for name in _LAYERS if isinstance(fields.get(name), int)), None)
    if total is None:
        why = "set train.only: the number of layers is in config.json, which cannot be read"
        reading.drop(keys[0], why)
        return
    layers = range(max(0, total - count), total) if count > 0 else range(min(-count, total))
    names = names_of(reading, keys[1], modules)
    parts = "" if "all" in names else f"(?:{'|'.join(map(re.escape, names))})"
    extra = reading.get("freeze_extra_modules")
    others = [] if not extra else names_of(reading, "freeze_extra_modules", extra)
    if not (layers or others):
        raise reading.refused(keys[0], count, "needs a number of layers other than 0")
    numbers = rf"\.(?:{'|'.join(map(str, layers))})\.{parts}"
    patterns = [*([numbers] if layers else []), *map(re.escape, others)]
    reading.put("train.only", patterns, *keys, *(["freeze_extra_modules"] if others else []))


def _put_precision(reading: KeyReading) -> None:
    for key, dtype in (("pure_bf16", "bf16"), ("bf16", "bf16"), ("fp16", "fp16")):
        if reading.get(key):
            put_precision(reading, dtype, key)
            return
    put_precision(reading, "fp32", "bf16", "fp16")


def _put_sources(reading: KeyReading, *, pairs: bool) -> None:
    """Sets the sources: entries of the registry.

    Raises:
        ConfigError: the file names no data set, or one that does not go with the stage.
    """
    names = _names(reading, "dataset")
    folder, limit = reading.get("dataset_dir"), reading.get("max_samples")
    if folder == "ONLINE" or folder.startswith("REMOTE:"):
        raise reading.refused("dataset_dir", folder, f"needs a local folder with {REGISTRY}")
    registry = Path(folder) / REGISTRY
    bounds = {} if limit is None else {"limit": limit}
    sources = [{"registry": str(registry), "name": name, **bounds} for name in names]
    reading.put("data.sources", sources, "dataset", "dataset_dir")
    if limit is not None:
        reading.map("max_samples", {"data.sources[*].limit": limit})
    entries = entries_of(registry, names)
    for name, entry in entries.items():
        if bool(entry.get("ranking")) is not pairs:
            kind = "with" if pairs else "without"
            remedy = (
                f"stage {reading.get('stage')} takes entries {kind} ranking: true in {REGISTRY}"
            )
            raise reading.refused("dataset", name, remedy)
        if entry.get("formatting") == "openai":
            reading.drop(
                f"{REGISTRY}: {name}.formatting",
                "LLaMA-Factory adds the text `detailed thinking off` to the message of the system"
                " in conversations without tools; put it into the records, or do without it",
                value="openai",
            )
    for name, count in drawn_samples(entries).items():
        reading.drop(
            f"{REGISTRY}: {name}.num_samples",
            "LLaMA-Factory draws the records, and Penstock takes the first",
            value=count,
        )
    if reading.get("mix_strategy") != "concat":
        reading.drop("mix_strategy", "data.sources.weight mixes sources")


def _names(reading: KeyReading, key: str) -> list[str]:
    """Returns the data sets that a key lists.

    Raises:
        ConfigError: the value has another form.
    """
    given = reading.get(key)
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or not names:
        raise reading.refused(key, given, f"needs names of data sets in {REGISTRY}")
    return [name.strip() for name in names]


def drawn_samples(entries: Mapping[str, dict[str, Any]]) -> Mapping[str, Any]:
    """Returns the number of samples by data set, where its entry has one."""
    counts = {name: entry.get("num_samples") for name, entry in entries.items()}
    return {name: count for name, count in counts.items() if count is not None}


def _put_rows(reading: KeyReading, *, pairs: bool) -> None:
    note = "longer samples lose the end; LLaMA-Factory shortens prompts and answers in proportion"
    reading.put("data.sequence_length", reading.get("cutoff_len"), "cutoff_len", note=note)
    reading.put("data.too_long", "truncate", "cutoff_len")
    neat, packs = reading.get("neat_packing"), reading.get("packing")
    if pairs or not (neat or packs):
        reading.put("data.packing", "none", "packing")
    else:
        key = "neat_packing" if neat else "packing"
        reading.put("data.packing", "best-fit", key)
        if not neat:
            reading.drop(
                "packing", "samples in a row see each other without neat_packing; here they do not"
            )
    template = reading.get("template")
    if template == "chatml":
        reading.put("data.chat_template", "chatml", "template")
    elif template is not None:
        reading.put("data.chat_template", "model")
        reading.drop("template", _NO_TEMPLATE)
    put_share(
        reading,
        "val_size",
        "LLaMA-Factory trains on other records, since it draws those that it holds out",
        f'"split": "{{train}}" of the entry in {REGISTRY}, and a set of eval.sets with an entry of'
        ' "split": "{held}"',
    )


def _put_evaluations(reading: KeyReading) -> None:
    """Sets evaluations: on the data sets of ``eval_dataset``, or on the share ``val_size``.

    Raises:
        ConfigError: both are given, or ``eval_dataset`` has no names.
    """
    given, share = reading.get("eval_dataset"), reading.get("val_size")
    if given is not None and share:
        raise reading.refused("val_size", share, "excludes eval_dataset; keep one")
    sets: list[dict[str, Any]] = [OWN_SET] if share and share < 1 else []
    metrics = loss_of("eval")
    if given is not None:
        bounds = {} if reading.get("max_samples") is None else {"limit": reading.get("max_samples")}
        registry = str(Path(reading.get("dataset_dir")) / REGISTRY)
        names = _names(reading, "eval_dataset")
        sets = [
            {"name": set_name(name), "registry": registry, "entry": name, **bounds}
            for name in names
        ]
        if reading.get("eval_on_each_dataset"):
            metrics = {f"{name}_loss": set_name(name) for name in names}
        else:
            metrics = loss_of(set_name(names[0])) if len(names) == 1 else {}
    evaluations = Evaluations(
        sets=sets,
        keys=("eval_dataset", "eval_on_each_dataset") if given is not None else ("val_size",),
        metrics=metrics,
        strategy=strategy_of(reading),
        steps=steps_between(reading),
    )
    every = evaluations.put(reading)
    loads = bool(reading.get("load_best_model_at_end"))
    put_best(reading, evaluations, every, loads=loads, patience="early_stopping_steps")


def _put_smoothing(reading: KeyReading) -> None:
    """Sets the smoothing of labels where a step is one batch: its loss has one divisor then."""
    key = "label_smoothing_factor"
    if not reading.get(key):
        return
    if reading.get("gradient_accumulation_steps") * reading.devices == 1:
        put_smoothing(reading)
    else:
        why = "smoothed losses of a step's batches have means of their own; here they have one"
        reading.drop(key, f"{why}: train.label_smoothing")


def _put_counted(reading: KeyReading) -> None:
    """Sets the tokens that count.

    Raises:
        ConfigError: two keys exclude each other.
    """
    prompt, last = reading.get("train_on_prompt"), reading.get("mask_history")
    if prompt and last:
        raise reading.refused("mask_history", last, "excludes train_on_prompt; keep one")
    value = "all" if prompt else "last" if last else "assistant"
    reading.put("data.train_on", value, "train_on_prompt", "mask_history")
