"""A failed network is no reason to kill a process: a process that returns is drained."""

from __future__ import annotations

from penstock.protocol.generated import scheduler_pb2 as pb
from tests.scheduler.conftest import Driver, facts_at, make_config, make_rules

NODES = [{"name": "a", "host": "10.0.0.1"}, {"name": "b", "host": "10.0.0.2"}]
THERE = ("memoryd.b", "node.b", "optimizerd.b", "worker.1")
DRAINED = ["memoryd.a", "memoryd.b", "optimizerd.a", "optimizerd.b", "worker.0", "worker.1"]


def two_machines() -> Driver:
    """A live epoch 4 of a node each on two machines; the scheduler is on the first."""
    cluster = {"workers": 1, "nodes": NODES, "heartbeat_timeout_s": 10.0}
    driver = Driver(make_rules(make_config(cluster=cluster)), facts_at(4))
    driver.begin()
    return driver


def fences(lines: list[str]) -> list[str]:
    return [line for line in lines if "fence" in line]


def test_whoever_comes_back_after_a_partition_is_drained_and_not_killed() -> None:
    driver = two_machines()
    pids = dict(driver.pids)
    lines = driver.wait(60.0, silent=THERE)
    assert sorted(lines) == sorted(f"disconnect stream {driver.streams[m]}" for m in THERE)
    assert driver.machine.members.missing == ("node.b", "memoryd.b", "optimizerd.b", "worker.1")
    for name in THERE[:-1]:
        assert driver.join(name, pid=pids[name]) == []
    first, *drains = driver.join("worker.1", pid=pids["worker.1"])
    assert first.startswith("journal epoch 5")
    assert sorted(drains) == [f"{name} <- drain e5" for name in DRAINED]


def test_a_node_that_is_back_first_gives_its_members_time_to_follow() -> None:
    driver = two_machines()
    pids = dict(driver.pids)
    assert driver.wait(9.5, silent=THERE) == []
    assert driver.join("node.b", pid=pids["node.b"])[0].startswith("disconnect")
    assert driver.wait(5.0, silent=("worker.1",)) == []
    assert fences(driver.wait(6.0, silent=("worker.1",))) == [
        f"node.b <- fence worker.1 {pids['worker.1']}"
    ]


def test_broken_streams_of_another_machine_may_be_the_networks() -> None:
    driver = two_machines()
    pids = dict(driver.pids)
    for name in THERE:
        assert fences(driver.close(name)) == []
    assert fences(driver.wait(30.0)) == [], "the node is away, too: nobody could be told"
    assert driver.join("node.b", pid=pids["node.b"]) == []
    for name in ("memoryd.b", "optimizerd.b"):
        assert driver.join(name, pid=pids[name]) == []
    assert fences(driver.wait(9.0)) == []
    assert fences(driver.wait(2.0)) == [f"node.b <- fence worker.1 {pids['worker.1']}"]


def test_a_silent_process_beside_a_node_that_is_heard_is_killed() -> None:
    driver = two_machines()
    killed = fences(driver.wait(11.0, silent=("worker.1",)))
    assert killed == [f"node.b <- fence worker.1 {driver.pids['worker.1']}"]


def test_a_lost_connection_begins_another_epoch_with_the_same_processes() -> None:
    driver = two_machines()
    old = pb.CutOff(epoch=3, loss="the connection to worker 1 was lost")
    assert driver.say("worker.0", cut_off=old) == []
    now = pb.CutOff(epoch=4, loss="the connection to worker 1 was lost")
    assert driver.say("worker.0", cut_off=now)[0].startswith("journal epoch 5")
    assert driver.say("worker.1", cut_off=now) == [], "of the same cut, from the other side"
    assert driver.status.message == "worker.0: the connection to worker 1 was lost"
    driver.begin()
    assert driver.machine.live


def test_a_node_hears_who_is_missing_once_a_minute() -> None:
    """The id of a process that hangs before it could join is unknown here."""
    driver = two_machines()
    pid = driver.pids["worker.1"]
    assert fences(driver.close("worker.1")) == []
    assert fences(driver.wait(11.0)) == [f"node.b <- fence worker.1 {pid}"]
    driver.fenced("worker.1", pid, node="node.b")
    assert driver.wait(46.0) == []
    assert driver.wait(4.0) == ["node.b <- missing worker.1"]
    assert driver.wait(57.0) == []
    assert driver.wait(4.0) == ["node.b <- missing worker.1"]
    assert driver.join("worker.1")[0].startswith("journal epoch 5")
    assert driver.wait(100.0) == []


def test_nobody_is_told_who_is_missing_where_the_node_is_away() -> None:
    driver = two_machines()
    for name in THERE:
        driver.close(name)
    assert driver.wait(200.0) == []
