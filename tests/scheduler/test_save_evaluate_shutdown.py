"""Between attempts: saving, evaluating, pausing, stopping, failing, the end."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from penstock.daemons.kit.events import EffectFailed, StopAsked
from penstock.daemons.scheduler.machine.activities.activity import MAX_IN_A_ROW
from penstock.daemons.scheduler.machine.events import (
    AppendMetrics,
    CompleteSave,
    ControlAsked,
    ControlCall,
    NoteEnd,
    Reply,
    SaveFinished,
    SavePrepared,
    Send,
)
from penstock.daemons.scheduler.machine.machine import SchedulerMachine
from penstock.host.errors import ExitCode
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.run_result import RunEnd
from tests.scheduler.conftest import (
    Driver,
    facts_at,
    make_config,
    make_position,
    make_rules,
    saved_at,
)

SETTLE = "optimizerd.a <- settle e1 v{}"
ALL = ["node.a", "memoryd.a", "optimizerd.a", "worker.0", "worker.1"]


def shutdown(keep: bool = False) -> list[str]:
    return [f"{name} <- shutdown{' keep memory' if keep else ''}" for name in ALL]


def evaluated(driver: Driver, number: int) -> list[str]:
    done = pb.EvaluationDone(epoch=driver.epoch, evaluation=number, loss_sum=10.0, loss_tokens=10)
    return driver.each(driver.rules.workers, evaluation_done=done)


def test_a_snapshot_is_written_while_training_goes_on(live: Driver) -> None:
    assert live.ask(ControlCall.SNAPSHOT, ticket=5) == []
    assert live.run_attempt()[-2:] == ["metrics line", "prepare /run/state/.tmp-step-00000001"]
    assert live.feed(SavePrepared(number=1)) == ["memoryd.a <- save e1 v1"]
    about: dict[str, int] = {"epoch": 1, "number": 1, "version": 1}
    lines = live.say("memoryd.a", pinned=pb.Pinned(**about))
    assert lines[0] == "optimizerd.a <- run_attempt e1 a2 v1 data 8", "no sweep can hurt it now"
    assert live.run_attempt()[-1] == "worker.1 <- run_attempt e1 a3 v2 data 16"
    assert live.status.saving_version == 1
    files = [pb.SavedFile(name="block-0000.safetensors", bytes=3, sha256="ab")]
    saved = pb.Saved(**about, files=files)
    assert live.say("memoryd.a", saved=saved) == ["complete v1 with block-0000.safetensors"]
    [complete] = [e for e in live.effects if isinstance(e, CompleteSave)]
    assert (complete.position, complete.attempt) == (make_position(1), 1), "those of its start"
    finished = SaveFinished(number=1, version=1, directory="/run/state/step-00000001")
    assert live.feed(finished) == ["reply 5"]
    [reply] = [e for e in live.effects if isinstance(e, Reply)]
    assert reply.reply == pb.SnapshotReply(directory="/run/state/step-00000001", version=1)
    assert (live.status.version, live.status.saved_version, live.status.saving_version) == (2, 1, 0)


def test_a_save_outlives_a_broken_epoch(live: Driver) -> None:
    live.ask(ControlCall.SNAPSHOT, ticket=5)
    live.run_attempt()
    live.pin()
    lose(live, "worker.0")
    [number] = {
        e.message.drain.saving
        for e in live.effects
        if isinstance(e, Send) and e.message.HasField("drain")
    }
    assert number == 1, "memoryds do not end it"
    live.drained(1)
    assert live.ready()[0] == "optimizerd.a <- run_attempt e2 a3 v1 data 8"
    assert live.written() == ["reply 5"]


def test_who_waits_for_a_save_hears_at_once_that_the_run_fails(live: Driver) -> None:
    live.ask(ControlCall.SNAPSHOT, ticket=5)
    live.run_attempt()
    live.pin()
    lines = live.feed(EffectFailed(error="the journal was replaced", code=ExitCode.BAD_CONFIG))
    assert lines[0] == "error 5: the run ends: the journal was replaced; the memory is kept"


def test_a_save_ends_with_its_memoryd(live: Driver) -> None:
    live.ask(ControlCall.SNAPSHOT, ticket=5)
    live.run_attempt()
    live.pin()
    lose(live, "memoryd.a")
    assert live.status.message == "saving step 1 failed: memoryd.a was lost while it saved"
    live.drained(1)
    assert live.ready() == ["prepare /run/state/.tmp-step-00000001"], "and is begun anew"
    live.pin()
    assert live.written() == ["reply 5"]


def test_a_due_save_waits_for_an_older_one(live_with: Callable[..., Driver]) -> None:
    driver = live_with(train={"save_every": 2})
    for _ in range(2):
        driver.run_attempt()
    driver.pin()
    driver.run_attempt()
    assert driver.run_attempt()[-1] == "metrics line"
    assert driver.status.phase == "saving"
    assert driver.written() == ["prepare /run/state/.tmp-step-00000004"]
    driver.now_s += 2.0
    assert driver.pin()[-1] == "worker.1 <- run_attempt e1 a5 v4 data 32"
    assert driver.machine.counters.save_blocked_s == 2.0


def test_a_copy_comes_before_a_save_of_each_step(live_with: Callable[..., Driver]) -> None:
    """Otherwise it would wait for ever. The save of the step follows, before the next attempt."""
    driver = live_with(train={"save_every": 1})
    copied = ControlAsked(ticket=3, call=ControlCall.WEIGHTS, directory="/to")
    driver.run_attempt()
    driver.pin()
    driver.feed(copied)
    driver.run_attempt()
    assert driver.status.saving_version == 1
    assert driver.written()[-1] == "memoryd.a <- save e1 v2 weights into /to"
    assert driver.status.saving_version == 0, "a copy saves no state"
    pinned = pb.Pinned(epoch=1, version=2, number=2)
    assert driver.say("memoryd.a", pinned=pinned) == ["optimizerd.a <- settle e1 v2"]
    saved = pb.Saved(epoch=1, version=2, number=2)
    assert driver.say("memoryd.a", saved=saved) == [
        "reply 3",
        "prepare /run/state/.tmp-step-00000002",
    ]


def test_a_copy_is_no_save_of_the_last_step(live_with: Callable[..., Driver]) -> None:
    driver = live_with(train={"steps": 1})
    driver.feed(ControlAsked(ticket=3, call=ControlCall.WEIGHTS, directory="/to"))
    assert driver.run_attempt()[-1] == "memoryd.a <- save e1 v1 weights into /to"
    driver.say("memoryd.a", pinned=pb.Pinned(epoch=1, version=1, number=1))
    driver.feed(ControlAsked(ticket=4, call=ControlCall.SNAPSHOT))
    saved = pb.Saved(epoch=1, version=1, number=1)
    lines = driver.say("memoryd.a", saved=saved)
    assert lines == ["reply 3", "prepare /run/state/.tmp-step-00000001"]
    assert "reply 4" in driver.save()


def lose(driver: Driver, name: str) -> None:
    """A member dies and is replaced; the barrier begins."""
    pid = driver.pids[name]
    driver.close(name)
    driver.join(name)
    driver.fenced(name, pid)


def test_save_every(live_with: Callable[..., Driver]) -> None:
    driver = live_with(train={"save_every": 2})
    assert driver.run_attempt()[-1].startswith("worker.1 <- run_attempt")
    assert driver.run_attempt()[-1] == "prepare /run/state/.tmp-step-00000002"
    assert driver.pin()[-1] == "worker.1 <- run_attempt e1 a3 v2 data 16"
    assert driver.written() == []
    driver.run_attempt()
    assert driver.run_attempt()[-1] == "prepare /run/state/.tmp-step-00000004"
    driver.pin()
    assert driver.written(error="disk full") == []
    assert driver.run_attempt()[-1] == "worker.1 <- run_attempt e1 a6 v5 data 40"
    assert driver.run_attempt()[-1] == "prepare /run/state/.tmp-step-00000006"


def test_eval_every_and_its_line(live_with: Callable[..., Driver]) -> None:
    driver = live_with(train={"eval_every": 1, "eval_batches": 3})
    lines = driver.run_attempt()
    assert lines[-2:] == ["worker.0 <- evaluate e1 v1", "worker.1 <- evaluate e1 v1"]
    driver.now_s += 2.0
    stale = pb.EvaluationDone(epoch=1, evaluation=0)
    assert driver.each(driver.rules.workers, evaluation_done=stale) == []
    lines = evaluated(driver, 1)
    assert lines[:2] == ["journal evaluation of v1", "metrics line"]
    assert lines[-1] == "worker.1 <- run_attempt e1 a2 v1 data 8"
    [appended] = [e for e in driver.effects if isinstance(e, AppendMetrics)]
    line = json.loads(appended.metrics_json)
    assert (line["phase"], line["step"], line["loss"], line["tokens"]) == ("eval", 1, 1.0, 20)
    assert line["perplexity"] == pytest.approx(2.718281828)
    assert line["tokens_per_second"] == 10.0


def test_an_evaluation_broken_by_a_loss_is_repeated(live_with: Callable[..., Driver]) -> None:
    driver = live_with(train={"eval_every": 1})
    driver.run_attempt()
    pid = driver.pids["worker.0"]
    driver.close("worker.0")
    driver.join("worker.0")
    driver.fenced("worker.0", pid)
    driver.drained(1)
    assert driver.ready() == ["worker.0 <- evaluate e2 v1", "worker.1 <- evaluate e2 v1"]
    assert evaluated(driver, 1) == []
    assert evaluated(driver, 2)[0] == "journal evaluation of v1"


def test_a_run_paused_before_its_first_step_saves_only_what_is_asked_for() -> None:
    driver = Driver()
    driver.join_all()
    driver.ask(ControlCall.PAUSE, ticket=1)
    assert driver.begin() == []
    assert (driver.status.phase, driver.status.version) == ("paused", 0)
    assert driver.ask(ControlCall.SNAPSHOT, ticket=2)[0] == "prepare /run/state/.tmp-step-00000000"
    assert driver.save() == ["reply 2"]
    assert driver.status.phase == "paused"
    assert "worker.0 <- run_attempt e1 a1 v0 data 0" in driver.ask(ControlCall.RESUME, ticket=3)


def test_a_loss_while_paused_is_repaired_and_the_run_stays_paused(live: Driver) -> None:
    live.ask(ControlCall.PAUSE)
    live.run_attempt()
    pid = live.pids["worker.0"]
    live.close("worker.0")
    live.join("worker.0")
    live.fenced("worker.0", pid)
    live.drained(1)
    assert live.ready() == []
    assert live.status.phase == "paused"


def test_members_that_do_not_go_are_not_waited_for_for_ever(live: Driver) -> None:
    live.ask(ControlCall.STOP)
    live.run_attempt()
    assert live.save() == shutdown()
    assert live.wait(14.5) == []
    assert live.wait(1.0)[0] == "exit 5"


def test_stop_finishes_the_attempt_saves_and_ends(live: Driver) -> None:
    assert live.ask(ControlCall.STOP, 3) == ["reply 3"]
    assert live.feed(StopAsked()) == [], "the node may signal as well"
    assert live.run_attempt()[-1] == SETTLE.format(1)
    assert live.save() == shutdown()
    codes = {e.message.shutdown.exit_code for e in live.effects if isinstance(e, Send)}
    assert codes == {5}, "every node ends with it"
    assert live.leave_all() == ["exit 5"]


def test_a_stop_after_the_last_step_finishes_the_run(live_with: Callable[..., Driver]) -> None:
    driver = live_with(train={"steps": 1})
    driver.ask(ControlCall.STOP)
    driver.run_attempt()
    assert driver.save() == shutdown()
    assert driver.leave_all() == ["exit 0"]


def test_a_stop_before_the_last_evaluation_has_not_finished_the_run(
    live_with: Callable[..., Driver],
) -> None:
    driver = live_with(train={"steps": 1, "eval_every": 1})
    driver.ask(ControlCall.STOP)
    driver.run_attempt()
    assert driver.save() == shutdown()
    assert driver.leave_all() == ["exit 5"]


def test_a_last_step_that_was_saved_and_not_evaluated_is_restored_for_that() -> None:
    config = make_config(train={"steps": 4, "eval_every": 4})
    driver = Driver(make_rules(config), facts_at(4), saved_at(4))
    driver.join_all()
    assert [line for line in driver.drained(None) if "restore" in line] != []


def test_a_stop_without_the_memory_of_the_last_step_has_not_finished_the_run() -> None:
    config = make_config(train={"steps": 4})
    driver = Driver(make_rules(config), facts_at(4), saved_at(2))
    driver.join_all()
    driver.drained(None)
    assert driver.ask(ControlCall.STOP)[1:] == shutdown()
    assert driver.leave_all() == ["exit 5"]


def test_stop_before_the_first_commit_has_nothing_to_save(live: Driver) -> None:
    live.ask(ControlCall.STOP)
    live.run_attempt(float("nan"))
    assert live.machine.phase.value == "done"
    assert live.leave_all() == ["exit 5"]


def test_stop_survives_a_loss_and_still_saves(live: Driver) -> None:
    live.run_attempt()
    live.ask(ControlCall.STOP)
    pid = live.pids["worker.0"]
    assert live.close("worker.0") == [f"node.a <- fence worker.0 {pid}"]
    live.join("worker.0")
    live.fenced("worker.0", pid)
    live.drained(1)
    assert live.ready()[-1] == "optimizerd.a <- settle e2 v1"
    assert live.save() == shutdown()


def test_stop_while_gathering_with_nothing_to_lose() -> None:
    driver = Driver()
    driver.join("node.a")
    driver.join("memoryd.a")
    assert driver.ask(ControlCall.STOP) == ["reply 1", *shutdown()[:2]]
    assert driver.join("worker.0") == ["worker.0 <- shutdown"], "who comes too late goes too"
    assert driver.leave_all() == ["exit 5"]


@pytest.mark.parametrize("stage", ["draining", "restoring", "beginning"])
def test_stop_in_a_barrier_with_nothing_to_lose(stage: str) -> None:
    driver = Driver()
    driver.join_all()
    if stage != "draining":
        driver.drained(None)
    if stage == "beginning":
        driver.restored()
    assert driver.status.phase == stage
    assert driver.ask(ControlCall.STOP)[1:] == shutdown()


def test_stop_while_lost_memory_is_being_restored() -> None:
    driver = Driver(facts=facts_at(4), saved=saved_at(2))
    driver.join_all()
    driver.drained(None)
    assert driver.ask(ControlCall.STOP)[1:] == shutdown(), "version 4 is gone anyway"


def test_stop_waits_for_a_barrier_that_has_something_to_save_but_not_for_ever() -> None:
    driver = Driver(facts=facts_at(4))
    for name in ALL[:-1]:
        driver.join(name)
    assert driver.ask(ControlCall.STOP) == ["reply 1"]
    assert driver.status.phase == "stopping"
    assert driver.wait(59.5) == []
    lines = driver.wait(0.5)
    assert lines == ["node.a <- missing worker.1", *shutdown(keep=True)[:-1]]
    assert "waited for worker.1" in driver.status.message
    assert driver.leave_all() == ["exit 130"]


def test_a_second_signal_ends_at_once_and_keeps_the_memory(live: Driver) -> None:
    live.run_attempt()
    live.ask(ControlCall.SNAPSHOT, 9)
    assert live.feed(StopAsked()) == []
    lines = live.feed(StopAsked(again=True))
    assert lines[0].startswith("error 9: ")
    assert lines[1:] == [*shutdown(keep=True), "exit 130"]


def test_a_failed_member_stops_the_run_with_its_message_and_code(live: Driver) -> None:
    failed = pb.Failed(error="cannot pin memory", exit_code=3, epoch=1)
    assert live.say("worker.0", failed=failed) == shutdown(keep=False)
    assert live.status.message == "worker.0: cannot pin memory"
    assert live.status.phase == "failed"
    assert live.ask(ControlCall.SNAPSHOT, 2)[0].startswith("error 2: the run ends")
    assert live.close("worker.0") == [], "it goes as told: nobody is fenced"
    assert live.leave_all() == ["exit 3"]


@pytest.mark.parametrize("claimed", [0, 1, 5, 130, 256, 2**32 - 1])
def test_a_failure_never_passes_for_something_else(live: Driver, claimed: int) -> None:
    failed = pb.Failed(error="cannot pin memory", exit_code=claimed, epoch=1)
    assert live.say("worker.0", failed=failed) == shutdown(keep=False)
    assert live.status.message == "worker.0: cannot pin memory"
    assert live.leave_all() == ["exit 4"]


def test_a_failure_before_the_epoch_begins_stops_the_run_too() -> None:
    driver = Driver()
    driver.join("node.a")
    failed = pb.Failed(error="worker.0 died 21 times", exit_code=4)
    assert driver.say("node.a", failed=failed) == ["node.a <- shutdown"]
    assert driver.leave_all() == ["exit 4"]


def test_a_worker_that_gives_up_in_a_broken_epoch_does_not_stop_the_run(live: Driver) -> None:
    """A node may be away for longer than a worker waits for its peers."""
    failed = pb.Failed(error="waited 1200 s for worker.1", exit_code=4, epoch=1, timed_out=True)
    live.close("worker.1")
    pid = live.pids["worker.0"]
    lines = live.say("worker.0", failed=failed)
    assert f"node.a <- fence worker.0 {pid}" in lines
    assert live.status.phase == "fencing"
    live.fenced("worker.0", pid)
    live.fenced("worker.1", live.pids["worker.1"])
    live.join("worker.0")
    assert any("<- drain e2" in line for line in live.join("worker.1"))
    failed.epoch, failed.timed_out = 2, False
    assert "worker.0 <- shutdown" in live.say("worker.0", failed=failed)


def test_a_worker_that_gives_up_in_a_live_epoch_is_one_of_so_many_hangs(live: Driver) -> None:
    """What it waited for hangs, however lively others are: a save may show progress for long."""
    failed = pb.Failed(error="waited 1200 s", exit_code=4, timed_out=True)
    for failed.epoch in range(1, MAX_IN_A_ROW):
        pid = live.pids["worker.0"]
        assert f"node.a <- fence worker.0 {pid}" in live.say("worker.0", failed=failed)
        live.fenced("worker.0", pid)
        live.join("worker.0")
        live.drained(0)
        live.ready()
        assert live.status.phase == "running"
    failed.epoch += 1
    assert "worker.1 <- shutdown" in live.say("worker.0", failed=failed)
    assert "the attempt after step 0 hung 3 times in a row" in live.status.message
    assert live.leave_all() == ["exit 4"]


def test_a_node_that_gives_up_in_a_broken_epoch_stops_the_run(live: Driver) -> None:
    live.close("worker.1")
    failed = pb.Failed(error="worker.1 died 21 times", exit_code=4, epoch=1)
    assert "worker.0 <- shutdown" in live.say("node.a", failed=failed)


def test_files_that_cannot_be_written_stop_the_run(live: Driver) -> None:
    assert live.feed(EffectFailed(code=ExitCode.NO_MEMORY, error="disk full")) == shutdown(
        keep=False
    )
    assert live.leave_all() == ["exit 3"]


def test_memory_with_a_committed_step_outlives_a_failure(live: Driver) -> None:
    live.run_attempt()
    failed = pb.Failed(error="cannot pin memory", exit_code=3, epoch=1)
    assert live.say("worker.0", failed=failed) == shutdown(keep=True)


@pytest.mark.parametrize("held", [9, None], ids=["of an earlier start", "of this start"])
def test_a_failure_removes_memory_that_this_start_filled(held: int | None) -> None:
    """What an earlier start left stays, even though all of it is saved."""
    driver = Driver(facts=facts_at(9), saved=saved_at(9))
    driver.join_all()
    driver.drained(held)
    if held is None:
        driver.restored()
    driver.ready()
    failed = pb.Failed(error="cannot pin memory", exit_code=3, epoch=driver.epoch)
    assert driver.say("worker.0", failed=failed) == shutdown(keep=held is not None)


def test_a_finished_run_whose_memory_still_lives_is_saved() -> None:
    config = make_config(train={"steps": 4})
    driver = Driver(make_rules(config), facts_at(4), saved_at(2))
    driver.join_all()
    driver.drained(4)
    assert driver.ready()[-1] == "optimizerd.a <- settle e4 v4"
    assert driver.save() == shutdown()


def test_more_steps_than_before_continue_a_saved_run() -> None:
    driver = Driver(facts=facts_at(4), saved=saved_at(4))
    driver.join_all()
    driver.drained(None)
    driver.restored()
    assert driver.ready()[0] == "optimizerd.a <- run_attempt e4 a6 v4 data 32"


def test_the_end_waits_a_while_for_a_node_that_was_lost(live_with: Callable[..., Driver]) -> None:
    driver = live_with(train={"steps": 1})
    driver.close("node.a")
    driver.run_attempt()
    assert driver.save() == shutdown()[1:]
    assert driver.leave_all() == []
    assert driver.wait(10.0) == []
    assert driver.join("node.a") == ["node.a <- shutdown"]
    assert driver.close("node.a") == ["exit 0"]


def test_the_end_is_noted_before_anybody_hears_of_it(live: Driver) -> None:
    live.ask(ControlCall.STOP)
    live.run_attempt()
    live.save()
    kinds = [type(effect) for effect in live.effects]
    assert kinds.index(NoteEnd) < kinds.index(Send)
    [note] = [effect for effect in live.effects if isinstance(effect, NoteEnd)]
    assert (note.code, note.keep_memory, note.failed) == (ExitCode.STOPPED, False, False)


def test_a_scheduler_that_comes_after_the_end_only_ends() -> None:
    driver = Driver(facts=facts_at(4), saved=saved_at(4))
    driver.machine = SchedulerMachine(
        driver.rules,
        driver.machine.mirror,
        driver.machine.members,
        driver.now_s,
        RunEnd(
            reason="disk full",
            code=ExitCode.NO_MEMORY,
            keep_memory=True,
            failed=True,
            written_s=1.0,
        ),
    )
    assert driver.tick() == ["exit 3"], "the note answers whoever comes"
