"""Aborts, deadlines, and epochs that are over before they begin."""

from __future__ import annotations

import threading
import time
from itertools import count

import pytest

from penstock.host.errors import LostMemberError
from penstock.workers.waiting import FOREVER, Abort, EpochFence, Interrupted, WaitBudget, wait_until


def test_a_condition_that_holds_costs_nothing() -> None:
    assert wait_until(lambda: True, lambda: "nothing", Abort(), 0.0) == 0.0


def test_waiting_ends_when_the_condition_holds() -> None:
    looks = count()
    begun_s = time.perf_counter()
    waited_s = wait_until(lambda: next(looks) == 20, lambda: "the event", Abort(), 3600.0)
    assert 0.0 < waited_s <= time.perf_counter() - begun_s


def test_a_deadline_says_what_was_awaited() -> None:
    with pytest.raises(LostMemberError, match=r"^waited 0\.05 s for the moon$"):
        wait_until(lambda: False, lambda: "the moon", Abort(), 0.05)


def test_a_deadline_stands_still_while_somebody_else_is_at_work_first() -> None:
    begun_s, held_s = time.monotonic(), 0.2
    with pytest.raises(LostMemberError, match=r"^waited 0\.05 s for the moon$"):
        wait_until(
            lambda: False,
            lambda: "the moon",
            Abort(),
            0.05,
            lambda: time.monotonic() - begun_s < held_s,
        )
    assert time.monotonic() - begun_s > held_s + 0.05


def test_an_abort_ends_a_wait() -> None:
    abort = Abort()
    timer = threading.Timer(0.05, abort.set, ["drained"])
    timer.start()
    with pytest.raises(Interrupted, match=r"^drained$"):
        wait_until(lambda: False, lambda: "the moon", abort, 60.0)
    timer.join()


def test_the_first_reason_of_an_abort_stays() -> None:
    abort = Abort()
    abort.set("first")
    abort.set("second")
    with pytest.raises(Interrupted, match=r"^first$"):
        abort.check()


def test_a_stop_aborts_too() -> None:
    stopped = threading.Event()
    abort = Abort(stopped.is_set)
    abort.check()
    stopped.set()
    with pytest.raises(Interrupted, match="asked to stop"):
        abort.check()


def test_time_in_which_the_process_was_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    budget = WaitBudget(10.0)
    now += 1000.0  # a gap counts as one second
    budget.spend("the moon")
    for _ in range(9):
        now += 1.0
        budget.spend("the moon")
    now += 0.5
    with pytest.raises(LostMemberError):
        budget.spend("the moon")


def test_a_drain_aborts_the_epochs_before_it() -> None:
    fence = EpochFence()
    first = fence.enter(1)
    assert not first.is_set
    fence.fence(2, "drained for membership 2")
    assert first.is_set
    second = fence.enter(2)
    assert not second.is_set
    fence.fence(2, "said again")
    assert not second.is_set


def test_an_epoch_that_was_drained_before_it_was_entered_is_aborted() -> None:
    """Begin(2), RunAttempt and Drain(3) are all in the queue when Begin(2) is handled."""
    fence = EpochFence()
    fence.enter(1)
    fence.fence(2, "drained for membership 2")
    fence.fence(3, "drained for membership 3")
    with pytest.raises(Interrupted, match="drained for membership 3"):
        fence.enter(2).check()
    assert not fence.enter(3).is_set


def test_a_shutdown_aborts_every_epoch() -> None:
    fence = EpochFence()
    fence.fence(FOREVER, "shut down")
    assert fence.enter(2**63).is_set
    assert fence.epoch == 2**63
