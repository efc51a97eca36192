"""The processes of a run, found by their command lines; signals reach them through pidfds, since a
number could be another's later.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.daemons.node.main import LAUNCHER
from penstock.host.errors import LostMemberError
from penstock.host.process_identity import parent_of, start_ticks
from penstock.protocol.run.names import preloader_name

STOP_TIMEOUT_S = 10.0
_LAUNCHER = LAUNCHER[-1]
_PRELOADER = "penstock.daemons.preload.main"


def command_lines() -> Iterator[tuple[int, list[str]]]:
    """Yields pid and words of every process that may be looked at."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # ended meanwhile, or hidden from this user
        yield int(entry.name), words


def members(run_dir: Path) -> dict[str, int]:
    """Returns name -> pid of a run's living processes but ``penstock train``: ``worker.0``,
    ``memoryd.a``, ``schedulerd``, ``preload-torch.a``.
    """
    found: dict[str, int] = {}
    preloaders: list[tuple[int, str]] = []
    config = str(run_dir / "resolved.yaml")
    for pid, words in command_lines():
        if _PRELOADER in words and "--kind" in words[:-1]:
            preloaders.append((pid, words[words.index("--kind") + 1]))
        elif _LAUNCHER in words[:-1] and config in words and start_ticks(pid) is not None:
            kind, *_ = rest = words[words.index(_LAUNCHER) + 1 :]
            options = dict(itertools.pairwise(rest))
            of = options.get("--device") or options.get("--node") or options.get("--tracker")
            name = kind if of is None else f"{kind}.{of}"
            if parent_of(pid) != found.get(name):  # else its child, which is about to start another
                found[name] = pid
    nodes = {pid: name.partition(".")[2] for name, pid in found.items() if name.startswith("node.")}
    for pid, kind in preloaders:
        node = nodes.get(parent_of(pid))
        if node is not None:
            found[preloader_name(kind, node)] = pid
    return found


def survivors(run_dir: Path) -> dict[int, str]:
    """Returns pid -> command line of Penstock's living processes that name something in a run's
    directory, but this one; not of those that look on, such as ``penstock watch`` and ``tail``.
    """
    return {
        pid: " ".join(words).strip()
        for pid, words in command_lines()
        if pid != os.getpid()
        and any(word.startswith("penstock.") for word in words)  # as they start each other
        and any(Path(word).is_relative_to(run_dir) for word in words)
        and start_ticks(pid) is not None
    }


def wait_until_stopped(pid: int) -> None:
    """Waits until no thread of a process that was sent SIGSTOP runs any more.

    Raises:
        LostMemberError: threads still run after :data:`STOP_TIMEOUT_S`.
        ProcessLookupError: it is gone.
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
