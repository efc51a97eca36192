"""``penstock import``: a run that continues the training of another trainer.

The checkpoint is compared with the model of the configuration before anything is written. Then the
run is prepared, the tensors become a saved state, and the state gets its name last. After an
interrupted import the folder has the file ``importing.json``, and training is refused there.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.schema import Config
from penstock.config.values import CHOSEN_LATER
from penstock.daemons.node.preparing.hub import fetched_config
from penstock.daemons.node.preparing.places import with_absolute_paths
from penstock.daemons.node.preparing.prepare import IMPORTING, prepare_run
from penstock.daemons.node.preparing.tool import run_models_prepare, run_tool
from penstock.daemons.node.run_lock import RunLock, train_lock_path
from penstock.daemons.preload.starting import Starter
from penstock.daemons.scheduler.machine.activities.learning_rates import learning_rate
from penstock.daemons.scheduler.machine.events import CompleteSave
from penstock.daemons.scheduler.machine.position import Position
from penstock.daemons.scheduler.saved import TEMPORARY_PREFIX, SavedStates
from penstock.host.errors import ConfigError, PenstockError
from penstock.host.files import DAMAGED, make_directory, parse_json, write_atomically
from penstock.host.limits.scratch import scratch_folder
from penstock.host.trust import printable
from penstock.protocol.run.data_size import with_known_steps
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import DType

REPORT = "import.json"
"""Report in the run directory: each tensor with its source."""
_ROUNDING = 1e-6
"""Largest relative difference of equal learning rates: another order of operations, or fp32."""
_TOOL = "penstock.models.exchange.importing"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """A request: the checkpoint, and the options of ``penstock import``. ``samples_seen`` None:
    the checkpoint's own count, or the steps times ``train.global_batch``.
    """

    source: Path
    samples_seen: int | None = None
    weights_only: bool = False
    verify: bool = False

    @property
    def words(self) -> list[str]:
        """Arguments of the tool."""
        words = ["--weights-only"] if self.weights_only else []
        if self.samples_seen is not None:
            words += ["--samples-seen", str(self.samples_seen)]
        return words


def check(config: Config, request: Import, say: Say, starter: Starter | None) -> dict[str, Any]:
    """Returns the report of an import; writes nothing that stays. ``starter``: a faster way to
    start the processes that need torch; None: they are spawned.

    Raises:
        ConfigError: the checkpoint does not fit the configuration; the error's ``report`` names
            each tensor and the problems.
        PenstockError: the configuration or the checkpoint cannot be read.
    """
    if config.cluster.platform.builtin_model:
        raise ConfigError(
            f"cluster.device: {config.cluster.device!r} has a model of its own; import needs cpu or"
            " cuda"
        )
    config = fetched_config(config, say)
    with scratch_folder("import") as folder:
        RunDirectory.create(folder)
        text = with_absolute_paths(config).to_yaml()
        write_atomically(folder / "resolved.yaml", text)
        run_models_prepare(config, folder, "--table-only", progress=say, starter=starter)
        log = Path(f"{folder}.txt")  # which stays, if an error needs it
        report = _reported(folder, request, folder / REPORT, log, starter)
    compare_rates(report, config)
    return report


def import_run(
    config: Config, run_dir: Path, request: Import, say: Say, starter: Starter | None
) -> dict[str, Any]:
    """Makes a run that goes on from the checkpoint; returns the report. ``starter``: as in
    :func:`check`.

    Raises:
        ConfigError: ``run_dir`` has files. Or as :func:`check`.
        PenstockError: the run cannot be prepared; nothing is left in ``run_dir``.
    """
    run_dir = run_dir.absolute()
    _refuse_files(run_dir)
    _refuse_nesting(run_dir.resolve(), request.source.resolve())
    check(config, request, lambda line: None, starter)  # the preparation has the same lines
    make_directory(run_dir)
    with RunLock.acquire(train_lock_path(run_dir), wait_s=0.0):
        try:
            _remove_content(run_dir)
            write_atomically(run_dir / IMPORTING, json.dumps({"source": str(request.source)}))
            run = prepare_run(config, run_dir, say, (0,), starter, imports=True)
            report = _written(run, request, say, starter)
            compare_rates(report, with_known_steps(run.config, run.path))
            write_atomically(run_dir / REPORT, json.dumps(report, indent=1))
            (run_dir / IMPORTING).unlink()
        except BaseException:
            _remove_content(run_dir)
            (run_dir / IMPORTING).unlink(missing_ok=True)
            raise
    return report


def _written(
    run: RunDirectory, request: Import, say: Say, starter: Starter | None
) -> dict[str, Any]:
    """Writes the saved state, and returns the report."""
    path = run.path / f"{REPORT}.tmp"
    into = run.state_dir / f"{TEMPORARY_PREFIX}import"
    words = ["--into", str(into), *(["--verify"] if request.verify else [])]
    log = run.path.with_name(f"{run.path.name}-import.txt")
    report = _reported(run.path, request, path, log, starter, words, say)
    path.unlink()
    files = tuple((str(f["name"]), int(f["bytes"]), str(f["sha256"])) for f in report.pop("files"))
    assert len(files) == len(run.table.blocks)
    optimizer = run.config.optimizer
    fp16 = run.config.model.dtype is DType.FP16
    states = SavedStates(
        run.state_dir,
        run_id=run.run_id,
        table_digest=run.table.digest,
        num_blocks=len(run.table.blocks),
        keep=run.config.train.keep_snapshots,
        keep_every=run.config.train.keep_every,
    )
    states.complete(
        CompleteSave(
            number=0,
            version=report["step"],
            directory=str(into),
            files=files,
            position=Position(
                version=report["step"],
                data_position=report["samples_seen"],
                loss_scale=optimizer.initial_loss_scale if fp16 else 1.0,
            ),
            attempt=0,
        )
    )
    return report


def _reported(
    run_dir: Path,
    request: Import,
    report: Path,
    log: Path,
    starter: Starter | None,
    words: Sequence[str] = (),
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Runs the tool, and returns its report. ``log``: of an error that is no user's; outside of the
    folder, which the error removes.
    """
    source = str(request.source.absolute())
    arguments = (str(run_dir), source, str(report), *request.words, *words)
    try:
        run_tool(_TOOL, *arguments, log=log, progress=say, starter=starter)
    except PenstockError as error:
        if (fields := _read(report)) and fields["problems"]:
            error.report = fields
        raise
    fields = _read(report)
    assert fields is not None, "the tool ended without an error"
    return {"source": source, **fields}


