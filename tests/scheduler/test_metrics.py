"""The scheduler's counters, compared with the history of its machine."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from prometheus_client import generate_latest

from penstock.daemons.kit.events import StopAsked
from penstock.daemons.scheduler.effect_times import EffectTimes
from penstock.daemons.scheduler.machine.evaluations import Score
from penstock.daemons.scheduler.machine.events import (
    AppendMetrics,
    ControlCall,
    Effect,
    JournalDecision,
    JournalEpoch,
    PrepareSave,
    Send,
)
from penstock.daemons.scheduler.machine.history import BreakCause
from penstock.daemons.scheduler.machine.position import Position
from penstock.daemons.scheduler.machine.rules import RunPhase
from penstock.daemons.scheduler.metrics import SchedulerMetrics
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.metrics import scheduler as names
from penstock.shm.control import CommitRecord, Decision
from tests.scheduler.conftest import Driver, make_config

MakeDriver = Callable[..., Driver]
SILENT = ("worker.0",)


class Measured:
    """The metrics of a driver's run, as a scheduler's loop keeps them."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.metrics = SchedulerMetrics(driver.rules.config, data_samples=640)

    def heard(self) -> Measured:
        """Takes the lines of the last event's effects."""
        for effect in self.driver.effects:
            if isinstance(effect, AppendMetrics):
                self.metrics.line(effect.metrics_json)
        return self

    def value(self, name: str, **labels: str) -> float | None:
        self.metrics.update(self.driver.machine, self.driver.status, self.driver.now_s)
        return self.metrics.registry.get_sample_value(f"penstock_{name}", labels)

    def page(self) -> str:
        return generate_latest(self.metrics.registry).decode()


def test_label_values_are_those_of_the_machine() -> None:
    assert names.BREAK_CAUSES == tuple(BreakCause)
    assert names.PHASES == tuple(phase.value for phase in RunPhase)


def test_what_is_not_known_is_absent_and_the_rest_begins_at_zero(live: Driver) -> None:
    measured = Measured(Driver())
    measured.metrics.update(measured.driver.machine, measured.driver.status, measured.driver.now_s)
    lines = [line for line in measured.page().splitlines() if not line.startswith("#")]
    shown = {line.split()[0] for line in lines}
    for metric in names.SCHEDULER:
        if metric.full_name not in ("penstock_clip_limit", "penstock_data_samples"):
            assert any(name.startswith(metric.full_name) for name in shown) != bool(metric.absent)
    assert 'penstock_attempts_broken_total{cause="hung_member"} 0.0' in lines
    assert 'penstock_saves_total{outcome="failed"} 0.0' in lines
    assert 'penstock_phase{phase="gathering"} 1.0' in lines
    assert {"penstock_clip_limit 1.0", "penstock_data_samples 640.0"} <= set(lines)
    assert Measured(live).value("phase", phase="running") == 1


def test_decisions_become_what_their_lines_say(live: Driver) -> None:
    measured = Measured(live)
    live.now_s += 4.0
    live.run_attempt()
    measured.heard()
    assert measured.value("step") == measured.value("attempts_total", decision="commit") == 1
    assert measured.value("loss") == 2.0 and measured.value("gradient_norm") == 0.5
    assert measured.value("learning_rate") == 0.5 and measured.value("loss_scale") == 1
    assert measured.value("last_commit_timestamp_seconds") == 1004
    assert measured.value("tokens_total") == 20
    assert (
        measured.value("attempt_seconds_sum")
        == measured.value(
            "eta_seconds",
        )
        / 99
        == 4
    )
    assert measured.value("data_position_samples") == 8
    live.now_s += 1.0
    live.run_attempt(math.nan)
    measured.heard()
    assert measured.value("attempts_total", decision="skip") == measured.value("step") == 1
    assert measured.value("gradient_norm") == 0.5, "the last that was a number"
    assert measured.value("last_commit_timestamp_seconds") == 1004
    assert measured.value("data_position_samples") == 16


def lost(driver: Driver) -> None:
    driver.close("worker.0")


def silent(driver: Driver) -> None:
    driver.wait(11, silent=("worker.0",))


