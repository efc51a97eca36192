"""Axolotl's ``axolotl train FILE`` for supervised fine-tuning (Axolotl 0.12)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.client.convert.hugging_face import (
    NO_ADAPTERS,
    NO_QUANTIZATION,
    OWN_PARALLELISM,
    REMOTE_CODE,
    TRACKERS,
    TRAINING,
    Names,
    hub_data,
    product,
    put_model,
    put_precision,
    put_training,
    split_key,
)
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
from penstock.config.hub_names import hub_name

OLD_NAMES: Mapping[str, str] = {"evaluation_strategy": "eval_strategy"}
_NAMES = Names(
    batch="micro_batch_size", epochs="num_epochs", optimizer="optimizer", schedule="lr_scheduler"
)
_LORA = (
    "lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear lora_fan_in_fan_out"
    " lora_modules_to_save lora_model_dir peft_use_dora peft_use_rslora lora_mlp_kernel"
    " lora_qkv_kernel lora_o_kernel peft"
)
_WARMUP_SHARE, _MOST_WARMUP = 0.03, 100
"""Axolotl's warmup without a key: a share of the steps, and the most steps."""

_KERNELS = (
    "xformers_attention sdp_attention flex_attention flash_attention eager_attention"
    " attn_implementation flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv"
    " flash_attn_fuse_mlp flash_optimum liger_rope liger_rms_norm liger_glu_activation"
    " liger_swiglu liger_layer_norm liger_fused_linear_cross_entropy liger_cross_entropy"
    " cut_cross_entropy unsloth_cross_entropy_loss unsloth_rms_norm unsloth_rope"
)
_TRACKERS = (
    "wandb_project wandb_entity wandb_watch wandb_name wandb_run_id wandb_log_model wandb_mode"
    " use_wandb mlflow_tracking_uri mlflow_experiment_name mlflow_run_name use_mlflow"
    " use_comet comet_project_name use_tensorboard"
)
_PARALLELISM = (
    "fsdp fsdp_config fsdp_version fsdp_final_state_dict_type deepspeed ddp ddp_timeout"
    " ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters device_map max_memory"
    " gpu_memory_limit sequence_parallel_degree context_parallel_size tensor_parallel_size"
    " dp_shard_size dp_replicate_size heads_k_stride ring_attn_func local_rank world_size"
    " accelerator_config"
)
_EVALUATION = (
    "eval_steps evals_per_epoch eval_strategy eval_batch_size eval_sample_packing"
    " eval_table_size eval_max_new_tokens do_causal_lm_eval eval_causal_lm_metrics do_bench_eval"
    " metric_for_best_model greater_is_better test_datasets"
)
_SPECIAL = "the vocabulary is that of the model, and data.eos ends a document"
_LOGS = "logging_steps gc_steps include_tokens_per_second profiler_steps"

