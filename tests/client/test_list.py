"""penstock list: processes by their command lines, memory by its names, whoever they belong to."""

from __future__ import annotations

import fcntl
import io
import json
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.client.main import app
from penstock.client.views.runs import listing, runs_here
from penstock.daemons.node.run_lock import RunLock, train_lock_path
from penstock.shm.segment import SHM_ROOT
from tests.scheduler.fakes import make_run

OLD_RUN = secrets.token_hex(6)


@pytest.fixture
def left_behind() -> Iterator[Path]:
    """Memory of a run whose processes are gone."""
    path = SHM_ROOT / f"penstock-{OLD_RUN}-b-weights"
    path.write_bytes(bytes(4096))
    yield path
    path.unlink()


def stand_in(run_dir: Path, *words: str, user: str | None = None) -> subprocess.Popen[bytes]:
    """A process whose command line is that of a child of this one."""
    options = ("--config", str(run_dir / "resolved.yaml"), "--parent-pid", str(os.getpid()))
    shell = ("/bin/sh", "-c", "read line", "-m", "penstock.client.launch")
    process = subprocess.Popen([*shell, *words, *options], stdin=subprocess.PIPE, user=user)
    while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
        time.sleep(0.001)  # the kernel closes the pipe that Popen waits for before it has the words
    return process


def listed() -> dict[str, dict[str, object]]:
    """What ``penstock list --json`` says of the runs of these tests, by run id or directory."""
    result = CliRunner().invoke(app, ["list", "--json"])
    assert result.exit_code == 0, result.output
    return {entry["run_id"] or entry["directory"]: entry for entry in json.loads(result.output)}


def test_a_living_run_and_what_a_dead_one_left(tmp_path: Path, left_behind: Path) -> None:
    run = make_run(tmp_path / "run")
    with stand_in(run.path, "memoryd", "--node", "a") as memoryd:
        with stand_in(run.path, "worker", "--device", "1") as worker:
            found = listed()
            words = CliRunner().invoke(app, ["list"], env={"COLUMNS": "200"}).output
            for process in (memoryd, worker):
                process.communicate()
    living = found[run.run_id]
    assert (living["name"], living["node"], living["state"]) == ("test", "a", "unknown")
    assert (living["directory"], living["steps"]) == (str(run.path), 100)
    pids = {"memoryd": memoryd.pid, "worker.1": worker.pid, "node": os.getpid()}
    assert living["processes"] == pids
    old = found[OLD_RUN]
    assert (old["node"], old["state"], old["memory_bytes"]) == ("b", "left behind", 4096)
    assert run.run_id in words and "left behind" in words and "4.0 KiB" in words


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_what_is_listed_fits_the_terminal(tmp_path: Path, left_behind: Path, columns: int) -> None:
    run = make_run(tmp_path / "run")
    with stand_in(run.path, "memoryd", "--node", "a") as memoryd:
        found = [entry for entry in runs_here() if entry.run_id in {run.run_id, OLD_RUN}]
        memoryd.communicate()
    console = Console(width=columns, file=io.StringIO(), color_system=None)
    rows = [replace(entry, step=40) for entry in found]
    console.print(listing(rows, columns), overflow="fold", highlight=False)
    words = console.file.getvalue()
    assert all(len(line.rstrip()) <= columns for line in words.splitlines()), words
    assert "…" not in words and run.run_id in words and OLD_RUN in words
    folded = "".join(line.strip() for line in words.splitlines())
    assert str(run.path) in folded.replace(" ", "") and "40/100" in words


