"""Lists the saved states of a run directory, and checks whether each is complete.

The scheduler uses it, and commands that run before any process starts (``penstock train``,
``penstock snapshots``). Sizes reveal most damage at once; checksums reveal the rest
(:func:`verify`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from penstock.daemons.memory.snapshot import (
    MANIFEST_NAME,
    Manifest,
    block_file,
    check_content,
    check_size,
    in_parallel,
    read_manifest,
)
from penstock.daemons.memory.tensorfile import DamagedError, read_header
from penstock.host.errors import StateError
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import BlockTable

_STEP = re.compile(r"step-(\d{8,})")


def saved_steps(state_dir: Path) -> list[tuple[int, Path]]:
    """Returns step and directory of all complete saved states, oldest first. What is being written
    has another name.
    """
    if not state_dir.is_dir():
        return []
    matches = ((_STEP.fullmatch(path.name), path) for path in state_dir.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match is not None)


def checked_manifest(
    directory: Path, version: int, *, table_digest: str, num_blocks: int
) -> Manifest:
    """Returns the manifest of a saved state: it is of ``version``, and all files that it lists are
    there in their sizes.

    Raises:
        DamagedError: they are not; names the file.
        StateError: it is of another model.
    """
    manifest = read_manifest(directory)
    path = directory / MANIFEST_NAME
    if manifest.table_digest != table_digest:
        raise StateError(
            f"{path}: saved from another model: its block table has digest"
            f" {manifest.table_digest[:12]}, this run's {table_digest[:12]}"
        )
    if manifest.version != version:
        raise DamagedError(
            f"{path}: is of version {manifest.version}, its directory says {version}"
        )
    check_files(directory, manifest, num_blocks)
    return manifest


def check_files(directory: Path, manifest: Manifest, num_blocks: int) -> None:
    """Checks that the files of all blocks are listed, and that the base, too, has the listed sizes.

    Raises:
        DamagedError: naming the file.
    """
    path = directory / MANIFEST_NAME
    missing = {block_file(b) for b in range(num_blocks)} - set(manifest.files)
    if missing:
        count = len(missing)
        raise DamagedError(f"{path}: lists no {min(missing)} ({count} files are missing)")
    for path, entry in manifest.paths(directory).items():
        check_size(path, entry)


def refuse_damage(run_dir: Path, warn: Callable[[str], None]) -> None:
    """Refuses to start a run with saved states but no intact one, as far as sizes show. ``warn``
    receives a warning about newer damaged states.

    Raises:
        StateError: all are damaged, or one is of another model.
    """
    run, damage = RunDirectory(run_dir.absolute()), list[str]()
    if not run.state_dir.is_dir() or not (run_dir / "table.json").is_file():
        return
    for version, directory in reversed(saved_steps(run.state_dir)):
        table = run.table
        try:
            checked_manifest(
                directory, version, table_digest=table.digest, num_blocks=len(table.blocks)
            )
        except DamagedError as error:
            damage.append(str(error))
            continue
        for text in damage:
            warn(f"warning: {text}; the saved state of step {version} is the newest that is whole")
        return
    if damage:
        raise StateError(f"{'; '.join(damage)}; no older saved state is whole")


def verify(directory: Path, version: int, table: BlockTable) -> int:
    """Checks every byte of a saved state and of its base; returns the bytes of the state's files.

    Raises:
        DamagedError: naming the file and what is wrong with it.
        StateError: it is of another model.
    """
    manifest = checked_manifest(
        directory, version, table_digest=table.digest, num_blocks=len(table.blocks)
    )

    paths = list(manifest.paths(directory).items())

    def check(number: int, stopped: Callable[[], bool]) -> None:
        path, entry = paths[number]
        read_header(path)
        check_content(path, entry, stopped)

    in_parallel(range(len(paths)), check, lambda: False)
    return sum(entry.num_bytes for entry in manifest.files.values())