_KEYS: Table = {
    **{
        key: TRAINING[key]
        for key in (
            *("gradient_accumulation_steps", "max_steps", "learning_rate", "weight_decay"),
            *("max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon", "save_total_limit"),
            *("save_steps", "save_strategy", "lr_scheduler_kwargs", "seed", "optim_args"),
            *("optim_target_modules", "neftune_noise_alpha", "resume_from_checkpoint"),
            *("auto_find_batch_size", "group_by_length", "load_best_model_at_end"),
            *(
                "save_only_model",
                "save_safetensors",
                "run_name",
                "output_dir",
                "dataloader_drop_last",
            ),
        )
    },
    **mapped(ValueKind.TEXT, base_model=None, tokenizer_config=None, lr_scheduler="cosine"),
    **mapped(ValueKind.TEXT, optimizer="adamw_torch_fused", output_dir="./model-out"),
    **mapped(ValueKind.TEXT, save_strategy=None, chat_template=None, chat_template_jinja=None),
    **mapped(ValueKind.TEXT, excess_length_strategy="drop"),
    **mapped(ValueKind.LIST, datasets=None),
    **mapped(
        ValueKind.WHOLE, micro_batch_size=1, batch_size=None, max_steps=-1, save_total_limit=4
    ),
    **mapped(ValueKind.WHOLE, sequence_len=512),
    **mapped(
        ValueKind.NUMBER, num_epochs=1.0, learning_rate=None, save_steps=None, val_set_size=0.0
    ),
    **mapped(ValueKind.NUMBER, warmup_steps=None, warmup_ratio=None, cosine_min_lr_ratio=None),
    "bf16": Key(default="auto", empty=True),
    **mapped(ValueKind.NUMBER, max_grad_norm=1.0),
    **mapped(ValueKind.FLAG, fp16=False, bfloat16=False, float16=False, float32=False),
    **mapped(
        ValueKind.FLAG, sample_packing=False, train_on_inputs=False, curriculum_sampling=False
    ),
    **mapped(ValueKind.MAPPING, chat_template_kwargs=None),
    # Data
    **mapped(ValueKind.ANY, pretraining_dataset=None),
    **without(Effect.RESULT, _SPECIAL, "special_tokens tokens added_tokens_overrides eot_tokens"),
    **without(Effect.RESULT, "put it into the template", "default_system_message"),
    **dropped(Effect.RESULT, "duplicates are counted and kept", dataset_exact_deduplication=None),
    **without(Effect.RESULT, "list the files in data.sources", "dataset_shard_num"),
    **without(Effect.RESULT, "list the files in data.sources", "dataset_shard_idx"),
    **without(Effect.NONE, "short samples are kept", "min_sample_len"),
    **dropped(
        Effect.NONE,
        "data.shuffle draws an order for each pass",
        shuffle_merged_datasets=True,
        shuffle_before_merging_datasets=False,
        sample_packing_sequentially=None,
    ),
    **without(Effect.SPEED, "prepared data are cached", "dataset_prepared_path"),
    **without(Effect.SPEED, "all cores prepare the data", "dataset_processes dataset_num_proc"),
    **without(Effect.SPEED, "prepared rows are read", "dataset_keep_in_memory streaming"),
    **without(Effect.SPEED, "prepared rows are read", "dataloader_num_workers"),
    **without(Effect.SPEED, "prepared rows are read", "dataloader_pin_memory"),
    **without(Effect.SPEED, "prepared rows are read", "dataloader_prefetch_factor"),
    **without(
        Effect.SPEED,
        "rows are packed by best fit",
        "sample_packing_group_size sample_packing_bin_size multipack_real_batches"
        " pad_to_sequence_len batch_flattening",
    ),
    # Model
    **without(
        Effect.NONE,
        "the model's folder decides",
        "model_type tokenizer_type base_model_config is_falcon_derived_model tokenizer_use_fast"
        " is_llama_derived_model is_mistral_derived_model is_qwen_derived_model tokenizer_legacy"
        " hf_use_auth_token processor_type low_cpu_mem_usage",
    ),
    **dropped(Effect.NONE, REMOTE_CODE, trust_remote_code=False),
    **without(Effect.RESULT, "fetch it by hf download MODEL --revision", "revision_of_model"),
    **without(Effect.RESULT, NO_ADAPTERS, "adapter relora relora_steps"),
    **without(Effect.NONE, "adapter is not set", _LORA, used=NO_ADAPTERS),
    **dropped(
        Effect.RESULT, NO_QUANTIZATION, load_in_8bit=False, load_in_4bit=False, gptq=False, fp8=None
    ),
    **without(Effect.RESULT, "train.freeze names frozen parameters", "unfrozen_parameters"),
    **without(Effect.RESULT, "parameters share a rate", "lr_groups embedding_lr"),
    **without(Effect.RESULT, "parameters share a rate", "embedding_lr_scale"),
    **without(
        Effect.RESULT, "the schedule has no such part", "cosine_constant_lr_ratio lr_div_factor"
    ),
    **without(Effect.RESULT, "AdamW has two betas", "adam_beta3 adam_epsilon2"),
    **without(Effect.RESULT, "the run does not end early", "early_stopping_patience"),
    **without(Effect.RESULT, "its effect is unknown", "plugins"),
    **dropped(
        Effect.RESULT,
        "the model's folder decides",
        resize_token_embeddings_to_32x=False,
        shrink_embeddings=None,
    ),
    # Speed and reports
    **without(Effect.SPEED, OWN_PARALLELISM, _PARALLELISM),
    **without(Effect.SPEED, "model.attention chooses kernels", _KERNELS),
    **without(Effect.SPEED, "model.compile compiles the layers", "torch_compile"),
    **without(Effect.SPEED, "model.compile compiles the layers", "torch_compile_backend"),
    **without(Effect.SPEED, "matrix products of fp32 stay in fp32", "tf32"),
    **dropped(
        Effect.SPEED, "schedule.recompute chooses recomputation", gradient_checkpointing=False
    ),
    **without(
        Effect.SPEED,
        "schedule.recompute chooses recomputation",
        "gradient_checkpointing_kwargs activation_offloading",
    ),
    **without(Effect.NONE, TRACKERS, _TRACKERS),
    **without(Effect.NONE, "Penstock logs every step", _LOGS),
    **dropped(Effect.NONE, "name the file in data.eval_path", **dict.fromkeys(_EVALUATION.split())),
    **without(Effect.NONE, "train.save_every counts steps", "saves_per_epoch"),
    **without(Effect.NONE, "Penstock resumes by itself", "auto_resume_from_checkpoints"),
    **without(Effect.NONE, "penstock export writes the model", "hub_model_id hub_strategy"),
    **without(Effect.NONE, "penstock export writes the model", "push_dataset_to_hub"),
    **dropped(Effect.NONE, "unused", strict=False, debug=None, loss_watchdog_threshold=None),
    **without(Effect.NONE, "unused", "loss_watchdog_patience"),
    "rl": Key(kind=ValueKind.TEXT, why="only supervised fine-tuning is trained"),
}
TABLE = placed(
    _KEYS,
    {
        "base_model": "model.path",
        "tokenizer_config": "data.tokenizer",
        "lr_scheduler": "optimizer.schedule optimizer.curve",
        "optimizer": "optimizer.name optimizer.momentum",
        "chat_template": "data.chat_template",
        "chat_template_jinja": "data.chat_template",
        "chat_template_kwargs": "data.chat_template_kwargs",
        "excess_length_strategy": "data.too_long",
        "datasets": "data.sources",
        "pretraining_dataset": "data.sources",
        "micro_batch_size": "train.global_batch",
        "batch_size": "train.global_batch",
        "sequence_len": "data.sequence_length",
        "num_epochs": "train.epochs",
        "val_set_size": "data.eval_fraction",
        "cosine_min_lr_ratio": "optimizer.min_lr",
        "bfloat16": "model.dtype",
        "float16": "model.dtype",
        "float32": "model.dtype",
        "sample_packing": "data.packing",
        "train_on_inputs": "data.train_on",
        "curriculum_sampling": "data.shuffle",
    },
    {
        "micro_batch_size": "sequences of a device x steps of accumulation x devices",
        "cosine_min_lr_ratio": "the ratio times optimizer.lr",
        "sample_packing": "best-fit is true, none is false",
        "train_on_inputs": "all is true",
        "curriculum_sampling": "false is true",
    },
    base=TRAINING,
)

