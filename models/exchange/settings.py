"""Differences between the settings of a checkpoint and those of a run: optimizer, learning rates,
model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config.schema import Config
from penstock.models.checkpoints.conversion import folded
from penstock.models.checkpoints.files import few
from penstock.models.exchange.foreign import ForeignState
from penstock.protocol.plan.groups import tensor_steps
from penstock.shm.table import BlockTable

_NAMES = 6
_NO_MODEL = frozenset(
    {
        *("architectures", "dtype", "torch_dtype", "transformers_version", "auto_map", "use_cache"),
        *("id2label", "label2id", "problem_type", "tie_word_embeddings", "is_decoder"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
        *("return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward"),
    }
)
"""Keys of config.json that change no number of a training, or that are compared by tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRate:
    """A learning rate of the checkpoint, which the client compares with the configuration's curve.
    ``field``: name of the rate in the checkpoint. ``is_peak``: the rate after warmup, else that of
    the next step. ``factor``: of ``optimizer.groups``. ``tensors``: names, shortened.
    """

    field: str
    value: float
    is_peak: bool
    factor: float
    tensors: str

    def to_fields(self) -> dict[str, Any]:
        """Returns the JSON object of the report."""
        return {
            "field": self.field,
            "checkpoint": self.value,
            "is_peak": self.is_peak,
            "factor": self.factor,
            "tensors": self.tensors,
        }


def compare_settings(
    state: ForeignState,
    step: int,
    config: Config,
    table: BlockTable,
    names_of: Mapping[str, Sequence[str]],
) -> Iterator[str]:
    """Yields notes of the optimizer's settings that differ; those of the configuration hold."""
    optimizer, groups, schedule = config.optimizer, state.groups, state.schedule
    if schedule is not None and schedule.steps not in (None, step):
        yield (
            f"{schedule.file}: last_epoch is {schedule.steps}, the optimizer has {step} steps;"
            f" optimizer.schedule goes on from step {step}"
        )
    for name, here in (("betas", optimizer.betas), ("eps", optimizer.eps)):
        foreign = {getattr(group, name) for group in groups} - {None}
        if foreign - {here}:
            yield (
                f"optimizer.{name} is {here}, the checkpoint has"
                f" {', '.join(str(value) for value in sorted(foreign))}"
            )
    decays_weights = any(group.weight_decay for group in groups)
    decouples = {group.others.get("decoupled_weight_decay") for group in groups} - {None}
    if decays_weights and decouples == {not optimizer.name.traits.decouples_decay}:
        target, remedy = (
            ("to the weights", "adamw") if True in decouples else ("to gradients", "adam")
        )
        yield (
            f"the checkpoint's optimizer applies weight decay {target}, optimizer.name"
            f" {optimizer.name.value} does not; {remedy} does"
        )
    decays = {name: group.weight_decay for group in groups for name in group.names}
    differing: dict[tuple[float, float], list[str]] = {}
    for block in table.blocks:
        for spec, here, _ in tensor_steps(optimizer, table, block.index):
            known = (decays[n] for n in names_of[spec.name] if n in decays)
            foreign_decay = next(known, None)
            if foreign_decay is not None and foreign_decay != here:
                differing.setdefault((here, foreign_decay), []).append(spec.name)
    for (here, foreign_decay), names in differing.items():
        yield (
            f"weight decay of {listed(names)} is {here:g} in the configuration,"
            f" {foreign_decay:g} in the checkpoint"
        )


def rates_of(
    state: ForeignState, config: Config, table: BlockTable, names_of: Mapping[str, Sequence[str]]
) -> Iterator[ForeignRate]:
    """Yields the learning rates of the checkpoint, each with the trained tensors that have it."""
    factors = {
        alias: factor
        for block in table.blocks
        for spec, _, factor in tensor_steps(config.optimizer, table, block.index)
        for alias in names_of[spec.name]
    }
    names: dict[tuple[str, float, bool, float], list[str]] = {}
    for number, group in enumerate(state.groups):
        trained = {name: factors[name] for name in group.names if name in factors}
        if group.names and not trained:
            continue
        values = [("lr of param_groups", group.lr, False)]
        if (schedule := state.schedule) is not None:
            rate, bases = schedule.rates[number], schedule.base_rates[number : number + 1]
            values = values if group.lr != rate else []
            values.append((f"_last_lr of {schedule.file}", rate, False))
            values += [(f"base_lrs of {schedule.file}", base, True) for base in bases]
        for field_name, value, is_peak in values:
            if value is None or not math.isfinite(value):
                continue
            for name, factor in trained.items() or (("", 1.0),):
                names.setdefault((field_name, value, is_peak, factor), []).append(name)
    for (field_name, value, is_peak, factor), tensors in names.items():
        yield ForeignRate(
            field=field_name,
            value=value,
            is_peak=is_peak,
            factor=factor,
            tensors=listed([name for name in tensors if name]),
        )


def compare_models(state: ForeignState, run: Mapping[str, Any]) -> Iterator[str]:
    """Yields notes of settings of the checkpoint's model that differ from ``run``, the run's."""
    checkpoint = state.model_settings
    if checkpoint is None:
        return
    keys = {*checkpoint, *run} - _NO_MODEL
    if checkpoint.get("model_type") != run.get("model_type"):
        keys = {"model_type"}  # the others follow
    for key in sorted(keys):
        here, foreign = run.get(key), checkpoint.get(key)
        if here != foreign and not key.startswith("_"):
            yield (
                f"{key} is {foreign} in the checkpoint's config.json, {here} in the configuration's"
                " model, which is trained"
            )


def listed(names: Sequence[str]) -> str:
    """Returns names of tensors in a few words; layers are joined."""
    count = f"{len(names)} tensors " if len(names) > _NAMES else ""
    return f"{count}{few(folded(names), _NAMES)}" or "nothing"
