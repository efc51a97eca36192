"""Who stands still for too long, and who was only not looked at."""

from __future__ import annotations

from penstock.host.stopping import StoppedDetector

A, NOBODY = frozenset(("a",)), frozenset[str]()


def test_whoever_stands_still_too_long_is_told_once() -> None:
    still = StoppedDetector(2.0)
    looks = [still.look(A, float(second)) for second in range(6)]
    assert looks == [{}, {}, {"a": 2.0}, {}, {}, {"a": 2.0}]


def test_the_next_look_is_due_when_the_time_of_the_first_is_over() -> None:
    """A look at that very instant is not too early, though the difference is rounded."""
    still, began_s = StoppedDetector(2.0), 0.1 + 2**20
    assert still.next_s is None
    assert still.look(A, began_s) == {} and still.next_s == began_s + 2.0
    assert still.look(A | {"b"}, began_s + 1.0) == {} and still.next_s == began_s + 2.0
    assert still.look(A | {"b"}, still.next_s).keys() == A
    assert still.next_s == began_s + 3.0
    assert still.look(NOBODY, began_s + 2.5) == {} and still.next_s is None


def test_whoever_goes_on_has_all_its_time_again() -> None:
    still = StoppedDetector(10.0)
    for second in range(40):
        assert still.look(NOBODY if second % 10 == 9 else A, float(second)) == {}


def test_after_a_jump_time_starts_anew() -> None:
    still = StoppedDetector(10.0)
    for second in range(9):
        assert still.look(A, float(second)) == {}
    assert still.look(A, 1008.0) == {} and still.jump_s == 1000.0
    for second in range(1009, 1018):
        assert still.look(A, float(second)) == {} and still.jump_s == 0.0
    assert still.look(A, 1018.0) == {"a": 10.0}
