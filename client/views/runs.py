"""``penstock list``: the runs of all users on this machine, as far as visible.

Command lines, which every user may read, show live runs. Names of segments in /dev/shm show the
memory of dead runs. Names, steps and states come from run directories and schedulers that this user
may access.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from penstock.client.views.ended import transition_of
from penstock.config.values import human_bytes
from penstock.daemons.node.main import LAUNCHER
from penstock.daemons.node.run_lock import train_lock_path
from penstock.host.errors import PenstockError
from penstock.host.process_identity import start_ticks
from penstock.host.topology import format_cpus, parse_cpus
from penstock.host.trust import printable, user_name
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.control import ControlClient
from penstock.shm.inventory import Junk, NodeSegments, shm_names

ASK_TIMEOUT_S = 2.0
LEFTOVER = "left behind"
UNKNOWN = "unknown"
NO_RUN = "no run"
"""State of a name in /dev/shm that starts like a segment of Penstock, but is none."""
_HEADINGS = (
    *("run", "id", "user", "node", "state", "step", "since", "memory", "cpus"),
    "directory",
)
_DIRECTORY_COLUMNS = 24
"""Fewest columns for directories in a table; longer paths are folded."""
_PID = re.compile(r"[0-9]{1,9}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """One node of a run on this machine. Unknown fields are empty or None.

    ``step`` is the committed step of ``steps``. ``since_s`` is the start of the supervisor (Unix
    time). ``memory_bytes`` are bytes in /dev/shm. ``cpus`` are the CPUs of the optimizer's pinned
    threads. ``processes`` holds pids by name.
    """

    run_id: str
    name: str
    user: str
    node: str
    directory: str
    state: str
    step: int | None
    steps: int | None
    since_s: float | None
    memory_bytes: int
    endpoint: str
    cpus: str
    processes: Mapping[str, int]


@dataclass(slots=True, kw_only=True)
class _Node:
    """The processes of one supervisor."""

    directory: Path
    supervisor: int
    uid: int
    name: str = ""
    processes: dict[str, int] = field(default_factory=dict)


def runs_here() -> list[ListedRun]:
    """Returns the runs on this machine: those of this user first, and live runs first."""
    nodes, names = _nodes(), shm_names()
    segments = {(entry.run_id, entry.node_name, entry.uid): entry for entry in names.segments}
    live = []
    for node, run in ((node, _readable(node)) for node in nodes):
        run_id = _run_id(run) or _guessed_run_id(node, segments.values())
        entry = segments.pop((run_id, node.name, node.uid), None)
        live.append(_live_run(node, run, run_id, entry))
    known = {run.directory for run in live}
    live += [run for run in _preparing() if run.directory not in known]
    runs = [*live, *map(_left, segments.values()), *map(_junk, names.junk)]
    return sorted(runs, key=lambda run: run.user != user_name(os.geteuid()))


def _preparing() -> Iterator[ListedRun]:
    """Yields the runs of this user that a training prepares: it holds the lock of the directory."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid != os.geteuid():
                continue
            if b"train" not in (entry / "cmdline").read_bytes().split(b"\0"):
                continue
            held = {os.readlink(link) for link in (entry / "fd").iterdir()}
        except OSError:
            continue  # ended meanwhile, or hidden from this user
        for lock in map(Path, held):
            state = transition_of(lock.parent) if lock == train_lock_path(lock.parent) else None
            if state is not None:
                yield _prepared_run(RunDirectory(lock.parent), state, int(entry.name))


def _prepared_run(run: RunDirectory, state: str, pid: int) -> ListedRun:
    try:
        run_id, name, steps = run.run_id, run.config.run.name, run.config.train.steps
    except (PenstockError, OSError):
        run_id, name, steps = "", "", 0  # the preparation has not written them yet
    return ListedRun(
        run_id=run_id,
        name=name,
        user=user_name(os.geteuid()),
        node="",
        directory=str(run.path),
        state=state,
        step=None,
        steps=steps or None,
        since_s=_start_s(pid),
        memory_bytes=0,
        endpoint="",
        cpus="",
        processes={"train": pid},
    )


