"""``penstock chaos`` with a real run, and what it finds in runs that are not as they should be."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.chaos.checks import Trained, check
from penstock.chaos.processes import survivors
from penstock.host.errors import LostMemberError, StateError
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.segment import list_segments
from tests.system.conftest import PLAIN

STEPS = int(PLAIN["train"]["steps"])


def struck(runner: Any, out: Path, reference: Path, *options: str) -> tuple[str, list[str]]:
    """Run a campaign on a plain run, which must pass; returns what it says and its outcomes."""
    config = str(runner.configure("run", PLAIN))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "penstock.client.main", "chaos", config),
            *(f"--reference={reference}", f"--out={out}", *options),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (out / "faults.jsonl").read_text().splitlines()
    return done.stdout, [json.loads(line)["outcome"] for line in lines]


def test_faults_are_struck_counted_and_leave_the_same_bytes(
    runner: Any, plain_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "chaos"
    said, outcomes = struck(
        runner, out, plain_run, "--kinds=kill,second,closed", "--faults=3", "--seed=8"
    )
    assert "seed 8: equal bytes, no step lost or repeated, nothing left over" in said
    assert len(outcomes) >= 3
    assert not (out / "run-1").exists(), "a run that is as it should be is not kept"


def test_a_run_whose_memory_is_lost_does_steps_again_with_the_same_outcome(
    runner: Any, plain_run: Path, tmp_path: Path
) -> None:
    """One node, so nobody has a replica."""
    _, outcomes = struck(
        runner, tmp_path / "chaos", plain_run, "--kinds=lost", "--faults=2", "--seed=3"
    )
    assert "went back to a saved step" in outcomes


@pytest.mark.slow
def test_an_interrupted_campaign_ends_its_run(runner: Any, plain_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "chaos"
    options = {"--kinds": "kill", "--reference": str(plain_run), "--out": str(out)}
    words = [word for option in options.items() for word in option]
    config = runner.configure("run", PLAIN)
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.client.main", "chaos", str(config), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    runner.started.append(process)
    deadline_s = time.monotonic() + 600.0
    while not segments_of(out / "run-1") and time.monotonic() < deadline_s:
        time.sleep(0.05)
    process.terminate()
    output, events = process.communicate(timeout=600)
    assert process.returncode == 130, events
    assert "interrupted; the current run was not checked" in events
    assert "0 faults" in output and "interrupted" in output
    assert not survivors(out / "run-1")
    assert not segments_of(out / "run-1"), "nobody goes on with it"


def segments_of(run_dir: Path) -> list[str]:
    """What a run has in shared memory."""
    if not (run_dir / "run.json").exists():
        return []
    return list_segments(f"/penstock-{RunDirectory(run_dir).run_id}-")


@pytest.fixture
def copied(plain_run: Path, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    return Path(shutil.copytree(plain_run, tmp_path / "copied"))


def test_a_run_equals_its_copy(plain_run: Path, copied: Path) -> None:
    check(copied, Trained.of(plain_run, STEPS))


def test_one_other_byte_is_found(plain_run: Path, copied: Path) -> None:
    file = sorted(copied.glob(f"state/step-{STEPS:08d}/*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(LostMemberError, match=f"bytes differ in .*{file.name}"):
        check(copied, Trained.of(plain_run, STEPS))


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DELETE FROM decisions WHERE version = 7", r"row 7 is \(.*8.*undisturbed \(.*7"),
        (
            "INSERT INTO decisions SELECT (SELECT max(seq) + 1 FROM decisions), epoch, "
            "{columns} FROM decisions ORDER BY seq DESC LIMIT 1",
            f"{STEPS + 1} rows, undisturbed {STEPS}",
        ),
    ],
    ids=["lost", "repeated"],
)
def test_a_lost_or_repeated_step_is_found(
    plain_run: Path, copied: Path, statement: str, message: str
) -> None:
    with closing(sqlite3.connect(copied / "journal.sqlite")) as journal:
        names = [row[1] for row in journal.execute("PRAGMA table_info(decisions)")]
        columns = ", ".join(name for name in names if name not in ("seq", "epoch"))
        journal.execute(statement.format(columns=columns))
        journal.commit()
    with pytest.raises(LostMemberError, match=rf"journal\.sqlite: .*{message}"):
        check(copied, Trained.of(plain_run, STEPS))


def go_back_and_do_again(run_dir: Path, version: int) -> None:
    """As if the memory of the finished run had been lost at its end: it was filled with the state
    after ``version``, and the steps from there were done again.
    """
    with closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        journal.row_factory = sqlite3.Row
        rows = [dict(row) for row in journal.execute("SELECT * FROM decisions ORDER BY seq")]
        last = rows[-1]
        [place] = [row["position"] for row in rows[1:] if row["version"] == version]
        filling = {**rows[0], "version": version, "attempt": last["attempt"], "position": place}
        again = [
            {**row, "attempt": row["attempt"] + last["attempt"]}
            for row in rows
            if row["version"] > version
        ]
        for seq, row in enumerate([filling, *again], last["seq"] + 1):
            row["seq"] = seq
            journal.execute(
                f"INSERT INTO decisions VALUES ({', '.join('?' * len(row))})", [*row.values()]
            )
        journal.commit()
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    again = [line for line in lines if line["step"] > version]
    lines += [{**line, "attempt": line["attempt"] + last["attempt"]} for line in again]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_steps_may_be_done_again_after_a_restore(plain_run: Path, copied: Path) -> None:
    go_back_and_do_again(copied, STEPS - 3)
    check(copied, Trained.of(plain_run, STEPS))


@pytest.mark.parametrize(
    ("which", "message"),
    [(STEPS - 1, "had other results before they were repeated: .*0.5"), (-1, r"row \d+ is .*0.5")],
    ids=["before", "again"],
)
def test_steps_that_are_done_again_otherwise_are_found(
    plain_run: Path, copied: Path, which: int, message: str
) -> None:
    go_back_and_do_again(copied, STEPS - 3)
    path = copied / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[which]["lr"] = 0.5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(LostMemberError, match=message):
        check(copied, Trained.of(plain_run, STEPS))


def test_a_line_of_metrics_that_is_there_twice_is_found(plain_run: Path, copied: Path) -> None:
    path = copied / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[-1]]))
    with pytest.raises(LostMemberError, match=r"metrics\.jsonl \(train\)"):
        check(copied, Trained.of(plain_run, STEPS))


def test_what_is_left_over_is_found(plain_run: Path, copied: Path) -> None:
    wanted = Trained.of(plain_run, STEPS)
    (copied / "state" / ".tmp-step-00000007").mkdir()
    with pytest.raises(LostMemberError, match=r"left over: .*\.tmp-step-00000007"):
        check(copied, wanted)
    (copied / "state" / ".tmp-step-00000007").rmdir()
    printing = [sys.executable, "-c", "print(flush=True); input()"]
    words = [*printing, "penstock.client.launch", str(copied / "resolved.yaml")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # a process that is only just starting has no words yet
        with pytest.raises(LostMemberError, match=f"left over: .*{process.pid}"):
            check(copied, wanted)
        process.kill()


def test_a_run_that_has_not_finished_is_nothing_to_compare_with(copied: Path) -> None:
    with pytest.raises(StateError, match=f"step {STEPS + 1} is not saved"):
        Trained.of(copied, STEPS + 1)
