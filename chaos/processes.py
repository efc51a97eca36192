"""Processes of a run: ``penstock train`` as a user starts it, and the processes that it starts.

Command lines identify the processes. Signals go through pidfds, since a pid may be reused.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.daemons.node.main import LAUNCHER
from penstock.daemons.preload.fork_request import PYTHON_MODULE
from penstock.host.errors import LostMemberError
from penstock.host.process_identity import parent_of, start_ticks
from penstock.protocol.run.names import preloader_name

STOP_TIMEOUT_S = 10.0
_LAUNCHER = LAUNCHER[-1]
_PRELOADER = "penstock.daemons.preload.main"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCommand:
    """A command line of ``penstock train``; ``output`` collects the output of all its starts."""

    config: Path
    settings: tuple[str, ...]
    run_dir: Path
    output: Path

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the command in a new session, which Ctrl-C in this terminal does not reach."""
        overrides = [word for setting in self.settings for word in ("--set", setting)]
        words = ["train", str(self.config), "--run-dir", str(self.run_dir), *overrides]
        with self.output.open("ab") as file:
            return subprocess.Popen(
                [*PYTHON_MODULE, "penstock.client.main", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        """Returns the output of all starts."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""


def command_lines() -> Iterator[tuple[int, list[str]]]:
    """Yields pid and arguments of every process that this user may read."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # ended meanwhile, or hidden from this user
        yield int(entry.name), words


def members(run_dir: Path) -> dict[str, int]:
    """Returns the pids of a run's live processes by name, without ``penstock train``.

    Names are such as ``worker.0``, ``memoryd.a``, ``schedulerd``, ``preload-torch.a``.
    """
    pids: dict[str, int] = {}
    preloaders: list[tuple[int, str]] = []
    config = str(run_dir / "resolved.yaml")
    for pid, words in command_lines():
        if _PRELOADER in words and "--kind" in words[:-1]:
            preloaders.append((pid, words[words.index("--kind") + 1]))
        elif _LAUNCHER in words[:-1] and config in words and start_ticks(pid) is not None:
            kind, *_ = rest = words[words.index(_LAUNCHER) + 1 :]
            options = dict(itertools.pairwise(rest))
            part = options.get("--device") or options.get("--node") or options.get("--tracker")
            name = kind if part is None else f"{kind}.{part}"
            # A child with the same name is a fork of that process, about to become another one.
            if parent_of(pid) != pids.get(name):
                pids[name] = pid
    nodes = {pid: name.partition(".")[2] for name, pid in pids.items() if name.startswith("node.")}
    for pid, kind in preloaders:
        node = nodes.get(parent_of(pid))
        if node is not None:
            pids[preloader_name(kind, node)] = pid
    return pids


def survivors(run_dir: Path) -> dict[int, str]:
    """Returns the command lines of live processes of a run, by pid, without this process.

    Processes of a run name a module of Penstock and a path in the run's directory; ``penstock
    watch`` and ``tail`` do not.
    """
    return {
        pid: " ".join(words).strip()
        for pid, words in command_lines()
        if pid != os.getpid()
        and any(word.startswith("penstock.") for word in words)
        and any(Path(word).is_relative_to(run_dir) for word in words)
        and start_ticks(pid) is not None
    }


def wait_until_stopped(pid: int) -> None:
    """Waits until SIGSTOP has stopped all threads of a process.

    Raises:
        LostMemberError: threads still run after :data:`STOP_TIMEOUT_S`.
        ProcessLookupError: the process has ended.
    """
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            states = [
                (task / "stat").read_text().rpartition(")")[2].split()[0]
                for task in Path(f"/proc/{pid}/task").iterdir()
            ]
        except (FileNotFoundError, ProcessLookupError):
            raise ProcessLookupError(pid) from None
        if all(state in "TZX" for state in states):
            return
    raise LostMemberError(f"process {pid} did not stop in {STOP_TIMEOUT_S:g} s: {states}")
