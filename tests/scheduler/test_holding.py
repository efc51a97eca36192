"""The hold policy: when attempts wait for the norm, and that it does not flap."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.policy import rows_of
from penstock.daemons.scheduler.machine.events import JournalDecision
from penstock.daemons.scheduler.machine.holding import HYSTERESIS, AttemptCosts, HoldLimits
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


def learned(clean_s: float, amended_s: float, held_s: float) -> AttemptCosts:
    """All kinds of attempts were seen, with an outlier each."""
    costs = AttemptCosts()
    for held, decision, seconds in (
        (False, Decision.COMMIT, clean_s),
        (False, Decision.AMEND, amended_s),
        (True, Decision.AMEND, held_s),
    ):
        costs.add(Decision.SKIP, 50.0, held=held)
        for outlier in (1.0, 1.0, 1.0, 9.0, 1.0, 1.0):
            costs.add(decision, outlier * seconds, held=held)
    return costs


@pytest.mark.parametrize(
    ("clean_s", "amended_s", "held_s", "limits"),
    [
        (1.0, 2.0, 1.52, DEFAULT),
        (1.0, 2.0, 1.27, HoldLimits(enter=5, leave=1)),
        (1.0, 2.0, 0.9, HoldLimits(enter=1, leave=1)),  # nothing is hidden by speculating
        (1.0, 2.0, 1.77, HoldLimits(enter=15, leave=11)),
        (1.0, 1.1, 1.5, HoldLimits(enter=25, leave=21)),  # a hold would cost more than amends
        (1.0, 0.9, 1.5, HoldLimits(enter=25, leave=21)),
        (1.0, 1.0, 1.0, DEFAULT),
    ],
)
def test_the_limit_is_where_holding_costs_what_speculating_costs(
    clean_s: float, amended_s: float, held_s: float, limits: HoldLimits
) -> None:
    assert learned(clean_s, amended_s, held_s).limits == limits


def test_a_limit_above_all_attempts_ends_a_hold_whatever_is_clipped() -> None:
    limits = learned(1.0, 1.1, 1.5).limits
    assert not limits.hold(True, "a" * 20)
    assert not limits.hold(False, "a" * 20)


def test_what_is_too_old_is_forgotten() -> None:
    costs = learned(1.0, 2.0, 1.27)
    for _ in range(494):
        assert costs.limits == HoldLimits(enter=5, leave=1)
        costs.add(Decision.AMEND, 1.27, held=True)
    unknown = HoldLimits(enter=18, leave=18)
    assert costs.limits == unknown, "clean attempts are wanted again"
    for _ in range(501):
        costs.add(Decision.COMMIT, 1.0, held=False)
    assert costs.limits == DEFAULT


def run_attempt(driver: Driver, clipped: bool, *, amend_s: float, hold_s: float) -> bool:
    """An attempt of one second, and what its mode adds; whether it held."""
    held = driver.machine.activity._hold  # type: ignore[union-attr]
    driver.now_s += 1.0 + hold_s * held
    driver.run_attempt(4.0 * clipped)
    if driver.status.phase == "amending":
        driver.now_s += amend_s
        driver.amended()
    return held


@pytest.mark.parametrize(
    ("hold_s", "amend_s", "held"),
    [
        (0.1, 0.8, [False] * 8 + [True] * 32),  # a quarter of 0.8 s is more
        (0.3, 0.8, [False] * 8 + [True] * 6 + [False] * 26),  # less
        (0.3, 0.01, [False] * 40),  # not worth trying
    ],
)
def test_a_hold_is_tried_out_and_kept_if_it_pays(
    hold_s: float, amend_s: float, held: list[bool]
) -> None:
    driver = Driver()
    driver.begin()
    clipped = [attempt % 4 == 3 for attempt in range(40)]
    assert [run_attempt(driver, c, amend_s=amend_s, hold_s=hold_s) for c in clipped] == held


def test_a_hold_is_journaled_and_goes_on_until_its_time_is_known() -> None:
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
    assert holds == 4, "then clean attempts are to show what speculating takes"


@pytest.mark.parametrize(("speculate", "holds"), [("always", False), ("never", True)])
def test_the_policy_can_be_overruled(speculate: str, holds: bool) -> None:
    rules = make_rules(make_config(optimizer={"speculate": speculate}))
    for hold in (False, True):
        assert rules.holds(make_position(20, hold=hold)) is holds


SPEEDS = {"advance": 1240, "preview": 1520, "settle": 1580, "hold": 1400, "status": 6000}
"""Millions of parameters a second, as two cores have them."""


def test_the_policy_costs_at_most_5_percent_more_than_the_better_of_both() -> None:
    """The clock is that of ``bench/policy.py``, for many backwards and rates of clipping."""
    times = {name: [8.0 / speed] * 8 for name, speed in SPEEDS.items()}
    rows = list(rows_of(times, attempts=600))
    better = {row["always_ms"] < row["never_ms"] for row in rows}
    assert better == {False, True}, "neither of both is always the better"
    assert max(row["ratio"] for row in rows) <= 1.05
    assert max(row["changes"] for row in rows) <= 600 / 25
