"""One scheduler writes a journal: to the file that it opened, and only where locks hold."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from penstock.daemons.scheduler.file_system import Locks, check_locks
from penstock.daemons.scheduler.journal import Journal
from penstock.daemons.scheduler.machine.events import JournalTokens
from penstock.daemons.scheduler.metrics_file import MetricsFile
from penstock.host.errors import ConfigError, StateError
from tests.scheduler.test_files import RUN_ID, commit

HOLDER = """
import sys, time
from pathlib import Path
from penstock.daemons.scheduler.journal import Journal
journal = Journal(Path(sys.argv[1]), sys.argv[2])
print("open", flush=True)
time.sleep(60)
"""


def test_a_second_scheduler_is_refused_while_the_first_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.daemons.scheduler.journal.BUSY_TIMEOUT_S", 0.2)
    path = tmp_path / "j.sqlite"
    command = [sys.executable, "-c", HOLDER, str(path), RUN_ID]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
            with pytest.raises(StateError, match=r"j\.sqlite: another scheduler of this run"):
                Journal(path, RUN_ID)
        finally:
            holder.kill()
    with closing(Journal(path, RUN_ID)) as journal:  # the kernel gave the lock back
        journal.decide(commit(1))


def test_rows_of_a_killed_scheduler_are_forced_to_disk_before_anybody_hears_of_them(
    tmp_path: Path,
) -> None:
    """The kill may have come before its last sync. SQLite forces rows to disk in the log before it
    moves them to the file.
    """
    path = tmp_path / "j.sqlite"
    code = (
        "import os, sys; from pathlib import Path;"
        "from penstock.daemons.scheduler.journal import Journal;"
        "from tests.scheduler.test_files import commit;"
        "Journal(Path(sys.argv[1]), sys.argv[2]).decide(commit(1)); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path), RUN_ID]).returncode == 9
    with closing(Journal(path, RUN_ID)):
        shutil.copy(path, tmp_path / "without-its-log")
    with closing(sqlite3.connect(tmp_path / "without-its-log")) as journal:
        assert journal.execute("SELECT version FROM decisions").fetchall() == [(1,)]


def test_a_journal_that_was_moved_away_is_written_no_more(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with closing(Journal(path, RUN_ID)) as journal:
        journal.decide(commit(1))
        path.rename(tmp_path / "elsewhere")
        with pytest.raises(StateError, match="is not the file any more"):
            journal.decide(commit(2))
        shutil.copy(tmp_path / "elsewhere", path)
        with pytest.raises(StateError, match="moved or replaced"):
            journal.decide(commit(2))


def test_a_row_that_is_written_as_the_journal_is_replaced_is_told_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy does not have it, and the next scheduler reads the copy."""
    path = tmp_path / "j.sqlite"

    def restore(journal: Journal, line: str) -> None:
        shutil.copy(path, tmp_path / "backup")
        (tmp_path / "backup").replace(path)

    with closing(Journal(path, RUN_ID)) as journal:
        journal.decide(commit(1))
        monkeypatch.setattr(Journal, "_append_line", restore)
        with pytest.raises(StateError, match="moved or replaced"):
            journal.decide(commit(2))


def fill(
    folder: Path, versions: range, run_id: str = RUN_ID, end: Callable[[], object] = bool
) -> None:
    """Steps in a journal and in its metrics, as a scheduler writes them."""
    with closing(Journal(folder / "journal.sqlite", run_id)) as journal:
        metrics = MetricsFile(folder / "metrics.jsonl", journal)
        metrics.reconcile()
        for version in versions:
            effect = commit(version)
            journal.decide(effect)
            metrics.append(effect.metrics_json)
        end()
        metrics.close()


def start_again(folder: Path) -> int:
    """Open as a scheduler does; the committed version."""
    with closing(Journal(folder / "journal.sqlite", RUN_ID)) as journal:
        metrics = MetricsFile(folder / "metrics.jsonl", journal)
        try:
            metrics.reconcile()
        finally:
            metrics.close()
        record = journal.load().record
        return 0 if record is None else record.version


def test_a_journal_that_lost_its_last_rows_is_refused(tmp_path: Path) -> None:
    """Copied without its log: SQLite itself opens that without a word."""
    fill(tmp_path, range(1, 3))
    shutil.copy(tmp_path / "journal.sqlite", tmp_path / "old")
    fill(tmp_path, range(3, 5))
    shutil.copy(tmp_path / "old", tmp_path / "journal.sqlite")
    with pytest.raises(StateError, match=r"ends at step 2, metrics\.jsonl next to it at step 4"):
        start_again(tmp_path)


