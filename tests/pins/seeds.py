"""Journal rows and saved bytes at the end of simulated seeds: golden/seeds.txt.

The file has 8 hexadecimal digits for each seed, in order, ten seeds a line. Dashes stand in the
place of a seed that is left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.pins.comparing import Comparison, counted, shared_out
from tests.simulation.many import stay_on_core

GOLDEN = Path(__file__).parent / "golden" / "seeds.txt"
SEEDS_A_LINE = 10
LEFT_OUT: Mapping[int, str] = {}
"""Seeds that have no outcome to pin, with the reason. Each is a fault to examine."""
NO_DIGEST = "--------"
OF_THE_DIRECTORY = {"run_id"}
"""Keys of the journal's table ``meta`` that are drawn for each run directory."""
LATER_TABLES = {"scores"}
LATER_KEYS = {"set", "token_accuracy"}
"""Tables, and keys of evaluations, that the journal did not have when digests were stored."""


def compare(seeds: int) -> Comparison:
    """Simulates seeds and compares each with its stored digest; notes name the seeds left out."""
    comparison = compared_seeds(stored(), simulated(pinnable(seeds)))
    notes = [f"seed {seed} is left out: {why}" for seed, why in LEFT_OUT.items() if seed < seeds]
    return replace(comparison, notes=notes)


def rewrite(seeds: int) -> None:
    """Simulates seeds and stores their digests; digests of later seeds stay.

    Raises:
        SystemExit: a seed violates a promise of the simulation, so nothing is stored.
    """
    current = simulated(pinnable(seeds))
    violations = [f"seed {seed}: {text}" for seed, text in current.items() if len(text) > 8]
    if violations:
        raise SystemExit("\n".join(violations))
    digests = [current.get(str(seed), NO_DIGEST) for seed in range(seeds)]
    digests += list(stored().values())[seeds:]
    lines = [
        " ".join(digests[first : first + SEEDS_A_LINE])
        for first in range(0, len(digests), SEEDS_A_LINE)
    ]
    GOLDEN.write_text("\n".join(lines) + "\n", encoding="utf-8")


def pinnable(seeds: int) -> Sequence[int]:
    """Returns the first ``seeds`` seeds without those that are left out."""
    return [seed for seed in range(seeds) if seed not in LEFT_OUT]


def stored() -> dict[str, str]:
    """Returns the stored digests by seed."""
    text = GOLDEN.read_text(encoding="utf-8") if GOLDEN.exists() else ""
    return {str(seed): digest for seed, digest in enumerate(text.split())}


def compared_seeds(stored: Mapping[str, str], current: Mapping[str, str]) -> Comparison:
    """Returns the seeds whose digest is not the stored one; a seed without one is different."""
    unpinned = sorted(int(seed) for seed in current.keys() - stored.keys())
    differences = [
        f"seed {seed}: {stored.get(seed, 'not pinned')} -> {digest}"
        for seed, digest in sorted(current.items(), key=lambda item: int(item[0]))
        if digest != stored.get(seed, digest[:8])
    ]
    if unpinned:
        count = f"{len(unpinned)} seeds from {unpinned[0]} on"
        differences.append(f"{count}: not pinned; python -m tests.pins --only seeds --rewrite")
    return Comparison(differences=differences)


def simulated(seeds: Sequence[int]) -> dict[str, str]:
    """Returns a digest by seed, or the violation of a seed that breaks a promise."""
    return shared_out(_work, seeds)


def _work(job: int, seeds: Sequence[int]) -> dict[str, str]:
    from tests.simulation.simulate import Laboratory, run_seed
    from tests.simulation.simulated import replaced

    stay_on_core(job)
    laboratory, outcomes = Laboratory(), {}
    try:
        for seed in counted("seeds", job, seeds, every=10):
            try:
                with replaced(), contextlib.redirect_stderr(io.StringIO()):
                    outcomes[str(seed)] = digest_of(run_seed(laboratory, seed))
            except Exception as error:  # of this seed; the others are still compared
                outcomes[str(seed)] = f"violation: {error!r:.300}"
    finally:
        laboratory.close()
    return outcomes


def digest_of(outcome: Any) -> str:
    """Returns 8 hexadecimal digits of an outcome's rows and saved bytes, or its violations."""
    if outcome.violations:
        return f"violation: {outcome.violations[0]:.300}"
    rows = {
        table: [
            _without_later_keys(row)
            for row in lines
            if table != "meta" or row[0] not in OF_THE_DIRECTORY
        ]
        for table, lines in outcome.rows.items()
        if table not in LATER_TABLES
    }
    states = {step: _digest_of_state(state) for step, state in outcome.result.states.items()}
    text = json.dumps([rows, states], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _without_later_keys(row: Any) -> Any:
    """Returns a row of a table; the line of an evaluation without :data:`LATER_KEYS`."""
    return [_line(value) if isinstance(value, str) else value for value in row]


def _line(text: str) -> str:
    if '"phase": "eval"' not in text:
        return text
    fields = json.loads(text)
    return json.dumps({key: value for key, value in fields.items() if key not in LATER_KEYS})


def _digest_of_state(state: Any) -> str:
    """Returns the checksum of a saved state, which is a checksum already or arrays by name."""
    if isinstance(state, str):
        return state
    digest = hashlib.sha256()
    for name, array in sorted(state.items()):
        digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()
