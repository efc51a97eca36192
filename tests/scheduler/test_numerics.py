"""The numerics recipe in the scheduler: its rows, its digest in Begin, facts of devices."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.daemons.kit.events import Exit, LogLine
from penstock.daemons.scheduler.journal import Journal
from penstock.daemons.scheduler.machine.events import Joined, JournalNumerics, Refuse, Send
from penstock.daemons.scheduler.machine.rules import Rules
from penstock.host.errors import StateError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.numerics import Numerics
from tests.protocol.test_numerics import RECIPE
from tests.scheduler.conftest import (
    RUN_ID,
    Driver,
    facts_at,
    make_config,
    make_position,
    make_rules,
    saved_at,
)
from tests.scheduler.test_files import commit

H200, H100 = {"CUDA": "12.8", "GPU": "H200"}, {"CUDA": "12.8", "GPU": "H100"}
DEVICES = {"worker.0": H200, "worker.1": H200}


def rules_with(recipe: Numerics = RECIPE, **sections: dict[str, Any]) -> Rules:
    """Rules of a run with a recipe."""
    return replace(make_rules(make_config(**sections)), numerics=recipe)


def row(step: int, recipe: Numerics = RECIPE, **devices: dict[str, str]) -> JournalNumerics:
    """A row of the journal; ``devices`` by worker, with an underscore."""
    named = {name.replace("_", "."): facts for name, facts in devices.items()}
    return JournalNumerics(
        step=step, digest=recipe.digest, recipe=recipe.canonical, devices=named or DEVICES
    )


def greet(driver: Driver, name: str, facts: dict[str, str]) -> list[str]:
    """A worker on a device with ``facts`` says Hello."""
    stream = next(driver._numbers)
    all_facts = [pb.Fact(name=fact, value=value) for fact, value in facts.items()]
    hello = pb.Hello(run_id=RUN_ID, member=name, pid=100 + stream, facts=all_facts)
    lines = driver.feed(Joined(stream=stream, hello=hello))
    if driver.machine.members.name_of(stream) is not None:
        driver.streams[name], driver.pids[name] = stream, 100 + stream
    return lines


def begun(
    driver: Driver, devices: dict[str, dict[str, str]] = DEVICES, *, lost: bool = False
) -> list[Any]:
    """All join and drain; returns the effects until the daemons begin. ``lost``: memory is empty
    and restored.
    """
    for member in driver.rules.members:
        if member.name not in devices:
            driver.join(member.name)
    for name, facts in devices.items():
        greet(driver, name, facts)
    empty = lost or driver.machine.mirror.record is None
    driver.drained(None if empty else driver.machine.mirror.version)
    if driver.machine.phase.value == "restoring":
        driver.restored()
    return driver.effects


def rows(effects: list[Any]) -> list[JournalNumerics]:
    """Returns the rows of recipes among effects."""
    return [effect for effect in effects if isinstance(effect, JournalNumerics)]


def test_a_recipe_is_journaled_before_anybody_begins() -> None:
    effects = begun(Driver(rules_with()))
    begins = [e for e in effects if isinstance(e, Send) and e.message.HasField("begin")]
    assert rows(effects) == [row(1)]
    assert effects.index(row(1)) < effects.index(begins[0])
    assert {begin.message.begin.numerics_digest for begin in begins} == {RECIPE.digest}


def test_a_run_without_a_recipe_has_no_rows() -> None:
    driver = Driver(facts=facts_at(4))
    effects = begun(driver)
    assert rows(effects) == []
    begin = next(e.message.begin for e in effects if isinstance(e, Send))
    assert begin.numerics_digest == ""


@pytest.mark.parametrize(
    ("newest", "due"),
    [
        (row(1), []),
        (row(5), []),
        (row(1, replace(RECIPE, threads=7)), [row(5)]),
        (row(9), [row(5)]),
        (row(1, worker_0=H200), [row(5)]),
        (None, [row(5)]),
    ],
)
def test_a_start_journals_a_recipe_that_the_next_step_lacks(
    newest: JournalNumerics | None, due: list[JournalNumerics]
) -> None:
    """Rows of an older step, of changed devices, of a dropped step, with a new worker, and of an
    older Penstock. Step 4 is committed.
    """
    assert rows(begun(Driver(rules_with(), facts_at(4, numerics=newest)))) == due


def test_other_devices_than_at_the_last_start_are_told_in_a_line() -> None:
    before = row(1, worker_0=H200, worker_1=H200)
    devices = {"worker.0": H200, "worker.1": H100}
    effects = begun(Driver(rules_with(), facts_at(4, numerics=before)), devices)
    warnings = [effect.text for effect in effects if isinstance(effect, LogLine) and effect.warning]
    assert warnings == [
        "devices differ from the last start: worker.1: GPU: H200 -> H100; layers may round"
        " otherwise from step 5 on"
    ]
    assert rows(effects) == [row(5, worker_0=H200, worker_1=H100)]


def test_software_that_the_preparation_told_of_is_not_told_twice() -> None:
    before = row(1, worker_0={"torch": "2.12.0"})
    devices = {"worker.0": {"torch": "2.13.0"}, "worker.1": {"torch": "2.13.0"}}
    assert RECIPE.software["torch"] == "2.13.0"
    effects = begun(Driver(rules_with(), facts_at(4, numerics=before)), devices)
    assert [effect for effect in effects if isinstance(effect, LogLine) and effect.warning] == []
    assert len(rows(effects)) == 1


@pytest.mark.parametrize("lost", [False, True])
def test_strict_refuses_other_devices(lost: bool) -> None:
    rules = rules_with(run={"name": "test", "strict": True})
    driver = Driver(rules, facts_at(4, numerics=row(1)), saved_at(4))
    effects = begun(driver, {"worker.0": H200, "worker.1": H100}, lost=lost)
    assert rows(effects) == []
    assert driver.machine.message == (
        "run.strict: devices differ from the last start: worker.1: GPU: H200 -> H100; restore them,"
        " or start without --strict"
    )
    exits = [e for e in [*driver.effects] if isinstance(e, Exit)]
    driver.leave_all()
    exits += [e for e in driver.effects if isinstance(e, Exit)]
    assert [e.code for e in exits] == [2]


def test_a_replacement_on_another_device_is_refused() -> None:
    driver = Driver(rules_with())
    begun(driver)
    driver.ready()
    pid = driver.pids["worker.1"]
    driver.close("worker.1")
    driver.fenced("worker.1", pid)
    lines = greet(driver, "worker.1", {"CUDA": "13.0", "GPU": "H100"})
    assert len(lines) == 1 and lines[0].startswith("refuse stream")
    refusal = next(effect for effect in driver.effects if isinstance(effect, Refuse))
    assert refusal.reason == (
        "worker.1: its device differs from the device of the process before: CUDA: 12.8 -> 13.0;"
        " GPU: H200 -> H100; layers would round otherwise from the next step on: give the worker an"
        " equal device, or start the run again"
    )
    assert "worker.1" in driver.machine.members.missing
    greet(driver, "worker.1", H200)
    assert "worker.1" in driver.machine.members.present, "an equal device goes on"
    driver.drained(0)
    assert rows(driver.effects) == [], "the recipe of the first begin holds"


def test_devices_of_two_workers_may_differ() -> None:
    driver = Driver(rules_with())
    assert rows(begun(driver, {"worker.0": H200, "worker.1": H100})) == [
        row(1, worker_0=H200, worker_1=H100)
    ]


def test_rows_of_recipes_are_kept_until_the_run_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    other = replace(RECIPE, threads=9)
    with closing(Journal(path, RUN_ID)) as journal:
        assert journal.load().numerics is None
        journal.follow(row(1))
        for version in range(1, 7):
            journal.decide(commit(version))
        journal.follow(row(7, other, worker_0=H100))
    with closing(Journal(path, RUN_ID)) as journal:
        numerics = journal.load().numerics
        assert numerics == row(7, other, worker_0=H100)
        assert numerics is not None
        assert Numerics.from_json(numerics.recipe, "journal").digest == numerics.digest
        journal.go_back(make_position(3), 3, 5)
        assert journal.load().numerics == row(1)
        journal.follow(row(4, other))
        journal.follow(row(3))
        assert journal.load().numerics == row(3)


def test_a_journal_without_the_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with closing(Journal(path, RUN_ID)) as journal:
        journal.decide(commit(1))
        journal._connection.execute("DROP TABLE numerics")
    with closing(Journal(path, RUN_ID)) as journal:
        assert journal.load().numerics is None
        journal.follow(row(2))
        assert journal.load().numerics == row(2)


def test_a_damaged_row_is_refused(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "j.sqlite", RUN_ID)) as journal:
        journal.follow(row(1))
        for text in ("{}", '{"recipe": 1, "devices": []}', "no json"):
            journal._connection.execute("UPDATE numerics SET json = ?", (text,))
            with pytest.raises(StateError, match="damaged"):
                journal.load()