_PROPERTIES: Mapping[str, tuple[str, ...]] = {
    "message_field_role": ("role",),
    "message_field_content": ("content",),
}
_ROLES: Mapping[str, tuple[str, ...]] = {
    "user": ("human", "user"),
    "assistant": ("gpt", "assistant"),
    "system": ("system",),
    "tool": ("tool",),
}


def convert(reading: KeyReading) -> None:
    """Fills in the configuration of a file of Axolotl.

    Raises:
        ConfigError: the file is for another training, or has no model, data or rate.
    """
    if reading.get("rl"):
        raise reading.refused("rl", reading.get("rl"), "only supervised fine-tuning is converted")
    if reading.get("learning_rate") is None:
        raise reading.refused("learning_rate", None, "needs a number")
    tokens = reading.get("special_tokens")
    if isinstance(tokens, dict) and set(tokens) == {"pad_token"}:
        reading.drop("special_tokens", "padding does not count", Effect.NONE)
    put_model(reading, "base_model")
    if reading.get("tokenizer_config"):
        reading.put("data.tokenizer", reading.get("tokenizer_config"), "tokenizer_config")
    _put_precision(reading)
    _put_sources(reading)
    _put_rows(reading)
    _put_template(reading)
    _put_batch(reading)
    put_training(reading, _NAMES, _warmup(reading))
    share = reading.get("cosine_min_lr_ratio")
    if share and reading.get("lr_scheduler") == "cosine":
        rate = product(float(reading.get("learning_rate")), share)
        reading.put("optimizer.min_lr", rate, "cosine_min_lr_ratio")
    elif share:
        reading.drop("cosine_min_lr_ratio", "goes with lr_scheduler cosine")
    if reading.get("adapter"):
        for name in _LORA.split():
            if name in reading.values:
                reading.drop(name, TABLE[name].used)


