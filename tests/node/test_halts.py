"""Which children have stood still for too long."""

from __future__ import annotations

from penstock.daemons.node.halts import Halts


def test_only_one_that_stands_still_all_the_time_is_overdue() -> None:
    halts = Halts(timeout_s=2.0)
    both = frozenset({"worker.0", "schedulerd"})
    assert halts.look(both, 10.0) == ()
    assert halts.look(frozenset({"schedulerd"}), 11.0) == (), "worker.0 was woken"
    assert halts.look(both, 12.5) == ("schedulerd",)
    assert halts.look(both, 13.2) == ("schedulerd",)
    assert halts.look(both, 14.6) == ("schedulerd", "worker.0")
    assert halts.look(frozenset(), 15.0) == ()