def hung(driver: Driver) -> None:
    for _ in range(50):
        driver.tick(0.5)
        for name in list(driver.streams):
            driver.say(name, heartbeat=pb.Heartbeat(activity="B 1 0", progress=1))


def failed(driver: Driver) -> None:
    driver.say("worker.0", failed=pb.Failed(error="no memory", exit_code=3))


def cut_off(driver: Driver) -> None:
    driver.say("worker.0", cut_off=pb.CutOff(epoch=driver.epoch, loss="a connection"))


def stopped(driver: Driver) -> None:
    driver.feed(StopAsked(again=True, within_s=None))


BREAKS = (
    ("lost_member", lost),
    ("lost_member", cut_off),
    ("silent_member", silent),
    ("hung_member", hung),
    ("failed_member", failed),
    ("asked", stopped),
)


@pytest.mark.parametrize(("cause", "break_it"), BREAKS)
def test_a_broken_attempt_is_counted_once_by_its_cause(
    cause: str, break_it: Callable[[Driver], None], live_with: MakeDriver
) -> None:
    live = live_with(cluster={"attempt_timeout_s": 20})
    measured = Measured(live)
    break_it(live)
    for other in names.BREAK_CAUSES:
        assert measured.value("attempts_broken_total", cause=other) == (other == cause), other


def test_recovery_runs_from_the_break_to_the_next_attempt(live: Driver) -> None:
    measured = Measured(live)
    pid = live.pids["worker.0"]
    live.close("worker.0")
    live.tick(2.0)
    live.fenced("worker.0", pid)
    live.join("worker.0")
    live.now_s += 3.0
    live.drained(0)
    assert measured.value("recovery_seconds_count") == 0
    live.ready()
    assert measured.value("recovery_seconds_count") == 1
    assert measured.value("recovery_seconds_sum") == 5.0
    assert measured.value("epochs_total") == 1, "as far as this page has seen"


def test_a_break_while_paused_breaks_no_attempt(live: Driver) -> None:
    measured = Measured(live)
    live.ask(ControlCall.PAUSE)
    live.run_attempt()
    live.wait(3.0)
    assert measured.value("paused_seconds_total") == 3.0
    assert measured.value("phase", phase="paused") == 1
    live.close("worker.0")
    live.wait(2.0)
    assert measured.value("attempts_broken_total", cause="lost_member") == 0
    assert measured.value("paused_seconds_total") == 3.0


def test_saves(live_with: MakeDriver) -> None:
    driver = live_with(train={"save_every": 2})
    measured = Measured(driver)
    assert measured.value("save_interval_seconds") is None
    for seconds in (1.0, 3.0):
        driver.now_s += seconds
        driver.run_attempt()
    driver.now_s += 5.0
    driver.save()
    assert measured.value("saves_total", outcome="done") == 1
    assert measured.value("save_bytes_total") == 3
    assert measured.value("save_seconds_total") == measured.value("save_blocked_seconds_total") == 5
    assert measured.value("saved_step") == 2
    assert measured.value("save_interval_seconds") == 4.0
    driver.run_attempt()
    driver.run_attempt()
    driver.now_s += 1.0
    driver.save(error="disk full")
    assert measured.value("saves_total", outcome="failed") == 1
    assert measured.value("save_seconds_total") == 6


def test_the_rounding_of_the_last_step_is_no_pass_beyond_the_epochs() -> None:
    config = make_config()
    train = config.train.model_copy(update={"epochs": 1.0, "steps": 100})
    metrics = SchedulerMetrics(config.model_copy(update={"train": train}), data_samples=795)
    assert metrics.registry.get_sample_value("penstock_data_passes") == 100 * 8 / 795


