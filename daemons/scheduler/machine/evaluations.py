"""Results of evaluations, and what follows from them. All of it is a function of journaled rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.config.evaluation import EvaluationMetric, EvaluationSet, Judge
from penstock.config.schema import Config

_MOST_NATS = 700.0
"""Loss beyond which a perplexity is infinite in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Means of an evaluation set over its counted tokens, or its pairs, at a version; None where a
    mean is not finite, or was not counted. ``loss`` is in nats. ``accuracy``: the share of tokens
    that the model ranks first, or of pairs with a margin above 0.
    """

    set_name: str
    version: int
    loss: float | None
    accuracy: float | None

    def value(self, metric: EvaluationMetric) -> float | None:
        """Returns a mean by its name."""
        return {
            EvaluationMetric.LOSS: self.loss,
            EvaluationMetric.PERPLEXITY: self.perplexity,
            EvaluationMetric.TOKEN_ACCURACY: self.accuracy,
            EvaluationMetric.PAIR_ACCURACY: self.accuracy,
        }[metric]

    @property
    def perplexity(self) -> float | None:
        """The exponential of the loss; None where no float holds it."""
        return math.exp(self.loss) if self.loss is not None and self.loss < _MOST_NATS else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """``evaluations`` in a row, up to the newest one, were no better than the one of version
    ``best``; None if none has a value.
    """

    evaluations: int
    best: int | None


class Scores:
    """The evaluations of the committed history: at most one of each set and version.

    An evaluation that is repeated after a restore replaces the earlier one.
    """

    def __init__(self, scores: Iterable[Score] = ()) -> None:
        self._by_set: dict[str, dict[int, Score]] = {}
        for score in scores:
            self.add(score)

    def add(self, score: Score) -> None:
        """Adds a finished evaluation."""
        self._by_set.setdefault(score.set_name, {})[score.version] = score

    def forget_after(self, version: int) -> None:
        """Removes evaluations of later versions, which the run has gone back from."""
        for name, scores in self._by_set.items():
            self._by_set[name] = {v: score for v, score in scores.items() if v <= version}

    def has(self, set_name: str, version: int) -> bool:
        """Returns whether a set was evaluated at a version."""
        return version in self._by_set.get(set_name, {})

    def of(self, set_name: str) -> list[Score]:
        """Returns the evaluations of a set in the order of versions."""
        scores = self._by_set.get(set_name, {})
        return [scores[version] for version in sorted(scores)]

    def ranking(self, judge: Judge) -> tuple[int, ...]:
        """Returns the evaluated versions from the best to the worst. Of equal ones the first in
        time is better; evaluations without a value are left out.
        """
        sign = -1.0 if judge.metric.rises else 1.0
        values = [(score.value(judge.metric), score.version) for score in self.of(judge.set_name)]
        ranked = sorted((sign * value, version) for value, version in values if value is not None)
        return tuple(version for _, version in ranked)

    def standstill(self, judge: Judge) -> Standstill:
        """Returns the evaluations since the best one; all of them if none has a value."""
        best = next(iter(self.ranking(judge)), None)
        later = [s for s in self.of(judge.set_name) if best is None or s.version > best]
        return Standstill(evaluations=len(later), best=best)

    def early_end(self, config: Config, judge: Judge | None, version: int) -> str:
        """Returns why ``train.stop_early`` ends the run at ``version``; empty if it does not.
        ``judge``: the key's metric.
        """
        stop = config.train.stop_early
        if stop is None or judge is None or not self.has(judge.set_name, version):
            return ""
        standstill = self.standstill(judge)
        if standstill.evaluations < stop.patience:
            return ""
        best = "has no value" if standstill.best is None else f"is best at step {standstill.best}"
        return (
            f"stopped early at step {version} of {config.train.steps}: {judge} {best}, and"
            f" {standstill.evaluations} evaluations in a row were no better (train.stop_early)"
        )

    def due(self, sets: Iterable[EvaluationSet], version: int) -> EvaluationSet | None:
        """Returns the first set that is to be evaluated at ``version``; None if none is left."""
        for each in sets:
            if version and version % each.every == 0 and not self.has(each.name, version):
                return each
        return None
