"""Journal, metrics file and saved states: what is on disk after kills, damage and repetition."""

from __future__ import annotations

import json
import resource
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from penstock.daemons.memory.snapshot import read_manifest
from penstock.daemons.scheduler.effects import SchedulerEffects
from penstock.daemons.scheduler.journal import Journal
from penstock.daemons.scheduler.machine.evaluations import Score
from penstock.daemons.scheduler.machine.events import (
    CompleteSave,
    JournalDecision,
    JournalEpoch,
    JournalEvaluation,
    NoteEnd,
    SavedState,
)
from penstock.daemons.scheduler.machine.mirror import JournalFacts
from penstock.daemons.scheduler.machine.position import Position
from penstock.daemons.scheduler.metrics_file import MetricsFile
from penstock.daemons.scheduler.saved import SavedStates
from penstock.host.errors import CapacityError, ExitCode, StateError
from penstock.protocol.run.checksums import with_checksum
from penstock.protocol.run.run_result import RunEnd
from penstock.shm.control import Decision
from tests.scheduler.conftest import RUN_ID, make_position, make_record

WRITER = """
import sys
from pathlib import Path
from tests.scheduler.test_files import commit, Journal, RUN_ID
journal = Journal(Path(sys.argv[1]), RUN_ID)
for version in range(1, 10**6):
    journal.decide(commit(version))
    print(version, flush=True)
"""


def commit(version: int) -> JournalDecision:
    """The decision of a clean attempt."""
    return JournalDecision(
        epoch=1,
        record=make_record(version, version),
        position=make_position(version),
        metrics_json=json.dumps({"step": version}),
    )


def skip(attempt: int, version: int) -> JournalDecision:
    """A skipped attempt."""
    return JournalDecision(
        epoch=1,
        record=make_record(version, attempt, Decision.SKIP),
        position=make_position(version, data_position=8 * attempt),
        metrics_json=json.dumps({"step": version, "attempt": attempt}),
    )


def score(version: int, name: str = "eval", loss: float | None = 2.5) -> Score:
    """The means of an evaluation."""
    return Score(set_name=name, version=version, loss=loss, accuracy=0.25)


def evaluation(number: int, score: Score, line: str = "{}") -> JournalEvaluation:
    """A finished evaluation."""
    return JournalEvaluation(evaluation=number, score=score, metrics_json=line)


# ---- journal ----


