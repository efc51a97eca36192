"""Keys of transformers' ``TrainingArguments``, which all three trainers pass on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from penstock.client.convert.passes import put_epochs
from penstock.client.convert.reading import KeyReading
from penstock.config.hub_names import fetch_data, fetch_model, hub_name
from penstock.config.splits import Split

OLD: Mapping[str, str] = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "torch_dtype": "dtype",
}
"""Earlier names of keys that mean the same."""

_FILES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt", ".gz", ".zst")
"""Endings of paths that name a file. Its records are the split train."""

REMOTE_CODE = "types that transformers lacks are refused; model.imports names their modules"
NO_QUANTIZATION = "Penstock trains unquantized weights; host memory holds their state"
OWN_PARALLELISM = "Penstock divides model and state by cluster, schedule and memory"
TRACKERS = "observability.trackers names Penstock's trackers"
_NO_CHECKPOINTS = "checkpoints of other trainers are not read; name their model in model.path"
_EVALUATION = "evaluations of eval.sets take batches of their own"
_RECOMPUTE = "schedule.recompute chooses recomputation; unset, Penstock does"

_KEYS: Table = {
    **mapped(ValueKind.NUMBER, num_train_epochs=3.0, warmup_steps=0, warmup_ratio=0.0),
    **mapped(ValueKind.WHOLE, per_device_train_batch_size=8, gradient_accumulation_steps=1),
    **mapped(ValueKind.WHOLE, max_steps=-1, seed=42, save_total_limit=None),
    **mapped(ValueKind.NUMBER, learning_rate=5e-5, weight_decay=0.0),
    "max_grad_norm": Key(default=1.0, kind=ValueKind.NUMBER, empty=True),
    **mapped(ValueKind.NUMBER, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8),
    **mapped(ValueKind.NUMBER, save_steps=500, label_smoothing_factor=0.0),
    **mapped(ValueKind.TEXT, lr_scheduler_type="linear", optim="adamw_torch_fused"),
    **mapped(ValueKind.TEXT, save_strategy="steps", output_dir=None, run_name=None),
    **mapped(ValueKind.MAPPING, lr_scheduler_kwargs=None),
    **mapped(ValueKind.FLAG, bf16=False, fp16=False),
    **mapped(ValueKind.TEXT, train_sampling_strategy="random"),
    **without(Effect.RESULT, "the optimizer's arguments have no place", "optim_args"),
    **without(Effect.RESULT, "train.only chooses parameters", "optim_target_modules"),
    **without(Effect.RESULT, "noise on embeddings is not added", "neftune_noise_alpha"),
    **without(Effect.RESULT, _NO_CHECKPOINTS, "resume_from_checkpoint"),
    **dropped(Effect.RESULT, "the batch of a step must be known", auto_find_batch_size=False),
    **dropped(
        Effect.RESULT,
        "the last incomplete batch of a pass is not left out",
        dataloader_drop_last=False,
    ),
    **dropped(
        Effect.RESULT,
        "a step's loss is the mean over its tokens",
        average_tokens_across_devices=True,
    ),
    **dropped(Effect.RESULT, "rows are drawn by seed, not by length", group_by_length=False),
    **without(Effect.NONE, "run.seed also draws the order of the data", "data_seed"),
    **dropped(Effect.NONE, "steps are repeatable by default", full_determinism=False),
    **dropped(Effect.NONE, "cluster.device chooses the device", use_cpu=False),
    "eval_strategy": Key(default="no"),
    **mapped(ValueKind.NUMBER, eval_steps=None),
    **mapped(ValueKind.FLAG, load_best_model_at_end=False, greater_is_better=None),
    **mapped(ValueKind.TEXT, metric_for_best_model=None),
    **dropped(
        Effect.NONE, "evaluations begin after the first steps", eval_delay=0, eval_on_start=False
    ),
    **without(Effect.NONE, _EVALUATION, "eval_accumulation_steps"),
    **dropped(
        Effect.NONE,
        _EVALUATION,
        per_device_eval_batch_size=8,
        prediction_loss_only=False,
        eval_do_concat_batches=True,
        eval_use_gather_object=False,
        batch_eval_metrics=False,
        bf16_full_eval=False,
        fp16_full_eval=False,
    ),
    **dropped(
        Effect.NONE, "penstock train trains", do_train=False, do_eval=False, do_predict=False
    ),
    **dropped(
        Effect.NONE,
        "Penstock logs every step",
        logging_strategy="steps",
        logging_steps=500,
        logging_first_step=False,
        logging_nan_inf_filter=True,
        log_level="passive",
        log_level_replica="warning",
        log_on_each_node=True,
        disable_tqdm=None,
        include_num_input_tokens_seen="no",
        include_tokens_per_second=False,
        logging_dir=None,
    ),
    **dropped(Effect.NONE, TRACKERS, report_to="none", project="huggingface"),
    **without(Effect.NONE, TRACKERS, "trackio_space_id trackio_bucket_id trackio_static_space_id"),
    **dropped(
        Effect.NONE,
        "penstock export writes the model",
        push_to_hub=False,
        hub_strategy="every_save",
        hub_always_push=False,
        save_only_model=False,
        save_on_each_node=False,
        save_safetensors=True,
        overwrite_output_dir=False,
    ),
    **without(
        Effect.NONE,
        "penstock export writes the model",
        "hub_token hub_private_repo hub_model_id hub_revision",
    ),
    **dropped(
        Effect.NONE,
        "not used in training",
        debug="",
        skip_memory_metrics=True,
        include_for_metrics=[],
        ignore_data_skip=False,
        length_column_name="length",
        restore_callback_states_from_checkpoint=False,
        enable_jit_checkpoint=False,
        dataloader_in_order=True,
    ),
    **without(Effect.RESULT, "the labels are those of the records", "label_names"),
    **dropped(Effect.NONE, "not used in training", use_cache=False, remove_unused_columns=True),
    **without(Effect.SPEED, OWN_PARALLELISM, "deepspeed fsdp fsdp_config parallelism_config"),
    **without(Effect.SPEED, OWN_PARALLELISM, "accelerator_config ddp_backend"),
    **without(
        Effect.SPEED,
        OWN_PARALLELISM,
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph",
    ),
    **dropped(Effect.SPEED, OWN_PARALLELISM, ddp_timeout=1800, local_rank=-1),
    **dropped(Effect.SPEED, _RECOMPUTE, gradient_checkpointing=False),
    **without(
        Effect.SPEED,
        _RECOMPUTE,
        "gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs",
    ),
    **dropped(Effect.SPEED, "model.compile compiles the layers", torch_compile=False),
    **without(
        Effect.SPEED,
        "model.compile compiles the layers",
        "torch_compile_backend torch_compile_mode",
    ),
    **dropped(Effect.SPEED, "kernels of Liger are not used", use_liger_kernel=False),
    **without(Effect.SPEED, "kernels of Liger are not used", "liger_kernel_config"),
    **without(Effect.SPEED, "matrix products of fp32 stay in fp32", "tf32"),
    **without(Effect.SPEED, "Penstock frees memory by itself", "torch_empty_cache_steps"),
    **dropped(
        Effect.SPEED,
        "Penstock reads prepared rows",
        dataloader_num_workers=0,
        dataloader_pin_memory=True,
        dataloader_persistent_workers=False,
    ),
    **without(Effect.SPEED, "Penstock reads prepared rows", "dataloader_prefetch_factor"),
    **without(Effect.SPEED, "Penstock reads prepared rows", "dataloader_multiprocessing_context"),
}
_BATCH = "sequences of a device x steps of accumulation x devices"
TRAINING: Table = placed(
    _KEYS,
    {
        "num_train_epochs": "train.epochs",
        "max_steps": "train.steps",
        "per_device_train_batch_size": "train.global_batch",
        "gradient_accumulation_steps": "train.global_batch",
        "max_grad_norm": "train.clip_grad_norm",
        "label_smoothing_factor": "train.label_smoothing",
        "save_steps": "train.save_every",
        "save_strategy": "train.save_every",
        "save_total_limit": "train.keep_snapshots",
        "eval_steps": "train.eval_every",
        "eval_strategy": "train.eval_every",
        "load_best_model_at_end": "train.keep_best",
        "metric_for_best_model": "train.keep_best train.stop_early",
        "greater_is_better": "train.keep_best train.stop_early",
        "learning_rate": "optimizer.lr",
        "weight_decay": "optimizer.weight_decay",
        "adam_beta1": "optimizer.betas",
        "adam_beta2": "optimizer.betas",
        "adam_epsilon": "optimizer.eps",
        "optim": "optimizer.name optimizer.momentum",
        "lr_scheduler_type": "optimizer.schedule optimizer.curve",
        "lr_scheduler_kwargs": "optimizer.min_lr optimizer.decay_steps optimizer.decay_type",
        "warmup_steps": "optimizer.warmup_steps",
        "warmup_ratio": "optimizer.warmup_steps",
        "bf16": "model.dtype",
        "fp16": "model.dtype",
        "seed": "run.seed",
        "run_name": "run.name",
        "output_dir": "run.dir",
        "train_sampling_strategy": "data.shuffle",
    },
    {
        "per_device_train_batch_size": _BATCH,
        "gradient_accumulation_steps": _BATCH,
        "lr_scheduler_type": "curve transformers has the same rates",
        "load_best_model_at_end": "the loss of a set, such as eval.loss",
    },
)
"""Keys of :class:`transformers.TrainingArguments`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """A trainer's names of keys that differ from those of transformers."""

    batch: str = "per_device_train_batch_size"
    epochs: str = "num_train_epochs"
    optimizer: str = "optim"
    schedule: str = "lr_scheduler_type"


_OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("adamw_torch_xla", "adamw_torch_npu_fused"), "adamw"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("lion_32bit", "paged_lion", "paged_lion_32bit"), "lion"),
    "sgd": "sgd",
}
"""Optimizers with the same arithmetic, by transformers' names."""

_SCHEDULES: Mapping[str, str] = {
    **{"linear": "linear", "cosine": "cosine", "cosine_with_min_lr": "cosine"},
    **{"constant": "constant", "constant_with_warmup": "constant", "warmup_stable_decay": "wsd"},
}
_NO_RATIO = (
    "transformers 5.24 ignores this key; earlier versions warm up in this share of the steps"
)
_RUN_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def put_model(reading: KeyReading, key: str) -> None:
    """Sets ``model.path``.

    Raises:
        ConfigError: the file names no model.
    """
    model = reading.get(key)
    if not model:
        raise reading.refused(key, model, "needs the folder of the model")
    note = ""
    if hub_name(model):
        note = f"fetch the folder: {fetch_model(model)}"
    reading.put("model.path", model, key, note=note)


def put_training(reading: KeyReading, names: Names, warmup: tuple[float, str]) -> None:
    """Sets the keys of run, train and optimizer. ``warmup``: steps, or a share below 1, and the key
    that decides the number.
    """
    _put_run(reading)
    accumulation, batch = "gradient_accumulation_steps", reading.get(names.batch)
    total = batch * reading.get(accumulation) * reading.devices
    note = (
        f"{batch} sequences x {reading.get(accumulation)} steps of accumulation x"
        f" {reading.devices} (--devices)"
    )
    reading.put("train.global_batch", total, names.batch, accumulation, note=note)
    steps = reading.get("max_steps")
    if steps is not None and steps > 0:
        reading.put("train.steps", steps, "max_steps")
        if names.epochs in reading.values:
            reading.drop(names.epochs, "max_steps decides the length", Effect.NONE)
    else:
        put_epochs(reading, names.epochs, batch)
    clip = reading.get("max_grad_norm")
    reading.put("train.clip_grad_norm", float(clip) if clip else None, "max_grad_norm")
    _put_saves(reading)
    _put_optimizer(reading, names.optimizer)
    _put_schedule(reading, names.schedule, warmup)


