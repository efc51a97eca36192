"""Stop signals: who insists, whose signals count, and how long a stop may take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.host.stopping import STOP_ORDER, Demand, Grace, StopDeadline, StopEscalation

TERM, INT = signal.SIGTERM, signal.SIGINT
HUP, USR1, USR2 = signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
HEARING = ("env", "--default-signal=HUP,INT,TERM,USR1,USR2")
"""Starts a program that ignores none of the signals, where nohup or a shell's background started
the tests.
"""


@pytest.mark.parametrize(
    ("signals", "demands"),
    [
        ([(TERM, 0.0), (TERM, 0.0), (TERM, 4.9)], [Demand.STOP, None, None]),
        ([(TERM, 0.0), (TERM, 5.0)], [Demand.STOP, Demand.NOW]),
        ([(TERM, 0.0), (TERM, 3.0), (TERM, 6.0)], [Demand.STOP, None, Demand.NOW]),
        ([(INT, 0.0), (INT, 0.001), (INT, 0.1)], [Demand.STOP, None, Demand.NOW]),
        ([(INT, 0.0), (TERM, 0.5)], [Demand.STOP, None]),
        ([(TERM, 0.0), (INT, 0.5), (INT, 1.0)], [Demand.STOP, None, Demand.NOW]),
        ([(TERM, 0.0), (INT, 5.5)], [Demand.STOP, Demand.NOW]),
        ([(USR1, 0.0), (USR1, 9.0), (HUP, 20.0)], [Demand.STOP, None, None]),
        ([(USR1, 0.0), (TERM, 120.0), (TERM, 123.0)], [Demand.STOP, None, None]),
        ([(HUP, 0.0), (TERM, 90.0), (TERM, 95.0)], [Demand.STOP, None, Demand.NOW]),
        ([(TERM, 0.0), (USR2, 60.0)], [Demand.STOP, None]),
        ([(HUP, 0.0), (INT, 1.0)], [Demand.STOP, None]),
        ([(HUP, 0.0), (INT, 5.5)], [Demand.STOP, Demand.NOW]),
    ],
)
def test_who_insists(signals: list[tuple[int, float]], demands: list[Demand | None]) -> None:
    insistence = StopEscalation()
    assert [insistence.heard(number, 100.0 + at_s) for number, at_s in signals] == demands


@pytest.mark.parametrize(
    ("seconds", "environment", "left_s"),
    [
        (None, {}, None),
        (20.0, {}, 20.0),
        (20.0, {"SLURM_JOB_END_TIME": "1010"}, 10.0),
        (5.0, {"SLURM_JOB_END_TIME": "1010"}, 5.0),
        (None, {"SLURM_JOB_END_TIME": "4600"}, 3600.0),
        (None, {"SLURM_JOB_END_TIME": "990"}, 20.0),
        (60.0, {"SLURM_JOB_END_TIME": "990"}, 60.0),
        (None, {"SLURM_JOB_END_TIME": "970"}, None),
        (None, {"SLURM_JOB_END_TIME": "1"}, None),
        (60.0, {"SLURM_JOB_END_TIME": "1"}, 60.0),
        (None, {"SLURM_JOB_END_TIME": "Unknown"}, None),
    ],
)
def test_how_long_a_stop_may_take(
    seconds: float | None, environment: dict[str, str], left_s: float | None
) -> None:
    assert Grace.of(seconds, environment).left_s(1000.0) == left_s


def test_who_is_nearer_to_the_outside_waits_longer() -> None:
    assert [who.give_up_s(100.0, 60.0) for who in StopDeadline] == [155.0, 157.5, 158.75]
    assert [who.give_up_s(100.0, 4.0) for who in StopDeadline] == [103.0, 103.5, 103.75]


CHILD = """
import logging, os, sys, time
from penstock.host.stopping import StopSignal
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
stop = StopSignal().install(os.getppid() if sys.argv[1] == "parent" else None)
print("up", flush=True)
print("stopped" if stop.wait(600.0) else "not asked", flush=True)
"""


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate(timeout=600)


def start(children: list[subprocess.Popen[str]], obeys: str) -> subprocess.Popen[str]:
    return started(children, sys.executable, "-c", CHILD, obeys)


def stranger_signals(pid: int, *names: str) -> None:
    for name in names:
        subprocess.run(["sh", "-c", f"kill -{name} {pid}"], check=True, timeout=600)


def test_a_child_obeys_its_parent_and_nobody_else(children: list[subprocess.Popen[str]]) -> None:
    process = start(children, "parent")
    assert process.stdout is not None
    for name in ("TERM", "INT", "HUP", "USR1", "USR2"):
        stranger_signals(process.pid, name)
        said = process.stdout.readline()
        assert f"SIG{name} of process" in said and f"left to process {os.getpid()}" in said
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stopped\n"
    assert process.wait(timeout=600) == 0


def test_an_order_to_stop_is_not_lost_behind_a_strangers_signal(
    children: list[subprocess.Popen[str]],
) -> None:
    process = start(children, "parent")
    assert process.stdout is not None
    process.send_signal(signal.SIGSTOP)  # as a process that is not scheduled for a while
    stranger_signals(process.pid, "TERM", "INT", f"{STOP_ORDER:d}")
    process.send_signal(STOP_ORDER)
    process.send_signal(signal.SIGCONT)
    said = [process.stdout.readline() for _ in range(4)]
    assert said.count("stopped\n") == 1, said
    assert sum("is left to process" in line for line in said) == 3, said
    assert process.wait(timeout=600) == 0


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1", "USR2"])
def test_a_process_without_a_parent_obeys_anybody(
    children: list[subprocess.Popen[str]], name: str
) -> None:
    process = start(children, "anybody")
    assert process.stdout is not None
    stranger_signals(process.pid, name)
    assert process.stdout.readline() == "stopped\n"
    assert process.wait(timeout=600) == 0


COMMAND = """
import signal, sys
from penstock.host.stopping import StopSignal, interrupted_by_stop_signals
if sys.argv[1] == "own":
    signal.signal(signal.SIGUSR1, lambda number, frame: print("handled", flush=True))
