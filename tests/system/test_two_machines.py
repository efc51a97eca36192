"""Commands that ``penstock init --example two-machines`` prints train, from an empty folder."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import load_config
from penstock.host.errors import ExitCode
from tests.system import conftest as H

BIN = Path(sys.executable).parent


def init(folder: Path) -> str:
    """Writes the example into a new folder, and returns what is printed."""
    folder.mkdir()
    words = [str(BIN / "penstock"), "init", "--example", "two-machines"]
    return subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout


def commands(printed: str) -> list[tuple[str, str]]:
    """Returns the printed commands with the machines that they are for."""
    return re.findall(r"^(\w+)\$ (.+)$", printed, re.MULTILINE)


def shell(root: Path, folder: Path, command: str) -> subprocess.Popen[str]:
    """Starts a printed command as a terminal in ``folder`` does; the home is below ``root``."""
    return subprocess.Popen(
        ["sh", "-c", f"exec {command}"],
        cwd=folder,
        env={**os.environ, "HOME": str(root), "PATH": f"{BIN}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def edit(example: Path, port: int) -> None:
    """Puts the names of the machines there, as the text says; both are this one."""
    text = example.read_text()
    for old, new in {
        "host: machine1": "host: 127.0.0.1",
        "host: machine2": "host: 127.0.0.1",
        "scheduler_port: 29500": f"scheduler_port: {port}",
        "steps: 200": "steps: 4",
        "save_every: 50": "save_every: 2",
    }.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    example.write_text(text)


def test_the_commands_are_printed_for_each_machine(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    printed = init(folder)
    made, first, second = commands(printed)
    assert [made[0], first, second] == [
        "machine1",
        ("machine1", "penstock node --config two-machines.yaml --node a"),
        ("machine2", "penstock node --config two-machines.yaml --node b"),
    ]
    process = shell(tmp_path, folder, made[1])
    assert (process.communicate(timeout=600)[1], process.returncode) == (None, 0)
    config = load_config(folder / "two-machines.yaml")
    assert config.cluster.keys is not None and config.cluster.security == "tls"
    keys = folder / config.cluster.keys
    assert {path.name for path in keys.iterdir()} == {
        "node.a",
        "node.b",
        "control",
        "look",
        "metrics",
    }
    assert (tmp_path / "two-machines-authority" / "ca.key").exists()
    for word in ("watch", "stop"):
        assert f"penstock {word} {config.run_dir}" in printed
    process = shell(tmp_path, folder, made[1])
    output, _ = process.communicate(timeout=600)
    assert process.returncode == ExitCode.BAD_CONFIG and "never overwritten" in output


@pytest.mark.integration
def test_the_printed_commands_train_on_two_nodes(runner: Any) -> None:
    folder = runner.root / "work"
    printed = init(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        edit(folder / "two-machines.yaml", free.getsockname()[1])
    nodes: list[subprocess.Popen[str]] = []
    for _, command in commands(printed):
        process = shell(runner.root, folder, command)
        if command.startswith("penstock node"):
            runner.started.append(process)
            nodes.append(process)
        else:
            output, _ = process.communicate(timeout=600)
            assert process.returncode == 0, output
    run_dir = folder / "runs" / "two-machines"
    H.wait_for_step(H.TrainProcess(nodes[0], run_dir), 1)
    watching = shell(runner.root, folder, re.findall(r"^watch: (.+)$", printed, re.MULTILINE)[0])
    watched, _ = watching.communicate(timeout=600)
    outputs = [node.communicate(timeout=600)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [ExitCode.DONE] * 2, outputs
    assert watching.returncode == ExitCode.DONE and "step 4" in watched, watched
    assert [line["step"] for line in H.metrics(run_dir)] == [1, 2, 3, 4]
    assert H.newest_state(run_dir).name == "step-00000004"