def test_an_emptied_journal_of_a_run_with_steps_is_refused(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.sqlite", RUN_ID)) as journal:
        journal.check_beside("")
    shutil.copy(tmp_path / "journal.sqlite", tmp_path / "empty")
    fill(tmp_path, range(1, 3))
    shutil.copy(tmp_path / "empty", tmp_path / "journal.sqlite")
    with pytest.raises(StateError, match="ends at step 0"):
        start_again(tmp_path)


def test_a_journal_that_was_moved_away_begins_anew_beside_old_metrics(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 5))
    (tmp_path / "journal.sqlite").unlink()
    assert start_again(tmp_path) == 0
    assert start_again(tmp_path) == 0  # also when nothing was decided since
    fill(tmp_path, range(1, 3))
    assert start_again(tmp_path) == 2


def fill_and_kill(folder: Path, versions: range, run_id: str = RUN_ID) -> None:
    """Steps of a scheduler that is killed after the last one. The log stays next to the journal, as
    in a copy of the files of a live scheduler.
    """
    folder.mkdir(exist_ok=True)
    left = folder.with_name("left")
    fill(folder, versions, run_id, end=lambda: shutil.copytree(folder, left))
    shutil.rmtree(folder)
    left.rename(folder)
    assert (folder / "journal.sqlite-wal").stat().st_size


def lose(folder: Path) -> None:
    (folder / "journal.sqlite-wal").unlink()


def empty(folder: Path) -> None:
    os.truncate(folder / "journal.sqlite-wal", 0)


