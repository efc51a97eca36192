"""Best states and early ends: functions of journaled evaluations, also after kills."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.config.evaluation import EvaluationMetric, Judge
from penstock.daemons.scheduler.journal import Journal
from penstock.daemons.scheduler.machine.evaluations import Score, Scores, Standstill
from penstock.daemons.scheduler.machine.events import (
    AppendMetrics,
    CompleteSave,
    JournalEvaluation,
    SaveFinished,
    Send,
)
from penstock.daemons.scheduler.machine.mirror import JournalFacts
from penstock.protocol.generated import scheduler_pb2 as pb
from tests.scheduler.conftest import RUN_ID, Driver, facts_at, make_config, make_rules, saved_at
from tests.scheduler.test_files import commit
from tests.scheduler.test_save_evaluate_shutdown import shutdown

LOSS = Judge(set_name="eval", metric=EvaluationMetric.LOSS)
RIGHT = Judge(set_name="eval", metric=EvaluationMetric.TOKEN_ACCURACY)


def scores(*losses: float | None, every: int = 2, name: str = "eval") -> tuple[Score, ...]:
    """Evaluations of a set with these losses; the accuracy falls with the step."""
    return tuple(
        Score(set_name=name, version=every * n, loss=loss, accuracy=1.0 / n)
        for n, loss in enumerate(losses, 1)
    )


def test_the_best_is_the_least_loss_or_the_greatest_accuracy_and_the_first_of_equal_ones() -> None:
    history = Scores(scores(3.0, 2.0, None, 2.0, 2.5))
    assert history.ranking(LOSS) == (4, 8, 10, 2)
    assert history.ranking(RIGHT) == (2, 4, 6, 8, 10)
    perplexity = Judge(set_name="eval", metric=EvaluationMetric.PERPLEXITY)
    assert history.ranking(perplexity) == (4, 8, 10, 2)
    assert history.ranking(Judge(set_name="other", metric=EvaluationMetric.LOSS)) == ()


@pytest.mark.parametrize(
    ("losses", "since", "best"),
    [
        ((), 0, None),
        ((3.0,), 0, 2),
        ((3.0, 2.0, 2.0), 1, 4),
        ((3.0, 4.0, 2.9), 0, 6),
        ((3.0, None, 3.5), 2, 2),
        ((None, None), 2, None),
    ],
)
def test_an_equal_value_and_none_are_no_improvement(
    losses: tuple[float | None, ...], since: int, best: int | None
) -> None:
    standstill = Scores(scores(*losses)).standstill(LOSS)
    assert standstill == Standstill(evaluations=since, best=best)


def test_a_repeated_evaluation_counts_once_whatever_happened_before() -> None:
    """The history with restores decides as the undisturbed one."""
    draw = random.Random(5)
    values = scores(*(draw.uniform(1.0, 2.0) for _ in range(30)), every=1)
    for _ in range(50):
        disturbed, version = Scores(), 0
        while version < 30:
            if draw.random() < 0.2:
                version = max(0, version - draw.randrange(4))
                disturbed.forget_after(version)
            version += 1
            disturbed.add(values[version - 1])
            plain = Scores(values[:version])
            assert disturbed.of("eval") == plain.of("eval")
            assert disturbed.ranking(LOSS) == plain.ranking(LOSS)
            assert disturbed.standstill(LOSS) == plain.standstill(LOSS)


def test_the_journal_of_an_older_version_has_its_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    journal = Journal(path, RUN_ID)
    for version in (1, 2, 3):
        journal.decide(commit(version))
        line = f'{{"phase": "eval", "step": {version}, "attempt": {version}, "loss": {version}.5}}'
        score = Score(set_name="eval", version=version, loss=1.0, accuracy=1.0)
        journal.evaluate(JournalEvaluation(evaluation=version, score=score, metrics_json=line))
    journal._connection.execute("DROP TABLE scores")
    journal.close()
    journal = Journal(path, RUN_ID)
    assert [(s.version, s.loss, s.accuracy) for s in journal.load().scores] == [
        (1, 1.5, None),
        (2, 2.5, None),
        (3, 3.5, None),
    ]
    journal.close()


# ---- the machine ----


def evaluated(driver: Driver, loss: float, right: int = 0) -> list[str]:
    """The workers report the evaluation under way; the lines of the last report."""
    done = pb.EvaluationDone(
        epoch=driver.epoch,
        evaluation=driver.machine.mirror.evaluation,
        loss_sum=10 * loss,
        loss_tokens=10,
        right_tokens=right,
    )
    return driver.each(driver.rules.workers, evaluation_done=done)


class Restarted(Driver):
    """A scheduler that has started on a journal; ``lines`` are those of its live epoch."""

    lines: list[str]


def killed(driver: Driver) -> Restarted:
    """A scheduler that starts with the journal of one that was killed, and memory as it was."""
    mirror = driver.machine.mirror
    facts = JournalFacts(
        epoch=mirror.epoch,
        next_attempt=mirror.next_attempt + 1,
        record=mirror.record,
        position=mirror.position,
        evaluation=mirror.evaluation,
        scores=tuple(s for name in ("eval", "chats") for s in mirror.scores.of(name)),
    )
    again = Restarted(driver.rules, facts, mirror.saved)
    again.join_all()
    record = mirror.record
    assert record is not None
    again.drained(record.version, record.incarnation)
    again.lines = again.ready()
    return again


SETS = {"sets": [{"name": "eval", "path": "a"}, {"name": "chats", "path": "b", "every": 2}]}


def test_sets_are_evaluated_one_after_the_other_each_at_its_own_steps(
    live_with: Callable[..., Driver],
) -> None:
    driver = live_with(train={"eval_every": 1, "eval_batches": 3}, eval=SETS)

    def sets() -> list[str]:
        messages = [e.message for e in driver.effects if isinstance(e, Send)]
        calls = [m.evaluate for m in messages if m.HasField("evaluate")]
        return [call.set for call in calls]

    driver.run_attempt()
    assert sets() == ["eval"] * 2, "by both workers"
    assert evaluated(driver, 3.0)[-1].startswith("worker.1 <- run_attempt")
    driver.run_attempt()
    assert sets() == ["eval"] * 2
    evaluated(driver, 2.0, right=5)
    assert sets() == ["chats"] * 2
    lines = [json.loads(e.metrics_json) for e in driver.effects if isinstance(e, AppendMetrics)]
    assert [(line["set"], line["loss"], line["token_accuracy"]) for line in lines] == [
        ("eval", 2.0, 0.5)
    ]
    again = killed(driver)
    assert [line for line in again.lines if "evaluate" in line], "only the set that is missing"
    assert again.machine.mirror.scores.has("eval", 2)
    assert not again.machine.mirror.scores.has("chats", 2)
    assert evaluated(again, 9.0)[-1].startswith("worker.1 <- run_attempt")
    assert [s.loss for s in again.machine.mirror.scores.of("chats")] == [9.0]


def test_the_best_evaluation_saves_its_version(live_with: Callable[..., Driver]) -> None:
    driver = live_with(train={"eval_every": 2, "keep_best": "loss"})
    for loss, saves in ((3.0, True), (3.5, False), (2.0, True), (2.0, False)):
        driver.run_attempt()
        driver.run_attempt()
        version = driver.machine.mirror.version
        lines = evaluated(driver, loss)
        begins = f"prepare /run/state/.tmp-step-{version:08d}"
        assert (begins in lines) is saves, (loss, lines)
        if saves:
            driver.pin()
            driver.written()
    assert driver.machine.mirror.saved_version == 6


def test_a_kill_between_the_best_evaluation_and_its_save_changes_nothing(
    live_with: Callable[..., Driver],
) -> None:
    driver = live_with(train={"eval_every": 1, "keep_best": "eval.loss"})
    driver.run_attempt()
    evaluated(driver, 3.0)
    again = killed(driver)
    assert again.lines == ["prepare /run/state/.tmp-step-00000001"]
    again.pin()
    assert again.written() == [] and again.machine.mirror.saved_version == 1
    assert killed(again).lines[-1].startswith("worker.1 <- run_attempt"), "saved once"


def test_a_failed_save_of_the_best_is_not_tried_for_ever(live_with: Callable[..., Driver]) -> None:
    driver = live_with(train={"eval_every": 1, "keep_best": "loss"})
    driver.run_attempt()
    evaluated(driver, 3.0)
    driver.pin()
    driver.written(error="disk full")
    assert driver.run_attempt()[-1].startswith("worker.1 <- evaluate")


def test_a_completed_save_knows_the_best_of_the_journal(live_with: Callable[..., Driver]) -> None:
    driver = live_with(train={"eval_every": 1, "save_every": 3, "keep_best": "token_accuracy"})
    for right in (4, 7, 5):
        driver.run_attempt()
        save = driver.machine.saves.under_way
        if save is not None:
            driver.pin()
            driver.written()
        evaluated(driver, 1.0, right)
        if driver.machine.saves.under_way is not None:
            driver.pin()
            rankings = complete(driver)
    assert rankings == (2, 1)


def complete(driver: Driver) -> tuple[int, ...]:
    """Completes the save under way; the ranking that the disk thread gets."""
    save = driver.machine.saves.under_way
    assert save is not None
    saved = pb.Saved(epoch=save.epoch, version=save.version, number=save.number)
    driver.each(driver.rules.memoryds, saved=saved)
    [effect] = [e for e in driver.effects if isinstance(e, CompleteSave)]
    directory = f"/run/state/step-{save.version:08d}"
    driver.feed(SaveFinished(number=save.number, version=save.version, directory=directory))
    return effect.ranking


def test_a_run_ends_when_it_no_longer_improves(live_with: Callable[..., Driver]) -> None:
    stop = {"metric": "loss", "patience": 2}
    driver = live_with(train={"eval_every": 1, "stop_early": stop})
    for loss in (3.0, 2.0, 2.5):
        driver.run_attempt()
        assert evaluated(driver, loss)[-1].startswith("worker.1 <- run_attempt")
        driver = killed(driver)
    driver.run_attempt()
    assert evaluated(driver, 2.0)[-2] == "prepare /run/state/.tmp-step-00000004"
    driver = killed(driver)
    assert driver.lines[0] == "prepare /run/state/.tmp-step-00000004", "decides the same again"
    assert driver.save() == shutdown()
    reason = (
        "stopped early at step 4 of 100: eval.loss is best at step 2, and 2 evaluations in a row"
        " were no better (train.stop_early)"
    )
    assert (driver.status.phase, driver.status.message) == ("done", reason)
    assert driver.leave_all() == ["exit 0"]


def test_a_run_that_ended_early_stays_ended_and_goes_on_with_more_patience() -> None:
    facts = facts_at(4, scores=scores(2.0, 3.0, 3.0, 3.0, every=1))

    def started(patience: int, saved: int = 4) -> list[str]:
        stop = {"metric": "loss", "patience": patience}
        config = make_config(train={"eval_every": 1, "stop_early": stop})
        driver = Driver(make_rules(config), facts, saved_at(saved))
        driver.join_all()
        return driver.drained(None)

    assert started(3)[-1].endswith("<- shutdown")
    assert [line for line in started(4) if "restore" in line]
    assert [line for line in started(3, saved=2) if "restore" in line], "the memory is lost"


def test_a_restore_forgets_the_evaluations_that_would_end_the_run() -> None:
    stop = {"metric": "loss", "patience": 2}
    config = make_config(train={"eval_every": 1, "stop_early": stop})
    facts = facts_at(3, scores=scores(2.0, 3.0, 3.0, every=1))
    driver = Driver(make_rules(config), facts, saved_at(1))
    driver.join_all()
    driver.drained(None)
    driver.restored()
    assert driver.ready()[-1].startswith("worker.1 <- run_attempt")
    for version in (2, 3):
        assert driver.machine.mirror.scores.standstill(LOSS).evaluations == version - 2
        driver.run_attempt()
        evaluated(driver, 3.0)
    assert driver.status.phase in ("saving", "settling")
