"""The scheduler's part of a run's trace: attempts, decisions, evaluations and saves, as seen in the
effects that are carried out.

Spans follow each other, so each ends where the next begins::

    attempt (announced) | amending | commit, amend, skip (journaled, announced) | attempt …

If attempts are sampled, the span after a sampled attempt is traced as well: the step ends where
that span begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from penstock.daemons.scheduler.machine.events import (
    CompleteSave,
    Effect,
    JournalDecision,
    JournalEpoch,
    JournalEvaluation,
    PrepareSave,
    Send,
)
from penstock.protocol.run.trace import TraceLane, TraceLog, now_s


class DecisionTrace:
    """Writes spans to ``log``, if the run keeps a trace."""

    def __init__(self, log: TraceLog) -> None:
        self._log = log
        self._open: tuple[str, int, float] | None = None  # name, attempt, start
        self._ends = False  # the open span ends with the list of effects
        self._follows = False  # the last span belongs to a traced attempt

    def begins(self, effect: Effect) -> None:
        """Notes an effect that is about to be carried out."""
        if self._log.enabled:
            handler = self._HANDLERS.get(type(effect))
            if handler is not None:
                handler(self, effect)

    def done(self) -> None:
        """Ends spans and flushes the log after a list of effects."""
        if self._ends:
            self._close()
        self._log.flush()  # mostly empty; a decision and the next attempt come in one list

    def _begin(self, what: str, attempt: int, *, ends: bool = False) -> None:
        self._close()
        self._open = what, attempt, now_s()
        self._ends = ends

    def _close(self, what: str = "") -> None:
        if self._open is not None:
            named, attempt, since_s = self._open
            keeps = self._log.is_complete or (attempt > 0 and self._log.keeps(attempt))
            if keeps or self._follows:
                self._log.record(
                    TraceLane.SCHEDULER, what or named, "train", attempt, since_s, now_s()
                )
            self._follows = keeps
        self._open, self._ends = None, False

    def _on_send(self, effect: Send) -> None:
        """Opens a span at the first of several equal messages."""
        kind = effect.message.WhichOneof("body")
        what = None if self._open is None else self._open[0]
        if kind == "run_attempt" and what != "attempt":
            self._begin("attempt", effect.message.run_attempt.attempt)
        elif kind == "amend" and what == "attempt":
            self._begin("amending", effect.message.amend.attempt)
        elif kind == "evaluate" and what != "evaluation":
            self._begin("evaluation", 0)

    def _on_decision(self, effect: JournalDecision) -> None:
        record = effect.record
        self._begin(record.decision.name.lower(), record.attempt, ends=True)

    def _on_epoch(self, effect: JournalEpoch) -> None:
        """Closes the open span: the epoch broke."""
        self._close("broken")

    def _on_evaluated(self, effect: JournalEvaluation) -> None:
        self._ends = True

    def _on_prepare(self, effect: PrepareSave) -> None:
        self._begin("save", 0)

    def _on_complete(self, effect: CompleteSave) -> None:
        """Ends the span of the save, if attempts have not gone on before."""
        self._ends = self._ends or (self._open is not None and self._open[0] == "save")

    _HANDLERS: ClassVar[Mapping[type, Callable[[DecisionTrace, Any], None]]] = {
        Send: _on_send,
        JournalDecision: _on_decision,
        JournalEpoch: _on_epoch,
        JournalEvaluation: _on_evaluated,
        PrepareSave: _on_prepare,
        CompleteSave: _on_complete,
    }
