"""What the scheduler costs, from one node to many: messages, bytes, CPU, threads, memory, time.

    python -m bench.scale [--nodes 1 4 16 64] [--steps 30] [--processes 2] [--out FILE]

The scheduler is the real one, as a process, behind real gRPC; its members are stand-ins
(:mod:`bench.scale.stand_ins`), which answer at once. So the time of a step is what the scheduler
and the stand-ins add to it, on the cores of this machine together; CPU seconds are the scheduler's
alone.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.scale.invented import WORKERS, invented_run
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.credentials import Credentials
from penstock.protocol.security.token import token_path
from penstock.protocol.wire.control import ControlClient

DEADLINE_S = 300.0
IDLE_S = 5.0
"""For so long the run is paused: what heartbeats alone cost."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One row: a cluster of ``nodes`` nodes.

    ``begin_s``: from the start of the stand-ins' processes to the first step; ``begin_cpu_s``: the
    scheduler's CPU time in it. ``recovery_s``: from the loss of a worker to the next step.
    ``heartbeat_cores``: cores that the scheduler keeps busy while the run is paused.
    """

    nodes: int
    members: int
    plan_bytes: int
    begin_bytes: int
    all_begins_bytes: int
    begin_s: float
    begin_cpu_s: float
    step_ms: float
    step_cpu_ms: float
    step_messages: float
    recovery_s: float
    heartbeat_cores: float
    threads: int
    resident_mib: float


class Scheduler:
    """schedulerd as a process, and what the kernel says of it."""

    def __init__(self, run: RunDirectory) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self.access = Credentials(token_path(run.path))
        command = [sys.executable, "-m", "penstock.client.main", "schedulerd", "--config"]
        self.process = subprocess.Popen(
            [*command, str(run.path / "resolved.yaml"), "--port", str(port)],
            stderr=subprocess.DEVNULL,  # the stand-ins' end, one by one
        )

    def cpu_s(self) -> float:
        """Returns user and system time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def status(self, name: str) -> int:
        """Returns a number of ``/proc/PID/status``: ``Threads``, or ``VmHWM`` in KiB."""
        words = Path(f"/proc/{self.process.pid}/status").read_text().split()
        return int(words[words.index(f"{name}:") + 1])


