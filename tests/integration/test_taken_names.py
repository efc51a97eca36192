"""Another user of the machine wants the names and ports of a run, at its start and while a killed
process is replaced: the run goes on with equal bytes, or is refused with the other user's name.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.host.errors import ExitCode
from penstock.host.process_identity import start_ticks
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.control import ControlClient
from tests.shelf import Shelf
from tests.system import conftest as H
from tests.system.test_stopped import resumed, wait_until

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
    ),
    pytest.mark.integration,
]
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c")

SQUATS = """
import os, socket, sys, time
port, folder, names = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
print("ready", flush=True)
kept = []
while os.getppid() == int(sys.argv[-1]):
    time.sleep(0.001)
    for name in names[:-1]:
        found = socket.socket(socket.AF_UNIX)
        try:
            found.bind("\\0" + name[1:] if name[0] == "@" else name)
            found.listen()
            kept.append(found)
            print("took", name, flush=True)
        except OSError:
            found.close()
    for host in ("127.0.0.1", "0.0.0.0"):
        found = socket.socket()
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            found.bind((host, port))
            found.listen()
            kept.append(found)
            print("took", port, flush=True)
        except OSError:
            found.close()
    for act in (lambda: os.rename(folder, folder + "x"), lambda: os.mkdir(folder)):
        try:
            act()
            print("took", folder, flush=True)
        except OSError:
            pass
"""

LISTENS = """
import socket, sys, time
found = socket.socket()
found.bind(("127.0.0.1", int(sys.argv[1])))
found.listen()
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def stranger(code: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process of another user, ready."""
    command = [*NOBODY, code, *words, str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") as found:
        assert found.stdout is not None and found.stdout.readline() == "ready\n"
        try:
            yield found
        finally:
            found.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def runs(root: Path, shelf: Shelf) -> Iterator[H.Runner]:
    found = H.Runner(root, shelf)
    yield found
    found.stop_all()


def wait_until_replaced(run: H.TrainProcess, name: str, pid: int) -> None:
    deadline_s = time.monotonic() + 600.0
    while start_ticks(pid) is not None or run.members().get(name, pid) == pid:
        assert time.monotonic() < deadline_s, f"{name} is not replaced"
        time.sleep(0.05)


def stop(run: H.TrainProcess) -> None:
    """Stops a run that has no end, once it trains."""
    H.wait_for_step(run, H.newest_step(run.run_dir) + 1)
    with ControlClient.for_run(run.run_dir) as client:
        client.stop()
    code, output = run.wait(600)
    assert code == ExitCode.STOPPED, output


def test_names_of_killed_processes_are_taken_again(runs: H.Runner) -> None:
    run = runs.start(runs.configure("run", H.ENDLESS))
    H.wait_for_step(run, 1)
    run_id = RunDirectory(run.run_dir).run_id
    [folder] = Path("/dev/shm").glob(f".penstock-{run_id}-*")
    node = folder.name.rpartition("-")[2]
    port = json.loads((run.run_dir / "endpoint.json").read_text())["scheduler"].rpartition(":")[2]
    kinds = ("memory", "optimizer", "fetch", "mirror")
    names = [f"@penstock-{run_id}-{node}-{kind}" for kind in kinds]
    names += [str(folder / kind) for kind in kinds]
    with ControlClient.for_run(run.run_dir) as client:
        client.pause()  # and little is to be repeated
    with stranger(SQUATS, port, str(folder), *names) as squatter:
        for name in (f"memoryd.{node}", f"optimizerd.{node}", "worker.0", "schedulerd"):
            pid = run.members()[name]
            os.kill(pid, signal.SIGKILL)
            wait_until_replaced(run, name, pid)
        wait_until(lambda: resumed(run.run_dir), "the scheduler answers")
        squatter.kill()
        assert squatter.stdout is not None
        took = [line for line in squatter.stdout.read().splitlines() if "@" not in line]
    stop(run)
    assert took == [], "old abstract names alone can be taken, and nobody uses them"
    steps = H.newest_step(run.run_dir)
    plain = runs.train(runs.configure("plain", H.endless_until(steps)))
    assert H.state_bytes(run.run_dir) == H.state_bytes(plain)
    assert not folder.exists()


def test_a_start_is_refused_with_the_name_of_who_has_the_port(runs: H.Runner) -> None:
    port = free_port()
    changes = H.merge(H.ENDLESS, {"cluster": {"scheduler_port": port}})
    with stranger(LISTENS, str(port)) as squatter:
        code, output = runs.start(runs.configure("run", changes)).wait(600)
    assert code == 2, output
    assert f"process {squatter.pid} of user 65534" in output, output


def test_a_start_is_refused_with_the_name_of_who_has_the_folder(runs: H.Runner) -> None:
    config = runs.configure("run", H.ENDLESS)
    run = runs.start(config)
    H.wait_for_step(run, 1)
    [folder] = Path("/dev/shm").glob(f".penstock-{RunDirectory(run.run_dir).run_id}-*")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(600)[0] == 130
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    code, output = runs.start(config).wait(600)
    assert code == 2 and "is a folder of user 65534" in output, output
    folder.rmdir()
    stop(runs.start(config))


def test_a_killed_node_waits_for_its_port(runs: H.Runner) -> None:
    """The node is dead, so nobody keeps the port: another user takes it, and gives it back."""
    port = free_port()
    changes = H.merge(H.ENDLESS, {"cluster": {"scheduler_port": port}})
    run = runs.start(runs.configure("run", changes))
    H.wait_for_step(run, 1)
    [node] = [name for name in run.members() if name.startswith("node.")]
    pid = run.members()[node]
    os.kill(run.process.pid, signal.SIGSTOP)  # so that no other node starts meanwhile
    os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 600.0
    log = run.run_dir / "logs" / f"{node}.jsonl"
    while True:
        assert time.monotonic() < deadline_s, "the port is not free"
        try:
            with stranger(LISTENS, str(port)) as squatter:
                os.kill(run.process.pid, signal.SIGCONT)
                while f"waiting for port {port}" not in log.read_text():
                    assert time.monotonic() < deadline_s, "nobody waits"
                    time.sleep(0.1)
                assert f"process {squatter.pid} of user 65534" in log.read_text()
            break
        except AssertionError:
            if "waiting for port" in log.read_text():
                raise
            time.sleep(0.1)
    stop(run)