def test_an_empty_journal_has_the_facts_of_a_new_run(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite", RUN_ID)
    assert journal.load() == JournalFacts()
    journal.close()


def test_facts_survive(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite", RUN_ID)
    journal.begin_epoch(JournalEpoch(epoch=4, next_attempt=1, pids=(("worker.0", 77),)))
    journal.decide(commit(1))
    journal.evaluate(evaluation(3, score(1), '{"eval": 1}'))
    journal.decide(commit(2))
    journal.decide(skip(3, 2))
    journal.close()
    journal = Journal(tmp_path / "j.sqlite", RUN_ID)
    assert journal.load() == JournalFacts(
        epoch=4,
        next_attempt=5,  # 4 may have been under way
        record=make_record(2, 2),
        position=make_position(2, data_position=24),
        pids=(("worker.0", 77),),
        evaluation=3,
        scores=(score(1),),
        last_metrics_json='{"step": 2, "attempt": 3}',
    )
    journal.close()


def test_attempts_broken_in_earlier_epochs_are_not_numbered_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite", RUN_ID)
    journal.decide(commit(1))
    journal.begin_epoch(JournalEpoch(epoch=5, next_attempt=9, pids=()))
    assert journal.load().next_attempt == 10
    journal.close()


def test_a_restore_forgets_later_evaluations(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite", RUN_ID)
    for version in (1, 2, 3):
        journal.decide(commit(version))
    for number, version in enumerate((1, 2, 3), 1):
        journal.evaluate(evaluation(number, score(version)))
    journal.evaluate(evaluation(4, score(3, "chats")))
    restored = make_record(2, 3, Decision.RESTORE)
    journal.decide(
        JournalDecision(epoch=2, record=restored, position=make_position(2), metrics_json="")
    )
    facts = journal.load()
    assert (facts.record, facts.scores) == (restored, (score(1), score(2)))
    assert facts.evaluation == 4, "numbers go on"
    journal.close()


def test_a_writer_killed_in_the_middle_leaves_all_it_was_told_is_durable(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    root = Path(__file__).parents[2]
    for lines in (1, 40):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
        ) as process:
            assert process.stdout is not None
            confirmed = [int(process.stdout.readline()) for _ in range(lines)]
            process.kill()
            confirmed += [int(line) for line in process.stdout.read().split()]
        journal = Journal(path, RUN_ID)
        facts = journal.load()
        assert facts.record is not None and facts.position is not None
        assert facts.record.version in (confirmed[-1], confirmed[-1] + 1)
        assert facts.position == make_position(facts.record.version)
        written = journal.lines_after("")
        assert written is not None
        assert json.loads(written[-1])["step"] == facts.record.version
        journal.close()
        path.unlink()


def test_a_foreign_or_damaged_journal_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    Journal(path, RUN_ID).close()
    with pytest.raises(StateError, match=r"j\.sqlite: run_id is '0123456789ab', expected 'other'"):
        Journal(path, "other")
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(b"this is no database" * 100)
    before = damaged.read_bytes()
    with pytest.raises(StateError, match=r"damaged\.sqlite"):
        Journal(damaged, RUN_ID)
    assert damaged.read_bytes() == before


def test_a_journal_row_that_makes_no_sense_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    journal = Journal(path, RUN_ID)
    journal.decide(commit(1))
    journal.close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE decisions SET position = '{}'")
    connection.commit()
    connection.close()
    journal = Journal(path, RUN_ID)
    with pytest.raises(StateError, match="no scheduler position"):
        journal.load()
    journal.close()


@pytest.mark.parametrize(
    "change",
    [
        "position = replace(position, '\"data_position\": 16', '\"data_position\": 400')",
        "learning_rate = 0.25",
        "coefficient = coefficient * (1 + 1e-15)",
        "bias_step = 1",
        "incarnation = incarnation + 1",
        "epoch = 2",
    ],
)
def test_a_changed_journal_row_is_damage(tmp_path: Path, change: str) -> None:
    path = tmp_path / "j.sqlite"
    journal = Journal(path, RUN_ID)
    journal.decide(commit(1))
    journal.decide(commit(2))
    assert journal.load().record == make_record(2, 2)
    journal.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE decisions SET {change} WHERE version = 2")
        connection.commit()
    journal = Journal(path, RUN_ID)
    with pytest.raises(StateError, match=r"j\.sqlite: decision about attempt 2: its checksum"):
        journal.load()
    journal.close()


def test_rows_of_an_older_penstock_are_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "j.sqlite"
    journal = Journal(path, RUN_ID)
    journal.decide(commit(1))
    journal.close()
    with closing(sqlite3.connect(path)) as connection:
        text = json.dumps(make_position(1).to_fields())
        connection.execute("UPDATE decisions SET position = ?", (text,))
        connection.commit()
    journal = Journal(path, RUN_ID)
    assert journal.load().position == make_position(1)
    assert "decision about attempt 1 has no checksum" in caplog.text
    journal.close()


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("INSERT INTO epochs VALUES (9223372036854775807, 1, '[]')", "no number of an epoch"),
        ("INSERT INTO epochs VALUES (5, 9223372036854775806, '[]')", "no number of an epoch"),
        ("INSERT INTO epochs VALUES (5, 1, '[[[')", "damaged"),
        ("INSERT INTO epochs VALUES (5, 1, '" + "[" * 50_000 + "')", "damaged"),
        ("INSERT INTO evaluations VALUES (9223372036854775807, 1)", "no number of an epoch"),
        ("DROP TABLE metrics", "cannot be read as a journal: no such table"),
        ("UPDATE decisions SET position = '{\"version\": 1}'", "no scheduler position"),
    ],
)
def test_a_journal_with_impossible_rows_is_refused_with_advice(
    tmp_path: Path, statement: str, complaint: str
) -> None:
    path = tmp_path / "j.sqlite"
    journal = Journal(path, RUN_ID)
    journal.decide(commit(1))
    journal._connection.execute(statement)
    with pytest.raises(StateError, match=complaint) as caught:
        journal.load()
    assert str(path) in str(caught.value)
    journal.close()


def test_a_directory_is_no_journal_and_no_metrics(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="is no file; move away what is there"):
        Journal(tmp_path, RUN_ID)
    journal = Journal(tmp_path / "j.sqlite", RUN_ID)
    with pytest.raises(StateError, match="is no file; move away what is there"):
        MetricsFile(tmp_path, journal)
    journal.close()


@pytest.mark.parametrize("value", [2**53, 2**64, 1e308, float("inf"), -1, "x", None])
def test_a_position_beyond_any_run_is_refused(value: object) -> None:
    fields = {**make_position(1).to_fields(), "data_position": value}
    with pytest.raises(StateError, match="here: no scheduler position"):
        Position.from_fields(fields, "here")


# ---- metrics.jsonl ----


@pytest.mark.parametrize(
    "found",
    ["", '{"step": 1}\n', '{"step": 1}\n{"ste', '{"step": 1}\n{"step": 2}\n{"step": 3}\n'],
)
def test_metrics_file_is_repaired_from_the_journal(tmp_path: Path, found: str) -> None:
    journal = Journal(tmp_path / "j.sqlite", RUN_ID)
    for version in (1, 2, 3):
        journal.decide(commit(version))
    path = tmp_path / "metrics.jsonl"
    path.write_text(found)
    metrics = MetricsFile(path, journal)
    metrics.reconcile()
    metrics.append('{"step": 4}')
    metrics.close()
    journal.close()
    lines = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert lines == [1, 2, 3, 4]


def test_lines_the_journal_does_not_know_are_left_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite", RUN_ID)
    journal.decide(commit(1))
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"of": "somebody else"}\n')
    metrics = MetricsFile(path, journal)
    metrics.reconcile()
    metrics.close()
    journal.close()
    assert path.read_text() == '{"of": "somebody else"}\n'


