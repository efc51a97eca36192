"""The supervisor's machine: events in, whole lists of effects out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.daemons.kit.events import (
    DrainAsked,
    Exit,
    LogLine,
    RefusedByScheduler,
    SendDrained,
    SendFailed,
    SendReady,
    ShutdownAsked,
    StopAsked,
    Tick,
)
from penstock.daemons.node.machine.events import (
    AskSchedulerToStop,
    CloseLink,
    Effect,
    EpochBegins,
    Event,
    Exited,
    FenceAsked,
    Kill,
    LeaveWord,
    MemberMissing,
    OpenLink,
    SendFenced,
    Start,
    Started,
    StopUnheard,
    Terminate,
    Warmed,
    Watched,
)
from penstock.daemons.node.machine.machine import NodeLimits, NodeMachine, NodePhase
from penstock.host.errors import ExitCode
from penstock.protocol.run.run_result import RunEnd

NAMES = ("schedulerd", "memoryd.a", "worker.0")
PIDS = {"schedulerd": 10, "memoryd.a": 11, "worker.0": 12}


class Machine:
    """A node state with a clock; Say effects are left out of what it returns."""

    def __init__(
        self, names: tuple[str, ...], limits: NodeLimits, helpers: frozenset[str] = frozenset()
    ) -> None:
        self.state = NodeMachine.create(names, limits, helpers)
        self.now_s = 100.0

    def feed(self, *events: Event, after_s: float = 0.0) -> list[Effect]:
        self.now_s += after_s
        effects = [e for event in events for e in self.state.handle(event, self.now_s)]
        self.state.validate()
        return [effect for effect in effects if not isinstance(effect, LogLine)]

    def started(self) -> Machine:
        self.feed(Tick())
        self.feed(*(Started(name=name, pid=PIDS[name]) for name in self.state.children))
        self.now_s += 60.0
        return self

    def exit(self, name: str, code: int, after_s: float = 0.0) -> list[Effect]:
        pid = self.state.children[name].pid
        assert pid is not None
        return self.feed(Exited(name=name, pid=pid, code=code), after_s=after_s)


@pytest.fixture
def machine() -> Iterator[Machine]:
    instance = Machine(NAMES, NodeLimits(max_restarts=3)).started()
    yield instance
    instance.state.validate()


def test_first_tick_starts_all_in_order() -> None:
    machine = Machine(NAMES, NodeLimits(max_restarts=3))
    assert machine.feed(Tick()) == [Start(name=name) for name in NAMES]
    assert machine.feed(Tick()) == []


@pytest.fixture
def warming() -> Machine:
    """A node whose preloader forks all others, just started."""
    names = ("preload-plain.a", *NAMES)
    machine = Machine(names, NodeLimits(max_restarts=3), frozenset(names[:1]))
    for name in NAMES:
        machine.state.children[name].preloader = names[0]
    assert machine.feed(Tick()) == [Start(name=names[0])]
    assert machine.state.next_deadline_s() is None
    machine.feed(Started(name=names[0], pid=9))
    assert machine.feed(Tick(), after_s=1.0) == []
    return machine


def test_first_starts_wait_for_their_preloader(warming: Machine) -> None:
    warming.feed(Warmed(name="preload-plain.a"))
    assert warming.feed(Tick()) == [Start(name=name) for name in NAMES]


def test_first_starts_do_not_wait_for_ever(warming: Machine) -> None:
    due_s = warming.state.next_deadline_s()
    assert due_s == warming.now_s - 1.0 + warming.state.limits.warm_up_s
    assert warming.feed(Tick(), after_s=warming.state.limits.warm_up_s) == [
        Start(name=name) for name in NAMES
    ]


def test_nobody_waits_for_a_preloader_that_was_lost(warming: Machine) -> None:
    assert warming.exit("preload-plain.a", -9) == []
    assert warming.feed(Tick()) == [Start(name=name) for name in NAMES]
    assert warming.feed(Tick(), after_s=0.1) == [Start(name="preload-plain.a")]


def test_killed_child_is_replaced_at_once_when_it_had_lived(machine: Machine) -> None:
    assert machine.exit("worker.0", -9) == []
    assert machine.feed(Tick()) == [Start(name="worker.0")]


def test_quick_deaths_are_restarted_later_and_later_then_the_run_fails(machine: Machine) -> None:
    delays = []
    machine.exit("worker.0", 1)
    for pid in range(20, 23):
        machine.feed(Tick())
        machine.feed(Started(name="worker.0", pid=pid))
        effects = machine.exit("worker.0", 1)
        due = machine.state.next_deadline_s()
        if effects:
            break
        assert due is not None
        delays.append(round(due - machine.now_s, 3))
        machine.now_s = due
    assert delays == [0.1, 0.2]
    error = (
        "worker.0 died 4 times within an hour in which no step was committed"
        " (last: exited with code 1); cluster.max_restarts is 3"
    )
    assert effects == [SendFailed(error=error, code=4)]
    assert machine.state.phase is NodePhase.FAILING


def test_quick_deaths_between_which_steps_were_committed_are_not_in_a_row(machine: Machine) -> None:
    for version in range(1, 10):
        machine.exit("worker.0", -9)
        due_s = machine.state.next_deadline_s()
        assert due_s is not None
        assert due_s - machine.now_s <= machine.state.limits.first_backoff_s, "it is needed again"
        machine.now_s = due_s
        assert machine.feed(Tick()) == [Start(name="worker.0")]
        machine.feed(Started(name="worker.0", pid=30 + version))
        machine.feed(EpochBegins(epoch=version, version=version))


def die(machine: Machine, after_s: float) -> bool:
    """The worker dies and is started anew; returns whether it was, or the run fails."""
    machine.exit("worker.0", -9, after_s=after_s)
    started = machine.feed(Tick()) == [Start(name="worker.0")]
    if started:
        machine.feed(Started(name="worker.0", pid=12))
    return started


def test_restarts_of_more_than_an_hour_ago_do_not_count(machine: Machine) -> None:
    assert all(die(machine, after_s=1201.0) for _ in range(100))
    assert not die(machine, after_s=600.0)


def test_restarts_before_the_last_commit_do_not_count(machine: Machine) -> None:
    for version in range(1, 50):
        assert die(machine, after_s=10.0)
        machine.feed(EpochBegins(epoch=version, version=version))
    for epoch in range(50, 53):
        assert die(machine, after_s=10.0)
        machine.feed(EpochBegins(epoch=epoch, version=49))
    assert not die(machine, after_s=10.0), "nothing was committed since the third"
    assert machine.state.phase is NodePhase.FAILING


def test_fence_kills_reaps_answers_and_replaces(machine: Machine) -> None:
    assert machine.feed(FenceAsked(member="worker.0", pid=12)) == [Kill(name="worker.0")]
    assert machine.exit("worker.0", -9) == [
        SendFenced(member="worker.0", pid=12),
        Start(name="worker.0"),
    ]


def test_fence_of_a_replaced_process_is_answered_at_once(machine: Machine) -> None:
    assert machine.feed(FenceAsked(member="worker.0", pid=7)) == [
        SendFenced(member="worker.0", pid=7)
    ]


def test_fence_of_a_dead_process_that_waits_for_its_restart(machine: Machine) -> None:
    machine.exit("worker.0", -9)
    assert machine.feed(FenceAsked(member="worker.0", pid=12)) == [
        SendFenced(member="worker.0", pid=12, death="was killed by signal 9")
    ]
    assert machine.feed(Tick()) == [Start(name="worker.0")]


def test_epochs_are_acknowledged(machine: Machine) -> None:
    assert machine.feed(DrainAsked(epoch=3), EpochBegins(epoch=3, version=0)) == [
        SendDrained(epoch=3),
        SendReady(epoch=3),
    ]


def test_normal_end(machine: Machine) -> None:
    assert machine.feed(ShutdownAsked(reason="done")) == [CloseLink()]
    assert machine.exit("worker.0", 0) == []
    assert machine.exit("memoryd.a", 0) == []
    assert machine.exit("schedulerd", 0) == [Exit(code=0)]


def test_a_member_elsewhere_that_missed_the_end_is_given_20_s() -> None:
    """It stays for 15 s, and tells members that come meanwhile; nobody does afterwards."""
    machine = Machine(("memoryd.b", "worker.1"), NodeLimits(max_restarts=3))
    machine.feed(Tick())
    machine.feed(Started(name="memoryd.b", pid=11), Started(name="worker.1", pid=12))
    assert machine.feed(ShutdownAsked(reason="done")) == [CloseLink()]
    assert machine.exit("worker.1", 0) == []
    assert machine.feed(Tick(), after_s=19.0) == []
    assert machine.feed(Tick(), after_s=1.0) == [Terminate(name="memoryd.b")]
    assert machine.exit("memoryd.b", 0) == [Exit(code=0)]


def test_a_member_that_hears_the_shutdown_before_the_node(machine: Machine) -> None:
    assert machine.exit("worker.0", 0) == []
    assert machine.feed(Tick(), after_s=0.5) == []
    assert machine.feed(ShutdownAsked(reason="done")) == [CloseLink()]
    assert machine.feed(Tick(), after_s=5.0) == []


def test_a_member_that_ends_well_without_shutdown_is_replaced(machine: Machine) -> None:
    machine.exit("worker.0", 0)
    assert machine.feed(Tick(), after_s=1.0) == [Start(name="worker.0")]


@pytest.mark.parametrize("code", [2, 3, 4, 5])
def test_final_code_of_the_scheduler_is_the_nodes(machine: Machine, code: int) -> None:
    assert machine.exit("schedulerd", code) == [CloseLink()]
    machine.exit("memoryd.a", 0)
    assert machine.exit("worker.0", 0) == [Exit(code=code)]


@pytest.mark.parametrize("code", [2, 3])
def test_final_code_of_a_member_stops_the_run(machine: Machine, code: int) -> None:
    error = f"memoryd.a ended with exit code {code}"
    assert machine.exit("memoryd.a", code) == [SendFailed(error=error, code=code)]
    assert machine.feed(ShutdownAsked(reason=error)) == [CloseLink()]
    machine.exit("worker.0", 0)
    assert machine.exit("schedulerd", code) == [Exit(code=code)]


def test_a_run_that_does_not_end_after_a_failure_is_terminated_then_killed(
    machine: Machine,
) -> None:
    machine.exit("memoryd.a", 2)
    assert machine.feed(Tick(), after_s=15.0) == [
        Terminate(name="schedulerd"),
        Terminate(name="worker.0"),
    ]
    assert machine.feed(Tick(), after_s=30.0) == [Kill(name="schedulerd"), Kill(name="worker.0")]
    machine.exit("schedulerd", -9)
    assert machine.exit("worker.0", -9) == [Exit(code=2)]


def test_scheduler_killed_is_replaced(machine: Machine) -> None:
    machine.exit("schedulerd", -9)
    assert machine.feed(Tick()) == [Start(name="schedulerd")]


def test_scheduler_killed_while_it_ends_the_run_comes_back(machine: Machine) -> None:
    machine.feed(ShutdownAsked(reason="done"))
    machine.exit("worker.0", 0)
    assert machine.exit("schedulerd", -9) == []
    assert machine.feed(Tick(), after_s=5.0) == [
        OpenLink(),
        Start(name="schedulerd"),
        Start(name="worker.0"),
    ]
    assert machine.state.phase is NodePhase.RUNNING


def test_a_scheduler_that_died_before_its_shutdown_is_heard_of_is_not_waited_for_long(
    machine: Machine,
) -> None:
    """Its last message may come behind the news of its death."""
    machine.exit("schedulerd", -9)
    machine.feed(ShutdownAsked(reason="done"))
    machine.feed(Watched(ended=END))
    assert machine.feed(Tick(), after_s=5.0) == [
        Terminate(name="memoryd.a"),
        Terminate(name="worker.0"),
    ]


def test_scheduler_killed_after_all_members_ended_well(machine: Machine) -> None:
    machine.feed(ShutdownAsked(reason="done"))
    machine.exit("worker.0", 0)
    machine.exit("schedulerd", -9)
    assert machine.exit("memoryd.a", 0) == [Exit(code=0)]


def test_stop_asks_the_scheduler_and_keeps_replacing(machine: Machine) -> None:
    assert machine.feed(StopAsked()) == [AskSchedulerToStop()]
    machine.exit("worker.0", -9)
    assert machine.feed(Tick()) == [Start(name="worker.0")]


def test_stop_is_asked_again_of_a_new_scheduler(machine: Machine) -> None:
    machine.feed(StopAsked())
    machine.exit("schedulerd", -15)
    assert machine.feed(Tick()) == [Start(name="schedulerd")]
    assert machine.feed(Started(name="schedulerd", pid=20)) == [AskSchedulerToStop()]


def test_a_scheduler_elsewhere_that_cannot_be_asked_is_asked_again(machine: Machine) -> None:
    machine.feed(StopAsked(within_s=100.0))
    assert machine.feed(StopUnheard()) == []
    assert machine.feed(Tick(), after_s=1.0) == []
    assert machine.feed(Tick(), after_s=1.0) == [AskSchedulerToStop(within_s=95.5)]
    assert machine.feed(Tick(), after_s=2.0) == []


def test_a_scheduler_elsewhere_that_died_since_is_asked_again_by_the_next_epoch() -> None:
    machine = Machine(NAMES[1:], NodeLimits(max_restarts=3)).started()
    machine.feed(StopAsked(within_s=100.0))
    begins = EpochBegins(epoch=2, version=1)
    asks = AskSchedulerToStop(within_s=95.5)
    assert machine.feed(begins, after_s=2.0) == [SendReady(epoch=2), asks]


def test_the_nodes_own_scheduler_is_not_signalled_twice(machine: Machine) -> None:
    machine.feed(StopAsked())
    assert machine.feed(EpochBegins(epoch=2, version=1)) == [SendReady(epoch=2)]


def test_a_stop_with_a_deadline_kills_before_it_and_keeps_the_memory(machine: Machine) -> None:
    assert machine.feed(StopAsked(within_s=20.0)) == [AskSchedulerToStop(within_s=20.0)]
    assert machine.state.next_deadline_s() == machine.now_s + 17.5
    assert machine.feed(Tick(), after_s=17.0) == []
    assert machine.feed(Tick(), after_s=0.5) == [Kill(name=name) for name in NAMES]
    for name in NAMES[:2]:
        machine.exit(name, -9)
    assert machine.exit("worker.0", -9) == [Exit(code=130)]


def test_a_deadline_after_the_end_of_the_run_does_not_change_how_it_ended(
    machine: Machine,
) -> None:
    machine.feed(StopAsked(within_s=20.0))
    machine.feed(ShutdownAsked(reason="stopped", code=5))
    machine.exit("schedulerd", 5)
    machine.exit("memoryd.a", 0)
    assert machine.feed(Tick(), after_s=17.5) == [Kill(name="worker.0")]
    assert machine.exit("worker.0", -9) == [Exit(code=5)]


def test_second_stop_kills_and_keeps_the_memory(machine: Machine) -> None:
    machine.feed(StopAsked())
    assert machine.feed(StopAsked(again=True)) == [Kill(name=name) for name in NAMES]
    machine.exit("schedulerd", -9)
    machine.exit("memoryd.a", -9)
    assert machine.exit("worker.0", -9) == [Exit(code=130)]


def test_a_stop_that_takes_too_long_fails(machine: Machine) -> None:
    machine.feed(StopAsked())
    effects = machine.feed(Tick(), after_s=machine.state.limits.stop_timeout_s)
    assert effects == [Terminate(name=name) for name in NAMES]
    assert machine.state.code == 4


def test_refused_node_fails(machine: Machine) -> None:
    error = "the scheduler refuses this node: another run"
    assert machine.feed(RefusedByScheduler(reason="another run")) == [
        SendFailed(error=error, code=4)
    ]


def test_a_child_that_cannot_be_started_is_tried_again() -> None:
    machine = Machine(("memoryd.b",), NodeLimits(max_restarts=1))
    machine.feed(Tick())
    assert machine.feed(Exited(name="memoryd.b", pid=0, code=1)) == []
    assert machine.feed(Tick(), after_s=0.1) == [Start(name="memoryd.b")]
    [failed] = machine.feed(Exited(name="memoryd.b", pid=0, code=1))
    assert isinstance(failed, SendFailed) and failed.code == 4


def test_without_a_scheduler_to_tell_a_failure_ends_at_once() -> None:
    """Nodes elsewhere find the note: they would wait for a scheduler for ever."""
    machine = Machine(NAMES, NodeLimits(max_restarts=0)).started()
    [word] = machine.exit("schedulerd", 1)
    assert isinstance(word, LeaveWord)
    assert word.code == 4
    assert word.error.startswith("schedulerd died 1 times within an hour")
    assert machine.feed(Tick()) == [Terminate(name="memoryd.a"), Terminate(name="worker.0")]


def test_a_scheduler_that_dies_before_it_heard_of_a_failure_leaves_no_word(
    machine: Machine,
) -> None:
    """So its node does."""
    machine.exit("worker.0", 2)
    assert machine.state.phase is NodePhase.FAILING
    [word] = machine.exit("schedulerd", -9)
    assert word == LeaveWord(error="worker.0 ended with exit code 2", code=2)


@pytest.mark.parametrize("told", [False, True])
def test_a_node_that_gives_up_says_so_until_the_scheduler_elsewhere_answers(told: bool) -> None:
    """That one may be between two lives, and would wait for this node for ever."""
    machine = Machine(("memoryd.b", "worker.1"), NodeLimits(max_restarts=0, fail_timeout_s=15.0))
    machine.feed(Tick(), Started(name="memoryd.b", pid=1), Started(name="worker.1", pid=2))
    [failed] = machine.exit("worker.1", -9)
    assert isinstance(failed, SendFailed)
    assert machine.exit("memoryd.b", 0) == []
    for _ in range(14):
        assert machine.feed(Watched(), Tick(), after_s=1.0) == [failed]
    if told:
        answered = machine.feed(ShutdownAsked(reason="it failed", code=4))
        assert answered == [CloseLink(), Exit(code=4)]
    else:
        assert machine.feed(Watched(), Tick(), after_s=1.0) == [failed, Exit(code=4)]


def test_a_node_that_gives_up_says_so_until_its_own_new_scheduler_hears_it() -> None:
    """Or leaves word when it has to kill it: other nodes would wait for a scheduler for ever."""
    limits = NodeLimits(max_restarts=0, fail_timeout_s=15.0, terminate_timeout_s=30.0)
    machine = Machine(NAMES, limits).started()
    [failed] = machine.exit("worker.0", -9)
    assert isinstance(failed, SendFailed)
    for _ in range(14):
        assert machine.feed(Watched(heard_s=machine.now_s), Tick(), after_s=1.0) == [failed]
    stopped = machine.feed(Tick(), after_s=1.0)
    assert stopped == [Terminate(name="schedulerd"), Terminate(name="memoryd.a")]
    assert machine.feed(Watched(heard_s=machine.now_s)) == []
    assert machine.exit("memoryd.a", 130) == []
    assert machine.feed(Tick(), after_s=30.0) == [Kill(name="schedulerd")]
    word, ended = machine.exit("schedulerd", -9)
    assert word == LeaveWord(error=failed.error, code=failed.code)
    assert ended == Exit(code=4)


def test_a_child_that_never_heard_of_the_end_is_terminated(machine: Machine) -> None:
    machine.feed(ShutdownAsked(reason="done"))
    machine.exit("memoryd.a", 0)
    machine.exit("schedulerd", 0)
    assert machine.feed(Tick(), after_s=5.0) == [Terminate(name="worker.0")]
    assert machine.exit("worker.0", -15) == [Exit(code=0)]


def test_a_node_without_the_scheduler_waits_a_minute_for_its_children() -> None:
    machine = Machine(("memoryd.b", "worker.1"), NodeLimits(max_restarts=3))
    machine.feed(Tick(), Started(name="memoryd.b", pid=1), Started(name="worker.1", pid=2))
    machine.feed(ShutdownAsked(reason="done"))
    machine.exit("memoryd.b", 0)
    assert machine.feed(Tick(), after_s=60.0) == [Terminate(name="worker.1")]
    assert machine.feed(Tick(), after_s=30.0) == [Kill(name="worker.1")]
    assert machine.exit("worker.1", -9) == [Exit(code=0)], "the run has ended well all the same"


@pytest.mark.parametrize("code", [0, 4, 5, 130])
def test_a_node_without_the_scheduler_ends_as_the_run_did(code: int) -> None:
    machine = Machine(("memoryd.b",), NodeLimits(max_restarts=3))
    machine.feed(Tick(), Started(name="memoryd.b", pid=1))
    machine.feed(ShutdownAsked(reason="over", code=code))
    assert machine.exit("memoryd.b", 0) == [Exit(code=code)]


def test_a_run_that_comes_back_while_it_ends_may_end_in_another_way(machine: Machine) -> None:
    machine.feed(ShutdownAsked(reason="stopped on request", code=5))
    machine.exit("worker.0", 0)
    machine.exit("schedulerd", -9)
    machine.feed(Tick(), after_s=5.0)
    for name, pid in (("schedulerd", 30), ("worker.0", 31)):
        machine.feed(Started(name=name, pid=pid))
    machine.feed(ShutdownAsked(reason="done", code=0))
    for name in ("worker.0", "memoryd.a"):
        machine.exit(name, 0)
    assert machine.exit("schedulerd", 0) == [Exit(code=0)]


def watch(machine: Machine, seconds: int, **seen: Any) -> list[Effect]:
    """Seconds pass, in each of which the node sees the same."""
    effects: list[Effect] = []
    for _ in range(seconds):
        effects += machine.feed(Watched(heard_s=machine.now_s + 1.0, **seen), Tick(), after_s=1.0)
    return effects


def test_children_that_are_stopped_are_killed_and_replaced(machine: Machine) -> None:
    stopped = frozenset(("schedulerd", "worker.0"))
    assert watch(machine, 10, stopped=stopped) == []
    assert machine.state.next_deadline_s() == machine.now_s + 1.0, "nobody waits any longer"
    assert watch(machine, 1, stopped=stopped) == [Kill(name="schedulerd"), Kill(name="worker.0")]
    machine.exit("schedulerd", -9)
    machine.exit("worker.0", -9)
    assert machine.feed(Tick(), after_s=0.1) == [Start(name="schedulerd"), Start(name="worker.0")]


def test_a_scheduler_that_goes_on_in_time_lives(machine: Machine) -> None:
    stopped = frozenset(("schedulerd",))
    for _ in range(5):
        assert watch(machine, 9, stopped=stopped) == []
        assert watch(machine, 1) == []


def test_a_node_that_was_stopped_itself_gives_its_scheduler_time(machine: Machine) -> None:
    stopped = frozenset(("schedulerd",))
    assert watch(machine, 9, stopped=stopped) == []
    machine.now_s += 1000.0
    assert watch(machine, 10, stopped=stopped) == []
    assert watch(machine, 1, stopped=stopped) == [Kill(name="schedulerd")]


def test_a_scheduler_that_only_says_nothing_gets_much_longer(machine: Machine) -> None:
    heard_s = machine.now_s
    for _ in range(600):
        assert machine.feed(Watched(heard_s=heard_s), after_s=1.0) == []
    assert machine.feed(Watched(heard_s=heard_s), after_s=1.0) == [Kill(name="schedulerd")]
    assert machine.feed(Watched(heard_s=heard_s), after_s=1.0) == []


def test_a_child_that_is_stopped_while_the_run_ends_is_killed(machine: Machine) -> None:
    machine.feed(ShutdownAsked(reason="done"))
    machine.exit("worker.0", 0)
    assert watch(machine, 12, stopped=frozenset(("memoryd.a",))) == [Kill(name="memoryd.a")]
    machine.exit("memoryd.a", -9)
    assert machine.exit("schedulerd", 0) == [Exit(code=0)]


END = RunEnd(
    reason="step 9 of 9 is done", code=ExitCode.DONE, keep_memory=False, failed=False, written_s=1.0
)


def test_a_node_that_wakes_after_the_end_starts_nothing_again() -> None:
    machine = Machine(("memoryd.b", "worker.1"), NodeLimits(max_restarts=3))
    machine.feed(Tick(), Started(name="memoryd.b", pid=1), Started(name="worker.1", pid=2))
    watch(machine, 1)
    machine.now_s += 500.0
    assert machine.feed(Watched(heard_s=100.0, ended=END)) == [CloseLink()]
    assert machine.exit("worker.1", 0) == []
    assert machine.feed(Tick(), after_s=4.0) == []
    assert machine.feed(Tick(), after_s=1.0) == [Terminate(name="memoryd.b")]
    assert machine.exit("memoryd.b", 130) == [Exit(code=0)]


def test_a_scheduler_killed_while_it_ends_the_run_is_not_needed_when_it_left_word(
    machine: Machine,
) -> None:
    machine.feed(ShutdownAsked(reason="stopped", code=5))
    machine.exit("schedulerd", -9)
    machine.feed(Watched(ended=END))
    assert machine.feed(Tick(), after_s=5.0) == [
        Terminate(name="memoryd.a"),
        Terminate(name="worker.0"),
    ]
    machine.exit("worker.0", 0)
    assert machine.exit("memoryd.a", 130) == [Exit(code=5)]


@pytest.fixture
def helped() -> Machine:
    """A node with a helper, which is no member of the run."""
    names, helpers = (*NAMES, "fetchd.a"), frozenset({"fetchd.a"})
    machine = Machine(names, NodeLimits(max_restarts=3), helpers)
    machine.feed(Tick())
    machine.feed(*(Started(name=name, pid=pid) for pid, name in enumerate(names, start=10)))
    return machine


@pytest.mark.parametrize("code", [-9, 1, 2, 3])
def test_a_run_goes_on_without_a_helper_that_dies_again_and_again(
    helped: Machine, code: int
) -> None:
    for pid in range(20, 23):
        assert helped.exit("fetchd.a", code, after_s=9.0) == []
        assert helped.feed(Tick()) == [Start(name="fetchd.a")]
        helped.feed(Started(name="fetchd.a", pid=pid))
    assert helped.exit("fetchd.a", code, after_s=9.0) == []
    assert helped.feed(Tick(), after_s=100.0) == []
    assert helped.state.phase is NodePhase.RUNNING


def test_a_helper_that_dies_now_and_then_always_comes_back(helped: Machine) -> None:
    for pid in range(20, 30):
        assert helped.exit("fetchd.a", -9, after_s=3600.0) == []
        assert helped.feed(Tick()) == [Start(name="fetchd.a")]
        helped.feed(Started(name="fetchd.a", pid=pid))


def test_a_node_ends_its_helpers_with_the_run(helped: Machine) -> None:
    ended = helped.feed(ShutdownAsked(keep_memory=False, reason="done", code=0))
    assert ended == [CloseLink(), Terminate(name="fetchd.a")]


def test_a_helper_that_starts_while_the_run_ends_is_ended(helped: Machine) -> None:
    helped.exit("fetchd.a", -9, after_s=9.0)
    helped.feed(Tick())
    assert helped.feed(ShutdownAsked(keep_memory=False, reason="done", code=0)) == [CloseLink()]
    assert helped.feed(Started(name="fetchd.a", pid=30)) == [Terminate(name="fetchd.a")]


def test_members_die_with_the_lease_and_come_back_with_the_scheduler() -> None:
    """A helper stays: nothing that another machine's node does can meet it."""
    names = ("memoryd.b", "worker.1", "metricsd.b")
    limits = NodeLimits(max_restarts=3, lease_s=10.0)
    machine = Machine(names, limits, helpers=frozenset({"metricsd.b"}))
    machine.feed(Tick())
    machine.feed(*(Started(name=name, pid=20 + i) for i, name in enumerate(names)))
    heard_s = machine.now_s
    assert machine.feed(Watched(heard_s=heard_s), after_s=10.0) == []
    dying = [Kill(name="memoryd.b"), Kill(name="worker.1")]
    assert machine.feed(Watched(heard_s=heard_s), after_s=1.0) == dying
    assert machine.feed(Watched(heard_s=heard_s), after_s=1.0) == []
    machine.exit("memoryd.b", -9)
    machine.exit("worker.1", -9)
    assert machine.feed(Tick(), after_s=5.0) == []
    machine.feed(Watched(heard_s=machine.now_s))
    assert machine.feed(Tick()) == [Start(name="memoryd.b"), Start(name="worker.1")]


