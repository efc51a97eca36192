"""Saved states of a run: ``penstock snapshots`` and ``penstock rollback``."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from penstock.daemons.memory.disk import DISK
from penstock.daemons.memory.snapshot import (
    MANIFEST_NAME,
    FileEntry,
    check_content,
    check_size,
    frozen_tensors_in,
    read_manifest,
)
from penstock.daemons.memory.states import checked_manifest, saved_steps, verify
from penstock.daemons.memory.tensorfile import (
    DamagedError,
    TensorBytes,
    digest_of,
    file_bytes,
    write_tensors,
)
from penstock.daemons.node.preparing.tool import run_tool
from penstock.daemons.node.run_lock import (
    RunLock,
    node_lock_path,
    prepare_lock_path,
    train_lock_path,
)
from penstock.daemons.scheduler.rollback import go_back
from penstock.host.errors import ConfigError, PenstockError, StateError
from penstock.host.files import make_directory, sync_directory, writing
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.saved_base import BASE, block_of

LOCK_WAIT_S = 5.0
"""Seconds to wait for the locks of a run that is ending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReport:
    """A saved state. ``damage`` is empty if the check passed.

    ``base_bytes``: bytes of the frozen tensors in ``state/base``, which the run's states share.
    ``saved_at`` is a local time, empty without a manifest. ``removed``: True if the run pruned the
    state during the check.
    """

    step: int
    directory: str
    num_bytes: int
    saved_at: str
    damage: str = ""
    removed: bool = False
    base_bytes: int = 0


def report_states(
    run_dir: Path, steps: Sequence[int] = (), *, every_byte: bool
) -> list[StateReport]:
    """Returns the saved states of ``steps`` (empty: all), oldest first.

    Checks manifest and sizes, or ``every_byte``.

    Raises:
        ConfigError: the path is no run directory, or a step is not saved.
        StateError: the block table of the run is damaged.
    """
    run = _run(run_dir)
    return [
        _report(run, step, directory, every_byte=every_byte)
        for step, directory in _chosen(run, steps)
    ]


def delete_states(run_dir: Path, steps: Sequence[int]) -> list[StateReport]:
    """Deletes saved states, also of an active run; returns the deleted states.

    Raises:
        ConfigError: no step is named, a step is not saved, or a step is the newest intact one,
            which a run would restore.
    """
    if not steps:
        raise ConfigError("delete: name the steps, such as penstock snapshots RUN delete 400 800")
    reports = report_states(run_dir, every_byte=False)
    newest = max(
        (report.step for report in reports if not (report.damage or report.removed)), default=None
    )
    if newest in steps:
        raise ConfigError(
            f"step {newest} is the newest intact state: without it, a loss of memory would lose all"
            " steps since an older state; penstock rollback goes back to an older step"
        )
    run = _run(run_dir)
    chosen = _chosen(run, steps)
    for step, directory in chosen:
        # Renamed first: a crash during the removal leaves no partial step directory.
        doomed = directory.with_name(f".tmp-step-{step:08d}-deleted")
        with writing(directory, 0), suppress(FileNotFoundError):  # the run pruned it meanwhile
            directory.rename(doomed)
            shutil.rmtree(doomed)
    return [report for report in reports if report.step in steps]


def rollback(run_dir: Path, step: int, *, delete: bool) -> Path | None:
    """Sets an inactive run back to the saved ``step``, from which the next start resumes.

    Newer states move to a folder, which is returned, or are deleted.

    The journal and the metrics are truncated last, the journal in one transaction. A rollback that
    was interrupted earlier has only renamed directories, and can be repeated.

    Raises:
        ConfigError: the run is active, ``step`` is not saved, or a file cannot be written.
        StateError: the saved state or the journal is damaged.
    """
    run = _run(run_dir)
    with ExitStack() as stack:
        for path in _locks(run):
            stack.enter_context(RunLock.acquire(path, wait_s=LOCK_WAIT_S))
        ((_, directory),) = _chosen(run, (step,))
        verify(directory, step, run.table)
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        aside = run.state_dir / "aside" / f"before-rollback-{now}"
        make_directory(aside)
        with writing(aside, 0):
            _copy_history(run, aside)
            for newer, path in saved_steps(run.state_dir):
                if newer > step:
                    path.rename(aside / path.name)
            sync_directory(aside)
            sync_directory(run.state_dir)
        go_back(run, directory, step)
        if delete:
            with writing(aside, 0):
                shutil.rmtree(aside)
    return None if delete else aside


