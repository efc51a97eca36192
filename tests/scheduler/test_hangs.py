"""Members with heartbeats and without progress: their replacement, and the end of the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.daemons.kit.events import Exit, LogLine
from penstock.daemons.scheduler.machine.activities.activity import HangDetector
from penstock.daemons.scheduler.machine.events import ControlCall
from penstock.protocol.generated import scheduler_pb2 as pb
from tests.scheduler.conftest import Driver, make_config, make_rules

MakeDriver = Callable[..., Driver]

TIMEOUT_S = 20.0
STUCK = pb.Heartbeat(activity="B 1 0 of train 1", progress=7)
WAITING = pb.Heartbeat(activity="B 0 0 of train 1, waiting for gradient", waiting=True, progress=9)


@pytest.fixture
def hanging(live_with: MakeDriver) -> Driver:
    """A run in its first attempt, in which 20 seconds without progress are a hang."""
    return live_with(cluster={"attempt_timeout_s": TIMEOUT_S})


def beat(driver: Driver, seconds: float, beats: dict[str, pb.Heartbeat]) -> list[str]:
    """Time passes in halves of a second; members send these heartbeats, others empty ones."""
    lines = []
    for _ in range(round(seconds / 0.5)):
        for name in list(driver.streams):
            lines += driver.say(name, heartbeat=beats.get(name, pb.Heartbeat()))
        lines += driver.tick(0.5)
    return lines


def come_back(driver: Driver, *names: str, pids: dict[str, int]) -> None:
    """Lost members are dead and replaced; the next epoch begins."""
    for name in names:
        driver.fenced(name, pids[name])
        driver.join(name)
    driver.drained(driver.machine.mirror.version)
    driver.ready()


def test_who_waits_for_others_is_not_to_blame(hanging: Driver) -> None:
    pid = hanging.pids["worker.1"]
    beats = {"worker.0": WAITING, "worker.1": STUCK, "optimizerd.a": pb.Heartbeat(waiting=True)}
    assert beat(hanging, TIMEOUT_S, beats) == []
    assert beat(hanging, 1.0, beats) == [
        f"disconnect stream {hanging.streams['worker.1']}",
        f"node.a <- fence worker.1 {pid}",
    ]
    assert hanging.status.message == (
        "the attempt hung: worker.1: no progress for 20.5 s: B 1 0 of train 1; waiting until"
        " worker.1 is dead; waiting for worker.1"
    )
    hanging.fenced("worker.1", pid)
    hanging.join("worker.1")
    hanging.drained(0)
    assert hanging.ready()[0] == "optimizerd.a <- run_attempt e2 a2 v0 data 0", "the same data"


def test_who_is_stuck_beside_somebody_busy_is_lost_when_a_wait_runs_out(hanging: Driver) -> None:
    """A save may progress for long while sweeps wait for it; this one waits for a hung member."""
    for count in range(3):
        busy = {"memoryd.a": pb.Heartbeat(activity="save", progress=count)}
        assert beat(hanging, 15.0, busy | {"worker.0": WAITING, "optimizerd.a": STUCK}) == []
    failed = pb.Failed(error="waited 40 s for weights", exit_code=4, epoch=1, timed_out=True)
    lines = hanging.say("worker.0", failed=failed)
    lost = [line.split()[-2] for line in lines if "fence" in line]
    assert lost == ["worker.1", "optimizerd.a", "worker.0"], "worker.1 says nothing of any wait"
    assert "optimizerd.a: no progress for 45.0 s: B 1 0 of train 1" in hanging.status.message
    assert "worker.0: waited 40 s for weights" in hanging.status.message


@pytest.mark.parametrize("saves", ["works", "waits"])
def test_a_wait_that_ends_beside_a_save_that_gets_on_is_no_hang(
    hanging: Driver, saves: str
) -> None:
    """Sweeps wait for the save, and workers for sweeps and each other. A save that waits for a
    sweep, too, is a deadlock: then each member that waits is replaced.
    """
    hanging.ask(ControlCall.SNAPSHOT)
    hanging.run_attempt()
    hanging.pin()
    pids = dict(hanging.pids)
    waiting = dict.fromkeys(("worker.0", "worker.1", "optimizerd.a"), WAITING)
    for count in range(3):
        save = pb.Heartbeat(activity="save", progress=count, waiting=saves == "waits")
        assert beat(hanging, 15.0, waiting | {"memoryd.a": save}) == []
    failed = pb.Failed(error="waited 40 s for gradient", exit_code=4, epoch=1, timed_out=True)
    lines = hanging.say("worker.0", failed=failed)
    lost = [line.split()[-2] for line in lines if "fence" in line]
    if saves == "waits":
        assert lost == ["worker.0", "worker.1", "optimizerd.a"]
        return
    assert lost == ["worker.0"]
    assert hanging.status.message.startswith("worker.0 was lost: waited 40 s for gradient")
    assert hanging.machine.hangs.in_a_row == 0, "however often this happens, the run goes on"
    come_back(hanging, "worker.0", pids=pids)
    assert hanging.status.phase == "running"


def test_who_says_to_wait_is_stuck_where_nobody_else_stands_still() -> None:
    """A thread that saves hung, after it had waited for a sweep, which waited for its version."""
    hangs = HangDetector(TIMEOUT_S)
    hangs.heard("memoryd.a", WAITING, 0.0)
    hangs.heard("worker.1", STUCK, 0.0)
    hangs.heard("worker.1", pb.Heartbeat(progress=STUCK.progress + 1), TIMEOUT_S)
    owing = ("memoryd.a", "worker.1")
    assert list(hangs.stuck(owing, TIMEOUT_S + 1.0)) == ["memoryd.a"]
    assert list(hangs.stuck(owing, 2 * TIMEOUT_S + 1.0)) == ["worker.1"], "it does not even wait"


def test_if_all_wait_nobody_knows_and_all_are_replaced(hanging: Driver) -> None:
    beats = dict.fromkeys(("worker.0", "worker.1", "optimizerd.a"), WAITING)
    fenced = [line for line in beat(hanging, TIMEOUT_S + 1.0, beats) if "fence" in line]
    assert fenced == [
        f"node.a <- fence {name} {hanging.pids[name]}"
        for name in ("worker.0", "worker.1", "optimizerd.a")
    ]


def test_an_optimizerd_that_owes_statuses_and_a_worker_that_is_done(hanging: Driver) -> None:
    for worker in ("worker.0", "worker.1"):
        hanging.done(worker)
    hanging.block(0)
    lines = beat(hanging, TIMEOUT_S + 1.0, {"worker.0": STUCK, "optimizerd.a": STUCK})
    assert lines[-1] == f"node.a <- fence optimizerd.a {hanging.pids['optimizerd.a']}"
    assert len(lines) == 2


def test_an_amendment_that_never_ends(hanging: Driver) -> None:
    hanging.run_attempt(sum_squares=9.0)
    assert hanging.status.phase == "amending"
    lines = beat(hanging, TIMEOUT_S + 1.0, {})
    assert lines[-1] == f"node.a <- fence optimizerd.a {hanging.pids['optimizerd.a']}"


def test_slow_work_is_no_hang(hanging: Driver) -> None:
    """Instructions end, or blocks are reported: however long it takes in all."""
    for count in range(5):
        at_work = {"worker.0": WAITING, "worker.1": pb.Heartbeat(progress=count)}
        assert beat(hanging, 15.0, at_work) == []
    for block in (0, 1):
        assert hanging.block(block) == []
        assert beat(hanging, 15.0, at_work) == []
    hanging.done("worker.0")
    assert hanging.done("worker.1")[0].startswith("journal COMMIT v1")


def test_an_attempt_gets_several_times_what_the_longest_took(hanging: Driver) -> None:
    for count in range(5):
        beat(hanging, 15.0, {"worker.0": pb.Heartbeat(progress=count)})
    hanging.run_attempt()
    assert beat(hanging, 299.0, {}) == [], "the first took 75 s"
    assert beat(hanging, 3.0, {}) != []


def test_time_in_which_the_scheduler_was_stopped_does_not_count(hanging: Driver) -> None:
    beat(hanging, 15.0, {})
    hanging.tick(60.0)
    assert [line for line in beat(hanging, 15.0, {}) if "fence" in line] == []


def test_a_pause_is_no_hang(hanging: Driver) -> None:
    hanging.ask(ControlCall.PAUSE)
    hanging.run_attempt()
    assert hanging.status.phase == "paused"
    assert beat(hanging, 5 * TIMEOUT_S, {}) == []


def test_the_third_hang_in_a_row_ends_the_run(hanging: Driver) -> None:
    for _ in range(2):
        pids = dict(hanging.pids)
        beat(hanging, TIMEOUT_S + 1.0, {"worker.0": WAITING, "worker.1": STUCK})
        assert hanging.status.phase == "fencing"
        hanging.tick()
        come_back(hanging, *hanging.machine.members.fencing, pids=pids)
    beat(hanging, TIMEOUT_S + 1.0, {"worker.0": WAITING, "worker.1": STUCK})
    assert hanging.status.phase == "failed"
    effects = []
    for name in list(hanging.streams):
        hanging.close(name)
        effects += hanging.effects
    [ended] = [effect for effect in effects if isinstance(effect, Exit)]
    assert ended.code == 4
    for words in ("after step 0 hung 3 times", "worker.1: no progress for 20.5 s: B 1 0"):
        assert words in ended.reason
    assert "cluster.attempt_timeout_s = 20" in ended.reason


def test_hangs_with_an_attempt_between_them_do_not_add_up(hanging: Driver) -> None:
    for _ in range(4):
        pids = dict(hanging.pids)
        beat(hanging, TIMEOUT_S + 1.0, {"worker.0": WAITING, "worker.1": STUCK})
        come_back(hanging, *hanging.machine.members.fencing, pids=pids)
        hanging.run_attempt()
    assert hanging.status.phase == "running" and hanging.status.version == 4


def test_an_evaluation_hangs_too(live_with: MakeDriver) -> None:
    driver = live_with(cluster={"attempt_timeout_s": TIMEOUT_S}, train={"eval_every": 1})
    driver.run_attempt()
    assert driver.status.phase == "evaluating"
    lines = beat(driver, TIMEOUT_S + 1.0, {"worker.0": WAITING, "worker.1": STUCK})
    assert lines[-1] == f"node.a <- fence worker.1 {driver.pids['worker.1']}"
    assert driver.status.message.startswith("the evaluation hung: worker.1: no progress for 20.5 s")


@pytest.mark.parametrize("settled", [False, True], ids=["settling", "writing"])
def test_a_save_hangs_too(live_with: MakeDriver, settled: bool) -> None:
    """And goes on, however long it takes, while what is done grows."""
    driver = live_with(cluster={"attempt_timeout_s": TIMEOUT_S}, train={"steps": 1})
    driver.run_attempt()
    driver.pin()
    culprit = "memoryd.a" if settled else "optimizerd.a"
    if settled:
        driver.say("optimizerd.a", settled=pb.Settled(epoch=1, version=1))
    others = {} if settled else {"memoryd.a": WAITING}
    for count in range(3):
        assert beat(driver, 15.0, others | {culprit: pb.Heartbeat(progress=count)}) == []
    stuck = {culprit: pb.Heartbeat(activity="save", progress=2)}
    assert beat(driver, TIMEOUT_S, others | stuck)[-1] == (
        f"node.a <- fence {culprit} {driver.pids[culprit]}"
    )
    assert driver.status.message.startswith(f"saving hung: {culprit}: no progress for ")


def test_a_restore_hangs_until_the_run_ends() -> None:
    driver = Driver(make_rules(make_config(cluster={"attempt_timeout_s": TIMEOUT_S})))
    driver.join_all()
    for hang in range(3):
        driver.drained(None)
        assert driver.status.phase == "restoring"
        pid = driver.pids["memoryd.a"]
        lines = beat(driver, TIMEOUT_S + 1.0, {"memoryd.a": STUCK})
        if hang < 2:
            assert f"node.a <- fence memoryd.a {pid}" in lines
            driver.fenced("memoryd.a", pid)
            driver.join("memoryd.a")
    assert driver.status.phase == "failed"
    assert "restoring after step 0 hung 3 times in a row" in driver.status.message


def test_the_log_says_who_and_what(hanging: Driver) -> None:
    texts: list[str] = []
    for _ in range(43):
        hanging.say("worker.0", heartbeat=WAITING)
        hanging.say("worker.1", heartbeat=STUCK)
        for name in ("node.a", "memoryd.a", "optimizerd.a"):
            hanging.say(name, heartbeat=pb.Heartbeat(waiting=True))
        hanging.tick(0.5)
        texts += [effect.text for effect in hanging.effects if isinstance(effect, LogLine)]
    assert [text.split(" is lost: ")[1] for text in texts if "is lost" in text] == [
        "no progress for 20.5 s: B 1 0 of train 1"
    ]


def test_work_that_always_gets_on_must_end_too(live_with: MakeDriver) -> None:
    """A member with endless progress is replaced after a hundred times the allowed standstill."""
    driver = live_with(cluster={"attempt_timeout_s": 0.5})
    lines: list[str] = []
    for count in range(97):
        beats = {"worker.1": pb.Heartbeat(activity="B 1 0 of train 1", progress=count)}
        lines += beat(driver, 0.5, beats)
    assert lines == []
    for count in range(97, 104):
        beats = {"worker.1": pb.Heartbeat(activity="B 1 0 of train 1", progress=count)}
        lines += beat(driver, 0.5, beats)
    fenced = [line for line in lines if "fence worker.1" in line]
    assert len(fenced) == 1, lines
    assert "worker.1: no end after 50 s: B 1 0 of train 1" in driver.status.message


def test_time_in_which_the_scheduler_was_stopped_counts_for_nobody(live_with: MakeDriver) -> None:
    driver = live_with(cluster={"attempt_timeout_s": 0.5})
    assert [line for line in driver.tick(1000.0) if "fence" in line] == []
    assert beat(driver, 0.5, {"worker.1": STUCK}) == []
