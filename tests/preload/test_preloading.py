"""Preloaded processes: what they fork is like what would have been spawned, or is not forked."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.daemons.preload.client import ChildProcess, NotForkedError, Preloader, spawn
from penstock.daemons.preload.fork_request import ForkRequest
from penstock.daemons.preload.preloaders import QUIET
from penstock.daemons.preload.server import REFUSED, answer
from penstock.host.process_identity import start_ticks

DEADLINE_S = 600.0
STREAMS = (0, 1, 2)
NEWBORN = "tests.preload.newborn"


@pytest.fixture(scope="module")
def preloader() -> Iterator[Preloader]:
    instance = Preloader.start("plain", os.environ)
    assert instance.warm(DEADLINE_S)
    yield instance
    instance.end()


def request(*arguments: str, **changes: Any) -> ForkRequest:
    return ForkRequest.here(NEWBORN, arguments, {**os.environ, **changes})


def test_a_forked_process_is_like_a_spawned_one(preloader: Preloader, tmp_path: Path) -> None:
    views = []
    with (tmp_path / "lock").open("w") as lock, open(os.devnull, "r+b") as null:
        streams = (null.fileno(),) * 3
        for how in ("forked", "spawned"):
            path = tmp_path / "view"
            wanted = request(str(path), "7", GREETING="hello")
            os.set_inheritable(lock.fileno(), how == "spawned")
            child = (
                preloader.fork(wanted, streams, [lock.fileno()])
                if how == "forked"
                else spawn(wanted.words, wanted.environment, streams)
            )
            assert child.ended(DEADLINE_S)
            assert child.reap() == 7
            views.append(json.loads(path.read_text()))
    forked, spawned = views
    assert forked.pop("random") != spawned.pop("random")
    assert forked.pop("collections") and spawned.pop("collections")
    assert forked["parent"] == os.getpid()
    own = [os.devnull] * 3 + [str(tmp_path / "lock"), str(tmp_path / "view")]
    assert forked.pop("descriptors") == own
    assert set(own) <= set(spawned.pop("descriptors")), "and what else the owner lets go through"
    assert forked == spawned


def test_two_children_draw_other_numbers(preloader: Preloader, tmp_path: Path) -> None:
    drawn = set()
    for number in range(2):
        path = tmp_path / str(number)
        child = preloader.fork(request(str(path), "0"), STREAMS)
        assert child.ended(DEADLINE_S) and child.reap() == 0
        drawn.add(json.loads(path.read_text())["random"])
    assert len(drawn) == 2


def test_a_child_dies_with_its_owner(tmp_path: Path) -> None:
    script = f"""
import os, sys, time
from penstock.daemons.preload.fork_request import ForkRequest
from penstock.daemons.preload.client import Preloader
preloader = Preloader.start("plain", os.environ)
preloader.warm(20.0)
child = preloader.fork(
    ForkRequest.here("{NEWBORN}", [{str(tmp_path / "view")!r}, "sleep"], os.environ), (0, 1, 2)
)
print(preloader.process.pid, child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        with ExitStack() as stack:
            pidfds = [os.pidfd_open(pid) for pid in pids]
            for pidfd in pidfds:
                stack.callback(os.close, pidfd)
            os.kill(pids[1], signal.SIGSTOP)  # a stopped one, too
            owner.kill()
            for pid, pidfd in zip(pids, pidfds, strict=True):
                assert ChildProcess(pid=pid, pidfd=pidfd).ended(DEADLINE_S)


def test_a_preloader_with_threads_forks_nobody() -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        with mine, theirs:
            answer(request("view", "0"), theirs, [0, 1, 2, theirs.fileno()])
            said = mine.recv(100)
            own = Path("/proc/self/comm").read_text().strip().encode()
            assert said.startswith(REFUSED + b"there are ") and own in said
    finally:
        release.set()
        thread.join()


def test_libraries_that_models_import_start_no_thread_in_a_preloader() -> None:
    """Transformers imports scikit-learn where it is installed, that pandas, and that pyarrow."""
    program = "import os, pyarrow; print(len(os.listdir('/proc/self/task')))"

    def threads(environment: Mapping[str, str]) -> int:
        return int(subprocess.check_output([sys.executable, "-c", program], env=environment))

    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    assert threads(environment) > 1, "it does on its own"
    assert threads({**environment, **QUIET}) == 1


@pytest.mark.parametrize("heard", [False, True], ids=["while it imports", "before it was read"])
def test_a_preloader_whose_owner_hangs_up_ends_without_a_word(
    heard: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """The terminal is the owner's: it may have gone for an error that it has just explained."""
    preloader = Preloader.start("plain", os.environ)
    if heard:
        assert select.select([preloader.announces], [], [], DEADLINE_S)[0]
    preloader.close()
    assert preloader.process.ended(DEADLINE_S) and preloader.process.reap() == 0
    assert capfd.readouterr() == ("", "")


def test_a_stopped_or_killed_preloader_does_not_hold_its_owner_up(tmp_path: Path) -> None:
    preloader = Preloader.start("plain", os.environ)
    with pytest.raises(NotForkedError, match="not ready"):
        preloader.fork(request("view", "0"), STREAMS)
    assert preloader.warm(DEADLINE_S)
    for number, reason in (
        (signal.SIGSTOP, "it is stopped"),
        (signal.SIGKILL, "no answer|it ended"),
    ):
        preloader.process.signal(number)
        with pytest.raises(NotForkedError, match=reason):
            preloader.fork(request(str(tmp_path / "view"), "0"), STREAMS)
    assert preloader.process.ended(DEADLINE_S)
    preloader.end()
    assert not (tmp_path / "view").exists(), "whom the owner has given up does not run"
    assert start_ticks(preloader.process.pid) is None