class Crowd:
    """The stand-ins of all nodes, in a few processes."""

    def __init__(self, address: str, run: RunDirectory, num_nodes: int, processes: int) -> None:
        share = -(-num_nodes // processes)
        self.processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "bench.scale.stand_ins", address, str(run.path)),
                    *(str(first), str(min(first + share, num_nodes) - 1)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for first in range(0, num_nodes, share)
        ]

    def report(self) -> dict[str, Any]:
        """Returns the counts of all stand-ins together."""
        kinds = ("sent", "heard", "heard_bytes", "broken")
        total: dict[str, Any] = {kind: Counter() for kind in kinds}
        longest = 0
        for process in self.processes:
            self._tell(process, "report")
            assert process.stdout is not None
            counts = json.loads(process.stdout.readline())
            longest = max(longest, counts.pop("longest_begin"))
            for name, values in counts.items():
                total[name].update(values)
        return total | {"longest_begin": longest}

    def lose(self, member: str) -> None:
        """Ends the stream of a member of the first nodes."""
        self._tell(self.processes[0], f"lose {member}")

    def _tell(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()


@contextmanager
def cluster(path: Path, num_nodes: int, processes: int) -> Iterator[tuple[Scheduler, Crowd]]:
    """Yields a scheduler with its stand-ins; both end with the block."""
    run = invented_run(path, num_nodes)
    scheduler = Scheduler(run)
    wait(lambda: listens(scheduler.address), "scheduler")
    crowd = Crowd(scheduler.address, run, num_nodes, processes)
    try:
        yield scheduler, crowd
    finally:
        for process in (scheduler.process, *crowd.processes):
            process.kill()
            process.communicate()


def measure(path: Path, num_nodes: int, steps: int, processes: int) -> Growth:
    """Runs a cluster through its first epoch, ``steps`` steps, a pause and the loss of a worker."""
    with cluster(path, num_nodes, processes) as (scheduler, crowd):
        with ControlClient(scheduler.address, scheduler.access, timeout_s=30.0) as control:
            started, cpu_s = time.monotonic(), scheduler.cpu_s()
            wait(lambda: last_line(path)["step"] > 0, "first step")
            begin_s, begin_cpu_s = time.monotonic() - started, scheduler.cpu_s() - cpu_s
            begun = crowd.report()
            step = _steps(path, scheduler, crowd, steps)
            control.pause()
            wait(lambda: control.status().phase == "paused", "pause")
            cpu_s = scheduler.cpu_s()
            time.sleep(IDLE_S)
            heartbeat_cores = (scheduler.cpu_s() - cpu_s) / IDLE_S
            control.resume()
            recovery_s = _recovery(path, crowd)
            return Growth(
                nodes=num_nodes,
                members=num_nodes * (WORKERS + 3),
                plan_bytes=(path / "plan.json").stat().st_size,
                begin_bytes=begun["longest_begin"],
                all_begins_bytes=begun["heard_bytes"]["begin"],
                begin_s=begin_s,
                begin_cpu_s=begin_cpu_s,
                recovery_s=recovery_s,
                heartbeat_cores=heartbeat_cores,
                threads=scheduler.status("Threads"),
                resident_mib=scheduler.status("VmHWM") / 1024,
                **step,
            )


def _steps(path: Path, scheduler: Scheduler, crowd: Crowd, steps: int) -> dict[str, float]:
    before, first = crowd.report(), last_line(path)["step"]
    cpu_s, started = scheduler.cpu_s(), time.monotonic()
    wait(lambda: last_line(path)["step"] >= first + steps, f"{steps} steps")
    seconds, cpu_s = time.monotonic() - started, scheduler.cpu_s() - cpu_s
    done, after = last_line(path)["step"] - first, crowd.report()
    messages = sum(
        sum(after[way].values()) - sum(before[way].values()) for way in ("sent", "heard")
    )
    return {
        "step_ms": 1e3 * seconds / done,
        "step_cpu_ms": 1e3 * cpu_s / done,
        "step_messages": messages / done,
    }


def _recovery(path: Path, crowd: Crowd) -> float:
    """Returns seconds from the loss of a worker to the first step of the next epoch."""
    epoch, started = last_line(path)["epoch"], time.monotonic()
    crowd.lose("worker.0")
    wait(lambda: last_line(path)["epoch"] > epoch, "step after a loss")
    return time.monotonic() - started


def listens(address: str) -> bool:
    """Returns whether the port accepts connections."""
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def last_line(path: Path) -> dict[str, Any]:
    """Returns the last line of the run's metrics; a request for the status would load the
    scheduler.
    """
    try:
        with (path / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().splitlines()
            return dict(json.loads(lines[-1]))
    except (FileNotFoundError, IndexError, ValueError):
        return {"step": 0, "epoch": 0}


def wait(condition: Callable[[], bool], what: str) -> None:
    """Asks every 10 ms until ``condition``.

    Raises:
        SystemExit: it did not come about within :data:`DEADLINE_S`.
    """
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"no {what} within {DEADLINE_S:g} s")
        time.sleep(0.01)


def table(rows: list[Growth]) -> str:
    """Returns the rows as Markdown."""
    names = list(asdict(rows[0]))
    lines = ["| " + " | ".join(names) + " |", "|" + " ---: |" * len(names)]
    lines += [
        "| " + " | ".join(f"{v:.4g}" if isinstance(v, float) else f"{v:,}" for v in cells) + " |"
        for cells in (asdict(row).values() for row in rows)
    ]
    return "\n".join(lines)


def main() -> None:
    """Parses arguments, measures, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for num_nodes in arguments.nodes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            rows.append(measure(path, num_nodes, arguments.steps, arguments.processes))
            sys.stdout.write(f"{rows[-1]}\n")
            sys.stdout.flush()
    sys.stdout.write(table(rows) + "\n")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
