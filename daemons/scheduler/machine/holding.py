"""The hold policy: when the optimizer waits for the norm instead of speculating that nothing is
clipped.

Speculation hides the update behind the backward. Each clipped attempt then costs a second preview
of all blocks. A holding attempt only checks its gradients, and takes the whole step once, after the
decision. Its sweeps delay the next forward, with which they overlap in part. The cheaper mode
depends on the rate of clipping, the machine and the schedule. The rate is counted in both modes: a
holding attempt over the limit is an AMEND, too, without a second preview. The times are measured.
Before that, a hold begins above one half.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from penstock.shm.control import Decision

HOLD_WINDOW = 20
"""Last attempts that count."""
HYSTERESIS = 4
"""Clipped attempts between the beginning of a hold and its end. At a steady rate of clipping, their
number in the window changes by one, by chance by two or three.
"""
MIN_CLEAN, MIN_AMENDED, MIN_HELD = 2, 2, 5
"""Attempts of each kind that are needed for an estimate of their durations."""
REMEMBERED = 500
"""Attempts in one mode after which measurements of the other mode are dropped."""
NOTICEABLE = 0.05
"""Share of a clean attempt above which an amendment is worth a trial of holding."""
AMENDED = "a"
"""The letter of an attempt over the limit in a position's ``recent``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldLimits:
    """A hold begins when more than ``enter`` of the last attempts were over the norm's limit, and
    ends when fewer than ``leave`` were.
    """

    enter: int = HOLD_WINDOW // 2
    leave: int = HOLD_WINDOW // 2 - HYSTERESIS

    def hold(self, holding: bool, recent: str) -> bool:
        """Returns whether to hold next, after the decisions ``recent`` (a letter each)."""
        amended = recent.count(AMENDED)
        return amended >= self.leave if holding else amended > self.enter


NEVER = HoldLimits(enter=HOLD_WINDOW + HYSTERESIS + 1, leave=HOLD_WINDOW + 1)
TO_HOLD = HoldLimits(enter=MIN_AMENDED - 1, leave=0)
TO_SPECULATE = HoldLimits(enter=HOLD_WINDOW - MIN_CLEAN, leave=HOLD_WINDOW - MIN_CLEAN)


class AttemptCosts:
    """Durations of recent attempts in each mode. They are not journaled, since they depend on the
    machine and its load.
    """

    def __init__(self) -> None:
        self._clean_s, self._amended_s, self._held_s = (
            deque[float](maxlen=HOLD_WINDOW) for _ in range(3)
        )
        self._held = False
        self._in_mode = 0

    def add(self, decision: Decision, seconds: float, *, held: bool) -> None:
        """Notes the seconds of an attempt that ``held`` or speculated, since the decision
        before.
        """
        self._in_mode = self._in_mode + 1 if held is self._held else 0
        self._held = held
        # The first attempt after a change still pays for the other mode.
        if self._in_mode and decision is not Decision.SKIP:
            amended = decision is Decision.AMEND
            (self._held_s if held else self._amended_s if amended else self._clean_s).append(
                seconds
            )
        if self._in_mode >= REMEMBERED:
            for old in (self._clean_s, self._amended_s) if held else (self._held_s,):
                old.clear()

    @property
    def limits(self) -> HoldLimits:
        """The limits at which holding costs as much as speculating.

        With a share ``p`` of clipped attempts, speculated ones take ``clean + p (amended - clean)``
        on average. Until both times are known, a measured hold ends as soon as clean attempts could
        be measured. Until a hold is measured, one is tried if amending takes a noticeable time. It
        goes on only if it would begin now.
        """
        held = len(self._held_s) >= MIN_HELD
        if len(self._clean_s) < MIN_CLEAN or len(self._amended_s) < MIN_AMENDED:
            return TO_SPECULATE if held else HoldLimits()
        clean_s = statistics.median(self._clean_s)
        again_s = statistics.median(self._amended_s) - clean_s
        if not held:
            return TO_HOLD if again_s > NOTICEABLE * clean_s else HoldLimits()
        delay_s = statistics.median(self._held_s) - clean_s
        if again_s <= 0.0:
            return HoldLimits() if delay_s <= 0.0 else NEVER
        enter = max(1, min(NEVER.enter, math.floor(HOLD_WINDOW * delay_s / again_s)))
        tried = len(self._held_s) == self._in_mode == MIN_HELD and self._held
        return HoldLimits(enter=enter, leave=enter + 1 if tried else max(1, enter - HYSTERESIS))