def listing(runs: Iterable[ListedRun], width: int) -> Table | Text:
    """Returns the runs for a terminal of ``width`` columns: a table, or lines if a table is too
    wide.
    """
    shown = [run for run in runs if not run.state.startswith(NO_RUN)]
    rows = [_words_of(run) for run in shown]
    columns = zip(_HEADINGS[:-1], *(row[:-1] for row in rows), strict=True)
    narrow = sum(max(map(len, column)) + 1 for column in columns) + _DIRECTORY_COLUMNS > width
    if not shown:
        return Text("no run on this machine")
    if narrow:
        return Text("\n").join(Text(line) for row in rows for line in _block(row))
    table = Table(box=None, pad_edge=False)
    for heading in _HEADINGS[:-1]:
        table.add_column(heading, no_wrap=True)
    table.add_column(_HEADINGS[-1], overflow="fold")
    for row in rows:  # as texts: brackets in other users' names are no markup
        table.add_row(*map(Text, row))
    return table


def _words_of(run: ListedRun) -> list[str]:
    """Returns the cells of a run's row."""
    since = time.strftime("%F %R", time.localtime(run.since_s)) if run.since_s else ""
    steps = "" if run.steps is None else f"/{run.steps}"
    step = "" if run.step is None else f"{run.step}{steps}"
    memory = human_bytes(run.memory_bytes) if run.memory_bytes else ""
    words = (run.name, run.run_id, run.user, run.node, run.state, step, since, memory, run.cpus)
    return [printable(word) for word in (*words, run.directory)]


def _block(row: list[str]) -> list[str]:
    """Returns the lines of a run without a table."""
    name, run_id, user, node, state, step, since, memory, cpus, directory = row
    head = [name or "-", run_id or "-", *([f"node {node}"] if node else []), state]
    rest = [f"step {step}" if step else "", memory, f"user {user}"]
    rest += [f"since {since}" if since else "", f"CPUs {cpus}" if cpus else ""]
    lines = ["  ".join(head), f"  {', '.join(filter(None, rest))}"]
    return [*lines, f"  {directory}"] if directory else lines


def junk_lines(runs: Iterable[ListedRun]) -> list[str]:
    """Returns a line for each name in /dev/shm that is no segment."""
    junk = [run for run in runs if run.state.startswith(NO_RUN)]
    return [f"{run.directory} of {run.user} is {run.state}" for run in junk]


def to_dicts(runs: Iterable[ListedRun]) -> list[dict[str, Any]]:
    """Returns the runs for JSON."""
    return [asdict(run) for run in runs]


def _live_run(
    node: _Node, run: RunDirectory | None, run_id: str, entry: NodeSegments | None
) -> ListedRun:
    status = _status(node.directory) if run is not None else {}
    committed = None if entry is None else entry.committed
    return ListedRun(
        run_id=run_id,
        name="" if run is None else run.config.run.name,
        user=user_name(node.uid),
        node=node.name,
        directory=str(node.directory),
        state=status.get("state") or (run and transition_of(run.path)) or UNKNOWN,
        step=status.get("step", committed),
        steps=None if run is None else run.config.train.steps,
        since_s=_start_s(node.supervisor),
        memory_bytes=0 if entry is None else entry.num_bytes,
        endpoint=status.get("endpoint", ""),
        cpus=format_cpus(_pinned(node.processes.get("optimizerd"))),
        processes=dict(sorted(node.processes.items())),
    )


def _left(entry: NodeSegments) -> ListedRun:
    """Returns the memory of dead processes. The use of another user's memory is unknown."""
    known = entry.uid == os.geteuid() or os.geteuid() == 0
    return ListedRun(
        run_id=entry.run_id,
        name="",
        user=user_name(entry.uid),
        node=entry.node_name,
        directory="",
        state=LEFTOVER if known and not entry.in_use else UNKNOWN,
        step=entry.committed,
        steps=None,
        since_s=None,
        memory_bytes=entry.num_bytes,
        endpoint="",
        cpus="",
        processes={},
    )


