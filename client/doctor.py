"""``penstock doctor``: shows what this machine offers and what dead runs left on it.

The report changes nothing. ``--clean`` removes only entries of dead processes: segments with a dead
owner that no process maps, sockets of dead nodes, processes without a supervisor. Bases without a
run are removed, too. In a run directory that no process holds, it also removes partial saves and a
stale endpoint file. Memory with unsaved steps is removed only with ``--force``. With a run
directory, the report is about that run only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import platform
import resource
import shutil
import signal
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.client.placement import PlacementFacts, PlacementReport
from penstock.client.views.run_view import saved_states
from penstock.config.schema import Config
from penstock.config.values import human_bytes
from penstock.daemons.node.run_lock import original_of
from penstock.host.errors import ExitCode, PenstockError
from penstock.host.limits.cgroup import cpu_limit, tightest_memory
from penstock.host.logind_check import logout_risk
from penstock.host.process_identity import start_ticks
from penstock.host.requirements import PYTHON, TORCH, installed_torch, torch_objection
from penstock.host.trust import user_text
from penstock.protocol.run.names import FOLDER_PREFIX
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.token_cache import kept_tokens, token_cache_folder
from penstock.protocol.wire.local_names import left_folders
from penstock.shm.base_users import BaseUse, base_uses, sweep
from penstock.shm.inventory import NodeSegments, inventory, shm_names
from penstock.shm.segment import SHM_ROOT, unlink

if TYPE_CHECKING:
    from penstock.client.capacity import CapacityReport

LAUNCH_MODULE = "penstock.client.launch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An entry of the report. ``removable``: True if no live process uses the entry. ``loses``
    names the steps that a removal would lose, or is empty. ``of_others``: it belongs to another
    user.
    """

    kind: str
    name: str
    detail: str
    removable: bool
    loses: str = ""
    of_others: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Facts about the machine, and entries that runs left.

    ``software_objection``: the reason why the installed packages cannot train a model, or None.
    """

    machine: dict[str, str]
    placement: PlacementReport
    findings: tuple[Finding, ...]
    capacity: CapacityReport | None = None
    software_objection: str | None = None
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    bases: tuple[BaseUse, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
        return {
            "machine": self.machine,
            "placement": self.placement.to_dict(),
            "capacity": self.capacity and self.capacity.to_dict(),
            "findings": [asdict(finding) for finding in self.findings],
            "bases": [
                {"digest": base.digest, "bytes": base.num_bytes, "runs": list(base.runs)}
                for base in self.bases
            ],
            "removed": list(self.removed),
            "kept": list(self.kept),
        }

    def to_text(self) -> str:
        """Returns the report as text."""
        width = max(len(name) for name in self.machine)
        lines = [f"{name:<{width}}  {value}" for name, value in self.machine.items()]
        lines += ["", *self.placement.to_lines(), ""]
        if self.capacity is not None:
            lines += [*self.capacity.to_lines(), ""]
        for finding in self.findings:
            state = "may go" if finding.removable else "left alone"
            lines.append(f"{finding.kind}: {finding.name} ({state}): {finding.detail}")
        if not self.findings:
            lines.append("nothing of Penstock is on this machine")
        lines += [f"removed {name}" for name in self.removed]
        lines += [f"kept {name}" for name in self.kept]
        if any(f.removable for f in self.findings) and not self.removed and not self.kept:
            lines.append("penstock doctor --clean removes what may go")
        return "\n".join(lines)

    @property
    def exit_code(self) -> ExitCode:
        """Returns the exit code of the command: that of the first refusal, or 0."""
        if self.software_objection is not None:
            return ExitCode.BAD_CONFIG
        refusals = () if self.capacity is None else self.capacity.refusals
        return next((refusal.exit_code for refusal in refusals), ExitCode.DONE)


def examine(run_dir: Path | None, config: Config | None = None) -> Report:
    """Returns the report about all runs, or about the run in ``run_dir``.

    Cores are placed for ``config``, or for the configuration of the run directory.
    """
    config = config or _config_of(run_dir)
    bases = _bases(run_dir)
    findings = [*_processes(run_dir), *_segments(run_dir), *map(_describe_base, bases)]
    findings += _sockets(run_dir)
    if run_dir is not None:
        findings += _run_directory(run_dir)
    return Report(
        machine=machine_facts(),
        placement=PlacementReport.of(PlacementFacts.probe(), config),
        findings=tuple(sorted(findings, key=lambda finding: finding.of_others)),
        software_objection=torch_objection(installed_torch()),
        bases=bases,
    )


def _config_of(run_dir: Path | None) -> Config | None:
    """Returns the configuration of a run directory, or None if it cannot be read."""
    try:
        return None if run_dir is None else RunDirectory(run_dir).config
    except PenstockError:
        return None


def clean(report: Report, run_dir: Path | None, *, force: bool = False) -> Report:
    """Removes the removable entries; those with unsaved steps only with ``force``. Returns the
    report with the names of removed and kept entries.
    """
    removed, kept = [], []
    for finding in report.findings:
        if not finding.removable:
            continue
        text = f"{finding.kind} {finding.name}: {finding.detail}"
        if finding.loses and not force:
            kept.append(f"{text}. With --force {finding.loses}")
            continue
        _REMOVERS[finding.kind](finding.name, run_dir)
        removed.append(f"{text}. So {finding.loses}" if finding.loses else text)
    return replace(report, removed=tuple(removed), kept=tuple(kept))


def machine_facts() -> dict[str, str]:
    """Returns versions, limits and free memory of the machine. Does not import torch."""
    torch = installed_torch()
    total, memory = os.statvfs(SHM_ROOT), tightest_memory()
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited, risk = memlock == resource.RLIM_INFINITY, logout_risk()
    return {
        "python": f"{platform.python_version()} (Penstock runs on {PYTHON})",
        "native vectors": _vector_path(),
        "torch": torch_objection(torch) or f"{torch} (Penstock runs with {TORCH})",
        "transformers": _version("transformers"),
        "compiled modules": _bytecode(),
        "CUDA devices": str(len(list(Path("/dev").glob("nvidia[0-9]*")))),
        "CPUs": str(cpu_limit()),
        "memory": f"{human_bytes(memory.available)} free of {human_bytes(memory.limit)}"
        f" ({memory.owner})",
        "/dev/shm": f"{human_bytes(total.f_bavail * total.f_frsize)} free of"
        f" {human_bytes(total.f_blocks * total.f_frsize)}",
        "/dev/shm at logout": "stays" if risk is None else f"is emptied: {risk.setting}",
        "kept tokens": _kept_tokens(),
        "memlock limit": "unlimited" if unlimited else human_bytes(memlock),
    }


def _kept_tokens() -> str:
    """Returns the bytes of cached tokens, and their folder."""
    folder = token_cache_folder()
    if folder is None:
        return "none: the user has no home"
    entries = kept_tokens(folder)
    size = human_bytes(sum(entry.num_bytes for entry in entries))
    return f"{size} of {len(entries)} texts in {folder} (data.cache_limit)" if entries else "none"


def _vector_path() -> str:
    if importlib.util.find_spec("penstock._native") is None:
        return "the native module is not built"
    from penstock import _native

    return _native.vector_path()


def _bytecode() -> str:
    """Returns whether torch has compiled modules (``.pyc``). Container images often lack them, and
    forbid to write them.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "not known without torch"
    if Path(importlib.util.cache_from_source(spec.origin)).exists():
        return "found"
    place = Path(spec.origin).parents[1]
    return (
        "none of torch's: each process compiles its imports for some ten seconds; run once, as a"
        f" user with write access: {sys.executable} -m compileall -q -j 0 {place}"
    )


