"""Trace files: written by several processes, killed ones among them, and merged."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.host.errors import ConfigError
from penstock.protocol.run import trace
from penstock.protocol.run.trace import TraceEvent, TraceLane, TraceLog, TraceOrigin
from penstock.protocol.run.trace_reading import (
    MemberTrace,
    RunTrace,
    TraceFollower,
    read_traces,
)


def event(attempt: int, start_s: float = 1.0, *, waited_s: float = 0.0) -> TraceEvent:
    return TraceEvent(
        lane=TraceLane.COMPUTE,
        text="F 3 0 keep=all",
        attempt=attempt,
        start_s=start_s,
        end_s=start_s + 0.5,
        waited_s=waited_s,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text("{}")
    return tmp_path


def write(run: Path, member: str, *events: TraceEvent) -> Path:
    log = TraceLog.of_run(run, member, every=1)
    for each in events:
        log.add(each)
    log.flush()
    return run / "trace" / f"{member}.jsonl"


def test_lines_are_arrays_behind_one_that_says_whose_clock_it_is(run: Path) -> None:
    path = write(run, "worker.0", event(7), event(7, 2.25, waited_s=0.125))
    first, *lines = map(json.loads, path.read_text().splitlines())
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert first[:3] == ["trace", 1, "worker.0"]
    assert first[4] == boot_id
    assert abs(first[5] - trace.now_s()) < 60.0
    assert lines == [
        ["compute", "F 3 0 keep=all", "train", 7, 1.0, 1.5],
        ["compute", "F 3 0 keep=all", "train", 7, 2.25, 2.75, 0.125],
    ]


def test_events_come_back_as_they_were(run: Path) -> None:
    events = (event(7), event(8, waited_s=0.25), replace(event(9), phase="eval"))
    write(run, "worker.0", *events)
    (life,) = read_traces(run).members
    assert (life.member, life.events) == ("worker.0", events)


def test_a_line_that_a_kill_cut_short_is_skipped_and_the_next_life_is_read(run: Path) -> None:
    path = write(run, "worker.0", event(1), event(2))
    path.write_bytes(path.read_bytes()[:-10])
    write(run, "worker.0", event(3))
    found = read_traces(run)
    assert [[e.attempt for e in life.events] for life in found.members] == [[1], [3]]
    assert found.skipped_lines == 1


@pytest.mark.parametrize(
    "damage",
    [b"\x00\xff{", b"[]", b'{"a": 1}', b'["compute", "F 0 0"]', b'["nonsense",1,2,3,4,5]', b"7"],
)
def test_damaged_lines_are_counted(run: Path, damage: bytes) -> None:
    path = write(run, "worker.0", event(1))
    with path.open("ab") as file:
        file.write(damage + b"\n")
    found = read_traces(run)
    assert ([len(life.events) for life in found.members], found.skipped_lines) == ([1], 1)


def test_machines_are_moved_by_the_difference_of_their_clocks(run: Path) -> None:
    """The same moment: 100 s after boot here, 700 s after boot there."""
    for member, boot_id, monotonic_s in (("a", "here", 100.0), ("b", "there", 700.0)):
        origin = TraceOrigin(
            member=member, pid=1, boot_id=boot_id, monotonic_s=monotonic_s, realtime_s=5000.0
        )
        text = origin.to_line() + event(1, monotonic_s + 2.0).to_line()
        (run / "trace").mkdir(exist_ok=True)
        (run / "trace" / f"{member}.jsonl").write_text(text)
    wanted = (event(1, 102.0),)
    assert read_traces(run) == RunTrace(
        members=(
            MemberTrace(member="a", pid=1, events=wanted),
            MemberTrace(member="b", pid=1, events=wanted),
        ),
        skipped_lines=0,
        machines=2,
    )


def test_a_later_life_on_one_machine_is_not_moved(run: Path) -> None:
    """The wall clock was set between the two; the monotonic clock was not."""
    path = write(run, "a", event(1, 10.0))
    origin = TraceOrigin.here("a")
    later = replace(origin, realtime_s=origin.realtime_s + 3600.0)
    with path.open("a") as file:
        file.write(later.to_line() + event(2, 20.0).to_line())
    starts = [e.start_s for life in read_traces(run).members for e in life.events]
    assert starts == [10.0, 20.0]


def test_nothing_is_kept_unless_enabled(run: Path) -> None:
    log = TraceLog.of_run(run, "worker.0", every=0)
    log.add(event(1))
    log.flush()
    assert not (run / "trace").exists()


def test_of_so_many_attempts_one_is_kept_and_no_evaluation(run: Path) -> None:
    log = TraceLog.of_run(run, "worker.0", every=3)
    assert [attempt for attempt in range(1, 10) if log.keeps(attempt)] == [3, 6, 9]
    assert not log.keeps(3, "eval") and not log.is_complete
    whole = TraceLog.of_run(run, "worker.0", every=1)
    assert whole.keeps(7) and whole.keeps(7, "eval") and whole.is_complete


def test_what_is_added_is_read_once_and_what_nobody_wants_is_not(run: Path) -> None:
    follower = TraceFollower(run, lambda member, attempt: attempt % 2 == 0)
    assert follower.look() == []
    path = write(run, "worker.0", event(1), event(2), replace(event(4), phase="eval"))
    (life,) = follower.look()
    assert (life.origin.member, life.events) == ("worker.0", (event(2),))
    line = replace(event(6), text='odd "," \\ text').to_line()
    with path.open("a") as file:
        file.write(line[:30])
    assert follower.look() == []
    with path.open("a") as file:
        file.write(line[30:] + "nonsense\n" + '["a","b",3,4]\n')
    (life,) = follower.look()
    assert [(e.attempt, e.text) for e in life.events] == [(6, 'odd "," \\ text')]
    assert follower.skipped_lines == 2
    path.rename(path.with_suffix(".old.jsonl"))
    write(run, "worker.0", event(8))
    assert [life.events for life in follower.look()] == [(event(8),)]


def test_memory_is_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_EVENTS", 10)
    log = TraceLog.of_run(run, "worker.0", every=1)
    for attempt in range(25):
        log.add(event(attempt))
    path = run / "trace" / "worker.0.jsonl"
    assert len(path.read_text().splitlines()) == 1 + 22, "two times eleven, three are kept"
    log.flush()
    (life,) = read_traces(run).members
    assert [e.attempt for e in life.events] == list(range(25))


def test_disk_is_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_FILE_BYTES", 300)
    log = TraceLog.of_run(run, "worker.0", every=1)
    for attempt in range(40):
        log.add(event(attempt))
        log.flush()
    assert sorted(p.name for p in (run / "trace").iterdir()) == [
        "worker.0.jsonl",
        "worker.0.old.jsonl",
    ]
    assert all(p.stat().st_size < 500 for p in (run / "trace").iterdir())
    attempts = [e.attempt for life in read_traces(run).members for e in life.events]
    assert attempts == list(range(attempts[0], 40)), "the newest, in order"


def test_threads_may_add_while_another_writes(run: Path) -> None:
    log = TraceLog.of_run(run, "worker.0", every=1)

    def add() -> None:
        for attempt in range(2000):
            log.add(event(attempt))

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        log.flush()
    log.flush()
    found = read_traces(run)
    assert sum(len(life.events) for life in found.members) == 6000
    assert found.skipped_lines == 0


def test_a_full_disk_ends_the_trace_and_not_the_run(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run / "trace").write_text("a file where the directory should be")
    log = TraceLog.of_run(run, "worker.0", every=1)
    log.add(event(1))
    log.flush()
    assert not log.enabled
    assert "no trace from here on" in caplog.text


def test_no_run_and_no_trace_are_errors_that_help(tmp_path: Path, run: Path) -> None:
    with pytest.raises(ConfigError, match=r"elsewhere: no run directory \(it has no run.json\)"):
        read_traces(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"no trace; observability\.sample_every says"):
        read_traces(run)
