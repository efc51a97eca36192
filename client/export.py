"""``penstock export`` writes a saved state of a run as a Hugging Face directory, its adapter alone,
or weights and optimizer for another trainer.

This module verifies the saved state. :mod:`penstock.models.checkpoints.export` writes the directory
in another process, which imports torch and transformers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.client.states import mend_base
from penstock.client.views.run_view import StateFolder, saved_states
from penstock.client.weights.folder import unfinished
from penstock.daemons.memory.snapshot import read_manifest
from penstock.daemons.memory.tensorfile import sha256_of
from penstock.daemons.node.preparing.tool import run_tool
from penstock.daemons.scheduler.machine.activities.learning_rates import learning_rate
from penstock.host.errors import ConfigError, StateError
from penstock.host.files import follow_umask, parse_json, sync_directory, writing
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFormat:
    """A format of exports. ``content``: its files, in a sentence. ``trains``: the files have the
    optimizer's state. ``advice``: a sentence for the user of the files.
    """

    content: str
    trains: bool = False
    advice: str = ""


HF, PEFT, DCP, UNIVERSAL = "hf", "peft", "dcp", "universal"
FORMATS: Mapping[str, ExportFormat] = MappingProxyType(
    {
        HF: ExportFormat(content="a Hugging Face model"),
        PEFT: ExportFormat(content="the adapter alone, in PEFT's files"),
        DCP: ExportFormat(
            content="weights and optimizer for torch.distributed.checkpoint", trains=True
        ),
        UNIVERSAL: ExportFormat(
            content="weights and Adam's state as DeepSpeed's universal checkpoint",
            trains=True,
            advice="ZeRO-3 with several groups or sub-groups needs two lines after"
            " load_checkpoint: see penstock docs CHECKPOINTS",
        ),
    }
)
"""Formats by the value of ``--format``."""

TRANSFORMERS, TORCHTITAN = "transformers", "torchtitan"
"""Values of ``--names``: the trainer with the names and rows of the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of an export. ``dtype`` None: ``model.dtype``, and fp32 for an adapter or with the
    optimizer. ``whole`` adds the untrained parts of a multimodal model. ``verify`` reads the files
    back. ``dry_run`` lists the tensors and writes nothing. ``names``: the trainer with the names of
    ``dcp``.
    """

    form: str = HF
    dtype: str | None = None
    whole: bool = False
    verify: bool = False
    dry_run: bool = False
    names: str = TRANSFORMERS

    def check(self) -> None:
        """Refuses values and pairs of options that do not exist.

        Raises:
            ConfigError: names the option and its values.
        """
        dtypes = [dtype.value for dtype in DType]
        if self.form not in FORMATS:
            raise ConfigError(f"--format {self.form}: accepted are {', '.join(FORMATS)}")
        if self.dtype not in (None, *dtypes):
            raise ConfigError(f"--dtype {self.dtype}: accepted are {', '.join(dtypes)}")
        if self.form == UNIVERSAL and self.dtype not in (None, DType.FP32.value):
            raise ConfigError(
                f"--dtype {self.dtype}: --format {self.form} has fp32 masters; leave --dtype out"
            )
        if self.names not in (TRANSFORMERS, TORCHTITAN):
            raise ConfigError(f"--names {self.names}: accepted are {TRANSFORMERS}, {TORCHTITAN}")
        if self.names == TORCHTITAN and self.form != DCP:
            raise ConfigError(f"--names {TORCHTITAN}: torchtitan loads DCP; give --format {DCP}")
        if self.dry_run and (self.verify or self.whole):
            flag = "--verify" if self.verify else "--whole"
            raise ConfigError(f"--dry-run: writes nothing; leave {flag} out")
        if not self.whole:
            return
        if self.form == PEFT:
            raise ConfigError("--whole: an adapter has no other parts; leave --whole out")
        if FORMATS[self.form].trains:
            raise ConfigError(
                f"--whole: --format {self.form} writes the trained model; leave --whole out"
            )
        if self.dtype is not None:
            raise ConfigError("--whole: tensors keep the types of the folder; leave --dtype out")
        if self.verify:
            raise ConfigError("--whole: --verify compares the text model alone; leave --whole out")


def export(
    run_dir: Path, output: Path, step: int | None, options: ExportOptions | None = None
) -> dict[str, Any]:
    """Writes a saved state to ``output``, a new or empty directory; returns the report.

    Raises:
        ConfigError: no state is saved, the run is emulated and has no model, or ``output`` cannot
            be used. Or the run has no adapter to write.
        StateError: the saved state is damaged, or a verified tensor differs.
    """
    options = ExportOptions() if options is None else options
    options.check()
    check_output(run_dir, output)
    state = verified_state(run_dir, step)
    config = RunDirectory(run_dir).config
    check_form(run_dir, options.form, adapted=config.adapter is not None)
    flags = {"--whole": options.whole, "--verify": options.verify, "--list": options.dry_run}
    # Torch's groups have the rate of the step to come.
    rate = learning_rate(config.optimizer, config.train.steps, state.version + 1)
    form = TORCHTITAN if options.names == TORCHTITAN else options.form
    samples_seen = read_manifest(state.path).scheduler["data_position"]
    arguments = ["--format", form, "--step", str(state.version), "--rate", repr(rate)]
    arguments += ["--samples", str(samples_seen)]
    arguments += [flag for flag, is_set in flags.items() if is_set]
    arguments += [] if options.dtype is None else ["--dtype", options.dtype]
    report = {
        **{"run": str(run_dir), "step": state.version, "format": options.form},
        **{"out": str(output), "dry_run": options.dry_run, "verified": options.verify},
        **{"adapted": config.adapter is not None, "names": options.names},
    }
    lines: list[str] = []
    log = run_dir / "logs" / "export.txt"
    # A dry run only names the folder.
    with nullcontext(output) if options.dry_run else appearing(output) as folder:
        words = (str(run_dir), str(state.path), str(folder), *arguments)
        run_tool("penstock.models.checkpoints.export", *words, log=log, progress=lines.append)
    printed = [parse_json(line) for line in lines if line[:1] == "{"]
    report["notes"] = [each["note"] for each in printed if "note" in each]
    if options.dry_run:
        return report | {"tensors": [each for each in printed if "note" not in each]}
    sizes = (path.stat().st_size for path in output.rglob("*") if path.is_file())
    return report | {"bytes": sum(sizes)}


def check_output(run_dir: Path, output: Path) -> None:
    """Refuses a place for the files of an export.

    Raises:
        ConfigError: ``output`` is a file, has files, is the current directory, or lies among the
            run's saved states.
    """
    refuse_states(run_dir, output)
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output}: is a file; give a new directory")
    if os.path.realpath(output) == os.getcwd():
        raise ConfigError(f"{output}: is the current directory; give a new directory")
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} exists and is not empty; give another directory")


def refuse_states(run_dir: Path, output: Path) -> None:
    """Refuses a place among a run's saved states, where a folder counts as one of the states.

    Raises:
        ConfigError: names both folders.
    """
    states = os.path.realpath(RunDirectory(run_dir).state_dir)
    if os.path.commonpath([states, os.path.realpath(output)]) == states:
        raise ConfigError(
            f"{output}: lies in {states}, which has the run's saved states; give another directory"
        )


@contextmanager
def appearing(output: Path) -> Iterator[Path]:
    """Yields an empty folder for the files, which becomes ``output`` at the end. An error, or a
    killed process that fills the folder, leaves nothing. A link leads to the place of the files.
    """
    place = Path(os.path.realpath(output))
    with unfinished(place) as folder:
        yield folder
        with writing(place, 0):
            follow_umask(folder)
            folder.rename(place)
            sync_directory(place.parent)


def check_form(run_dir: Path, form: str, *, adapted: bool) -> None:
    """Refuses a format that a run's model or adapter does not have.

    Raises:
        ConfigError: names the format and the formats to give.
    """
    if form == PEFT and not adapted:
        raise ConfigError(
            f"--format {PEFT}: {run_dir} trained the model itself and has no adapter; give"
            f" --format {HF}"
        )
    if FORMATS[form].trains and adapted:
        raise ConfigError(
            f"--format {form}: {run_dir} trained an adapter, for which the format has no place;"
            f" give --format {PEFT}, or {HF} with the adapter merged"
        )


def to_text(report: Mapping[str, Any]) -> str:
    """Returns the lines for the user."""
    return "\n".join(_lines(report))


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    form, place = report["format"], f"step {report['step']} of {report['run']}"
    subject = f"the adapter of {place}" if form == PEFT else place
    content = FORMATS[form].content
    if report["dry_run"]:
        tensors = report["tensors"]
        yield from (f"{t['name']}  {t['dtype']}  {t['shape']}" for t in tensors)
        num_bytes = sum(tensor["bytes"] for tensor in tensors)
        yield f"{subject} as {content}: {len(tensors)} tensors of {num_bytes} bytes"
        yield from report["notes"]
        yield f"nothing was written; leave --dry-run out to write {report['out']}"
        return
    yield f"{subject} is in {report['out']}: {content}"
    yield from report["notes"]
    if report["adapted"] and form == HF:
        yield f"its adapter is merged into the weights; --format {PEFT} writes it alone"
    if FORMATS[form].advice:
        yield FORMATS[form].advice
    if report["verified"]:
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
    try:
        verify(state.path)
    except StateError:
        mend_base(run_dir, lambda line: sys.stderr.write(f"{line}\n"), every_byte=True)
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
