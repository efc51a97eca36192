"""Numbers for people: times, bytes, and the marks of a time axis."""

from __future__ import annotations

import math
from dataclasses import dataclass

_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_NICE_STEPS = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUnit:
    """The unit of a simulation's second: a second, or an abstract unit."""

    abstract: bool

    def format(self, seconds: float, *, digits: int = 4) -> str:
        """Returns a time such as ``1.25 s`` or ``3.1 ms``, and a bare number where units are
        abstract.
        """
        if self.abstract:
            return f"{seconds:.6g}"
        factor, name = self._scale(abs(seconds))
        return f"{seconds / factor:.{digits}g} {name}"

    def ticks(self, end_s: float, *, at_most: int) -> tuple[tuple[float, str], ...]:
        """Returns round times from 0 to ``end_s`` with their texts; the last one carries
        the unit.
        """
        if end_s <= 0.0:
            return ((0.0, "0"),)
        factor, name = (1.0, "") if self.abstract else self._scale(end_s)
        step = _nice_step(end_s / factor / at_most)
        count = math.floor(end_s / factor / step + 1e-9)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        texts = [f"{i * step:.{digits}f}" for i in range(count + 1)]
        texts[-1] = f"{texts[-1]} {name}".rstrip()
        return tuple((i * step * factor, text) for i, text in enumerate(texts))

    def _scale(self, seconds: float) -> tuple[float, str]:
        return next((s for s in _SCALES if seconds >= s[0]), _SCALES[-1 if seconds else 0])


SECONDS = TimeUnit(abstract=False)
"""The unit of profiles and analytic models."""
ABSTRACT = TimeUnit(abstract=True)
"""The unit of unit costs."""


def _nice_step(least: float) -> float:
    """Returns the smallest of 1, 2, 5, 10, 20, … (or 0.1, 0.2, …) that is not below ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * nice for nice in _NICE_STEPS if power * nice >= least * (1.0 - 1e-9))
