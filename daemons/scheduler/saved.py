"""Saved states on disk: find the newest, complete a new one, remove old ones.

A directory ``state/step-XXXXXXXX`` is complete by construction: its files were written and synced
under a temporary name, the manifest last, and then the directory was renamed. What a state's files
contain is memoryd's business (:mod:`penstock.daemons.memory.snapshot`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from penstock.daemons.memory.snapshot import (
    MANIFEST_FORMAT,
    MANIFEST_NAME,
    Manifest,
    block_file,
    read_manifest,
)
from penstock.daemons.scheduler.machine.events import CompleteSave
from penstock.daemons.scheduler.machine.mirror import SavedState
from penstock.daemons.scheduler.machine.position import Position
from penstock.protocol.errors import StateError
from penstock.protocol.run.files import make_directory, sync_directory, writing
from penstock.protocol.run.rundir import SHARED
from penstock.protocol.run.seal import with_checksum

TEMPORARY_PREFIX = ".tmp-step-"
_STEP = re.compile(r"step-(\d{8,})")


class SavedStates:
    """The ``state`` directory of a run."""

    def __init__(
        self, state_dir: Path, *, run_id: str, table_digest: str, num_blocks: int, keep: int
    ) -> None:
        self._state_dir = state_dir.absolute()
        self._run_id = run_id
        self._table_digest = table_digest
        self._num_blocks = num_blocks
        self._keep = keep

    def newest(self) -> SavedState | None:
        """Returns the newest saved state, checked: manifest, list of files, their sizes.

        Checksums are memoryd's to check, when it reads the files.

        Raises:
            StateError: it is damaged or of another model; names the file. Nothing was touched.
        """
        found = self._steps()
        if not found:
            return None
        version, directory = found[-1]
        manifest = read_manifest(directory)
        path = directory / MANIFEST_NAME
        if manifest.table_digest != self._table_digest:
            raise StateError(
                f"{path}: saved from another model: its block table has digest"
                f" {manifest.table_digest[:12]}, this run's {self._table_digest[:12]}"
            )
        position = Position.from_fields(manifest.scheduler, str(path))
        if manifest.version != version or position.version != version:
            raise StateError(
                f"{path}: is of version {manifest.version} at position {position.version}, its"
                f" directory says {version}"
            )
        self._check_files(directory, manifest)
        return SavedState(version=version, directory=str(directory), position=position)

    def prepare(self, directory: Path) -> None:
        """Make an empty directory for a new state; temporary ones of earlier runs go.

        Raises:
            PenstockError: it cannot be made.
        """
        self.remove_temporary()
        make_directory(directory)

    def remove_temporary(self) -> None:
        """Remove what a save left that was cut short.

        Raises:
            ConfigError: the disk does not let it go.
        """
        for path in self._state_dir.glob(f"{TEMPORARY_PREFIX}*"):
            with writing(path, 0):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:  # nothing of ours, but in the way
                    path.unlink()

    def complete(self, save: CompleteSave) -> Path:
        """Write the manifest, give the directory its name, remove what is too old.

        Raises:
            StateError: the files are not what memoryds said they wrote.
            CapacityError, ConfigError: the disk does not take it.
        """
        directory = Path(save.directory)
        # memoryds have synced the files. The manifest follows, synced too; then the names in the
        # directory; then the rename, which makes all of it a saved state at once; then the name.
        manifest = {
            "format": MANIFEST_FORMAT,
            "run_id": self._run_id,
            "version": save.version,
            "table_digest": self._table_digest,
            "files": {name: {"bytes": size, "sha256": sha} for name, size, sha in save.files},
            "scheduler": {**save.position.to_fields(), "attempt": save.attempt},
        }
        text = json.dumps(with_checksum(manifest), indent=1)
        with writing(directory / MANIFEST_NAME, len(text)):
            _write_synced(directory / MANIFEST_NAME, text)
        self._check_files(directory, read_manifest(directory))
        final = self._state_dir / f"step-{save.version:08d}"
        with writing(final, len(text)):
            sync_directory(directory)
            if final.exists():  # of the same step, from before the run went back to an earlier one
                final.rename(self._state_dir / f"{TEMPORARY_PREFIX}{save.version:08d}-old")
            directory.rename(final)
            sync_directory(self._state_dir)
        self._prune()
        return final

    def _prune(self) -> None:
        """Renamed before it is removed: no step directory is ever half there."""
        for version, directory in self._steps()[: -self._keep]:
            doomed = self._state_dir / f"{TEMPORARY_PREFIX}{version:08d}-old"
            directory.rename(doomed)
        self.remove_temporary()

    def _steps(self) -> list[tuple[int, Path]]:
        if not self._state_dir.is_dir():
            return []
        matches = ((_STEP.fullmatch(path.name), path) for path in self._state_dir.iterdir())
        return sorted((int(match[1]), path) for match, path in matches if match is not None)

    def _check_files(self, directory: Path, manifest: Manifest) -> None:
        path = directory / MANIFEST_NAME
        missing = {block_file(b) for b in range(self._num_blocks)} - set(manifest.files)
        if missing:
            raise StateError(f"{path}: lists no {min(missing)} ({len(missing)} files are missing)")
        for name, entry in manifest.files.items():
            try:
                size = (directory / name).stat().st_size
            except FileNotFoundError as error:
                raise StateError(f"{directory / name}: is not there; {SHARED}") from error
            except OSError as error:
                raise StateError(f"{directory / name}: cannot read it: {error}") from error
            if size != entry.num_bytes:
                raise StateError(
                    f"{directory / name}: has {size} bytes, the manifest says {entry.num_bytes}"
                )


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def saved_at_s(state: SavedState | None) -> float | None:
    """Returns when a saved state was complete, in seconds since 1970; None without one."""
    if state is None:
        return None
    return (Path(state.directory) / MANIFEST_NAME).stat().st_mtime