def _version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return "not installed"
    return importlib.metadata.version(package)


def _segments(run_dir: Path | None) -> Iterable[Finding]:
    """Yields the segments of all runs, or of the run in ``run_dir``."""
    names = shm_names()
    run_id = None if run_dir is None else _run_id(run_dir)
    for entry in names.segments:
        if run_dir is None or entry.run_id == run_id:
            yield _describe_segments(entry, run_dir)
    for junk in names.junk if run_dir is None else ():
        yield Finding(
            kind="unknown name",
            name=junk.path,
            detail=f"a {junk.kind} of {user_text(junk.uid)} that is no segment",
            removable=False,
            of_others=junk.uid != os.geteuid(),
        )


def _bases(run_dir: Path | None) -> tuple[BaseUse, ...]:
    """Returns the bases of all runs, or of the run in ``run_dir``."""
    run_id = None if run_dir is None else _run_id(run_dir)
    return tuple(base for base in base_uses() if run_dir is None or run_id in base.runs)


def _describe_base(base: BaseUse) -> Finding:
    size = human_bytes(base.num_bytes)
    if base.runs:
        detail = f"{size} of frozen weights, once for {', '.join(base.runs)}"
    elif base.filling:
        detail = f"{size}, " + ("being filled" if base.in_use else "the filling was interrupted")
    else:
        detail = f"{size} of frozen weights, " + ("in use" if base.in_use else "no run uses them")
    name = base.name.removeprefix("/")
    return Finding(kind="base", name=name, detail=detail, removable=not base.in_use)


