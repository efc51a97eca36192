"""Partners (memory.mirror): what a commit waits for, and how a lost node is filled again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.client.views.display import incomplete_replicas
from penstock.daemons.scheduler.machine.events import Joined, StreamClosed
from penstock.daemons.scheduler.machine.rules import Rules
from penstock.protocol.generated import scheduler_pb2 as pb
from tests.scheduler.conftest import (
    INCARNATION,
    RUN_ID,
    Driver,
    facts_at,
    make_config,
    make_rules,
    saved_at,
)

NODES = [{"name": "a"}, {"name": "b"}]


def partner_rules(**sections: dict[str, Any]) -> Rules:
    """Rules of two nodes with partners."""
    cluster = {"workers": 1, "nodes": NODES}
    return make_rules(make_config(cluster=cluster, memory={"mirror": "partner"}, **sections))


def mirrored(**sections: dict[str, Any]) -> Driver:
    """A run of two nodes with partners, in its first attempt."""
    driver = Driver(partner_rules(**sections))
    driver.begin()
    return driver


def say_mirrored(driver: Driver, name: str, attempt: int | None = None) -> list[str]:
    number = driver.attempt if attempt is None else attempt
    return driver.say(name, mirrored=pb.Mirrored(epoch=driver.epoch, attempt=number))


def test_no_commit_is_journaled_before_partners_have_its_gradients() -> None:
    driver = mirrored()
    assert driver.run_attempt() == []
    assert driver.status.phase == "mirroring"
    assert driver.machine.activity is not None
    assert driver.machine.activity.unfinished == ("mirrord.a", "mirrord.b")
    assert say_mirrored(driver, "mirrord.b") == []
    assert say_mirrored(driver, "mirrord.b") == [], "twice is once"
    assert say_mirrored(driver, "mirrord.a", attempt=7) == [], "of another attempt"
    lines = say_mirrored(driver, "mirrord.a")
    assert lines[0] == "journal COMMIT v1 a1 c=1"
    assert {f"mirrord.{n} <- commit e1 v1 c=1" for n in "ab"} < set(lines)
    assert {f"mirrord.{n} <- run_attempt e1 a2 v1 data 8" for n in "ab"} < set(lines)


def test_partners_may_be_first() -> None:
    driver = mirrored()
    assert say_mirrored(driver, "mirrord.a") + say_mirrored(driver, "mirrord.b") == []
    assert driver.run_attempt()[0] == "journal COMMIT v1 a1 c=1"


def test_a_status_says_which_replicas_lack_blocks() -> None:
    driver = mirrored()
    missing = pb.Mirrored(epoch=driver.epoch, attempt=driver.attempt, blocks_missing=3)
    driver.say("mirrord.b", mirrored=missing)
    (line,) = incomplete_replicas(driver.status)
    assert line.startswith("mirrord.b has not read 3 blocks of its replica yet: if the node of the")
    say_mirrored(driver, "mirrord.b")
    assert incomplete_replicas(driver.status) == []


def test_a_skip_needs_no_gradients_of_partners() -> None:
    driver = mirrored()
    assert driver.run_attempt(finite=False)[0] == "journal SKIP v0 a1 c=0"


def test_an_amended_attempt_waits_for_partners_behind_the_amends() -> None:
    driver = mirrored()
    assert "optimizerd.a <- amend e1 v1 c=0.4082" in driver.run_attempt(sum_squares=3.0)
    assert say_mirrored(driver, "mirrord.a") + say_mirrored(driver, "mirrord.b") == []
    amended = pb.Amended(epoch=driver.epoch, attempt=driver.attempt)
    lines = driver.each(driver.rules.optimizerds, amended=amended)
    assert lines[0] == "journal AMEND v1 a1 c=0.4082"


def test_one_node_has_no_partner() -> None:
    with pytest.raises(Exception, match="needs another node to keep the replica"):
        make_config(memory={"mirror": "partner"})


def test_neighbours_on_one_host_are_no_partners() -> None:
    nodes = [{"name": n, "host": h} for n, h in (("a", "10.0.0.1"), ("b", "10.0.0.1"))]
    with pytest.raises(Exception, match=r"both on 10\.0\.0\.1, and would be lost together"):
        make_config(memory={"mirror": "partner"}, cluster={"nodes": nodes, "workers": 1})


def memory(committed: int = 4, incarnation: int = INCARNATION, **fields: int) -> Any:
    return pb.MemoryState(incarnation=incarnation, committed=committed, **fields)


EMPTY = pb.MemoryState()


def replica(committed: int = 4, attempt: int = 0, **fields: Any) -> Any:
    values = {"incarnation": INCARNATION, "complete": True} | fields
    return pb.ReplicaState(committed=committed, attempt=attempt, **values)


def drain(
    memory_a: Any,
    memory_b: Any,
    replica_of_a: Any,
    *,
    rules: Rules | None = None,
    epochs: dict[str, int] | None = None,
    replica_of_b: Any = None,
    **facts: Any,
) -> tuple[Driver, list[str]]:
    """A scheduler with a journal at version 4 gathers all members. Returns the lines after the last
    Drained. mirrord.b keeps the replica of node a's memory.
    """
    driver = Driver(rules or partner_rules(), facts_at(4, **facts), saved_at(2))
    for member in driver.rules.members:
        driver.join(member.name, epoch=(epochs or {}).get(member.name, 3))
    reports = {
        "memoryd.a": {"memory": memory_a},
        "memoryd.b": {"memory": memory_b},
        "mirrord.a": {"replica": replica_of_b},
        "mirrord.b": {"replica": replica_of_a},
    }
    lines: list[str] = []
    for member in driver.rules.members:
        if member.role.value != "node":
            fields = reports.get(member.name, {})
            lines = driver.say(member.name, drained=pb.Drained(epoch=driver.epoch, **fields))
    return driver, lines


def test_a_node_without_memory_is_filled_by_its_partner_alone() -> None:
    driver, lines = drain(EMPTY, memory(), replica())
    assert lines == ["mirrord.b <- settle e4 v4"]
    assert driver.status.phase == "restoring"
    settled = pb.Settled(epoch=4, version=4)
    assert driver.say("mirrord.b", settled=settled) == [
        "journal generations memoryd.a 1",
        "memoryd.a <- restore e4 v4 from tcp://mirrord.b generation 1",
    ]
    restored = pb.Restored(epoch=4, incarnation=INCARNATION)
    lines = driver.say("memoryd.a", restored=restored)
    assert lines[0] == "memoryd.a <- begin e4 v4 without gradients of memoryd.a", (
        "nothing is journaled: no step is taken back"
    )
    assert driver.machine.mirror.version == 4


@pytest.mark.parametrize(
    "found",
    [
        replica(complete=False),
        replica(committed=3),
        replica(committed=3, attempt=3),
        replica(committed=5, attempt=4),
        replica(incarnation=INCARNATION + 1),
        pb.ReplicaState(),
    ],
    ids=["incomplete", "behind", "other attempt", "ahead", "other filling", "empty"],
)
def test_a_replica_that_does_not_have_the_commit_is_no_source(found: Any) -> None:
    _, lines = drain(EMPTY, memory(), found)
    assert lines == [f"memoryd.{n} <- restore e4 v2 from /run/state/step-00000002" for n in "ab"]


def test_a_replica_one_step_behind_counts_with_the_gradients_of_that_step() -> None:
    _, lines = drain(EMPTY, memory(3), replica(3, attempt=4))
    assert lines == ["mirrord.b <- settle e4 v4"]


def test_a_replica_of_no_block_needs_no_gradients_to_be_one_step_behind() -> None:
    """It can name no attempt: a node that trains nothing would take all the others' steps along."""
    rules = replace(partner_rules(), blocks=(1,))  # node a owns blocks 0 and 2
    _, lines = drain(EMPTY, memory(3), replica(3), rules=rules)
    assert lines == ["mirrord.b <- settle e4 v4"]
    _, lines = drain(EMPTY, memory(3), replica(2), rules=rules)
    assert lines[0] == "memoryd.a <- restore e4 v2 from /run/state/step-00000002"