def test_a_child_that_hangs_before_it_joined_is_replaced(machine: Machine) -> None:
    """Whoever is missing has the time of a hang: from its own start on, and not while the node
    itself was stopped.
    """
    hang_s = machine.state.limits.hang_s
    missing = MemberMissing(member="worker.0")
    assert machine.feed(missing) == []
    assert machine.feed(missing, after_s=hang_s - 61.0) == []
    machine.feed(Watched())
    machine.feed(Watched(), after_s=1000.0)  # nobody looked for so long: the machine slept
    assert machine.feed(missing) == []
    assert machine.feed(missing, after_s=2.0) == [Kill(name="worker.0")]
    assert machine.exit("worker.0", -9) == []
    assert machine.feed(Tick()) == [Start(name="worker.0")]
    machine.feed(Started(name="worker.0", pid=13))
    assert machine.feed(missing, after_s=hang_s - 1.0) == []
    assert machine.feed(MemberMissing(member="worker.7"), after_s=hang_s) == [], "not a child of it"


def test_nobody_is_missed_when_the_run_ends(machine: Machine) -> None:
    machine.feed(ShutdownAsked(code=0, reason="done"))
    missing = MemberMissing(member="worker.0")
    assert machine.feed(missing, after_s=machine.state.limits.hang_s) == []