def _sockets(run_dir: Path | None) -> Iterable[Finding]:
    """Yields socket folders of killed nodes, of all runs or of the run in ``run_dir``."""
    run_id = "" if run_dir is None else f"{_run_id(run_dir)}-"
    for folder in left_folders():
        if folder.name.startswith(f"{FOLDER_PREFIX}{run_id}"):
            yield Finding(
                kind="sockets",
                name=str(folder),
                detail="of a killed node; its next start makes new ones",
                removable=True,
            )


def _run_id(run_dir: Path) -> str | None:
    """Returns the id of the run in a run directory, or None if it cannot be read."""
    try:
        return RunDirectory(run_dir).run_id
    except PenstockError:
        return None


def _describe_segments(entry: NodeSegments, run_dir: Path | None) -> Finding:
    """Returns the entry of a node's segments, with the steps that a removal would lose."""
    detail, loses, removable = "", "", not entry.in_use
    pid = entry.owner.pid if entry.owner is not None else "unknown"
    if entry.uid != os.geteuid():
        detail, removable = f"of {user_text(entry.uid)}", False
    elif entry.objection:
        detail, removable = f"not read: {entry.objection}", False
    elif entry.in_use:
        detail = f"owner pid {pid} alive or memory mapped"
    elif run_dir is not None and (original := original_of(run_dir)) is not None:
        detail, removable = f"belongs to {original}, of which {run_dir} is a copy", False
    elif run_dir is not None and RunDirectory(run_dir).is_held:
        detail, removable = f"owner pid {pid} dead, but processes hold the run directory", False
    elif entry.owner is None:
        detail = "creation was interrupted: holds nothing"
    elif (committed := entry.committed) is None:
        detail = f"owner pid {pid} dead, holds no model"
    else:
        saved = _saved_version(entry.run_id, run_dir)
        known = (
            "unknown (name the run's directory)"
            if saved is None
            else f"step {saved}"
            if saved
            else None
        )
        detail = (
            f"owner pid {pid} dead, holds step {committed}; saved on disk: {known or 'nothing'}."
            f" A start of the run with a node {entry.keeper} continues from the memory"
        )
        loses = _losses(committed, saved)
    return Finding(
        kind="segments",
        name=f"{entry.run_id}-{entry.node_name}",
        detail=f"{human_bytes(entry.num_bytes)}, {detail}",
        removable=removable,
        loses=loses,
        of_others=entry.uid != os.geteuid(),
    )