def test_memory_of_an_older_generation_is_filled_anew() -> None:
    """A node that was replaced comes back with what it had, and its spare has taken over."""
    generations = (("memoryd.a", 2),)
    _, lines = drain(memory(generation=1), memory(), replica(), generations=generations)
    assert lines == ["mirrord.b <- settle e4 v4"]
    _, lines = drain(memory(generation=2), memory(), replica(), generations=generations)
    assert lines[0] == "memoryd.a <- begin e4 v4"


@pytest.mark.parametrize(
    ("borne", "claims", "anew"),
    [(b"new", True, " anew mirrord.b"), (b"old", True, ""), (b"new", False, "")],
    ids=["strange", "known", "strange and empty"],
)
def test_a_replica_that_the_journal_does_not_know_begins_anew(
    borne: bytes, claims: bool, anew: str
) -> None:
    """This happens when an old machine returns in the place of a spare one with a replica."""
    tokens = (("mirrord.b", b"old".hex()),)
    _, lines = drain(memory(), memory(), replica(tokens=borne, complete=claims), tokens=tokens)
    assert f"memoryd.a <- begin e4 v4{anew}" in lines


def test_a_partner_that_fails_leaves_the_newest_saved_state() -> None:
    driver, _ = drain(EMPTY, memory(), replica())
    driver.say("mirrord.b", settled=pb.Settled(epoch=4, version=4))
    lines = driver.say("memoryd.a", restored=pb.Restored(epoch=4, incarnation=0))
    assert lines == [f"memoryd.{n} <- restore e4 v2 from /run/state/step-00000002" for n in "ab"]


