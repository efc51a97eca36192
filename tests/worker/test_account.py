"""Where a device's time goes: every second once, by what was done or waited for."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry

from penstock.protocol.metrics.worker import BUSY, IDLE_CAUSES
from penstock.protocol.plan.instructions import parse_instruction
from penstock.workers.telemetry.account import IdleCause, TimeAccount
from penstock.workers.telemetry.metrics import WorkerMetrics
from penstock.workers.telemetry.progress import Progress, busy_with


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def account(clock: Clock) -> TimeAccount:
    made = TimeAccount(clock)
    made.turn(IdleCause.SCHEDULER)
    return made


def told(account: TimeAccount) -> dict[str, float]:
    return {what: seconds for what, seconds in account.seconds(None).items() if seconds}


def test_labels_are_those_that_are_counted() -> None:
    assert tuple(IdleCause) == IDLE_CAUSES
    assert busy_with(parse_instruction("B 0 0"), "train") in BUSY
    assert busy_with(parse_instruction("F 0 0 keep=none"), "eval") == "evaluate"
    assert busy_with(parse_instruction("OG 0"), "train") is IdleCause.OVERHEAD


def test_nothing_counts_before_the_worker_is_ready(clock: Clock) -> None:
    account = TimeAccount(clock)
    account.turn(IdleCause.RECOVERY)
    account.computed("forward", 100.0, 101.0)
    clock.now_s += 5.0
    account.turn(IdleCause.SCHEDULER)
    assert told(account) == {}


def test_a_step(account: TimeAccount, clock: Clock) -> None:
    clock.now_s = 101.0
    account.turn(IdleCause.DATA)
    clock.now_s = 101.5
    account.turn(IdleCause.OVERHEAD)
    account.waited(IdleCause.WEIGHTS, 0.25)
    account.computed("forward", 102.0, 104.0)
    account.waited(IdleCause.ACTIVATIONS, 3.0)  # the host; the device had work to do meanwhile
    account.computed("backward", 105.0, 106.0, IdleCause.GRADIENTS)
    account.waited(IdleCause.GRADIENTS, 0.5)
    clock.now_s = 107.0
    account.turn(IdleCause.PEERS)
    clock.now_s = 110.0
    account.decided(peers_s=1.0, optimizer_s=1.5)
    clock.now_s = 111.0
    account.turn(IdleCause.DATA)
    assert told(account) == {
        "scheduler": 1.0 + 0.5 + 1.0,
        "data": 0.5,
        "weights": 0.25,
        "overhead": 0.25 + 0.5,
        "forward": 2.0,
        "activations": 1.0,
        "backward": 1.0,
        "gradients": 0.5,
        "peers": 1.0,
        "optimizer": 1.5,
    }


def test_a_decision_that_comes_in_a_recovery_divides_nothing(
    account: TimeAccount, clock: Clock
) -> None:
    account.turn(IdleCause.RECOVERY)
    clock.now_s += 3.0
    account.decided(peers_s=1.0, optimizer_s=1.0)
    account.turn(IdleCause.SCHEDULER)
    assert told(account) == {"recovery": 3.0}


@pytest.mark.parametrize("seed", range(5))
def test_all_sums_are_the_time_that_passed(account: TimeAccount, clock: Clock, seed: int) -> None:
    """Whatever is said: waits longer than the time there was, work that overlaps, or goes back."""
    drawn = random.Random(seed)
    for _ in range(200):
        clock.now_s += drawn.random()
        kind = drawn.randrange(4)
        if kind == 0:
            account.turn(drawn.choice(list(IdleCause)))
        elif kind == 1:
            account.waited(drawn.choice(list(IdleCause)), drawn.uniform(-0.1, 2.0))
        elif kind == 2:
            start_s = clock.now_s - drawn.uniform(0.0, 2.0)
            account.computed(drawn.choice(BUSY), start_s, drawn.uniform(start_s, clock.now_s))
        else:
            account.decided(drawn.random(), drawn.random())
    account.turn(IdleCause.SCHEDULER)
    assert sum(account.seconds(None).values()) == pytest.approx(clock.now_s - 100.0)


def test_what_is_under_way_is_seen_while_it_lasts_and_never_goes_back(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr("time.perf_counter", clock)
    registry, progress = CollectorRegistry(), Progress()
    metrics = WorkerMetrics(registry, progress)
    metrics.account = account = TimeAccount(clock)

    def shown(**labels: str) -> float | None:
        family = "busy" if "instruction" in labels else "idle"
        return registry.get_sample_value(f"penstock_device_{family}_seconds_total", labels)

    account.turn(IdleCause.SCHEDULER)
    account.turn(IdleCause.DATA)
    clock.now_s += 0.5
    assert shown(cause="data") == 0, "not worth a look yet"
    clock.now_s += 0.5
    assert shown(cause="data") == 1.0
    account.turn(IdleCause.OVERHEAD)
    progress.begin(parse_instruction("F 0 0 keep=all"), "train", 1)
    clock.now_s += 2.0
    assert shown(instruction="forward") == 2.0
    with progress.awaiting("activations", IdleCause.ACTIVATIONS):
        clock.now_s += 3.0
        assert shown(cause="activations") == 3.0
        clock.now_s += 1.0
        assert shown(cause="activations") == 4.0
    clock.now_s += 2.0
    assert shown(instruction="forward") == 2.0
    progress.rest()
    account.computed("forward", 103.0, 109.0)  # the device had not waited at all
    account.turn(IdleCause.PEERS)
    assert (shown(cause="activations"), shown(instruction="forward")) == (4.0, 6.0)
