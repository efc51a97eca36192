"""Compares the configuration of a resume with that of the run, and refuses changes that the run
cannot take.

A resume keeps its plan even if a search would now choose another one. ``resolved.yaml`` therefore
holds the schedule that ``schedule: auto`` chose, and ``search.json`` the search constraints. The
choice is kept until one of its inputs changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.execution import ScheduleConfig
from penstock.config.reading import read_mapping
from penstock.config.schema import Config
from penstock.config.values import AUTO, CHOSEN_LATER
from penstock.host.errors import ConfigError, StateError
from penstock.host.files import DAMAGED, holds_text, parse_json, write_atomically
from penstock.planner.planning.auto import describe, search_constraints, searched_keys, settings_of
from penstock.protocol.plan.step import STEP_TERMS
from penstock.protocol.run.checksums import check_object, with_checksum

FIXED = {
    "run.seed": "the order of the data depends on it",
    "model": "the saved state belongs to the old model",
    "data": "the run's place in the data counts sequences of the old data",
    "adapter": "it decides which tensors there are, and their factors",
    **dict.fromkeys(
        ("train.freeze", "train.only"), "it decides which parameters have an optimizer state"
    ),
    "optimizer.name": "the saved moments belong to the old optimizer",
    "optimizer.grad_dtype": "it is part of the saved block table",
    "optimizer.rollback": "it decides which tensors the memory of the run holds",
    "optimizer.curve": "the steps so far have the rates of the old curve",
    "emulation.scale": "it decides how much of each block is saved",
}
"""Keys (and all keys below them) that saved state or data order depend on, and how."""

FREE = (
    *("data.eval_path", "data.passes", "data.cache_limit"),
    *("model.attention", "model.compile", "model.import_path", "adapter.dropout"),
)
"""Exceptions to :data:`FIXED`."""


SPLITTING = ("train.eval_every", "data.eval_path", "eval.sets")
"""Free as long as they hold out as much of the training text as before: the data order depends on
how many sequences there are.
"""


_NEXT = "from the next step on; earlier state is unchanged"
_CURVE = "the learning rate follows the new curve from the next step on"
_PLACE = "the run continues at its place in the data"
_COMPILED = "compiled layers may round differently from the next step on"
_ROUNDING = "layers round differently from the next step on"
NOTES = {
    **dict.fromkeys(STEP_TERMS, _NEXT),
    "optimizer.lr": _CURVE,
    "optimizer.schedule": _CURVE,
    "optimizer.warmup_steps": _CURVE,
    "optimizer.decay_steps": _CURVE,
    "optimizer.decay_type": _CURVE,
    "optimizer.min_lr": _CURVE,
    "train.steps": _CURVE,
    "train.epochs": _CURVE,
    "train.clip_grad_norm": "from the next step on",
    "train.loss_mean": "the loss is the new mean from the next step on",
    "train.label_smoothing": "losses are smoothed so from the next step on",
    "adapter.dropout": _NEXT,
    "model.attention": _ROUNDING,
    "model.compile": _ROUNDING,
    "schedule.recompute": _COMPILED,
    "schedule.drop": _COMPILED,
    "train.global_batch": _PLACE,
    "train.micro_batch": _PLACE,
}
"""Consequences of allowed changes that the key alone does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A key with two values. ``allowed``: the run can continue with the new value. ``note``: the
    consequence, or the reason for the refusal.
    """

    key: str
    old: Any
    new: Any
    allowed: bool
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.key}: {self.old!r} -> {self.new!r}{note}"


def resume_rule(key: str) -> str:
    """Returns what a resume may do with a key, in words for documents; ``[]`` marks the keys of a
    list.
    """
    key = key.partition("[]")[0]
    if key in SPLITTING:
        rule = "may change as long as it holds out as much of the training text as before"
        return f"{rule}; other data of a set need another name" if key == "eval.sets" else rule
    if key == "cluster.device":
        return "may change between real devices; an emulated one brings its model"
    if objection := _objection(key):
        return f"must not change: {objection}"
    note = NOTES.get(key, "")
    return f"may change: {note}" if note else "may change"


def find_changes(old: Config, new: Config) -> tuple[Change, ...]:
    """Returns all keys with different values, in the order of the configuration."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    same_split = _held_out(old) == _held_out(new)
    # Where the device brings its model, another device would be another model.
    builtin_model = any(config.cluster.platform.builtin_model for config in (old, new))
    changes = []
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) == after.get(key):
            continue
        objection = _objection(key)
        if not same_split and key in SPLITTING:
            objection = "it changes how many sequences are held out of the training text"
        elif key == "eval.sets":
            objection = _other_data(old, new)
        if key == "cluster.device" and builtin_model:
            objection = "an emulated device brings its model"
        allowed = not objection
        note = NOTES.get(key, "") if allowed else objection
        if key in ("train.steps", "train.epochs") and new.optimizer.schedule == "constant":
            note = ""
        change = Change(
            key=key, old=before.get(key), new=after.get(key), allowed=allowed, note=note
        )
        changes.append(change)
    return tuple(changes)


