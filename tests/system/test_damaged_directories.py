"""Odd and damaged files in a run directory: every command that reads them says so in a sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.client.export import choose_state, verify
from penstock.client.main import app
from penstock.client.views.run_view import all_metrics
from penstock.daemons.node.endpoint import read_endpoint, read_endpoint_port
from penstock.daemons.scheduler.journal import Journal
from penstock.daemons.scheduler.metrics_file import MetricsFile
from penstock.daemons.scheduler.saved import SavedStates
from penstock.host.errors import PenstockError
from penstock.protocol.run.rundir import RunDirectory

DEEP = "[" * 100_000
FILES = ("run.json", "resolved.yaml", "table.json", "plan.json", "metrics.jsonl", "endpoint.json")
FOLDERS = ("logs", "state", "trace", "data", "model")
COMMANDS = {
    "plan": ("plan", "{run}/resolved.yaml"),
    "status": ("status", "--run-dir", "{run}"),
    "watch": ("watch", "--run-dir", "{run}"),
    "stop": ("stop", "--run-dir", "{run}"),
    "trace": ("trace", "{run}", "--out", "{run}/../trace.json"),
    "doctor": ("doctor", "--run-dir", "{run}"),
}

SLOW = {
    "plan": ("resolved.yaml",),
    "trace": ("run.json", "resolved.yaml", "plan.json", "trace", "trace/worker.0.jsonl"),
}
"""What is tried with the damages of these files only: it takes seconds where they are whole."""


def as_directory(name: str) -> Callable[[Path], None]:
    """A directory where a file is due."""

    def damage(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()

    return damage


def as_file(name: str) -> Callable[[Path], None]:
    """A file where a directory is due."""

    def damage(run: Path) -> None:
        shutil.rmtree(run / name, ignore_errors=True)
        (run / name).write_text("")

    return damage


def holding(name: str, content: str | bytes) -> Callable[[Path], None]:
    """A file with other content."""

    def damage(run: Path) -> None:
        path = next(run.glob(name)) if "*" in name else run / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return damage


CONTENTS = {
    "nothing": "",
    "no JSON": "{",
    "deep": DEEP,
    "not UTF-8": b"\xff\xfe\x00",
    "a list": "[]",
    "a number": "7",
    "null": "null",
    "odd values": '{"run_id": 5, "format": [], "scheduler": 5, "pid": "x", "files": 3}',
}
CONTENT_OF = (*FILES, "inputs.json", "state/step-*/manifest.json", "trace/worker.0.jsonl")
DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"{name} is a directory": as_directory(name) for name in (*FILES, "journal.sqlite")},
    **{f"{name} is a file": as_file(name) for name in FOLDERS},
    **{
        f"{name} holds {what}": holding(name, content)
        for name in CONTENT_OF
        for what, content in CONTENTS.items()
    },
    "a block of the saved state is a directory": lambda run: as_directory(
        str(next(run.glob("state/step-*/block-0000.safetensors")).relative_to(run))
    )(run),
    ".lock is a directory": as_directory(".lock"),
    "a temporary state is a file": holding("state/.tmp-step-00000050", ""),
}


@pytest.fixture
def run(plain_run: Path, tmp_path: Path) -> Path:
    """A copy of a finished, traced run."""
    return shutil.copytree(plain_run, tmp_path / "run")


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_command_says_what_is_wrong(run: Path, damage: str) -> None:
    DAMAGES[damage](run)
    for name, words in COMMANDS.items():
        if name in SLOW and damage.split()[0] not in SLOW[name]:
            continue
        result = CliRunner().invoke(app, [word.format(run=run) for word in words])
        said = result.output
        assert result.exit_code in (0, 2), (name, result.exit_code, said)
        assert "internal error" not in said and "details are in" not in said, (name, said)
        assert result.exit_code == 0 or said.startswith("penstock: "), (name, said)
    all_or_refused(run)


def all_or_refused(run: Path) -> None:
    """What supervisors and schedulers read: they read it, or refuse it in a sentence."""
    read_endpoint(run)
    read_endpoint_port(run)
    directory = RunDirectory(run)

    def open_files() -> None:
        directory.check_shape()
        all_metrics(run)
        table = directory.table
        assert directory.config.num_workers == directory.plan.num_devices
        states = SavedStates(
            run / "state",
            run_id=directory.run_id,
            table_digest=table.digest,
            num_blocks=len(table.blocks),
            keep=2,
        )
        states.newest()
        journal = Journal(run / "journal.sqlite", directory.run_id)
        try:
            journal.load()
            metrics = MetricsFile(run / "metrics.jsonl", journal)
            metrics.reconcile()
            metrics.close()
        finally:
            journal.close()
        states.remove_temporary()
        verify(choose_state(run, None).path)
        assert not list((run / "state").glob(".tmp*"))

    try:
        open_files()
    except PenstockError as error:
        assert str(run) in str(error)
        assert error.exit_code == 2