def test_a_new_optimizerd_that_needs_the_lost_gradients_is_lost_with_them() -> None:
    """Its predecessor had pulled them, and a refilled node does not have them any more."""
    contributors = {"memoryd.b": frozenset({"memoryd.a"})}
    rules = replace(partner_rules(), contributors=contributors)
    _, lines = drain(EMPTY, memory(), replica(), rules=rules)
    assert lines == ["mirrord.b <- settle e4 v4"]
    _, lines = drain(EMPTY, memory(), replica(), rules=rules, epochs={"optimizerd.b": 0})
    assert lines[0] == "memoryd.a <- restore e4 v2 from /run/state/step-00000002"


def test_gradients_of_memory_that_was_filled_stay_lost_until_the_next_commit() -> None:
    """A node that needs them in a later epoch is filled as well: later attempts left others."""
    contributors = {"memoryd.b": frozenset({"memoryd.a"})}
    rules = replace(partner_rules(), contributors=contributors)
    new = {"optimizerd.b": 0}
    filled, before = memory(lost_attempt=4), memory(lost_attempt=3)
    partners = {"rules": rules, "replica_of_b": replica()}
    _, lines = drain(filled, memory(3), replica(), epochs=new, **partners)
    assert lines == ["mirrord.a <- settle e4 v4"]
    _, lines = drain(filled, memory(3), replica(), **partners)
    assert lines[0] == "memoryd.a <- begin e4 v4 without gradients of memoryd.a"
    _, lines = drain(before, memory(3), replica(), epochs=new, **partners)
    assert lines[0] == "memoryd.a <- begin e4 v4"
    _, lines = drain(filled, memory(lost_attempt=4), replica(), epochs=new, **partners)
    assert lines[0] == "memoryd.a <- begin e4 v4 without gradients of memoryd.a, memoryd.b", (
        "what was filled is at the commit, and needs nothing"
    )


def test_an_optimizerd_that_was_in_the_last_epoch_is_not_new() -> None:
    """Its Hello came before, and names no epoch."""
    contributors = {"memoryd.b": frozenset({"memoryd.a"})}
    driver = Driver(replace(partner_rules(), contributors=contributors))
    driver.begin()
    say_mirrored(driver, "mirrord.a")
    driver.run_attempt()
    say_mirrored(driver, "mirrord.b")
    assert driver.machine.mirror.version == 1
    driver.close("memoryd.a")
    driver.fenced("memoryd.a", driver.pids["memoryd.a"])
    driver.join("memoryd.a", nonce=1)
    incarnation = driver.machine.mirror.record.incarnation  # type: ignore[union-attr]
    reports = {
        "memoryd.a": {"memory": EMPTY},
        "memoryd.b": {"memory": memory(1, incarnation)},
        "mirrord.b": {"replica": replica(1, incarnation=incarnation)},
    }
    lines: list[str] = []
    for member in driver.rules.members:
        if member.role.value != "node":
            fields = reports.get(member.name, {})
            lines = driver.say(member.name, drained=pb.Drained(epoch=2, **fields))
    assert lines == ["mirrord.b <- settle e2 v1"]


def hello(name: str, pid: int, machine: str, nonce: int = 0) -> pb.Hello:
    return pb.Hello(run_id=RUN_ID, member=name, pid=pid, machine=machine, nonce=nonce)


def joins(driver: Driver, stream: int, message: pb.Hello) -> bool:
    driver.feed(Joined(stream=stream, hello=message))
    return driver.machine.members.name_of(stream) == message.member


def test_a_spare_on_another_machine_waits_for_the_lease_of_the_one_before() -> None:
    driver = Driver(partner_rules())
    assert joins(driver, 50, hello("node.b", 7, "first"))
    driver.feed(StreamClosed(stream=50))
    assert not joins(driver, 51, hello("node.b", 7, "second"))
    driver.wait(14.5)
    assert not joins(driver, 52, hello("node.b", 7, "second"))
    driver.wait(1.0)
    assert joins(driver, 53, hello("node.b", 7, "second")), "1.5 times the heartbeat's timeout"


def test_on_the_same_machine_the_lock_says_that_the_one_before_is_dead() -> None:
    driver = Driver(partner_rules())
    assert joins(driver, 50, hello("node.b", 7, "first"))
    driver.feed(StreamClosed(stream=50))
    assert joins(driver, 51, hello("node.b", 8, "first"))


def test_without_partners_nobody_waits() -> None:
    driver = Driver(make_rules(make_config(cluster={"workers": 1, "nodes": NODES})))
    assert joins(driver, 50, hello("node.b", 7, "first"))
    driver.feed(StreamClosed(stream=50))
    assert joins(driver, 51, hello("node.b", 7, "second"))