def warmup_of(reading: KeyReading) -> tuple[float, str]:
    """Returns the steps of warmup, or their share below 1, and the key that decides them."""
    steps = reading.get("warmup_steps")
    if not steps and reading.get("warmup_ratio"):
        return float(reading.get("warmup_ratio")), "warmup_ratio"
    if "warmup_ratio" in reading.values:
        reading.drop("warmup_ratio", "warmup_steps decides", Effect.NONE)
    return (int(steps) if steps >= 1 else steps), "warmup_steps"


def put_precision(reading: KeyReading, dtype: str, *keys: str) -> None:
    """Sets ``model.dtype`` to the type in which devices compute."""
    note = "" if dtype == "fp32" else f"weights are {dtype} with fp32 masters, without autocast"
    reading.put("model.dtype", dtype, *keys, note=note)


def _put_run(reading: KeyReading) -> None:
    name, folder = reading.get("run_name"), reading.get("output_dir")
    if name and _RUN_NAME.fullmatch(name):
        reading.put("run.name", name, "run_name")
    elif name:
        reading.drop("run_name", "run.name takes letters, digits, . _ -", Effect.NONE)
    if folder:
        reading.put("run.dir", folder, "output_dir")
    reading.put("run.seed", reading.get("seed"), "seed", note="draws other numbers than torch's")


