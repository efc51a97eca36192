"""Stops that must be over at a given time: what fits is saved, else memory keeps it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.daemons.kit.events import StopAsked
from penstock.daemons.scheduler.machine.events import ControlAsked, ControlCall
from penstock.daemons.scheduler.machine.requests import Deadline, SavePace
from tests.scheduler.conftest import Driver, make_rules

ALL = ["node.a", "memoryd.a", "optimizerd.a", "worker.0", "worker.1"]
SHUTDOWN = [f"{name} <- shutdown" for name in ALL]
KEEP = [f"{line} keep memory" for line in SHUTDOWN]


def test_what_fits_is_saved(live: Driver) -> None:
    assert live.feed(StopAsked(within_s=20.0)) == []
    assert live.run_attempt()[-1] == "optimizerd.a <- settle e1 v1"
    assert live.save() == SHUTDOWN
    assert live.leave_all() == ["exit 5"]


def test_a_save_that_does_not_end_in_time_is_given_up(live: Driver) -> None:
    live.run_attempt()
    live.feed(StopAsked(within_s=20.0))
    live.run_attempt()
    live.pin()
    assert live.wait(14.5) == []
    assert live.wait(0.5) == KEEP
    assert "step 2 cannot be saved before the run is killed" in live.status.message
    assert live.wait(1.0) == []
    assert live.wait(0.5) == ["exit 130"], "it leaves before the time is up, whoever is there"


def test_a_save_that_cannot_end_in_time_is_not_begun() -> None:
    driver = Driver(replace(make_rules(), state_bytes=10**12))
    driver.begin()
    driver.run_attempt()
    assert driver.feed(ControlAsked(ticket=1, call=ControlCall.STOP, within_s=60.0)) == [
        "reply 1",
        *KEEP,
    ]
    assert driver.leave_all() == ["exit 130"]


def test_nothing_to_save_needs_no_attempt(live: Driver) -> None:
    live.feed(StopAsked(within_s=4.0))
    assert live.wait(1.5) == SHUTDOWN, "the first attempt takes too long"
    assert live.leave_all() == ["exit 5"]


def test_the_nearest_deadline_counts(live: Driver) -> None:
    live.run_attempt()
    live.feed(ControlAsked(ticket=1, call=ControlCall.STOP, within_s=20.0))
    live.feed(StopAsked(within_s=None))
    live.feed(StopAsked(within_s=1000.0))
    assert KEEP[0] in live.wait(15.5)


@pytest.mark.parametrize(("seconds", "hopeless"), [(None, False), (8.0, False), (11.0, True)])
def test_a_save_is_hopeless_when_half_of_the_shortest_is_too_long(
    seconds: float | None, hopeless: bool
) -> None:
    pace = SavePace(1000, 1)
    if seconds is not None:
        pace.finished(seconds)
        pace.finished(100.0)
    deadline = Deadline.of(0.0, 10.0)
    assert deadline == Deadline(give_up_s=7.5, leave_by_s=8.125)
    assert pace.hopeless(2.5, deadline) is hopeless