@pytest.mark.parametrize("room", [0, 5])
def test_metrics_that_a_full_disk_does_not_take_come_later(
    tmp_path: Path, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether nothing of a line fits, or half of it: no torn line, and none is missing."""
    journal = Journal(tmp_path / "j.sqlite", RUN_ID)
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, journal)
    metrics.reconcile()
    for version in range(1, 7):
        journal.decide(commit(version))
        line = journal.lines_after("")[-1]  # type: ignore[index]
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if version in (3, 4):
            limit = 2 * (len(line) + 1) + (room if version == 3 else 1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            metrics.append(line)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        steps = [json.loads(text)["step"] for text in path.read_text().splitlines()]
        assert steps == (list(range(1, version + 1)) if version not in (3, 4) else [1, 2])
    metrics.close()
    journal.close()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, messages
    assert f"{path}: no space left on its disk" in messages[0]
    assert "kept in the journal" in messages[0]
    assert f"{path}: complete again, 3 lines came late" in messages[1]


def test_the_last_metrics_come_with_the_end(tmp_path: Path) -> None:
    """The disk was full when the last line was due, and has room when the run ends."""
    journal = Journal(tmp_path / "j.sqlite", RUN_ID)
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, journal)
    metrics.reconcile()
    journal.decide(commit(1))
    line = journal.lines_after("")[-1]  # type: ignore[index]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))
    try:
        metrics.append(line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == ""
    metrics.close()
    journal.close()
    assert path.read_text() == line + "\n"


def test_the_last_metrics_are_there_before_the_end_is_noted(tmp_path: Path) -> None:
    """A scheduler that dies of its last messages closes no file, and none comes after it."""
    journal = Journal(tmp_path / "j.sqlite", RUN_ID)
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, journal)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    journal.decide(commit(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))
    try:
        metrics.reconcile()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == ""
    others = ("service", "saved", "disk_thread", "metrics", "times", "trace", "myself", "inputs")
    effects = SchedulerEffects(
        run_dir=tmp_path,
        journal=journal,
        metrics_file=metrics,
        **{name: MagicMock() for name in others},
    )
    end = NoteEnd(reason="done", code=ExitCode.DONE, keep_memory=False, failed=False)
    effects.carry_out([end])
    assert path.read_text() == journal.lines_after("")[0] + "\n"  # type: ignore[index]
    assert RunEnd.read(tmp_path) is not None
    metrics.close()
    journal.close()


def test_a_journal_without_room_is_an_error_and_goes_on_later(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite", RUN_ID)
    journal.decide(commit(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # bytes: not one page of the log
    try:
        with pytest.raises(CapacityError, match=r"j\.sqlite: no space left on its disk"):
            journal.decide(commit(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    record = journal.load().record
    assert record is not None and record.version == 1
    journal.decide(commit(2))
    record = journal.load().record
    assert record is not None and record.version == 2
    journal.close()


# ---- saved states ----


@pytest.fixture
def states(tmp_path: Path) -> SavedStates:
    return SavedStates(
        tmp_path / "state", run_id=RUN_ID, table_digest="d" * 64, num_blocks=2, keep=2
    )


def save(
    states: SavedStates,
    tmp_path: Path,
    version: int,
    content: bytes = b"abc",
    ranking: tuple[int, ...] = (),
) -> Path:
    """Save two small files as version ``version``."""
    directory = tmp_path / "state" / f".tmp-step-{version:08d}"
    states.prepare(directory)
    names = [f"block-{block:04d}.safetensors" for block in range(2)]
    for name in names:
        (directory / name).write_bytes(content)
    return states.complete(
        CompleteSave(
            number=1,
            version=version,
            directory=str(directory),
            files=tuple((name, 3, "ab") for name in names),
            position=make_position(version),
            attempt=version + 7,
            ranking=ranking,
        )
    )


def test_the_newest_state_is_found_with_its_position(states: SavedStates, tmp_path: Path) -> None:
    assert states.newest() is None
    save(states, tmp_path, 9)
    path = save(states, tmp_path, 10)
    assert path == tmp_path / "state" / "step-00000010"
    assert states.newest() == SavedState(
        version=10, directory=str(path), position=make_position(10)
    )
    fields = json.loads((path / "manifest.json").read_text())
    assert list(fields) == [
        *("format", "run_id", "version", "table_digest", "files", "scheduler", "checksum")
    ]
    assert fields["scheduler"] == {**make_position(10).to_fields(), "attempt": 17}
    assert Position.from_fields(fields["scheduler"], "") == make_position(10)


def test_a_manifest_names_the_recipe_of_a_run_that_has_one(tmp_path: Path) -> None:
    states = SavedStates(
        tmp_path / "state",
        run_id=RUN_ID,
        table_digest="d" * 64,
        num_blocks=2,
        keep=2,
        numerics="00ff",
    )
    path = save(states, tmp_path, 3)
    assert states.newest() is not None
    assert read_manifest(path).numerics == "00ff"
    rewrite(path / "manifest.json", numerics="dead")
    assert read_manifest(path).numerics == "dead"
    fields = json.loads((path / "manifest.json").read_text())
    del fields["numerics"]
    (path / "manifest.json").write_text(json.dumps(fields))
    with pytest.raises(StateError, match=r"manifest\.json: its checksum does not match"):
        read_manifest(path)


def rewrite(manifest: Path, **fields: object) -> None:
    """Changes fields together with the checksum."""
    manifest_fields = json.loads(manifest.read_text())
    del manifest_fields["checksum"]
    manifest.write_text(json.dumps(with_checksum({**manifest_fields, **fields})))


@pytest.mark.parametrize(
    ("key", "value"),
    [("data_position", 400), ("loss_scale", 2.0), ("clean_commits", 1), ("hold", True)],
)
def test_a_changed_position_is_damage(
    states: SavedStates, tmp_path: Path, key: str, value: object
) -> None:
    manifest = save(states, tmp_path, 3) / "manifest.json"
    fields = json.loads(manifest.read_text())
    assert fields["scheduler"][key] != value
    fields["scheduler"][key] = value
    manifest.write_text(json.dumps(fields))
    with pytest.raises(StateError, match=r"manifest\.json: its checksum does not match"):
        states.newest()


def test_a_manifest_of_an_older_penstock_is_read_with_a_warning(
    states: SavedStates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(states, tmp_path, 3)
    fields = json.loads((path / "manifest.json").read_text())
    del fields["checksum"]
    (path / "manifest.json").write_text(json.dumps(fields))
    assert caplog.text == ""
    newest = states.newest()
    assert newest is not None and newest.position == make_position(3)
    assert "manifest.json has no checksum of its own" in caplog.text


def test_older_states_and_leftovers_are_removed(states: SavedStates, tmp_path: Path) -> None:
    (tmp_path / "state" / ".tmp-step-00000001").mkdir(parents=True)
    for version in (1, 2, 3):
        save(states, tmp_path, version)
    names = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert names == ["step-00000002", "step-00000003"]


def test_a_state_of_the_same_step_is_replaced(states: SavedStates, tmp_path: Path) -> None:
    save(states, tmp_path, 3)
    path = save(states, tmp_path, 3, b"xyz")
    assert (path / "block-0000.safetensors").read_bytes() == b"xyz"
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["step-00000003"]


def test_a_save_that_was_cut_short_as_it_replaced_another_leaves_that_one(
    states: SavedStates, tmp_path: Path
) -> None:
    path = save(states, tmp_path, 3)
    path.rename(tmp_path / "state" / ".replaced-step-00000003")
    (tmp_path / "state" / ".tmp-step-00000003").mkdir()
    states.remove_temporary()
    newest = states.newest()
    assert newest is not None and newest.version == 3
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("saved", [True, False])
def test_links_under_the_names_of_replaced_states_never_become_states(
    states: SavedStates, tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: bool
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    names = {".replaced-notes": elsewhere, ".replaced-step-00000003": elsewhere}
    names |= {".replaced-step-00000005": tmp_path / "nowhere", ".tmp-step-00000004": elsewhere}
    if saved:
        save(states, tmp_path, 3)
    (tmp_path / "state").mkdir(exist_ok=True)
    for name, target in names.items():
        (tmp_path / "state" / name).symlink_to(target)
    (tmp_path / "state/.replaced-step-00000007").touch()
    states.remove_temporary()
    names = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert names == [".replaced-notes", *["step-00000003"] * saved]
    assert (elsewhere / "precious").exists()
    errors = capsys.readouterr().err
    assert errors.count("was no folder that Penstock made, and is removed") == 3


def test_a_link_does_not_keep_a_state_from_being_replaced(
    states: SavedStates, tmp_path: Path
) -> None:
    save(states, tmp_path, 3)
    (tmp_path / "state/.replaced-step-00000003").symlink_to(tmp_path)
    path = save(states, tmp_path, 3, b"xyz")
    assert (path / "block-0000.safetensors").read_bytes() == b"xyz"
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["step-00000003"]


def test_the_newest_whole_state_counts_when_a_newer_one_is_damaged(
    states: SavedStates, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(states, tmp_path, 3)
    (save(states, tmp_path, 5) / "block-0001.safetensors").write_bytes(b"a")
    newest = states.newest()
    assert newest is not None and newest.version == 3
    errors = capsys.readouterr().err
    assert "step-00000005/block-0001.safetensors: has 1 bytes, the manifest says 3" in errors
    assert "step 3 is the newest that is whole" in errors
    newest = states.newest(below=3)
    assert newest is None


def test_some_states_are_kept_for_good(tmp_path: Path) -> None:
    states = SavedStates(
        tmp_path / "state",
        run_id=RUN_ID,
        table_digest="d" * 64,
        num_blocks=2,
        keep=1,
        keep_every=4,
    )
    for version in range(1, 10):
        save(states, tmp_path, version)
    names = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert names == ["step-00000004", "step-00000008", "step-00000009"]


def test_the_best_saved_state_outlives_the_retention(tmp_path: Path) -> None:
    states = SavedStates(
        tmp_path / "state", run_id=RUN_ID, table_digest="d" * 64, num_blocks=2, keep=1
    )

    def steps() -> list[int]:
        return sorted(int(path.name[5:]) for path in (tmp_path / "state").iterdir())

    for version in (2, 3, 4):
        save(states, tmp_path, version, ranking=(2, 4)[: version // 2])
    assert steps() == [2, 4]
    save(states, tmp_path, 6, ranking=(5, 4, 2))
    assert steps() == [4, 6], "5 is better, and was never saved"
    save(states, tmp_path, 7, ranking=(6, 5, 4, 2))
    assert steps() == [6, 7]
    save(states, tmp_path, 8)
    assert steps() == [8], "without train.keep_best"


def test_a_rollback_removes_the_evaluations_of_the_steps_that_it_takes_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite", RUN_ID)
    for version in (1, 2, 3):
        journal.decide(commit(version))
        line = json.dumps({"phase": "eval", "step": version, "attempt": version})
        journal.evaluate(evaluation(version, score(version), line))
    journal.go_back(make_position(2), 2, 5)
    assert journal.load().scores == (score(1), score(2))
    journal.decide(commit(3))
    journal.evaluate(evaluation(4, score(3, loss=None)))
    assert [each.loss for each in journal.load().scores] == [2.5, 2.5, None]
    journal.close()


def test_what_was_saved_just_now_is_kept_when_the_run_went_back(
    states: SavedStates, tmp_path: Path
) -> None:
    for version in (8, 9, 3):
        save(states, tmp_path, version)
    names = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert names == ["step-00000003", "step-00000008", "step-00000009"]


def test_files_that_are_not_what_was_reported_are_no_state(
    states: SavedStates, tmp_path: Path
) -> None:
    with pytest.raises(StateError, match="has 2 bytes, the manifest says 3"):
        save(states, tmp_path, 3, b"xy")
    assert states.newest() is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("cut the manifest", r"manifest\.json: the manifest is damaged"),
        ("no manifest", r"manifest\.json: cannot read it"),
        ("cut a file", r"block-0001\.safetensors: has 1 bytes, the manifest says 3"),
        ("lose a file", r"block-0001\.safetensors: is not there; all nodes"),
        ("other model", "saved from another model"),
        ("other step", "is of version 4"),
        ("no position", r"manifest\.json: no scheduler position"),
        ("list too short", r"lists no block-0000\.safetensors"),
    ],
)
def test_a_damaged_state_is_an_error_that_names_it(
    states: SavedStates, tmp_path: Path, damage: str, message: str
) -> None:
    directory = save(states, tmp_path, 3)
    manifest = directory / "manifest.json"
    match damage:
        case "cut the manifest":
            manifest.write_text(manifest.read_text()[:40])
        case "no manifest":
            manifest.unlink()
        case "cut a file":
            (directory / "block-0001.safetensors").write_bytes(b"a")
        case "lose a file":
            (directory / "block-0001.safetensors").unlink()
        case "other model":
            rewrite(manifest, table_digest="e" * 64)
        case "other step":
            rewrite(manifest, version=4)
        case "no position":
            rewrite(manifest, scheduler={})
        case "list too short":
            rewrite(manifest, files={})
    before = sorted((p.name, p.stat().st_size) for p in directory.iterdir())
    with pytest.raises(StateError, match=message):
        states.newest()
    assert sorted((p.name, p.stat().st_size) for p in directory.iterdir()) == before