def _put_saves(reading: KeyReading) -> None:
    strategy, every = reading.get("save_strategy"), reading.get("save_steps")
    if strategy in (None, "steps") and every is not None and every >= 1:
        reading.put("train.save_every", int(every), "save_steps")
    elif strategy == "no":
        reading.put("train.save_every", 0, "save_strategy")
    elif strategy is not None or every is not None:
        key = "save_strategy" if strategy not in (None, "steps") else "save_steps"
        reading.drop(key, "train.save_every counts steps", Effect.NONE)
    if reading.get("save_total_limit"):
        reading.put("train.keep_snapshots", reading.get("save_total_limit"), "save_total_limit")


def _put_optimizer(reading: KeyReading, key: str) -> None:
    name = _OPTIMIZERS.get(reading.get(key))
    if name is None:
        accepted = ", ".join(_OPTIMIZERS)
        reading.drop(key, f"Penstock has no such optimizer; with a counterpart: {accepted}")
    else:
        reading.put("optimizer.name", name, key)
    reading.put("optimizer.lr", float(reading.get("learning_rate")), "learning_rate")
    if name == "sgd":
        reading.put("optimizer.momentum", 0.0, key)
    else:
        betas = [float(reading.get(beta)) for beta in ("adam_beta1", "adam_beta2")]
        reading.put("optimizer.betas", betas, "adam_beta1", "adam_beta2")
        reading.put("optimizer.eps", float(reading.get("adam_epsilon")), "adam_epsilon")
    reading.put("optimizer.weight_decay", float(reading.get("weight_decay")), "weight_decay")


def put_smoothing(reading: KeyReading) -> None:
    """Sets the smoothing of labels, of the same definition as transformers' ``LabelSmoother``."""
    key, note = "label_smoothing_factor", "losses of evaluations are not smoothed"
    reading.put("train.label_smoothing", float(reading.get(key)), key, note=note)


