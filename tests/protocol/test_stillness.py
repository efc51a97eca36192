"""Who stands still for too long, and who was only not looked at."""

from __future__ import annotations

from penstock.protocol.run.stopping import Stillness

A, NOBODY = frozenset(("a",)), frozenset[str]()


def test_whoever_stands_still_too_long_is_told_once() -> None:
    still = Stillness(2.0)
    looks = [still.look(A, float(second)) for second in range(6)]
    assert looks == [{}, {}, {}, {"a": 3.0}, {}, {}]


def test_whoever_goes_on_has_all_its_time_again() -> None:
    still = Stillness(10.0)
    for second in range(40):
        assert still.look(NOBODY if second % 10 == 9 else A, float(second)) == {}


def test_after_a_jump_time_starts_anew() -> None:
    still = Stillness(10.0)
    for second in range(9):
        assert still.look(A, float(second)) == {}
    assert still.look(A, 1008.0) == {} and still.jump_s == 1000.0
    for second in range(1009, 1019):
        assert still.look(A, float(second)) == {} and still.jump_s == 0.0
    assert still.look(A, 1019.0) == {"a": 11.0}