def mend_base(run_dir: Path, say: Callable[[str], object], *, every_byte: bool = False) -> None:
    """Makes lost or damaged files of a run's base again, from the folder or seed of its model. A
    file counts only with the checksum that the manifests list; otherwise everything stays as it is.

    Files are compared by size, or by ``every_byte``. ``say`` takes a line about each file.
    """
    run = RunDirectory(run_dir.absolute())
    if not (run.path / "table.json").is_file():
        return
    damaged = dict(_damaged_files(run, every_byte=every_byte))
    if not damaged:
        return
    blocks = {block_of(path.name, entry.sha256): path for path, entry in damaged.items()}
    try:
        model, seed = run.config.model.path, run.config.run.seed
        source = f"run.seed {seed}" if model is None else f"model.path {str(model)!r}"
        for block, tensors in _frozen_again(run, sorted(blocks)):
            path = blocks[block]
            if _replaced(path, tensors, damaged[path].sha256):
                say(f"{path}: was lost or damaged, and is made again of {source}")
            else:
                say(f"{path}: is lost or damaged, and {source} gives other weights now")
    except (PenstockError, OSError, ValueError) as error:
        say(f"state/{BASE}: a lost or damaged file cannot be made again: {error}")


def _damaged_files(run: RunDirectory, *, every_byte: bool) -> Iterator[tuple[Path, FileEntry]]:
    for _, directory in saved_steps(run.state_dir):
        try:
            files = read_manifest(directory).paths(directory)
        except PenstockError:
            continue  # reported by the check of the state
        for path, entry in files.items():
            if path.parent.name != BASE:
                continue
            try:
                check_size(path, entry)
                if every_byte:
                    check_content(path, entry, lambda: False)
            except (DamagedError, OSError):
                yield path, entry


def _frozen_again(
    run: RunDirectory, blocks: Sequence[int]
) -> Iterator[tuple[int, tuple[TensorBytes, ...]]]:
    """Yields the frozen tensors of blocks as a first start has them; another process, with torch,
    writes them into a temporary folder.
    """
    make_directory(run.state_dir / BASE)
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=run.state_dir / BASE) as folder:
        tool = "penstock.models.checkpoints.exports.frozen"
        run_tool(tool, str(run.path), folder, *map(str, blocks))
        for block in blocks:
            raw = np.fromfile(Path(folder, str(block)), dtype=np.uint8).data
            yield block, frozen_tensors_in(raw, run.table.blocks[block], run.table.weight_dtype)


def _replaced(path: Path, tensors: Sequence[TensorBytes], sha256: str) -> bool:
    """Writes a file of the base if its content has the checksum; returns whether it has."""
    if digest_of(path.name, tensors, lambda: False).sha256 != sha256:
        return False
    make_directory(path.parent)
    temporary = path.with_name(f".{path.name}.new")
    with writing(path, file_bytes(tensors)):
        with temporary.open("wb") as file:
            write_tensors(file, path.name, tensors, lambda: False, DISK)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    return True


