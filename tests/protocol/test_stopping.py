"""Stop signals: who insists, whose signals count, and how long a stop may take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.protocol.run.stopping import STOP_ORDER, Demand, Grace, Insistence, Patience

TERM, INT = signal.SIGTERM, signal.SIGINT


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
    ],
)
def test_who_insists(signals: list[tuple[int, float]], demands: list[Demand | None]) -> None:
    insistence = Insistence()
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
        (None, {"SLURM_JOB_END_TIME": "Unknown"}, None),
    ],
)
def test_how_long_a_stop_may_take(
    seconds: float | None, environment: dict[str, str], left_s: float | None
) -> None:
    assert Grace.of(seconds, environment).left_s(1000.0) == left_s


def test_who_is_nearer_to_the_outside_waits_longer() -> None:
    assert [who.give_up_s(100.0, 60.0) for who in Patience] == [155.0, 157.5, 158.75]
    assert [who.give_up_s(100.0, 4.0) for who in Patience] == [103.0, 103.5, 103.75]


CHILD = """
import logging, os, sys, time
from penstock.protocol.run.stopping import StopSignal
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
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, obeys], stdout=subprocess.PIPE, text=True
    )
    children.append(process)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def stranger_signals(pid: int, *names: str) -> None:
    for name in names:
        subprocess.run(["sh", "-c", f"kill -{name} {pid}"], check=True, timeout=600)


def test_a_child_obeys_its_parent_and_nobody_else(children: list[subprocess.Popen[str]]) -> None:
    process = start(children, "parent")
    assert process.stdout is not None
    for name in ("TERM", "INT"):
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


@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_a_process_without_a_parent_obeys_anybody(
    children: list[subprocess.Popen[str]], name: str
) -> None:
    process = start(children, "anybody")
    assert process.stdout is not None
    stranger_signals(process.pid, name)
    assert process.stdout.readline() == "stopped\n"
    assert process.wait(timeout=600) == 0
