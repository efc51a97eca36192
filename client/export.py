"""``penstock export`` writes the newest saved state of a run as a Hugging Face directory.

The saved state is verified here; the writing needs torch and transformers and happens in a process
of its own (:mod:`penstock.models.checkpoints.export`).
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
    """Returns the saved state after ``step``, or the newest.

    Raises:
        ConfigError: there is none; names those there are.
    """
    if not (run_dir / "run.json").exists():
        raise ConfigError(f"{run_dir}: no run directory (it has no run.json)")
    states = saved_states(run_dir)
    if not states:
        raise ConfigError(f"{run_dir}: no saved state; penstock snapshot saves a running training")
    if step is None:
        return states[-1]
    for state in states:
        if state.version == step:
            return state
    known = ", ".join(str(state.version) for state in states)
    raise ConfigError(f"--step {step}: saved are steps {known}")


def export(run_dir: Path, output: Path, step: int | None, *, whole: bool = False) -> StateFolder:
    """Writes ``output``, a directory that must not hold anything yet; ``whole``: with the other
    parts of a model whose text model was trained.

    Raises:
        ConfigError: nothing is saved, there is no model (an emulated run), or the output is in the
            way.
        StateError: the saved state is damaged.
    """
    state = choose_state(run_dir, step)
    cluster = RunDirectory(run_dir).config.cluster
    if cluster.platform.builtin_model:
        raise ConfigError(
            f"{run_dir}: ran on {cluster.device!r}; what an emulated run saves is no model"
        )
    verify(state.path)
    log = run_dir / "logs" / "export.txt"
    arguments = [str(run_dir), str(state.path), str(output), *["--whole"] * whole]
    run_tool("penstock.models.checkpoints.export", *arguments, log=log)
    return state


def verify(state: Path) -> None:
    """Holds every file of a saved state against its manifest.

    Raises:
        StateError: naming the file that is missing, short, or changed.
    """
    for name, entry in read_manifest(state).files.items():
        path = state / name
        if not path.is_file() or path.stat().st_size != entry.num_bytes:
            raise StateError(f"{path}: is missing or not of the size that the manifest says")
        if sha256_of(path, lambda: False) != entry.sha256:
            raise StateError(f"{path}: its checksum does not match the manifest: damaged")
