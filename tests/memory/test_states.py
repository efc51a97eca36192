"""``penstock snapshots`` and ``penstock rollback`` on a run directory that is made up."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.client import states
from penstock.client.main import app
from penstock.daemons.memory import snapshot
from penstock.daemons.memory import states as memory_states
from penstock.daemons.memory.snapshot import block_file
from penstock.daemons.monitor.trackers.following import Bookmark, bookmark_path
from penstock.daemons.scheduler.journal import Journal
from penstock.daemons.scheduler.machine.events import JournalDecision, JournalEpoch
from penstock.daemons.scheduler.machine.position import Position
from penstock.protocol.run.checksums import with_checksum
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.saved_base import base_file
from penstock.shm.control import CommitRecord, Decision


def position(version: int) -> Position:
    return Position(version=version, data_position=8 * version, loss_scale=1.0)


def save(run: RunDirectory, version: int) -> Path:
    """A saved state with files of a few bytes, which are no tensors."""
    directory = run.state_dir / f"step-{version:08d}"
    directory.mkdir(parents=True)
    files = {}
    for block in run.table.blocks:
        content = b"\x02\0\0\0\0\0\0\0{}"
        (directory / block_file(block.index)).write_bytes(content)
        files[block_file(block.index)] = {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    manifest = {
        "format": 1,
        "run_id": run.run_id,
        "version": version,
        "table_digest": run.table.digest,
        "files": files,
        "scheduler": {**position(version).to_fields(), "attempt": version + 1},
    }
    (directory / "manifest.json").write_text(json.dumps(with_checksum(manifest)))
    return directory


@pytest.fixture
def run(make_run: Any) -> RunDirectory:
    """Nine steps in ten attempts (the second was skipped), saved at 3, 6 and 9."""
    run: RunDirectory = make_run()
    for version in (3, 6, 9):
        save(run, version)
    journal = Journal(run.path / "journal.sqlite", run.run_id)
    journal.begin_epoch(JournalEpoch(epoch=1, next_attempt=1, pids=()))
    lines = []
    for attempt in range(1, 11):
        version = max(1, attempt - 1)
        line = json.dumps({"step": version, "attempt": attempt, "phase": "train"})
        record = CommitRecord(
            version=version,
            attempt=attempt,
            decision=Decision.SKIP if attempt == 2 else Decision.COMMIT,
            coefficient=1.0,
            inverse_loss_scale=1.0,
            learning_rate=0.1,
            bias_step=version,
            incarnation=5,
        )
        journal.decide(
            JournalDecision(epoch=1, record=record, position=position(version), metrics_json=line)
        )
        lines.append(line + "\n")
    journal.close()
    (run.path / "metrics.jsonl").write_text("".join(lines))
    return run


def command(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*words])
    return result.exit_code, result.output


def test_saved_states_are_listed_and_checked(run: RunDirectory) -> None:
    code, output = command("snapshots", str(run.path))
    assert code == 0
    assert [line.split()[:2] for line in output.splitlines()] == [["step", n] for n in "369"]
    (run.state_dir / "step-00000006" / block_file(1)).write_bytes(b"\x02\0\0\0\0\0\0\0[]")
    assert command("snapshots", str(run.path))[0] == 0, "sizes are right"
    code, output = command("snapshots", str(run.path), "verify", "6")
    assert code == 2
    assert "DAMAGED" in output and block_file(1) in output
    code, output = command("snapshots", str(run.path), "verify", "7")
    assert code == 2 and "step 7 is not saved; saved are: 3, 6, 9" in output


def test_the_base_is_listed_and_checked_once_more_than_the_states(run: RunDirectory) -> None:
    content = b"\x02\0\0\0\0\0\0\0{}"
    digest = hashlib.sha256(content).hexdigest()
    path = run.state_dir / "base" / base_file(1, digest)
    path.parent.mkdir()
    path.write_bytes(content)
    manifest = run.state_dir / "step-00000009" / "manifest.json"
    fields = json.loads(manifest.read_text())
    del fields["checksum"]
    base = {path.name: {"bytes": len(content), "sha256": digest}}
    manifest.write_text(json.dumps(with_checksum(fields | {"format": 2, "base": base})))
    code, output = command("snapshots", str(run.path), "verify")
    assert code == 0 and output.splitlines()[-1].split() == [
        *("state/base", "0.0", "MB", "frozen", "tensors,", "kept", "once", "for", "all", "states")
    ]
    reports = json.loads(command("snapshots", str(run.path), "--json")[1])
    assert [report["base_bytes"] for report in reports] == [0, 0, len(content)]
    path.write_bytes(content[:-2] + b"[]")
    code, output = command("snapshots", str(run.path), "verify")
    assert code == 2 and output.count("DAMAGED") == 1 and path.name in output
    path.unlink()
    code, output = command("snapshots", str(run.path))
    assert code == 2 and f"base/{path.name}: is not there; the folder base belongs" in output
    assert command("rollback", str(run.path), "--to", "9")[0] == 2


def test_saved_states_are_deleted_but_for_the_newest_whole_one(run: RunDirectory) -> None:
    code, output = command("snapshots", str(run.path), "delete", "9")
    assert code == 2 and "newest intact state" in output
    assert command("snapshots", str(run.path), "delete")[0] == 2
    assert command("snapshots", str(run.path), "delete", "3", "6")[0] == 0
    assert [path.name for path in run.state_dir.iterdir()] == ["step-00000009"]


@pytest.mark.parametrize("moment", ["manifest", "block"])
def test_a_state_that_is_pruned_while_it_is_verified_is_not_damaged(
    run: RunDirectory, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run prunes it, or replaces it by another one of the same step, as it does: by names."""
    doomed, other = run.state_dir / "step-00000006", run.state_dir / ".tmp-step-00000006"
    module, name = {
        "manifest": (memory_states, "checked_manifest"),
        "block": (snapshot, "sha256_of"),
    }[moment]
    real = getattr(module, name)

    def disturbed(path: Path, *arguments: Any, **options: Any) -> Any:
        if "step-00000006" in str(path) and doomed.exists():
            doomed.rename(other)
            shutil.rmtree(other)
        return real(path, *arguments, **options)

    monkeypatch.setattr(module, name, disturbed)
    monkeypatch.setattr(states, "checked_manifest", memory_states.checked_manifest)
    code, output = command("snapshots", str(run.path), "verify", "--json")
    assert code == 0
    assert [(r["step"], r["removed"], r["damage"]) for r in json.loads(output)] == [
        (3, False, ""),
        (6, True, ""),
        (9, False, ""),
    ]