def _put_schedule(reading: KeyReading, key: str, warmup: tuple[float, str]) -> None:
    name, arguments = reading.get(key), dict(reading.get("lr_scheduler_kwargs") or {})
    schedule = _SCHEDULES.get(name)
    steps, warmup_key = warmup
    if schedule is None:
        reading.drop(key, f"Penstock has no such schedule; it has: {', '.join(_SCHEDULES)}")
    else:
        reading.put("optimizer.schedule", schedule, key)
    reading.put("optimizer.curve", "transformers", key)
    if name == "constant" and steps:
        reading.drop(warmup_key, "transformers' constant schedule has no warmup", Effect.NONE)
        reading.put("optimizer.warmup_steps", 0)
    else:
        late = warmup_key == "warmup_ratio" and key == "lr_scheduler_type"
        reading.put("optimizer.warmup_steps", steps, warmup_key, note=_NO_RATIO if late else "")
    for argument, place, value in _arguments(reading, name, arguments):
        arguments.pop(argument)
        reading.put(place, value, "lr_scheduler_kwargs")
    if arguments:
        reading.drop(
            "lr_scheduler_kwargs",
            f"{name} has no place for {', '.join(arguments)}",
            value=arguments,
        )
    if name == "warmup_stable_decay" and "decay_steps" not in reading.config["optimizer"]:
        reading.drop("lr_scheduler_kwargs", "needs num_decay_steps; set optimizer.decay_steps")


def _arguments(
    reading: KeyReading, schedule: str, arguments: Mapping[str, Any]
) -> list[tuple[str, str, Any]]:
    """Returns arguments of a schedule with place and value in Penstock.

    Raises:
        ConfigError: an argument has another type.
    """
    rate = float(reading.get("learning_rate"))
    placed: list[tuple[str, str, Any]] = []
    for name, value in arguments.items():
        where = f"lr_scheduler_kwargs.{name}"
        match schedule, name:
            case "cosine_with_min_lr", "min_lr":
                number = float(reading.typed(where, ValueKind.NUMBER, value))
                placed.append((name, "optimizer.min_lr", number))
            case ("cosine_with_min_lr", "min_lr_rate") | ("warmup_stable_decay", "min_lr_ratio"):
                share = float(reading.typed(where, ValueKind.NUMBER, value))
                placed.append((name, "optimizer.min_lr", product(rate, share)))
            case "warmup_stable_decay", "num_decay_steps":
                steps = reading.typed(where, ValueKind.WHOLE, value)
                placed.append((name, "optimizer.decay_steps", steps))
            case "warmup_stable_decay", "decay_type" if value in ("cosine", "linear", "1-sqrt"):
                placed.append((name, "optimizer.decay_type", value))
    return placed


def strategy_of(reading: KeyReading) -> str:
    """Returns the value of ``eval_strategy``; YAML 1.1 reads no as false.

    Raises:
        ConfigError: the value is another one.
    """
    strategy = reading.get("eval_strategy")
    if strategy not in ("steps", "epoch", "no", False):
        raise reading.refused("eval_strategy", strategy, "needs steps, epoch or no")
    return strategy or "no"


def steps_between(reading: KeyReading) -> float | None:
    """Returns the steps between evaluations, or their share below 1: those of logs by default."""
    return reading.get("eval_steps") or _number(reading.get("logging_steps"))


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def product(rate: float, share: float) -> float:
    """Returns a share of a rate, without the last digits of its rounding."""
    return float(f"{rate * share:.12g}")


def shuffles(reading: KeyReading) -> None:
    """Sets ``data.shuffle``."""
    strategy = reading.get("train_sampling_strategy")
    if strategy not in ("random", "sequential"):
        reading.drop("train_sampling_strategy", "rows are drawn by seed, not by length")
    reading.put("data.shuffle", strategy != "sequential", "train_sampling_strategy")


def hub_data(reading: KeyReading, key: str, name: str) -> None:
    """Records a data set of the Hub: its files are not on this machine."""
    reading.drop(
        key,
        f"is no local path; run `{fetch_data(name)}`, and check that data.sources names its files",
        value=name,
    )


def is_file(path: str) -> bool:
    """Returns whether a path names a file: its records are the split train."""
    return Path(path).suffix in _FILES


def split_key(reading: KeyReading, key: str, path: str, split: str) -> dict[str, str]:
    """Returns the key ``split`` of a source; none for all records of a file. Records a split that
    a source cannot name.
    """
    if split == "train" and is_file(path):
        return {}
    try:
        Split.parse(split)
    except ValueError as error:
        reading.drop(key, str(error), value=split)
        return {}
    return {"split": split}