def _junk(junk: Junk) -> ListedRun:
    """Returns a name that is no segment as a row of the list."""
    return ListedRun(
        run_id="",
        name="",
        user=user_name(junk.uid),
        node="",
        directory=junk.path,
        state=f"{NO_RUN}: a {junk.kind}",
        step=None,
        steps=None,
        since_s=None,
        memory_bytes=0,
        endpoint="",
        cpus="",
        processes={},
    )


def _nodes() -> list[_Node]:
    """Returns the supervisors of this machine with their processes."""
    nodes: dict[tuple[int, int], _Node] = {}
    for pid, uid, words in _launched():
        kind, options = words[0], dict(itertools.pairwise(words))
        config, parent = options.get("--config", ""), options.get("--parent-pid", "")
        supervisor = pid if kind == "node" else int(parent) if _PID.fullmatch(parent) else 0
        if not config or start_ticks(supervisor) is None:
            continue  # started by hand without a supervisor, or about to end
        directory = Path(config).parent
        # Any user can fake the command line of another user's run, so the key has the uid.
        node = nodes.setdefault(
            (supervisor, uid), _Node(directory=directory, supervisor=supervisor, uid=uid)
        )
        node.name = options.get("--node", node.name)
        device = options.get("--device")
        node.processes[kind if device is None else f"{kind}.{device}"] = pid
    for node in nodes.values():
        node.processes["node"] = node.supervisor
    return sorted(nodes.values(), key=lambda node: (str(node.directory), node.name))


def _launched() -> Iterator[tuple[int, int, list[str]]]:
    """Yields pid, user and arguments of each process of a supervisor, from its kind on."""
    module = LAUNCHER[-1]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            uid = entry.stat().st_uid
        except OSError:
            continue  # ended meanwhile, or hidden from this user
        if module in words[:-1]:
            yield int(entry.name), uid, words[words.index(module) + 1 :]


def _readable(node: _Node) -> RunDirectory | None:
    """Returns the run directory of a node of this user. Another user's path may be a FIFO or an
    endless file.
    """
    if node.uid != os.geteuid():
        return None
    run = RunDirectory(node.directory)
    try:
        return run if run.run_id and run.config else None
    except (PenstockError, OSError):
        return None


def _run_id(run: RunDirectory | None) -> str:
    return "" if run is None else run.run_id


def _guessed_run_id(node: _Node, segments: Iterable[NodeSegments]) -> str:
    """Returns the run id of the only segments of the node and user, or an empty text."""
    same = [e for e in segments if (e.node_name, e.uid) == (node.name, node.uid)]
    return same[0].run_id if len(same) == 1 else ""


def _status(directory: Path) -> dict[str, Any]:
    """Returns endpoint, phase and step from the run's scheduler, or nothing without an answer."""
    try:
        with ControlClient.for_run(directory, timeout_s=ASK_TIMEOUT_S) as client:
            status = client.status()
            return {"endpoint": client.address, "state": status.phase, "step": status.version}
    except (PenstockError, OSError):
        return {}  # the scheduler is starting or ending


def _start_s(pid: int) -> float | None:
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted_s + ticks / os.sysconf("SC_CLK_TCK")


def _pinned(pid: int | None) -> set[int]:
    """Returns the CPUs to which a process pins single threads."""
    cpus: set[int] = set()
    for entry in Path(f"/proc/{pid}/task").glob("*/status") if pid else ():
        try:
            text = entry.read_text()
        except OSError:
            continue  # the thread has ended
        allowed = parse_cpus(text.partition("Cpus_allowed_list:")[2].split("\n")[0].strip())
        cpus.update(allowed if len(allowed) == 1 else ())
    return cpus
