"""``penstock chaos`` without runs: what is drawn, cut, filled, accepted and shown."""

from __future__ import annotations

import os
import random
import select
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.chaos.connections import close, connections_of, deafen
from penstock.chaos.disks import Disk, may_mount
from penstock.chaos.faults import (
    HELPERS,
    Action,
    FaultKind,
    Injection,
    Moment,
    Targets,
    draw,
    draw_last,
)
from penstock.chaos.processes import members, survivors, wait_until_stopped
from penstock.chaos.table import percentile, rows_of, tables_of
from penstock.client.main import app

NAMES = ("train", "node.a", "schedulerd", "memoryd.a", "optimizerd.a", "worker.0", "metricsd.a")
CAST = Targets(names=NAMES, heartbeat_timeout_s=2.0, gap_steps=3, evaluates=True, saves=True)


def test_a_seed_draws_the_same_faults_and_all_kinds_and_moments() -> None:
    def drawn(seed: str) -> list[object]:
        source = random.Random(seed)
        return [draw(source, CAST, frozenset(FaultKind)) for _ in range(1500)]

    faults = [
        draw(source, CAST, frozenset(FaultKind)) for source in [random.Random("a")] for _ in "ab"
    ]
    assert drawn("a")[:2] == faults
    assert drawn("a") == drawn("a") != drawn("b")
    source = random.Random("c")
    many = [draw(source, CAST, frozenset(FaultKind)) for _ in range(1500)]
    assert {fault.kind for fault in many} == set(FaultKind)
    assert {fault.moment for fault in many} == set(Moment) - {Moment.ENDING}
    named = {name.partition(".")[0] for name in NAMES}
    killed = Counter(
        fault.injections[0].target.partition(".")[0]
        for fault in many
        if fault.kind is FaultKind.KILL
    )
    assert set(killed) == named
    assert killed["schedulerd"] > killed["metricsd"]


def test_what_is_drawn_can_be_carried_out() -> None:
    source = random.Random(1)
    for _ in range(1500):
        fault = draw(source, CAST, frozenset(FaultKind))
        for injection in fault.injections:
            if injection.target == "train":
                # Nobody would wake or replace it.
                assert injection.action in (Action.KILL, Action.PAUSE, Action.TERM, Action.AGAIN)
        if fault.kind in (FaultKind.CLOSED, FaultKind.HALF_OPEN):
            assert not fault.targets & HELPERS, "they have no connections most of the time"
        if fault.kind is FaultKind.SEVERAL:
            targets = [injection.target for injection in fault.injections]
            assert 2 <= len(targets) == len(set(targets)) <= 4
        if fault.kind is FaultKind.RECOVERY:
            assert not fault.targets <= HELPERS
            moments = [injection.after_s for injection in fault.injections]
            assert moments == sorted(moments) and 2 <= len(moments) <= 6
        if fault.kind is FaultKind.LOST:
            first, *more = fault.injections
            assert (first.target, first.action) == ("node.a", Action.LOSE) and len(more) <= 3
            assert Action.LOSE not in {injection.action for injection in more}


def test_only_what_a_run_does_is_waited_for() -> None:
    plain = Targets(names=NAMES, heartbeat_timeout_s=2.0, gap_steps=0, evaluates=False, saves=False)
    source = random.Random(2)
    faults = [draw(source, plain, frozenset((FaultKind.KILL,))) for _ in range(300)]
    assert {fault.moment for fault in faults} == {Moment.STEP, Moment.START}
    assert {fault.gap_steps for fault in faults} == {0}


def test_of_few_processes_only_possible_kinds_are_drawn() -> None:
    def cast(*names: str) -> Targets:
        return Targets(
            names=names, heartbeat_timeout_s=2.0, gap_steps=0, evaluates=True, saves=True
        )

    every = frozenset(FaultKind)
    missing = {FaultKind.RECOVERY, FaultKind.SEVERAL, FaultKind.SWEEP, FaultKind.LOST}
    assert cast("worker.0", "worker.1").possible(every) == every - missing
    assert FaultKind.STOP not in cast("train").possible(every)
    assert FaultKind.CLOSED not in cast("train", "metricsd.a").possible(every)
    two = cast("memoryd.a", "optimizerd.a")
    assert two.possible(every) == every - {FaultKind.LOST}
    assert FaultKind.LOST in cast("train", "node.a").possible(every)
    source = random.Random(4)
    faults = [draw(source, two, two.possible(every)) for _ in range(500)]
    own = {"memoryd", "optimizerd"}
    for fault in faults:
        assert fault.moment is not Moment.START
        assert fault.targets <= own | {"train", "disk", "shm"}


