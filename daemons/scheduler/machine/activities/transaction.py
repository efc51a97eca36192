"""One attempt as a transaction: collect what members report, decide, journal, announce.

docs/INTERNALS.md has the rules and their reasons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.daemons.kit.events import LogLine
from penstock.daemons.kit.messages import record_message
from penstock.daemons.scheduler.machine.activities.activity import Activity, send_all
from penstock.daemons.scheduler.machine.activities.learning_rates import learning_rate
from penstock.daemons.scheduler.machine.events import AppendMetrics, Effect, Send
from penstock.daemons.scheduler.machine.metrics_lines import AttemptTimes, attempt_line
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.rules import Rules, RunPhase
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.shm.control import CommitRecord, Decision

CLIP_EPSILON = 1e-6
"""torch.nn.utils.clip_grad_norm_ multiplies by min(1, limit / (norm + 1e-6))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision about an attempt. ``grad_norm`` is the norm of the unscaled gradients."""

    decision: Decision
    coefficient: float
    grad_norm: float


def judge(
    statuses: Sequence[pb.BlockStatus], loss_scale: float, clip_grad_norm: float | None
) -> Verdict:
    """Decides about an attempt from the statuses of all trainable blocks, in block order.

    The float64 sum in that order does not depend on the order of messages.
    """
    total = 0.0
    for status in statuses:
        total += status.sum_squares
    grad_norm = math.sqrt(total) / loss_scale if total >= 0.0 else math.nan
    if not all(status.finite for status in statuses) or not math.isfinite(grad_norm):
        return Verdict(decision=Decision.SKIP, coefficient=0.0, grad_norm=grad_norm)
    if clip_grad_norm is not None:
        coefficient = clip_grad_norm / (grad_norm + CLIP_EPSILON)
        if coefficient < 1.0:
            return Verdict(decision=Decision.AMEND, coefficient=coefficient, grad_norm=grad_norm)
    return Verdict(decision=Decision.COMMIT, coefficient=1.0, grad_norm=grad_norm)


class Transaction(Activity):
    """One attempt, from RunAttempt to Commit or Skip."""

    title = "the attempt"

    def __init__(self, rules: Rules, mirror: JournalMirror) -> None:
        super().__init__(rules, mirror)
        assert mirror.position is not None
        self.phase = RunPhase.RUNNING
        self.attempt = mirror.take_attempt()
        self.seconds = 0.0
        """Duration, once the attempt is decided."""
        self.failure = ""
        """Error that ends the run after this attempt; empty for none."""
        self._position = mirror.position
        """Position before the attempt."""
        self._hold = rules.holds(mirror.position)
        """True if the optimizer waits for the norm."""
        self._learning_rate = learning_rate(
            rules.config.optimizer, rules.config.train.steps, mirror.version + 1
        )
        self.reports: dict[str, pb.AttemptDone] = {}
        """Reports of workers so far."""
        self._statuses: dict[int, pb.BlockStatus] = {}
        """Statuses of blocks so far. The attempt is decided when all blocks have one."""
        self._reported_s: dict[str, float] = {}
        """Time of each worker's report."""
        self._computed_s = 0.0
        """Time of the last compute instruction of any worker."""
        self._decided: tuple[Verdict, CommitRecord] | None = None
        """The decision. An amended or mirrored attempt has one before it is journaled."""
        self._unmirrored = set(rules.mirrords)
        """Replicas without all gradients of the attempt. A commit waits until none is left."""
        # Memory may be one commit behind and no more, even on a node that trains no block.
        self._unheard = set(rules.spectators)
        """optimizerds without blocks that have not acknowledged the attempt."""

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Workers without a report, and optimizerds that owe statuses or an acknowledgement. After
        the decision: members that owe a preview, a replica or a settled state.
        """
        if self._decided is not None:
            owing = self.waiting or self._unmirrored
            return tuple(
                name for name in (*self.rules.optimizerds, *self.rules.mirrords) if name in owing
            )
        owners = {self.rules.owners[b] for b in self.rules.blocks if b not in self._statuses}
        owners |= self._unheard
        return tuple(
            name
            for name in (*self.rules.workers, *self.rules.optimizerds)
            if name in self.waiting or name in owners
        )

    def start(self, now_s: float) -> list[Effect]:
        """Sends RunAttempt, first to daemons: they must know the attempt before its gradients."""
        self.waiting = set(self.rules.workers)
        run = pb.RunAttempt(
            epoch=self.mirror.epoch,
            attempt=self.attempt,
            base_version=self.mirror.version,
            data_position=self._position.data_position,
            loss_scale=self._position.loss_scale,
            learning_rate=self._learning_rate,
            hold=self._hold,
        )
        return self._tell_all(pb.SchedulerMessage(run_attempt=run))

    def _on_block_status(self, member: str, body: pb.BlockStatus, now_s: float) -> list[Effect]:
        if body.attempt != self.attempt or self._decided is not None:
            return []
        if body.block not in self.rules.trainable:
            text = f"{member} reports block {body.block}, which has nothing to train"
            return [LogLine(text=text, warning=True)]
        self._statuses[body.block] = body
        return self._decide_if_complete(now_s)

    def _on_attempt_heard(self, member: str, body: pb.AttemptHeard, now_s: float) -> list[Effect]:
        if body.attempt != self.attempt or member not in self._unheard:
            return []
        self._unheard.discard(member)
        return self._decide_if_complete(now_s)

    def _on_attempt_done(self, member: str, body: pb.AttemptDone, now_s: float) -> list[Effect]:
        if body.attempt != self.attempt or member not in self.waiting:
            return []
        self.reports[member], self._reported_s[member] = body, now_s
        self._computed_s = max(self._computed_s, now_s - body.tail_seconds)
        if self.answered(member):
            self.phase = RunPhase.DECIDING
        return self._decide_if_complete(now_s)

    def _on_amended(self, member: str, body: pb.Amended, now_s: float) -> list[Effect]:
        if body.attempt != self.attempt or self.phase is not RunPhase.AMENDING:
            return []
        if not self.answered(member) or self._decided is None:
            return []
        return self._commit_when_mirrored(now_s)

    def _on_mirrored(self, member: str, body: pb.Mirrored, now_s: float) -> list[Effect]:
        if body.attempt != self.attempt:
            return []
        self._unmirrored.discard(member)
        self.mirror.blocks_missing[member] = body.blocks_missing
        return self._commit_when_mirrored(now_s) if self.phase is RunPhase.MIRRORING else []

    def _commit_when_mirrored(self, now_s: float) -> list[Effect]:
        """Commits once partners have its gradients, so that no lost node can take them
        along.
        """
        assert self._decided is not None, "a commit follows a decision"
        if self._unmirrored:
            self.phase = RunPhase.MIRRORING
            return []
        return self._commit(*self._decided, now_s)

    def _decide_if_complete(self, now_s: float) -> list[Effect]:
        if self.waiting or self._unheard or len(self._statuses) < len(self.rules.blocks):
            return []
        statuses = [self._statuses[block] for block in self.rules.blocks]
        clip = self.rules.config.train.clip_grad_norm
        verdict = judge(statuses, self._position.loss_scale, clip)
        record = self._record(verdict)
        self._decided = verdict, record
        if verdict.decision is Decision.SKIP:
            return self._skip(verdict, record, now_s)
        if verdict.decision is Decision.AMEND and not self._hold:
            return self._amend(record)
        return self._commit_when_mirrored(now_s)

    def _record(self, verdict: Verdict) -> CommitRecord:
        assert self.mirror.record is not None
        skipped = verdict.decision is Decision.SKIP
        version = self.mirror.version if skipped else self.mirror.version + 1
        return CommitRecord(
            version=version,
            attempt=self.attempt,
            decision=verdict.decision,
            coefficient=verdict.coefficient,
            inverse_loss_scale=1.0 / self._position.loss_scale,
            learning_rate=self._learning_rate,
            bias_step=version,
            incarnation=self.mirror.record.incarnation,
        )

    def _amend(self, record: CommitRecord) -> list[Effect]:
        """Orders a second preview. Nothing is journaled yet: a broken epoch repeats the
        attempt.
        """
        self.phase = RunPhase.AMENDING
        self.waiting = set(self.rules.optimizerds)
        amend = pb.Amend(
            epoch=self.mirror.epoch, attempt=self.attempt, record=record_message(record)
        )
        return send_all(self.rules.optimizerds, pb.SchedulerMessage(amend=amend))

    def _commit(self, verdict: Verdict, record: CommitRecord, now_s: float) -> list[Effect]:
        line = self._finish(verdict, record, now_s)
        epoch, sealed = self.mirror.epoch, record_message(record)
        commits = {
            member: pb.SchedulerMessage(commit=pb.Commit(epoch=epoch, record=sealed, **waits))
            for member, waits in self._waits(now_s).items()
        }
        # Journal first: once a member has received a commit, no crash may undo it.
        return [
            self.mirror.decide(record, line),
            *(Send(member=member, message=commit) for member, commit in commits.items()),
            AppendMetrics(metrics_json=line),
            *self._warn_of_no_labels(record.version),
        ]

    def _warn_of_no_labels(self, step: int) -> list[Effect]:
        """Returns a warning about the first step without a counted token."""
        if self.mirror.warned_of_no_labels or any(r.loss_tokens for r in self.reports.values()):
            return []
        self.mirror.warned_of_no_labels = True
        text = (
            f"step {step}: no token of its {self.rules.config.train.global_batch} sequences counts"
            " in the loss, so its loss is null and its gradients are 0. More such steps are not"
            " reported. penstock data CONFIG shows the rows; raise train.global_batch, or start a"
            " run with another data.train_on"
        )
        return [LogLine(text=text, warning=True)]

    def _skip(self, verdict: Verdict, record: CommitRecord, now_s: float) -> list[Effect]:
        line = self._finish(verdict, record, now_s)
        journaled = self.mirror.decide(record, line)
        skips, limit = journaled.position.skips_in_a_row, self.rules.config.train.max_skips
        # While the loss scale still falls, a too large scale may be the only reason.
        if skips > limit and self.rules.loss_scaling.lowest(self._position.loss_scale):
            self.failure = self._why_hopeless(skips, limit)
        epoch, attempt = self.mirror.epoch, self.attempt
        messages = {
            member: pb.SchedulerMessage(skip=pb.Skip(epoch=epoch, attempt=attempt, **waits))
            for member, waits in self._waits(now_s).items()
        }
        effects: list[Effect] = [
            journaled,
            *(Send(member=member, message=skip) for member, skip in messages.items()),
            AppendMetrics(metrics_json=line),
        ]
        # A run that ends takes no step back: the next start does so, as after a kill.
        if self.rules.config.optimizer.rollback == "arithmetic" and not self.failure:
            effects += self._take_back()
        return effects

    def _take_back(self) -> list[Effect]:
        """Orders optimizerds to invert steps in place, before the next attempt overwrites the
        gradients.
        """
        self.done, self.phase = False, RunPhase.SETTLING
        self.waiting = set(self.rules.optimizerds)
        settle = pb.Settle(epoch=self.mirror.epoch, version=self.mirror.version)
        return send_all(self.rules.optimizerds, pb.SchedulerMessage(settle=settle))

    def _on_settled(self, member: str, body: pb.Settled, now_s: float) -> list[Effect]:
        if self.phase is RunPhase.SETTLING and body.version == self.mirror.version:
            self.done = self.answered(member)
        return []

    def _why_hopeless(self, skips: int, limit: int) -> str:
        scale = ""
        if self.rules.loss_scaling.dynamic:
            scale = (
                f" with the loss scale at optimizer.loss_scale_min ="
                f" {self.rules.loss_scaling.minimum:g}"
            )
        return (
            f"{skips} attempts in a row had infinite or undefined gradients, more than"
            f" train.max_skips = {limit}; the last{scale} was attempt {self.attempt} after step"
            f" {self.mirror.version}: lower optimizer.lr, or check the data from sample"
            f" {self._position.data_position} on"
        )

    def _finish(self, verdict: Verdict, record: CommitRecord, now_s: float) -> str:
        self.done = True
        self.seconds = now_s - self.started_s
        self.mirror.costs.add(verdict.decision, self.seconds, held=self._hold)
        consumed = self._position.data_position + self.rules.config.train.global_batch
        return attempt_line(
            record=record,
            reports=[self.reports[worker] for worker in self.rules.workers],
            grad_norm=verdict.grad_norm,
            learning_rate=self._learning_rate,
            loss_scale=self._position.loss_scale,
            epoch=self.mirror.epoch,
            times=AttemptTimes(
                started_s=self.started_s,
                computed_s=self._computed_s,
                decided_s=now_s,
                since_1970_s=self.rules.since_1970_s,
            ),
            data_epoch=self.rules.data_epochs(consumed),
            held=self._hold,
            emulated=self.rules.emulated,
        )

    def _waits(self, now_s: float) -> dict[str, dict[str, float]]:
        """Returns the waits of each member since its report, in the order of announcement. Workers
        wait for computing peers, then for the optimizer.
        """
        daemons = (*self.rules.optimizerds, *self.rules.mirrords)
        waits: dict[str, dict[str, float]] = {name: {} for name in daemons}
        for worker in self.rules.workers:
            reported_s = self._reported_s[worker]
            computed_s = max(reported_s, self._computed_s)
            waits[worker] = {
                "peers_seconds": computed_s - reported_s,
                "optimizer_seconds": now_s - computed_s,
            }
        return waits

    def _tell_all(self, message: pb.SchedulerMessage) -> list[Effect]:
        daemons = (*self.rules.optimizerds, *self.rules.mirrords)
        return send_all((*daemons, *self.rules.workers), message)

    answers = {  # noqa: RUF012  # the base class says ClassVar
        "block_status": _on_block_status,
        "attempt_heard": _on_attempt_heard,
        "attempt_done": _on_attempt_done,
        "amended": _on_amended,
        "mirrored": _on_mirrored,
        "settled": _on_settled,
    }
