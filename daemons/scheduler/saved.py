"""Saved states on disk: find the newest, complete a new one, remove old ones.

A directory ``state/step-XXXXXXXX`` is always complete. Its files are written and synced under a
temporary name, the manifest last. Then the directory is renamed. memoryd defines the content of
the files (:mod:`penstock.daemons.memory.snapshot`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.daemons.memory.disk import DISK, Disk
from penstock.daemons.memory.snapshot import (
    BASE_FORMAT,
    MANIFEST_FORMAT,
    MANIFEST_NAME,
    Manifest,
    read_manifest,
)
from penstock.daemons.memory.states import check_files, checked_manifest, saved_steps
from penstock.daemons.memory.tensorfile import DamagedError
from penstock.daemons.scheduler.machine.events import CompleteSave, SavedState
from penstock.daemons.scheduler.machine.position import Position
from penstock.host.errors import StateError
from penstock.host.files import writing
from penstock.protocol.run.checksums import with_checksum
from penstock.protocol.run.names import SCHEDULERD
from penstock.protocol.run.saved_base import BASE

TEMPORARY_PREFIX = ".tmp-step-"
REPLACED_PREFIX = ".replaced-"
_log = logging.getLogger(__name__)


class SavedStates:
    """The ``state`` directory of a run."""

    def __init__(
        self,
        state_dir: Path,
        *,
        run_id: str,
        table_digest: str,
        num_blocks: int,
        keep: int,
        keep_every: int = 0,
        numerics: str = "",
        disk: Disk = DISK,
    ) -> None:
        """Prepares access to a run's saved states; reads no file.

        ``keep``: number of the newest states that stay. Multiples of ``keep_every`` stay, too (0:
        none). ``numerics``: digest of the run's recipe, for manifests.
        """
        self._state_dir = state_dir.absolute()
        self._run_id = run_id
        self._table_digest = table_digest
        self._num_blocks = num_blocks
        self._keep = keep
        self._keep_every = keep_every
        self._numerics = numerics
        self._disk = disk

    def newest(self, below: int | None = None) -> SavedState | None:
        """Returns the newest intact saved state before step ``below``. Manifest, list of files and
        sizes are checked. Each damaged state is left out with a warning.

        memoryd checks the checksums when it reads the files.

        Raises:
            StateError: there are saved states, and all are damaged, or the newest is of another
                model; names the file. Nothing was touched.
        """
        damage: list[str] = []
        for version, directory in reversed(saved_steps(self._state_dir)):
            if below is not None and version >= below:
                continue
            try:
                state = self.checked(version, directory)
            except DamagedError as error:
                damage.append(str(error))
                continue
            for text in damage:
                warn(f"{text}; the saved state of step {version} is the newest that is whole")
            return state
        if damage:
            raise StateError(f"{'; '.join(damage)}; no older saved state is whole")
        return None

    def checked(self, version: int, directory: Path) -> SavedState:
        """Returns a saved state after a check of its manifest, list of files and sizes.

        Raises:
            DamagedError: the state is damaged.
            StateError: the state belongs to another model.
        """
        manifest = checked_manifest(
            directory, version, table_digest=self._table_digest, num_blocks=self._num_blocks
        )
        path = directory / MANIFEST_NAME
        position = _position(manifest, path)
        if position.version != version:
            raise DamagedError(f"{path}: its position is that of version {position.version}")
        return SavedState(version=version, directory=str(directory), position=position)

    def prepare(self, directory: Path) -> None:
        """Makes an empty directory for a new state. Directories of earlier saves stay: a memoryd
        may not know yet that its save was dropped.

        Raises:
            PenstockError: it cannot be made.
        """
        if directory.exists():
            with writing(directory, 0):
                self._disk.remove(directory)
        self._disk.make_directory(directory)

    def remove_temporary(self) -> None:
        """Removes files of unfinished saves. A state that such a save was to replace gets its name
        back.

        Raises:
            ConfigError: the disk does not allow it.
        """
        for replaced in self._state_dir.glob(f"{REPLACED_PREFIX}step-*"):
            # A save of the same step was about to take its place, and may not be complete.
            final = self._state_dir / replaced.name.removeprefix(REPLACED_PREFIX)
            with writing(replaced, 0):
                if replaced.is_symlink() or not replaced.is_dir():
                    # Under the name of a step, it would count as a saved state.
                    self._disk.remove(replaced)
                    warn(f"{replaced}: was no folder that Penstock made, and is removed")
                elif final.exists():
                    self._disk.remove(replaced)
                else:
                    self._disk.rename(replaced, final)
                    self._disk.sync_names(self._state_dir)
        for path in self._state_dir.glob(f"{TEMPORARY_PREFIX}*"):
            with writing(path, 0):
                self._disk.remove(path)

    def complete(self, save: CompleteSave) -> Path:
        """Writes the manifest, gives the directory its name, and removes old states.

        Raises:
            StateError: the files are not what memoryds said they wrote.
            CapacityError, ConfigError: the disk does not take it.
        """
        directory = Path(save.directory)
        # memoryds have synced the files. The manifest follows, synced too; then the names in the
        # directory; then the rename, which makes all of it a saved state at once; then the name.
        manifest = {
            "format": BASE_FORMAT if save.base else MANIFEST_FORMAT,
            "run_id": self._run_id,
            "version": save.version,
            "table_digest": self._table_digest,
            "files": _listed(save.files),
            "scheduler": {**save.position.to_fields(), "attempt": save.attempt},
        }
        if save.base:
            manifest[BASE] = _listed(save.base)
        if self._numerics:
            manifest["numerics"] = self._numerics
        text = json.dumps(with_checksum(manifest), indent=1)
        with writing(directory / MANIFEST_NAME, len(text)):
            self._write_synced(directory / MANIFEST_NAME, text)
        check_files(directory, read_manifest(directory), self._num_blocks)
        final = self._state_dir / f"step-{save.version:08d}"
        with writing(final, len(text)):
            self._disk.sync_names(directory)
            if final.exists():  # of the same step, from before the run went back to an earlier one
                # Not a temporary name: a crash here must leave one of the two.
                replaced = self._state_dir / f"{REPLACED_PREFIX}{final.name}"
                if os.path.lexists(replaced):
                    self._disk.remove(replaced)
                self._disk.rename(final, replaced)
            self._disk.rename(directory, final)
            self._disk.sync_names(self._state_dir)
        self._prune(save.version, save.ranking)
        return final

    def _prune(self, version: int, ranking: Sequence[int]) -> None:
        """Removes states up to the just saved ``version`` that the policy does not keep. The best
        one of ``ranking`` that is saved stays, and later states: these are from before a rollback.
        A state is renamed before its removal, so that no step directory is ever incomplete.
        """
        older = [state for state in saved_steps(self._state_dir) if state[0] <= version]
        steps = {step for step, _ in older}
        best = next((step for step in ranking if step in steps), None)
        for step, directory in older[: -self._keep]:
            if step != best and not (self._keep_every and step % self._keep_every == 0):
                doomed = self._state_dir / f"{TEMPORARY_PREFIX}{step:08d}-old"
                self._disk.rename(directory, doomed)
        self.remove_temporary()

    def _write_synced(self, path: Path, text: str) -> None:
        with self._disk.create(path) as file:
            self._disk.write(file, text.encode())
            self._disk.sync(file)


def _listed(files: Sequence[tuple[str, int, str]]) -> dict[str, dict[str, int | str]]:
    return {name: {"bytes": size, "sha256": sha256} for name, size, sha256 in files}


def _position(manifest: Manifest, path: Path) -> Position:
    try:
        return Position.from_fields(manifest.scheduler, str(path))
    except StateError as error:
        raise DamagedError(str(error)) from error


def warn(text: str) -> None:
    """Writes a warning to the log and to stderr."""
    _log.warning("%s", text)
    sys.stderr.write(f"{SCHEDULERD}: {text}\n")
    sys.stderr.flush()


def saved_at_s(state: SavedState | None) -> float | None:
    """Returns the time at which a saved state was complete, in seconds since 1970, if any."""
    if state is None:
        return None
    return (Path(state.directory) / MANIFEST_NAME).stat().st_mtime
