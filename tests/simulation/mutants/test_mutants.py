"""Planted faults still fit the code they are planted in."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from tests.simulation.configurations import SHAPES, drawn_shape, seeds_by_shape
from tests.simulation.many import FOLDER
from tests.simulation.mutants.automatic import FILES, automatic_mutants, equivalent_mutants
from tests.simulation.mutants.mutant import (
    HELD_OUT,
    KINDS,
    OF_THE_PROTOCOL,
    ROOT,
    Edit,
    Mutant,
    OutdatedError,
    named_mutants,
)
from tests.simulation.mutants.reach import PROBE, Probes, changed_lines, probed
from tests.simulation.mutants.trial import SLACK_S, Trial, Verdict, prepare

COMMIT = re.compile(r"[0-9a-f]{7}")


def test_there_are_enough_and_a_third_is_our_own() -> None:
    mutants = named_mutants()
    mended = [mutant for mutant in mutants if mutant.origin != OF_THE_PROTOCOL]
    assert len(mutants) >= 100
    assert len(mended) >= 34
    assert all(COMMIT.fullmatch(mutant.origin) for mutant in mended)


def test_kinds_that_were_overlooked_have_mutants_of_their_own() -> None:
    overlooked = named_mutants(KINDS)
    assert len(overlooked) >= 40
    assert not {m.name for m in overlooked} & {m.name for m in named_mutants()}


@pytest.mark.parametrize(
    "mutant",
    [*named_mutants(), *named_mutants(KINDS), *named_mutants(HELD_OUT)],
    ids=lambda mutant: mutant.name,
)
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


def test_mutants_of_other_functions_stay_when_one_is_edited(tmp_path: Path) -> None:
    source = "def one(x):\n    if x < 4:\n        return x + 1\n\ndef other(x):\n    return x - 1\n"
    (tmp_path / "module.py").write_text(source)
    before = automatic_mutants(100, root=tmp_path, files=("module.py",))
    edited = source.replace("x < 4", "x < 4 and x > 1").replace("\n\ndef", "\n    x += 0\n\n\ndef")
    (tmp_path / "module.py").write_text(edited)
    after = automatic_mutants(100, root=tmp_path, files=("module.py",))
    assert {m.name for m in before if ":other " in m.name} == {
        m.name for m in after if ":other " in m.name
    }
    assert {m.name for m in before} - {m.name for m in after}


def test_equivalent_ones_say_why_and_those_that_are_gone_are_refused(tmp_path: Path) -> None:
    assert all(why.endswith(".") for why in equivalent_mutants().values())
    mutant = automatic_mutants(1)[0]
    path = tmp_path / "equivalent.toml"
    path.write_text(f'["{mutant.name}"]\nchange = "other"\nwhy = "It says so."\n')
    with pytest.raises(OutdatedError, match="not 'other' any more"):
        equivalent_mutants(path)
    path.write_text(f'["{mutant.name}"]\nchange = {json.dumps(mutant.wrong)}\nwhy = "So."\n')
    assert equivalent_mutants(path) == {mutant.name: "So."}


def test_what_is_said_or_checked_is_no_mutant(tmp_path: Path) -> None:
    source = '''
def _decide(self, x):
    """Text: 1 + 1."""
    assert x < 5
    if x < 4:
        raise ValueError(f"{x + 1}")
    _log.info("x")
    if x < 3:
        _log.info("y")
    if x < 2:
        self.validate()
    self._metrics.counted(x + 1)
    return [LogLine(text="x")]

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


PROGRAM = """
import json, sys
from tests.simulation.mutants.mutant import OF_THE_PROTOCOL, Edit, Mutant
from tests.simulation.mutants.reach import PROBE, Probes, changed_lines, probed
from tests.simulation.mutants.trial import try_mutant

def live():
    {life}
    return 0