def fixed_values(config: Config) -> dict[str, Any]:
    """Returns key -> value of every key that a resume must not change."""
    flat = _flat(config.model_dump(mode="json"))
    return {key: value for key, value in flat.items() if _objection(key)}


def edited_keys(fixed: Mapping[str, Any], config: Config) -> list[str]:
    """Returns every fixed key with its old and new value, where they differ.

    ``fixed``: an earlier result of :func:`fixed_values`. Another version of Penstock, with other
    keys, may have made it.
    """
    now = fixed_values(config)
    return [
        f"{key}: {value!r} -> {now[key]!r}"
        for key, value in fixed.items()
        if key in now and now[key] != value
    ]


def check_resume(changes: tuple[Change, ...], run_dir: Path, held: int | None) -> None:
    """Refuses another model, other data or another optimizer. Refuses other step terms while the
    run's memory may hold a step that used the old ones. ``held``: the step that the memory is at.

    Raises:
        ConfigError: names every such key with its old and new value.
    """
    refused = [str(change) for change in changes if not change.allowed]
    if refused:
        raise ConfigError(
            f"{run_dir} holds a run that was started with other values of keys that cannot change:"
            f" {'; '.join(refused)}. Restore them, or start a new run in another run.dir"
        )
    unsettled = [change.key for change in changes if change.key in STEP_TERMS]
    if unsettled and held is not None:
        raise ConfigError(
            f"{', '.join(unsettled)}: cannot change now. The run was killed, and its memory, at"
            f" step {held}, holds a step that was decided with the old values and must be completed"
            " with them. Resume with the old values first; they may change after the run has saved,"
            " at its end or after Ctrl-C"
        )


Constraints = Mapping[str, Any]
"""The keys that restricted a search, with their values."""

_RECORD = "search.json"
"""The constraints of the search that chose a run's schedule, and that schedule.

The schedule makes a crash between two writes harmless. If ``resolved.yaml`` has another schedule,
the schedule is the user's own, or a start was broken off. Runs of older versions have the
constraints in ``resolved.yaml``, as ``schedule.asked``.
"""
_RECORD_FORMAT = 1
_OLD_KEY = "asked"


def read_constraints(run_dir: Path, schedule: ScheduleConfig) -> Mapping[str, Any] | None:
    """Returns the constraints of the search that chose ``schedule``, that of the run until now;
    None if no search chose it.

    Raises:
        StateError: the record is damaged.
        ConfigError: ``resolved.yaml`` cannot be read.
    """
    path = run_dir / _RECORD
    if path.exists():
        try:
            fields = parse_json(path.read_bytes())
            check_object(fields, str(path))
            constraints = dict(fields["constraints"])
            chosen = dict(fields["schedule"])
        except (OSError, *DAMAGED) as error:
            raise StateError(
                f"{path}: cannot be read ({error}); delete it, and schedule: auto searches again"
            ) from error
        if chosen == searched_keys(schedule):
            return constraints
    section = read_mapping(run_dir / "resolved.yaml").value.get("schedule")
    old = section.get(_OLD_KEY) if isinstance(section, dict) else None
    return old if isinstance(old, dict) else None


def write_constraints(
    run_dir: Path, schedule: ScheduleConfig, constraints: Mapping[str, Any] | None
) -> None:
    """Writes the constraints of the search that chose ``schedule``; nothing if they are None."""
    if constraints is None:
        return
    fields = {
        "format": _RECORD_FORMAT,
        "constraints": dict(constraints),
        "schedule": searched_keys(schedule),
    }
    text = json.dumps(with_checksum(fields), indent=1)
    if not holds_text(run_dir / _RECORD, text):
        write_atomically(run_dir / _RECORD, text)


def keep_defaults(
    config: Config, previous: Config | None, constraints: Constraints | None
) -> Config:
    """Returns the configuration with ``auto`` where that is the default. A run that was prepared
    with a schedule and a micro-batch that no search chose keeps both.

    ``previous``: the run's configuration until now, ``None`` for a new run. ``constraints``: those
    of the search that chose its schedule, if one did.
    """
    defaulted = config.with_defaults()
    if previous is None or previous.chooses or constraints is not None:
        return defaulted
    changed = {
        name: getattr(previous, name)
        for name in ("schedule", "train")
        if getattr(defaulted, name) != getattr(config, name)
    }
    if "train" in changed and config.train.global_batch % previous.train.micro_batch:
        return defaulted
    if "train" in changed:
        micro_batch = previous.train.micro_batch
        changed["train"] = config.train.model_copy(update={"micro_batch": micro_batch})
    return config.model_copy(update=changed)


