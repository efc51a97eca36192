"""``python -m tests.simulation``: many seeds, one seed again, or the shortest plan that fails.

``run --seeds A:B [--minutes M] [--jobs N] [--kind K ...] [--shape S ...] [--storms]`` exits with 1
when a seed violates what must hold, and prints the line that replays it. Without an end (``--seeds
A:``) it goes on until the minutes are over; with ``--shape`` it runs only seeds of these shapes,
with ``--storms`` only those whose faults come ten in a step. ``replay
SEED ...`` prints the list of events; without seeds it reads them from its input, one a line: what
takes long is to import torch. ``golden`` writes down what runs leave that nobody disturbs, which no
change of the code may change. ``shrink SEED`` leaves out faults as long as the seed still fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import sys
import time
from typing import Any

from tests.simulation.many import Totals, fix_hash_seed, stay_on_core, work_on_core


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("golden")
    run = commands.add_parser("run")
    run.add_argument("--seeds", default="0:")
    run.add_argument("--minutes", type=float, default=None)
    run.add_argument("--jobs", type=int, default=1)
    run.add_argument("--kind", action="append", default=[])
    run.add_argument("--shape", action="append", default=[])
    run.add_argument("--storms", action="store_true")
    run.add_argument("--stop-at-first", action="store_true")
    for name in ("replay", "shrink"):
        command = commands.add_parser(name)
        count: Any = "*" if name == "replay" else None
        command.add_argument("seed", type=int, nargs=count)
        command.add_argument("--kind", action="append", default=[])
    given = parser.parse_args(arguments)
    fix_hash_seed("tests.simulation", arguments)
    if given.command == "golden":
        return _write_golden()
    if given.command == "run":
        return _run(given)
    stay_on_core(os.getpid())
    return _replay(given) if given.command == "replay" else _shrink(given)


# ---- many ----


def _run(given: Any) -> int:
    from tests.simulation.configurations import SHAPES

    first, _, last = given.seeds.partition(":")
    seeds = range(int(first), int(last) if last else 1 << 62)
    begun_s = time.monotonic()
    kinds, shapes = tuple(given.kind), frozenset(given.shape)
    unknown = shapes - {shape.name for shape in SHAPES}
    if unknown:
        print(f"no such shape: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    what = (given.minutes, kinds, shapes, given.storms, given.stop_at_first)
    if given.jobs <= 1:
        any_core = os.getpid()
        totals = work_on_core(any_core, seeds, *what)
    else:
        totals = Totals()
        shares = [(job, seeds[job :: given.jobs], *what) for job in range(given.jobs)]
        with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
            for part in pool.starmap(work_on_core, shares):
                totals.add(part)
    _report(totals, time.monotonic() - begun_s)
    return int(bool(totals.failed))


def _report(totals: Totals, wall_s: float) -> None:
    from tests.simulation.rare import COUNTED, LOSSES, RARE

    print(
        f"{totals.seeds} seeds, {totals.twice} of them twice; {totals.faults} effective faults"
        f" ({totals.delays} delays and the like besides) in {wall_s:.0f} s,"
        f" {totals.cpu_s:.0f} s of CPU: {3600 * totals.faults / max(wall_s, 1e-9):.0f} an hour,"
        f" {3600 * totals.faults / max(totals.cpu_s, 1e-9):.0f} an hour of a core;"
        f" {len(totals.failed)} violations"
    )
    print("faults: " + ", ".join(f"{k} {n}" for k, n in totals.effective.most_common()))
    names = (*RARE, *LOSSES)
    reached = [name for name in names if totals.rare[name]]
    print(f"rare states: {len(reached)} of {len(names)} reached")
    for name in (*names, *COUNTED):
        print(f"  {totals.rare[name]:8d}  {name}")


def _write_golden() -> int:
    """Write down what undisturbed runs leave now: shapes have changed, or are new."""
    from tests.simulation.configurations import SHAPES
    from tests.simulation.many import digests_without_faults
    from tests.simulation.results import GOLDEN

    digests = digests_without_faults(shape.name for shape in SHAPES)
    GOLDEN.write_text(json.dumps(digests, indent=1) + "\n")
    return 0


# ---- one ----


def _replay(given: Any) -> int:
    from tests.simulation.simulate import Laboratory, run_seed
    from tests.simulation.simulated import replaced

    laboratory, wrong = Laboratory(), False
    try:
        for seed in given.seed or map(int, sys.stdin):
            with replaced(), contextlib.redirect_stderr(io.StringIO()):
                outcome = run_seed(laboratory, seed, tuple(given.kind))
            _tell(outcome)
            wrong |= bool(outcome.violations)
    finally:
        laboratory.close()
    return int(wrong)


def _tell(outcome: Any) -> None:
    for at_s, words in outcome.events:
        print(f"{at_s - 1000.0:12.6f}  {'  '.join(words)}")
    print(f"shape {outcome.shape}; {outcome.virtual_s:.1f} s of virtual time", flush=True)
    for text in outcome.violations:
        print(f"VIOLATION {text}")


def _shrink(given: Any) -> int:
    from tests.simulation.configurations import drawn_shape
    from tests.simulation.simulate import Laboratory, run_plan, run_seed
    from tests.simulation.simulated import replaced

    laboratory, seed = Laboratory(), given.seed
    try:
        with replaced(), contextlib.redirect_stderr(io.StringIO()):
            outcome = run_seed(laboratory, seed, tuple(given.kind))
            if not outcome.violations:
                print(f"seed {seed} violates nothing")
                return 0
            plan, size = list(outcome.plan), max(1, len(outcome.plan) // 2)
            while size:
                start = 0
                while start < len(plan):
                    shorter = plan[:start] + plan[start + size :]
                    tried = run_plan(laboratory, drawn_shape(seed), seed, shorter)
                    if tried.violations:
                        plan, outcome = shorter, tried
                    else:
                        start += size
                size //= 2
    finally:
        laboratory.close()
    _tell(outcome)
    print(f"{len(plan)} faults are left:")
    for fault in plan:
        print(f"  {fault}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