def test_another_user_s_run_is_seen_as_far_as_everybody_may(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can start a process of another user")
    folder = tmp_path / "theirs"
    with stand_in(folder, "memoryd", "--node", "a", user="nobody") as memoryd:
        found = listed()[str(folder)]
        memoryd.communicate()
    assert (found["user"], found["node"], found["run_id"]) == ("nobody", "a", "")


@pytest.mark.parametrize(
    "command", [["list"], ["list", "--json"], ["doctor"], ["doctor", "--json"]]
)
def test_names_that_anybody_may_take_end_no_command(tmp_path: Path, command: list[str]) -> None:
    """Links, folders and FIFOs are named as segments are; brackets would be markup, and the
    terminal would obey the escape.
    """
    names = [f"penstock-{OLD_RUN}-{node}-control" for node in "abcd"]
    names += [f"penstock-{OLD_RUN}-\x1b[2J[x]-control", f"penstock-{OLD_RUN}-\udcff"]
    places = [SHM_ROOT / name for name in names]
    try:
        places[0].symlink_to("/etc/passwd")
        places[1].symlink_to("/nowhere")
        places[2].mkdir()
        os.mkfifo(places[3])
        places[4].touch()
        places[5].touch()
        result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    finally:
        places[2].rmdir()
        for place in (*places[:2], *places[3:]):
            place.unlink()
    assert result.exit_code == 0, result.output
    assert all(f"-{node}-control" in result.output for node in "abcd")
    assert "2J[x]-control" in result.output and "\x1b" not in result.output
    assert "symbolic link" in result.output and "FIFO" in result.output


def test_a_stranger_s_command_line_names_nothing_that_is_read(tmp_path: Path) -> None:
    """A FIFO as run.json would hold the list up for ever, and "²" is a digit and no number."""
    if os.getuid() != 0:
        pytest.skip("only root can start a process of another user")
    folder = tmp_path / "[red]"
    folder.mkdir()
    os.mkfifo(folder / "run.json")
    shell = ("/bin/sh", "-c", "read line", "-m", "penstock.client.launch", "memoryd")
    odd = ("--node", "\x1b[2J", "--config", str(folder / "resolved.yaml"), "--parent-pid", "²")
    with stand_in(folder, "memoryd", "--node", "[/a]", user="nobody") as memoryd:
        with subprocess.Popen([*shell, *odd], stdin=subprocess.PIPE, user="nobody") as other:
            result = CliRunner().invoke(app, ["list"], env={"COLUMNS": "400"})
            for process in (memoryd, other):
                process.communicate()
    assert result.exit_code == 0, result.output
    assert "[red]" in result.output and "\x1b" not in result.output


def test_a_run_that_is_starting_is_told_from_one_that_is_ending(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    words = CliRunner().invoke(app, ["status", str(run.path)]).output
    assert "no run is active" in words
    with RunLock.acquire(train_lock_path(run.path), wait_s=0.0):
        os.utime(train_lock_path(run.path), ns=(0, time.time_ns()))
        starting = CliRunner().invoke(app, ["status", str(run.path)])
        as_json = CliRunner().invoke(app, ["status", str(run.path), "--json"]).output
        (run.path / "metrics.jsonl").touch()
        os.utime(run.path / "metrics.jsonl", ns=(0, time.time_ns() + 10**9))
        ending = CliRunner().invoke(app, ["status", str(run.path)])
    assert (starting.exit_code, starting.output) == (0, f"{run.path}: is starting\n")
    assert json.loads(as_json) == {"phase": "starting", "ended": False}
    assert (ending.exit_code, ending.output) == (0, f"{run.path}: is ending\n")


def test_a_run_is_listed_while_it_is_prepared(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with (run.path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shell = ("/bin/sh", "-c", "read line", "penstock", "train")
        process = subprocess.Popen(shell, stdin=subprocess.PIPE, pass_fds=[lock.fileno()])
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.001)
        entry = listed()[run.run_id]
        process.communicate()
    assert (entry["name"], entry["state"], entry["steps"]) == ("test", "is starting", 100)
    assert entry["processes"] == {"train": process.pid}


def test_runs_of_this_user_come_first(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can start a process of another user")
    first, run = tmp_path / "a", make_run(tmp_path / "b")
    with stand_in(first, "memoryd", "--node", "a", user="nobody") as theirs:
        with stand_in(run.path, "memoryd", "--node", "a") as ours:
            ids = list(listed())
            theirs.communicate()
            ours.communicate()
    assert ids.index(run.run_id) < ids.index(str(first))
