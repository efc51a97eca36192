"""Evaluations of transformers' ``Trainer``: steps, sets, the best state and the early end."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.client.convert.keys import Effect
from penstock.client.convert.passes import steps_of_pass
from penstock.client.convert.reading import KeyReading

OWN_SET = {"name": "eval"}
"""The set that ``data.eval_fraction`` holds out, evaluated whole."""

BEST_KEYS = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")
_STEP_KEYS = ("eval_strategy", "eval_steps", "evals_per_epoch")
_MEAN = "the loss is the mean over the counted tokens of the set; the trainer's is over batches"
_EXPORT = "penstock export RUN --step N exports the best step, which the end of the run names"
_LETTERS = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """Evaluations in a trainer's file.

    ``sets``: entries of ``eval.sets``; ``keys``: keys that decide them. ``metrics``: the set of
    each metric of the trainer. ``strategy`` is steps, epoch or no; ``steps`` below 1 are a share.
    """

    sets: Sequence[Mapping[str, Any]]
    keys: tuple[str, ...]
    metrics: Mapping[str, str]
    strategy: str
    steps: float | None
    missing: str = "name held-out data in eval.sets"
    """Remedy where the trainer's evaluations have no set here."""

    def put(self, reading: KeyReading) -> int | None:
        """Sets ``eval.sets`` and ``train.eval_every``; returns the latter, None without sets."""
        given = [key for key in _STEP_KEYS if key in reading.values]
        every = None if self.strategy == "no" else self._every(reading)
        if not self.sets or every is None:
            why = self.missing if not self.sets else "set train.eval_every, in steps"
            if self.strategy == "no":
                why = "nothing is evaluated without steps: set train.eval_every"
            for key in (*given, *(key for key in self.keys if key in reading.values)):
                if not reading.has(key):
                    reading.drop(key, why, Effect.NONE)
            return None
        reading.put("eval.sets", list(self.sets), *self.keys)
        reading.put("train.eval_every", every, *given)
        return every

    def _every(self, reading: KeyReading) -> int | None:
        """Returns the steps between evaluations; None if they are not known."""
        if self.strategy == "epoch":
            return steps_of_pass(reading)
        if self.steps is None or self.steps <= 0:
            return None
        if self.steps >= 1:
            return int(self.steps)
        train = reading.config["train"]
        total, one = train.get("steps"), steps_of_pass(reading)
        if total is None and one is not None:
            total = math.ceil(one * train["epochs"])
        return None if total is None else math.ceil(total * self.steps)


def loss_of(name: str) -> Mapping[str, str]:
    """Returns the metrics of a trainer with one set."""
    return {"loss": name}


def set_name(text: str) -> str:
    """Returns the name of a set of ``eval.sets``, with other characters as underscores."""
    return _LETTERS.sub("_", text)[-40:] or "eval"


def put_best(
    reading: KeyReading, evaluations: Evaluations, every: int | None, *, loads: bool, patience: str
) -> None:
    """Sets ``train.keep_best`` and ``train.stop_early``. ``loads``: the trainer ends with the best
    state. ``patience``: its key of the evaluations before an early end; empty if it has none.
    """
    stops = reading.get(patience) if patience else None
    if not loads and not stops:
        return
    used = ("load_best_model_at_end",) * loads + (patience,) * bool(stops)
    metric = str(reading.get("metric_for_best_model") or "loss").removeprefix("eval_")
    objection = ""
    if every is None:
        objection = "no evaluation is converted; set eval.sets and train.eval_every"
    elif metric not in evaluations.metrics:
        objection = f"the metric {metric!r} of the trainer is not computed"
    elif reading.get("greater_is_better"):
        objection = "the least loss is the best"
    if objection:
        ours = "train.keep_best and train.stop_early take loss, perplexity and token_accuracy"
        for key in used:
            reading.drop(key, f"{objection}; {ours}")
        return
    judge = f"{evaluations.metrics[metric]}.loss"
    named = tuple(key for key in BEST_KEYS[1:] if key in reading.values)
    if loads:
        reading.put("train.keep_best", judge, "load_best_model_at_end", *named, note=_EXPORT)
        _check_saves(reading, evaluations, every)
    if stops:
        stop = {"metric": judge, "patience": stops}
        reading.put("train.stop_early", stop, patience, *named, note=_MEAN)
    if reading.values.get("eval_delay"):
        reading.drop("eval_delay", "the first evaluations count, too")


def _check_saves(reading: KeyReading, evaluations: Evaluations, every: int | None) -> None:
    """Records that the trainer saves at other steps than it evaluates."""
    saving = reading.get("save_strategy")
    alike = saving == "best" or (saving == "epoch" and evaluations.strategy == "epoch")
    if not alike and reading.config["train"].get("save_every") != every:
        reading.drop(
            "load_best_model_at_end",
            "the trainer ends with the best of its own saves, and Penstock saves at each best"
            " evaluation, so that another step may be the best; save and evaluate at equal steps",
        )


def put_share(reading: KeyReading, key: str, why: str, how: str) -> None:
    """Sets ``data.eval_fraction`` where the trainer takes the share ``key`` out of the training
    data. Other records are held out there, so the key changes the result, too: ``why``. ``how``
    names the places of two splits ``{train}`` and ``{held}``.
    """
    share = reading.get(key)
    if not share:
        return
    if share < 1:
        reading.put("data.eval_fraction", share, key, note="takes the last samples")
    percent = min(99, max(1, round(100 * (1 - share)))) if share < 1 else 90
    splits = how.format(train=f"train[:{percent}%]", held=f"train[{percent}%:]")
    reading.drop(
        key,
        f"{why}. To hold out the same records, write them to a file for eval.sets; to hold out some"
        f" of your choice: {splits}",
        value=share,
    )
