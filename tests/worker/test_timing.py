"""Times of instructions: stamps while they are issued, seconds when the attempt is over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.protocol.plan.instructions import Opcode, parse_instruction
from penstock.protocol.run.trace import TraceLane, TraceLog
from penstock.protocol.run.trace_reading import read_traces
from penstock.workers.platforms.cuda.clock import EventClock
from penstock.workers.telemetry.account import IdleCause, TimeAccount
from penstock.workers.telemetry.timing import Tally, Timeline
from penstock.workers.telemetry.trace import TraceRing


class LateDevice:
    """Stamps are numbered; nobody knows before :meth:`seconds` when they were passed."""

    def __init__(self, *passed_s: float) -> None:
        self._passed_s = passed_s
        self._count = 0

    def start_clock(self) -> None:
        """Nothing to do."""

    def stamp(self) -> str:
        self._count += 1
        return f"stamp {self._count - 1}"

    passed_count = 0

    def passed(self, stamp: str) -> bool:
        return int(stamp.split()[1]) < self.passed_count

    def seconds(self, stamps: Sequence[str]) -> list[float]:
        return [self._passed_s[int(stamp.split()[1])] for stamp in stamps]


@pytest.fixture
def ring(tmp_path: Path) -> TraceRing:
    (tmp_path / "run.json").write_text("{}")
    return TraceRing(TraceLog.of_run(tmp_path, "worker.0", 1))


def account_since(start_s: float) -> TimeAccount:
    account = TimeAccount(clock=lambda: start_s)
    account.turn(IdleCause.SCHEDULER)
    account.turn(IdleCause.OVERHEAD)
    return account


def told(account: TimeAccount) -> dict[str, float]:
    return {what: seconds for what, seconds in account.seconds(None).items() if seconds}


def test_stamps_become_seconds_when_the_attempt_is_over(ring: TraceRing, tmp_path: Path) -> None:
    forward, offload = parse_instruction("F 0 0 keep=all"), parse_instruction("OG 0")
    device = LateDevice(1.0, 1.25, 3.0, 3.0, 3.5, 0.5, 0.75)
    account, tally = account_since(0.5), Tally()
    timeline = Timeline(cast(Any, device), ring, account, "train", 7)
    timeline.begin()
    timeline.inputs_are_here(IdleCause.ACTIVATIONS)
    timeline.end(forward, tally)
    timeline.begin()
    timeline.end(offload, tally)
    timeline.loaded(TraceLane.FETCH, "FW 0 phase=forward", device.stamp(), device.stamp())
    assert (ring.last(2), tally) == ((forward, offload), Tally())
    timeline.resolve(tally)
    timeline.resolve(tally)  # of nothing
    assert told(account) == {"overhead": 0.5, "activations": 0.25, "forward": 1.75}
    assert (tally.counts[Opcode.FORWARD], tally.busy_s) == (1, 1.75)
    ring.flush()
    events = [
        (e.lane, e.attempt, e.text, e.start_s, e.end_s, e.waited_s)
        for e in read_traces(tmp_path).members[0].events
    ]
    assert sorted(events) == [
        (TraceLane.COMPUTE, 7, "F 0 0 keep=all", 1.0, 3.0, 0.25),
        (TraceLane.FETCH, 7, "FW 0 phase=forward", 0.5, 0.75, 0.0),
        (TraceLane.ISSUE, 7, "OG 0", 3.0, 3.5, 0.0),
    ]


def test_a_device_may_know_by_itself_when_it_computed(ring: TraceRing) -> None:
    """On its clock it may have begun before Python got round to the instruction."""
    account, tally = account_since(0.0), Tally()
    device = LateDevice(1.0, 0.5, 3.0)
    timeline = Timeline(cast(Any, device), ring, account, "eval", 1)
    timeline.begin()
    timeline.ran("stamp 1", "stamp 2", IdleCause.WEIGHTS)
    timeline.end(parse_instruction("B 0 0"), tally)
    timeline.resolve(tally)
    assert tally.busy_s == 2.5
    assert told(account) == {"weights": 0.5, "evaluate": 2.5}


def test_a_long_attempt_is_accounted_for_while_it_lasts(
    ring: TraceRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, tally, now = account_since(0.0), Tally(), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    device = LateDevice(0.0, 4.0, 4.0, 5.0, 5.0, 6.0)
    timeline = Timeline(cast(Any, device), ring, account, "train", 1)
    for now_s in (1.0, 3.0, 4.0):  # by the second, the device has come to the end of the first
        timeline.begin()
        now[0], device.passed_count = now_s, 2
        timeline.end(parse_instruction("F 0 0 keep=all"), tally)
    assert told(account) == {"forward": 4.0}
    timeline.resolve(tally)
    assert told(account) == {"forward": 6.0}


def test_a_wait_that_is_broken_off_counts(ring: TraceRing) -> None:
    account, tally = account_since(0.0), Tally()
    timeline = Timeline(cast(Any, LateDevice(0.0, 1.0, 1.0)), ring, account, "train", 1)
    timeline.begin()
    timeline.end(parse_instruction("F 0 0 keep=all"), tally)
    timeline.begin()
    timeline.waited_in_vain(IdleCause.GRADIENTS, 2.0)
    timeline.resolve(tally)
    account.computed("update", 3.5, 3.5)
    assert told(account) == {"forward": 1.0, "gradients": 2.0, "overhead": 0.5}


@dataclass
class Stream:
    """How far a stream has come, in seconds of the device."""

    now_s: float = 100.0

    def synchronize(self) -> None:
        """Done."""


class Event:
    """A timing event of torch's, but for the device."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.at_s = 0.0

    def record(self, stream: Stream) -> None:
        self.at_s = stream.now_s

    def synchronize(self) -> None:
        """Done."""

    def elapsed_time(self, end: Event) -> float:
        return (end.at_s - self.at_s) * 1e3


def test_events_are_read_against_one_that_the_host_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    stream: Any = Stream()
    gpu: Any = SimpleNamespace(event=lambda timing: Event())
    device_clock = EventClock(gpu)
    for attempt in range(3):
        device_clock.start(stream)
        first = device_clock.stamp(stream)
        stream.now_s += 0.5
        second = device_clock.stamp(stream)
        found = device_clock.seconds([first, second, 3.25, first])
        assert found == pytest.approx([7.0, 7.5, 3.25, 7.0]), attempt
    assert Event.made == 3, "the zero, and two that are used again"
