"""``penstock export`` writes a saved state of a run as a Hugging Face directory, or its adapter
alone.

This module verifies the saved state. :mod:`penstock.models.checkpoints.export` writes the directory
in another process, which imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.client.views.run_view import StateFolder, saved_states
from penstock.daemons.memory.snapshot import read_manifest
from penstock.daemons.memory.tensorfile import sha256_of
from penstock.daemons.node.preparing.tool import run_tool
from penstock.host.errors import ConfigError, StateError
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import DType


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


HF, PEFT = "hf", "peft"
"""Formats: the whole model, with its adapter merged; and the adapter alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of an export. ``dtype`` None: ``model.dtype``, and fp32 for an adapter. ``whole``
    adds the untrained parts of a multimodal model. ``verify`` reads the files back.
    """

    form: str = HF
    dtype: str | None = None
    whole: bool = False
    verify: bool = False

    def check(self) -> None:
        """Refuses values and pairs of options that do not exist.

        Raises:
            ConfigError: names the option and its values.
        """
        dtypes = [dtype.value for dtype in DType]
        if self.form not in (HF, PEFT):
            raise ConfigError(f"--format {self.form}: accepted are {HF} and {PEFT}")
        if self.dtype not in (None, *dtypes):
            raise ConfigError(f"--dtype {self.dtype}: accepted are {', '.join(dtypes)}")
        if not self.whole:
            return
        if self.form == PEFT:
            raise ConfigError("--whole: an adapter has no other parts; leave --whole out")
        if self.dtype is not None:
            raise ConfigError("--whole: tensors keep the types of the folder; leave --dtype out")
        if self.verify:
            raise ConfigError("--whole: --verify compares the text model alone; leave --whole out")


def export(
    run_dir: Path, output: Path, step: int | None, options: ExportOptions | None = None
) -> str:
    """Writes a saved state to ``output``, a new or empty directory; returns lines for the user.

    Raises:
        ConfigError: no state is saved, the run is emulated and has no model, or the directory is
            not empty. Or the run has no adapter to write.
        StateError: the saved state is damaged, or a verified tensor differs.
    """
    options = ExportOptions() if options is None else options
    options.check()
    state = verified_state(run_dir, step)
    adapted = RunDirectory(run_dir).config.adapter is not None
    if options.form == PEFT and not adapted:
        raise ConfigError(
            f"--format {PEFT}: {run_dir} trained the model itself and has no adapter; give"
            f" --format {HF}"
        )
    flags = {"--whole": options.whole, "--verify": options.verify}
    arguments = [str(run_dir), str(state.path), str(output), "--format", options.form]
    arguments += [flag for flag, is_set in flags.items() if is_set]
    arguments += [] if options.dtype is None else ["--dtype", options.dtype]
    log = run_dir / "logs" / "export.txt"
    run_tool("penstock.models.checkpoints.export", *arguments, log=log)
    return "\n".join(_lines(run_dir, output, state, options, adapted))


def _lines(
    run_dir: Path, output: Path, state: StateFolder, options: ExportOptions, adapted: bool
) -> Iterator[str]:
    if options.form == PEFT:
        yield f"the adapter of step {state.version} of {run_dir} is in {output}, in PEFT's files"
    else:
        yield f"step {state.version} of {run_dir} is in {output}"
        if adapted:
            yield f"its adapter is merged into the weights; --format {PEFT} writes it alone"
    if options.verify:
        yield "verified: every tensor, read back, equals that of the saved state"


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
