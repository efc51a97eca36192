"""Planted faults still fit the code they are planted in."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.mutants.automatic import FILES, automatic_mutants
from tests.simulation.mutants.mutant import (
    OF_THE_PROTOCOL,
    Edit,
    Mutant,
    OutdatedError,
    named_mutants,
)
from tests.simulation.mutants.trial import Seeds, Trial, Verdict, try_mutant

COMMIT = re.compile(r"[0-9a-f]{7}")


def test_there_are_enough_and_a_third_is_our_own() -> None:
    mutants = named_mutants()
    mended = [mutant for mutant in mutants if mutant.origin != OF_THE_PROTOCOL]
    assert len(mutants) >= 100
    assert len(mended) >= 34
    assert all(COMMIT.fullmatch(mutant.origin) for mutant in mended)


@pytest.mark.parametrize("mutant", named_mutants(), ids=lambda mutant: mutant.name)
def test_a_planted_fault_fits(mutant: Mutant) -> None:
    changed = mutant.source()
    assert mutant.wrong.endswith(".")
    assert all(edit.old != edit.new for edit in mutant.edits), changed


def test_text_that_is_gone_or_there_twice_is_refused() -> None:
    with pytest.raises(OutdatedError, match="found 0 times"):
        Edit(old="gone", new="").apply("there", "here")
    with pytest.raises(OutdatedError, match="found 2 times"):
        Edit(old="twice", new="").apply("twice twice", "here")


def test_automatic_ones_follow_from_a_seed_and_are_spread_over_files() -> None:
    mutants = automatic_mutants()
    few = FILES[::10]
    assert automatic_mutants(20, files=few) == automatic_mutants(20, files=few)
    assert automatic_mutants(20, 1, files=few) != automatic_mutants(20, 2, files=few)
    assert len(mutants) >= 300
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    files = Counter(mutant.file for mutant in mutants)
    assert files.keys() == set(FILES)
    assert max(files.values()) <= 2 * len(mutants) / len(FILES)
    assert {mutant.origin for mutant in mutants} == {
        "effect-dropped",
        "effects-swapped",
        "bound-moved",
        "condition-negated",
        "guard-dropped",
        "offset-dropped",
    }
    for mutant in mutants:
        mutant.source()


def test_what_is_said_or_checked_is_no_mutant(tmp_path: Path) -> None:
    source = '''
def _decide(self, x):
    """Text: 1 + 1."""
    assert x < 5
    if x < 4:
        raise ValueError(f"{x + 1}")
    _log.info("x")
    self._metrics.counted(x + 1)
    return [Say(text="x")]

def validate(self, x):
    if x < 3:
        self.bad = True
'''
    (tmp_path / "module.py").write_text(source)
    assert automatic_mutants(10, root=tmp_path, files=("module.py",)) == ()


def test_operators_change_what_they_say(tmp_path: Path) -> None:
    source = """
def _decide(self, x):
    if self.é and x < 4:
        self.send(x)
        self.told(x)
    return [One(x), Two(x + 1)]
"""
    (tmp_path / "module.py").write_text(source)
    mutants = automatic_mutants(100, root=tmp_path, files=("module.py",))
    assert {mutant.wrong for mutant in mutants} == {
        "[One(x), Two(x + 1)] -> [One(x)]",
        "[One(x), Two(x + 1)] -> [Two(x + 1)]",
        "[One(x), Two(x + 1)] -> [Two(x + 1), One(x)]",
        "self.send(x) -> pass",
        "self.send(x) self.told(x) -> self.told(x) self.send(x)",
        "self.told(x) -> pass",
        "self.é and x < 4 -> not (self.é and x < 4)",
        "self.é and x < 4 -> self.é",
        "self.é and x < 4 -> x < 4",
        "x + 1 -> x",
        "x < 4 -> x <= 4",
    }
    assert len({mutant.source(tmp_path) for mutant in mutants}) == len(mutants)


HALF_LIFE = "import sys; from penstock.daemons.node.machine import budget as b; "


@pytest.mark.parametrize(
    ("program", "verdict", "seed"),
    [
        ("print(b.RestartBudget(limit=1).take(0.0))", Verdict.MISSED, None),
        ("assert b.RestartBudget(limit=1).take(0.0) is not False", Verdict.CRASHED, None),
        ("sys.exit('seed 7: ' + str(b.RestartBudget(limit=1).take(0.0)))", Verdict.FOUND, 7),
    ],
)
def test_a_process_has_the_fault_and_says_how_it_fared(
    program: str, verdict: Verdict, seed: int | None
) -> None:
    mutant = Mutant(
        name="never-again",
        file="daemons/node/machine/budget.py",
        origin=OF_THE_PROTOCOL,
        wrong="No process is started again.",
        edits=(Edit(old="        return True\n", new="        return False\n"),),
    )
    command = [sys.executable, "-c", HALF_LIFE + program]
    trial = try_mutant(mutant, Seeds(minutes=0.5), command)
    assert (trial.verdict, trial.seed) == (verdict, seed)
    assert "True" not in trial.said
    assert Trial.from_fields(trial.to_fields()) == trial


def test_a_simulation_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.mutants.trial.SLACK_S", 0.5)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    trial = try_mutant(named_mutants()[0], Seeds(minutes=0.0), command)
    assert trial.verdict is Verdict.STUCK
    assert trial.seconds < 30.0