def cut(folder: Path) -> None:
    log = folder / "journal.sqlite-wal"
    os.truncate(log, log.stat().st_size // 2)


def lose_metrics_too(folder: Path) -> None:
    lose(folder)
    (folder / "metrics.jsonl").unlink()


def lose_count_too(folder: Path) -> None:
    """A power cut does the same: the count is not forced to disk."""
    lose(folder)
    (folder / "journal.sqlite-count").unlink()


def lose_all_but_log(folder: Path) -> None:
    (folder / "journal.sqlite").unlink()


def empty_all_but_log(folder: Path) -> None:
    os.truncate(folder / "journal.sqlite", 0)


def empty_both(folder: Path) -> None:
    lose(folder)
    os.truncate(folder / "journal.sqlite", 0)


def take_first_log_of_another_run(folder: Path) -> None:
    other = folder.with_name("other")
    fill_and_kill(other, range(1, 9), "fedcba987654")
    shutil.copy(other / "journal.sqlite-wal", folder)


def take_later_log_of_another_run(folder: Path) -> None:
    other = folder.with_name("other")
    other.mkdir()
    fill(other, range(1, 9), "fedcba987654")
    fill_and_kill(other, range(9, 11), "fedcba987654")
    shutil.copy(other / "journal.sqlite-wal", folder)


def take_earlier_log(folder: Path) -> None:
    shutil.copy(folder.with_name("earlier-wal"), folder / "journal.sqlite-wal")


LOSSES = {
    lose: r"ends at step 0, metrics\.jsonl next to it at step 4",
    empty: r"ends at step 0, metrics\.jsonl next to it at step 4",
    cut: r"ends at step \d, metrics\.jsonl next to it at step 4",
    lose_metrics_too: "has 2 transactions of 6",
    lose_count_too: r"ends at step 0, metrics\.jsonl next to it at step 4",
    lose_all_but_log: r"is missing or empty next to journal\.sqlite-wal",
    empty_all_but_log: r"is missing or empty next to journal\.sqlite-wal",
    empty_both: r"ends at step 0, metrics\.jsonl next to it at step 4",
    take_first_log_of_another_run: "run_id is 'fedcba987654'",
    take_later_log_of_another_run: "run_id is 'fedcba987654'",
    take_earlier_log: r"ends at step 2, metrics\.jsonl next to it at step 4",
}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_journal_whose_log_is_lost_is_refused_in_its_first_life(
    tmp_path: Path, loss: Callable[[Path], None]
) -> None:
    """A journal of one life had no row in its own file before: an empty database, it seemed."""
    run = tmp_path / "run"
    fill_and_kill(run, range(1, 3))
    shutil.copy(run / "journal.sqlite-wal", tmp_path / "earlier-wal")
    shutil.rmtree(run)
    fill_and_kill(run, range(1, 5))
    intact = Path(shutil.copytree(run, tmp_path / "intact"))
    loss(run)
    for _ in range(2):  # the first refusal does not let the second start pass
        with pytest.raises(StateError, match=LOSSES[loss]):
            start_again(run)
    assert start_again(intact) == 4


@pytest.mark.parametrize("loss", [lose, empty, lose_metrics_too, take_later_log_of_another_run])
def test_a_journal_whose_log_is_lost_is_refused_in_a_later_life(
    tmp_path: Path, loss: Callable[[Path], None]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    fill(run, range(1, 3))
    fill_and_kill(run, range(3, 5))
    loss(run)
    with pytest.raises(StateError, match=r"transactions of|ends at step 2|run_id is"):
        start_again(run)


def test_the_log_comes_back_after_a_refusal(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fill_and_kill(run, range(1, 5))
    (run / "journal.sqlite-wal").rename(tmp_path / "kept")
    with pytest.raises(StateError, match="ends at step 0"):
        start_again(run)
    (tmp_path / "kept").rename(run / "journal.sqlite-wal")
    assert start_again(run) == 4


def test_a_journal_of_an_older_penstock_without_its_log_is_refused(tmp_path: Path) -> None:
    """Nothing was in its own file before the log had 1,000 pages."""
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    (tmp_path / "metrics.jsonl").write_text(commit(1).metrics_json + "\n")
    with pytest.raises(StateError, match="ends at step 0"):
        start_again(tmp_path)


def test_a_journal_that_others_read_meanwhile_is_whole(tmp_path: Path) -> None:
    """SQLite's own tools move a killed scheduler's log into the file, and remove the log."""
    run = tmp_path / "run"
    fill_and_kill(run, range(1, 5))
    with closing(sqlite3.connect(run / "journal.sqlite")) as connection:
        connection.execute("SELECT * FROM decisions").fetchall()
    assert not (run / "journal.sqlite-wal").exists()
    assert start_again(run) == 4


@pytest.mark.parametrize("end", [fill, fill_and_kill])
def test_a_run_without_a_step_starts_again(
    tmp_path: Path, end: Callable[[Path, range], None]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for _ in range(2):
        end(run, range(0))
    assert start_again(run) == 0


def test_a_long_journal_is_opened_as_fast_as_a_short_one(tmp_path: Path) -> None:
    """The only evaluation is 20,000 lines back: no start reads them all. SQLite counts its steps
    by the thousand; a reader of all lines takes more than one for each.
    """
    path = tmp_path / "j.sqlite"
    Journal(path, RUN_ID).close()
    train = json.dumps({"phase": "train", "filler": "x" * 300})
    with closing(sqlite3.connect(path)) as connection, connection:
        lines = [(json.dumps({"phase": "eval"}),), *((train,) for _ in range(20_000))]
        connection.executemany("INSERT INTO metrics (line) VALUES (?)", lines)
    with closing(Journal(path, RUN_ID)) as journal:
        thousands: list[None] = []
        journal._connection.set_progress_handler(lambda: thousands.append(None), 1000)
        assert journal.newest_line("eval") == '{"phase": "eval"}'
        journal.load()
    assert len(thousands) < 5


MOUNTINFO = r"""
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:44 / /home rw,relatime shared:1 - nfs4 server:/home rw,vers=4.2,hard
31 22 0:45 / /scratch rw - lustre mds:/scratch rw,flock
32 22 0:46 / /mnt/my\040bucket rw - fuse.s3fs s3fs rw
33 22 0:47 / /old rw - nfs server:/old rw,vers=3,nolock
34 30 8:2 / /home/local rw - xfs /dev/sdb1 rw
damaged
"""


@pytest.mark.parametrize(
    ("place", "locks"),
    [
        ("/var/run", Locks.OF_THE_KERNEL),
        ("/home/me/run", Locks.OF_A_SERVER),
        ("/homeless/run", Locks.OF_THE_KERNEL),
        ("/home/local/run", Locks.OF_THE_KERNEL),
        ("/scratch/run", Locks.OF_A_SERVER),
        ("/old/run", Locks.OF_A_SERVER),
    ],
)
def test_the_file_system_says_who_keeps_locks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str, locks: Locks
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTINFO)
    assert check_locks(Path(place) / "journal.sqlite", mounts) is locks
    assert ("mounted with nolock" in caplog.text) == (place == "/old/run")


def test_a_file_system_without_locks_is_refused(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTINFO)
    with pytest.raises(ConfigError, match=r"run\.dir: .* type fuse\.s3fs: .* choose a run\.dir"):
        check_locks(Path("/mnt/my bucket/run/journal.sqlite"), mounts)


def test_tokens_of_an_incarnation_are_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with closing(Journal(path, RUN_ID)) as journal:
        journal.decide(commit(1))
        incarnation = commit(1).record.incarnation
        for tokens in ("aa", "bb"):
            journal.recognise(
                JournalTokens(incarnation=incarnation, tokens=(("memoryd.a", tokens),))
            )
        journal.recognise(JournalTokens(incarnation=99, tokens=(("memoryd.a", "cc"),)))
        assert journal.load().tokens == (("memoryd.a", "bb"),)
        for name in (path, tmp_path / "j.sqlite-wal"):
            assert name.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)  # as an older Penstock left it
    Journal(path, RUN_ID).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_link_is_no_journal(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"")
    (tmp_path / "j.sqlite").symlink_to(victim)
    with pytest.raises(StateError, match="is a symbolic link of user"):
        Journal(tmp_path / "j.sqlite", RUN_ID)
    assert victim.read_bytes() == b""