class Dropped:
    def __del__(self):
        signal.raise_signal(signal.SIGHUP)

with interrupted_by_stop_signals():
    if sys.argv[1] == "drops":
        Dropped()  # Python ignores what finalizers raise
    if sys.argv[1] in ("takes over", "drops"):
        stop = StopSignal().install(None)
    try:
        print("up", flush=True)
        stop.wait(600.0) if "stop" in globals() else [signal.pause() for _ in range(2)]
    except KeyboardInterrupt:
        sys.stdout.write("interrupted\\n")
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
print("stopped", flush=True)
"""


def started(children: list[subprocess.Popen[str]], *words: str) -> subprocess.Popen[str]:
    command = [*HEARING, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    children.append(process)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1", "USR2"])
def test_a_command_is_interrupted_once(children: list[subprocess.Popen[str]], name: str) -> None:
    process = started(children, sys.executable, "-c", COMMAND, "prepares")
    stranger_signals(process.pid, name)
    assert process.communicate(timeout=600)[0] == "interrupted\nstopped\n"
    assert process.returncode == 0


def test_a_run_takes_the_signals_of_its_command_over(
    children: list[subprocess.Popen[str]],
) -> None:
    process = started(children, sys.executable, "-c", COMMAND, "takes over")
    stranger_signals(process.pid, "USR2")
    assert process.communicate(timeout=600)[0] == "stopped\n"
    assert process.returncode == 0


def test_a_signal_whose_interrupt_is_dropped_stops_the_run(
    children: list[subprocess.Popen[str]],
) -> None:
    process = started(children, sys.executable, "-c", COMMAND, "drops")
    assert process.stdout is not None and process.stdout.read() == "stopped\n"
    assert process.wait(timeout=600) == 0


@pytest.mark.parametrize("kind", ["anybody", "prepares"])
def test_nohup_keeps_its_meaning(children: list[subprocess.Popen[str]], kind: str) -> None:
    program = CHILD if kind == "anybody" else COMMAND
    process = started(children, "env", "--ignore-signal=HUP", sys.executable, "-c", program, kind)
    stranger_signals(process.pid, "HUP", "HUP")
    stranger_signals(process.pid, "USR1")
    assert process.communicate(timeout=600)[0].endswith("stopped\n")
    assert process.returncode == 0


def test_a_program_keeps_its_own_handler(children: list[subprocess.Popen[str]]) -> None:
    process = started(children, sys.executable, "-c", COMMAND, "own")
    stranger_signals(process.pid, "USR1")
    assert process.stdout is not None and process.stdout.readline() == "handled\n"
    stranger_signals(process.pid, "HUP")
    assert process.communicate(timeout=600)[0] == "interrupted\nstopped\n"