@pytest.mark.parametrize(
    ("target", "action", "breaks"),
    [
        ("worker.0", Action.KILL, True),
        ("memoryd.a", Action.STOP, True),
        ("train", Action.TERM, True),
        ("node.b", Action.LOSE, True),
        ("schedulerd", Action.PAUSE, False),
        ("metricsd.a", Action.KILL, False),
        ("preload-torch.a", Action.STOP, False),
        ("worker.0", Action.CLOSE, False),
        ("disk", Action.FILL, False),
    ],
)
def test_what_must_lead_to_another_epoch(target: str, action: Action, breaks: bool) -> None:
    assert Injection(target=target, action=action).breaks_epoch is breaks


def test_a_last_fault_is_one_that_was_asked_for() -> None:
    source = random.Random(3)
    drawn = [
        draw_last(source, CAST, frozenset((FaultKind.STOP, FaultKind.DISK))) for _ in range(50)
    ]
    assert {fault.kind for fault in drawn if fault is not None} == {FaultKind.STOP}
    assert None in drawn
    assert draw_last(source, CAST, frozenset((FaultKind.DISK,))) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kinds", "kill,flood"], "--kinds kill,flood: accepted are kill, several"),
        (["--out", "."], "--out {here}: exists"),
        (["--processes", "walker"], "--processes walker: this run has memoryd, metricsd, node"),
    ],
)
def test_bad_options_are_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, ["init"])
    result = CliRunner().invoke(app, ["chaos", "tiny.yaml", *words])
    assert result.exit_code == 2
    assert message.format(here=tmp_path) in result.stderr


LISTENER = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    peer, _ = server.accept()
    while data := peer.recv(100):
        peer.sendall(data)
