"""What happens to a run: each strike takes it, and undoes at its end what would outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from penstock.host.errors import PenstockError
from tests.integration.diagnosis.runs import FaultyRun

Strike = Callable[[FaultyRun], AbstractContextManager[None]]


@contextmanager
def nothing(run: FaultyRun) -> Iterator[None]:
    """The configuration is the fault."""
    yield


def killed(name: str, times: int = 1) -> Strike:
    """A process gets SIGKILL, and each that takes its place."""

    @contextmanager
    def strike(run: FaultyRun) -> Iterator[None]:
        last = 0
        for _ in range(times):
            deadline = time.monotonic() + 600.0
            while (pid := run.pids().get(name, last)) == last:
                assert time.monotonic() < deadline, f"{run.name}: {name} does not come back"
                time.sleep(0.2)
            if last:
                time.sleep(3.0)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            last = pid
        yield

    return strike


def stopped(name: str) -> Strike:
    """A process gets SIGSTOP."""

    @contextmanager
    def strike(run: FaultyRun) -> Iterator[None]:
        pid = run.pid(name)
        os.kill(pid, signal.SIGSTOP)
        yield
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    return strike


def killed_node(name: str) -> Strike:
    """A node started by hand is gone, with all its processes: nobody starts it again."""

    @contextmanager
    def strike(run: FaultyRun) -> Iterator[None]:
        os.killpg(run.nodes[name].pid, signal.SIGKILL)
        run.nodes.pop(name).wait(timeout=600)
        yield

    return strike


def slowed(*names: str, work_s: float = 0.02, rest_s: float = 0.03) -> Strike:
    """Processes run part of the time only, as on a device that has become slower."""

    @contextmanager
    def strike(run: FaultyRun) -> Iterator[None]:
        pids = [run.pid(name) for name in names]
        alternate = subprocess.Popen(
            [sys.executable, "-c", _ALTERNATE, str(work_s), str(rest_s), *map(str, pids)]
        )
        try:
            yield
        finally:
            alternate.kill()
            alternate.wait()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    return strike


_ALTERNATE = """
import os, signal, sys, time
work_s, rest_s, *pids = sys.argv[1:]
while True:
    for number, seconds in ((signal.SIGSTOP, rest_s), (signal.SIGCONT, work_s)):
        for pid in pids:
            os.kill(int(pid), number)
        time.sleep(float(seconds))
"""


@contextmanager
def cores_taken(run: FaultyRun) -> Iterator[None]:
    """Others compute on the cores that the optimizer's threads are pinned to, four for each."""
    pid = run.pid("optimizerd.a")
    pinned = [
        os.sched_getaffinity(int(task.name))
        for task in Path(f"/proc/{pid}/task").iterdir()
        if task.name.isdigit()
    ]
    cores = set.union(*(cpus for cpus in pinned if len(cpus) == 1), set())
    assert cores, f"{run.name}: optimizerd is pinned to no core: {pinned}"
    spinning = [
        subprocess.Popen(["taskset", "-c", str(core), sys.executable, "-c", "while True: pass"])
        for core in sorted(cores)
        for _ in range(4)
    ]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def filled(place: Callable[[FaultyRun], Path], leave: float) -> Strike:
    """A file takes all room of a file system but a share of its size."""

    @contextmanager
    def strike(run: FaultyRun) -> Iterator[None]:
        folder = place(run)
        filler = folder / "filler"
        status = os.statvfs(folder)
        room = status.f_bavail - int(status.f_blocks * leave)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, room * status.f_frsize)
        yield
        filler.unlink(missing_ok=True)

    return strike


full_disk = filled(lambda run: run.disk, leave=0.03)
full_shm = filled(lambda run: run.root / "dev" / "shm", leave=0.05)


@contextmanager
def memory_lowered(run: FaultyRun) -> Iterator[None]:
    """The limit of its control group is a little over what it has, but for files in memory."""
    assert run.group is not None
    limit = run.group / "memory.limit_in_bytes"
    numbers = dict(line.split() for line in (run.group / "memory.stat").read_text().splitlines())
    files = int(numbers["total_inactive_file"]) + int(numbers["total_active_file"])
    used = int((run.group / "memory.usage_in_bytes").read_text()) - files
    before = limit.read_text()
    limit.write_text(str(int(used * 1.03)))
    yield
    limit.write_text(before)


@contextmanager
def states_in_the_way(run: FaultyRun) -> Iterator[None]:
    """There is a file where the folder of saved states was: nothing can be saved."""
    state, moved = run.run_dir / "state", run.run_dir / "moved"
    state.rename(moved)
    state.write_text("in the way")
    yield
    state.unlink(missing_ok=True)
    moved.rename(state)


def reached(step: int) -> Strike:
    """The configuration is the fault, from a step on."""

    @contextmanager
    def strike(run: FaultyRun) -> Iterator[None]:
        run.wait_for_step(step)
        yield

    return strike


def _answers(run: FaultyRun) -> bool:
    try:
        with run.control() as control:
            return bool(control.status().phase)
    except PenstockError:
        return False


@contextmanager
def tokens_stuck(run: FaultyRun) -> Iterator[None]:
    """What describes the data is a pipe that nobody writes into, before anybody has read it."""
    meta, deadline = run.run_dir / "data" / "meta.json", time.monotonic() + 600.0
    while not _answers(run):  # the scheduler has read it, workers still start
        assert time.monotonic() < deadline, f"{run.name}: not started\n{run.said()}"
        time.sleep(0.02)
    whole = meta.read_bytes()
    meta.unlink()
    os.mkfifo(meta)
    yield
    mended = meta.with_suffix(".mended")
    mended.write_bytes(whole)
    mended.rename(meta)


THAWS_AFTER_S = 300
"""Whatever happens to the test: nobody can kill who writes to a frozen file system."""


@contextmanager
def state_frozen(run: FaultyRun) -> Iterator[None]:
    """The file system with saved states hangs: whoever writes there waits, for ever."""
    image = run.folder / "state.img"
    subprocess.run(["truncate", "--size=64M", str(image)], check=True)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(run.inside("mount", "-o", "loop", str(image), str(run.state)), check=True)
    thaw = run.inside("fsfreeze", "--unfreeze", str(run.state))
    later = ["sh", "-c", 'sleep "$1"; shift; exec "$@"', "sh", str(THAWS_AFTER_S)]
    subprocess.run(run.inside("fsfreeze", "--freeze", str(run.state)), check=True)
    guard = subprocess.Popen([*later, *thaw], start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        subprocess.run(thaw, check=True)
        os.killpg(guard.pid, signal.SIGKILL)
        guard.wait()


SLOW_ADDRESSES = "127.7.0.0/16"
_LIMIT = f"""
tc qdisc add dev lo root handle 1: htb default 10
tc class add dev lo parent 1: classid 1:10 htb rate 100gbit quantum 60000
tc class add dev lo parent 1: classid 1:20 htb rate RATE burst 64k
tc filter add dev lo parent 1: protocol ip u32 match ip dst {SLOW_ADDRESSES} flowid 1:20
"""


def slow_network(rate: str) -> Strike:
    """What goes to the addresses of the run's nodes goes at ``rate``, as tc has it. In a network
    namespace of the diagnosis: it is nobody else's loopback device.
    """

    @contextmanager
    def strike(run: FaultyRun) -> Iterator[None]:
        subprocess.run(["sh", "-e", "-c", _LIMIT.replace("RATE", rate)], check=True)
        yield
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)

    return strike
