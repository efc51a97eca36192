"""A minute of simulated clusters."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulation import many, simulate
from tests.simulation.rare import PULLED

ROOT = Path(__file__).parents[2]


def run(*arguments: str, timeout_s: float = 1500.0) -> str:
    """Returns what the command says, which must succeed."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    found = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    violations = [line for line in found.stdout.splitlines() if "VIOLATION" in line]
    said = "\n".join([*violations[:20], found.stdout[-6000:] + found.stderr[-2000:]])
    assert found.returncode == 0, said
    return found.stdout


def test_clusters_under_faults_leave_the_bytes_of_undisturbed_ones() -> None:
    """Takes half a minute; the pins (tests/pins) have the first seeds, ``make soak`` new ones."""
    said = run("run", "--seeds", "1000000:1000012")
    assert said.startswith("12 seeds") and " 0 violations" in said


def test_newborns_that_are_stopped_before_they_report_are_replaced() -> None:
    """By the node's machine and effects: no scheduler has heard of them."""
    said = run("run", "--seeds", "0:3", "--kind", "stop a newborn", "--kind", "kill")
    assert said.startswith("3 seeds") and " 0 violations" in said
    counted = re.search(r"stop a newborn (\d+)", said)
    assert counted is not None and int(counted[1]) > 10, said


@pytest.mark.parametrize(
    ("seed", "shows"),
    [(("10",), "decided  COMMIT"), (("70", "--kind", "full disk"), "stops  schedulerd")],
)
def test_a_seed_is_a_life_that_can_be_told_again(seed: tuple[str, ...], shows: str) -> None:
    """Replayed in another process it leaves the same list of events. What a scheduler says that
    stops at a full disk names a file, and how much room there is.
    """
    told = run("replay", *seed)
    assert told == run("replay", *seed)
    assert shows in told


def test_a_seed_that_the_simulation_fails_on_costs_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lived = simulate.run_seed

    def run_seed(laboratory: Any, seed: int, kinds: tuple[str, ...]) -> simulate.Outcome:
        if seed == 11:
            raise ZeroDivisionError
        return lived(laboratory, seed, kinds)

    monkeypatch.setattr(simulate, "run_seed", run_seed)
    monkeypatch.setattr(
        many, "gc", SimpleNamespace(freeze=int, set_threshold=max)
    )  # of this process
    totals = many.work([10, 11])
    assert totals.seeds == 2 and totals.faults > 0
    ((seed, _, said),) = totals.failed
    assert seed == 11 and "ZeroDivisionError" in said


def test_gradients_are_pulled_where_nobody_sums_them_before() -> None:
    said = run("run", "--seeds", "0:", "--minutes", "0.01", "--shape", "two-nodes-pulls")
    (counted,) = [line for line in said.splitlines() if line.endswith(PULLED)]
    assert int(counted.split()[0]) > 100


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_clusters() -> None:
    first = random.SystemRandom().randrange(10**9)
    said = run("run", "--seeds", f"{first}:", "--minutes", "15", "--jobs", "2", timeout_s=1100.0)
    print(said)
