"""What a worker did when: its instructions, the last of them for errors, all of them for traces.

Readings of ``time.perf_counter`` throughout. The file form, and who reads it, is in
:mod:`penstock.protocol.run.trace`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from penstock.protocol.plan.instructions import Instruction
from penstock.protocol.plan.semantics import COMPUTES
from penstock.protocol.run.trace import TraceEvent, TraceLane, TraceLog

REMEMBERED = 16
"""Instructions kept for error messages."""


@dataclass(frozen=True, slots=True)
class Executed:
    """One executed instruction; the first ``waited_s`` seconds of it went by waiting for input."""

    phase: str
    attempt: int
    instruction: Instruction
    start_s: float
    end_s: float
    waited_s: float


class TraceRing:
    """The last instructions, and the log that gets all events if the run is traced."""

    def __init__(self, log: TraceLog | None = None) -> None:
        self._log = log or TraceLog(None, "worker")
        self._recent: deque[Instruction] = deque(maxlen=REMEMBERED)
        self._unwritten: deque[Executed] = deque()
        self._texts: dict[Instruction, str] = {}

    def remember(self, instruction: Instruction) -> None:
        """An instruction was issued, for errors that come soon."""
        self._recent.append(instruction)

    def executed(self, event: Executed) -> None:
        """It is known when an instruction ran."""
        if self._log.enabled:
            self._unwritten.append(event)

    def last(self, count: int) -> tuple[Instruction, ...]:
        """The newest ``count`` instructions, oldest first; :data:`REMEMBERED` at most."""
        return tuple(self._recent)[-count:]

    def add(self, event: TraceEvent) -> None:
        """Anything else that happened; from any thread."""
        self._log.add(event)

    def flush(self) -> None:
        """Write all events since the last time, if the run is traced."""
        while self._unwritten:
            self._log.add(self._event(self._unwritten.popleft()))
        self._log.flush()

    def _event(self, executed: Executed) -> TraceEvent:
        instruction = executed.instruction
        text = self._texts.get(instruction)
        if text is None:  # a plan's instructions come again in every attempt
            text = self._texts[instruction] = str(instruction)
        return TraceEvent(
            lane=TraceLane.COMPUTE if isinstance(instruction, COMPUTES) else TraceLane.ISSUE,
            text=text,
            phase=executed.phase,
            attempt=executed.attempt,
            start_s=executed.start_s,
            end_s=executed.end_s,
            waited_s=executed.waited_s,
        )
