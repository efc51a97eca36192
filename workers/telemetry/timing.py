"""The times of an attempt's instructions, and of their waits.

Stamps of the device are taken at the issue of each instruction (:mod:`penstock.workers.device`). On
a GPU they are points on its streams with times that are still unknown. After the attempt they
become seconds of the host's clock, for metrics and for the trace.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from penstock.host import world
from penstock.protocol.plan.instructions import Instruction, Opcode
from penstock.protocol.plan.semantics import COMPUTES
from penstock.protocol.run.trace import TraceLane
from penstock.workers.device import Copied, Device, Stamp
from penstock.workers.telemetry.account import IdleCause, TimeAccount
from penstock.workers.telemetry.progress import busy_with
from penstock.workers.telemetry.trace import TraceRing

CATCH_UP_S = 2.0
"""Seconds between additions to the account during a long attempt."""


@dataclass(slots=True)
class Transferred:
    """Bytes, and the seconds that they took."""

    num_bytes: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class Tally:
    """The times of an attempt's instructions, in seconds.

    ``busy_s``: computing, without waits; ``computed_at``: the end of the last compute instruction,
    by ``time.perf_counter`` (0: none); ``transfers`` by direction and kind, as metrics name them.
    """

    counts: Counter[Opcode] = field(default_factory=Counter)
    transfers: dict[tuple[str, str], Transferred] = field(default_factory=dict)
    busy_s: float = 0.0
    computed_at: float = 0.0

    def transferred(
        self, direction: str, kind: str, *, num_bytes: float = 0.0, seconds: float
    ) -> None:
        """Adds to ``transfers``."""
        sums = self.transfers.setdefault((direction, kind), Transferred())
        sums.num_bytes += num_bytes
        sums.seconds += max(0.0, seconds)


@dataclass(slots=True)
class _Issued:
    """An instruction's stamps: its begin, the end of each wait, and its computation from ``ready``
    to ``end``. ``awaited``: the cause of its last wait, if the device itself knows it.
    """

    instruction: Instruction
    start: Stamp
    waits: list[tuple[IdleCause, Stamp]]
    ready: Stamp
    end: Stamp
    awaited: IdleCause | None

    @property
    def stamps(self) -> list[Stamp]:
        return [self.start, *(stamp for _, stamp in self.waits), self.ready, self.end]


class Timeline:
    """The stamps of one attempt; their times go into ``account``, and to the trace."""

    def __init__(
        self, device: Device, ring: TraceRing, account: TimeAccount, phase: str, attempt: int
    ) -> None:
        self._device = device
        self._ring = ring
        self._account = account
        self._phase = phase
        self._attempt = attempt
        self._issued: list[_Issued] = []
        self._loads: list[tuple[TraceLane, str, Stamp, Stamp]] = []
        self._copies: list[tuple[str, str, Copied]] = []
        self._lock = world.lock()
        self._start: Stamp = None
        self._waits: list[tuple[IdleCause, Stamp]] = []
        self._in_vain: list[tuple[IdleCause, float]] = []
        self._ran: tuple[Stamp, Stamp, IdleCause | None] | None = None
        self._caught_up_s = world.perf_counter()
        device.start_clock()

    def begin(self) -> None:
        """Begins the issue of an instruction."""
        self._start = self._device.stamp()
        self._waits = []
        self._ran = None

    def inputs_are_here(self, cause: IdleCause) -> None:
        """Ends a wait of the current instruction; it may wait for more."""
        self._waits.append((cause, self._device.stamp()))

    def waited_in_vain(self, cause: IdleCause, seconds: float) -> None:
        """Records a wait of the current instruction that was aborted."""
        self._in_vain.append((cause, seconds))

    def ran(self, ready: Stamp, end: Stamp, awaited: IdleCause | None) -> None:
        """Records the computation of the current instruction, for a device that knows its own
        times. ``awaited``: the cause of its last wait, if any.
        """
        self._ran = ready, end, awaited

    def end(self, instruction: Instruction, tally: Tally) -> None:
        """Ends the issue of an instruction."""
        start, waits = self._start, self._waits
        if self._ran is not None:
            ready, end, awaited = self._ran
            waits = []
        else:
            ready, end = waits[-1][1] if waits else start, self._device.stamp()
            awaited = None
        self._issued.append(_Issued(instruction, start, waits, ready, end, awaited))
        self._ring.remember(instruction)
        now_s = world.perf_counter()
        if now_s - self._caught_up_s > CATCH_UP_S:
            self._caught_up_s = now_s
            done = next(
                (i for i, each in enumerate(self._issued) if not self._device.passed(each.end)),
                len(self._issued),
            )
            self._settle(self._take(done), tally)

    def loaded(self, lane: TraceLane, text: str, start: Stamp, end: Stamp) -> None:
        """Records a load to the device; from any thread."""
        with self._lock:
            self._loads.append((lane, text, start, end))

    def copied(self, direction: str, kind: str, copied: Copied) -> None:
        """Records a copy to the device (``h2d``) or from it; from any thread."""
        with self._lock:
            self._copies.append((direction, kind, copied))

    def resolve(self, tally: Tally) -> None:
        """Adds all times to ``tally``, the account and the trace; waits until the device has
        finished.
        """
        self._settle(self._take(len(self._issued)), tally)
        for cause, seconds in self._in_vain:
            self._account.waited(cause, seconds)
        self._in_vain.clear()
        with self._lock:
            loads, self._loads = self._loads, []
            copies, self._copies = self._copies, []
        stamps = [stamp for _, _, *two in loads for stamp in two]
        # In the same call: a copy has the stamps of its load.
        stamps += [stamp for _, _, each in copies for stamp in (each.start, each.end)]
        moments = iter(self._device.seconds(stamps))
        for lane, text, *_ in loads:
            start, end = next(moments), next(moments)
            self._ring.record(lane, text, self._phase, self._attempt, start, end)
        for direction, kind, copied in copies:
            start, end = next(moments), next(moments)
            tally.transferred(direction, kind, num_bytes=copied.num_bytes, seconds=end - start)

    def _take(self, count: int) -> list[_Issued]:
        taken, self._issued = self._issued[:count], self._issued[count:]
        return taken

    def _settle(self, issued: list[_Issued], tally: Tally) -> None:
        seconds = iter(self._device.seconds([stamp for each in issued for stamp in each.stamps]))
        traced = self._ring.keeps(self._attempt, self._phase)
        for each in issued:
            start = before = next(seconds)
            for cause, _ in each.waits:
                until = next(seconds)
                self._account.waited(cause, until - before)
                before = until
            ready, end = next(seconds), next(seconds)
            tally.counts[each.instruction.opcode] += 1
            if isinstance(each.instruction, COMPUTES):
                tally.busy_s += end - ready
                tally.computed_at = max(tally.computed_at, end)
                what = busy_with(each.instruction, self._phase)
                self._account.computed(what, ready, end, each.awaited)
            if traced:
                begun, waited = min(start, ready), max(0.0, ready - start)
                self._ring.executed(
                    self._phase, self._attempt, each.instruction, begun, end, waited
                )
