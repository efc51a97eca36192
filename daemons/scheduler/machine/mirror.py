"""The journal's mirror in memory: every change returns the effect that makes it durable.

Nothing else of the machine changes these numbers, so memory and journal cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

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
    """What a journal says when a scheduler starts; the defaults are those of an empty one.

    ``record``: of the committed version. ``position``: after the last decision. ``pids``: processes
    of the last epoch. ``evaluated``: newest version that was evaluated. ``generations``: of
    memoryds whose memory was filled from a partner since the last restore. ``tokens``: of the
    segments of memoryds and mirrords that have been filled since then, hexadecimal. ``numerics``:
    the newest row of the recipe.
    """

    epoch: int = 0
    next_attempt: int = 1
    record: CommitRecord | None = None
    position: Position | None = None
    pids: tuple[tuple[str, int], ...] = ()
    evaluation: int = 0
    evaluated: int = 0
    last_metrics_json: str = ""
    generations: tuple[tuple[str, int], ...] = ()
    tokens: tuple[tuple[str, str], ...] = ()
    numerics: JournalNumerics | None = None


class JournalMirror:
    """Epoch, attempt, committed record and position, newest saved state."""

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
        self.next_attempt = facts.next_attempt
        self.record = facts.record
        self.position = facts.position
        self.evaluation = facts.evaluation
        self.evaluated = facts.evaluated
        self.last_metrics_json = facts.last_metrics_json
        self.generations = dict(facts.generations)
        """How often a memoryd's memory was filled from a partner since the last restore."""
        self.tokens = dict(facts.tokens)
        """Tokens that the segments of each member must bear; none for a member: an older Penstock
        filled them.
        """
        self.numerics = facts.numerics
        self.saved = saved
        self._filled: int | None = None  # what this scheduler has had all memory filled with
        self.blocks_missing: dict[str, int] = {}
        """What replicas lacked at the last attempt, by mirrord; not journaled."""
        self.costs = AttemptCosts()
        """What the hold policy goes by; not journaled."""

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
        """Whether there are commits that only the memory has."""
        return self.record is not None and self.record.version != self.saved_version

    @property
    def untrained(self) -> bool:
        """Whether memory holds nothing but what it was filled with: initial weights, or a saved
        state that this scheduler has had restored.
        """
        return self.version in (0, self._filled)

    def begin_epoch(
        self, claimed: Iterable[int], pids: tuple[tuple[str, int], ...]
    ) -> JournalEpoch:
        """Take an epoch number above all that were journaled or that a member has seen."""
        self.epoch = max(self.epoch, *claimed) + 1
        return JournalEpoch(epoch=self.epoch, next_attempt=self.next_attempt, pids=pids)

    def take_attempt(self) -> int:
        """Returns the number of the next attempt.

        Not journaled one by one: a scheduler that starts counts on from the last decided attempt,
        plus one for the attempt that may have been under way, and from its epoch's first.
        """
        number = self.next_attempt
        self.next_attempt += 1
        return number

    def decide(self, record: CommitRecord, metrics_json: str) -> JournalDecision:
        """An attempt has ended. For a SKIP, ``record.version`` is the version that stays."""
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
        self.evaluated = min(self.evaluated, record.version)
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
        """Memory of these is going to be filled from partners: what they had before is void."""
        assert self.record is not None, "no replica is recorded"
        for name in memoryds:
            self.generations[name] = self.generations.get(name, 0) + 1
        return JournalGenerations(
            epoch=self.epoch,
            incarnation=self.record.incarnation,
            generations=tuple(sorted((name, self.generations[name]) for name in memoryds)),
        )

    def recognised(self, record: CommitRecord, tokens: Mapping[str, str]) -> list[JournalTokens]:
        """Believes, from now on, only segments with these tokens in the record's incarnation."""
        if self.record is None or record.incarnation != self.record.incarnation:
            self.tokens = {}
        changed = {name: text for name, text in tokens.items() if self.tokens.get(name) != text}
        if not changed:
            return []
        self.tokens |= changed
        rows = tuple(sorted(changed.items()))
        return [JournalTokens(incarnation=record.incarnation, tokens=rows)]

    def follow(self, devices: Mapping[str, Mapping[str, str]]) -> list[JournalNumerics]:
        """Holds to the run's recipe from the next step on; returns the row, where the newest row is
        of another recipe, of other devices, or of a later step. ``devices``: facts by worker.
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

    def evaluate(self, evaluation: int, metrics_json: str) -> JournalEvaluation:
        """The committed version has been evaluated."""
        self.evaluated = self.version
        self.last_metrics_json = metrics_json
        return JournalEvaluation(
            version=self.version, evaluation=evaluation, metrics_json=metrics_json
        )

    def validate(self) -> None:
        """Checks the conservation rules.

        Raises:
            ValueError: naming what does not fit.
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
