"""Two activities: the evaluation of the committed version, and the end of the run."""

from __future__ import annotations

import math

from penstock.config.evaluation import EvaluationSet
from penstock.daemons.kit.events import Exit, LogLine
from penstock.daemons.scheduler.machine.activities.activity import Activity, send_all
from penstock.daemons.scheduler.machine.events import (
    AppendMetrics,
    Effect,
    NoteEnd,
    Send,
)
from penstock.daemons.scheduler.machine.membership import Membership
from penstock.daemons.scheduler.machine.metrics_lines import evaluation_line, score_of
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.rules import Rules, RunPhase
from penstock.host.errors import ExitCode
from penstock.protocol.generated import scheduler_pb2 as pb


class Evaluation(Activity):
    """A forward-only pass over an evaluation set at the committed version.

    ``seconds``: its duration, once it is done.
    """

    title = "the evaluation"

    def __init__(self, rules: Rules, mirror: JournalMirror, due: EvaluationSet) -> None:
        super().__init__(rules, mirror)
        self.phase = RunPhase.EVALUATING
        self._set = due
        self._number = mirror.take_evaluation()
        self._reports: dict[str, pb.EvaluationDone] = {}
        self.seconds = 0.0

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Workers without a result."""
        return tuple(worker for worker in self.rules.workers if worker in self.waiting)

    def start(self, now_s: float) -> list[Effect]:
        """Sends Evaluate to the workers; no other member takes part."""
        self.waiting = set(self.rules.workers)
        evaluate = pb.Evaluate(
            epoch=self.mirror.epoch,
            evaluation=self._number,
            base_version=self.mirror.version,
            set=self._set.name,
        )
        return send_all(self.rules.workers, pb.SchedulerMessage(evaluate=evaluate))

    def _on_done(self, member: str, body: pb.EvaluationDone, now_s: float) -> list[Effect]:
        if body.evaluation != self._number or member not in self.waiting:
            return []
        self._reports[member] = body
        if not self.answered(member):
            return []
        self.done = True
        self.seconds = now_s - self.started_s
        reports = [self._reports[worker] for worker in self.rules.workers]
        score = score_of(self._set.name, self.mirror.version, reports, self.rules.emulated)
        line = evaluation_line(
            score,
            reports,
            attempt=self.mirror.next_attempt - 1,
            tokens=sum(report.loss_tokens for report in reports),
            epoch=self.mirror.epoch,
            seconds=self.seconds,
            time_s=now_s + self.rules.since_1970_s,
            emulated=self.rules.emulated,
        )
        return [self.mirror.evaluate(self._number, score, line), AppendMetrics(metrics_json=line)]

    answers = {"evaluation_done": _on_done}  # noqa: RUF012


class Shutdown(Activity):
    """The end: writes the run's result, sends Shutdown, waits until the members have left, exits.

    Lost nodes are waited for, too: they may return and receive Shutdown. Members that join
    meanwhile receive it as well. ``error`` is empty for a regular end. ``leave_by_s``: latest time
    of the exit; None for the usual ``shutdown_s``.
    """

    title = "the end"

    def __init__(
        self,
        rules: Rules,
        mirror: JournalMirror,
        members: Membership,
        *,
        keep_memory: bool,
        reason: str,
        code: ExitCode,
        error: str = "",
        leave_by_s: float | None = None,
    ) -> None:
        super().__init__(rules, mirror)
        self.phase = RunPhase.FAILED if error else RunPhase.DONE
        self.reason = reason
        self.error = error
        self._code = code
        self._members = members
        self._message = pb.SchedulerMessage(
            shutdown=pb.Shutdown(keep_memory=keep_memory, reason=reason, exit_code=int(code))
        )
        self._note = NoteEnd(
            reason=error or reason, code=code, keep_memory=keep_memory, failed=bool(error)
        )
        self._leave_by_s = math.inf if leave_by_s is None else leave_by_s
        self._exit_s = 0.0
        self._hurried = False

    def start(self, now_s: float) -> list[Effect]:
        """Sends Shutdown to nodes together with their children, so that no child is restarted."""
        self._exit_s = min(now_s + self.rules.deadlines.shutdown_s, self._leave_by_s)
        line = LogLine(text=f"shutting down: {self.reason}", warning=bool(self.error))
        self.waiting = set(self._members.lost_nodes)
        # The note first: a scheduler that comes after this one must not go on with the run.
        return [line, self._note, *send_all(self._members.present, self._message)]

    def joined(self, member: str) -> list[Effect]:
        """Sends Shutdown to a member that joins too late."""
        self.waiting.discard(member)
        return [Send(member=member, message=self._message)]

    def hurry(self) -> None:
        """Stops the wait for members."""
        self._hurried = True

    def look(self, now_s: float) -> list[Effect]:
        """Exits when all members have left or the time is over."""
        patient = not self._hurried and now_s < self._exit_s
        if self.done or ((self._members.present or self.waiting) and patient):
            return []
        self.done = True
        return [Exit(code=self._code, reason=self.error)]
