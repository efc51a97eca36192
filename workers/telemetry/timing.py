"""When an attempt's instructions ran, and what they waited for.

While they are issued, stamps of the device are taken (:mod:`penstock.workers.platforms.base`): on a
GPU they are points on its streams, whose moments nobody knows yet. Once the attempt is over they
are turned into seconds of the host's clock, for metrics and for the trace.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from penstock.protocol.plan.instructions import Instruction, Opcode
from penstock.protocol.plan.semantics import COMPUTES
from penstock.protocol.run.trace import TraceLane
from penstock.workers.platforms.base import Device, Stamp
from penstock.workers.telemetry.trace import TraceRing


@dataclass(slots=True)
class Tally:
    """What an attempt's instructions took, in seconds. ``busy_s``: computing, without waits;
    ``received_s``: the host's waits for peers; ``computed_at``: when the last compute instruction
    ended, by ``time.perf_counter`` (0: there was none).
    """

    seconds: defaultdict[Opcode, float] = field(default_factory=lambda: defaultdict(float))
    counts: Counter[Opcode] = field(default_factory=Counter)
    received_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    busy_s: float = 0.0
    computed_at: float = 0.0


class Timeline:
    """The stamps of one attempt."""

    def __init__(self, device: Device, ring: TraceRing, phase: str, attempt: int) -> None:
        self._device = device
        self._ring = ring
        self._phase = phase
        self._attempt = attempt
        self._executed: list[tuple[Instruction, Stamp, Stamp, Stamp]] = []
        self._loads: list[tuple[TraceLane, str, Stamp, Stamp]] = []
        self._lock = threading.Lock()
        self._start: Stamp = None
        self._ready: Stamp = None
        self._ran: tuple[Stamp, Stamp] | None = None
        device.start_clock()

    def begin(self) -> None:
        """An instruction is issued."""
        self._start = self._ready = self._device.stamp()
        self._ran = None

    def inputs_are_here(self) -> None:
        """The instruction under way has what it waited for; it may wait for more."""
        self._ready = self._device.stamp()

    def ran(self, ready: Stamp, end: Stamp) -> None:
        """For a device that knows by itself when the instruction under way computed."""
        self._ran = ready, end

    def end(self, instruction: Instruction) -> None:
        """All of the instruction is issued."""
        ready, end = self._ran or (self._ready, self._device.stamp())
        self._executed.append((instruction, self._start, ready, end))
        self._ring.remember(instruction)

    def loaded(self, lane: TraceLane, text: str, start: Stamp, end: Stamp) -> None:
        """Something was brought to the device; from any thread."""
        with self._lock:
            self._loads.append((lane, text, start, end))

    def resolve(self, tally: Tally) -> None:
        """Add all to ``tally`` and to the trace; waits until the device has done it."""
        with self._lock:
            executed, self._executed = self._executed, []
            loads, self._loads = self._loads, []
        stamps = [stamp for _, *three in executed for stamp in three]
        stamps += [stamp for _, _, *two in loads for stamp in two]
        seconds = iter(self._device.seconds(stamps))
        traced = self._ring.keeps(self._attempt, self._phase)
        for instruction, *_ in executed:
            start, ready, end = next(seconds), next(seconds), next(seconds)
            opcode = instruction.opcode
            tally.seconds[opcode] += end - min(start, ready)
            tally.counts[opcode] += 1
            if isinstance(instruction, COMPUTES):
                tally.busy_s += end - ready
                tally.computed_at = max(tally.computed_at, end)
            if traced:
                begun, waited = min(start, ready), max(0.0, ready - start)
                self._ring.executed(self._phase, self._attempt, instruction, begun, end, waited)
        for lane, text, *_ in loads:
            start, end = next(seconds), next(seconds)
            self._ring.record(lane, text, self._phase, self._attempt, start, end)