def keep_recomputation(
    config: Config, previous: Config | None, constraints: Constraints | None
) -> Config:
    """Returns the configuration with the run's current recomputation, if the user sets none. Layers
    that drop operators run uncompiled, so bits depend on it. Another scheme, a schedule file and a
    search bring their own recomputation.
    """
    schedule, unset = config.schedule, {"recompute", "drop"} - config.schedule.model_fields_set
    if previous is None or schedule.scheme == AUTO or constraints is not None:
        return config
    before = previous.schedule
    if (schedule.scheme, schedule.file) != (before.scheme, before.file) or len(unset) < 2:
        return config
    kept = schedule.model_copy(update={"recompute": before.recompute, "drop": before.drop})
    return config.model_copy(update={"schedule": kept})


def keep_micro_batch(
    config: Config, previous: Config | None, progress: Callable[[str], None], *, started: bool
) -> Config:
    """Returns the configuration with the run's current micro-batch, if it is ``auto``.

    A run that has ``started`` always keeps the micro-batch, because its bits depend on it. A run
    that has not keeps it while the inputs of the choice are unchanged.
    """
    if config.train.micro_batch != CHOSEN_LATER or previous is None or previous.chooses:
        return config
    size = previous.train.micro_batch
    kept = config.with_micro_batch(size)
    if config.train.global_batch % size or not (started or _deciding(kept) == _deciding(previous)):
        return config
    progress(f"train.micro_batch: auto keeps this run's micro-batch: {size}")
    return kept


def keep_choice(
    config: Config,
    previous: Config | None,
    constraints: Constraints | None,
    progress: Callable[[str], None],
) -> Config:
    """Returns the configuration with the schedule that ``auto`` chose for the run before, if the
    constraints are the same. Arguments as :func:`keep_defaults`.
    """
    if config.schedule.scheme != AUTO or previous is None or constraints is None:
        return config
    before, after = _deciding(previous), _deciding(config)
    before["schedule"], after["schedule"] = constraints, search_constraints(config.schedule)
    differing = [key for key in after if before[key] != after[key]]
    if differing:
        words = "; ".join(f"{key}: {before[key]!r} -> {after[key]!r}" for key in differing)
        progress(f"schedule: auto chooses again, because of {words}")
        return config
    progress(
        f"schedule: auto keeps what it chose for this run: {describe(previous.schedule)} (for a new"
        " search give another run.dir, or say the schedule)"
    )
    schedule = previous.schedule.model_copy(update=settings_of(config.schedule))
    return config.model_copy(update={"schedule": schedule})


def _deciding(config: Config) -> dict[str, Any]:
    """Returns the inputs of the choice, except for the schedule's own keys."""
    emulation = config.emulation.model_dump(mode="json", exclude={"scale", "time_scale"})
    return {
        "cluster.workers": config.cluster.workers,
        "cluster.nodes": len(config.cluster.nodes),
        "cluster.device": config.cluster.device,
        "memory": config.memory.model_dump(),
        "train.global_batch": config.train.global_batch,
        "train.micro_batch": config.train.micro_batch or AUTO,
        "data.sequence_length": config.data.sequence_length,
        "model": config.model.model_dump(mode="json"),
        "optimizer.grad_dtype": config.optimizer.grad_dtype.value,
        "emulation": emulation,
    }


def _held_out(config: Config) -> bool:
    """Returns whether the last sequences of the training text are kept for evaluation."""
    return config.holds_out and config.data.eval_path is None


def _other_data(old: Config, new: Config) -> str:
    """Returns why sets of evaluations cannot change; empty if they can. A set keeps its data as
    long as it has its name, so that its results can be compared.
    """
    before = {each.name: each.source for each in old.eval.sets}
    changed = [
        each.name for each in new.eval.sets if before.get(each.name, each.source) != each.source
    ]
    if not changed:
        return ""
    return f"earlier results of {', '.join(changed)} are of other data; give the set another name"


def _objection(key: str) -> str:
    """Returns why a key must keep its value; empty if it need not."""
    if key in FREE:
        return ""
    reasons = (why for prefix, why in FIXED.items() if f"{key}.".startswith(f"{prefix}."))
    return next(reasons, "")


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Turns nested mappings into one level with dotted keys; lists stay values."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        path = f"{prefix}{key}"
        if isinstance(inner, dict):
            flat |= _flat(inner, f"{path}.")
        else:
            flat[path] = inner
    return flat
