"""Axolotl's ``axolotl train FILE``: supervised fine-tuning, and ``rl`` dpo, orpo and simpo
(Axolotl 0.12).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.client.convert.adapters import (
    NO_DORA,
    NO_EXPERTS,
    NO_REPLICATION,
    NO_START,
    NO_TOKENS,
    NOT_LORA,
    OTHER_KEYS,
    LoraNames,
    drop_used,
    put_excluded,
    put_linear,
    put_path,
    put_patterns,
    put_plus,
    put_saved,
    put_sizes,
    put_unfrozen,
)
from penstock.client.convert.axolotl_datasets import AxolotlEntry
from penstock.client.convert.evaluation import (
    BEST_KEYS,
    OWN_SET,
    Evaluations,
    loss_of,
    put_best,
    put_share,
)
from penstock.client.convert.hugging_face import (
    NO_QUANTIZATION,
    OWN_PARALLELISM,
    REMOTE_CODE,
    TRACKERS,
    TRAINING,
    Names,
    product,
    put_model,
    put_precision,
    put_training,
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
from penstock.client.convert.pairs import AXOLOTL, put_axolotl, trains_on_pairs
from penstock.client.convert.reading import KeyReading

OLD_NAMES: Mapping[str, str] = {"evaluation_strategy": "eval_strategy"}
_NAMES = Names(
    batch="micro_batch_size", epochs="num_epochs", optimizer="optimizer", schedule="lr_scheduler"
)
_LORA = LoraNames(rslora="peft_use_rslora")
_NO_LORA = "adapter is not set"
_REFUSED = (
    "peft_use_dora lora_target_parameters peft peft_init_lora_weights peft_layer_replication"
    " peft_trainable_token_indices peft_ensure_weight_tying peft_autocast_adapter_dtype"
)
_LORA_KEYS = (
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear"),
    *("lora_modules_to_save", "peft_use_rslora", "peft_layers_to_transform", "peft_layers_pattern"),
    *("lora_rank_pattern", "lora_alpha_pattern", "lora_exclude_modules", *_REFUSED.split()),
)
_LORA_KERNELS = "lora_mlp_kernel lora_qkv_kernel lora_o_kernel"
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
    "eval_batch_size eval_sample_packing eval_table_size eval_max_new_tokens do_causal_lm_eval"
    " eval_causal_lm_metrics do_bench_eval"
)
_SPECIAL = "the vocabulary is that of the model, and data.eos ends a document"
_LOGS = "logging_steps gc_steps include_tokens_per_second profiler_steps"

_KEYS: Table = {
    **AXOLOTL,
    **{
        key: TRAINING[key]
        for key in (
            *("gradient_accumulation_steps", "max_steps", "learning_rate", "weight_decay"),
            *("max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon", "save_total_limit"),
            *("save_steps", "save_strategy", "lr_scheduler_kwargs", "seed", "optim_args"),
            *("optim_target_modules", "neftune_noise_alpha", "resume_from_checkpoint"),
            *("auto_find_batch_size", "group_by_length", "eval_steps", *BEST_KEYS),
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
    **mapped(ValueKind.LIST, datasets=None, test_datasets=None),
    **mapped(ValueKind.WHOLE, evals_per_epoch=None, early_stopping_patience=None),
    "eval_strategy": Key(),
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
    "adapter": Key(kind=ValueKind.TEXT, why=NOT_LORA),
    **mapped(ValueKind.WHOLE, lora_r=None),
    **mapped(ValueKind.NUMBER, lora_alpha=None, lora_dropout=0.0, loraplus_lr_ratio=None),
    **mapped(ValueKind.ANY, lora_target_modules=None, lora_modules_to_save=None),
    **mapped(ValueKind.ANY, lora_exclude_modules=None, peft_layers_to_transform=None),
    **mapped(ValueKind.ANY, peft_layers_pattern=None, unfrozen_parameters=None),
    **mapped(ValueKind.MAPPING, lora_rank_pattern=None, lora_alpha_pattern=None),
    **mapped(ValueKind.FLAG, lora_target_linear=None, peft_use_rslora=None),
    **mapped(ValueKind.TEXT, lora_model_dir=None),
    **switched(_NO_LORA, NO_DORA, peft_use_dora=False),
    **switched(_NO_LORA, NO_EXPERTS, lora_target_parameters=None),
    **switched(_NO_LORA, NO_QUANTIZATION, peft=None),
    **switched(_NO_LORA, NO_START, peft_init_lora_weights=True),
    **switched(_NO_LORA, NO_REPLICATION, peft_layer_replication=None),
    **switched(_NO_LORA, NO_TOKENS, peft_trainable_token_indices=None),
    **switched(_NO_LORA, "tied modules are not saved", peft_ensure_weight_tying=False),
    **switched(_NO_LORA, "the optimizer's masters are fp32", peft_autocast_adapter_dtype=True),
    **switched(
        OTHER_KEYS, "optimizer.groups takes lora_embedding_B by name", loraplus_lr_embedding=1e-6
    ),
    **without(Effect.SPEED, "other kernels are used", _LORA_KERNELS),
    **without(Effect.NONE, "the kind of module decides", "lora_fan_in_fan_out"),
    **without(Effect.NONE, "penstock export writes and merges adapters", "merge_lora merge_method"),
    **without(Effect.SPEED, "weights are read block by block", "lora_on_cpu"),
    **without(
        Effect.RESULT,
        "adapters are not merged while they train",
        "relora relora_steps relora_prune_ratio relora_prune_method jagged_restart_steps",
    ),
    **without(Effect.RESULT, NO_QUANTIZATION, "bnb_config_kwargs"),
    **dropped(
        Effect.RESULT, NO_QUANTIZATION, load_in_8bit=False, load_in_4bit=False, gptq=False, fp8=None
    ),
    **mapped(ValueKind.NUMBER, embedding_lr=None, embedding_lr_scale=None),
    **without(Effect.RESULT, "write optimizer.groups, with patterns for names", "lr_groups"),
    **without(
        Effect.RESULT, "the schedule has no such part", "cosine_constant_lr_ratio lr_div_factor"
    ),
    **without(Effect.RESULT, "AdamW has two betas", "adam_beta3 adam_epsilon2"),
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
    **without(Effect.NONE, "evaluations have loss, perplexity and token_accuracy", _EVALUATION),
    **without(Effect.NONE, "train.save_every counts steps", "saves_per_epoch"),
    **without(Effect.NONE, "Penstock resumes by itself", "auto_resume_from_checkpoints"),
    **without(Effect.NONE, "penstock export writes the model", "hub_model_id hub_strategy"),
    **without(Effect.NONE, "penstock export writes the model", "push_dataset_to_hub"),
    **dropped(Effect.NONE, "unused", strict=False, debug=None, loss_watchdog_threshold=None),
    **without(Effect.NONE, "unused", "loss_watchdog_patience"),
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
        "val_set_size": "data.eval_fraction eval.sets",
        "test_datasets": "eval.sets",
        "evals_per_epoch": "train.eval_every",
        "early_stopping_patience": "train.stop_early",
        "cosine_min_lr_ratio": "optimizer.min_lr",
        "embedding_lr": "optimizer.groups",
        "embedding_lr_scale": "optimizer.groups",
        "bfloat16": "model.dtype",
        "float16": "model.dtype",
        "float32": "model.dtype",
        "sample_packing": "data.packing",
        "train_on_inputs": "data.train_on",
        "curriculum_sampling": "data.shuffle",
        "adapter": "adapter.r",
        "lora_r": "adapter.r",
        "lora_alpha": "adapter.alpha",
        "lora_dropout": "adapter.dropout",
        "lora_target_modules": "adapter.targets",
        "lora_target_linear": "adapter.targets",
        "lora_modules_to_save": "adapter.modules_to_save",
        "lora_exclude_modules": "adapter.exclude",
        "lora_rank_pattern": "adapter.rank_pattern",
        "lora_alpha_pattern": "adapter.alpha_pattern",
        "lora_model_dir": "adapter.path adapter.dropout",
        "peft_use_rslora": "adapter.rslora",
        "peft_layers_to_transform": "adapter.exclude",
        "peft_layers_pattern": "adapter.exclude",
        "loraplus_lr_ratio": "optimizer.groups",
        "unfrozen_parameters": "train.only",
    },
    {
        "micro_batch_size": "sequences of a device x steps of accumulation x devices",
        "cosine_min_lr_ratio": "the ratio times optimizer.lr",
        "embedding_lr": "a group with the ratio to optimizer.lr as its rate, without weight decay",
        "embedding_lr_scale": "a group with this rate, without weight decay",
        "sample_packing": "best-fit is true, none is false",
        "early_stopping_patience": "patience, in evaluations",
        "train_on_inputs": "all is true",
        "curriculum_sampling": "false is true",
        "adapter": "the section adapter makes the training one of LoRA",
        "lora_target_linear": "all-linear is true",
        "peft_layers_to_transform": "a regular expression that excludes all other layers",
        "loraplus_lr_ratio": "a group of lora_B with this rate",
    },
    base=TRAINING,
)


def convert(reading: KeyReading) -> None:
    """Fills in the configuration of a file of Axolotl.

    Raises:
        ConfigError: the file is for another training, or has no model, data or rate.
    """
    pairs = trains_on_pairs(reading)
    if reading.get("learning_rate") is None:
        raise reading.refused("learning_rate", None, "needs a number")
    tokens = reading.get("special_tokens")
    if isinstance(tokens, dict) and set(tokens) == {"pad_token"}:
        reading.drop("special_tokens", "padding does not count", Effect.NONE)
    put_model(reading, "base_model")
    if reading.get("tokenizer_config"):
        reading.put("data.tokenizer", reading.get("tokenizer_config"), "tokenizer_config")
    _put_precision(reading)
    _put_sources(reading, pairs=pairs)
    _put_rows(reading)
    _put_template(reading)
    reading.put("data.special_in_text", True)
    _put_batch(reading)
    put_training(reading, _NAMES, _warmup(reading))
    _put_evaluations(reading)
    _put_groups(reading)
    share = reading.get("cosine_min_lr_ratio")
    if share and reading.get("lr_scheduler") == "cosine":
        rate = product(float(reading.get("learning_rate")), share)
        reading.put("optimizer.min_lr", rate, "cosine_min_lr_ratio")
    elif share:
        reading.drop("cosine_min_lr_ratio", "goes with lr_scheduler cosine")
    _put_adapter(reading)
    put_unfrozen(reading, "unfrozen_parameters")
    if pairs:
        put_axolotl(reading)


def _put_adapter(reading: KeyReading) -> None:
    """Sets the section ``adapter``.

    Raises:
        ConfigError: rank, factor or modules are not given, or a value has another form.
    """
    kind = reading.get("adapter")
    if not kind:
        return
    if kind == "qlora":
        reading.drop("adapter", f"{NO_QUANTIZATION}; lora trains the same adapters")
    elif kind != "lora":
        reading.drop("adapter", NOT_LORA)
        return
    folder = reading.get("lora_model_dir")
    switches = ("adapter",) if kind == "lora" else ()
    if folder:
        put_path(reading, "lora_model_dir", folder, _LORA_KEYS)
        if kind == "lora":
            reading.map("adapter", {})
        put_plus(reading)
        return
    if reading.get("lora_alpha") is None:
        raise reading.refused("lora_alpha", None, "needs a number")
    put_sizes(reading, _LORA, reading.get("lora_alpha"), *switches)
    put_linear(reading, "lora_target_modules", "lora_target_linear")
    put_saved(reading, "lora_modules_to_save")
    put_patterns(reading, "lora_rank_pattern", "lora_alpha_pattern")
    put_excluded(reading, "lora_exclude_modules", "peft_layers_to_transform", "peft_layers_pattern")
    drop_used(reading, _REFUSED)
    put_plus(reading)


def _put_groups(reading: KeyReading) -> None:
    """Reads the rate of embeddings and head, which also takes their weight decay away. The scale
    wins over the rate.
    """
    keys = [key for key in ("embedding_lr_scale", "embedding_lr") if reading.get(key)]
    if not keys:
        return
    rate, usual = float(reading.get(keys[0])), float(reading.get("learning_rate"))
    if keys[0] == "embedding_lr" and usual:  # 0 is refused later
        rate /= usual
    group = {"match": ["embed_tokens", "lm_head"], "rate": rate, "weight_decay": 0.0}
    reading.put("optimizer.groups", [group], *keys)


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
    shuffles = reading.get("shuffle_merged_datasets") and not reading.get("curriculum_sampling")
    drawn = "Axolotl trains on other records, since it draws those that it holds out"
    rounded = "Axolotl rounds the number of held-out records up, and Penstock to the nearest one"
    how = "split: {train} of the source, and split: {held} of a set in eval.sets"
    put_share(reading, "val_set_size", drawn if shuffles else rounded, how)


def _put_evaluations(reading: KeyReading) -> None:
    """Sets evaluations: on ``test_datasets``, or on the share ``val_set_size``.

    Raises:
        ConfigError: both are given, or a value has another type.
    """
    tests, share = reading.get("test_datasets"), reading.get("val_set_size")
    if tests and share:
        raise reading.refused("val_set_size", share, "excludes test_datasets; keep one")
    sets: list[dict[str, Any]] = [OWN_SET] if share and share < 1 else []
    if tests:
        entries = [
            AxolotlEntry.of(reading, n, item, "test_datasets") for n, item in enumerate(tests)
        ]
        names = ["eval"] if len(tests) == 1 else [f"eval-{n}" for n in range(1, len(tests) + 1)]
        sets = [
            {"name": name, **entry.source("test")}
            for name, entry in zip(names, entries, strict=True)
        ]
    strategy, steps = _steps(reading) if tests or share else ("no", None)
    evaluations = Evaluations(
        sets=sets,
        keys=("test_datasets",) if tests else ("val_set_size",),
        metrics=loss_of("eval") if len(sets) == 1 else {},
        strategy=strategy,
        steps=steps,
    )
    every = evaluations.put(reading)
    stops, saves = reading.get("early_stopping_patience"), reading.get("save_steps")
    loads = bool(reading.get("load_best_model_at_end") or stops)
    if loads and not (saves and steps and saves % steps == 0):
        loads = False
        if reading.get("load_best_model_at_end"):
            why = "Axolotl loads the best state with save_steps, a multiple of eval_steps, alone"
            reading.drop("load_best_model_at_end", why, Effect.NONE)
    put_best(reading, evaluations, every, loads=loads, patience="early_stopping_patience")


def _steps(reading: KeyReading) -> tuple[str, float | None]:
    """Returns the strategy of evaluations, and their steps or a share of all steps."""
    count, steps = reading.get("evals_per_epoch"), reading.get("eval_steps")
    if count:
        share = 1.0 / (count * float(reading.get("num_epochs")))
        steps = share if share < 1.0 else steps
    strategy = reading.get("eval_strategy")
    if steps:
        return "steps", steps
    return (strategy if strategy in ("steps", "epoch") else "no"), None


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


def _put_sources(reading: KeyReading, *, pairs: bool) -> None:
    """Sets the sources and the tokens that count.

    Raises:
        ConfigError: the file names no data, or a value has another type.
    """
    given, texts = reading.get("datasets"), reading.get("pretraining_dataset")
    if texts and not given and not pairs:
        _put_texts(reading, texts)
        return
    if texts:
        reading.drop("pretraining_dataset", "datasets is given, too; keep one")
    if not given:
        raise reading.refused("datasets", given, "needs a list of data sets")
    sources = [AxolotlEntry.of(reading, number, item).source() for number, item in enumerate(given)]
    reading.put("data.sources", sources, "datasets")
    if not pairs:
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
    sources = [AxolotlEntry.of(reading, n, item, key).texts() for n, item in enumerate(named)]
    reading.put("data.sources", sources)
    reading.put("data.train_on", "all", "train_on_inputs")
    reading.drop(
        key,
        "data.sources names the files, but rows differ: Axolotl leaves out or splits the end of a"
        " long text by other keys, and Penstock trains on all tokens; compare by penstock data",
        value=given,
    )
