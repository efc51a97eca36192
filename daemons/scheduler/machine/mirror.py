"""The journal's mirror in memory: every change returns the effect that makes it durable.

Nothing else of the machine changes these numbers, so memory and journal cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from penstock.daemons.scheduler.machine.evaluations import Score, Scores
from penstock.daemons.scheduler.machine.events import (
    JournalDecision,
    JournalEpoch,
    JournalEvaluation,
    JournalGenerations,
    JournalNumerics,
    JournalTokens,
    SavedState,
)
from penstock.daemons.scheduler.machine.holding import AttemptCosts
from penstock.daemons.scheduler.machine.position import Position
from penstock.daemons.scheduler.machine.rules import Rules
from penstock.shm.control import CommitRecord, Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFacts:
    """Content of a journal when a scheduler starts. The defaults are those of an empty journal."""

    epoch: int = 0
    """Number of the last epoch."""
    next_attempt: int = 1
    """Lowest attempt number that no epoch has used."""
    record: CommitRecord | None = None
    """Record of the committed version."""
    position: Position | None = None
    """Position after the last decision."""
    pids: tuple[tuple[str, int], ...] = ()
    """Processes of the last epoch."""
    evaluation: int = 0
    """Number of the last evaluation."""
    scores: tuple[Score, ...] = ()
    """Evaluations of the committed history."""
    last_metrics_json: str = ""
    """Last line of metrics."""
    generations: tuple[tuple[str, int], ...] = ()
    """Generations of memory that was filled from partners since the last restore, by memoryd."""
    tokens: tuple[tuple[str, str], ...] = ()
    """Tokens of segments that were filled since the last restore, hexadecimal, by member."""
    numerics: JournalNumerics | None = None
    """Newest row of the numerics recipe."""


class JournalMirror:
    """The journal's content in memory: epoch, attempt, committed record, position, saved state."""

    def __init__(
        self,
        rules: Rules,
        facts: JournalFacts,
        saved: SavedState | None,
        draw_incarnation: Callable[[], int],
    ) -> None:
        self._rules = rules
        self._draw_incarnation = draw_incarnation
        self.epoch = facts.epoch
        """Number of the present epoch. Grows with :meth:`begin_epoch`."""
        self.next_attempt = facts.next_attempt
        """Number of the next attempt, higher than all used ones. Written by
        :meth:`take_attempt`.
        """
        self.record = facts.record
        """Record of the committed version. Written by :meth:`decide` and :meth:`restored`."""
        self.position = facts.position
        """Position after the last decision, of the same version as ``record``. Written with it."""
        self.evaluation = facts.evaluation
        """Number of the last evaluation. Written by :meth:`take_evaluation`."""
        self.scores = Scores(facts.scores)
        """Evaluations up to the committed version. Written by :meth:`evaluate` and
        :meth:`restored`.
        """
        self.last_metrics_json = facts.last_metrics_json
        """Last line of metrics. Written by :meth:`decide` and :meth:`evaluate`."""
        self.generations = dict(facts.generations)
        """Refills of each memoryd's memory since the last restore. Written by :meth:`replaced`."""
        self.tokens = dict(facts.tokens)
        """Tokens that each member's segments must bear, written by :meth:`recognised`. A member
        without a token has segments of an older Penstock.
        """
        self.numerics = facts.numerics
        """Newest row of the numerics recipe. Written by :meth:`follow`."""
        self.saved = saved
        """Newest saved state; None without one. Written when a save is done or a state is
        damaged.
        """
        self._filled: int | None = None
        """Version with which this scheduler has filled all memory; None if it has not."""
        self.blocks_missing: dict[str, int] = {}
        """Blocks missing in each replica at the last attempt, by mirrord; not journaled."""
        self.costs = AttemptCosts()
        """Measured times for the hold policy; not journaled."""
        self.warned_of_no_labels = False
        """True after the warning about a step without counted tokens; not journaled."""

    @property
    def version(self) -> int:
        """The committed version; 0 while there is none."""
        return 0 if self.record is None else self.record.version

    @property
    def saved_version(self) -> int:
        """Version of the newest saved state; 0, the initial weights, if there is none."""
        return 0 if self.saved is None else self.saved.version

    @property
    def unsaved(self) -> bool:
        """True if memory alone has the last commits."""
        return self.record is not None and self.record.version != self.saved_version

    @property
    def untrained(self) -> bool:
        """True if memory is as filled: with the initial weights, or with a saved state that this
        scheduler has restored.
        """
        return self.version in (0, self._filled)

    def begin_epoch(
        self, claimed: Iterable[int], pids: tuple[tuple[str, int], ...]
    ) -> JournalEpoch:
        """Begins an epoch with a number above all journaled ones and all that members report."""
        self.epoch = max(self.epoch, *claimed) + 1
        return JournalEpoch(epoch=self.epoch, next_attempt=self.next_attempt, pids=pids)

    def take_attempt(self) -> int:
        """Returns the number of the next attempt.

        Single numbers are not journaled. A scheduler that starts counts on from the last decided
        attempt and from its epoch's first. It skips one number for an attempt under way.
        """
        number = self.next_attempt
        self.next_attempt += 1
        return number

    def decide(self, record: CommitRecord, metrics_json: str) -> JournalDecision:
        """Records a decision. For a SKIP, ``record.version`` is the version that stays."""
        assert self.position is not None
        self.position = self.position.after(
            record.decision,
            self._rules.config.train.global_batch,
            self._rules.loss_scaling,
            self.costs.limits,
        )
        if record.decision is not Decision.SKIP:
            self.record = record
        self.last_metrics_json = metrics_json
        return JournalDecision(
            epoch=self.epoch, record=record, position=self.position, metrics_json=metrics_json
        )

    def restoration(self) -> CommitRecord:
        """Returns the record of a restore from the newest saved state, or from the initial weights.

        Its incarnation is new: memory of an older one is never believed again.
        """
        return CommitRecord.of_restore(
            self.saved_version, self._draw_incarnation(), attempt=self.next_attempt - 1
        )

    def restored(self, record: CommitRecord) -> JournalDecision:
        """Records that all memory holds the version of ``record``, to which the run goes back.

        The journal's position stays if the journal has that step: only skips followed, and a skip
        changes no state. With the saved state's position the run would repeat these skips, and a
        run that max_skips ended would end again after each start. Without a step the run begins
        from its first sample.
        """
        has_step = self.version == record.version and record.version > 0
        if self.position is None or not has_step:
            self.position = self._saved_position()
        self._filled = record.version
        self.record, self.generations = record, {}  # a new incarnation tells them all apart
        self.scores.forget_after(record.version)
        return JournalDecision(
            epoch=self.epoch, record=record, position=self.position, metrics_json=""
        )

    def _saved_position(self) -> Position:
        """Returns the position of the newest saved state, or of the initial weights."""
        if self.saved is not None:
            return self.saved.position
        start = self._rules.loss_scaling.start
        return Position(version=0, data_position=0, loss_scale=start)

    def replaced(self, memoryds: Iterable[str]) -> JournalGenerations:
        """Records that partners will fill these memoryds' memory: its older content is void."""
        assert self.record is not None, "no replica is recorded"
        for name in memoryds:
            self.generations[name] = self.generations.get(name, 0) + 1
        return JournalGenerations(
            epoch=self.epoch,
            incarnation=self.record.incarnation,
            generations=tuple(sorted((name, self.generations[name]) for name in memoryds)),
        )

    def recognised(self, record: CommitRecord, tokens: Mapping[str, str]) -> list[JournalTokens]:
        """Accepts only segments with these tokens in the record's incarnation from now on."""
        if self.record is None or record.incarnation != self.record.incarnation:
            self.tokens = {}
        changed = {name: text for name, text in tokens.items() if self.tokens.get(name) != text}
        if not changed:
            return []
        self.tokens |= changed
        rows = tuple(sorted(changed.items()))
        return [JournalTokens(incarnation=record.incarnation, tokens=rows)]

    def follow(self, devices: Mapping[str, Mapping[str, str]]) -> list[JournalNumerics]:
        """Returns the row of the run's recipe, to hold from the next step on. No row is needed if
        the newest one has the same recipe and devices and no later step. ``devices``: facts by
        worker.
        """
        recipe, step = self._rules.numerics, self.version + 1
        if recipe is None:
            return []
        newest = self.numerics
        same = newest is not None and (newest.digest, newest.devices) == (recipe.digest, devices)
        if newest is not None and same and newest.step <= step:
            return []
        self.numerics = JournalNumerics(
            step=step, digest=recipe.digest, recipe=recipe.canonical, devices=dict(devices)
        )
        return [self.numerics]

    def take_evaluation(self) -> int:
        """Returns the number of the next evaluation."""
        self.evaluation += 1
        return self.evaluation

    @property
    def next_evaluation(self) -> int:
        """The number that the next evaluation will have."""
        return self.evaluation + 1

    def evaluate(self, evaluation: int, score: Score, metrics_json: str) -> JournalEvaluation:
        """Records the evaluation of a set at the committed version."""
        assert score.version == self.version, f"{score} at step {self.version}"
        self.scores.add(score)
        self.last_metrics_json = metrics_json
        return JournalEvaluation(evaluation=evaluation, score=score, metrics_json=metrics_json)

    def validate(self) -> None:
        """Checks the conservation rules.

        Raises:
            ValueError: an invariant does not hold; names the values.
        """
        if (self.record is None) != (self.position is None):
            raise ValueError(f"record {self.record} with position {self.position}")
        if self.record is None or self.position is None:
            return
        self.position.validate()
        if self.position.version != self.record.version:
            raise ValueError(f"position {self.position} does not follow {self.record}")
        if self.record.decision is Decision.SKIP:
            raise ValueError("a skipped attempt has no record of a version")
        if self.record.attempt >= self.next_attempt:
            raise ValueError(f"attempt {self.record.attempt} is decided, next {self.next_attempt}")