edit = Edit(old="        return True\\n", new="        return False\\n")
file = "daemons/node/machine/budget.py"
mutant = Mutant(name="never", file=file, origin=OF_THE_PROTOCOL, wrong="", edits=(edit,))
print(json.dumps(try_mutant(mutant, live, {budget_s}).to_fields()))
"""
TAKEN = (
    "from penstock.daemons.node.machine.budget import RestartBudget; "
    "taken = RestartBudget(limit=1).take(0.0)"
)


def trial_of(life: str, budget_s: float = 30.0) -> Trial:
    """Returns how a mutant fared in a process that has not imported the package."""
    program = PROGRAM.format(life=life, budget_s=budget_s)
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=600
    )
    assert told.returncode == 0, told.stderr
    trial = Trial.from_fields(json.loads(told.stdout))
    assert Trial.from_fields(trial.to_fields()) == trial
    return trial


@pytest.mark.parametrize(
    ("life", "verdict", "seed", "lives"),
    [
        (f"{TAKEN}; print('3 lives')", Verdict.MISSED, None, 3),
        (f"{TAKEN}; assert taken", Verdict.CRASHED, None, 0),
        ("import signal, os; os.kill(os.getpid(), signal.SIGSEGV)", Verdict.CRASHED, None, 0),
        (f"{TAKEN}; print('seed 7:', taken); return 1", Verdict.FOUND, 7, 0),
    ],
)
def test_a_process_has_the_fault_and_says_how_it_fared(
    life: str, verdict: Verdict, seed: int | None, lives: int
) -> None:
    trial = trial_of(life)
    assert (trial.verdict, trial.seed, trial.lives) == (verdict, seed, lives), trial.said
    assert "True" not in trial.said


@pytest.mark.parametrize("life", ["while True: pass", "import time; time.sleep(60)"])
def test_a_simulation_that_does_not_end_is_killed_and_leaves_nothing(life: str) -> None:
    """Its folder and the segments of its runs in shared memory go with it."""
    folder = f"/dev/shm/{FOLDER}%d-x/plain"
    make = (
        f"import os, pathlib; folder = pathlib.Path('{folder}' % os.getpid()); "
        "folder.mkdir(parents=True); name = f'5e6{os.getpid():09}'; "
        "pathlib.Path(f'/dev/shm/penstock-{name}-a').touch(); print('made', name, flush=True); "
        "(folder / 'run.json').write_text('{\"run_id\": \"' + name + '\"}')"
    )
    trial = trial_of(f"{make}\n    {life}", budget_s=0.8 - SLACK_S)
    assert trial.verdict is Verdict.STUCK
    name = trial.said.split()[-1]
    assert not list(Path("/dev/shm").glob(f"*{name}*"))
    assert not list(Path("/dev/shm").glob(f"{FOLDER}{int(name[3:])}-*"))


def test_seeds_come_in_rounds_of_all_shapes() -> None:
    seeds = list(islice(seeds_by_shape(5), 3 * len(SHAPES)))
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 5
    for start in range(0, len(seeds), len(SHAPES)):
        drawn = {drawn_shape(seed).name for seed in seeds[start : start + len(SHAPES)]}
        assert drawn == {shape.name for shape in SHAPES}


def test_shapes_that_reach_a_mutant_come_often_and_the_others_in_turn() -> None:
    often = frozenset({"flushes", "split"})
    names = [drawn_shape(seed).name for seed in islice(seeds_by_shape(0, often), 4 * len(SHAPES))]
    assert names[:2] == names[4:6] == ["flushes", "split"]
    assert set(names) == {shape.name for shape in SHAPES}
    everyone = frozenset(shape.name for shape in SHAPES)
    assert {
        drawn_shape(seed).name for seed in islice(seeds_by_shape(0, everyone), len(SHAPES))
    } == (everyone)


def test_probes_say_who_reaches_what_a_mutant_changes(tmp_path: Path) -> None:
    source = """
def step(x):
    \"\"\"A text.\"\"\"
    if x > 3 and (
        x < 9
    ):
        return x
    return 0
"""
    (tmp_path / "module.py").write_text(source)
    text = probed(source, "module.py", {5, 7})
    assert text.count(PROBE) == 2
    probes = Probes()
    space = {PROBE: probes._reach}
    exec(text, space)
    for shape, number in (("low", 1), ("middle", 5), ("high", 12)):
        probes.enter(shape)
        assert space["step"](number) == (5 if shape == "middle" else 0)  # type: ignore[operator]
    edit = Edit(old="        x < 9\n    ):\n        return x\n", new="")
    mutant = Mutant(name="", file="module.py", origin="", wrong="", edits=(edit,))
    assert changed_lines(mutant, source) == (5, 6, 7)
    assert probes.shapes(mutant, tmp_path) == {"middle"}


def test_a_process_that_has_the_package_refuses() -> None:
    importlib.import_module("penstock.host.errors")
    with pytest.raises(RuntimeError, match="too late"):
        prepare(1.0, ())