def _losses(committed: int, saved: int | None) -> str:
    """Returns the loss if memory at step ``committed`` is removed, or an empty text. ``saved`` is
    the newest step on disk, or None if unknown.
    """
    if saved is None:
        return f"all steps up to {committed} that are not saved are lost" if committed else ""
    if saved >= committed:
        return ""
    first = saved + 1
    if first == committed:
        return f"step {committed}, which is not saved, is lost"
    return f"steps {first} to {committed}, which are not saved, are lost"


def _saved_version(run_id: str, run_dir: Path | None) -> int | None:
    """Returns the newest step on disk, 0 if no step is saved, or None without the run's
    directory.
    """
    if run_dir is None or _run_id(run_dir) != run_id:
        return None
    saved = saved_states(run_dir)
    return saved[-1].version if saved else 0


def _processes(run_dir: Path | None) -> Iterable[Finding]:
    """Yields the processes of all runs, or of the run in ``run_dir``."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            owned = entry.stat().st_uid == os.getuid()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended meanwhile, or not readable for this user
        if LAUNCH_MODULE not in words or not owned or not _is_about(words, run_dir):
            continue
        parent = words[words.index("--parent-pid") + 1]
        orphan = start_ticks(int(parent)) is None and start_ticks(int(entry.name)) is not None
        yield Finding(
            kind="process",
            name=entry.name,
            detail=f"{_program(words)}; parent {parent} {'is gone' if orphan else 'lives'}",
            removable=orphan,
        )


def _program(words: list[str]) -> str:
    """Returns the name of a supervisor's child and its run, such as ``worker.1 of runs/tiny``."""
    kind, options = words[words.index(LAUNCH_MODULE) + 1], dict(itertools.pairwise(words))
    number = options.get("--device")
    name = kind if number is None else f"{kind}.{number}"
    config = options.get("--config")
    return name if config is None else f"{name} of {Path(config).parent}"


def _is_about(words: list[str], run_dir: Path | None) -> bool:
    """Returns whether a command line is that of a supervisor's child, of the run in ``run_dir``."""
    options = dict(itertools.pairwise(words))
    if not options.get("--parent-pid", "").isdigit():
        return False
    config = options.get("--config")
    if run_dir is None or config is None:
        return run_dir is None
    return Path(config).parent.resolve() == run_dir.resolve()


def _run_directory(run_dir: Path) -> Iterable[Finding]:
    held = RunDirectory(run_dir).is_held
    for path in sorted((run_dir / "state").glob(".tmp-*")):
        yield Finding(
            kind="half-written save",
            name=str(path),
            detail="an incomplete saved state",
            removable=not held,
        )
    endpoint = run_dir / "endpoint.json"
    if endpoint.exists():
        detail = "of the active run" if held else "of a run that was killed"
        yield Finding(kind="endpoint", name=str(endpoint), detail=detail, removable=not held)


def _remove_segments(name: str, run_dir: Path | None) -> None:
    for entry in inventory():
        # Checked again: a process may have attached since.
        if f"{entry.run_id}-{entry.node_name}" == name and not entry.in_use:
            for segment in entry.names:
                unlink(segment)
    sweep()


def _remove_base(name: str, run_dir: Path | None) -> None:
    sweep()  # all without a user, and none that a run has begun to use


def _remove_sockets(name: str, run_dir: Path | None) -> None:
    if Path(name) in left_folders():  # checked again: a node may have started since
        shutil.rmtree(name)


def _remove_process(name: str, run_dir: Path | None) -> None:
    try:
        pidfd = os.pidfd_open(int(name))
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(pidfd)


def _remove_directory(name: str, run_dir: Path | None) -> None:
    if Path(name).is_dir():
        shutil.rmtree(name)
    else:  # a file in place of the directory
        Path(name).unlink(missing_ok=True)


def _remove_file(name: str, run_dir: Path | None) -> None:
    Path(name).unlink(missing_ok=True)


_REMOVERS = {
    "segments": _remove_segments,
    "base": _remove_base,
    "sockets": _remove_sockets,
    "process": _remove_process,
    "half-written save": _remove_directory,
    "endpoint": _remove_file,
}