def test_gauges_come_back_with_a_new_scheduler() -> None:
    metrics = SchedulerMetrics(make_config(model={"dtype": "fp16"}), None)
    train = {"phase": "train", "loss": 2.5, "grad_norm": None, "lr": 0.1, "loss_scale": 8.0}
    scores = [
        Score(set_name=name, version=version, loss=loss, accuracy=None)
        for name, version, loss in (("chats", 3, 3.0), ("eval", 3, 9.0), ("eval", 6, 2.25))
    ]
    metrics.recall(
        json.dumps(train | {"time": 77.5}),
        scores,
        saved_at_s=70.0,
        position=Position(version=9, data_position=72, loss_scale=8.0),
    )
    expected = {
        "loss": 2.5,
        "gradient_norm": None,
        "loss_scale": 8.0,
        "loss_scale_floor": 1.0,
        "last_commit_timestamp_seconds": 77.5,
        "last_snapshot_timestamp_seconds": 70.0,
        "step": 9,
        "data_position_samples": 72,
        "data_samples": None,
        "tokens_total": 0,
        "run_ended": None,
    }
    value = metrics.registry.get_sample_value
    assert {name: value(f"penstock_{name}") for name in expected} == expected
    losses = {name: value("penstock_evaluation_loss", {"set": name}) for name in ("eval", "chats")}
    assert losses == {"eval": 2.25, "chats": 3.0}
    perplexity = value("penstock_evaluation_perplexity", {"set": "eval"})
    assert perplexity == pytest.approx(math.exp(2.25))
    assert value("penstock_evaluation_token_accuracy", {"set": "eval"}) is None
    metrics.ended(5)
    assert value("penstock_run_ended") == 5


def send(**body: Any) -> list[Effect]:
    return [Send(member="worker.0", message=pb.SchedulerMessage(**body))]


def decided(kind: Decision) -> list[Effect]:
    record = CommitRecord(
        version=1,
        attempt=1,
        decision=kind,
        coefficient=1.0,
        inverse_loss_scale=1.0,
        learning_rate=0.1,
        bias_step=1,
        incarnation=1,
    )
    position = Position(version=1, data_position=8, loss_scale=1.0)
    journal = JournalDecision(epoch=1, record=record, position=position, metrics_json="{}")
    return [journal, *send(commit=pb.Commit()), AppendMetrics(metrics_json="{}")]


NEXT = send(run_attempt=pb.RunAttempt(attempt=2))
SETTLE = send(settle=pb.Settle())
PREPARE = PrepareSave(number=1, directory="")
LATENCY_CASES: dict[str, tuple[list[list[Effect]], float, float]] = {
    # Each effect takes a second, and a second passes between lists: latency, time between.
    "commit": ([decided(Decision.COMMIT) + NEXT], 2, 3),
    "amend": ([send(amend=pb.Amend()), [*decided(Decision.AMEND), *NEXT]], 4, 3),
    "evaluation": ([decided(Decision.COMMIT) + send(evaluate=pb.Evaluate()), NEXT], 2, 3),
    "pause": ([decided(Decision.COMMIT), NEXT], 2, 3),
    "save": ([[*decided(Decision.COMMIT), PREPARE], NEXT], 2, 5),
    "last save": ([[*decided(Decision.COMMIT), PREPARE, *SETTLE], NEXT], 2, 4),
    "taken back": ([decided(Decision.SKIP) + SETTLE, NEXT], 2, 5),
    "broken": ([send(amend=pb.Amend()), [JournalEpoch(epoch=2, next_attempt=3, pids=())]], 0, 0),
}


@pytest.mark.parametrize("case", LATENCY_CASES)
def test_commit_latency_and_time_between_attempts(case: str) -> None:
    lists, latency, between = LATENCY_CASES[case]
    metrics, now = SchedulerMetrics(make_config(), None), [0.0]
    times = EffectTimes(metrics, clock=lambda: now[0])
    for effects in lists:
        carry_out(times, effects, now)
    value = metrics.registry.get_sample_value
    assert value("penstock_commit_latency_seconds_sum") == latency
    assert value("penstock_between_attempts_seconds_total") == between


def carry_out(times: EffectTimes, effects: Sequence[Effect], now: list[float]) -> None:
    for effect in effects:
        times.begins(effect)
        now[0] += 1.0
    times.done()
    now[0] += 1.0


def test_a_standstill_is_measured_from_the_last_sign_of_progress(live: Driver) -> None:
    """A worker with heartbeats and no progress stands still; an idle worker does not."""
    measured = Measured(live)
    assert measured.value("standstill_seconds") == 0.0
    beat = pb.Heartbeat(progress=7, activity="FORWARD 0 0")
    for still_s in (0.0, 5.0):
        live.now_s += still_s
        live.machine.hangs.heard("worker.0", beat, live.now_s)
        assert measured.value("standstill_seconds") == still_s
