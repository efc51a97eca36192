"""The step as a transaction: decisions, their order, and what a failure leaves of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.daemons.kit.events import LogLine
from penstock.daemons.scheduler.machine.activities.transaction import judge
from penstock.daemons.scheduler.machine.events import AppendMetrics, JournalDecision, Send
from penstock.daemons.scheduler.machine.position import LossScaling, Position
from penstock.host.errors import ConfigError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.shm.control import Decision
from tests.scheduler.conftest import Driver, facts_at, make_config, make_position, make_rules

TOLD = ("optimizerd.a", "worker.0", "worker.1")


def told(text: str) -> list[str]:
    return [f"{name} <- {text}" for name in TOLD]


def statuses(*sums: float, finite: bool = True) -> list[pb.BlockStatus]:
    return [pb.BlockStatus(block=b, sum_squares=s, finite=finite) for b, s in enumerate(sums)]


def test_commit_is_journaled_before_anyone_hears_of_it(live: Driver) -> None:
    assert live.run_attempt() == [
        "journal COMMIT v1 a1 c=1",
        *told("commit e1 v1 c=1"),
        "metrics line",
        *told("run_attempt e1 a2 v1 data 8"),
    ]
    [journaled] = [e for e in live.effects if isinstance(e, JournalDecision)]
    record = journaled.record
    assert (record.learning_rate, record.inverse_loss_scale, record.bias_step) == (0.5, 1.0, 1)
    assert journaled.position == make_position(1)


def test_all_blocks_and_all_workers_are_waited_for_in_any_order(live: Driver) -> None:
    assert live.block(1) == []
    assert live.done("worker.1") == []
    assert live.done("worker.1") == [], "twice is once"
    assert live.block(0) == []
    assert live.block(0) == []
    assert live.block(2) == [], "has nothing to train"
    assert live.status.phase == "running"
    assert live.done("worker.0")[0] == "journal COMMIT v1 a1 c=1"


def test_a_node_that_trains_no_block_falls_no_more_than_one_commit_behind() -> None:
    """Its optimizerd reports no block. Without an acknowledgement, an epoch might break when its
    memory is several commits behind, which no record explains.
    """
    config = make_config(cluster={"workers": 1, "nodes": [{"name": "a"}, {"name": "b"}]})
    driver = Driver(replace(make_rules(config), owners=("optimizerd.a",) * 3))
    driver.begin()
    assert driver.run_attempt() == []
    assert driver.machine.activity is not None
    assert driver.machine.activity.unfinished == ("optimizerd.b",)
    assert driver.heard("optimizerd.a") == [], "it reports blocks"
    assert driver.heard("optimizerd.b", attempt=7) == [], "of another attempt"
    assert driver.heard("optimizerd.b")[0] == "journal COMMIT v1 a1 c=1"
    assert driver.heard("optimizerd.b", attempt=1) == [], "twice is once"
    assert driver.run_attempt() == [], "the next one waits, too"


def test_reports_of_an_earlier_attempt_are_ignored(live: Driver) -> None:
    live.run_attempt()
    assert live.block(0, attempt=1) == []
    done = pb.AttemptDone(epoch=1, attempt=1)
    assert live.each(("worker.0", "worker.1"), attempt_done=done) == []
    live.block(1)
    live.done("worker.0")
    assert live.done("worker.1") == [], "block 0 of this attempt is still missing"
    assert live.block(0)[0] == "journal COMMIT v2 a2 c=1"


def test_a_loss_between_amend_and_commit_repeats_the_attempt(live: Driver) -> None:
    live.run_attempt(4.0)
    pid = live.pids["worker.0"]
    live.close("worker.0")
    assert live.amended() == [], "it comes too late"
    live.join("worker.0")
    assert live.fenced("worker.0", pid)[0] == "journal epoch 2, attempts from 2"
    live.drained(0)
    assert live.ready() == told("run_attempt e2 a2 v0 data 0")


def test_a_commit_that_was_journaled_and_not_announced_is_announced_by_begin(
    live: Driver,
) -> None:
    live.run_attempt()
    [journaled] = [e for e in live.effects if isinstance(e, JournalDecision)]
    successor = Driver(
        facts=facts_at(
            1, epoch=1, next_attempt=3, record=journaled.record, position=journaled.position
        )
    )
    for member in successor.rules.members:
        successor.join(member.name, epoch=1)
    assert successor.drained(0) == ["memoryd.a <- begin e2 v1", "optimizerd.a <- begin e2 v1"]
    begin = next(e.message.begin for e in successor.effects if isinstance(e, Send))
    assert begin.record.attempt == 1
    assert successor.ready() == told("run_attempt e2 a3 v1 data 8")


@pytest.mark.parametrize("finite", [True, False])
def test_skip_consumes_data_and_keeps_the_version(live: Driver, finite: bool) -> None:
    assert live.run_attempt(1.0 if not finite else math.inf, finite=finite) == [
        "journal SKIP v0 a1 c=0",
        *told("skip e1 a1"),
        "metrics line",
        *told("run_attempt e1 a2 v0 data 8"),
    ]
    assert live.run_attempt()[0] == "journal COMMIT v1 a2 c=1"


def test_the_last_skip_that_may_be_ends_the_run_before_a_step_in_place_is_taken_back(
    live_with: Callable[..., Driver],
) -> None:
    """Else an epoch that breaks meanwhile lets the run go on."""
    driver = live_with(optimizer={"rollback": "arithmetic"}, train={"max_skips": 1})
    driver.run_attempt(math.inf)
    driver.say("optimizerd.a", settled=pb.Settled(epoch=1, version=0))
    shutdowns = [f"{m.name} <- shutdown" for m in driver.rules.members]
    assert driver.run_attempt(math.inf)[-5:] == shutdowns
    assert driver.leave_all() == ["exit 4"]


def test_too_many_skips_in_a_row_end_the_run(live_with: Callable[..., Driver]) -> None:
    driver = live_with(train={"max_skips": 2})
    driver.run_attempt(math.nan)
    driver.run_attempt(math.nan)
    driver.run_attempt()
    driver.run_attempt(math.nan)
    driver.run_attempt(math.nan)
    shutdowns = [f"{m.name} <- shutdown keep memory" for m in driver.rules.members]
    assert driver.run_attempt(math.nan)[-5:] == shutdowns
    assert driver.status.phase == "failed"
    assert "3 attempts in a row" in driver.status.message
    assert "train.max_skips = 2" in driver.status.message
    assert driver.leave_all() == ["exit 4"]


def test_the_norm_is_summed_in_block_order_and_unscaled() -> None:
    sums = (1e16, 1.0, 1.0)
    verdict = judge(statuses(*sums), 2.0, None)
    assert verdict.grad_norm == math.sqrt((1e16 + 1.0) + 1.0) / 2.0
    assert (verdict.decision, verdict.coefficient) == (Decision.COMMIT, 1.0)


@pytest.mark.parametrize(
    ("norm", "decision"),
    [(0.5, Decision.COMMIT), (1.0 - 2e-6, Decision.COMMIT), (1.0, Decision.AMEND)],
)
def test_clipping_compares_as_torch_does(norm: float, decision: Decision) -> None:
    verdict = judge(statuses(norm**2), 1.0, 1.0)
    assert verdict.decision is decision
    assert verdict.coefficient == min(1.0, 1.0 / (norm + 1e-6))


@pytest.mark.parametrize("total", [math.nan, math.inf, -1.0])
def test_an_impossible_sum_is_skipped(total: float) -> None:
    assert judge(statuses(0.0, total), 1.0, 1.0).decision is Decision.SKIP


def test_fp16_loss_scale_halves_on_skip_and_grows_after_clean_commits(
    live_with: Callable[..., Driver],
) -> None:
    optimizer = {"initial_loss_scale": 4.0, "loss_scale_growth_interval": 2}
    driver = live_with(model={"dtype": "fp16"}, optimizer=optimizer)

    def scales() -> list[float]:
        runs = [e.message.run_attempt for e in driver.effects if isinstance(e, Send)]
        return [r.loss_scale for r in runs if r.attempt]

    assert scales() == [4.0] * 3
    driver.run_attempt(math.inf)
    assert scales() == [2.0] * 3
    driver.run_attempt(4.0 * 0.125)
    [journaled] = [e for e in driver.effects if isinstance(e, JournalDecision)]
    assert journaled.record.inverse_loss_scale == 0.5
    driver.run_attempt(4.0 * 0.125)
    assert scales() == [4.0] * 3
    for _ in range(4):
        driver.run_attempt(math.nan)
    assert scales() == [1.0] * 3, "not below 1"


def test_fp16_gives_up_only_at_the_lowest_loss_scale(live_with: Callable[..., Driver]) -> None:
    optimizer = {"initial_loss_scale": 2.0**40, "loss_scale_min": 4.0}
    driver = live_with(model={"dtype": "fp16"}, optimizer=optimizer, train={"max_skips": 2})
    for _ in range(38):
        driver.run_attempt(math.nan)
    position = driver.machine.mirror.position
    assert position is not None
    assert (position.loss_scale, position.skips_in_a_row) == (4.0, 38)
    assert driver.status.phase == "running"
    driver.run_attempt(math.nan)
    assert "39 attempts in a row" in driver.status.message
    assert "the last with the loss scale at optimizer.loss_scale_min = 4 was" in (
        driver.status.message
    )
    assert "lower optimizer.lr" in driver.status.message
    assert driver.leave_all() == ["exit 4"]


def test_loss_scale_is_restored_from_the_journal(live_with: Callable[..., Driver]) -> None:
    optimizer = {"initial_loss_scale": 64.0, "loss_scale_growth_interval": 3}
    driver = live_with(model={"dtype": "fp16"}, optimizer=optimizer)
    driver.run_attempt(math.nan)
    for _ in range(2):
        driver.run_attempt()
    [journaled] = [e for e in driver.effects if isinstance(e, JournalDecision)]
    fields = json.loads(json.dumps(journaled.position.to_fields()))
    position = Position.from_fields(fields, "journal")
    assert position == journaled.position
    assert (position.loss_scale, position.clean_commits) == (32.0, 2)
    resumed = Driver(
        driver.rules,
        facts_at(2, record=journaled.record, position=position, next_attempt=4),
    )
    resumed.join_all()
    resumed.drained(2)
    resumed.ready()
    resumed.run_attempt()
    [journaled] = [e for e in resumed.effects if isinstance(e, JournalDecision)]
    assert journaled.record.inverse_loss_scale == 1 / 32
    assert journaled.position.loss_scale == 64.0, "the third clean one in a row"


@pytest.mark.parametrize(
    ("field", "value"), [("initial_loss_scale", math.inf), ("loss_scale_min", 65537.0)]
)
def test_impossible_loss_scales_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer\.({field}|initial_loss_scale)"):
        make_config(optimizer={field: value})


def test_other_dtypes_have_no_loss_scale() -> None:
    scaling = LossScaling(dynamic=False, initial=65536.0, growth_interval=1)
    position = Position(version=0, data_position=0, loss_scale=scaling.start)
    for decision in (Decision.SKIP, Decision.COMMIT, Decision.AMEND):
        position = position.after(decision, 8, scaling)
    assert (position.loss_scale, position.data_position, position.version) == (1.0, 24, 2)


def test_metrics_line(live: Driver) -> None:
    live.now_s += 1.0
    live.done(
        "worker.0",
        busy_seconds=1.0,
        wall_seconds=2.0,
        loss_sum=0.0,
        loss_tokens=0,
        tail_seconds=0.9,
    )
    live.done(
        "worker.1",
        busy_seconds=0.5,
        wall_seconds=1.0,
        loss_sum=30.0,
        loss_tokens=10,
        tail_seconds=0.25,
    )
    live.block(0)
    live.now_s += 3.0
    live.block(1)
    [appended] = [e for e in live.effects if isinstance(e, AppendMetrics)]
    assert json.loads(appended.metrics_json) == {
        "step": 1,
        "attempt": 1,
        "phase": "train",
        "loss": 3.0,
        "grad_norm": 0.5,
        "lr": 0.5,
        "tokens": 10,
        "seconds": 4.0,
        "tokens_per_second": 2.5,
        "decision": "commit",
        "loss_scale": 1.0,
        "epoch": 1,
        "bubble_ratio": 1.0 - 1.5 / 4.0,
        "optimizer_tail_seconds": 3.25,  # since the later one's last gradient
        "time": 1004.0,
    }
    assert live.status.eta_seconds == 99 * 4.0
    live.run_attempt(math.nan)
    [appended] = [e for e in live.effects if isinstance(e, AppendMetrics)]
    line = json.loads(appended.metrics_json)
    assert (line["step"], line["attempt"], line["decision"]) == (1, 2, "skip")
    assert line["grad_norm"] is None


def test_the_first_step_without_counted_tokens_is_warned_of(live: Driver) -> None:
    warnings = []
    for tokens in (10, 0, 0):
        for worker in live.rules.workers:
            live.done(worker, loss_sum=0.0, loss_tokens=tokens)
        live.block(0)
        live.block(1)
        warnings.append([e.text for e in live.effects if isinstance(e, LogLine) and e.warning])
        [appended] = [e for e in live.effects if isinstance(e, AppendMetrics)]
        assert (json.loads(appended.metrics_json)["loss"] is None) is (tokens == 0)
    assert [len(texts) for texts in warnings] == [0, 1, 0]
    [[text]] = warnings[1:2]
    assert text.startswith("step 2: no token of its 8 sequences counts in the loss"), text
    assert "data.train_on" in text


def test_lines_and_status_count_passes_over_the_data() -> None:
    live = Driver(replace(make_rules(), data_samples=64))
    assert (live.status.data_epoch, live.status.data_epochs) == (0.0, 100 * 8 / 64)
    live.begin()
    passes = []
    for norm in (0.25, math.nan, 0.25):
        live.run_attempt(norm)
        [appended] = [e for e in live.effects if isinstance(e, AppendMetrics)]
        passes.append(json.loads(appended.metrics_json)["data_epoch"])
    assert passes == [8 / 64, 16 / 64, 24 / 64], "a skipped attempt has taken its samples"
    assert (live.status.data_epoch, live.status.data_epochs) == (24 / 64, 101 * 8 / 64)


def test_a_resumed_run_counts_passes_on_from_its_place_in_the_data() -> None:
    resumed = Driver(replace(make_rules(), data_samples=64), facts_at(5))
    assert (resumed.status.data_epoch, resumed.status.data_epochs) == (40 / 64, 100 * 8 / 64)


def test_passes_are_not_known_where_data_are_made_up(live: Driver) -> None:
    assert (live.status.data_epoch, live.status.data_epochs) == (0.0, 0.0)


def test_each_attempt_has_the_learning_rate_of_its_target() -> None:
    config = make_config(optimizer={"lr": 1.0, "warmup_steps": 4, "schedule": "constant"})
    driver = Driver(make_rules(config))
    driver.begin()
    rates = []
    for _ in range(5):
        runs = [e.message.run_attempt for e in driver.effects if isinstance(e, Send)]
        rates.append(runs[-1].learning_rate)
        driver.run_attempt()
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]
