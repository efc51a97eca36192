"""The loop of all daemons, and the story it tells when a machine contradicts itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from penstock.daemons.kit.events import (
    BeginAsked,
    DrainAsked,
    Exit,
    RefusedByScheduler,
    SendDrained,
    Tick,
)
from penstock.daemons.kit.loop import Loop
from penstock.daemons.kit.story import MAX_CHARACTERS, MAX_STIMULI, FlightRecorder
from penstock.daemons.memory.machine.events import (
    Effect,
    Event,
    JobCancelled,
    RestoreAsked,
    Restored,
    StartRestore,
)
from penstock.daemons.memory.machine.machine import MemoryMachine
from penstock.host.errors import CapacityError

RESTORE = RestoreAsked(epoch=1, incarnation=4, source="", version=0)


class InstantJobs:
    """An effect runner of a memoryd with restores that end at once."""

    def __init__(self, answers: Sequence[Event] = (Restored(),)) -> None:
        self.exit: Exit | None = None
        self.done: list[Effect] = []
        self._answers = answers

    def carry_out(self, effects: Sequence[Effect]) -> Sequence[Event]:
        """Remember effects; the answers of a job are events."""
        self.done += effects
        for effect in effects:
            if isinstance(effect, Exit):
                self.exit = effect
        starts = any(isinstance(effect, StartRestore) for effect in effects)
        return self._answers if starts else ()


def looped(hands: InstantJobs) -> Loop:
    return Loop(MemoryMachine(), hands, clock=iter(range(100)).__next__)


def test_a_contradiction_writes_to_the_log_what_led_to_it(caplog: pytest.LogCaptureFixture) -> None:
    """A job that answers twice: the second answer belongs to none."""
    loop = looped(InstantJobs(answers=(Restored(), JobCancelled())))
    loop.feed(DrainAsked(epoch=1))
    with caplog.at_level(logging.ERROR), pytest.raises(AssertionError, match="never started"):
        loop.feed(RESTORE)
    first, *story = caplog.messages
    assert first.startswith("AssertionError('a job answered that was never started")
    assert story == [
        "#1 at 0.000 s: DrainAsked(epoch=1, saving=0) => SendDrained(epoch=1)",
        "#2 at 1.000 s: RestoreAsked(epoch=1, incarnation=4, source='', version=0, replica=None)"
        " => StartRestore(incarnation=4, source='', version=0, replica=None)",
        "#3 <- #2 at 2.000 s: Restored() => SendRestored(epoch=1, incarnation=4, damaged='')",
        "#4 <- #2 at 3.000 s: JobCancelled() => nothing",
    ]


def test_a_broken_invariant_tells_the_story_too(caplog: pytest.LogCaptureFixture) -> None:
    machine = MemoryMachine()
    loop = Loop(machine, InstantJobs())
    machine.order = RESTORE  # while no job runs
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="phase joining"):
        loop.feed(BeginAsked(epoch=7))
    assert "BeginAsked(epoch=7)" in caplog.messages[-1]


def test_an_error_for_the_user_is_no_contradiction(caplog: pytest.LogCaptureFixture) -> None:
    class Full(InstantJobs):
        def carry_out(self, effects: Sequence[Effect]) -> Sequence[Event]:
            raise CapacityError("no room")

    with pytest.raises(CapacityError):
        looped(Full()).feed(DrainAsked(epoch=1))
    assert not caplog.messages


def test_nothing_is_fed_after_the_exit() -> None:
    hands = InstantJobs(answers=(RefusedByScheduler(reason="fenced"), Restored()))
    loop = looped(hands)
    loop.feed(DrainAsked(epoch=1))
    loop.feed(RESTORE)  # the refusal waits for the job's end
    assert loop.exit == Exit(code=4, reason="fenced")
    loop.feed(DrainAsked(epoch=2))
    assert hands.done[-1] == loop.exit
    assert [event.cause for event in loop.story.stimuli] == [0, 0, 2, 2]


def test_a_story_is_bounded_and_leaves_out_routine_without_effects() -> None:
    story = FlightRecorder(routine=lambda event: isinstance(event, Tick))
    drained = [SendDrained(epoch=1)]
    for _ in range(MAX_STIMULI + 7):
        story.add(Tick(), [], cause=0, at_s=0.0)
        story.add(DrainAsked(epoch=1), drained, cause=0, at_s=0.0)
    story.add(Tick(), drained, cause=0, at_s=0.0)
    kept = story.stimuli
    assert len(kept) == MAX_STIMULI
    assert [kept[-1].event, kept[-2].event] == [Tick(), DrainAsked(epoch=1)]
    assert kept[-1].number == 2 * (MAX_STIMULI + 7) + 1


def test_long_values_are_cut_and_abridged_ones_replaced() -> None:
    story = FlightRecorder(abridged=lambda value: "short" if isinstance(value, Tick) else value)
    story.add(Tick(), [RefusedByScheduler(reason="x" * 1000)], cause=0, at_s=1.5)
    (line,) = story.tell()
    assert line.startswith("#1 at 1.500 s: short => RefusedByScheduler(reason='xxx")
    assert len(line) < MAX_CHARACTERS + 40
