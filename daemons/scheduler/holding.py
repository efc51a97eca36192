"""The hold policy: when the optimizer waits for the norm instead of speculating that nothing is
clipped.

Speculation hides the update behind the backward, and pays for every clipped attempt with a second
preview of all blocks. A holding attempt only looks at its gradients and takes the whole step, once,
after the decision. What was clipped is counted in both modes: a holding attempt over the limit is
an AMEND, too, only that nothing has to be done again.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from penstock.shm.control import Decision

HOLD_WINDOW = 20
"""Attempts that are looked at."""
HYSTERESIS = 4
"""How many fewer clipped attempts end a hold than begin one: at a steady rate of clipping their
number in the window moves by one, by chance by two or three.
"""
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
        """Whether to hold in the next attempt. ``recent``: the last decisions, a letter each."""
        amended = recent.count(AMENDED)
        return amended >= self.leave if holding else amended > self.enter


class SpeculationCosts:
    """What speculated attempts took, of late; no part of the journal, as it belongs to a machine.

    ``tail`` is the time from the last gradient to the decision, ``passes`` that of all passes which
    gave the decision its statuses.
    """

    def __init__(self) -> None:
        self._passes_s: deque[float] = deque(maxlen=HOLD_WINDOW)
        self._tails_s = {
            decision: deque[float](maxlen=HOLD_WINDOW)
            for decision in (Decision.COMMIT, Decision.AMEND)
        }

    def add(self, decision: Decision, *, passes_s: float, tail_s: float) -> None:
        """An attempt was speculated and decided."""
        if decision in self._tails_s:
            self._passes_s.append(passes_s)
            self._tails_s[decision].append(tail_s)

    @property
    def limits(self) -> HoldLimits:
        """The limits at which holding costs what speculating costs.

        A held step is one pass over everything behind the last gradient: about as long as all
        advances, ``passes``. Speculating leaves the tail of a clean attempt, and for the clipped
        share the second previews. Both are equal at ``(passes - tail) / previews``. It is not
        followed above one half: passes after a held decision overlap with the next forward, which
        this leaves out, and a second preview with nothing.
        """
        clean_s, amended_s = self._tails_s[Decision.COMMIT], self._tails_s[Decision.AMEND]
        if len(clean_s) < 3 or len(amended_s) < 2:
            return HoldLimits()
        tail_s = statistics.median(clean_s)
        again_s = statistics.median(amended_s) - tail_s
        hidden_s = statistics.median(self._passes_s) - tail_s
        if again_s <= 0.0 or hidden_s >= again_s / 2:
            return HoldLimits()
        enter = max(1, math.floor(HOLD_WINDOW * hidden_s / again_s))
        return HoldLimits(enter=enter, leave=max(1, enter - HYSTERESIS))
