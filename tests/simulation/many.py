"""Many seeds on one core, and what they add up to."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

FOLDER = "penstock-simulation-"
"""How a simulation's folder in /dev/shm begins; its process id follows."""
HASH_SEED = "0"
TWICE_EVERY = 100
"""Every so many seeds are run twice: they must leave the same trace."""


def fix_hash_seed(module: str, arguments: Sequence[str] | None) -> None:
    """Begin again as ``python -m module`` where sets of names would have an order of their own."""
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
        command_line = [sys.executable, "-m", module, *(arguments or sys.argv[1:])]
        os.execve(sys.executable, command_line, environment)


def stay_on_core(number: int) -> None:
    """Keep this process, and its thread of sweeps, on one of its cores."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


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
    seeds: Iterable[int],
    minutes: float | None = None,
    kinds: tuple[str, ...] = (),
    *,
    stop_at_first: bool = False,
    clock: Callable[[], float] = time.monotonic,
    undisturbed: Any = None,
    first: Collection[str] = (),
) -> Totals:
    """Run seeds, at least one; ``minutes`` of ``clock`` begin when all is imported.
    ``undisturbed``: what :func:`undisturbed_runs` gave, where it is known; ``first``: shapes that
    are run without faults before, as they may not leave that any more.
    """
    from tests.simulation.simulate import Laboratory
    from tests.simulation.simulated import replaced

    totals, laboratory = Totals(), Laboratory(undisturbed)
    gc.freeze()  # what was imported stays
    gc.set_threshold(100_000, 20, 100)
    until_s = None if minutes is None else clock() + 60.0 * minutes
    try:
        with replaced():
            _run_undisturbed(laboratory, first, totals)
            for seed in () if totals.failed and stop_at_first else seeds:
                if totals.seeds and until_s is not None and clock() > until_s:
                    break
                _live(laboratory, seed, kinds, totals)
                if totals.failed and stop_at_first:
                    break
    finally:
        laboratory.close()
    return totals


def work_on_core(
    core: int,
    seeds: range,
    minutes: float | None,
    kinds: tuple[str, ...],
    shapes: frozenset[str],
    storms: bool,
    stop_at_first: bool,
) -> Totals:
    """Run seeds as :func:`work` does, of ``shapes`` if any are named, and storms alone if these are
    asked for, on a core of its own.
    """
    from tests.simulation.configurations import drawn_shape
    from tests.simulation.plans import is_storm

    stay_on_core(core)
    chosen = (
        seed
        for seed in seeds
        if (not shapes or drawn_shape(seed).name in shapes) and (not storms or is_storm(seed))
    )
    return work(chosen, minutes, kinds, stop_at_first=stop_at_first)


def undisturbed_runs(begins: Callable[[str], None] = lambda shape: None) -> Any:
    """Returns what each shape leaves that nobody disturbs. ``begins`` hears of each before it is
    run.
    """
    from tests.simulation.simulate import SHAPES, Laboratory
    from tests.simulation.simulated import replaced

    laboratory = Laboratory()
    try:
        with replaced(), contextlib.redirect_stderr(io.StringIO()):
            found = {}
            for shape in SHAPES:
                begins(shape.name)
                found[shape.name] = laboratory.undisturbed(shape)
            return found
    finally:
        laboratory.close()


def digests_without_faults(names: Iterable[str]) -> dict[str, str]:
    """Returns a digest of the states and metrics that each named shape leaves without faults; empty
    where a shape keeps no bits. A violation stands in the place of its digest.
    """
    from tests.simulation.simulate import SHAPES, Laboratory, simulate
    from tests.simulation.simulated import replaced

    shapes = {shape.name: shape for shape in SHAPES}
    laboratory, digests = Laboratory(), {}
    try:
        for name in names:
            with replaced(), contextlib.redirect_stderr(io.StringIO()):
                outcome = simulate(laboratory, shapes[name], 0, ())
            result = outcome.result
            digests[name] = outcome.violations[0] if result is None else result.digest
    finally:
        laboratory.close()
    return digests


def _run_undisturbed(laboratory: Any, shapes: Collection[str], totals: Totals) -> None:
    """Until one leaves something else than it is known to leave, or does what it must not."""
    from tests.simulation.simulate import SHAPES, run_plan

    for shape in (shape for shape in SHAPES if shape.name in shapes):
        with contextlib.redirect_stderr(io.StringIO()):
            violations = run_plan(laboratory, shape, 0, ()).violations
        if violations:
            totals.failed.append((0, shape.name, violations[0]))
            print(f"VIOLATION of {shape.name}, undisturbed: {violations[0][-1500:]}", flush=True)
            return


def _live(laboratory: Any, seed: int, kinds: tuple[str, ...], totals: Totals) -> None:
    from tests.simulation.simulate import run_seed

    totals.seeds += 1
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            outcome = run_seed(laboratory, seed, kinds)
            if seed % TWICE_EVERY == 0:
                totals.twice += 1
                again = run_seed(laboratory, seed, kinds)
                if again.digest != outcome.digest:
                    outcome.violations.append("a second run left another trace")
    except Exception:  # of the simulation itself: what other seeds gave must not go with it
        _violated(totals, seed, "unknown", traceback.format_exc())
        return
    totals.cpu_s += outcome.cpu_s
    totals.delays += outcome.delays
    totals.effective += outcome.effective
    totals.rare += outcome.rare
    totals.shapes[outcome.shape] += 1
    if outcome.violations:
        _violated(totals, seed, outcome.shape, outcome.violations[0])


def _violated(totals: Totals, seed: int, shape: str, said: str) -> None:
    totals.failed.append((seed, shape, said))
    print(
        f"VIOLATION seed {seed} ({shape}): {said[-1500:]}\n"
        f"  replay: python -m tests.simulation replay {seed}",
        flush=True,
    )
