"""``penstock export`` writes a saved state of a run as a Hugging Face directory.

This module verifies the saved state. :mod:`penstock.models.checkpoints.export` writes the directory
in another process, which imports torch and transformers.
"""

from __future__ import annotations

from pathlib import Path

from penstock.client.views.run_view import StateFolder, saved_states
from penstock.daemons.memory.snapshot import read_manifest
from penstock.daemons.memory.tensorfile import sha256_of
from penstock.daemons.node.preparing.tool import run_tool
from penstock.host.errors import ConfigError, StateError
from penstock.protocol.run.rundir import RunDirectory


def choose_state(run_dir: Path, step: int | None) -> StateFolder:
    """Returns the saved state of ``step``, or the newest.

    Raises:
        ConfigError: the step is not saved; the message lists the saved steps.
    """
    if not (run_dir / "run.json").exists():
        raise ConfigError(f"{run_dir}: no run directory (it has no run.json)")
    states = saved_states(run_dir)
    if not states:
        raise ConfigError(f"{run_dir}: no saved state; penstock snapshot saves a run that trains")
    if step is None:
        return states[-1]
    for state in states:
        if state.version == step:
            return state
    known = ", ".join(str(state.version) for state in states)
    raise ConfigError(f"--step {step}: not saved; saved steps are {known}")


def export(run_dir: Path, output: Path, step: int | None, *, whole: bool = False) -> StateFolder:
    """Writes a saved state to ``output``, a new or empty directory. ``whole`` adds the untrained
    parts of a multimodal model.

    Raises:
        ConfigError: no state is saved, the run is emulated and has no model, or the directory is
            not empty.
        StateError: the saved state is damaged.
    """
    state = verified_state(run_dir, step)
    log = run_dir / "logs" / "export.txt"
    arguments = [str(run_dir), str(state.path), str(output), *["--whole"] * whole]
    run_tool("penstock.models.checkpoints.export", *arguments, log=log)
    return state


def verified_state(run_dir: Path, step: int | None) -> StateFolder:
    """Returns the saved state of ``step``, or the newest, with every byte verified.

    Raises:
        ConfigError: no state is saved, or the run is emulated and has no model.
        StateError: the saved state is damaged.
    """
    state = choose_state(run_dir, step)
    cluster = RunDirectory(run_dir).config.cluster
    if cluster.platform.builtin_model:
        raise ConfigError(f"{run_dir}: ran on {cluster.device!r}; emulated runs save no model")
    verify(state.path)
    return state


def verify(state: Path) -> None:
    """Compares every file of a saved state, and of its base, with the manifest.

    Raises:
        StateError: a file is missing, has another size, or has changed.
    """
    for path, entry in read_manifest(state).paths(state).items():
        if not path.is_file() or path.stat().st_size != entry.num_bytes:
            raise StateError(f"{path}: is missing, or its size differs from the manifest")
        if sha256_of(path, lambda: False) != entry.sha256:
            raise StateError(f"{path}: is damaged: its checksum differs from the manifest")
