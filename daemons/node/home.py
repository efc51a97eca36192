"""Whose memory it is that bears a run's id: that of the directory at hand, or of one it was copied
from.

A run directory keeps in ``.home`` where it was when the run was started last, and which file its
``run.json`` was then: ``{"path", "device", "inode"}``. In a copy that is another file; where the
first is still in its place, memory of the run belongs there. A directory that was moved finds no
other, and takes the memory along.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from penstock.daemons.node.remains import held_version
from penstock.protocol.errors import StateError
from penstock.protocol.files import holds_text, parse_json, write_atomically
from penstock.protocol.rundir import RunDirectory
from penstock.shm.inventory import inventory

HOME = ".home"


def check_home(directory: RunDirectory) -> None:
    """Refuse a copy of a run that is active, or in memory, elsewhere.

    Raises:
        StateError: says where, and what to do. Or ``run.json`` is damaged.
    """
    original = original_of(directory.path)
    held = [entry for entry in inventory() if entry.run_id == directory.run_id]
    if original is None or not held:
        return
    step = held_version(directory.run_id)
    memory = "memory" if step is None else f"step {step} in memory"
    if any(entry.in_use for entry in held):
        remedy = f"stop it first (penstock stop --run-dir {original})"
    else:
        remedy = (
            f"go on there and let it save (penstock train {original}/resolved.yaml), or give it up"
            f" (penstock doctor --clean --force --run-dir {original})"
        )
    raise StateError(
        f"{directory.path}: is a copy of {original}, and run {directory.run_id} has {memory}, which"
        f" belongs there: {remedy}; then this copy goes on from its own saved state"
    )


def settle_home(directory: RunDirectory) -> None:
    """This directory is the run's place from now on."""
    path = directory.path.absolute()
    text = json.dumps({"path": str(path), **_identity(path)})
    if not holds_text(path / HOME, text):
        write_atomically(path / HOME, text)


def original_of(path: Path) -> Path | None:
    """The directory that this one is a copy of, if that is still there."""
    try:
        fields = parse_json((path / HOME).read_bytes())
        home, identity = Path(fields["path"]), {k: fields[k] for k in ("device", "inode")}
        if identity == _identity(path) or home == path.absolute():
            return None
        return home if identity == _identity(home) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no such file, not of our making, or the other directory is gone


def _identity(path: Path) -> dict[str, int]:
    status = os.stat(path / "run.json")
    return {"device": status.st_dev, "inode": status.st_ino}
