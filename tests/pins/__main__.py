"""``python -m tests.pins``: compares outcomes that no move and no new name may change.

Each part takes a line: equal, or the differences. The exit code is 1 if a part differs. ``--seeds
N`` simulates seeds 0 to N - 1, ``--only PART`` compares one part, ``--rewrite`` stores the outcomes
of the compared parts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.pins import existing, names, seeds, trainings
from tests.pins.comparing import Part
from tests.simulation.many import fix_hash_seed

DEFAULT_SEEDS = 200
PARTS = (
    Part(name="names", compare=names.compare, rewrite=names.rewrite),
    Part(name="plans", compare=existing.compare_plans, rewrite=existing.rewrite_plans),
    Part(
        name="planned-runs",
        compare=existing.compare_planned_runs,
        rewrite=existing.rewrite_planned_runs,
    ),
    Part(
        name="undisturbed",
        compare=existing.compare_undisturbed,
        rewrite=existing.rewrite_undisturbed,
    ),
    Part(name="saved-bytes", compare=trainings.compare, rewrite=trainings.rewrite),
    Part(name="seeds", compare=seeds.compare, rewrite=seeds.rewrite),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares or rewrites the parts, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.pins", description=__doc__)
    parser.add_argument("--seeds", type=int, default=DEFAULT_SEEDS)
    parser.add_argument("--only", action="append", choices=[part.name for part in PARTS])
    parser.add_argument("--rewrite", action="store_true")
    options = parser.parse_args(arguments)
    fix_hash_seed("tests.pins", arguments)
    chosen = [part for part in PARTS if not options.only or part.name in options.only]
    if options.rewrite:
        for part in chosen:
            part.rewrite(options.seeds)
            print(f"{part.name}: rewritten", flush=True)
        return 0
    return int(not all([_holds(part, options.seeds) for part in chosen]))


def _holds(part: Part, seeds: int) -> bool:
    """Prints the comparison of a part, and returns whether nothing differs."""
    begin_s = time.monotonic()
    comparison = part.compare(seeds)
    title = f"{seeds} seeds" if part.name == "seeds" else part.name
    print(f"{comparison.line(title)} ({time.monotonic() - begin_s:.0f} s)", flush=True)
    return comparison.holds


if __name__ == "__main__":
    sys.exit(main())
