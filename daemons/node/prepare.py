"""Makes a run directory ready to start: identity, configuration, block table, data, plan, capacity.

Everything that can be refused is refused here, before a process of the run starts or memory is
taken. torch is needed for the block table and the data only; that happens in a short-lived process
(``penstock.models.prepare``).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.daemons.node.capacity import MachineMemory, Need, check_capacity, needs
from penstock.daemons.node.changes import Change, check_resume, find_changes
from penstock.daemons.node.emulated import emulated_needs, emulated_rows, write_model
from penstock.daemons.node.tool import run_tool
from penstock.planner.build import build_plan
from penstock.planner.emulation import Emulation
from penstock.planner.memory import MemoryRow, memory_table
from penstock.protocol.config import Config
from penstock.protocol.errors import StateError
from penstock.protocol.executable import check_executable, check_updates
from penstock.protocol.plan import Plan
from penstock.protocol.rundir import RunDirectory, write_atomically
from penstock.shm.table import BlockTable

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What a configuration leads to: its plan and its memory, needed and there."""

    table: BlockTable
    plan: Plan
    rows: tuple[MemoryRow, ...]
    needs: tuple[Need, ...]


def prepare_run(
    config: Config, run_dir: Path, progress: Progress = lambda message: None
) -> RunDirectory:
    """Prepare ``run_dir`` for ``config``: a new run, or one to go on with.

    Raises:
        ConfigError: impossible configuration, or a resume with keys changed that must not.
        CapacityError: something is short; carries the table.
        StateError: the directory's files are damaged.
    """
    run_dir = run_dir.absolute()
    config = _absolute_paths(config)
    changes = _changes(config, run_dir, progress)
    directory = RunDirectory.create(run_dir)
    if _inputs_changed(changes) or not _inputs_exist(run_dir):
        write_atomically(run_dir / "resolved.yaml", config.to_yaml())
        progress("preparing the model's block table and the data")
        if config.cluster.emulated is not None:
            write_model(Emulation.of(config), run_dir)
        run_models_prepare(run_dir)
    # Read anew: a cached attribute may stem from before the inputs were made.
    directory = RunDirectory(run_dir)
    prospect = look_ahead(config, directory.table, directory.run_id)
    check_capacity(prospect.needs)
    # Only now: a configuration that was refused leaves the one of the run in place.
    write_atomically(run_dir / "resolved.yaml", config.to_yaml())
    write_atomically(run_dir / "plan.json", prospect.plan.to_json())
    return directory


def look_ahead(config: Config, table: BlockTable, run_id: str | None) -> Prospect:
    """Plan and memory of a configuration on this machine (all nodes on it).

    Raises:
        ConfigError: no plan can be built, or workers cannot run it.
    """
    machine = MachineMemory.probe(run_id)
    nodes = range(len(config.cluster.nodes))
    if config.cluster.emulated is not None:
        return _look_ahead_emulated(config, machine, nodes)
    plan = build_plan(config, table)
    check_executable(plan, devices_per_node=config.cluster.workers)
    check_updates(config, table, plan)
    rows = memory_table(config, table, plan)
    return Prospect(table=table, plan=plan, rows=rows, needs=needs(config, rows, machine, nodes))


def _look_ahead_emulated(config: Config, machine: MachineMemory, nodes: Sequence[int]) -> Prospect:
    """With the block table at full size, and limits of the emulated machines."""
    emulation = Emulation.of(config)
    plan = build_plan(config, emulation.table, emulation.costs)
    check_executable(plan, devices_per_node=config.cluster.workers)
    check_updates(config, emulation.table, plan)
    rows = emulated_rows(config, emulation, plan)
    return Prospect(
        table=emulation.table,
        plan=plan,
        rows=rows,
        needs=emulated_needs(config, emulation, rows, machine, nodes),
    )


def table_of(config: Config) -> BlockTable:
    """The block table of a configuration that has no run directory; at full size.

    Raises:
        ConfigError: the model is impossible.
    """
    if config.cluster.emulated is not None:
        return Emulation.of(_absolute_paths(config)).table
    directory = Path(tempfile.mkdtemp(prefix="penstock-plan-"))
    try:
        RunDirectory.create(directory)
        text = _absolute_paths(config).to_yaml()
        write_atomically(directory / "resolved.yaml", text)
        run_models_prepare(directory, "--table-only")
        return RunDirectory(directory).table
    finally:
        shutil.rmtree(directory)


def run_models_prepare(run_dir: Path, *arguments: str) -> None:
    """Make block table and data of a run directory in a process of its own.

    Raises:
        PenstockError: what that process says, see :func:`penstock.daemons.node.tool.run_tool`.
    """
    log = run_dir / "logs" / "prepare.txt"
    run_tool("penstock.models.prepare", str(run_dir), *arguments, log=log)


def has_started(run_dir: Path) -> bool:
    """Whether the run may have trained: then its inputs are fixed."""
    return (run_dir / "journal.sqlite").exists() or (run_dir / "state").exists()


def _changes(config: Config, run_dir: Path, progress: Progress) -> Sequence[Change]:
    """What differs from the configuration the run had; refuses what must not."""
    if not (run_dir / "resolved.yaml").exists():
        if has_started(run_dir):
            raise StateError(f"{run_dir} holds a run, but its resolved.yaml is missing")
        return ()
    changes = find_changes(RunDirectory(run_dir).config, config)
    if has_started(run_dir):
        check_resume(changes, run_dir)
    for change in changes:
        progress(f"changed: {change}")
    return changes


def _inputs_changed(changes: Sequence[Change]) -> bool:
    """Whether the block table or the token files follow from another configuration."""
    return any(
        change.key.startswith(("model.", "data.", "optimizer.grad_dtype", "optimizer.name"))
        or change.key in ("run.seed", "train.freeze", "train.eval_every")
        or change.key in ("cluster.device", "emulation.scale")
        for change in changes
    )


def _inputs_exist(run_dir: Path) -> bool:
    files = ("table.json", "model/config.json", "data/meta.json")
    return all((run_dir / name).exists() for name in files)


def _absolute_paths(config: Config) -> Config:
    """Paths that mean the same in every process, wherever it was started."""
    model, data = config.model, config.data
    model_path = model.path and model.path.absolute()
    changes = {
        name: str(Path(value).absolute())
        for name in ("path", "eval_path")
        if (value := getattr(data, name)) is not None and not value.startswith("@")
    }
    if data.tokenizer != "byte":
        changes["tokenizer"] = str(Path(data.tokenizer).absolute())
    tokens = data.tokens and data.tokens.absolute()
    file = config.schedule.file and config.schedule.file.absolute()
    device = config.cluster.device
    if (config.cluster.emulated or "").endswith(".json"):
        device = f"emulated:{Path(str(config.cluster.emulated)).absolute()}"
    return config.model_copy(
        update={
            "model": model.model_copy(update={"path": model_path}),
            "data": data.model_copy(update={**changes, "tokens": tokens}),
            "schedule": config.schedule.model_copy(update={"file": file}),
            "cluster": config.cluster.model_copy(update={"device": device}),
        }
    )
