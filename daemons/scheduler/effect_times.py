"""Durations of the scheduler's decisions, measured from the effects that are carried out.

The machine's clock stands still while it decides. The journal and messages take time::

    last report | (amending …) journal, announce | metrics | next attempt announced
                |--------- commit latency -------|
                               |--------- between attempts ----------|
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from penstock.daemons.scheduler.machine.events import (
    AppendMetrics,
    Effect,
    JournalDecision,
    JournalEpoch,
    PrepareSave,
    Send,
)
from penstock.daemons.scheduler.metrics import SchedulerMetrics
from penstock.protocol.run.process import monotonic_s

_GOING_ON = frozenset({"run_attempt", "evaluate"})


class EffectTimes:
    """Measures effects, and adds the durations to ``metrics``."""

    def __init__(self, metrics: SchedulerMetrics, clock: Callable[[], float] = monotonic_s) -> None:
        self._metrics = metrics
        self._clock = clock
        self._reported_s: float | None = None
        self._decided_s: float | None = None
        self._settling_s: float | None = None
        self._preparing = False

    def begins(self, effect: Effect) -> None:
        """Notes an effect that is about to be carried out."""
        handler = self._HANDLERS.get(type(effect))
        if handler is not None:
            handler(self, effect)

    def done(self) -> None:
        """Notes the end of a list of effects. Without an announcement left, the scheduler is
        idle.
        """
        if self._settling_s is None and not self._preparing:
            self._go_on(self._clock())

    def _on_send(self, effect: Send) -> None:
        kind = effect.message.WhichOneof("body")
        if kind == "amend" and self._reported_s is None:
            self._reported_s = self._clock()
        elif kind == "settle" and self._preparing:
            self._go_on(self._clock())  # no attempt starts until the save is over
        elif kind == "settle" and self._settling_s is None:
            self._settling_s = self._clock()
        elif kind in _GOING_ON:
            self._go_on(self._clock())

    def _on_decision(self, effect: JournalDecision) -> None:
        if effect.metrics_json:  # a RESTORE decides about no attempt
            self._decided_s = self._clock()
            if self._reported_s is None:
                self._reported_s = self._decided_s

    def _on_metrics(self, effect: AppendMetrics) -> None:
        if self._reported_s is not None:
            self._metrics.announced(self._clock() - self._reported_s)
            self._reported_s = None

    def _on_save(self, effect: PrepareSave) -> None:
        """Notes that the next attempt waits for the beginning of a save."""
        self._preparing = True

    def _on_epoch(self, effect: JournalEpoch) -> None:
        self._preparing = False
        self._reported_s = self._decided_s = self._settling_s = None

    def _go_on(self, now_s: float | None) -> None:
        if self._decided_s is not None and now_s is not None:
            self._metrics.went_on(now_s - self._decided_s)
        self._decided_s = self._settling_s = None
        self._preparing = False

    _HANDLERS: ClassVar[Mapping[type, Callable[[EffectTimes, Any], None]]] = {
        Send: _on_send,
        JournalDecision: _on_decision,
        AppendMetrics: _on_metrics,
        PrepareSave: _on_save,
        JournalEpoch: _on_epoch,
    }
