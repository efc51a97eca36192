"""Membership and epochs: accepted processes, ordered deaths, messages of a barrier."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.daemons.kit.events import LogLine
from penstock.daemons.scheduler.machine.events import JournalDecision, JournalEpoch, Refuse, Send
from penstock.daemons.scheduler.machine.rules import Deadlines
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.shm.control import Decision
from tests.scheduler.conftest import (
    INCARNATION,
    Driver,
    facts_at,
    make_config,
    make_position,
    make_record,
    make_rules,
    saved_at,
)

DRAINS = ["memoryd.a", "optimizerd.a", "worker.0", "worker.1"]


def drains(epoch: int) -> list[str]:
    return [f"{name} <- drain e{epoch}" for name in DRAINS]


def test_the_first_epoch_from_nothing_to_the_first_attempt() -> None:
    driver = Driver()
    for member in driver.rules.members[:-1]:
        assert driver.join(member.name) == []
    assert driver.status.message == "waiting for worker.1"
    assert driver.join("worker.1") == ["journal epoch 1, attempts from 1", *drains(1)]
    assert driver.drained(None) == ["memoryd.a <- restore e1 v0 from initial weights"]
    assert driver.restored() == [
        "journal RESTORE v0 a0 c=1",
        "memoryd.a <- begin e1 v0",
        "optimizerd.a <- begin e1 v0",
    ]
    ready = pb.Ready(epoch=1)
    assert driver.say("optimizerd.a", ready=ready) == []
    assert driver.say("worker.0", ready=ready) == [], "a worker cannot be ready before it began"
    assert driver.say("memoryd.a", ready=ready) == [
        "worker.0 <- begin e1 v0",
        "worker.1 <- begin e1 v0",
    ]
    assert driver.say("worker.1", ready=ready) == []
    assert (
        driver.say("worker.0", ready=ready)
        == [
            "node.a <- begin e1 v0",  # its budget of restarts is full again with a new version
            *(f"{name} <- run_attempt e1 a1 v0 data 0" for name in DRAINS[1:]),
        ]
    )
    assert driver.status.phase == "running"
    assert [m.state for m in driver.status.members] == ["ready"] * 5


def test_begin_carries_record_plan_and_endpoints() -> None:
    driver = Driver(facts=facts_at(4))
    driver.join_all()
    driver.each(driver.rules.workers, drained=pb.Drained(epoch=4))
    driver.say("optimizerd.a", drained=pb.Drained(epoch=4))
    memory = pb.MemoryState(incarnation=INCARNATION, committed=4)
    driver.say("memoryd.a", drained=pb.Drained(epoch=4, memory=memory))
    begin = next(e.message.begin for e in driver.effects if isinstance(e, Send))
    assert (begin.record.version, begin.record.attempt, begin.plan_digest) == (4, 4, "feed")
    assert {e.member: e.address for e in begin.endpoints}["worker.1"] == "tcp://worker.1"
    assert (begin.next_attempt, begin.next_evaluation) == (6, 1), "where numbers go on"


def test_a_begin_does_not_grow_with_the_members() -> None:
    """Each member receives the peers that it requested; a member without a request receives all."""
    longest = {}
    for num_nodes in (2, 16):
        nodes = [{"name": f"n{index}"} for index in range(num_nodes)]
        driver = Driver(rules=make_rules(make_config(cluster={"nodes": nodes})))
        for member in driver.rules.members:
            peers = () if member.name.startswith("memoryd") else ("memoryd.n0", "worker.0")
            driver.join(member.name, peers=None if member.name == "worker.3" else peers)
        driver.drained()
        driver.restored()
        begins = {e.member: e.message.begin for e in driver.effects if isinstance(e, Send)}
        ready = pb.Ready(epoch=driver.epoch)
        driver.each((*driver.rules.memoryds, *driver.rules.optimizerds), ready=ready)
        begins |= {e.member: e.message.begin for e in driver.effects if isinstance(e, Send)}
        peers = {name: [e.member for e in begin.endpoints] for name, begin in begins.items()}
        assert peers["memoryd.n1"] == [] and peers["worker.1"] == ["memoryd.n0", "worker.0"]
        assert peers.pop("worker.3") == [member.name for member in driver.rules.members]
        longest[num_nodes] = max(begins[name].ByteSize() for name in peers)
    assert longest[2] == longest[16] < 200


def test_epoch_numbers_rise_above_the_journal_and_every_hello() -> None:
    driver = Driver(facts=facts_at(4))
    for member in driver.rules.members[:-1]:
        driver.join(member.name, epoch=3)
    assert driver.join("worker.1", epoch=9)[0] == "journal epoch 10, attempts from 6"


@pytest.mark.parametrize("committed", [4, 3])
def test_live_memory_that_the_journal_explains_is_not_restored(committed: int) -> None:
    driver = Driver(facts=facts_at(4), saved=saved_at(2))
    driver.join_all()
    assert driver.drained(committed) == ["memoryd.a <- begin e4 v4", "optimizerd.a <- begin e4 v4"]
    assert driver.ready()[0] == "optimizerd.a <- run_attempt e4 a6 v4 data 32"


@pytest.mark.parametrize(
    ("committed", "incarnation"), [(None, 0), (2, INCARNATION), (5, INCARNATION), (4, 999)]
)
def test_memory_that_the_journal_does_not_explain_is_restored(
    committed: int | None, incarnation: int
) -> None:
    driver = Driver(facts=facts_at(4), saved=saved_at(2))
    driver.join_all()
    lines = driver.drained(committed, incarnation)
    assert lines == ["memoryd.a <- restore e4 v2 from /run/state/step-00000002"]
    [warning] = [e.text for e in driver.effects if isinstance(e, LogLine) and e.warning]
    assert warning.startswith("steps 3 to 4 are lost: shared memory alone had them, and memor")
    assert "Training goes on from saved state of step 2; with train.save_every" in warning
    assert driver.restored()[0] == "journal RESTORE v2 a5 c=1"
    [journaled] = [e for e in driver.effects if isinstance(e, JournalDecision)]
    assert journaled.position == make_position(2)
    assert driver.ready()[0] == "optimizerd.a <- run_attempt e4 a6 v2 data 16"


def test_a_restore_of_the_committed_step_repeats_no_skips() -> None:
    """A run that max_skips ended would otherwise skip the same samples after each start."""
    skips = make_position(4, data_position=48, skips_in_a_row=2)
    driver = Driver(facts=facts_at(4, position=skips), saved=saved_at(4))
    driver.join_all()
    driver.drained(None)
    driver.restored()
    [journaled] = [e for e in driver.effects if isinstance(e, JournalDecision)]
    assert (journaled.record.decision, journaled.position) == (Decision.RESTORE, skips)
    assert driver.ready()[0] == "optimizerd.a <- run_attempt e4 a6 v4 data 48"


def test_a_run_without_a_step_begins_from_its_first_sample() -> None:
    skips = make_position(0, data_position=16, skips_in_a_row=2)
    driver = Driver(facts=facts_at(0, position=skips))
    driver.join_all()
    driver.drained(None)
    driver.restored()
    assert driver.ready()[0] == "optimizerd.a <- run_attempt e4 a2 v0 data 0"


def test_after_a_restore_memory_may_not_be_a_version_behind() -> None:
    record = make_record(4, 4, Decision.RESTORE)
    driver = Driver(facts=facts_at(4, record=record), saved=saved_at(4))
    driver.join_all()
    assert driver.drained(3) == ["memoryd.a <- restore e4 v4 from /run/state/step-00000004"]


def test_one_node_of_two_lost_its_memory_so_all_are_restored() -> None:
    config = make_config(cluster={"workers": 1, "nodes": [{"name": "a"}, {"name": "b"}]})
    driver = Driver(make_rules(config), facts_at(4), saved_at(2))
    driver.join_all()
    full = pb.MemoryState(incarnation=INCARNATION, committed=4)
    driver.say("memoryd.a", drained=pb.Drained(epoch=4, memory=full))
    driver.say("memoryd.b", drained=pb.Drained(epoch=4, memory=pb.MemoryState()))
    lines = driver.each(
        (*driver.rules.optimizerds, *driver.rules.workers), drained=pb.Drained(epoch=4)
    )
    source = "/run/state/step-00000002"
    assert lines == [f"memoryd.{node} <- restore e4 v2 from {source}" for node in "ab"]
    restored = pb.Restored(epoch=4, incarnation=INCARNATION)
    assert driver.say("memoryd.a", restored=restored) == []
    wrong = pb.Restored(epoch=4, incarnation=INCARNATION + 1)
    assert driver.say("memoryd.b", restored=wrong) == []
    assert driver.say("memoryd.b", restored=restored)[0] == "journal RESTORE v2 a5 c=1"


def test_tokens_of_fresh_memory_are_journaled_before_it_counts() -> None:
    driver = Driver(facts=facts_at(4), saved=saved_at(4))
    driver.join_all()
    driver.each((*driver.rules.optimizerds, *driver.rules.workers), drained=pb.Drained(epoch=4))
    fresh = pb.Drained(epoch=4, memory=pb.MemoryState(tokens=b"new"))
    driver.say("memoryd.a", drained=fresh)
    restored = pb.Restored(epoch=4, incarnation=INCARNATION)
    lines = driver.say("memoryd.a", restored=restored)
    assert lines[:2] == ["journal tokens of memoryd.a", "journal RESTORE v4 a5 c=1"]


@pytest.mark.parametrize(
    ("known", "borne", "first"),
    [
        ((), b"old", "journal tokens of memoryd.a"),  # of an older Penstock: adopted once
        ((("memoryd.a", b"old".hex()),), b"old", "optimizerd.a <- begin"),
        ((("memoryd.a", b"old".hex()),), b"forged", "memoryd.a <- restore e4 v4"),
        ((("memoryd.a", b"old".hex()),), b"", "memoryd.a <- restore e4 v4"),
    ],
)
def test_memory_counts_if_it_bears_the_tokens_of_the_journal(
    known: tuple[tuple[str, str], ...], borne: bytes, first: str
) -> None:
    facts = replace(facts_at(4), tokens=known)
    driver = Driver(facts=facts, saved=saved_at(4))
    driver.join_all()
    driver.each((*driver.rules.optimizerds, *driver.rules.workers), drained=pb.Drained(epoch=4))
    memory = pb.MemoryState(incarnation=INCARNATION, committed=4, tokens=borne)
    lines = driver.say("memoryd.a", drained=pb.Drained(epoch=4, memory=memory))
    assert any(line.startswith(first) for line in lines[:2]), lines


def test_a_lost_worker_is_fenced_before_the_barrier_may_pass(live: Driver) -> None:
    old = live.pids["worker.1"]
    assert live.close("worker.1") == [f"node.a <- fence worker.1 {old}"]
    assert live.status.phase == "fencing"
    assert live.join("worker.1") == [], "the replacement is here, the old one may still write"
    assert "waiting until worker.1 is dead" in live.status.message
    assert live.fenced("worker.1", old + 1000) == []
    assert live.fenced("worker.1", old) == ["journal epoch 2, attempts from 2", *drains(2)]
    live.drained(0)
    lines = live.ready()
    assert lines[0] == "optimizerd.a <- run_attempt e2 a2 v0 data 0", "same data, new attempt"
    assert [m.restarts for m in live.status.members] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("name", ["memoryd.a", "optimizerd.a", "worker.0"])
def test_a_silent_member_is_lost_at_its_deadline(live: Driver, name: str) -> None:
    assert live.wait(10.0, silent=(name,)) == []
    stream, pid = live.streams.pop(name), live.pids[name]
    assert live.wait(1.0) == [f"disconnect stream {stream}", f"node.a <- fence {name} {pid}"]


def test_a_stopped_process_that_wakes_is_refused(live: Driver) -> None:
    pid, stream = live.pids["worker.1"], live.streams["worker.1"]
    live.wait(10.5, silent=("worker.1",))
    late = pb.AttemptDone(epoch=1, attempt=1)
    assert live.say("worker.1", stream=stream, attempt_done=late) == []
    assert live.join("worker.1", pid=pid) == ["refuse stream 6"]
    live.fenced("worker.1", pid)
    assert live.join("worker.1", pid=pid) == ["refuse stream 7"], "also when it is known dead"


def test_a_process_of_a_restarted_container_may_have_the_number_of_a_lost_one(
    live: Driver,
) -> None:
    live.close("worker.1")
    live.fenced("worker.1", live.pids["worker.1"])
    live.join("worker.1", nonce=5)
    pid = live.pids["worker.1"]
    assert live.close("worker.1") == [f"node.a <- fence worker.1 {pid}"]
    assert live.join("worker.1", pid=pid, nonce=5) == ["refuse stream 7"]
    assert live.join("worker.1", pid=pid, nonce=6) == ["disconnect stream 8"], "not dead yet"
    live.fenced("worker.1", pid)
    assert live.join("worker.1", pid=pid, nonce=5) == ["refuse stream 9"], "another one, dead"
    assert "refuse stream 10" not in live.join("worker.1", pid=pid, nonce=6)
    assert live.streams["worker.1"] == 10


def test_strangers_are_refused(live: Driver) -> None:
    assert live.join("worker.0", run_id="ffffffffffff") == ["refuse stream 6"]
    assert live.join("worker.2") == ["refuse stream 7"]
    assert live.status.phase == "running"


@pytest.mark.parametrize("name", ["worker.1", "memoryd.a", "node.a"])
def test_nobody_takes_a_living_members_name(live: Driver, name: str) -> None:
    """Neither with another process id, nor with the one that everybody can ask for."""
    old = live.pids[name]
    assert live.join(name) == ["disconnect stream 6"]
    assert live.join(name, pid=old, nonce=5) == ["disconnect stream 7"]
    assert live.status.phase == "running" and live.epoch == 1
    assert live.pids[name] == old
    for _ in range(1000):
        live.join(name)
        assert not any(isinstance(effect, LogLine) for effect in live.effects), "said once a second"
    live.wait(1.0)
    live.join(name)
    [line] = [effect.text for effect in live.effects if isinstance(effect, LogLine)]
    assert f"process {old} has that name" in line and "1001 more" in line
    if name != "node.a":
        assert live.close(name) == [f"node.a <- fence {name} {old}"]
        live.join(name)
        assert live.fenced(name, old) == ["journal epoch 2, attempts from 2", *drains(2)]


def test_names_are_checked_first_and_shown_shortened(live: Driver) -> None:
    assert live.join("w" * 100_000, run_id="r" * 100_000) == ["refuse stream 6"]
    [refusal] = [effect for effect in live.effects if isinstance(effect, Refuse)]
    [line] = [effect.text for effect in live.effects if isinstance(effect, LogLine)]
    assert refusal.reason.startswith("this run has no member 'wwww")
    assert len(line) < 1000
    live.wait(1.0)
    assert live.join("worker.0", run_id="r" * 100_000) == ["refuse stream 7"]
    [line] = [effect.text for effect in live.effects if isinstance(effect, LogLine)]
    assert "this is run 0123456789ab, not 'rrrr" in line and len(line) < 1000


def test_the_same_process_on_a_new_stream_breaks_the_epoch_and_stays(live: Driver) -> None:
    pid, stream = live.pids["worker.1"], live.streams["worker.1"]
    assert live.join("worker.1", pid=pid) == [
        f"disconnect stream {stream}",
        "journal epoch 2, attempts from 2",
        *drains(2),
    ]


def test_a_second_loss_during_the_barrier_takes_a_new_epoch_number(live: Driver) -> None:
    first, second = live.pids["worker.1"], live.pids["optimizerd.a"]
    live.close("worker.1")
    live.join("worker.1")
    live.fenced("worker.1", first)
    assert live.close("optimizerd.a") == [f"node.a <- fence optimizerd.a {second}"]
    live.each(("memoryd.a", "worker.0", "worker.1"), drained=pb.Drained(epoch=2))
    live.fenced("optimizerd.a", second)
    assert live.join("optimizerd.a") == ["journal epoch 3, attempts from 2", *drains(3)]
    live.drained(0)
    assert live.ready()[0] == "optimizerd.a <- run_attempt e3 a2 v0 data 0"


@pytest.mark.parametrize("stage", ["restoring", "beginning daemons", "beginning workers"])
def test_a_loss_in_a_later_stage_of_the_barrier_restarts_it(stage: str) -> None:
    driver = Driver()
    driver.join_all()
    driver.drained(None)
    if stage != "restoring":
        driver.restored()
    if stage == "beginning workers":
        driver.each(("memoryd.a", "optimizerd.a"), ready=pb.Ready(epoch=1))
    pid = driver.pids["worker.0"]
    assert driver.close("worker.0") == [f"node.a <- fence worker.0 {pid}"]
    driver.join("worker.0")
    assert driver.fenced("worker.0", pid) == ["journal epoch 2, attempts from 1", *drains(2)]
    half_filled = stage == "restoring"
    lines = driver.drained(None if half_filled else 0)
    restore = ["memoryd.a <- restore e2 v0 from initial weights"]
    begin = ["memoryd.a <- begin e2 v0", "optimizerd.a <- begin e2 v0"]
    assert lines == (restore if half_filled else begin)


def test_a_restore_of_an_older_epoch_does_not_count() -> None:
    driver = Driver()
    driver.join_all()
    driver.drained(None)
    pid = driver.pids["worker.0"]
    driver.close("worker.0")
    driver.join("worker.0")
    driver.fenced("worker.0", pid)
    driver.drained(None)
    stale = pb.Restored(epoch=1, incarnation=INCARNATION + 1)
    assert driver.say("memoryd.a", restored=stale) == []
    fresh = pb.Restored(epoch=2, incarnation=INCARNATION + 1)
    assert driver.say("memoryd.a", restored=fresh)[0] == "journal RESTORE v0 a0 c=1"


def test_messages_of_older_epochs_are_ignored(live: Driver) -> None:
    old = live.pids["worker.1"]
    live.close("worker.1")
    live.join("worker.1")
    live.fenced("worker.1", old)
    assert live.each(tuple(DRAINS), drained=pb.Drained(epoch=1)) == []
    live.drained(0)
    assert live.each(tuple(DRAINS), ready=pb.Ready(epoch=1)) == []
    live.ready()
    done = pb.AttemptDone(epoch=1, attempt=live.attempt)
    assert live.each(("worker.0", "worker.1"), attempt_done=done) == []
    assert live.status.phase == "running"


def test_a_member_that_does_not_drain_is_lost() -> None:
    rules = make_rules()
    rules = type(rules)(**{**vars(rules), "deadlines": Deadlines(drain_s=5.0)})
    driver = Driver(rules, facts_at(4))
    driver.join_all()
    others = ("memoryd.a", "optimizerd.a", "worker.0")
    driver.each(others, drained=pb.Drained(epoch=4))
    assert driver.wait(5.0) == []
    assert driver.tick(0.5)[1] == f"node.a <- fence worker.1 {driver.pids['worker.1']}"


def test_a_killed_node_takes_its_children_along(live: Driver) -> None:
    pids = dict(live.pids)
    assert live.leave_all() == []
    assert live.join("node.a") == [f"node.a <- fence {name} {pids[name]}" for name in DRAINS]
    for name in DRAINS:
        assert live.fenced(name, pids[name]) == []
    for name in DRAINS[:-1]:
        assert live.join(name) == []
    assert live.join("worker.1")[0] == "journal epoch 2, attempts from 2"


def test_only_its_own_node_can_report_a_death() -> None:
    config = make_config(cluster={"workers": 1, "nodes": [{"name": "a"}, {"name": "b"}]})
    driver = Driver(make_rules(config), facts_at(4))
    driver.join_all()
    pid = driver.pids["worker.1"]
    assert driver.close("worker.1") == [f"node.b <- fence worker.1 {pid}"]
    driver.join("worker.1")
    assert driver.fenced("worker.1", pid, node="node.a") == []
    assert driver.fenced("worker.1", pid, node="node.b")[0].startswith("journal epoch 5")


def test_a_stopped_scheduler_declares_nobody_dead(live: Driver) -> None:
    assert live.tick(60.0) == [], "all deadlines restart"
    pid = live.pids["worker.1"]
    assert live.close("worker.1") == [], "members left the silent scheduler: they may come back"
    assert live.join("worker.1", pid=pid)[0] == "journal epoch 2, attempts from 2"
    live.close("worker.0")
    assert live.wait(9.5) == []
    pid = live.pids["worker.0"]
    assert live.wait(1.0) == [f"node.a <- fence worker.0 {pid}"], "but not for ever"


def test_a_short_pause_of_the_scheduler_restarts_no_deadline(live: Driver) -> None:
    live.wait(8.0, silent=("worker.1",))
    assert live.tick(4.0) == [
        f"disconnect stream {live.streams['worker.1']}",
        f"node.a <- fence worker.1 {live.pids['worker.1']}",
    ]


def test_a_restarted_scheduler_has_the_missing_process_of_its_predecessor_killed() -> None:
    pids = tuple((name, 50 + i) for i, name in enumerate(["node.a", *DRAINS]))
    driver = Driver(facts=facts_at(4, pids=pids))
    for name, pid in pids[:-1]:
        assert driver.join(name, pid=pid, epoch=3) == []
    assert driver.wait(9.5) == []
    assert driver.wait(1.0) == ["node.a <- fence worker.1 54"]
    driver.fenced("worker.1", 54)
    assert driver.join("worker.1")[0] == "journal epoch 4, attempts from 6"


def test_a_new_node_has_no_processes_of_the_old_one() -> None:
    pids = tuple((name, 50 + i) for i, name in enumerate(["node.a", *DRAINS]))
    driver = Driver(facts=facts_at(4, pids=pids))
    driver.join("node.a", pid=99)
    assert driver.wait(15.0) == []
    for name in DRAINS[:-1]:
        driver.join(name)
    assert driver.join("worker.1")[0] == "journal epoch 4, attempts from 6"


def test_the_journal_learns_which_processes_know_an_epoch(live: Driver) -> None:
    pids = dict(live.pids)
    old = live.pids["worker.1"]
    live.close("worker.1")
    live.fenced("worker.1", old)
    live.join("worker.1")
    [epoch] = [e for e in live.effects if isinstance(e, JournalEpoch)]
    assert dict(epoch.pids) == pids | {"worker.1": live.pids["worker.1"]}