def compare_rates(report: dict[str, Any], config: Config) -> None:
    """Notes learning rates of the checkpoint that the configuration's curve does not have."""
    rates, step, optimizer = report["rates"], report["step"] + 1, config.optimizer
    if rates and config.train.steps == CHOSEN_LATER:
        report["notes"].append(
            "learning rates are not compared: the import itself counts the steps of train.epochs"
        )
        return
    for rate in rates:
        here = rate["factor"] * (
            optimizer.lr if rate["is_peak"] else learning_rate(optimizer, config.train.steps, step)
        )
        rate["configuration"] = here
        if math.isclose(rate["checkpoint"], here, rel_tol=_ROUNDING, abs_tol=1e-9 * optimizer.lr):
            continue
        tensors = f" for {rate['tensors']}" if len(rates) > 2 and rate["tensors"] else ""
        foreign = f"{rate['field']} is {rate['checkpoint']:.8g}{tensors}"
        if rate["is_peak"]:
            report["notes"].append(f"{foreign}, optimizer.lr gives {here:.8g}")
        else:
            report["notes"].append(
                f"{foreign}, the configuration gives step {step} the rate {here:.8g}; optimizer.lr,"
                " schedule, curve, warmup_steps, min_lr and train.steps decide it"
            )


def _read(report: Path) -> dict[str, Any] | None:
    try:
        fields: dict[str, Any] = parse_json(report.read_bytes())
    except (OSError, *DAMAGED):
        return None
    return fields


def _refuse_files(run_dir: Path) -> None:
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: is a file; name a new directory")
    if not run_dir.exists() or (run_dir / IMPORTING).exists():
        return
    if content := _content(run_dir):
        raise ConfigError(
            f"{run_dir}: has files ({content[0].name}); an import makes a new run, name"
            " another directory"
        )


def _refuse_nesting(run_dir: Path, source: Path) -> None:
    if source in (run_dir, *run_dir.parents) or run_dir in source.parents:
        raise ConfigError(
            f"{run_dir}: lies in the checkpoint {source}, or contains it; name another directory"
        )


def _content(run_dir: Path) -> list[Path]:
    """Returns the files of a run directory without those of its locks and of the import."""
    return [
        path
        for path in sorted(run_dir.iterdir())
        if not path.name.startswith(".lock") and path.name != IMPORTING
    ]


def _remove_content(run_dir: Path) -> None:
    """Removes the files of an import that did not complete."""
    for path in _content(run_dir):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def to_text(
    report: Mapping[str, Any],
    run_dir: Path,
    config: Path,
    settings: Sequence[str] = (),
    *,
    dry: bool,
) -> str:
    """Returns the result in lines. ``settings``: overrides of the configuration, which the next
    command needs, too.
    """
    overrides = (word for setting in settings for word in ("--set", setting))
    command = shlex.join(["penstock", "train", str(config), "--run-dir", str(run_dir), *overrides])
    tensors = report["tensors"]
    size = sum(each["from"]["bytes"] for each in tensors if each["from"] is not None)
    lines = [
        f"{report['source']}: {report['kind']}, step {report['step']:,},"
        f" {report['samples_seen']:,} samples seen",
        f"{len(tensors):,} tensors take {size / 1e6:,.1f} MB of the checkpoint;"
        f" {len(report['unused']):,} of its tensors are not used",
        *(f"note: {note}" for note in report["notes"]),
    ]
    lines = [*map(printable, lines)]
    if dry:
        return "\n".join([*lines, "nothing was written; without --dry-run the run is made"])
    return "\n".join(
        [
            *lines,
            f"{run_dir} is a run at step {report['step']:,}; {run_dir / REPORT} names each tensor",
            f"next: {command}",
        ]
    )
