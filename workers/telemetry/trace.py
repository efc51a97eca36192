"""A worker's events: its latest instructions for errors, and all those of traced attempts.

Times are readings of ``time.perf_counter``. :mod:`penstock.protocol.run.trace` has the file format,
and the choice of traced attempts.
"""

from __future__ import annotations

from collections import deque

from penstock.protocol.plan.instructions import Instruction
from penstock.protocol.plan.semantics import COMPUTES
from penstock.protocol.run.trace import TraceLane, TraceLog

REMEMBERED = 16
"""Instructions kept for error messages."""


class TraceRing:
    """The last instructions, and the log that gets all events of traced attempts."""

    def __init__(self, log: TraceLog | None = None) -> None:
        self._log = log or TraceLog(None, "worker")
        self._recent: deque[Instruction] = deque(maxlen=REMEMBERED)
        self._named: dict[int, tuple[Instruction, TraceLane, str]] = {}

    def keeps(self, attempt: int, phase: str) -> bool:
        """Returns whether an attempt, or a batch of an evaluation, is traced."""
        return self._log.keeps(attempt, phase)

    def remember(self, instruction: Instruction) -> None:
        """Keeps an issued instruction, for an error that follows soon."""
        self._recent.append(instruction)

    def executed(
        self,
        phase: str,
        attempt: int,
        instruction: Instruction,
        start_s: float,
        end_s: float,
        waited_s: float,
    ) -> None:
        """Records an instruction; the first ``waited_s`` seconds of it were a wait for input."""
        # A plan's instructions come again in every attempt. Their hash costs more than their text;
        # an id that was used before belongs to another object.
        known = self._named.get(id(instruction))
        if known is None or known[0] is not instruction:
            lane = TraceLane.COMPUTE if isinstance(instruction, COMPUTES) else TraceLane.ISSUE
            known = self._named[id(instruction)] = instruction, lane, str(instruction)
        self._log.record(known[1], known[2], phase, attempt, start_s, end_s, waited_s)

    def last(self, count: int) -> tuple[Instruction, ...]:
        """Returns the newest ``count`` instructions, oldest first; :data:`REMEMBERED` at most."""
        return tuple(self._recent)[-count:]

    def record(
        self, lane: TraceLane, text: str, phase: str, attempt: int, start_s: float, end_s: float
    ) -> None:
        """Records any other event; from any thread."""
        if self._log.keeps(attempt, phase):
            self._log.record(lane, text, phase, attempt, start_s, end_s)

    def flush(self) -> None:
        """Writes all events since the last call, if there are any."""
        self._log.flush()
