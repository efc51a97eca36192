"""What a worker did when: a bounded ring of executed instructions.

Written to ``RUN_DIR/trace/worker-N.jsonl`` after each attempt when ``observability.trace`` is on,
one array ``[phase, attempt, opcode, stage, micro_batch, start, end]`` a line; times in seconds
since 1970.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.protocol.instructions import Instruction

RING_EVENTS = 16384


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One executed instruction. ``start`` and ``end`` are readings of ``time.perf_counter``."""

    phase: str
    attempt: int
    instruction: Instruction
    start: float
    end: float


class TraceRing:
    """The last :data:`RING_EVENTS` events."""

    def __init__(self, capacity: int = RING_EVENTS) -> None:
        self._events: deque[TraceEvent] = deque(maxlen=capacity)
        self._clock_offset_s = time.time() - time.perf_counter()

    def add(self, event: TraceEvent) -> None:
        """Append one event; the oldest goes when the ring is full."""
        self._events.append(event)

    def last(self, count: int) -> tuple[TraceEvent, ...]:
        """The newest ``count`` events, oldest first."""
        return tuple(self._events)[-count:]

    def flush(self, path: Path) -> None:
        """Append all events to a file and forget them."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in self._lines(self._events))
        self._events.clear()

    def _lines(self, events: Iterable[TraceEvent]) -> Iterable[str]:
        for event in events:
            yield json.dumps(
                [
                    event.phase,
                    event.attempt,
                    event.instruction.opcode.name,
                    getattr(event.instruction, "stage", None),
                    getattr(event.instruction, "micro_batch", None),
                    round(event.start + self._clock_offset_s, 6),
                    round(event.end + self._clock_offset_s, 6),
                ]
            )
