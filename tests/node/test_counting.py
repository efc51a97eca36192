"""What a node counts of its children: restarts by cause, fences."""

from __future__ import annotations

from penstock.daemons.node.effects import NodeMetrics


def counted(metrics: NodeMetrics, member: str) -> dict[str, float]:
    """Restarts of a member by cause, those that happened."""
    found = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "penstock_restarts_total" and sample.labels["member"] == member:
                found[sample.labels["cause"]] = sample.value
    assert found.keys() == {"exited", "killed", "fenced", "hung"}, "all begin at 0"
    return {cause: value for cause, value in found.items() if value}


def test_restarts_are_counted_by_what_ended_the_process_before() -> None:
    metrics = NodeMetrics(("worker.0", "schedulerd"))
    metrics.started("worker.0")
    assert counted(metrics, "worker.0") == {}, "a first start is none"
    metrics.exited("worker.0", -9)
    metrics.started("worker.0")
    metrics.exited("worker.0", 1)
    metrics.started("worker.0")
    metrics.killed("worker.0")  # it stood still
    metrics.exited("worker.0", -9)
    metrics.started("worker.0")
    metrics.killed("worker.0")  # by order of the scheduler
    metrics.exited("worker.0", -9)
    metrics.fenced("worker.0")
    metrics.started("worker.0")
    assert counted(metrics, "worker.0") == dict.fromkeys(("killed", "exited", "hung", "fenced"), 1)
    assert counted(metrics, "schedulerd") == {}
    fences = metrics.registry.get_sample_value
    assert fences("penstock_fences_total", {"member": "worker.0"}) == 1
    assert fences("penstock_fences_total", {"member": "schedulerd"}) == 0


def test_a_fence_of_one_that_was_dead_already_changes_no_cause() -> None:
    metrics = NodeMetrics(("worker.0",))
    metrics.started("worker.0")
    metrics.exited("worker.0", -11)
    metrics.fenced("worker.0")
    metrics.started("worker.0")
    assert counted(metrics, "worker.0") == {"killed": 1}
