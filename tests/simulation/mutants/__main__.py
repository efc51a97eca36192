"""``python -m tests.simulation.mutants named|kinds|held-out|automatic``: the simulation's score.

Example::

    python -m tests.simulation.mutants named --only announces-before-the-journal --seconds-each 90
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.simulation.many import fix_hash_seed, stay_on_core
from tests.simulation.mutants.automatic import (
    COUNT,
    SEED,
    automatic_mutants,
    equivalent_mutants,
)
from tests.simulation.mutants.mutant import (
    HELD_OUT,
    KINDS,
    PLANTED,
    Mutant,
    OutdatedError,
    named_mutants,
)
from tests.simulation.mutants.trial import (
    Laboratory,
    Trial,
    Verdict,
    passes_without,
    prepare,
    try_mutant,
)

GOALS = {"named": 0.95, "kinds": 0.90, "held-out": 0.90, "automatic": 0.80}
SCORES = Path(__file__).parent / "scores"


def main(arguments: Sequence[str] | None = None) -> int:
    """Try mutants, or list them; 1 where the goal is missed, 2 where one does not apply."""
    options = _parser().parse_args(arguments)
    fix_hash_seed("tests.simulation.mutants", arguments)
    mutants = _chosen(options)
    try:
        equivalent = equivalent_mutants() if options.kind == "automatic" else {}
        for mutant in mutants:
            mutant.source()
    except (OutdatedError, SyntaxError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name}  ({mutant.origin}): {mutant.wrong}")
        return 0
    out = options.out or SCORES / f"{options.kind}.json"
    trials = _read(out) if options.resume else {}
    same = [mutant for mutant in mutants if mutant.name in equivalent]
    mutants = [mutant for mutant in mutants if mutant.name not in equivalent]
    for trial in _tried(mutants, trials, options):
        trials[trial.mutant] = trial
        found = f"seed {trial.seed}" if trial.seed is not None else ""
        print(f"{trial.verdict:8} {trial.cpu_s:7.1f} s  {trial.mutant}  {found}", flush=True)
        _write(out, trials)
    chosen = {mutant.name for mutant in mutants}
    print(f"{len(same)} equivalent ones were not tried")
    return _score([t for t in trials.values() if t.mutant in chosen], options.kind)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("kind", choices=sorted(GOALS))
    parser.add_argument("--only", action="append", default=[], help="name, or part of it")
    parser.add_argument("--list", action="store_true", help="show them and run nothing")
    parser.add_argument("--seconds-each", type=float, default=40.0, help="of CPU time")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--count", type=int, default=COUNT, help="of automatic mutants")
    parser.add_argument("--seed", type=int, default=SEED, help="that draws automatic mutants")
    parser.add_argument("--out", type=Path, help="JSON file of all trials")
    parser.add_argument(
        "--resume", action="store_true", help="go on with those that --out lacks or missed"
    )
    return parser


def _chosen(options: argparse.Namespace) -> list[Mutant]:
    folder = {"named": PLANTED, "kinds": KINDS, "held-out": HELD_OUT}.get(options.kind)
    mutants = (
        automatic_mutants(options.count, options.seed) if folder is None else named_mutants(folder)
    )
    wanted = options.only
    return [m for m in mutants if not wanted or any(part in m.name for part in wanted)]


def _tried(
    mutants: Sequence[Mutant], known: Mapping[str, Trial], options: argparse.Namespace
) -> Iterator[Trial]:
    """Yields trials in the order of mutants that were not found before."""
    laboratory = prepare(options.seconds_each, mutants)
    lives = {m.name: known[m.name].lives if m.name in known else 0 for m in mutants}
    left = [m for m in mutants if m.name not in known or not known[m.name].verdict.is_found]
    one = partial(_try, laboratory, options.first_seed)
    fork = multiprocessing.get_context("fork")
    numbers = fork.SimpleQueue()
    for number in range(options.jobs):
        numbers.put(number)
    with fork.Pool(options.jobs, lambda: stay_on_core(numbers.get())) as pool:
        yield from pool.imap(one, [(mutant, lives[mutant.name]) for mutant in left])


def _try(laboratory: Laboratory, first_seed: int, share: tuple[Mutant, int]) -> Trial:
    """Try a mutant, and hold the seed that found it against the code without it."""
    mutant, lives = share
    live = partial(laboratory.live, first_seed, lives, mutant.name)
    trial = try_mutant(mutant, live, laboratory.cpu_s, lives=lives)
    if trial.seed is None or passes_without(trial.seed, laboratory):
        return trial
    return replace(trial, verdict=Verdict.UNCLEAN)


def _read(path: Path) -> dict[str, Trial]:
    if not path.exists():
        return {}
    trials = map(Trial.from_fields, json.loads(path.read_text(encoding="utf-8"))["trials"])
    return {trial.mutant: trial for trial in trials}


def _write(path: Path, trials: dict[str, Trial]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    score = Counter(trial.verdict for trial in trials.values())
    fields = {
        "score": {verdict.value: score[verdict] for verdict in Verdict},
        "trials": [trial.to_fields() for trial in trials.values()],
    }
    path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def _score(trials: Sequence[Trial], kind: str) -> int:
    """Print the table by origin, and who was missed; returns the exit code."""
    by_origin: dict[str, Counter[Verdict]] = {}
    for trial in trials:
        origin = trial.origin if kind == "automatic" else _whose(trial.origin)
        by_origin.setdefault(origin, Counter())[trial.verdict] += 1
    print(f"{'':20}" + "".join(f"{verdict.value:>9}" for verdict in Verdict))
    for origin, counts in sorted(by_origin.items()):
        print(f"{origin:20}" + "".join(f"{counts[verdict]:9}" for verdict in Verdict))
    found = sum(trial.verdict.is_found for trial in trials)
    share = found / max(1, len(trials))
    for trial in trials:
        if not trial.verdict.is_found:
            print(f"missed: {trial.mutant}")
    print(f"{found} of {len(trials)} found: {share:.0%} (goal {GOALS[kind]:.0%})")
    return 0 if share >= GOALS[kind] else 1


def _whose(origin: str) -> str:
    return origin if origin == "protocol" else "mended here"


if __name__ == "__main__":
    sys.exit(main())
