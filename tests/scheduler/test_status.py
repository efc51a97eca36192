"""A status: work of the members, and the last events."""

from __future__ import annotations

from collections.abc import Callable

from penstock.daemons.kit.events import LogLine
from penstock.daemons.scheduler.machine.events import ControlAsked, ControlCall, Send
from penstock.protocol.generated import scheduler_pb2 as pb
from tests.scheduler.conftest import Driver

MakeDriver = Callable[..., Driver]


STARTED = "node.a starts it, and another if it hangs before it joins"


def happenings(driver: Driver) -> list[tuple[str, int, float, str]]:
    """Kind, step, seconds, text."""
    return [(h.kind, h.step, round(h.seconds, 3), h.text) for h in driver.status.happenings]


def member(driver: Driver, name: str) -> pb.MemberStatus:
    """What the status says of a member."""
    return next(m for m in driver.status.members if m.member == name)


def test_a_status_has_what_members_are_at_and_their_last_reports(live_with: MakeDriver) -> None:
    driver = live_with()
    beat = pb.Heartbeat(activity="B 1 0 of train 1, waiting for x", waiting=True, progress=7)
    driver.say("worker.1", heartbeat=beat)
    assert member(driver, "worker.1").doing == beat
    assert not member(driver, "worker.0").HasField("doing")
    assert not member(driver, "worker.1").HasField("report")
    for block in (0, 1):
        status = pb.BlockStatus(epoch=driver.epoch, attempt=1, block=block, finite=True)
        driver.say("optimizerd.a", block_status=status)
    driver.done("worker.0")
    driver.done("worker.1", peak_device_bytes=5, device_limit_bytes=9)
    report = member(driver, "worker.1").report
    assert (report.busy_seconds, report.wall_seconds) == (1.0, 2.0)
    assert (report.peak_device_bytes, report.device_limit_bytes) == (5, 9)
    driver.close("worker.1")
    assert not member(driver, "worker.1").HasField("doing")


def test_a_loss_is_told_once_with_its_cause_and_how_long_it_took(live_with: MakeDriver) -> None:
    driver = live_with()
    began = ("began", 0, 0.0, "")
    assert happenings(driver) == [began]
    pid = driver.pids["worker.1"]
    driver.close("worker.1")
    fenced = pb.Fenced(member="worker.1", pid=pid, death="was killed by signal 9")
    driver.say("node.a", fenced=fenced)
    reason = "worker.1 was lost (killed by signal 9)"
    assert happenings(driver) == [began, ("broken", 0, 0.0, reason)]
    driver.tick(2.0)
    driver.join("worker.1")
    driver.close("worker.0")  # before the new epoch lives
    driver.fenced("worker.0", driver.pids["worker.0"])
    driver.join("worker.0")
    driver.drained(0)
    driver.ready()
    assert happenings(driver) == [began, ("broken", 0, 2.0, reason)]
    assert [h.number for h in driver.status.happenings] == [1, 2]


def test_a_pause_is_told_when_it_is_asked_for(live_with: MakeDriver) -> None:
    driver = live_with()
    for ticket, call in enumerate((ControlCall.PAUSE, ControlCall.PAUSE, ControlCall.RESUME)):
        driver.feed(ControlAsked(ticket=ticket, call=call))
        assert driver.status.pausing == (call is ControlCall.PAUSE)
    assert [kind for kind, *_ in happenings(driver)] == ["began", "paused", "resumed"]


def test_steps_that_must_be_computed_again_are_counted(live_with: MakeDriver) -> None:
    history = live_with().machine.history
    history.broke(41, "memoryd.a was lost", 100.0, "e1")
    history.lives(30, 103.5)
    last = history.messages(104.0)[-1]
    assert (last.step, last.steps_lost, last.seconds, last.age_seconds) == (30, 11, 3.5, 4.0)


def absence(driver: Driver, name: str) -> tuple[str, float, str, str]:
    """State, seconds without a stream, why, what happens next."""
    status = member(driver, name)
    return status.state, round(status.gone_seconds, 3), status.why, status.next


def test_a_status_says_who_is_missing_since_when_why_and_what_happens_next(
    live_with: MakeDriver,
) -> None:
    driver = live_with()
    assert absence(driver, "worker.1") == ("ready", 0.0, "", "")
    pid = driver.pids["worker.1"]
    driver.close("worker.1")
    driver.tick(2.0)
    gone = "its connection to the scheduler ended"
    assert absence(driver, "worker.1") == (
        "fencing", 2.0, gone, "node.a kills it and starts another"
    )  # fmt: skip
    driver.close("node.a")
    waits = "node.a must come back: only it can say that the process is dead"
    assert absence(driver, "worker.1") == ("fencing", 2.0, gone, waits)
    again = "the run waits until it is started again on its machine (penstock node)"
    assert absence(driver, "node.a") == ("missing", 0.0, gone, again)
    driver.join("node.a")
    driver.say("node.a", fenced=pb.Fenced(member="worker.1", pid=pid, death="was killed by SIGBUS"))
    assert absence(driver, "worker.1") == (
        "missing", 2.0, "it was killed by SIGBUS", STARTED
    )  # fmt: skip
    driver.join("worker.1")
    assert absence(driver, "worker.1") == ("joining", 0.0, "", "")


def test_a_run_that_has_not_begun_says_for_whom_it_waits() -> None:
    driver = Driver()
    driver.join("node.a")
    driver.tick(3.0)
    assert absence(driver, "worker.0") == ("missing", 3.0, "not started yet", STARTED)


def test_one_failure_has_one_name_in_all_that_is_said_and_ordered(live_with: MakeDriver) -> None:
    driver = live_with()
    pid = driver.pids["worker.1"]
    driver.close("worker.1")
    fences = [e.message.fence for e in driver.effects if isinstance(e, Send)]
    assert [(f.member, f.pid, f.cause) for f in fences] == [("worker.1", pid, "e1")]
    assert {e.cause for e in driver.effects if isinstance(e, LogLine)} == {"e1"}
    driver.fenced("worker.1", pid)
    driver.join("worker.1")
    drains = [e.message.drain for e in driver.effects if isinstance(e, Send)]
    assert {drain.cause for drain in drains} == {"e1"}
    driver.close("worker.0")  # before the next epoch lives: the same story
    assert {e.cause for e in driver.effects if isinstance(e, LogLine)} == {"e1"}
    driver.fenced("worker.0", driver.pids["worker.0"])
    driver.join("worker.0")
    driver.drained(0)
    driver.ready()
    assert driver.status.happenings[-1].cause == "e1"
    driver.close("worker.0")
    assert {e.cause for e in driver.effects if isinstance(e, LogLine)} == {"e3"}
