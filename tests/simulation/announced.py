"""What a scheduler tells members: nothing before its row is durable, and only what follows from
what members told it.

The journal's rows and the messages on the streams are all that this model hears. It computes each
verdict anew: sums of squares in the order of blocks, the norm, the coefficient of clipping, the
loss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from penstock.config.schema import Config
from penstock.daemons.scheduler.machine.activities.transaction import CLIP_EPSILON
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.shm.control import RECORD_FIELDS, CommitRecord, Decision
from penstock.shm.table import BlockTable

Squares = Callable[[int, int], float | None]
"""Returns the sum of squares of (attempt, block) as computed from shared memory; None: unknown."""


class Announcements:
    """Rows of the journal, messages of members, and the scheduler's messages that follow."""

    def __init__(self, config: Config, table: BlockTable, squares: Squares) -> None:
        self._clip = config.train.clip_grad_norm
        self._blocks = [b.index for b in table.blocks if b.trainable_elements]
        self._squares = squares
        self._epoch = 0
        self._record: CommitRecord | None = None
        self._position: Any = None
        self._decided: CommitRecord | None = None
        self._generations: dict[str, int] = {}
        self._incarnations: set[int] = set()
        self._statuses: dict[int, dict[int, pb.BlockStatus]] = {}
        """Attempt -> the last status of each block."""
        self._losses: dict[int, dict[str, pb.AttemptDone]] = {}

    # ---- rows ----

    def epoch_began(self, epoch: int) -> None:
        """The row of an epoch is durable."""
        self._epoch = epoch

    def replaced(self, generations: dict[str, int]) -> None:
        """The row of a refill is durable."""
        self._generations.update(generations)

    def filled(
        self, memoryd: str, incarnation: int, generation: int, lost_attempt: int
    ) -> Iterator[str]:
        """A memoryd says that its memory has a model. Of the journal's filling it came from a
        partner, and says which one and which gradients it lacks; another one begins anew.
        """
        refilled = self._record is not None and incarnation == self._record.incarnation
        expected = (0, 0)
        if refilled and self._record is not None:
            expected = self._generations.get(memoryd, 0), self._record.attempt
        if (generation, lost_attempt) != expected:
            yield (
                f"{memoryd} is filled with generation {generation} and lost attempt"
                f" {lost_attempt}; journaled are {expected}"
            )

    def decided(self, record: CommitRecord, position: Any, line: str) -> Iterator[str]:
        """The row of a decision is durable."""
        if record.decision is Decision.RESTORE:
            self._record = record
            self._generations.clear()
            self._incarnations.add(record.incarnation)
        else:
            yield from self._look_at_verdict(record, line)
            if record.decision is not Decision.SKIP:
                self._record = record
        self._decided, self._position = record, position
        for attempt in [number for number in self._statuses if number <= record.attempt]:
            del self._statuses[attempt]
            self._losses.pop(attempt, None)

    # ---- messages ----

    def heard(self, message: pb.MemberMessage, member: str) -> Iterator[str]:
        """A member's message has arrived."""
        if message.HasField("block_status"):
            status = message.block_status
            self._statuses.setdefault(status.attempt, {})[status.block] = status
            expected = self._squares(status.attempt, status.block)
            if expected is not None and not _equal(expected, status.sum_squares):
                yield (
                    f"attempt {status.attempt}, block {status.block}: the sum of squares is"
                    f" {status.sum_squares!r}, gradients have {expected!r}"
                )
        if message.HasField("attempt_done"):
            self._losses.setdefault(message.attempt_done.attempt, {})[member] = message.attempt_done

    def sends(self, member: str, message: pb.SchedulerMessage) -> Iterator[str]:
        """The scheduler sends a message: yields what is not durable, or does not follow."""
        kind = message.WhichOneof("body") or ""
        look = _LOOKS.get(kind)
        for objection in () if look is None else look(self, member, getattr(message, kind)):
            yield f"{kind} to {member}: {objection}"

    # ---- what must be durable ----

    def _drain(self, member: str, body: pb.Drain) -> Iterator[str]:
        if body.epoch != self._epoch:
            yield f"epoch {body.epoch}, journaled is {self._epoch}"

    def _restore(self, member: str, body: pb.Restore) -> Iterator[str]:
        if not body.partner:
            if body.incarnation in self._incarnations:
                yield f"incarnation {body.incarnation} was there before"
            return
        journaled = self._generations.get(member, 0)
        if body.generation != journaled:
            yield f"generation {body.generation}, journaled is {journaled}"
        yield from self._is_committed(body.record)

    def _begin(self, member: str, body: pb.Begin) -> Iterator[str]:
        yield from self._drain(member, body)
        yield from self._is_committed(body.record)

    def _commit(self, member: str, body: pb.Commit) -> Iterator[str]:
        yield from self._is_committed(body.record)

    def _skip(self, member: str, body: pb.Skip) -> Iterator[str]:
        last = self._decided
        if last is None or (last.attempt, last.decision) != (body.attempt, Decision.SKIP):
            yield f"attempt {body.attempt}, journaled is {last}"

    def _run_attempt(self, member: str, body: pb.RunAttempt) -> Iterator[str]:
        yield from self._drain(member, body)
        position = self._position
        told = (body.base_version, body.data_position, body.loss_scale)
        if position is None or self._record is None:
            yield "nothing is committed"
            return
        journaled = (self._record.version, position.data_position, position.loss_scale)
        if told != journaled:
            yield f"version, sample and loss scale are {told}, journaled are {journaled}"
        if self._decided is not None and body.attempt <= self._decided.attempt:
            yield f"attempt {body.attempt} was decided before"

    def _amend(self, member: str, body: pb.Amend) -> Iterator[str]:
        yield from self._follows(_record_of(body.record), self._scale)

    def _settle(self, member: str, body: pb.Settle) -> Iterator[str]:
        yield from self._is_version(body.version)
        if body.HasField("record"):
            yield from self._is_committed(body.record)

    def _save(self, member: str, body: pb.Save) -> Iterator[str]:
        yield from self._is_version(body.version)

    def _evaluate(self, member: str, body: pb.Evaluate) -> Iterator[str]:
        yield from self._is_version(body.base_version)

    def _is_version(self, version: int) -> Iterator[str]:
        journaled = None if self._record is None else self._record.version
        if version != journaled:
            yield f"version {version}, journaled is {journaled}"

    def _is_committed(self, message: pb.Record) -> Iterator[str]:
        if _record_of(message) != self._record:
            yield f"{_record_of(message)}, journaled is {self._record}"

    # ---- what follows from what members said ----

    def _verdict(self, attempt: int, scale: float) -> tuple[Decision, float, float] | None:
        """Returns decision, coefficient and norm; None if statuses are unknown here."""
        statuses = self._statuses.get(attempt, {})
        if statuses.keys() != set(self._blocks):
            return None
        total = 0.0
        for block in self._blocks:
            total += statuses[block].sum_squares
        norm = math.sqrt(total) / scale if total >= 0.0 else math.nan
        if not all(status.finite for status in statuses.values()) or not math.isfinite(norm):
            return Decision.SKIP, 0.0, norm
        if self._clip is not None and self._clip / (norm + CLIP_EPSILON) < 1.0:
            return Decision.AMEND, self._clip / (norm + CLIP_EPSILON), norm
        return Decision.COMMIT, 1.0, norm

    @property
    def _scale(self) -> float:
        return 1.0 if self._position is None else float(self._position.loss_scale)

    def _follows(self, record: CommitRecord, scale: float) -> Iterator[str]:
        verdict = self._verdict(record.attempt, scale)
        if verdict is not None and (record.decision, record.coefficient) != verdict[:2]:
            yield (
                f"attempt {record.attempt} is decided as {record.decision.name} with coefficient"
                f" {record.coefficient!r}; statuses of members lead to {verdict[0].name} with"
                f" {verdict[1]!r}"
            )

    def _look_at_verdict(self, record: CommitRecord, line: str) -> Iterator[str]:
        scale = self._scale
        if record.inverse_loss_scale != 1.0 / scale:
            yield f"attempt {record.attempt} has another loss scale than the journal's"
        yield from self._follows(record, scale)
        said, verdict = json.loads(line), self._verdict(record.attempt, scale)
        if verdict is not None:
            norm = verdict[2]
            if said["grad_norm"] != (norm if math.isfinite(norm) else None):
                yield f"attempt {record.attempt} has the norm {norm!r}, noted is {line}"
        done = self._losses.get(record.attempt)
        if done:
            yield from self._look_at_loss(record.attempt, list(done.values()), said["loss"])

    def _look_at_loss(
        self, attempt: int, done: list[pb.AttemptDone], noted: float | None
    ) -> Iterator[str]:
        tokens = sum(report.loss_tokens for report in done)
        losses = [report.loss_sum for report in done]
        if not tokens or not all(map(math.isfinite, losses)):
            return
        loss = math.fsum(losses) / tokens
        if loss != noted:
            yield f"attempt {attempt} has the loss {loss!r}, noted is {noted!r}"


def _record_of(message: pb.Record) -> CommitRecord:
    return CommitRecord.of(getattr(message, name) for name in RECORD_FIELDS)


def _equal(one: float, other: float) -> bool:
    return one == other or not (math.isfinite(one) or math.isfinite(other))


_LOOKS: dict[str, Callable[[Announcements, str, Any], Iterator[str]]] = {
    "drain": Announcements._drain,
    "restore": Announcements._restore,
    "begin": Announcements._begin,
    "run_attempt": Announcements._run_attempt,
    "amend": Announcements._amend,
    "commit": Announcements._commit,
    "skip": Announcements._skip,
    "settle": Announcements._settle,
    "save": Announcements._save,
    "evaluate": Announcements._evaluate,
}
"""Kind of a message -> what is looked at when it is sent."""