print("closed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listener() -> Iterator[subprocess.Popen[str]]:
    """A process that sends back what it gets over one connection, and says that it was closed."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def connected(listener: subprocess.Popen[str]) -> socket.socket:
    """A connection to it over which something went already."""
    assert listener.stdout is not None
    connection = socket.create_connection(("127.0.0.1", int(listener.stdout.readline())))
    connection.sendall(b"ping")
    assert connection.recv(100) == b"ping"
    return connection


def heard(connection: socket.socket, within_s: float) -> bool:
    """Whether anything, also an end, comes."""
    return bool(select.select([connection], [], [], within_s)[0])


def test_a_connection_of_another_process_is_closed(listener: subprocess.Popen[str]) -> None:
    with connected(listener) as connection:
        [found] = connections_of(listener.pid, tcp_only=True)
        close(found)
        assert connection.recv(100) == b""
    assert listener.stdout is not None and listener.stdout.readline() == "closed\n"


@pytest.mark.parametrize("one_way", [True, False])
def test_a_connection_falls_silent_and_nobody_is_told(
    listener: subprocess.Popen[str], one_way: bool
) -> None:
    """Deaf in one way: what the other process sends still comes."""
    with connected(listener) as connection:
        [found] = connections_of(listener.pid, tcp_only=True)
        deafen(found, [listener.pid, os.getpid()], one_way=one_way)
        connection.sendall(b"ping")
        assert not heard(connection, 0.3)
        assert connections_of(listener.pid, tcp_only=True) == [found], "it is as good as it was"


def test_a_disk_is_filled_and_cleared(tmp_path: Path) -> None:
    if not may_mount():
        pytest.skip("needs root")
    script = (
        "from pathlib import Path\n"
        "from penstock.chaos.disks import own_disks\n"
        f"disk, shm = own_disks(Path({str(tmp_path / 'disk')!r}), 4 << 20, 4 << 20)\n"
        "for each in (disk, shm):\n"
        "    each.fill(); each.fill()\n"
        "    assert each.free_bytes() == 0\n"
        "    try:\n"
        "        (each.path / 'more').write_bytes(b'x')\n"
        "        raise SystemExit('there is room')\n"
        "    except OSError: pass\n"
        "    each.clear()\n"
        "    assert each.free_bytes() > 3 << 20\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if "--kinds disk,shm" in done.stderr:
        pytest.skip("mounting is not permitted")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "disk").iterdir()) == [], "nobody else sees the mount"
    Disk(path=tmp_path).clear()


def test_a_process_is_stopped_when_all_its_threads_are() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        process.send_signal(19)
        wait_until_stopped(process.pid)
        process.kill()
        process.wait()
        with pytest.raises(ProcessLookupError):
            wait_until_stopped(process.pid)


def test_survivors_are_processes_of_this_run_and_nobody_who_looks_on(tmp_path: Path) -> None:
    run = tmp_path / "run-1"
    sleep = [sys.executable, "-c", "input()"]  # the words behind it are read by nobody
    launched = [*sleep, "-m", "penstock.client.launch", "worker", "--config"]
    commands = {
        "worker": [*launched, str(run / "resolved.yaml")],
        "neighbour": [*launched, str(tmp_path / "run-10" / "resolved.yaml")],
        "reader": [*sleep, "tail", "-f", str(run / "logs" / "console.txt")],
        "output": [*sleep, "penstock.x", f"{run}.txt"],
        "looks on": [*sleep, "/usr/bin/penstock", "watch", "--run-dir", str(run)],
    }
    with ExitStack() as stack:
        started = {
            who: stack.enter_context(subprocess.Popen(words, stdin=subprocess.PIPE))
            for who, words in commands.items()
        }
        found = survivors(run)
        assert list(found) == [started["worker"].pid], found
        for process in started.values():
            process.kill()
    assert survivors(run) == {}


def test_a_child_that_still_has_a_members_command_line_is_not_the_member(tmp_path: Path) -> None:
    script = "import os; child = os.fork(); print(child, flush=True) if child else 0; input()"
    words = ["-m", "penstock.client.launch", "worker", "--device", "0", "--config"]
    command = [sys.executable, "-c", script, *words, str(tmp_path / "resolved.yaml")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert child in survivors(tmp_path) and process.pid < child
        assert members(tmp_path) == {"worker.0": process.pid}
        process.communicate("\n")  # the end of the input is the child's


def entry(kind: FaultKind, target: str, seconds: float, **more: object) -> dict[str, object]:
    return {
        "kind": kind,
        "moment": Moment.STEP,
        "targets": [target],
        "outcome": "recovered by itself",
        "seconds": seconds,
        "timeout": False,
        **more,
    }


def test_the_table_has_a_row_for_each_kind_and_sets_deadlines_apart() -> None:
    entries = [
        entry(FaultKind.KILL, "worker", 1.0),
        entry(FaultKind.KILL, "worker", 3.0),
        entry(FaultKind.KILL, "worker", 9.0, moment=Moment.START),
        entry(FaultKind.CLOSED, "memoryd", 0.5, outcome="went on"),
        entry(FaultKind.STOP, "node", 4.0, timeout=True),
    ]
    assert {words: len(found) for words, found in rows_of(entries).items()} == {
        "kill worker": 2,
        "kill worker, while it starts": 1,
        "stop node": 1,
        "closed": 1,
    }
    console = Console(width=110)
    with console.capture() as captured:
        for table in tables_of(entries):
            console.print(table)
    at_once, silence = captured.get().split("faults that a timeout detects")
    assert "stop node" in silence and "stop node" not in at_once
    [line] = [line for line in at_once.splitlines() if line.startswith("kill worker  ")]
    assert line.split() == ["kill", "worker", "2", "2", "2.00", "3.00"]


def test_a_row_of_faults_behind_the_last_step_has_no_times() -> None:
    ended = entry(FaultKind.KILL, "metricsd", 0.6, outcome="the run had ended well")
    console = Console(width=110)
    with console.capture() as captured:
        console.print(*tables_of([ended]))
    [line] = [line for line in captured.get().splitlines() if line.startswith("kill metricsd")]
    assert line.split() == ["kill", "metricsd", "1", "1"]


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(n) for n in range(1, 201)], 0.99) == 198.0
    assert percentile([7.0], 0.99) == 7.0
