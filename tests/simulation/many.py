"""Many seeds on one core, and what they add up to."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import time
from collections import Counter
from dataclasses import dataclass, field

TWICE_EVERY = 100
"""Every so many seeds are run twice: they must leave the same trace."""


@dataclass
class Totals:
    """What many seeds add up to."""

    seeds: int = 0
    twice: int = 0
    cpu_s: float = 0.0
    delays: int = 0
    effective: Counter[str] = field(default_factory=Counter)
    rare: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, other: Totals) -> None:
        """Count the seeds of another process."""
        self.seeds += other.seeds
        self.twice += other.twice
        self.cpu_s += other.cpu_s
        self.delays += other.delays
        self.effective += other.effective
        self.rare += other.rare
        self.shapes += other.shapes
        self.failed += other.failed

    @property
    def faults(self) -> int:
        """Effective ones."""
        return sum(self.effective.values())


def work(
    seeds: range,
    minutes: float | None,
    kinds: tuple[str, ...],
    job: int,
    stop_at_first: bool,
    shapes: frozenset[str] = frozenset(),
) -> Totals:
    """Run seeds on a core of its own, at least one; ``minutes`` begin when all is imported. Only
    seeds of these ``shapes``, if any are named.
    """
    from tests.simulation.configurations import drawn_shape
    from tests.simulation.simulate import Laboratory, run_seed
    from tests.simulation.simulated import replaced

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[job % len(cores)]})
    totals, laboratory = Totals(), Laboratory()
    gc.freeze()  # what was imported stays
    gc.set_threshold(20_000, 20, 100)
    until_s = None if minutes is None else time.monotonic() + 60.0 * minutes
    try:
        with replaced():
            for seed in seeds:
                if shapes and drawn_shape(seed).name not in shapes:
                    continue
                if totals.seeds and until_s is not None and time.monotonic() > until_s:
                    break
                with contextlib.redirect_stderr(io.StringIO()):
                    outcome = run_seed(laboratory, seed, kinds)
                    if seed % TWICE_EVERY == 0:
                        totals.twice += 1
                        again = run_seed(laboratory, seed, kinds)
                        if again.digest != outcome.digest:
                            outcome.violations.append("a second run left another trace")
                totals.seeds += 1
                totals.cpu_s += outcome.cpu_s
                totals.delays += outcome.delays
                totals.effective += outcome.effective
                totals.rare += outcome.rare
                totals.shapes[outcome.shape] += 1
                if outcome.violations:
                    said = outcome.violations[0]
                    totals.failed.append((seed, outcome.shape, said))
                    print(
                        f"VIOLATION seed {seed} ({outcome.shape}): {said[-1500:]}\n"
                        f"  replay: python -m tests.simulation replay {seed}",
                        flush=True,
                    )
                    if stop_at_first:
                        break
    finally:
        laboratory.close()
    return totals
