"""The README's section on several machines, word by word, from an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.netbed import Host, NetBed, Running, missing
from tests.system.conftest import newest_step

ROOT = Path(__file__).parents[2]
KEYS = Path("/etc/penstock")
STEPS = 12
EDITS = {"steps: 200": f"steps: {STEPS}", "cluster:": "cluster:\n  threads_per_worker: 1"}

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
    """What the README tells to do where: (machine, command)."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("\n## Several machines\n")[2].partition("\n## ")[0]
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
@pytest.mark.timeout(240)
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.usefixtures("own_keys")
def test_the_readme_is_followed_on_two_machines(tmp_path: Path) -> None:
    folder, bin_dir = tmp_path / "work", tmp_path / "bin"
    folder.mkdir()
    bin_dir.mkdir()
    penstock = Path(sys.executable).with_name("penstock")
    (bin_dir / "penstock").symlink_to(penstock)
    (bin_dir / "ssh").write_text(SSH.format(root=tmp_path))
    (bin_dir / "ssh").chmod(0o755)
    path = f"{bin_dir}:{os.environ['PATH']}"
    nodes: dict[str, Running] = {}
    with NetBed(tmp_path, ("machine1", "machine2", "laptop")) as bed:
        for host in bed:
            host.run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(KEYS))
            (tmp_path / f"{host.name}.pid").write_text(str(host.pid))
        for place, command in commands():
            print(f"{place}$ {command}", flush=True)
            if place == "laptop":
                _wait_for_scheduler(folder / "runs" / "two-machines", nodes)
                _on_laptop(bed["laptop"], tmp_path, folder, path, command, nodes)
            else:
                argv = ["env", f"PATH={path}", "sh", "-c", f"cd {folder} && exec {command}"]
                nodes[place] = bed[place].start(argv, tmp_path / f"{place}.txt")
        for place, node in nodes.items():
            assert node.wait(150.0) == 0, f"{place}: {node.text()}"
        assert set(nodes) == {"machine1", "machine2"}
    assert newest_step(folder / "runs" / "two-machines") == STEPS


def _wait_for_scheduler(run_dir: Path, nodes: dict[str, Running]) -> None:
    """Once nodes are started: until they have said where the scheduler is."""
    deadline = time.monotonic() + 120.0
    while nodes and not (run_dir / "endpoint.json").exists():
        said = [node.text() for node in nodes.values()]
        assert all(node.process.poll() is None for node in nodes.values()), said
        assert time.monotonic() < deadline, said
        time.sleep(0.1)


def _on_laptop(
    laptop: Host, root: Path, folder: Path, path: str, command: str, nodes: dict[str, Running]
) -> None:
    """Run a command with the laptop's network; on this machine otherwise, so that ssh can leave."""
    script = LAPTOP.format(
        hosts=root / "hosts", folder=folder, path=path, command=shlex.quote(command)
    )
    done = subprocess.run(
        [
            *("nsenter", f"--net=/proc/{laptop.pid}/ns/net"),
            *("unshare", "--mount", "--propagation", "private", "sh", "-ec", script),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = "\n".join([done.stdout, done.stderr, *(node.text() for node in nodes.values())])
    assert done.returncode == 0, f"{command}: {said}"
    print(done.stdout)
    example = folder / "two-machines.yaml"
    if command.startswith("penstock init"):  # fewer steps, and two machines that share their cores
        text = example.read_text()
        for old, new in EDITS.items():
            assert old in text
            text = text.replace(old, new)
        example.write_text(text)
