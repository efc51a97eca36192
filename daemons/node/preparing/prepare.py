"""Prepares a run directory: identity, configuration, block table, data, plan, capacity.

All refusals happen here, before a process of the run starts or memory is allocated. Only the block
table and the data need torch; a short-lived process (``penstock.models.prepare``) makes them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from penstock.config.reading import read_mapping
from penstock.config.schema import Config, load_config
from penstock.config.values import AUTO, BYTE, CHOSEN_LATER, SDPA
from penstock.daemons.memory.states import refuse_damage, saved_steps
from penstock.daemons.monitor.trackers.registry import check_trackers
from penstock.daemons.node.preparing.changes import (
    Change,
    check_resume,
    edited_keys,
    find_changes,
    fixed_values,
    keep_choice,
    keep_defaults,
    keep_micro_batch,
    keep_recomputation,
    read_constraints,
    write_constraints,
)
from penstock.daemons.node.preparing.fitting.emulated import write_model
from penstock.daemons.node.preparing.fitting.planned_run import (
    HostMachine,
    RunRequest,
    plan_anyway,
    search_lines,
)
from penstock.daemons.node.preparing.fitting.reliefs import check_fits
from penstock.daemons.node.preparing.hub import (
    HubFiles,
    with_hub_files,
)
from penstock.daemons.node.preparing.layers import (
    compiles,
    first_guess,
    is_to_try,
    keep_attention,
    keep_compile,
    with_attention,
    with_compile,
)
from penstock.daemons.node.preparing.machine import check_machine
from penstock.daemons.node.preparing.numerics import chosen_attention, knows_kernels, write_numerics
from penstock.daemons.node.preparing.places import (
    follow_move,
    move_tokens,
    record_places,
    with_absolute_paths,
    with_places,
)
from penstock.daemons.node.preparing.refusals import unchanged_if_refused
from penstock.daemons.node.preparing.software import Software, check_software
from penstock.daemons.node.preparing.tool import Progress, run_models_prepare
from penstock.daemons.node.run_lock import (
    RunLock,
    check_home,
    check_nodes,
    held_version,
    prepare_lock_path,
    settle_home,
)
from penstock.daemons.preload.starting import Starter
from penstock.host.errors import ConfigError, StateError
from penstock.host.files import DAMAGED, holds_text, parse_json, write_atomically
from penstock.host.limits.cgroup import cpu_limit
from penstock.host.logind_check import logout_risk
from penstock.planner.cost.emulation import Emulation
from penstock.protocol.plan.groups import check_groups
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.positions import position_warning
from penstock.protocol.run.bases.base_identity import present_bytes
from penstock.protocol.run.checksums import ADAPTER, CONSTANTS, MADE, read_checked, recorded_values
from penstock.protocol.run.data_size import mixed_lengths, with_known_steps
from penstock.protocol.run.hardware.cpus import check_cpus
from penstock.protocol.run.hardware.placement import check_cores
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.addresses import check_addresses
from penstock.shm.inventory import inventory

IMPORTING = "importing.json"
"""File of a run directory while ``penstock import`` fills it. It names the checkpoint."""

PREVIOUS_PREPARATION_WAIT_S = 30.0
"""Seconds to wait for an earlier preparation. It dies with its parent, but not immediately."""

_NOT_EXACT = (
    "warning: optimizer.rollback: arithmetic is not exact: every step that is clipped, skipped or"
    " aborted is undone with rounding errors, so two runs may end with different bits"
)


def prepare_run(
    config: Config,
    run_dir: Path,
    progress: Progress = lambda message: None,
    nodes: Sequence[int] | None = None,
    starter: Starter | None = None,
    *,
    rests: bool = False,
    imports: bool = False,
) -> RunDirectory:
    """Prepares ``run_dir`` for ``config``: a new run, or a resume. A refusal leaves the run's files
    unchanged.

    ``nodes``: indices of the nodes on this machine; default: all. ``starter``: starts the processes
    that need torch. ``rests``: a run that :func:`is_complete` is left as it is, because nothing
    will be started. ``imports``: an import, which writes the first saved state itself.

    Raises:
        ConfigError: the configuration is impossible, a resume changes a fixed key, or the machine
            lacks a need of every run.
        CapacityError: memory is short; carries the table.
        StateError: the directory's files are damaged, or an import did not complete.
    """
    if not imports:
        _refuse_unfinished_import(run_dir)
    check_addresses(config)
    _check_length(config)
    check_trackers(config)
    nodes = range(len(config.cluster.nodes)) if nodes is None else nodes
    check_machine(config, nodes)
    check_cores(config)
    check_cpus(config, nodes, cpu_limit(), os.environ)
    run_dir = run_dir.absolute()
    RunDirectory(run_dir).check_shape()
    lock = RunLock.acquire(prepare_lock_path(run_dir), wait_s=PREVIOUS_PREPARATION_WAIT_S)
    with lock:
        return _prepare(config, run_dir, progress, nodes, lock, starter, rests=rests)


def _prepare(
    config: Config,
    run_dir: Path,
    progress: Progress,
    nodes: Sequence[int],
    lock: RunLock,
    starter: Starter | None,
    *,
    rests: bool,
) -> RunDirectory:
    if (run_dir / "run.json").exists():
        check_home(RunDirectory(run_dir))
    previous = _previous(run_dir, progress)
    if previous is not None:
        refuse_damage(run_dir, progress)
    hub = HubFiles.of_run(config, run_dir, progress)
    config = with_absolute_paths(with_hub_files(config, hub))
    if previous is not None:
        config = follow_move(config, run_dir)
        previous = with_places(previous, config, run_dir, progress)
    config = _name_tokenizer(config, previous, run_dir, progress)
    config = _keep_bos(config, previous, run_dir, progress)
    config = keep_compile(config, previous)
    constraints = None if previous is None else read_constraints(run_dir, previous.schedule)
    config = keep_defaults(config, previous, constraints)
    started = RunDirectory(run_dir).has_started
    config = keep_attention(config, previous if started else None)
    before = previous if started else None
    config = keep_recomputation(config, before, constraints).with_recomputation()
    config = keep_micro_batch(config, previous, progress, started=started)
    config = keep_choice(config, previous, constraints, progress)
    changes = _changes(config, previous, run_dir, progress)
    if config.optimizer.rollback == "arithmetic":
        progress(_NOT_EXACT)
    if (risk := logout_risk()) is not None:
        progress(f"warning: {risk}")
    steps = with_known_steps(config, run_dir).train.steps
    if rests and steps and previous is not None and is_complete(RunDirectory(run_dir), steps):
        return RunDirectory(run_dir)
    software = Software.here()
    if started:
        check_software(config, run_dir, software, progress)
    with unchanged_if_refused(run_dir):
        if previous is not None:  # runs of older versions have no record yet
            write_constraints(run_dir, previous.schedule, constraints)
        run = _make_ready(
            config, run_dir, previous, changes, progress, nodes, lock, starter, software
        )
        write_numerics(run, run.config, run.plan, software)
        run.record_checksums(fixed_values(run.config))
        software.write(run_dir)
        hub.write(run_dir)
        return RunDirectory(run_dir)


def _refuse_unfinished_import(run_dir: Path) -> None:
    """Refuses a directory without the saved state that an import was to write: the run would begin
    with new weights.
    """
    if (run_dir / IMPORTING).exists():
        raise StateError(
            f"{run_dir}: penstock import did not complete here; repeat it, or remove the directory"
        )


def _check_length(config: Config) -> None:
    if config.train.epochs is not None and config.cluster.platform.builtin_model:
        raise ConfigError(
            f"train.epochs {config.train.epochs:g}: {config.cluster.device} makes up its data,"
            " which have no end; give train.steps"
        )


def is_complete(directory: RunDirectory, steps: int) -> bool:
    """Returns whether the run has nothing left to do: all steps are saved, and there is no memory
    to give back.
    """
    saved = max((step for step, _ in saved_steps(directory.state_dir)), default=0)
    held = any(entry.run_id == directory.run_id for entry in inventory())
    return saved >= steps and not held


def _make_ready(
    config: Config,
    run_dir: Path,
    previous: Config | None,
    changes: Sequence[Change],
    progress: Progress,
    nodes: Sequence[int],
    lock: RunLock,
    starter: Starter | None,
    software: Software,
) -> RunDirectory:
    """Writes what the processes of the run read; refuses what only then shows."""
    directory = RunDirectory.create(run_dir)
    warn_if_open(directory.path, progress)
    settle_home(directory)
    makes_inputs = _makes_inputs(directory, previous, changes)
    if makes_inputs:
        _make_inputs(config, directory, progress, lock, starter)
    else:
        check_groups(directory.table, config.optimizer.groups)
    examine = partial(
        run_models_prepare, config, run_dir, progress=progress, lock=lock, starter=starter
    )
    if not makes_inputs and config.model.path is not None and not _knows_its_weights(run_dir):
        examine("--review")
    if not makes_inputs and not knows_kernels(config, run_dir, software):
        _write(directory, config, {"resolved.yaml": config.to_yaml()})  # the tool reads attention
        examine("--kernels")
    config = _with_lone_rows(config, run_dir)
    if config.needs_references and (makes_inputs or _lacks_references(run_dir)):
        _make_references(config, directory, progress, lock, starter)
    config = with_attention(with_known_steps(config, run_dir), chosen_attention(config, run_dir))
    record_places(config, run_dir, anew=makes_inputs and not directory.has_started)
    # A fresh object: cached attributes may date from before the inputs were made.
    directory = RunDirectory(run_dir)
    request = RunRequest(config=config, table=directory.table, nodes=nodes)
    first = config.cluster.nodes[nodes[0]].name
    shared = present_bytes(directory, config, first)
    machine = HostMachine.here(config, directory.run_id, shared=shared)
    run = plan_anyway(request, machine, search_lines(progress))
    check_fits(run)
    for line in filter(None, (run.trained, run.choice)):
        progress(line)
    is_required = run.config.model.compile is True
    config = first_guess(run.config, run.plan, progress)
    # Only now: a configuration that was refused leaves the one of the run in place.
    if config.data.tokens is not None and not makes_inputs:
        move_tokens(directory, config.data.tokens)
    _write_plan(directory, config, run.plan)
    write_constraints(run_dir, config.schedule, run.constraints)
    if is_to_try(config, previous, changes) and not compiles(
        run_dir,
        asked=is_required,
        silence_s=config.cluster.heartbeat_timeout_s,
        progress=progress,
        starter=starter,
    ):
        _write_plan(directory, with_compile(config, compiled=False), run.plan)
    return RunDirectory(run_dir)


def _makes_inputs(
    directory: RunDirectory, previous: Config | None, changes: Sequence[Change]
) -> bool:
    """Returns whether block table and data are to be made. Without a configuration the origin of
    existing ones is unknown. Until the run has started, the tool compares the content of all files.
    """
    is_known = previous is not None and directory.has_started
    return not is_known or _inputs_changed(changes) or not _inputs_exist(directory.path)


def _make_inputs(
    config: Config,
    directory: RunDirectory,
    progress: Progress,
    lock: RunLock,
    starter: Starter | None,
) -> None:
    """Makes the block table and the data of a run."""
    directory.remove_checksums()
    write_atomically(directory.path / "resolved.yaml", config.to_yaml())
    progress("preparing the model's block table and the data")
    if (warning := position_warning(config)) is not None:
        progress(warning)
    if config.cluster.platform.builtin_model:
        write_model(Emulation.of(config), directory.path)
    if not directory.has_started:
        check_early(config, directory.path)
    run_models_prepare(config, directory.path, progress=progress, lock=lock, starter=starter)
    directory.record_checksums(fixed_values(config))


def _with_lone_rows(config: Config, run_dir: Path) -> Config:
    """Returns the configuration with micro-batches of one row, if rows of the prepared data would
    change each other.

    Raises:
        ConfigError: ``train.micro_batch`` asks for more rows.
    """
    lengths = mixed_lengths(run_dir)
    if lengths is None or config.train.micro_batch == 1:
        return config
    if config.train.micro_batch == CHOSEN_LATER and not config.trains_on_pairs:
        return config.with_micro_batch(1)
    name = f"train.micro_batch = {config.train.micro_batch}"
    remedies = ["train.micro_batch: 1", f"data.sequence_length to at most {lengths.limit}"]
    if config.trains_on_pairs:
        name, remedies = f"data.objective = {config.data.objective!r}", remedies[1:]
    raise ConfigError(
        f"{name}: samples have {lengths.shortest} to {lengths.longest} tokens, and in this model a"
        f" sample beyond {lengths.limit} changes the rotary frequencies of the other rows of its"
        f" micro-batch; set {' or '.join(remedies)}"
    )


def _make_references(
    config: Config,
    directory: RunDirectory,
    progress: Progress,
    lock: RunLock,
    starter: Starter | None,
) -> None:
    """Computes the log-probabilities of pairs by the model at the start of the run."""
    directory.remove_checksums()
    run_models_prepare(
        config,
        directory.path,
        progress=progress,
        lock=lock,
        starter=starter,
        module="penstock.models.inference.references",
    )
    directory.record_checksums(fixed_values(config))


def _lacks_references(run_dir: Path) -> bool:
    """Returns whether a split of pairs has no reference log-probabilities yet."""
    splits = parse_json((run_dir / "data" / "meta.json").read_bytes())
    return any("references" not in entry for entry in splits.values() if isinstance(entry, dict))


def _write_plan(directory: RunDirectory, config: Config, plan: Plan) -> None:
    """Writes configuration and plan where they changed, and records the checksums of both."""
    _write(directory, config, {"resolved.yaml": config.to_yaml(), "plan.json": plan.to_json()})


def _write(directory: RunDirectory, config: Config, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        if not holds_text(directory.path / name, text):
            directory.remove_checksums()
            write_atomically(directory.path / name, text)
    directory.record_checksums(fixed_values(config))


def warn_if_open(run_dir: Path, progress: Progress) -> None:
    """Warns where every user of the machine may replace files of the run."""
    mode = stat.S_IMODE(run_dir.stat().st_mode)
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        progress(
            f"warning: {run_dir} has mode {mode:04o}: every user of this machine may replace files"
            " of the run there. Forbid it (chmod o-w)"
        )


def check_early(config: Config, run_dir: Path) -> None:
    """Checks inputs in a process without torch, while torch is imported elsewhere.

    Raises:
        PenstockError: an input is bad, or the process failed.
    """
    run_models_prepare(config, run_dir, module="penstock.models.inference.early")


def _previous(run_dir: Path, progress: Progress) -> Config | None:
    """Returns the configuration the run had; ``None`` for a new one.

    Raises:
        StateError: it, or what was made from it, was changed since the last start.
    """
    path, started = run_dir / "resolved.yaml", RunDirectory(run_dir).has_started
    if not path.exists():
        if started:
            raise StateError(f"{run_dir} holds a run, but its resolved.yaml is missing")
        return None
    previous = load_config(path)
    if started and not _knows(path, "model", "attention"):
        previous = with_attention(previous, SDPA)
    if not _knows(path, "data", "bos"):
        # An older Penstock made the data: it put no token in front of documents.
        data = previous.data.model_copy(update={"bos": False})
        previous = previous.model_copy(update={"data": data})
    fixed = recorded_values(run_dir)
    if fixed is not None:
        for name in (*MADE, CONSTANTS, ADAPTER):
            if (run_dir / name).exists():
                read_checked(run_dir, name)
        edited = edited_keys(fixed, previous)
        if edited and started:
            raise StateError(
                f"{path}: was edited: keys differ that cannot change: {'; '.join(edited)}. Restore"
                " them, or start a new run in another run.dir"
            )
        return None if edited else previous
    if started:
        progress(
            f"{run_dir} has no checksums of its inputs (an older Penstock made it, or they were"
            " removed): the inputs are used unchecked"
        )
    return previous


def _name_tokenizer(
    config: Config, previous: Config | None, run_dir: Path, progress: Progress
) -> Config:
    """Returns the configuration with the tokenizer that an unset ``data.tokenizer`` stands for.
    Prepared data keep their tokenizer, even if the default has changed since.
    """
    if config.data.tokenizer is not None:
        return config
    name = standard = config.tokenizer
    if previous is not None and _inputs_exist(run_dir) and previous.model.path == config.model.path:
        name = previous.data.tokenizer
        if name != standard and standard is not None:
            progress(f"tokenizer: {name}, as the run's data were prepared with")
    elif config.model.path is not None and name is not None:
        progress(f"tokenizer: the model's own, {name}")
    return config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": name})})


def _knows(resolved: Path, section: str, key: str) -> bool:
    """Returns whether a written configuration has a key; those of older versions may lack it."""
    values = read_mapping(resolved).value.get(section)
    return isinstance(values, dict) and key in values


def _keep_bos(config: Config, previous: Config | None, run_dir: Path, progress: Progress) -> Config:
    """Returns the configuration with the ``data.bos`` that ``auto`` stands for. Prepared data keep
    theirs, even if the default has changed since.
    """
    if config.data.bos != AUTO or previous is None or not _inputs_exist(run_dir):
        return config
    bos, text = previous.data.bos, config.data.path
    if bos == AUTO or text != previous.data.path or config.tokenizer != previous.tokenizer:
        return config
    if config.tokenizer not in (None, BYTE):
        progress(f"data.bos: {str(bos).lower()}, as the run's data were prepared with")
    return config.model_copy(update={"data": config.data.model_copy(update={"bos": bos})})


def _changes(
    config: Config, previous: Config | None, run_dir: Path, progress: Progress
) -> Sequence[Change]:
    """Returns what differs from the configuration the run had; refuses what must not."""
    if previous is None:
        return ()
    if config.schedule.scheme == AUTO:  # not known yet, and told when it is
        config = config.model_copy(update={"schedule": previous.schedule})
    if config.train.micro_batch == CHOSEN_LATER:
        config = config.with_micro_batch(previous.train.micro_batch)
    if config.model.attention == AUTO:
        config = with_attention(config, previous.model.attention)
    changes = find_changes(with_known_steps(previous, run_dir), with_known_steps(config, run_dir))
    directory = RunDirectory(run_dir)
    if not directory.has_started:
        return changes
    check_resume(changes, run_dir, held_version(directory.run_id))
    names = [node.name for node in config.cluster.nodes]
    saved = max((step for step, _ in saved_steps(run_dir / "state")), default=0)
    if check_nodes(directory, names, saved):
        progress("memory of nodes that cluster.nodes no longer names was saved; it is removed")
    follows = {"train.steps"} if "train.epochs" in {change.key for change in changes} else set()
    for change in changes:
        if change.key not in follows:  # its number follows from the passes, which have a line
            progress(f"changed: {change}")
    return changes


def _inputs_changed(changes: Sequence[Change]) -> bool:
    """Returns whether the block table or the token files follow from another configuration."""
    keys = ("model.", "adapter", "data.", "optimizer.grad_dtype", "optimizer.name")
    return any(
        (change.key.startswith(keys) and change.key not in ("model.attention", "model.compile"))
        or change.key in ("run.seed", "train.freeze", "train.only", "train.eval_every", "eval.sets")
        or change.key in ("cluster.device", "emulation.scale")
        for change in changes
    )


def _inputs_exist(run_dir: Path) -> bool:
    return all((run_dir / name).exists() for name in MADE)


def _knows_its_weights(run_dir: Path) -> bool:
    """Returns whether the run has a record of its files of weights; runs that were
    prepared by older versions have none.
    """
    try:
        return "weight_files" in parse_json((run_dir / "model" / "meta.json").read_bytes())
    except (OSError, *DAMAGED):
        return False