def test_a_state_that_is_replaced_while_it_is_verified_is_looked_at_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced, real = run.state_dir / "replaced", snapshot.sha256_of

    def disturbed(path: Path, *arguments: Any) -> Any:
        if "step-00000006" in str(path) and not replaced.exists():
            (run.state_dir / "step-00000006").rename(replaced)
            save(run, 6)
            raise FileNotFoundError(path)
        return real(path, *arguments)

    monkeypatch.setattr(snapshot, "sha256_of", disturbed)
    code, output = command("snapshots", str(run.path), "verify")
    assert code == 0 and output.count("every byte is right") == 3


def test_removed_meanwhile_in_words() -> None:
    report = states.StateReport(step=6, directory="d", num_bytes=0, saved_at="", removed=True)
    assert "was removed meanwhile" in states.to_text([report], every_byte=True)


def test_a_rollback_cuts_journal_metrics_and_trackers_back(run: RunDirectory) -> None:
    metrics = run.path / "metrics.jsonl"
    bookmark_path(run.path, "wandb").parent.mkdir()
    Bookmark(offset=metrics.stat().st_size, lines=10).write(bookmark_path(run.path, "wandb"))
    before = metrics.read_text()
    code, output = command("rollback", str(run.path), "--to", "6")
    assert code == 0, output
    kept = metrics.read_text().splitlines()
    assert [json.loads(line)["attempt"] for line in kept] == [1, 2, 3, 4, 5, 6, 7]
    assert Bookmark.read(bookmark_path(run.path, "wandb")).offset == metrics.stat().st_size
    journal = Journal(run.path / "journal.sqlite", run.run_id)
    facts = journal.load()
    assert journal.lines_after("") == kept
    journal.close()
    assert facts.record is not None and facts.position == position(6)
    assert (facts.record.version, facts.record.decision) == (6, Decision.RESTORE)
    assert facts.record.incarnation != 5, "memory of later steps is not believed"
    assert facts.next_attempt > 11, "numbers are never used again"
    [aside] = (run.state_dir / "aside").iterdir()
    assert sorted(path.name for path in aside.iterdir() if "journal" not in path.name) == [
        "metrics.jsonl",
        "step-00000009",
    ]
    assert (aside / "metrics.jsonl").read_text() == before
    assert command("rollback", str(run.path), "--to", "9")[0] == 2


def test_what_is_newer_goes_only_on_request(run: RunDirectory) -> None:
    assert command("rollback", str(run.path), "--to", "3", "--delete")[0] == 0
    assert sorted(path.name for path in run.state_dir.iterdir()) == ["aside", "step-00000003"]
    assert not list((run.state_dir / "aside").iterdir())


def test_nothing_goes_back_to_a_damaged_state(run: RunDirectory) -> None:
    (run.state_dir / "step-00000003" / block_file(0)).write_bytes(b"\x02\0\0\0\0\0\0\0[]")
    before = (run.path / "metrics.jsonl").read_text()
    code, output = command("rollback", str(run.path), "--to", "3")
    assert code == 2 and "block-0000.safetensors: its header is damaged" in output
    assert (run.path / "metrics.jsonl").read_text() == before
    assert sorted(path.name for path in run.state_dir.glob("step-*"))[-1] == "step-00000009"