def to_text(reports: Sequence[StateReport], *, every_byte: bool) -> str:
    """Returns a line for each saved state."""
    if not reports:
        return "nothing is saved; penstock snapshot saves a run that trains"
    intact = "every byte is right" if every_byte else "manifest and sizes are right"

    def verdict(report: StateReport) -> str:
        if report.removed:
            return (
                "was removed meanwhile: the run keeps only its newest states (train.keep_snapshots)"
            )
        return f"DAMAGED: {report.damage}" if report.damage else intact

    lines = [
        f"step {report.step:>8}  {report.num_bytes / 1e6:>12,.1f} MB  {report.saved_at:<20} "
        f" {verdict(report)}"
        for report in reports
    ]
    if base_bytes := max(report.base_bytes for report in reports):
        size = f"{base_bytes / 1e6:>12,.1f} MB"
        lines.append(f"state/{BASE:<7}  {size}  frozen tensors, kept once for all states")
    return "\n".join(lines)


def to_dicts(reports: Sequence[StateReport]) -> list[dict[str, Any]]:
    """Returns the output of ``--json``."""
    return [asdict(report) for report in reports]


def _run(run_dir: Path) -> RunDirectory:
    if not (run_dir / "run.json").exists():
        raise ConfigError(f"{run_dir}: no run directory (it has no run.json)")
    return RunDirectory(run_dir.absolute())


def _chosen(run: RunDirectory, steps: Sequence[int]) -> list[tuple[int, Path]]:
    saved = saved_steps(run.state_dir)
    missing = sorted(set(steps) - {step for step, _ in saved})
    if missing:
        known = ", ".join(str(step) for step, _ in saved) or "none"
        raise ConfigError(f"step {missing[0]} is not saved; saved are: {known}")
    return [(step, path) for step, path in saved if not steps or step in steps]


def _report(run: RunDirectory, step: int, directory: Path, *, every_byte: bool) -> StateReport:
    """Checks a saved state, again if the run replaces the directory during the check."""
    while (inode := _inode(directory)) is not None:
        try:
            report = _checked(run, step, directory, every_byte=every_byte)
        except OSError:
            if _inode(directory) == inode:
                raise
            continue
        if _inode(directory) == inode:
            return report
    return StateReport(step=step, directory=str(directory), num_bytes=0, saved_at="", removed=True)


def _inode(directory: Path) -> int | None:
    try:
        return directory.stat().st_ino
    except FileNotFoundError:
        return None


def _checked(run: RunDirectory, step: int, directory: Path, *, every_byte: bool) -> StateReport:
    damage = ""
    try:
        if every_byte:
            verify(directory, step, run.table)
        else:
            checked_manifest(
                directory, step, table_digest=run.table.digest, num_blocks=len(run.table.blocks)
            )
    except StateError as error:
        damage = str(error)
    num_bytes, base_bytes = _sizes_of(directory)
    return StateReport(
        step=step,
        directory=str(directory),
        num_bytes=num_bytes,
        saved_at=_saved_at(directory),
        damage=damage,
        base_bytes=base_bytes,
    )


def _sizes_of(directory: Path) -> tuple[int, int]:
    """Returns the bytes of a state's own files, and of its base."""
    try:
        manifest = read_manifest(directory)
    except PenstockError:
        return sum(path.stat().st_size for path in directory.iterdir() if path.is_file()), 0
    state_bytes, base_bytes = (
        sum(entry.num_bytes for entry in files.values())
        for files in (manifest.files, manifest.base)
    )
    return state_bytes, base_bytes


def _saved_at(directory: Path) -> str:
    path = directory / MANIFEST_NAME
    if not path.is_file():
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))


def _locks(run: RunDirectory) -> list[Path]:
    nodes = [node_lock_path(run.path, node.name) for node in run.config.cluster.nodes]
    return [train_lock_path(run.path), prepare_lock_path(run.path), *nodes]


def _copy_history(run: RunDirectory, aside: Path) -> None:
    """Copies the journal with its log, and the metrics."""
    for path in (*sorted(run.path.glob("journal.sqlite*")), run.path / "metrics.jsonl"):
        if path.is_file():
            shutil.copy2(path, aside / path.name)
