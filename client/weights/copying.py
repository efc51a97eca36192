"""``penstock weights`` copies the committed weights of a run that trains.

The scheduler orders the copy as it orders a save, and memoryds write (the contracts are in
docs/INTERNALS.md). Where each tensor of the copy is a part of one of the run's tensors, memoryds
write the finished files. Otherwise, and for merged adapters, they write a saved state without the
optimizer's arrays into the run directory, and the export converts it.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.client.export import HF, PEFT, ExportOptions, check_form, refuse_states
from penstock.client.weights.folder import (
    Note,
    complete,
    listing,
    name_step,
    older_copy,
    unfinished,
)
from penstock.daemons.memory.snapshot import MANIFEST_NAME
from penstock.daemons.node.preparing.tool import run_tool
from penstock.host.errors import ConfigError, StateError
from penstock.host.files import writing
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.saved_base import BASE
from penstock.protocol.wire.control import ControlClient, is_stale
from penstock.shm.published import BY_STATE, LAYOUT, PublishedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsCopy:
    """A finished copy. ``copy_seconds``: of memoryds, with the wait for the attempt under way.
    ``converted``: why the copy was exported from a state; empty if memoryds wrote it.
    ``replaced_step``: step of the older copy in the folder, if any.
    """

    step: int
    directory: str
    format: str
    dtype: str
    bytes: int
    files: list[str]
    replaced_step: int | None
    seconds: float
    copy_seconds: float
    converted: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the output of ``--json``."""
        return asdict(self)

    def to_text(self, run_dir: Path) -> str:
        """Returns the lines for the user."""
        speed = self.bytes / max(self.copy_seconds, 1e-9) / 1e6
        lines = [f"the weights of step {self.step} of {run_dir} are in {self.directory}"]
        if self.replaced_step is not None:
            lines[0] += f", in the place of those of step {self.replaced_step}"
        size = f"{self.bytes / 1e6:,.1f} MB ({self.dtype}) in {len(self.files)} files"
        if self.converted:
            lines.append(f"{size} in {self.seconds:.1f} s, by an export: {self.converted}")
        else:
            lines.append(
                f"{size} in {self.seconds:.1f} s, of which memory was copied for"
                f" {self.copy_seconds:.1f} s ({speed:,.0f} MB/s)"
            )
        return "\n".join(lines)


def copy_latest(run_dir: Path, to: Path, options: ExportOptions) -> WeightsCopy:
    """Copies the newest committed weights of an active run into the folder ``to``.

    Raises:
        ConfigError: the run is not active or emulated, an option does not fit, or the folder has
            other files.
        CapacityError: the weights could not be written; training goes on.
        LostMemberError: the scheduler does not answer any more.
    """
    started_s = time.monotonic()
    if options.form not in (HF, PEFT):
        raise ConfigError(f"--format {options.form}: accepted are {HF} and {PEFT}")
    options.check()
    refuse_states(run_dir, to)
    run = _run(run_dir)
    check_form(run_dir, options.form, adapted=run.config.adapter is not None)
    if run.config.cluster.platform.builtin_model:
        raise ConfigError(
            f"{run_dir}: runs on {run.config.cluster.device!r}; emulated runs have no model"
        )
    target = to.resolve()
    replaced = older_copy(target)
    with _client(run_dir) as client, unfinished(target) as folder:
        client.status()  # before seconds of work
        reason = _lay_out(run, folder, options)
        before_s = time.monotonic()
        if reason:
            reply, copied_s = _by_state(run, client, folder, options)
        else:
            reply = client.weights(folder)
            copied_s = time.monotonic() - before_s
            _check_sizes(run, folder, reply)
            (folder / LAYOUT).unlink()
        name_step(folder, reply.version)
        files = listing(folder)
        note = Note(
            run_id=run.run_id,
            run_name=run.config.run.name,
            step=reply.version,
            form=options.form,
            dtype=options.dtype or _own_dtype(run, options),
            files=files,
        )
        complete(folder, target, note)
    return WeightsCopy(
        step=note.step,
        directory=str(target),
        format=note.form,
        dtype=note.dtype,
        bytes=sum(files.values()),
        files=sorted(files),
        replaced_step=None if replaced is None else replaced.step,
        seconds=time.monotonic() - started_s,
        copy_seconds=copied_s,
        converted=reason,
    )


def _run(run_dir: Path) -> RunDirectory:
    if not (run_dir / "run.json").exists():
        raise ConfigError(f"{run_dir}: no run directory (it has no run.json)")
    return RunDirectory(run_dir.absolute())


def _client(run_dir: Path) -> ControlClient:
    if not (run_dir / "endpoint.json").exists() or is_stale(run_dir):
        raise ConfigError(
            f"{run_dir}: no run is active there; penstock export writes a saved state"
        )
    return ControlClient.for_run(run_dir)


def _own_dtype(run: RunDirectory, options: ExportOptions) -> str:
    return "fp32" if options.form == PEFT else run.config.model.dtype.value


def _arguments(options: ExportOptions) -> list[str]:
    chosen = [] if options.dtype is None else ["--dtype", options.dtype]
    return ["--format", options.form, *chosen]


def _lay_out(run: RunDirectory, folder: Path, options: ExportOptions) -> str:
    """Makes all files of the copy without weights; returns why that is not possible, if so."""
    lines: list[str] = []
    run_tool(
        "penstock.models.checkpoints.layout",
        str(run.path),
        str(folder),
        *_arguments(options),
        log=run.path / "logs" / "weights.txt",
        progress=lines.append,
    )
    reasons = [line.removeprefix(f"{BY_STATE}: ") for line in lines if line.startswith(BY_STATE)]
    return reasons[-1] if reasons else ""


def _check_sizes(run: RunDirectory, folder: Path, reply: pb.WeightsReply) -> None:
    """Compares the bytes that memoryds wrote with the layout.

    Raises:
        StateError: bytes are missing.
    """
    path = folder / LAYOUT
    layout = PublishedLayout.from_json(path.read_bytes(), run.table, str(path))
    written: dict[str, int] = {}
    for part in reply.files:
        written[part.name] = written.get(part.name, 0) + part.bytes
    for file in layout.files:
        due = sum(tensor.num_bytes for tensor in file.tensors)
        size = (folder / file.name).stat().st_size
        if written.get(file.name, 0) != due or size != file.num_bytes:
            raise StateError(
                f"{folder / file.name}: memoryds wrote {written.get(file.name, 0)} of {due} bytes"
                " of tensors; the copy is dropped"
            )


def _by_state(
    run: RunDirectory, client: ControlClient, folder: Path, options: ExportOptions
) -> tuple[pb.WeightsReply, float]:
    """Lets memoryds write a state without the optimizer's arrays, and exports the state; returns
    their reply, and the seconds until then.
    """
    with unfinished(run.state_dir / "weights") as state:
        before_s = time.monotonic()
        reply = client.weights(state)
        copied_s = time.monotonic() - before_s
        base = {
            file.name: {"bytes": file.bytes, "sha256": file.sha256}
            for file in reply.files
            if file.base
        }
        with writing(state, 0):
            (state / MANIFEST_NAME).write_text(json.dumps({BASE: base}), encoding="utf-8")
        run_tool(
            "penstock.models.checkpoints.export",
            *(str(run.path), str(state), str(folder)),
            *_arguments(options),
            log=run.path / "logs" / "weights.txt",
        )
    return reply, copied_s
