"""The section about evaluations, and the metrics that a run can be judged by.

See :mod:`penstock.config.training` for the conventions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from penstock.config.data import ENTRY_DECIDES, RecordsConfig, SourceConfig
from penstock.config.values import Accepts, Unit
from penstock.config.words import Section

EVAL = "eval"
"""Name of the set that ``train.eval_every`` evaluates; also the split of held-out data."""


METRIC_WORDS = "loss, perplexity or token_accuracy, or with the name of a set, such as chats.loss"


class EvaluationSetConfig(RecordsConfig):
    """A set of held-out data. Without `path` and `registry`: the end of the training data."""

    name: Annotated[str, Accepts("a text of 1 to 40 letters, digits, underscores and hyphens")] = (
        Field(
            pattern=r"^[A-Za-z0-9_-]{1,40}$",
            description="Name of the set in metrics, in `train.keep_best` and `train.stop_early`.",
        )
    )
    path: str | None = Field(
        default=None,
        description="A file, folder or glob, read as `data.sources` are. Where all sources are read"
        " in the same way, the set is read so, too. Unset, with `registry` unset: the end of the"
        " training data, of which `data.eval_fraction` is held out.",
    )
    entry: str | None = Field(
        default=None, description="With `registry`: the entry's name; unset, `name`."
    )
    every: Annotated[int | None, Unit("steps")] = Field(
        default=None,
        ge=1,
        description="Steps between evaluations of the set; unset, `train.eval_every`.",
    )
    batches: Annotated[int | None, Unit("global batches")] = Field(
        default=None,
        ge=1,
        description="Batches of an evaluation, from the start of the set; unset, the whole set."
        " Each row counts once.",
    )

    @model_validator(mode="after")
    def _one_place(self) -> EvaluationSetConfig:
        place = f"eval.sets: set {self.name}"
        if self.path is not None and self.registry is not None:
            raise ValueError(f"{place}: path and registry both name its data; remove one")
        if self.entry is not None and self.registry is None:
            raise ValueError(f"{place}: entry is a name in a registry; give registry, or remove it")
        given = self.given(*ENTRY_DECIDES, "limit")
        if given and not self.has_files:
            raise ValueError(
                f"{place}: {', '.join(given)} without a path: the end of the training data is read"
                " as the training data are; give path, or remove the keys"
            )
        if self.registry is not None and set(given) - {"limit"}:
            raise ValueError(
                f"{place}: {', '.join(given)}: the registry's entry decides that; change the entry,"
                " or give path in place of registry"
            )
        return self

    @property
    def has_files(self) -> bool:
        """Returns whether the set has files of its own."""
        return self.path is not None or self.registry is not None

    @property
    def source(self) -> SourceConfig | None:
        """Returns the set's data as a source; None for the end of the training data."""
        if not self.has_files:
            return None
        shared = {key: getattr(self, key) for key in RecordsConfig.model_fields}
        if self.registry is None:
            return SourceConfig(**shared)
        return SourceConfig(**shared, name=self.name if self.entry is None else self.entry)

    @property
    def key(self) -> str:
        """Returns the set's key in ``data/meta.json``."""
        return f"{EVAL}.{self.name}" if self.has_files else EVAL


class EvalConfig(Section):
    """Evaluations on named sets of held-out data."""

    sets: Annotated[
        tuple[EvaluationSetConfig, ...],
        Accepts("a list of sets such as [{name: chats, path: held-out.jsonl, every: 100}]"),
    ] = Field(
        default=(),
        description="Sets to evaluate, each by its own masks: loss, perplexity and token accuracy"
        " are means over the tokens that count. With sets, the end of the training data is held"
        " out only for a set without `path`.",
    )

    @model_validator(mode="after")
    def _one_set_a_name(self) -> EvalConfig:
        names = [each.name for each in self.sets]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"eval.sets: {names.count(name)} sets have the name {name}; give each set a"
                    " name of its own"
                )
        without = [each.name for each in self.sets if not each.has_files]
        if len(without) > 1:
            raise ValueError(
                f"eval.sets: {' and '.join(without)} have no path, and would be the same data; give"
                " all but one of them a path"
            )
        return self


class EvaluationMetric(StrEnum):
    """A mean of an evaluation by which a run can be judged."""

    LOSS = "loss"
    PERPLEXITY = "perplexity"
    TOKEN_ACCURACY = "token_accuracy"
    PAIR_ACCURACY = "pair_accuracy"
    """Share of pairs of answers with a margin above 0."""

    @property
    def rises(self) -> bool:
        """Returns whether a greater value is better."""
        return self in (EvaluationMetric.TOKEN_ACCURACY, EvaluationMetric.PAIR_ACCURACY)


def metrics_of(*, pairs: bool) -> tuple[EvaluationMetric, ...]:
    """Returns the metrics of evaluations, of pairs of answers or of tokens."""
    if pairs:
        return (EvaluationMetric.LOSS, EvaluationMetric.PAIR_ACCURACY)
    return (
        EvaluationMetric.LOSS,
        EvaluationMetric.PERPLEXITY,
        EvaluationMetric.TOKEN_ACCURACY,
    )


class StopEarlyConfig(Section):
    """The end of a run that no longer improves."""

    metric: Annotated[str, Accepts(METRIC_WORDS)] = Field(
        description="Metric that has to improve, as for `train.keep_best`."
    )
    patience: Annotated[int, Unit("evaluations")] = Field(
        ge=1,
        description="The run saves and ends, with exit code 0, after this many evaluations in a row"
        " that were no better than the best one before them.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A metric of an evaluation set, which tells better saved states from worse ones."""

    set_name: str
    metric: EvaluationMetric

    def __str__(self) -> str:
        return f"{self.set_name}.{self.metric}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """A set as a run evaluates it.

    ``split``: its key in ``data/meta.json``. ``every``: steps between evaluations. ``batches``:
    global batches of an evaluation; None for the whole set. ``repeats``: a set with fewer rows is
    read again from its start.
    """

    name: str
    split: str
    every: int
    batches: int | None
    repeats: bool
