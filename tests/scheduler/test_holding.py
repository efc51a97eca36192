"""The hold policy: when attempts wait for the norm, and that it does not flap."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.daemons.scheduler.events import JournalDecision
from penstock.daemons.scheduler.holding import HYSTERESIS, HoldLimits, SpeculationCosts
from penstock.shm.control import Decision
from tests.scheduler.conftest import Driver, facts_at, make_config, make_position, make_rules

DEFAULT = HoldLimits(enter=10, leave=6)


@pytest.mark.parametrize(
    ("holding", "amended", "skipped", "hold"),
    [
        (False, 0, 0, False),
        (False, 10, 0, False),
        (False, 10, 10, False),
        (False, 11, 0, True),
        (False, 11, 9, True),
        (True, 20, 0, True),
        (True, 10, 0, True),
        (True, 6, 14, True),
        (True, 5, 15, False),
        (True, 0, 0, False),
    ],
)
def test_a_hold_begins_above_half_and_ends_below_six_of_twenty(
    holding: bool, amended: int, skipped: int, hold: bool
) -> None:
    recent = "a" * amended + "s" * skipped + "c" * (20 - amended - skipped)
    assert HoldLimits() == DEFAULT
    assert HoldLimits().hold(holding, recent) is hold
    assert HoldLimits().hold(holding, recent[::-1]) is hold


def modes(amended: Iterable[bool], limits: HoldLimits) -> list[bool]:
    """The mode after each attempt, from a fresh start."""
    scaling = make_rules().loss_scaling
    position, holds = make_position(0), []
    for over in amended:
        decision = Decision.AMEND if over else Decision.COMMIT
        position = position.after(decision, 8, scaling, limits)
        holds.append(position.hold)
    return holds


def changes(holds: list[bool]) -> list[int]:
    """The attempts after which the mode changed."""
    return [i for i, (a, b) in enumerate(zip([False, *holds], holds, strict=False)) if a != b]


LIMITS = st.integers(1, 10).map(lambda n: HoldLimits(enter=n, leave=max(1, n - HYSTERESIS)))


@given(st.floats(0, 1), st.floats(0, 1), LIMITS)
def test_at_a_steady_rate_of_clipping_the_mode_changes_at_most_once(
    rate: float, phase: float, limits: HoldLimits
) -> None:
    amended = [math.floor((i + 1) * rate + phase) > math.floor(i * rate + phase) for i in range(99)]
    assert len(changes(modes(amended, limits))) <= 1


@given(st.lists(st.booleans(), max_size=200))
def test_whatever_is_clipped_the_mode_lasts_six_attempts(amended: list[bool]) -> None:
    at = changes(modes(amended, DEFAULT))
    assert all(later - sooner > HYSTERESIS + 1 for sooner, later in pairwise(at))


@pytest.mark.parametrize(
    ("passes_s", "clean_s", "amended_s", "limits"),
    [
        (1.0, 0.1, 0.8, DEFAULT),  # hidden behind the backward: a second preview is all it costs
        (1.0, 0.6, 1.4, DEFAULT),
        (1.0, 0.7, 1.5, HoldLimits(enter=7, leave=3)),
        (1.0, 0.9, 1.7, HoldLimits(enter=2, leave=1)),
        (1.0, 1.1, 1.9, HoldLimits(enter=1, leave=1)),  # nothing hidden: each preview is lost
        (1.0, 1.1, 1.0, DEFAULT),  # noise
    ],
)
def test_the_limit_is_where_holding_costs_what_speculating_costs(
    passes_s: float, clean_s: float, amended_s: float, limits: HoldLimits
) -> None:
    costs = SpeculationCosts()
    for decision in (Decision.COMMIT, Decision.AMEND, Decision.COMMIT, Decision.AMEND):
        tail_s = amended_s if decision is Decision.AMEND else clean_s
        costs.add(decision, passes_s=passes_s, tail_s=tail_s)
    assert costs.limits == DEFAULT, "too little is known yet"
    costs.add(Decision.COMMIT, passes_s=passes_s, tail_s=clean_s)
    assert costs.limits == limits
    costs.add(Decision.SKIP, passes_s=100.0, tail_s=100.0)
    costs.add(Decision.COMMIT, passes_s=passes_s, tail_s=100 * clean_s)
    assert costs.limits == limits, "one outlier decides nothing"


def run_attempt(driver: Driver, sum_squares: float, tail_s: float, passes_s: float) -> bool:
    """An attempt whose optimizer takes that long; whether it held."""
    held = driver.machine.activity._hold  # type: ignore[union-attr]
    for worker in driver.rules.workers:
        driver.done(worker)
    driver.block(0, sum_squares, seconds=passes_s)
    driver.now_s += tail_s
    driver.block(1, sum_squares, seconds=0.0)
    if driver.status.phase == "amending":
        driver.now_s += tail_s
        driver.amended()
    return held


def test_what_attempts_take_decides_where_the_hold_begins() -> None:
    rules = dataclasses.replace(make_rules(), advances=True)
    driver = Driver(rules)
    driver.begin()
    held = [run_attempt(driver, 4.0 * (i % 4 == 3), tail_s=1.0, passes_s=1.0) for i in range(12)]
    assert held == [False] * 8 + [True] * 4, "at the second amend the price of amending is known"
    indirect = Driver(dataclasses.replace(rules, advances=False))
    indirect.begin()
    assert not any(run_attempt(indirect, 4.0 * (i % 4 == 3), 1.0, 1.0) for i in range(12))


def test_a_hold_is_journaled_and_goes_on_until_fewer_than_six_are_clipped() -> None:
    driver = Driver(facts=facts_at(20, position=make_position(20, recent="c" * 10 + "a" * 10)))
    driver.join_all()
    driver.drained(20)
    assert not any("hold" in line for line in driver.ready())
    driver.run_attempt(4.0)
    assert all(line.endswith("hold") for line in driver.amended()[-3:]), "11 of 20"
    [journaled] = [e for e in driver.effects if isinstance(e, JournalDecision)]
    facts = facts_at(21, record=journaled.record, position=journaled.position, next_attempt=23)
    resumed = Driver(facts=facts)
    resumed.join_all()
    resumed.drained(21)
    assert all(line.endswith("hold") for line in resumed.ready())
    assert resumed.run_attempt(4.0)[0].startswith("journal AMEND"), "no preview to amend"
    holds = 0
    while any(line.endswith("hold") for line in resumed.run_attempt()):
        holds += 1
    assert holds == 14, "8 clean ones leave the window, then 7 of 12 amends"


@pytest.mark.parametrize(("speculate", "holds"), [("always", False), ("never", True)])
def test_the_policy_can_be_overruled(speculate: str, holds: bool) -> None:
    rules = make_rules(make_config(optimizer={"speculate": speculate}))
    for hold in (False, True):
        assert rules.holds(make_position(20, hold=hold)) is holds
