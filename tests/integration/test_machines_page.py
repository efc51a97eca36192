"""docs/MACHINES.md, followed word by word from an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from penstock.host.errors import ExitCode
from tests.integration.netbed import Host, NetBed, Running, missing
from tests.system.conftest import newest_state, newest_step

ROOT = Path(__file__).parents[2]
KEYS = Path("/etc/penstock")
EDITS = {"steps: 200": "steps: 1000000", "cluster:": "cluster:\n  threads_per_worker: 1"}
"""No end, so that the run is not over before it is watched; and machines that share their cores."""
STOP = "penstock stop --endpoint machine1:29500 --keys keys/control"

SSH = """#!/bin/sh
# ssh HOST COMMAND..., to the hosts of the test.
host=$1
shift
exec nsenter --target="$(cat {root}/$host.pid)" --mount --net --pid --uts --ipc -- sh -c "$*"
"""
LAPTOP = """mount --bind {hosts} /etc/hosts
cd {folder}
export PATH={path}
exec sh -c {command}
"""


def commands() -> list[tuple[str, str]]:
    """Returns the page's commands with their machines: (machine, command)."""
    text = (ROOT / "docs" / "MACHINES.md").read_text(encoding="utf-8")
    section = text.partition("\n## By hand\n")[2].partition("\n## ")[0]
    return re.findall(r"^(\w+)\$ (.+?)(?: +#.*)?$", section, re.MULTILINE)


@pytest.fixture
def own_keys() -> Iterator[None]:
    """A place where hosts can mount a folder of their own."""
    there = KEYS.exists()
    KEYS.mkdir(exist_ok=True)
    yield
    if not there:
        KEYS.rmdir()


@pytest.mark.integration
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.usefixtures("own_keys")
def test_the_page_is_followed_on_two_machines(tmp_path: Path) -> None:
    folder, bin_dir = tmp_path / "work", tmp_path / "bin"
    folder.mkdir()
    bin_dir.mkdir()
    penstock = Path(sys.executable).with_name("penstock")
    (bin_dir / "penstock").symlink_to(penstock)
    (bin_dir / "ssh").write_text(SSH.format(root=tmp_path))
    (bin_dir / "ssh").chmod(0o755)
    path = f"{bin_dir}:{os.environ['PATH']}"

    def shell(command: str) -> list[str]:
        return ["env", f"PATH={path}", "sh", "-c", f"cd {folder} && exec {command}"]

    run_dir, nodes = folder / "runs" / "two-machines", dict[str, Running]()
    watching: Running | None = None
    with NetBed(tmp_path, ("machine1", "machine2", "laptop")) as bed:
        for host in bed:
            host.run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(KEYS))
            (tmp_path / f"{host.name}.pid").write_text(str(host.pid))
        for place, command in commands():
            print(f"{place}$ {command}", flush=True)
            if command.startswith("penstock watch"):
                _wait((run_dir / "endpoint.json").exists, nodes)
                watching = bed[place].start(shell(command), tmp_path / "watched.txt")
            elif place == "laptop":
                _on_laptop(bed[place], tmp_path, folder, path, command)
            else:
                nodes[place] = bed[place].start(shell(command), tmp_path / f"{place}.txt")
            if command.startswith("penstock init"):
                _edit(folder / "two-machines.yaml")
        assert set(nodes) == {"machine1", "machine2"} and watching is not None
        seen = watching.text
        _wait(lambda: "step " in seen(), nodes | {"laptop": watching})
        bed["laptop"].run(*shell(STOP))
        assert watching.wait(600.0) == ExitCode.STOPPED, seen()
        print(seen())
        for place, node in nodes.items():
            assert node.wait(600.0) == ExitCode.STOPPED, f"{place}: {node.text()}"
    assert newest_state(run_dir).name == f"step-{newest_step(run_dir):08}"


def _wait(condition: Callable[[], bool], nodes: Mapping[str, Running]) -> None:
    deadline = time.monotonic() + 600.0
    while not condition():
        printed = [node.text() for node in nodes.values()]
        assert all(node.process.poll() is None for node in nodes.values()), printed
        assert time.monotonic() < deadline, printed
        time.sleep(0.1)


def _on_laptop(laptop: Host, root: Path, folder: Path, path: str, command: str) -> None:
    """Runs a command in the laptop's network; on this machine otherwise, for ssh to leave it."""
    script = LAPTOP.format(
        hosts=root / "hosts", folder=folder, path=path, command=shlex.quote(command)
    )
    network = f"--net=/proc/{laptop.pid}/ns/net"
    mounts = ("unshare", "--mount", "--propagation", "private")
    words = ["nsenter", network, *mounts, "sh", "-ec", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    print(done.stdout)


def _edit(example: Path) -> None:
    text = example.read_text()
    for old, new in EDITS.items():
        assert old in text
        text = text.replace(old, new)
    example.write_text(text)