def _put_precision(reading: KeyReading) -> None:
    for key, dtype in (("bfloat16", "bf16"), ("float16", "fp16")):
        if reading.get(key):
            put_precision(reading, dtype, key)
            return
    bf16 = reading.get("bf16") or False
    if bf16 not in (True, False, "auto", "full", "true", "false"):
        raise reading.refused("bf16", bf16, "needs true, false, auto or full")
    if bf16 == "auto" and (reading.get("fp16") or reading.get("float32")):
        bf16 = False
    if bf16 not in (False, "false"):
        put_precision(reading, "bf16", "bf16")
    elif reading.get("fp16"):
        put_precision(reading, "fp16", "fp16", "bf16")
    else:
        put_precision(reading, "fp32", "bf16", "fp16", "float32")


def _put_batch(reading: KeyReading) -> None:
    """Reads ``batch_size``, the batch of a device over all its steps of accumulation.

    Raises:
        ConfigError: the batch is no multiple of the micro-batch.
    """
    batch, micro = reading.get("batch_size"), reading.get("micro_batch_size")
    if batch is None:
        return
    if "gradient_accumulation_steps" in reading.values:
        reading.drop("batch_size", "gradient_accumulation_steps decides", Effect.NONE)
        return
    if micro < 1 or batch % micro:
        raise reading.refused("batch_size", batch, f"needs a multiple of micro_batch_size {micro}")
    reading.values = {**reading.values, "gradient_accumulation_steps": batch // micro}
    reading.map("batch_size", {"train.global_batch": batch * reading.devices})


def _warmup(reading: KeyReading) -> tuple[float, str]:
    """Returns the steps of warmup, or their share below 1, and the key that decides them."""
    steps, share, total = (reading.get(k) for k in ("warmup_steps", "warmup_ratio", "max_steps"))
    if steps is not None:
        if share is not None:
            reading.drop("warmup_ratio", "warmup_steps decides", Effect.NONE)
        return (int(steps) if steps >= 1 else steps), "warmup_steps"
    if total is not None and total > 0:
        bound = total if share is not None else _MOST_WARMUP
        count = min(int((share if share is not None else _WARMUP_SHARE) * total), bound)
        return (2 if count == 1 else count), "warmup_steps" if share is None else "warmup_ratio"
    if share is not None:
        return float(share), "warmup_ratio"
    reading.map(
        "warmup_steps",
        {},
        f"a share of {_WARMUP_SHARE}; Axolotl also has a limit of {_MOST_WARMUP} steps",
    )
    return _WARMUP_SHARE, "warmup_steps"


def _put_rows(reading: KeyReading) -> None:
    reading.put("data.sequence_length", reading.get("sequence_len"), "sequence_len")
    packs = "best-fit" if reading.get("sample_packing") else "none"
    texts = reading.get("pretraining_dataset") and not reading.get("datasets")
    reading.put("data.packing", "best-fit" if texts else packs, "sample_packing")
    if texts:
        reading.put("data.too_long", "split")
        reading.put("data.shuffle", not reading.get("curriculum_sampling"), "curriculum_sampling")
        return
    strategies = {"drop": "drop", "truncate": "truncate", "raise": "refuse"}
    strategy = reading.get("excess_length_strategy")
    if strategy not in strategies:
        raise reading.refused("excess_length_strategy", strategy, "needs drop, truncate or raise")
    reading.put("data.too_long", strategies[strategy], "excess_length_strategy")
    reading.put("data.shuffle", not reading.get("curriculum_sampling"), "curriculum_sampling")
    share = reading.get("val_set_size")
    if not share:
        return
    steps = reading.values.get("eval_steps")
    if share < 1 and isinstance(steps, int) and steps > 0:
        reading.put("data.eval_fraction", share, "val_set_size", note="takes the last samples")
        reading.put("train.eval_every", steps, "eval_steps")
    else:
        reading.drop("val_set_size", "set data.eval_fraction and train.eval_every")


def _put_template(reading: KeyReading) -> None:
    name, text = reading.get("chat_template"), reading.get("chat_template_jinja")
    if text is not None and name in (None, "jinja"):
        if text.endswith((".jinja", ".jinja2", ".j2")) and "\n" not in text:
            reading.put("data.chat_template", text, "chat_template_jinja")
        else:
            reading.drop(
                "chat_template_jinja", "write it to a file; name that in data.chat_template"
            )
    elif name == "chatml":
        reading.put("data.chat_template", "chatml", "chat_template")
    elif name in (None, "tokenizer_default"):
        reading.put("data.chat_template", "model", "chat_template")
    else:
        reading.drop("chat_template", "use the model's template, chatml or a file")
    if reading.get("chat_template_kwargs"):
        variables = reading.get("chat_template_kwargs")
        reading.put("data.chat_template_kwargs", variables, "chat_template_kwargs")


def _put_sources(reading: KeyReading) -> None:
    """Sets the sources and the tokens that count.

    Raises:
        ConfigError: the file names no data, or a value has another type.
    """
    given, texts = reading.get("datasets"), reading.get("pretraining_dataset")
    if texts and not given:
        _put_texts(reading, texts)
        return
    if texts:
        reading.drop("pretraining_dataset", "datasets is given, too; keep one")
    if not given:
        raise reading.refused("datasets", given, "needs a list of data sets")
    sources = [_Dataset.of(reading, number, item).source() for number, item in enumerate(given)]
    reading.put("data.sources", sources, "datasets")
    value = "all" if reading.get("train_on_inputs") else "auto"
    reading.put("data.train_on", value, "train_on_inputs")


def _put_texts(reading: KeyReading, given: Any) -> None:
    """Sets the sources of ``pretraining_dataset``: a path, a mapping, or a list of both.

    Raises:
        ConfigError: an entry names no data, or a value has another type.
    """
    key = "pretraining_dataset"
    items = given if isinstance(given, list) else [given]
    named = [{"path": item} if isinstance(item, str) else item for item in items]
    sources = [_Dataset.of(reading, n, item, key).texts() for n, item in enumerate(named)]
    reading.put("data.sources", sources)
    reading.put("data.train_on", "all", "train_on_inputs")
    reading.drop(
        key,
        "data.sources names the files, but rows differ: Axolotl leaves out or splits the end of a"
        " long text by other keys, and Penstock trains on all tokens; compare by penstock data",
        value=given,
    )


class _Dataset:
    """An entry of ``datasets``. Each key is removed when it is read."""

    def __init__(self, reading: KeyReading, place: str, fields: dict[str, Any]) -> None:
        self._reading, self._place, self._fields = reading, place, fields

    @classmethod
    def of(cls, reading: KeyReading, number: int, item: Any, key: str = "datasets") -> _Dataset:
        """Returns an entry of the list ``key``.

        Raises:
            ConfigError: the entry is no mapping.
        """
        place = f"{key}[{number}]"
        fields = reading.typed(place, ValueKind.MAPPING, item)
        return cls(reading, place, {k: v for k, v in fields.items() if v is not None})

    def source(self) -> dict[str, Any]:
        """Returns the source, and drops the keys that have no place.

        Raises:
            ConfigError: the entry has no path, or a value has another type.
        """
        split = self._take("split", ValueKind.TEXT) or "train"
        source: dict[str, Any] = {"path": self._path()}
        source |= split_key(self._reading, f"{self._place}.split", source["path"], split)
        kind = self._fields.pop("type", None)
        match kind:
            case "chat_template":
                source |= {"format": "chat", **self._chat()}
            case "alpaca":
                source["format"] = "stanford"
            case "completion":
                source["format"] = "text"
                self._drop("type", kind, "Axolotl splits long texts; set data.too_long: split")
                if (column := self._take("field", ValueKind.TEXT)) is not None:
                    source["columns"] = {"text": column}
            case None:
                source["format"] = "tokens"
            case _:
                self._drop(
                    "type",
                    kind,
                    "only chat_template, alpaca, completion and prepared tokens (no type) are"
                    " converted",
                )
        return self._finished(source)

    def texts(self) -> dict[str, Any]:
        """Returns the source of texts, and drops the keys that have no place.

        Raises:
            ConfigError: the entry has no path, or a value has another type.
        """
        source: dict[str, Any] = {"path": self._path(), "format": "text"}
        if (column := self._take("text_column", ValueKind.TEXT)) not in (None, "text"):
            source["columns"] = {"text": column}
        if self._fields.get("type") in ("pretrain", "completion"):
            self._fields.pop("type")
        return self._finished(source)

    def _finished(self, source: dict[str, Any]) -> dict[str, Any]:
        """Returns the source, and drops the keys that are left."""
        for key, value in self._fields.items():
            self._drop(key, value, "the key has no place in data.sources")
        return source

    def _path(self) -> str:
        path: str = self._take("path", ValueKind.TEXT) or ""
        files = self._fields.pop("data_files", None)
        self._take("ds_type", ValueKind.TEXT)
        if isinstance(files, list) and len(files) == 1:
            files = files[0]
        if not path:
            raise self._reading.refused(self._place, self._fields, "needs a path")
        if isinstance(files, str) and path in ("json", "csv", "parquet", "text", "arrow"):
            return files
        if files is not None:
            self._drop("data_files", files, "list each file as a source")
        elif hub_name(path):
            hub_data(self._reading, f"{self._place}.path", path)
        return path

    def _chat(self) -> dict[str, Any]:
        """Returns columns and roles of a conversation."""
        columns: dict[str, str | None] = {"conversations": None}
        columns["messages"] = self._take("field_messages", ValueKind.TEXT) or "messages"
        if (tools := self._take("field_tools", ValueKind.TEXT)) is not None:
            columns["tools"] = tools
        keys = {"role": "role", "content": "content"}
        for name, targets in _PROPERTIES.items():
            keys |= dict.fromkeys(targets, self._take(name, ValueKind.TEXT) or keys[targets[0]])
        mapping = self._take("message_property_mappings", ValueKind.MAPPING) or {}
        others = {name: key for name, key in mapping.items() if name not in keys and name != key}
        if others:
            self._drop("message_property_mappings", others, "only role and content are renamed")
        keys |= {
            name: self._reading.typed(f"{self._place}.{name}", ValueKind.TEXT, mapping[name])
            for name in keys
            if name in mapping
        }
        self._counted()
        if self._fields.get("chat_template") == "tokenizer_default" and (
            self._reading.get("chat_template") in (None, "tokenizer_default")
        ):
            self._fields.pop("chat_template")
        elif self._fields.get("chat_template") == self._reading.get("chat_template"):
            self._fields.pop("chat_template", None)
        return {"columns": {**columns, **keys}, "roles": self._roles()}

    def _roles(self) -> dict[str, str]:
        given = self._take("roles", ValueKind.MAPPING)
        roles: dict[str, str] = {}
        for target, names in (_ROLES if given is None else given).items():
            place = f"{self._place}.roles.{target}"
            listed = [names] if isinstance(names, str) else names
            if not isinstance(listed, list | tuple):
                raise self._reading.refused(place, names, "needs a list of roles")
            roles |= {
                self._reading.typed(place, ValueKind.TEXT, name): str(target) for name in listed
            }
        return roles

    def _counted(self) -> None:
        """Takes keys of the tokens that count, where they have Axolotl's defaults."""
        defaults: Mapping[str, tuple[Any, ...]] = {
            "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]),
            "train_on_eos": ("turn",),
            "message_field_training": ("train", "weight"),
        }
        for key, values in defaults.items():
            if self._fields.get(key) in values:
                self._fields.pop(key)

    def _take(self, key: str, kind: ValueKind) -> Any:
        value = self._fields.pop(key, None)
        return None if value is None else self._reading.typed(f"{self._place}.{key}", kind, value)

    def _drop(self, key: str, value: Any, why: str) -> None:
        effect = Effect.NONE if key == "trust_remote_code" and value is False else Effect.RESULT
        self._reading.drop(f"{self._place}.{key}", why, effect, value=value)
