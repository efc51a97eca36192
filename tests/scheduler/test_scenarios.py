"""The scenarios of this folder, and the table of states that they cover.

``REWRITE=1 pytest tests/scheduler/test_scenarios.py`` writes today's output into the scenarios:
read the difference before you commit it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.daemons.scheduler.machine.states import ANY, TABLES
from penstock.daemons.scheduler.state_page import markdown, meanings_of
from tests.scheduler.scenario import Scenario
from tests.scheduler.transitions import Step, is_event

ROOT = Path(__file__).parents[2]
SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_reads_as_the_machine_acts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    rewritten = Scenario().rewritten(text)
    if os.environ.get("REWRITE"):
        path.write_text(rewritten, encoding="utf-8")
    else:
        assert text == rewritten


def test_no_row_of_the_table_is_dead() -> None:
    """Each event of a row, and each state of a row, occurs in some scenario."""
    steps: set[Step] = set()
    for path in SCENARIOS:
        scenario = Scenario()
        scenario.rewritten(path.read_text(encoding="utf-8"))
        steps |= {step._replace(member="") for step in scenario.steps}
    dead = []
    for rows in TABLES.values():
        for row in rows:
            made = {
                step
                for step in steps
                if step.after is row.next
                and is_event(step, row)
                and step.before in (row.states or (None,))
            }
            events, states = {step.event for step in made}, {step.before for step in made}
            never = {*row.events} - events - {ANY}
            dead += [f"{event} -> {row.next}: {row.effect}" for event in never]
            dead += [f"{state} -> {row.next}: {row.effect}" for state in {*row.states} - states]
    assert not dead, "\n".join(dead)


def test_the_page_of_states_is_current() -> None:
    """``make docs`` writes it."""
    assert (ROOT / "docs" / "STATES.md").read_text(encoding="utf-8") == markdown()


def test_each_state_has_a_meaning_and_is_the_end_of_a_transition() -> None:
    for kind, rows in TABLES.items():
        assert meanings_of(kind).keys() == set(kind)
        assert {row.next for row in rows} == set(kind)
