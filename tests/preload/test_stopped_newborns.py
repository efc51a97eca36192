"""Newborn processes that a signal stops before they have said a word: nobody waits for them."""

from __future__ import annotations

import fcntl
import itertools
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.daemons.preload.client import NotForkedError, Preloader
from penstock.daemons.preload.fork_request import ForkRequest
from penstock.host.process_identity import group_of
from tests.newborns import NewbornStopper

DEADLINE_S = 20.0
STREAMS = (0, 1, 2)


@pytest.fixture
def spawning() -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "tests.preload.spawning"]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        try:
            assert answer(process) == "ready"
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], DEADLINE_S)[0], "it does not answer"
    return process.stdout.readline().strip()


def test_a_newborn_that_is_stopped_before_its_program_is_replaced(
    spawning: subprocess.Popen[str],
) -> None:
    """At its first instruction, and behind some of the system calls that lead to the exec."""
    assert spawning.stdin is not None
    counts = itertools.chain.from_iterable((number, None) for number in (0, 1, 4, 9))
    with NewbornStopper(spawning.pid, lambda: next(counts)).tracing() as stopper:
        for number in range(4):
            spawning.stdin.write("once more\n")
            pid, code = answer(spawning).split(maxsplit=1)
            assert code == "0"
            assert len(stopper.stopped) == number + 1 and int(pid) not in stopper.stopped
            assert not any(os.path.exists(f"/proc/{dead}") for dead in stopper.stopped)


@pytest.mark.parametrize(
    ("generation", "counts"),
    [pytest.param(1, (0, 4), id="the-one-between"), pytest.param(2, (0, 40), id="the-child")],
)
def test_a_forked_newborn_that_is_stopped_is_killed_and_holds_nothing(
    generation: int, counts: tuple[int, ...], tmp_path: Path
) -> None:
    for count in counts:
        preloader = Preloader.start("plain", os.environ)
        try:
            assert preloader.warm(DEADLINE_S)
            each = itertools.repeat(count)
            stopper = NewbornStopper(preloader.process.pid, each.__next__, generation)
            with stopper.tracing(), (tmp_path / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                request = ForkRequest.here(
                    "tests.preload.newborn", (str(tmp_path / "view"), "0"), os.environ
                )
                with pytest.raises(NotForkedError, match="new child is stopped"):
                    preloader.fork(request, STREAMS, [lock.fileno()])
                assert len(stopper.stopped) == 1
                assert group_of(preloader.process.pid) == [preloader.process.pid]
            with (tmp_path / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            preloader.end()
    assert not (tmp_path / "view").exists()


def test_a_preloader_that_is_stopped_is_not_waited_for() -> None:
    preloader = Preloader.start("plain", os.environ)
    try:
        preloader.process.signal(signal.SIGSTOP)
        assert not preloader.warm(1e6)
    finally:
        preloader.end()
